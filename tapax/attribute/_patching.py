"""Patching: which values inside carry what differs between a clean and a corrupt input.

`clean` and `corrupt` are the argument of `fn`, or tuples of its arguments; `fn` returns a metric, a
number or any array. The results are plain arrays `[sites, positions, *metric]`, or `[sites,
*metric]` where `positions` is None.
"""

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
from tapax._sites import SiteError, check
from tapax.attribute._compilation import arguments, check_alike, check_array, compile_method
from tapax.attribute._visits import Visit, axis_of, drop_steps, find_visits


def activation_patching(
    fn: Callable[..., Any],
    clean: Any,
    corrupt: Any,
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
    where, traced = _parse_positions(positions)
    run = compile_method(_patch_activations, fn, check(sites, "sites"), axis, batch_size, where)
    return run(*_pair_arguments(clean, corrupt), traced)


def _patch_activations(
    fn: Any,
    sites: Any,
    axis: int,
    batch_size: Any,
    where: Any,
    clean: Any,
    corrupt: Any,
    traced: Any,
) -> jax.Array:
    _, there = capture(fn, values=drop_steps(sites), grads=None)(*clean)
    metric, here = capture(fn, values=drop_steps(sites), grads=None)(*corrupt)
    check_array(metric)
    made = []
    for visit in find_visits(sites, here):
        rest = suffix(fn, visit.at)
        patches = _Patches(visit, visit.value_in(there), visit.value_in(here), axis, where, traced)
        made.append(patches.sweep(lambda value, rest=rest: rest(value, *corrupt), batch_size))
    return jnp.stack(made)


def attribution_patching(
    fn: Callable[..., Any],
    clean: Any,
    corrupt: Any,
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
    where, traced = _parse_positions(positions)
    run = compile_method(_estimate_patches, fn, check(sites, "sites"), axis, where)
    return run(*_pair_arguments(clean, corrupt), traced)


def _estimate_patches(
    fn: Any, sites: Any, axis: int, where: Any, clean: Any, corrupt: Any, traced: Any
) -> jax.Array:
    _, there = capture(fn, values=drop_steps(sites), grads=None)(*clean)
    metric, here = capture(fn, values=drop_steps(sites), grads=None)(*corrupt)
    check_array(metric)
    metric = jnp.asarray(metric)
    loss = grad(lambda weights, *args: jnp.sum(weights * fn(*args)), at=drop_steps(sites))
    if metric.ndim == 0:
        grads = jax.tree.map(lambda g: g[None], loss(jnp.ones_like(metric), *corrupt))
    else:
        units = jnp.eye(metric.size, dtype=metric.dtype).reshape(-1, *metric.shape)
        grads = jax.vmap(lambda weights: loss(weights, *corrupt))(units)
    made = []
    for visit in find_visits(sites, here):
        if visit.site.name not in grads:
            raise SiteError(
                f"There is no gradient by {visit.where}: it cannot be differentiated, or the "
                "metric does not depend on it."
            )
        a, b = visit.value_in(there), visit.value_in(here)
        slope = grads[visit.site.name]
        effect = (slope if visit.step is None else slope[:, visit.step]) * (a - b)
        patches = _Patches(visit, a, b, axis, where, traced)
        if patches.at is None:
            total = effect.sum(range(1, effect.ndim))
        else:
            kept = axis_of(visit, a, axis) + 1
            along = effect.sum([i for i in range(1, effect.ndim) if i != kept])
            total = patches.mask_invalid(along[:, patches.at].T)
        made.append(metric + total.reshape(*total.shape[:-1], *metric.shape))
    return jnp.stack(made)


def path_patching(
    fn: Callable[..., Any],
    clean: Any,
    corrupt: Any,
    sender: Any,
    receivers: Any,
    positions: Any = None,
    *,
    frozen: Any = None,
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
    where, traced = _parse_positions(positions)
    chosen = [check(s, n) for s, n in ((sender, "sender"), (receivers, "receivers"))]
    run = compile_method(
        _patch_paths, fn, *chosen, check(frozen, "frozen"), axis, batch_size, where
    )
    return run(*_pair_arguments(clean, corrupt), traced)


def _patch_paths(
    fn: Any,
    sender: Any,
    receivers: Any,
    frozen: Any,
    axis: int,
    batch_size: Any,
    where: Any,
    clean: Any,
    corrupt: Any,
    traced: Any,
) -> jax.Array:
    every = (*drop_steps(sender, "sender"), *drop_steps(receivers, "receivers"))
    every = every if frozen is None else (*every, *drop_steps(frozen, "frozen"))
    _, there = capture(fn, values=drop_steps(sender, "sender"), grads=None)(*clean)
    metric, here = capture(fn, values=every, grads=None)(*corrupt)
    check_array(metric)
    ends = find_visits(receivers, here, "receivers")
    others = [] if frozen is None else find_visits(frozen, here, "frozen")
    others += [visit for visit in ends if not any(visit.is_same(other) for other in others)]

    def effect(start: Visit, value: Any) -> Any:
        seen = []
        for end in ends:
            held = [visit for visit in others if not (visit.is_same(start) or visit.is_same(end))]
            edits = [(visit.at, visit.value_in(here)) for visit in held]
            edited = edit(fn, [*edits, (start.at, value)])
            seen.append((end.at, prefix(edited, end.at)(*corrupt)))
        return edit(fn, seen)(*corrupt)

    made = []
    for start in find_visits(sender, here, "sender"):
        if any(start.is_same(end) for end in ends):
            raise SiteError(f"There is no path: {start.where}, is both a sender and a receiver.")
        patches = _Patches(start, start.value_in(there), start.value_in(here), axis, where, traced)
        made.append(patches.sweep(lambda value, start=start: effect(start, value), batch_size))
    return jnp.stack(made)


def _pair_arguments(clean: Any, corrupt: Any) -> tuple[Any, Any]:
    clean, corrupt = arguments(clean), arguments(corrupt)
    check_alike(clean, corrupt)
    return clean, corrupt


def _parse_positions(given: Any) -> tuple[tuple[int, ...] | None, Any]:
    """The positions, as numbers if they are known, else as an array."""
    if given is None:
        return None, None
    if isinstance(given, Tracer):
        array = given
    else:
        array = np.asarray(given if hasattr(given, "shape") else list(given))
    if array.ndim != 1 or not array.size or not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            "`positions` must be a sequence of one or more integers, or None for whole values, but "
            f"is {given!r}."
        )
    if isinstance(array, Tracer):
        return None, array
    return tuple(int(i) for i in array), None


class _Patches:
    """The corrupt value of a visit, replaced by the clean one, at each of some positions."""

    def __init__(self, visit: Visit, clean: Any, corrupt: Any, axis: int, where: Any, traced: Any):
        self._clean, self._corrupt = clean, corrupt
        self.at: Any = None
        self._valid: Any = None
        if where is None and traced is None:
            return
        self._axis = axis_of(visit, clean, axis)
        size = clean.shape[self._axis]
        if traced is not None:
            self._valid = (traced >= -size) & (traced < size)
            self.at = jnp.where(traced < 0, traced + size, traced)
            return
        where = where or ()
        wrong = [i for i in where if not -size <= i < size]
        if wrong:
            raise SiteError(
                f"The position {wrong[0]} is out of range: {visit.where}, has values of shape "
                f"{list(clean.shape)}, so {size} positions along axis {axis}."
            )
        self.at = np.asarray(where) % size

    def sweep(self, rest: Callable[[Any], Any], batch_size: int | None) -> Any:
        """What `rest` makes of each patched value."""
        if self.at is None:
            return rest(self._clean)
        shape = [-1 if i == self._axis else 1 for i in range(self._clean.ndim)]
        places = jnp.arange(self._clean.shape[self._axis]).reshape(shape)

        def patched(position: Any) -> Any:
            return rest(jnp.where(places == position, self._clean, self._corrupt))

        if batch_size is None:
            return self.mask_invalid(jax.vmap(patched)(jnp.asarray(self.at)))
        return self.mask_invalid(jax.lax.map(patched, jnp.asarray(self.at), batch_size=batch_size))

    def mask_invalid(self, out: Any) -> Any:
        """Makes what comes of a traced position that is out of range no number."""
        if self._valid is None or not jnp.issubdtype(out.dtype, jnp.inexact):
            return out
        valid: Any = self._valid.reshape(-1, *[1] * (out.ndim - 1))
        return jnp.where(valid, out, jnp.nan)
