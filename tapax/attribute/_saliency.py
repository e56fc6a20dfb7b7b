"""Attribution by gradients: of an argument, or of any value inside."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax._api.capture import capture
from tapax._api.cut import suffix
from tapax._api.gradients import grad
from tapax._jax import Function, PyTree
from tapax._sites import At, SiteError, StepSlice, check, flatten, is_exact
from tapax.attribute._compilation import compile_method, is_broadcastable
from tapax.attribute._visits import axis_of, drop_steps, find_one_visit, find_visits


def saliency(
    fn: Callable[..., Any], site: Any = None, *, times_value: bool = False, argnum: int = 0
) -> Callable[..., Any]:
    """A function that returns the gradient of what `fn` returns, a number, by the value of a site.

    Without a site it is by the argument `argnum`. With `times_value` it is the gradient times the
    value. A selection of several sites (a glob, a sequence) gives a dict by their names.

    Simonyan et al., Deep Inside Convolutional Networks, 2013 (arXiv:1312.6034); Shrikumar et al.,
    Not Just a Black Box, 2016 (arXiv:1605.01713).

    >>> import tapax
    >>> f = lambda x: (tapax.sow(3 * x, "h") ** 2).sum()
    >>> saliency(f)(jnp.array([1.0])).tolist(), saliency(f, "h")(jnp.array([1.0])).tolist()
    ([18.0], [6.0])
    """
    return compile_method(_compute_saliency, fn, check(site, "site"), times_value, argnum)


def _compute_saliency(fn: Function, site: Any, times_value: bool, argnum: int, *args: Any) -> Any:
    if site is None:
        value, rest = _of_argument(fn, argnum, args)
        slope = jax.grad(rest)(value)
        return jax.tree.map(jnp.multiply, slope, value) if times_value else slope
    picked = drop_steps(site, "site")
    alone, step = (site.selection, site.step) if isinstance(site, At) else (site, None)
    step = step.slice if isinstance(step, StepSlice) else step
    if step is None and any(isinstance(part, At) for part in flatten(site)):
        raise SiteError(f"`site` is one tapax.at, or a selection without any, but is {site!r}.")
    _, taps = capture(fn, values=picked, grads=None)(*args)
    find_visits(site, taps, "site")  # raises for an iteration that there is not
    grads = grad(fn, at=picked)(*args)
    made = {n: g * taps.values[n] if times_value else g for n, g in grads.items()}
    made = made if step is None else {n: g[step] for n, g in made.items()}
    if not is_exact(alone):
        return made
    if len(made) != 1:
        raise SiteError(f"`site` is {site!r}, but must pick one of {', '.join(map(repr, made))}.")
    return next(iter(made.values()))


def integrated_gradients(
    fn: Callable[..., Any],
    site: Any = None,
    *,
    baseline: PyTree = 0.0,
    steps: int = 32,
    argnum: int = 0,
    batch_size: int | None = None,
) -> Callable[..., Any]:
    """A function that returns the part that each entry of a value has in what `fn` returns.

    It is the gradient, averaged over the straight line from the baseline to the value (by a
    Gauss-Legendre rule with `steps` points), times their difference. So the sum is the difference
    of `fn` between the two. The value is that of a site, or without one of the argument `argnum`.
    `batch_size` points are computed at a time; all of them by default.

    Sundararajan et al., Axiomatic Attribution for Deep Networks, 2017 (arXiv:1703.01365).

    >>> import tapax
    >>> f = lambda x: (tapax.sow(3 * x, "h") ** 2).sum()
    >>> integrated_gradients(f, "h")(jnp.array([1.0, 2.0])).round(3).tolist()
    [9.0, 36.0]
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"`steps` is the number of points, at least 1, but is {steps!r}.")
    run = compile_method(_integrate_gradients, fn, check(site, "site"), steps, argnum, batch_size)
    return lambda *args: run(baseline, *args)


