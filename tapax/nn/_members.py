"""`members`: split the captured arrays of an ensemble by member."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from rich.table import Table

from tapax._jax import Value, spans_processes
from tapax._results import Taps
from tapax._results.tables import render, type_of
from tapax._sites import Site, SiteError, wrong_type
from tapax.nn._arguments import check_members
from tapax.nn._predict import only_number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of the values of each member.

    They leave out values that a branch or a loop did not compute, and use the magnitudes of complex
    numbers. Every attribute except `disagreement` has one number for each member.

    Attributes:
        mean: The mean.
        rms: The root mean square.
        min: The smallest number.
        max: The largest number.
        nonfinite: How many numbers are NaN or infinite.
        disagreement: One number for all members: the rms of their deviation from the mean member,
            relative to the rms of the values. It is 0 if all members agree, and 1 if they have
            nothing in common.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(2 * x, "h")
        >>> _, taps = tapax.capture(f)(jnp.array([1.0, 2.0, -1.0, -2.0]))
        >>> statistics = tapax.nn.members(taps, num_members=2).statistics["h"]
        >>> statistics.mean.tolist(), float(statistics.disagreement)
        ([3.0, -3.0], 1.0)
    """

    mean: jax.Array
    rms: jax.Array
    min: jax.Array
    max: jax.Array
    nonfinite: jax.Array
    disagreement: jax.Array


@dataclasses.dataclass(frozen=True)
class Members:
    """Captured values and gradients with a leading axis of members, `[E, loops..., B, ...]`.

    `tapax.nn.members` returns it. It prints as a table.

    Attributes:
        values: The values, by name.
        grads: The gradients, by name.
        valid: Masks and counts by name, as in `Taps`.
        num_members: The number of members.
        shared: The names of captured arrays that have no rows of members, such as a loss or a step
            counter. `values` and `grads` do not contain them.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> f = lambda x: jnp.sum(tapax.sow(x, "h") ** 2)
        >>> _, taps = tapax.capture(jax.grad(f))(jnp.array([1.0, 2.0, -1.0, -2.0]))
        >>> members = tapax.nn.members(taps, num_members=2)
        >>> members.values["h"].tolist()
        [[1.0, 2.0], [-1.0, -2.0]]
        >>> members.statistics["h"].max.tolist(), members.grad_statistics["h"].max.tolist()
        ([2.0, -1.0], [4.0, -2.0])
    """

    values: dict[str, jax.Array]
    grads: dict[str, jax.Array]
    valid: dict[str, jax.Array]
    num_members: int
    shared: tuple[str, ...] = ()

    @property
    def statistics(self) -> dict[str, Statistics]:
        """The `Statistics` of every value, by name."""
        return self._statistics(self.values)

    @property
    def grad_statistics(self) -> dict[str, Statistics]:
        """The `Statistics` of every gradient, by name."""
        return self._statistics(self.grads)

    def _statistics(self, found: dict[str, jax.Array]) -> dict[str, Statistics]:
        # A count of iterations is not a mask: the array contains the last iteration.
        masks = {name: valid for name, valid in self.valid.items() if valid.dtype == bool}
        return {
            name: _compute_statistics(x, masks.get(name))
            for name, x in found.items()
            if jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool
        }

    def __repr__(self) -> str:
        title = (
            f"{len(self.values)} values, {len(self.grads)} gradients, {self.num_members} members"
        )
        table = Table("site", "type", "value rms", "disagree", "grad rms", "disagree", title=title)
        # Statistics of an array that spans processes would need communication.
        both = [
            self._statistics({name: x for name, x in found.items() if not spans_processes(x)})
            for found in (self.values, self.grads)
        ]
        for name in dict.fromkeys([*self.values, *self.grads]):
            x = self.values.get(name, self.grads.get(name))
            table.add_row(
                name, type_of(x), *(cell for part in both for cell in _make_cells(part, name))
            )
        if self.shared:
            table.caption = f"shared by all members: {', '.join(self.shared)}"
        return render(table)


jax.tree_util.register_dataclass(
    Members, data_fields=["values", "grads", "valid"], meta_fields=["num_members", "shared"]
)


def _make_cells(statistics: dict[str, Statistics], name: str) -> tuple[str, str]:
    if name not in statistics:
        return "", ""
    found = statistics[name]
    if isinstance(found.rms, Tracer):
        return "traced", "traced"
    return " ".join(f"{x:.3g}" for x in found.rms.tolist()), f"{float(found.disagreement):.2g}"


