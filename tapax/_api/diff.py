"""`diff`: find where two captures differ, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from tapax._api.renaming import Rename, rename_names
from tapax._jax import Value
from tapax._results import Difference, SiteDict, SiteDifference, Taps
from tapax._results.comparison import Tolerance, coarser_type, compare_arrays
from tapax._results.host_arrays import check_readable, is_key
from tapax._results.loop_order import Occurrence, find_first, loop_axes
from tapax._results.tables import type_of
from tapax._sites import Site, SiteError, wrong_type

ULPS = 4.0
"""The tolerance in units in the last place, unless another is given."""

Arrays: TypeAlias = "Mapping[str, Any]"
Captured: TypeAlias = "Taps | Arrays | Sequence[Arrays]"


def diff(
    a: Captured,
    b: Captured,
    rename: Rename | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    *,
    ulps: float | None = None,
) -> Difference:
    """Compare two captures site by site: those of two models, versions, dtypes or frameworks.

    Two numbers are equal if they differ by at most `atol + rtol * scale + ulps * unit`. The *scale*
    is the larger magnitude of the two, or the mean magnitude of the arrays if that is larger: the
    rounding error of a sum is proportional to its terms, even if they cancel. The *unit* is the
    unit in the last place at that scale, in the coarser of the two dtypes: for bfloat16 and float32
    it is the unit of bfloat16, 2**-7 between 1 and 2. The default tolerance is 4 units; if you pass
    `rtol`, `atol` or `ulps`, the others are zero. Integers and booleans must be equal. NaN equals
    NaN at the same index.

    Args:
        a: The taps of a capture; a dict of arrays by name (NumPy arrays, JAX arrays or PyTorch
            tensors); or a pair of such dicts, the values and the gradients.
        b: The capture to compare with `a`, in any of these forms.
        rename: Gives the sites of `b` their names in `a`: a dict `{name in b: name in a}`, a list
            of such pairs, or a function from the name in `b` to the name in `a`. Names in a dict or
            a list may be globs, such as `("model.layers.*.mlp", "GPT/blocks/*/mlp")`: each wildcard
            of the second takes the text that the corresponding wildcard of the first matches. In a
            glob without slashes, dots separate the segments, as in PyTorch. Names that `rename`
            does not match, or for which the function returns None, stay as they are.
        rtol: The tolerance relative to the scale.
        atol: The absolute tolerance.
        ulps: The tolerance in units in the last place of the coarser dtype.

    Returns:
        A `Difference`. `first` is the first site whose values differ, in the order of the program;
        `first_grad` is the first site whose gradients differ, in the order of the backward pass. It
        prints as a table of all sites, and `plot` draws it. Arrays with different shapes differ; a
        gradient that only one of the two captures has is a difference, too. Neighbouring sites in
        loops of the same length count as sites of one loop: all of them run in one iteration before
        any of them runs in the next.

    Raises:
        SiteError: If the captures have no site in common, or if one has only the values of the
            common sites and the other only their gradients; if `rename` matches no site of `b`, or
            gives two sites one name.
        TypeError: If `a` or `b` contains something that is not an array, or `rename` is not a dict,
            a function or a list of pairs.
        ValueError: If an array spans several processes, a tolerance is negative, or the two globs
            of a pair in `rename` have different numbers of wildcards.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, tapax
        >>> def loss(weights, x):
        ...     for i, w in enumerate(weights):
        ...         x = tapax.sow(jnp.tanh(x * w), f"net/layers/{i}")
        ...     return jnp.sum(x)
        >>> step = tapax.capture(jax.jit(jax.grad(loss)))
        >>> weights, x = jnp.linspace(0.5, 1.5, 6), jnp.array([0.5, -1.0, 2.0])
        >>> _, a = step(weights, x)
        >>> _, b = step(weights.at[3].set(2.0), x)
        >>> difference = tapax.diff(a, b)
        >>> difference.first.name, difference.first_grad.name
        ('net/layers/3', 'net/layers/4')

        Compare a port with the original:

        >>> port = {"layers.0": np.float32([1, 2]), "layers.1": np.float32([3, 5])}
        >>> ours = {"Net/layers/0": np.float32([1, 2]), "Net/layers/1": np.float32([3, 4])}
        >>> difference = tapax.diff(ours, port, rename={"layers.*": "Net/layers/*"}, rtol=1e-3)
        >>> difference.first.name, difference.first.index, difference.first.relative
        ('Net/layers/1', (1,), 0.2)
    """
    tolerance = _tolerance(rtol, atol, ulps)
    one, other = _Side.of(a, "a"), _Side.of(b, "b")
    names = rename_names(other.names, rename)
    other = other.renamed(names)
    common = one.names.keys() & other.names.keys()
    if not common:
        raise SiteError(
            f"The captures have no site in common: `a` has {_listed(one.names)}, and `b` has "
            f"{_listed(other.names)}{' after `rename`' if rename is not None else ''}. Pass "
            "`rename`, which gives the sites of `b` their names in `a`."
        )
    before = {new: old for old, new in names.items()}
    values = _compare_all("value", common, one, other, before, tolerance)
    grads = _compare_all("grad", common, one, other, before, tolerance)
    if not values and not grads:
        raise SiteError(
            f"The captures have {_listed(sorted(common))} in common, but one contains only values "
            "and the other only gradients, so there is nothing to compare. Capture both with the "
            "same `values` and `grads`."
        )
    return Difference(
        SiteDict({name: found.item for name, found in values.items()}),
        SiteDict({name: found.item for name, found in grads.items()}),
        find_first([*values.values()]),
        find_first([*grads.values()][::-1], backward=True),
        tuple(name for name in one.names if name not in other.names),
        tuple(before[name] for name in other.names if name not in one.names),
        tolerance,
    )


def _tolerance(rtol: float | None, atol: float | None, ulps: float | None) -> Tolerance:
    given = {"rtol": rtol, "atol": atol, "ulps": ulps}
    for name, x in given.items():
        if x is not None and not x >= 0:
            raise ValueError(f"`{name}` must be zero or more, but is {x!r}.")
    if all(x is None for x in given.values()):
        return Tolerance(ulps=ULPS)
    return Tolerance(**{name: float(x or 0) for name, x in given.items()})


def _listed(names: Sequence[str] | dict[str, None]) -> str:
    shown = ", ".join(map(repr, list(names)[:3]))
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "none"


@dataclasses.dataclass(frozen=True)
class _Side:
    """The arrays of one capture. `sites` is empty for a dict of arrays."""

    values: Arrays
    grads: Arrays
    valid: Arrays
    sites: Mapping[str, Site]
    argument: str

    @classmethod
    def of(cls, given: Any, argument: str) -> _Side:
        if isinstance(given, Taps):
            sites = {site.name: site for site in given.sites}
            return cls(given.values, given.grads, given.valid, sites, argument)
        pair = given if isinstance(given, (tuple, list)) else (given, {})
        if len(pair) != 2 or not all(isinstance(part, Mapping) for part in pair):
            raise wrong_type(
                f"`{argument}` must be the taps of a capture, a dict of arrays, or a pair of dicts "
                "with values and gradients, but is",
                given,
            )
        for name in (*pair[0], *pair[1]):
            if not isinstance(name, str):
                raise wrong_type(f"`{argument}` must have strings as its keys, but has", name)
        return cls(pair[0], pair[1], {}, {}, argument)

    @property
    def names(self) -> dict[str, None]:
        return dict.fromkeys([*self.values, *self.grads])

    def arrays(self, kind: str) -> Arrays:
        return self.grads if kind == "grad" else self.values

    def renamed(self, names: Mapping[str, str]) -> _Side:
        values, grads, valid, sites = (
            {names[name]: x for name, x in arrays.items() if name in names}
            for arrays in (self.values, self.grads, self.valid, self.sites)
        )
        return dataclasses.replace(self, values=values, grads=grads, valid=valid, sites=sites)

    def array(self, kind: str, name: str) -> np.ndarray | None:
        if name not in self.arrays(kind):
            return None
        what = "gradient" if kind == "grad" else "value"
        return _on_host(self.arrays(kind)[name], f"The {what} of {name!r} in `{self.argument}`")


def _compare_all(
    kind: str,
    common: AbstractSet[str],
    a: _Side,
    b: _Side,
    before: Mapping[str, str],
    tolerance: Tolerance,
) -> dict[str, Occurrence]:
    """Compare all arrays of a kind; return how each differs, with the loops around its site."""
    if not a.arrays(kind) or not b.arrays(kind):  # one capture did not select any
        return {}
    # A dict of arrays may be in any order; taps are in the order of the program.
    sides = (a, b) if a.sites or not b.sites else (b, a)
    order = dict.fromkeys(name for side in sides for name in side.arrays(kind) if name in common)
    # A missing gradient was cut off. Other missing arrays may simply not have been selected.
    if kind == "value" or not (a.sites and b.sites):
        order = [name for name in order if name in a.arrays(kind) and name in b.arrays(kind)]
    return {name: _compare_site(kind, name, a, b, before[name], tolerance) for name in order}


def _compare_site(
    kind: str, name: str, a: _Side, b: _Side, other_name: str, tolerance: Tolerance
) -> Occurrence:
    described = a if name in a.sites else b
    site = described.sites.get(name, Site(name))
    given = a.arrays(kind).get(name), b.arrays(kind).get(name)
    arrays = a.array(kind, name), b.array(kind, name)
    types = _type_of(given[0], arrays[0]), _type_of(given[1], arrays[1])
    reason = _reason(kind, name, a, b, arrays)
    if reason:
        found = SiteDifference(name, other_name, kind, types, True, reason)
        return Occurrence(found, site.loops, (None,) * len(site.loops))
    x, y = arrays
    assert x is not None and y is not None
    ran = described.valid.get(name)
    lead = max(0, np.ndim(described.values.get(name, x)) - len(site.shape)) if site.shape else 0
    axes = loop_axes(site, x.shape, None if ran is None else np.asarray(ran), lead)
    compared = compare_arrays(x, y, tolerance, [axis for axis in axes if axis is not None])
    iterations = _first_iteration(axes, compared.differs, backward=kind == "grad")
    found = SiteDifference(
        name,
        other_name,
        kind,
        types,
        bool(compared.differs.any()),
        dtype=str(coarser_type(x.dtype, y.dtype)),
        absolute=compared.absolute,
        relative=compared.relative,
        ulps=compared.ulps,
        index=compared.index,
        iteration=tuple(i for i in iterations or () if i is not None),
        ulps_by_iteration=compared.ulps_by_iteration,
        differs_by_iteration=compared.differs,
    )
    return Occurrence(found, site.loops, iterations)


def _reason(
    kind: str, name: str, a: _Side, b: _Side, arrays: tuple[np.ndarray | None, np.ndarray | None]
) -> str:
    """Return the reason why two arrays cannot be compared; an empty string if they can."""
    x, y = arrays
    if x is None or y is None:
        return f"`{(a if x is None else b).argument}` has no gradient"
    if is_key(a.arrays(kind)[name]) != is_key(b.arrays(kind)[name]):
        return "only one of them contains random keys"
    if x.shape != y.shape:
        return "the shapes differ"
    ran = [
        _on_host(side.valid[name], f"The mask of {name!r}") for side in (a, b) if name in side.valid
    ]
    if kind == "value" and len(ran) == 2 and not np.array_equal(ran[0], ran[1]):
        if ran[0].dtype != bool and ran[0].ndim == ran[1].ndim == 0:
            return f"it ran {ran[0]} times in `a` and {ran[1]} times in `b`"
        return "it ran in different iterations or branches"
    return ""


def _first_iteration(
    axes: Sequence[int | None], differs: np.ndarray, backward: bool
) -> tuple[int | None, ...] | None:
    """Find the first iteration of each loop that differs; return None if all are equal."""
    if not differs.any():
        return None
    first = iter(np.argwhere(differs)[-1 if backward else 0])
    return tuple(None if axis is None else int(next(first)) for axis in axes)


def _type_of(given: Any, x: np.ndarray | None) -> str:
    return "" if x is None else type_of(given if is_key(given) else x)


def _on_host(given: Value, what: str) -> np.ndarray:
    """Convert a JAX array, a PyTorch tensor, or anything else that NumPy accepts."""
    check_readable(given, what, "compared")
    if is_key(given):
        return np.asarray(jax.random.key_data(given))
    if hasattr(given, "detach"):
        given = _from_torch(given)
    try:
        x = np.asarray(given)
    except (TypeError, ValueError):
        raise wrong_type(f"{what} must be an array, but is", given) from None
    if not (jnp.issubdtype(x.dtype, np.number) or x.dtype == bool):
        raise wrong_type(f"{what} must be an array of numbers, but is", given)
    return x


def _from_torch(tensor: Any) -> Any:
    """Convert a PyTorch tensor, even if NumPy does not have its dtype."""
    tensor = tensor.detach().cpu()
    name = str(getattr(tensor, "dtype", "")).rpartition(".")[2]
    if name == "bfloat16" or name.startswith("float8"):
        return tensor.float().numpy().astype(jnp.dtype(name))
    return tensor.numpy()
