"""Patching: find the values that carry the difference between a clean and a corrupt input."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tapax._api.capture import capture
from tapax._api.cut import prefix, suffix
from tapax._api.edit import edit
from tapax._api.gradients import grad
from tapax._jax import Function, PyTree, Value
from tapax._results import Taps
from tapax._sites import SiteError, check
from tapax.attribute._compilation import arguments, check_alike, check_array, compile_method
from tapax.attribute._visits import Visit, axis_of, drop_steps, find_visits


def activation_patching(
    fn: Callable[..., Any],
    clean: PyTree,
    corrupt: PyTree,
    sites: Any,
    positions: Any = None,
    *,
    axis: int = -2,
    batch_size: int | None = None,
) -> jax.Array:
    """Replace values of the corrupt run by clean values, one at a time, and return the metrics.

    It replaces one position of one site at a time. The sweep is one program: it makes both runs
    once, and then runs only the rest of `fn` from each site on.

    Meng et al., Locating and Editing Factual Associations in GPT, 2022 (arXiv:2202.05262);
    Heimersheim and Nanda, How to use and interpret activation patching, 2024 (arXiv:2404.15255).

    Args:
        fn: A function or a model that returns a metric: a number, or any array.
        clean: The argument of `fn` in the clean run, or a tuple of its arguments.
        corrupt: The argument of `fn` in the corrupt run, or a tuple of its arguments.
        sites: Selects the sites to patch.
        positions: Indices along `axis` to patch one at a time; None patches whole values. They may
            be traced: a position that is out of range then gives NaN.
        axis: The axis of the positions in a value, without the axes of loops.
        batch_size: How many positions to run at a time, if memory is short; all of them by default.

    Returns:
        An array `[sites, positions, *metric]`, or `[sites, *metric]` if `positions` is None.

    Raises:
        TypeError: If `fn` does not return one array, or `positions` are not integers.
        ValueError: If `clean` and `corrupt` differ in structure or shape.
        SiteError: If `sites` picks no site, or a position is out of range.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: (jnp.array([1.0, 3.0]) * tapax.sow(x * 2, "h")).sum()
        >>> clean, corrupt = jnp.array([0.5, 1.0]), jnp.array([0.0, 0.0])
        >>> patch = tapax.attribute.activation_patching
        >>> patch(f, clean, corrupt, ["h"], [0, 1], axis=-1).tolist()
        [[1.0, 6.0]]
    """
    runs = _Runs.make(clean, corrupt, positions, axis, batch_size)
    return compile_method(_patch_activations, fn, check(sites, "sites"))(runs)


def _patch_activations(fn: Function, sites: Any, runs: _Runs) -> jax.Array:
    _, clean_taps, corrupt_taps = runs.capture(fn, drop_steps(sites))
    made = []
    for visit in find_visits(sites, corrupt_taps):
        rest = suffix(fn, visit.at)
        patches = _Patches(runs, visit, clean_taps, corrupt_taps)
        made.append(patches.sweep(lambda value, rest=rest: rest(value, *runs.corrupt)))
    return jnp.stack(made)


def attribution_patching(
    fn: Callable[..., Any],
    clean: PyTree,
    corrupt: PyTree,
    sites: Any,
    positions: Any = None,
    *,
    axis: int = -2,
) -> jax.Array:
    """Estimate `activation_patching` linearly, from two runs and one backward pass.

    The estimate is the metric of the corrupt run, plus the gradient of that run times the
    difference of the values. If the metric is an array, it takes a backward pass for each element.

    Nanda, Attribution Patching: Activation Patching At Industrial Scale, 2023; Syed et al.,
    Attribution Patching Outperforms Automated Circuit Discovery, 2023 (arXiv:2310.10348).

    Args:
        fn: A function or a model that returns a metric: a number, or any array.
        clean: The argument of `fn` in the clean run, or a tuple of its arguments.
        corrupt: The argument of `fn` in the corrupt run, or a tuple of its arguments.
        sites: Selects the sites to patch.
        positions: Indices along `axis` to patch one at a time; None patches whole values.
        axis: The axis of the positions in a value, without the axes of loops.

    Returns:
        An array `[sites, positions, *metric]`, or `[sites, *metric]` if `positions` is None.

    Raises:
        TypeError: If `fn` does not return one array, or `positions` are not integers.
        ValueError: If `clean` and `corrupt` differ in structure or shape.
        SiteError: If `sites` picks no site, a site has no gradient, or a position is out of range.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: (tapax.sow(x * 2, "h") ** 2).sum()
        >>> clean, corrupt = jnp.array([0.5, 1.0]), jnp.array([0.25, 1.0])
        >>> estimate = tapax.attribute.attribution_patching
        >>> estimate(f, clean, corrupt, ["h"], [0, 1], axis=-1).tolist()  # exact: 5.0, 4.25
        [[4.75, 4.25]]
    """
    runs = _Runs.make(clean, corrupt, positions, axis)
    return compile_method(_estimate_patches, fn, check(sites, "sites"))(runs)


def _estimate_patches(fn: Function, sites: Any, runs: _Runs) -> jax.Array:
    metric, clean_taps, corrupt_taps = runs.capture(fn, drop_steps(sites))
    loss = grad(lambda weights, *args: jnp.sum(weights * fn(*args)), at=drop_steps(sites))
    if metric.ndim == 0:
        grads = jax.tree.map(lambda g: g[None], loss(jnp.ones_like(metric), *runs.corrupt))
    else:
        units = jnp.eye(metric.size, dtype=metric.dtype).reshape(-1, *metric.shape)
        grads = jax.vmap(lambda weights: loss(weights, *runs.corrupt))(units)
    made = []
    for visit in find_visits(sites, corrupt_taps):
        if visit.site.name not in grads:
            raise SiteError(
                f"There is no gradient with respect to {visit.where}: it cannot be differentiated, "
                "or the metric does not depend on it. Use activation_patching."
            )
        patches = _Patches(runs, visit, clean_taps, corrupt_taps)
        slope = grads[visit.site.name]
        slope = slope if visit.step is None else slope[:, visit.step]
        effect = slope * (patches.clean - patches.corrupt)
        if patches.at is None:
            total = effect.sum(range(1, effect.ndim))
        else:
            along = effect.sum([i for i in range(1, effect.ndim) if i != patches.axis + 1])
            total = patches.mask_invalid(along[:, patches.at].T)
        made.append(metric + total.reshape(*total.shape[:-1], *metric.shape))
    return jnp.stack(made)


def path_patching(
    fn: Callable[..., Any],
    clean: PyTree,
    corrupt: PyTree,
    sender: Any,
    receivers: Any,
    positions: Any = None,
    *,
    frozen: Value = None,
    axis: int = -2,
    batch_size: int | None = None,
) -> jax.Array:
    """Let only the receivers see the clean value of a sender, and return the metric.

    First it computes each receiver with the clean value of the sender, and with the corrupt values
    of the `frozen` sites and of the other receivers. Then it returns the metric of the corrupt run
    with these values of the receivers. It takes one sender and one position at a time.

    Wang et al., Interpretability in the Wild, 2022 (arXiv:2211.00593); Goldowsky-Dill et al.,
    Localizing Model Behavior with Path Patching, 2023 (arXiv:2304.05969).

    Args:
        fn: A function or a model that returns a metric: a number, or any array.
        clean: The argument of `fn` in the clean run, or a tuple of its arguments.
        corrupt: The argument of `fn` in the corrupt run, or a tuple of its arguments.
        sender: Selects the sites at which paths start. A sender that runs after the receivers
            changes nothing.
        receivers: Selects the sites at which paths end.
        positions: Indices along `axis` of the sender to patch one at a time; None patches whole
            values.
        frozen: Selects the components that a path must not cross: all other heads for direct paths
            between attention heads, all heads and MLPs for a path through the residual stream. None
            allows every path.
        axis: The axis of the positions in a value, without the axes of loops.
        batch_size: How many positions to run at a time, if memory is short; all of them by default.

    Returns:
        An array `[senders, positions, *metric]`, or `[senders, *metric]` if `positions` is None.

    Raises:
        TypeError: If `fn` does not return one array, or `positions` are not integers.
        ValueError: If `clean` and `corrupt` differ in structure or shape.
        SiteError: If a selection picks no site, a site is both sender and receiver, or a position
            is out of range.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> def f(x):
        ...     a = tapax.sow(x, "a")
        ...     b = tapax.sow(2 * a, "b")
        ...     return (tapax.sow(a + b, "c") + a).sum()
        >>> clean, corrupt = jnp.array([0.5]), jnp.array([0.0])
        >>> tapax.attribute.path_patching(f, clean, corrupt, "a", "c").tolist()
        [1.5]
        >>> tapax.attribute.path_patching(f, clean, corrupt, "a", "c", frozen="b").tolist()
        [0.5]
    """
    runs = _Runs.make(clean, corrupt, positions, axis, batch_size)
    given = {"sender": sender, "receivers": receivers, "frozen": frozen}
    chosen = (check(selection, argument) for argument, selection in given.items())
    return compile_method(_patch_paths, fn, *chosen)(runs)


def _patch_paths(
    fn: Function, sender: Any, receivers: Any, frozen: Value, runs: _Runs
) -> jax.Array:
    corrupt_alone = drop_steps(receivers, "receivers")
    corrupt_alone += () if frozen is None else drop_steps(frozen, "frozen")
    _, clean_taps, corrupt_taps = runs.capture(fn, drop_steps(sender, "sender"), corrupt_alone)
    ends = find_visits(receivers, corrupt_taps, "receivers")
    others = [] if frozen is None else find_visits(frozen, corrupt_taps, "frozen")
    others += [visit for visit in ends if not any(visit.is_same(other) for other in others)]

    def effect(start: Visit, value: PyTree) -> Any:
        seen = []
        for end in ends:
            fixed = [visit for visit in others if not (visit.is_same(start) or visit.is_same(end))]
            edits = [(visit.at, visit.value_in(corrupt_taps)) for visit in fixed]
            edited = edit(fn, [*edits, (start.at, value)])
            seen.append((end.at, prefix(edited, end.at)(*runs.corrupt)))
        return edit(fn, seen)(*runs.corrupt)

    made = []
    for start in find_visits(sender, corrupt_taps, "sender"):
        if any(start.is_same(end) for end in ends):
            raise SiteError(
                f"There is no path, because {start.where}, is both a sender and a receiver. Leave "
                "it out of one."
            )
        patches = _Patches(runs, start, clean_taps, corrupt_taps)
        made.append(patches.sweep(lambda value, start=start: effect(start, value)))
    return jnp.stack(made)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["clean", "corrupt", "traced"],
    meta_fields=["known", "axis", "batch_size"],
)
@dataclasses.dataclass(frozen=True)
class _Runs:
    """The arguments of a clean and a corrupt run, and the positions to patch.

    The positions are `known` or `traced`; both are None to patch whole values.
    """

    clean: tuple[Any, ...]
    corrupt: tuple[Any, ...]
    traced: Any
    known: tuple[int, ...] | None
    axis: int
    batch_size: int | None

    @classmethod
    def make(
        cls,
        clean: PyTree,
        corrupt: PyTree,
        positions: Any,
        axis: int,
        batch_size: int | None = None,
    ) -> _Runs:
        array = positions
        if positions is not None and not isinstance(positions, Tracer):
            array = np.asarray(positions if hasattr(positions, "shape") else list(positions))
        if array is not None and (
            array.ndim != 1 or not array.size or not jnp.issubdtype(array.dtype, jnp.integer)
        ):
            raise TypeError(
                "`positions` must be a sequence of one or more integers, or None for whole values, "
                f"but is {positions!r}."
            )
        clean, corrupt = arguments(clean), arguments(corrupt)
        check_alike(clean, corrupt)
        traced = array if isinstance(array, Tracer) else None
        known = tuple(array.tolist()) if isinstance(array, np.ndarray) else None
        return cls(clean, corrupt, traced, known, axis, batch_size)

    def capture(
        self, fn: Function, sites: tuple[Any, ...], corrupt_alone: tuple[Any, ...] = ()
    ) -> tuple[jax.Array, Taps, Taps]:
        """Capture both runs; return the corrupt metric, the clean taps and the corrupt taps."""
        _, clean_taps = capture(fn, values=sites, grads=None)(*self.clean)
        metric, corrupt_taps = capture(fn, values=(*sites, *corrupt_alone), grads=None)(
            *self.corrupt
        )
        check_array(metric)
        return jnp.asarray(metric), clean_taps, corrupt_taps


class _Patches:
    """The corrupt value of a visit, replaced by the clean one, at each of some positions."""

    def __init__(self, runs: _Runs, visit: Visit, clean_taps: Taps, corrupt_taps: Taps):
        self.clean, self.corrupt = visit.value_in(clean_taps), visit.value_in(corrupt_taps)
        self._batch_size = runs.batch_size
        self.at: Any = None
        self._valid: Any = None
        known, traced = runs.known, runs.traced
        if known is None and traced is None:
            return
        self.axis = axis_of(visit, self.clean, runs.axis)
        size = self.clean.shape[self.axis]
        if known is None:
            self._valid = (traced >= -size) & (traced < size)
            self.at = jnp.where(traced < 0, traced + size, traced)
            return
        wrong = [i for i in known if not -size <= i < size]
        if wrong:
            raise SiteError(
                f"The position {wrong[0]} is out of range: {visit.where}, has values of shape "
                f"{list(self.clean.shape)}, so {size} positions along axis {runs.axis}."
            )
        self.at = np.asarray(known) % size

    def sweep(self, rest: Callable[[Any], Any]) -> Any:
        """Run `rest` on each patched value."""
        if self.at is None:
            return rest(self.clean)
        shape = [-1 if i == self.axis else 1 for i in range(self.clean.ndim)]
        places = jnp.arange(self.clean.shape[self.axis]).reshape(shape)

        def patched(position: Any) -> Any:
            return rest(jnp.where(places == position, self.clean, self.corrupt))

        at, size = jnp.asarray(self.at), self._batch_size
        out = jax.vmap(patched)(at) if size is None else jax.lax.map(patched, at, batch_size=size)
        return self.mask_invalid(out)

    def mask_invalid(self, out: PyTree) -> Any:
        """Set the results of traced positions that are out of range to NaN."""
        if self._valid is None or not jnp.issubdtype(out.dtype, jnp.inexact):
            return out
        valid: Any = self._valid.reshape(-1, *[1] * (out.ndim - 1))
        return jnp.where(valid, out, jnp.nan)