def members(taps: Taps, num_members: int | None = None) -> Members:
    """Split the captured arrays of an ensemble by member.

    The rows of a batch are on the first axis of a value, after the axes of loops, maps and meshes,
    which remain in place. The BatchEnsemble layers among the sites tell the numbers of members and
    rows. A value with another number of rows, such as a loss or an embedding of positions, is left
    out, and `shared` names it.

    Args:
        taps: The taps of a capture.
        num_members: The number of members. It is needed only without BatchEnsemble layers.

    Returns:
        A `Members`.

    Raises:
        TypeError: If `taps` are not the taps of a capture.
        ValueError: If `num_members` is not given, and the sites contain no BatchEnsemble layers or
            layers with different numbers of members.
        SiteError: If a reducer has reduced a captured array over the rows of all members.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> from flax import nnx
        >>> from tapax import nn
        >>> model = nn.batch_ensemble(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), 4, rngs=0)
        >>> loss = lambda model, x: jnp.mean(model(x) ** 2)
        >>> x = jax.random.normal(jax.random.key(0), (5, 3))
        >>> _, taps = tapax.capture(nnx.grad(loss))(model, nn.tile(x, 4))
        >>> by_member = nn.members(taps)
        >>> by_member.values["BatchEnsembleLinear"].shape
        (4, 5, 2)
        >>> by_member.grad_statistics["BatchEnsembleLinear"].rms.shape
        (4,)
    """
    if not isinstance(taps, Taps):
        raise wrong_type("`taps` must be the taps of a capture, but is", taps)
    sites = {site.name: site for site in taps.sites}
    for found, reducer in ((taps.values, "reducer"), (taps.grads, "grad_reducer")):
        for name in found:
            if getattr(sites.get(name), reducer, None) is not None:
                raise SiteError(
                    f"The site {name!r} was reduced by {getattr(sites[name], reducer)} over the "
                    "rows of all members. Capture it without a reducer, and return only the "
                    "statistics of tapax.nn.members(taps) from the jitted function that captures."
                )
    if num_members is None:
        layers = {site.members for site in taps.sites if site.members is not None}
        number = only_number(layers, "taps that have {} among the sites")
    else:
        number = check_members(num_members)
    batches = _find_batches(taps, sites)
    shared: list[str] = []

    def each(found: dict[str, Any]) -> dict[str, jax.Array]:
        ordered = sorted(found, key=list(sites).index)
        split = {name: _split(found[name], sites[name], number, batches) for name in ordered}
        shared.extend(name for name, x in split.items() if x is None and name not in shared)
        return {name: x for name, x in split.items() if x is not None}

    return Members(each(taps.values), each(taps.grads), taps.valid, number, tuple(shared))


def _find_row(x: Value, site: Site) -> int | None:
    """Return the axis of the rows: the first axis of a value, after those of loops and maps."""
    row = x.ndim - site.rank
    return row if site.rank and row >= 0 else None


def _find_batches(taps: Taps, sites: dict[str, Site]) -> set[int]:
    """Find the numbers of rows that BatchEnsemble layers returned."""
    rows = set()
    for name, x in (*taps.values.items(), *taps.grads.items()):
        row = _find_row(x, sites[name])
        if sites[name].members is not None and row is not None:
            rows.add(x.shape[row])
    return rows


def _split(x: Value, site: Site, members: int, batches: set[int]) -> jax.Array | None:
    """Split `[loops..., E * B, ...]` to `[E, loops..., B, ...]`; None without rows of members."""
    row = _find_row(x, site)
    if row is None or x.shape[row] % members or (batches and x.shape[row] not in batches):
        return None
    ahead, rows, after = x.shape[:row], x.shape[row], x.shape[row + 1 :]
    return jnp.moveaxis(x.reshape(*ahead, members, rows // members, *after), row, 0)


@jax.jit
def _compute_statistics(x: jax.Array, mask: jax.Array | None) -> Statistics:
    x = jnp.abs(x) if jnp.iscomplexobj(x) else x
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    real = jnp.ones((), bool) if mask is None else mask
    # The mask has the leading axes of the value, after that of the members.
    real = real.reshape(1, *real.shape, *(1,) * (x.ndim - 1 - real.ndim))
    axes = tuple(range(1, x.ndim))
    square = jnp.mean(x**2, axes, where=real)
    apart = jnp.mean(jnp.mean((x - x.mean(0)) ** 2, 0), where=real[0])
    size = jnp.mean(square)
    return Statistics(
        mean=jnp.mean(x, axes, where=real),
        rms=jnp.sqrt(square),
        min=jnp.min(x, axes, initial=jnp.inf, where=real),
        max=jnp.max(x, axes, initial=-jnp.inf, where=real),
        nonfinite=jnp.sum(~jnp.isfinite(x), axes, where=real),
        disagreement=jnp.where(size == 0, 0, jnp.sqrt(apart / jnp.where(size == 0, 1, size))),
    )
