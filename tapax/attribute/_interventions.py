"""Interventions: push values inside a function in a direction, or remove their information."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tapax._api.capture import capture
from tapax._api.edit import edit
from tapax._jax import Function, PyTree, Value
from tapax._sites import Site, SiteError, check
from tapax.attribute._compilation import arguments, compile_method, is_broadcastable
from tapax.attribute._visits import drop_steps


def steer(
    fn: Callable[..., Any], vectors: Mapping[Any, Any], strength: Any = 1.0
) -> Callable[..., Any]:
    """Make a function like `fn` that adds `strength` times a vector to the values of each site.

    Turner et al., Activation Addition, 2023 (arXiv:2308.10248).

    Args:
        fn: A function or a model of any framework.
        vectors: A mapping from selections of sites to vectors. A vector is broadcast to the values:
            a vector with the width of the residual stream is added at every position of every
            example. Vectors may be traced.
        strength: The factor of all vectors. It may be traced, so that a sweep over strengths is a
            `jax.vmap`.

    Returns:
        A function with the arguments and the results of `fn`.

    Raises:
        TypeError: If `vectors` is not a mapping, or is empty.
        SiteError: When the returned function is called, if a selection picks no site, or if a
            vector cannot be broadcast to the values of a site.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(x, "h").sum(-1)
        >>> x = jnp.array([[0.5, -1.0], [2.0, 1.0]])
        >>> steered = lambda s: tapax.attribute.steer(f, {"h": jnp.array([1.0, 0.5])}, s)(x)
        >>> jax.vmap(steered)(jnp.array([0.0, 2.0])).tolist()
        [[-0.5, 3.0], [2.5, 6.0]]
    """
    if not isinstance(vectors, Mapping) or not vectors:
        raise TypeError(
            f"`vectors` must map one or more selections of sites to vectors, but is {vectors!r}."
        )

    def adding(vector: Any) -> Callable[[Any, Site], Any]:
        push = strength * jnp.asarray(vector)

        def add(x: Value, site: Site) -> Any:
            if not is_broadcastable(push.shape, x.shape):
                raise SiteError(
                    f"A vector of shape {list(push.shape)} cannot be broadcast to the values of "
                    f"the {site.described}, which have the shape {list(x.shape)}."
                )
            return x + push.astype(x.dtype)

        return add

    return edit(fn, {site: adding(vector) for site, vector in vectors.items()})


def ablate(
    fn: Callable[..., Any],
    sites: Any,
    how: str = "zero",
    *,
    reference: Any = None,
    key: Value = None,
    axis: int = 0,
) -> Callable[..., Any]:
    """Make a function like `fn` that removes the information in the values of some sites.

    Wang et al., Interpretability in the Wild, 2022 (arXiv:2211.00593) for the mean; Chan et al.,
    Causal Scrubbing, 2022, for resampling.

    Args:
        fn: A function or a model of any framework.
        sites: Selects the sites to ablate.
        how: The replacement of the values: `"zero"`; `"mean"`, the mean over the examples; or
            `"resample"`, the values of other examples.
        reference: The examples to average or to draw: an argument of `fn`, or a tuple of its
            arguments. By default these are the examples of the call itself, before the ablation.
        key: The random key with which `"resample"` draws examples, the same for all sites. Without
            a key it takes the examples of `reference` in order.
        axis: The axis of the examples in a value, without the axes of loops.

    Returns:
        A function with the arguments and the results of `fn`.

    Raises:
        ValueError: If `how` is not one of these three strings, or if `"resample"` has neither `key`
            nor `reference`.
        SiteError: When the returned function is called, if a selection picks no site, if a value
            has no such axis, or if the values of the reference have another shape.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(x, "h")
        >>> x = jnp.array([1.0, 3.0])
        >>> tapax.attribute.ablate(f, "h", "mean")(x).tolist()
        [2.0, 2.0]
        >>> tapax.attribute.ablate(f, "h", "resample", key=jax.random.key(0))(x).tolist()
        [3.0, 1.0]
    """
    if how not in ("zero", "mean", "resample"):
        raise ValueError(f"`how` must be 'zero', 'mean' or 'resample', but is {how!r}.")
    if how == "zero":
        return edit(fn, [(check(sites, "sites"), jnp.zeros_like)])
    if how == "resample" and key is None and reference is None:
        raise ValueError(
            "how='resample' needs a random key with which to draw other examples, "
            "key=jax.random.key(0), or the examples themselves, reference=x."
        )
    run = compile_method(_replace_values, fn, drop_steps(sites), how, axis)
    given = None if reference is None else arguments(reference)

    @functools.wraps(fn, updated=())
    def ablated(*args: Any, **kwargs: Any) -> Any:
        return run(given, key, *args, **kwargs)

    return ablated


def _replace_values(
    fn: Function,
    sites: Any,
    how: str,
    axis: int,
    reference: Any,
    key: Value,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    captured = capture(fn, values=sites, grads=None)
    taps = captured(*args, **kwargs)[1]
    source = taps if reference is None else captured(*reference)[1]
    edits = []
    for site in taps.sites:
        if site.kind in ("op", "name"):
            raise SiteError(
                f"{site.name!r}, at {site.source}, is the result of an operation, and cannot be "
                "ablated by its mean or by other examples. Mark the value with tapax.sow."
            )
        if any(not loop.startswith("scan[") for loop in site.loops):
            raise SiteError(
                f"The {site.described}, is in the loops {', '.join(site.loops)}, so the axis of "
                "its examples is not known. Use how='zero'."
            )
        value, others = taps.values[site.name], source.values.get(site.name)
        if others is None:
            raise SiteError(
                f"When `fn` is called with `reference`, it does not reach the {site.described}. "
                "Pass examples for which it does."
            )
        at = _batch_axis(site, value, axis)
        if how == "mean":
            new = jnp.mean(others, at, keepdims=True)
        else:
            new = _draw_examples(others, value, at, site, key, reference)
        if not is_broadcastable(new.shape, value.shape):
            raise SiteError(
                f"The values of the {site.described}, have the shape {list(others.shape)} with "
                f"`reference`, but {list(value.shape)} in this call. Pass examples of one shape."
            )
        new = jnp.broadcast_to(new, value.shape).astype(value.dtype)
        edits.append((f"{site.path}@{site.call}", new))
    return edit(fn, edits)(*args, **kwargs)


def _batch_axis(site: Site, value: PyTree, axis: int) -> int:
    rank = value.ndim - len(site.loops)
    if not -rank <= axis < rank:
        raise SiteError(
            f"`axis` is {axis}, but the {site.described}, has values of shape "
            f"{list(value.shape[len(site.loops) :])}, which have no such axis."
        )
    return axis % rank + len(site.loops)


def _draw_examples(
    others: Any, value: PyTree, at: int, site: Site, key: Value, reference: Any
) -> Any:
    count, wanted = others.shape[at], value.shape[at]
    if key is None:
        return others
    if reference is not None:
        return jnp.take(others, jax.random.randint(key, (wanted,), 0, count), at)
    if count < 2:
        raise SiteError(
            f"There is no other example to draw for the {site.described}: its values have the "
            f"shape {list(value.shape)}, with one example. Pass several, or `reference`."
        )
    # Each example takes the value of the next one on a random circle, so that no example keeps its
    # value.
    circle = jax.random.permutation(key, count)
    return jnp.take(others, jnp.zeros(count, int).at[circle].set(jnp.roll(circle, 1)), at)
