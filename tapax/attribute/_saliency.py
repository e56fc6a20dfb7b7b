"""Attribution by gradients, to an argument of a function or to any value inside it."""

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
    """Make a function that returns the gradient of `fn` with respect to the value of a site.

    Simonyan et al., Deep Inside Convolutional Networks, 2013 (arXiv:1312.6034); Shrikumar et al.,
    Not Just a Black Box, 2016 (arXiv:1605.01713).

    Args:
        fn: A function or a model that returns one real number.
        site: Selects one site or several; None differentiates with respect to an argument.
        times_value: Whether to multiply the gradient by the value.
        argnum: The position of the argument to differentiate with respect to, if `site` is None.

    Returns:
        A function of the arguments of `fn`. If `site` is a name, alone or in a `tapax.at`, it
        returns an array of the shape of the value; for any other selection, a dict of arrays by
        name; for None, a pytree like the argument.

    Raises:
        ValueError: When the returned function is called, if there is no argument `argnum`.
        TypeError: When the returned function is called, if `fn` does not return one real number.
        SiteError: When the returned function is called, if `site` picks no site, or a site that has
            no gradient.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: (tapax.sow(3 * x, "h") ** 2).sum()
        >>> x = jnp.array([1.0, -0.5])
        >>> tapax.attribute.saliency(f)(x).tolist()
        [18.0, -9.0]
        >>> tapax.attribute.saliency(f, "h", times_value=True)(x).tolist()
        [18.0, 4.5]
    """
    return compile_method(_compute_saliency, fn, check(site, "site"), times_value, argnum)


