"""Patching: which values inside carry what differs between a clean and a corrupt input.

`clean` and `corrupt` are the argument of `fn`, or tuples of its arguments; `fn` returns a metric, a
number or any array. The results are plain arrays `[sites, positions, *metric]`, or `[sites,
*metric]` where `positions` is None.
"""

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
    """The metric of the corrupt run with one value in it replaced by that of the clean run.

    For every site and every position, one at a time; whole values where `positions` is None. The
    sweep is one program: both runs are made once, and from each site on only the rest of `fn`, for
    all positions together, or `batch_size` of them at a time if memory is short.

    Meng et al., Locating and Editing Factual Associations in GPT, 2022 (arXiv:2202.05262);
    Heimersheim and Nanda, How to use and interpret activation patching, 2024 (arXiv:2404.15255).

    >>> import tapax
    >>> f = lambda x: tapax.sow(x * 2, "h").sum()
    >>> activation_patching(f, jnp.ones((2, 1)), jnp.zeros((2, 1)), ["h"], [0, 1]).tolist()
    [[2.0, 2.0]]
    """
    runs = _Runs.make(clean, corrupt, positions, axis, batch_size)
    return compile_method(_patch_activations, fn, check(sites, "sites"))(runs)


def _patch_activations(fn: Function, sites: Any, runs: _Runs) -> jax.Array:
    _, there, here = runs.capture(fn, drop_steps(sites))
    made = []
    for visit in find_visits(sites, here):
        rest = suffix(fn, visit.at)
        patches = _Patches(runs, visit, there, here)
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
    """The linear estimate of `activation_patching`, from two runs and one backward pass.

    It is the metric of the corrupt run, plus its gradient there times the difference of the values.
    Where the metric is an array, there is a backward pass for each of its numbers.

    Nanda, Attribution Patching: Activation Patching At Industrial Scale, 2023; Syed et al.,
    Attribution Patching Outperforms Automated Circuit Discovery, 2023 (arXiv:2310.10348).

    >>> import tapax
    >>> f = lambda x: (tapax.sow(x * 2, "h") ** 2).sum()
    >>> attribution_patching(f, jnp.zeros((2, 1)), jnp.ones((2, 1)), ["h"], [0, 1]).tolist()
    [[0.0, 0.0]]
    """
    runs = _Runs.make(clean, corrupt, positions, axis)
    return compile_method(_estimate_patches, fn, check(sites, "sites"))(runs)


def _estimate_patches(fn: Function, sites: Any, runs: _Runs) -> jax.Array:
    metric, there, here = runs.capture(fn, drop_steps(sites))
    loss = grad(lambda weights, *args: jnp.sum(weights * fn(*args)), at=drop_steps(sites))
    if metric.ndim == 0:
        grads = jax.tree.map(lambda g: g[None], loss(jnp.ones_like(metric), *runs.corrupt))
    else:
        units = jnp.eye(metric.size, dtype=metric.dtype).reshape(-1, *metric.shape)
        grads = jax.vmap(lambda weights: loss(weights, *runs.corrupt))(units)
    made = []
    for visit in find_visits(sites, here):
        if visit.site.name not in grads:
            raise SiteError(
                f"There is no gradient by {visit.where}: it cannot be differentiated, or the "
                "metric does not depend on it."
            )
        patches = _Patches(runs, visit, there, here)
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
    """The metric of the corrupt run, with the sender's clean value seen by the receivers alone.

    Each receiver is computed with the sender's value replaced by that of the clean run, at each of
    the positions, and with the `frozen` sites and the other receivers as in the corrupt run. Then
    the metric is that of the corrupt run with the receivers so. `frozen` are the components that
    the path must not lead through: for direct paths between attention heads all other heads, for a
    path through the residual stream alone all heads and MLPs. Several senders are done one by one;
    one that comes after the receivers changes nothing.

    Wang et al., Interpretability in the Wild, 2022 (arXiv:2211.00593); Goldowsky-Dill et al.,
    Localizing Model Behavior with Path Patching, 2023 (arXiv:2304.05969).

    >>> import tapax
    >>> def f(x):
    ...     a = tapax.sow(x, "a")
    ...     b = tapax.sow(2 * a, "b")
    ...     return (tapax.sow(a + b, "c") + a).sum()
    >>> one, zero = jnp.ones((1, 1)), jnp.zeros((1, 1))
    >>> path_patching(f, one, zero, "a", "c").tolist()
    [3.0]
    >>> path_patching(f, one, zero, "a", "c", frozen="b").tolist()
    [1.0]
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
    _, there, here = runs.capture(fn, drop_steps(sender, "sender"), corrupt_alone)
    ends = find_visits(receivers, here, "receivers")
    others = [] if frozen is None else find_visits(frozen, here, "frozen")
    others += [visit for visit in ends if not any(visit.is_same(other) for other in others)]

    def effect(start: Visit, value: PyTree) -> Any:
        seen = []
        for end in ends:
            held = [visit for visit in others if not (visit.is_same(start) or visit.is_same(end))]
            edits = [(visit.at, visit.value_in(here)) for visit in held]
            edited = edit(fn, [*edits, (start.at, value)])
            seen.append((end.at, prefix(edited, end.at)(*runs.corrupt)))
        return edit(fn, seen)(*runs.corrupt)

    made = []
    for start in find_visits(sender, here, "sender"):
        if any(start.is_same(end) for end in ends):
            raise SiteError(f"There is no path: {start.where}, is both a sender and a receiver.")
        patches = _Patches(runs, start, there, here)
        made.append(patches.sweep(lambda value, start=start: effect(start, value)))
    return jnp.stack(made)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["clean", "corrupt", "traced"],
    meta_fields=["known", "axis", "batch_size"],
)
@dataclasses.dataclass(frozen=True)
class _Runs:
    """The arguments of a clean and a corrupt run, and the positions to patch, known or traced."""

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
        """The metric of the corrupt run, and what the clean and the corrupt run have at sites."""
        _, there = capture(fn, values=sites, grads=None)(*self.clean)
        metric, here = capture(fn, values=(*sites, *corrupt_alone), grads=None)(*self.corrupt)
        check_array(metric)
        return jnp.asarray(metric), there, here


class _Patches:
    """The corrupt value of a visit, replaced by the clean one, at each of some positions."""

    def __init__(self, runs: _Runs, visit: Visit, there: Taps, here: Taps):
        self.clean, self.corrupt = visit.value_in(there), visit.value_in(here)
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
        """What `rest` makes of each patched value."""
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
        """Makes what comes of a traced position that is out of range no number."""
        if self._valid is None or not jnp.issubdtype(out.dtype, jnp.inexact):
            return out
        valid: Any = self._valid.reshape(-1, *[1] * (out.ndim - 1))
        return jnp.where(valid, out, jnp.nan)