def _integrate_gradients(
    fn: Function, site: Any, steps: int, argnum: int, batch_size: Any, baseline: PyTree, *args: Any
) -> Any:
    if site is None:
        value, rest = _of_argument(fn, argnum, args)
    else:
        _, taps = capture(fn, values=drop_steps(site, "site"), grads=None)(*args)
        visit = find_one_visit(site, taps, "site")
        value, rest = visit.value_in(taps), lambda value: suffix(fn, visit.at)(value, *args)
    value = jnp.asarray(value)
    if not is_broadcastable(np.shape(baseline), value.shape):
        raise ValueError(
            f"`baseline` has the shape {list(np.shape(baseline))}, but the value that it stands in "
            f"for has {list(value.shape)}."
        )
    start = jnp.broadcast_to(jnp.asarray(baseline, value.dtype), value.shape)
    points, weights = np.polynomial.legendre.leggauss(steps)
    pairs = jnp.asarray((points + 1) / 2, value.dtype), jnp.asarray(weights / 2, value.dtype)

    def part(pair: Any) -> Any:
        return pair[1] * jax.grad(rest)(start + pair[0] * (value - start))

    parts = jax.lax.map(part, pairs, batch_size=steps if batch_size is None else batch_size)
    return parts.sum(0) * (value - start)


def grad_cam(
    fn: Callable[..., Any],
    site: Any,
    target: PyTree = None,
    *,
    axis: tuple[int, ...] = (-3, -2),
    channel: int = -1,
) -> Callable[..., Any]:
    """A function that returns a map of where a convolution's output speaks for a class.

    `fn` returns logits, and `target` is the class: an integer, or one for each example; or `target`
    is a function of what `fn` returns; or `fn` returns the score itself. Scores of several examples
    are each of its own example. The map has the axes of the site's value but for the channels, and
    the size of that value: `jax.image.resize` makes it that of the image. `axis` are the spatial
    axes, `(-2, -1)` with `channel=-3` where channels come first.

    Selvaraju et al., Grad-CAM, 2016 (arXiv:1610.02391).

    >>> import tapax
    >>> f = lambda x: tapax.sow(x, "h").sum((0, 1))
    >>> image = jnp.arange(8.0).reshape(2, 2, 2)
    >>> grad_cam(f, "h", target=1)(image).tolist()
    [[1.0, 3.0], [5.0, 7.0]]
    """
    chosen = target if callable(target) else None
    run = compile_method(_compute_cam, fn, check(site, "site"), chosen, tuple(axis), channel)
    return lambda *args: run(None if callable(target) else target, *args)


def _compute_cam(
    fn: Function,
    site: Any,
    chosen: Any,
    axis: tuple[int, ...],
    channel: int,
    target: PyTree,
    *args: Any,
) -> Any:
    def score(target: PyTree, *args: Any) -> Any:
        out = fn(*args)
        if chosen is not None:
            out = chosen(out)
        elif target is not None:
            index = jnp.broadcast_to(jnp.asarray(target), out.shape[:-1])[..., None]
            # A class that there is not gives no number, rather than the map of another one.
            known = (index >= 0) & (index < out.shape[-1])
            out = jnp.take_along_axis(out, index, -1, mode="clip") * jnp.where(known, 1, jnp.nan)
        return jnp.sum(out)

    _, taps = capture(fn, values=drop_steps(site, "site"), grads=None)(*args)
    visit = find_one_visit(site, taps, "site")
    slope = grad(score, at=drop_steps(site, "site"))(target, *args)[visit.site.name]
    value, slope = visit.value_in(taps), slope if visit.step is None else slope[visit.step]
    spatial = tuple(axis_of(visit, value, a) for a in axis)
    channel = axis_of(visit, value, channel)
    if channel in spatial:
        raise ValueError(f"`channel` is {channel}, which is one of the spatial axes {axis}.")
    weights = slope.mean(spatial, keepdims=True)
    return jax.nn.relu(jnp.sum(weights * value, channel))


def _of_argument(
    fn: Function, argnum: int, args: tuple[Any, ...]
) -> tuple[Any, Callable[[Any], Any]]:
    """An argument, and `fn` as a function of it."""
    if not 0 <= argnum < len(args):
        raise ValueError(f"`argnum` is {argnum}, but the function was given {len(args)} arguments.")
    return args[argnum], lambda x: fn(*args[:argnum], x, *args[argnum + 1 :])