def _compute_saliency(
    fn: Function, site: Any, times_value: bool, argnum: int, /, *args: Any, **kwargs: Any
) -> Any:
    if site is None:
        value, rest = _of_argument(fn, argnum, args, kwargs)
        slope = jax.grad(rest)(value)
        return jax.tree.map(jnp.multiply, slope, value) if times_value else slope
    picked = drop_steps(site, "site")
    alone, step = (site.selection, site.step) if isinstance(site, At) else (site, None)
    step = step.slice if isinstance(step, StepSlice) else step
    if step is None and any(isinstance(part, At) for part in flatten(site)):
        raise SiteError(
            f"`site` must be one tapax.at, or a selection without tapax.at, but is {site!r}."
        )
    _, taps = capture(fn, values=picked, grads=None)(*args, **kwargs)
    find_visits(site, taps, "site")  # raises for an iteration that is out of range
    grads = grad(fn, at=picked)(*args, **kwargs)
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
    """Make a function that returns the share of each entry of a value in the result of `fn`.

    The share is the gradient, averaged over the straight line from the baseline to the value, times
    the difference of the two. So the shares sum to the result of `fn` at the value minus its result
    at the baseline.

    Sundararajan et al., Axiomatic Attribution for Deep Networks, 2017 (arXiv:1703.01365).

    Args:
        fn: A function or a model that returns one real number.
        site: Selects one site; None takes the value of an argument.
        baseline: The value at the start of the line: a number or an array, which is broadcast to
            the shape of the value.
        steps: The number of points of the Gauss-Legendre rule that averages the gradient.
        argnum: The position of the argument, if `site` is None.
        batch_size: How many points to compute at a time, if memory is short; all of them by
            default.

    Returns:
        A function of the arguments of `fn` that returns an array with the shape of the value.

    Raises:
        ValueError: If `steps` is not a positive integer. When the returned function is called: if
            `baseline` cannot be broadcast to the value, or there is no argument `argnum`.
        SiteError: When the returned function is called, if `site` does not pick one value, or if
            `fn` cannot be cut there.

    Example:
        >>> import jax.numpy as jnp, numpy as np, tapax
        >>> f = lambda x: (tapax.sow(3 * x, "h") ** 2).sum()
        >>> shares = tapax.attribute.integrated_gradients(f, "h")(jnp.array([1.0, -2.0]))
        >>> print(np.asarray(shares).round(3))
        [ 9. 36.]
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"`steps` must be a positive number of points, but is {steps!r}.")
    run = compile_method(_integrate_gradients, fn, check(site, "site"), steps, argnum, batch_size)
    return lambda *args, **kwargs: run(baseline, *args, **kwargs)


def _integrate_gradients(
    fn: Function,
    site: Any,
    steps: int,
    argnum: int,
    batch_size: Any,
    baseline: PyTree,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if site is None:
        value, rest = _of_argument(fn, argnum, args, kwargs)
    else:
        _, taps = capture(fn, values=drop_steps(site, "site"), grads=None)(*args, **kwargs)
        visit = find_one_visit(site, taps, "site")
        value = visit.value_in(taps)
        rest = lambda value: suffix(fn, visit.at)(value, *args, **kwargs)  # noqa: E731
    value = jnp.asarray(value)
    if not is_broadcastable(np.shape(baseline), value.shape):
        raise ValueError(
            f"`baseline` has the shape {list(np.shape(baseline))}, which cannot be broadcast to "
            f"the shape of the value, {list(value.shape)}."
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
    """Make a function that returns a map of the places in an image that support a class.

    The map has the resolution of the output of a convolution.

    Selvaraju et al., Grad-CAM, 2016 (arXiv:1610.02391).

    Args:
        fn: A function or a model that returns logits, or scores. The score of an example must
            depend on that example alone.
        site: Selects one site, the output of a convolution.
        target: The class: an integer, or an array with an integer for each example; or a function
            from the result of `fn` to a score. None if `fn` returns the score itself.
        axis: The spatial axes of the value: `(-2, -1)` if the channels come first.
        channel: The axis of the channels: -3 if the channels come first.

    Returns:
        A function of the arguments of `fn` that returns an array with the axes of the value without
        the channels. `jax.image.resize` scales it to the size of the image.

    Raises:
        ValueError: When the returned function is called, if `channel` is one of the spatial axes.
        SiteError: When the returned function is called, if `site` does not pick one value, has no
            gradient, or has no such axis.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(x, "h").sum((0, 1))
        >>> image = jnp.arange(8.0).reshape(2, 2, 2)
        >>> tapax.attribute.grad_cam(f, "h", target=1)(image).tolist()
        [[1.0, 3.0], [5.0, 7.0]]
    """
    chosen = target if callable(target) else None
    run = compile_method(_compute_cam, fn, check(site, "site"), chosen, tuple(axis), channel)
    given = None if callable(target) else target
    return lambda *args, **kwargs: run(given, *args, **kwargs)


def _compute_cam(
    fn: Function,
    site: Any,
    chosen: Any,
    axis: tuple[int, ...],
    channel: int,
    target: PyTree,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    def score(target: PyTree, /, *args: Any, **kwargs: Any) -> Any:
        out = fn(*args, **kwargs)
        if chosen is not None:
            out = chosen(out)
        elif target is not None:
            index = jnp.broadcast_to(jnp.asarray(target), out.shape[:-1])[..., None]
            # A class that is out of range gives NaN, rather than the map of another class.
            known = (index >= 0) & (index < out.shape[-1])
            out = jnp.take_along_axis(out, index, -1, mode="clip") * jnp.where(known, 1, jnp.nan)
        return jnp.sum(out)

    _, taps = capture(fn, values=drop_steps(site, "site"), grads=None)(*args, **kwargs)
    visit = find_one_visit(site, taps, "site")
    slopes = grad(score, at=drop_steps(site, "site"))(target, *args, **kwargs)
    slope = slopes[visit.site.name]
    value, slope = visit.value_in(taps), slope if visit.step is None else slope[visit.step]
    spatial = tuple(axis_of(visit, value, a) for a in axis)
    channel = axis_of(visit, value, channel)
    if channel in spatial:
        raise ValueError(
            f"`channel` must differ from the spatial axes, `axis`, but is {channel}, one of {axis}."
        )
    weights = slope.mean(spatial, keepdims=True)
    return jax.nn.relu(jnp.sum(weights * value, channel))


def _of_argument(
    fn: Function, argnum: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Callable[[Any], Any]]:
    """Return a positional argument, and `fn` as a function of it."""
    if not 0 <= argnum < len(args):
        raise ValueError(
            f"`argnum` is {argnum}, but the function was called with {len(args)} positional "
            "arguments."
        )
    return args[argnum], lambda x: fn(*args[:argnum], x, *args[argnum + 1 :], **kwargs)
