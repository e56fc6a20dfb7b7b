"""Interventions: functions with values inside pushed in a direction, or taken away."""

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
    """A function like `fn`, with `strength` times a vector added to the values of each site.

    A vector of the width of the stream is added at every position of every example. Both may be
    traced, so that a sweep over strengths is a `jax.vmap`.

    Turner et al., Activation Addition, 2023 (arXiv:2308.10248).

    >>> import tapax
    >>> f = lambda x: tapax.sow(x, "h").sum(-1)
    >>> steered = lambda s: steer(f, {"h": jnp.array([1.0, 0.0])}, s)(jnp.zeros((3, 2)))
    >>> jax.vmap(steered)(jnp.array([0.0, 2.0])).tolist()
    [[0.0, 0.0, 0.0], [2.0, 2.0, 2.0]]
    """
    if not isinstance(vectors, Mapping) or not vectors:
        raise TypeError(f"`vectors` maps sites to vectors, but is {vectors!r}.")

    def adding(vector: Any) -> Callable[[Any, Site], Any]:
        push = strength * jnp.asarray(vector)

        def add(x: Value, site: Site) -> Any:
            if not is_broadcastable(push.shape, x.shape):
                raise SiteError(
                    f"A vector of shape {list(push.shape)} cannot be added to the site "
                    f"{site.name!r}, marked at {site.source}, whose values have the shape "
                    f"{list(x.shape)}."
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
    """A function like `fn`, with nothing said by the values of some sites.

    They are zero; or their `mean` over the examples; or, with `resample`, those of other examples.
    Examples are those of `reference`, an argument of `fn` or a tuple of its arguments, or else
    those that the function is called with, as they are before anything is taken away. They lie
    along `axis` of a value (with no axis for a loop). `resample` draws them by a random `key`, the
    same for all sites; without one, those of the reference are taken as they come.

    Wang et al., Interpretability in the Wild, 2022 (arXiv:2211.00593) for the mean; Chan et al.,
    Causal Scrubbing, 2022, for resampling.

    >>> import tapax
    >>> f = lambda x: tapax.sow(x, "h")
    >>> ablate(f, "h", "mean")(jnp.array([1.0, 3.0])).tolist()
    [2.0, 2.0]
    >>> ablate(f, "h", "resample", key=jax.random.key(0))(jnp.array([1.0, 3.0])).tolist()
    [3.0, 1.0]
    """
    if how not in ("zero", "mean", "resample"):
        raise ValueError(f"`how` is 'zero', 'mean' or 'resample', but is {how!r}.")
    if how == "zero":
        return edit(fn, [(check(sites, "sites"), jnp.zeros_like)])
    if how == "resample" and key is None and reference is None:
        raise ValueError(
            "how='resample' needs a random key, to draw other examples with: "
            "key=jax.random.key(0); or examples to take: reference=."
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
    *args: Any,
    **kwargs: Any,
) -> Any:
    captured = capture(fn, values=sites, grads=None)
    taps = captured(*args, **kwargs)[1]
    source = taps if reference is None else captured(*reference)[1]
    edits = []
    for site in taps.sites:
        if site.kind in ("op", "name"):
            raise SiteError(f"Mark {site.name!r}, at {site.source}, with tapax.sow to ablate it.")
        if any(not loop.startswith("scan[") for loop in site.loops):
            raise SiteError(
                f"The site {site.name!r}, marked at {site.source}, is in the loops "
                f"{', '.join(site.loops)}, so its examples are not known. Use how='zero'."
            )
        value, others = taps.values[site.name], source.values.get(site.name)
        if others is None:
            raise SiteError(f"The site {site.name!r} is not reached with the reference.")
        at = _batch_axis(site, value, axis)
        if how == "mean":
            new = jnp.mean(others, at, keepdims=True)
        else:
            new = _draw_examples(others, value, at, site, key, reference)
        if not is_broadcastable(new.shape, value.shape):
            raise SiteError(
                f"The values of the site {site.name!r}, marked at {site.source}, have the shape "
                f"{list(others.shape)} with the reference, but {list(value.shape)} here."
            )
        new = jnp.broadcast_to(new, value.shape).astype(value.dtype)
        edits.append((f"{site.path}@{site.call}", new))
    return edit(fn, edits)(*args, **kwargs)


def _batch_axis(site: Site, value: PyTree, axis: int) -> int:
    own = value.ndim - len(site.loops)
    if not -own <= axis < own:
        raise SiteError(
            f"`axis` is {axis}, but the site {site.name!r}, marked at {site.source}, has values of "
            f"shape {list(value.shape[len(site.loops) :])}."
        )
    return axis % own + len(site.loops)


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
            f"There is no other example to draw for the site {site.name!r}, marked at "
            f"{site.source}: its values have the shape {list(value.shape)}, one along the batch."
        )
    # Each example gets that of the next one on a random circle, so none gets its own.
    circle = jax.random.permutation(key, count)
    return jnp.take(others, jnp.zeros(count, int).at[circle].set(jnp.roll(circle, 1)), at)
