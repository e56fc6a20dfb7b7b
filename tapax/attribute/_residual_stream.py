"""The residual stream: the prediction at each layer, and the share of each component."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tapax._api.capture import capture
from tapax._api.cut import suffix
from tapax._api.edit import edit
from tapax._jax import Function, Value
from tapax._sites import SiteError, check
from tapax.attribute._compilation import compile_method, is_broadcastable
from tapax.attribute._visits import drop_steps, find_one_visit, find_visits


def logit_lens(
    fn: Callable[..., Any], sites: Any, unembed: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    """Make a function that returns the output of `fn` as if it ended after each of some sites.

    nostalgebraist, interpreting GPT: the logit lens, 2020.

    Args:
        fn: A function or a model that returns logits, or any array.
        sites: Selects the sites: the residual stream after each layer.
        unembed: A function from the stream to logits. By default it is the rest of `fn` after the
            last of the sites, including the final norm.

    Returns:
        A function of the arguments of `fn` that returns an array `[sites, *output]`.

    Raises:
        SiteError: If `sites` is empty. When the returned function is called: if `sites` picks no
            site, or if the values of the sites differ in shape.

    Example:
        >>> import tapax
        >>> def f(x):
        ...     for i in range(2):
        ...         x = tapax.sow(x + 1.5, f"resid/{i}")
        ...     return 10 * x
        >>> tapax.attribute.logit_lens(f, "resid/*")(0.5).tolist()
        [20.0, 35.0]
    """
    return compile_method(_read_logits, fn, check(sites, "sites"), unembed)


def _read_logits(fn: Function, sites: Any, unembed: Any, /, *args: Any, **kwargs: Any) -> Any:
    _, taps = capture(fn, values=drop_steps(sites), grads=None)(*args, **kwargs)
    found = find_visits(sites, taps)
    values = [visit.value_in(taps) for visit in found]
    last, shape = found[-1], values[-1].shape
    for visit, value in zip(found, values, strict=True):
        if value.shape != shape:
            raise SiteError(
                f"The logit lens needs values of one shape, but {visit.where}, has the shape "
                f"{list(value.shape)}, and {last.where}, has the shape {list(shape)}."
            )
    if unembed is None:
        unembed = lambda value: suffix(fn, last.at)(value, *args, **kwargs)  # noqa: E731
    return jax.vmap(unembed)(jnp.stack(values))


def direct_logit_attribution(
    fn: Callable[..., Any], sites: Any, final: Any, *, frozen: Value = None
) -> Callable[..., Any]:
    """Make a function that returns the direct share of each component in the output of `fn`.

    The rest of `fn`, after the site `final`, computes the output from the residual stream. The
    share of a component is the result of the linearised rest for that component. If `frozen` holds
    the scale of the final norm constant, the rest is linear except for constants such as biases,
    and the shares of all components sum to the output without these constants.

    Elhage et al., A Mathematical Framework for Transformer Circuits, 2021; Wang et al., 2022
    (arXiv:2211.00593).

    Args:
        fn: A function or a model that returns logits, or differences of logits.
        sites: Selects the components: the values that `fn` adds to the residual stream.
        final: Selects one site, the residual stream after the last component.
        frozen: Selects the values to hold constant, such as `tapax.ops("rsqrt")`; None for none.

    Returns:
        A function of the arguments of `fn` that returns an array `[sites, *output]`.

    Raises:
        SiteError: If a selection is empty. When the returned function is called: if a selection
            picks no site, `final` picks several, or a component cannot be broadcast to the shape of
            the stream.

    Example:
        >>> import tapax
        >>> def f(x):
        ...     x = tapax.sow(3 * x, "embed")
        ...     x = tapax.sow(x + tapax.sow(x**2, "mlp"), "resid")
        ...     return 10 * x
        >>> share = tapax.attribute.direct_logit_attribution(f, ["embed", "mlp"], "resid")
        >>> share(1.5).tolist()
        [45.0, 202.5]
    """
    return compile_method(
        _attribute_logits, fn, check(sites, "sites"), check(final, "final"), frozen
    )


def _attribute_logits(
    fn: Function, sites: Any, final: Any, frozen: Value, /, *args: Any, **kwargs: Any
) -> Any:
    whole = (*drop_steps(sites), *drop_steps(final, "final"))
    _, taps = capture(fn, values=whole, grads=None)(*args, **kwargs)
    end = find_one_visit(final, taps, "final")
    stream = end.value_in(taps)
    parts = []
    for visit in find_visits(sites, taps):
        value = visit.value_in(taps)
        if not is_broadcastable(value.shape, stream.shape):
            raise SiteError(
                f"A component must have the shape of the stream, {list(stream.shape)}, but "
                f"{visit.where}, has values of shape {list(value.shape)}."
            )
        parts.append(jnp.broadcast_to(value, stream.shape))
    constant = fn if frozen is None else edit(fn, [(frozen, jax.lax.stop_gradient)])
    rest = suffix(constant, end.at)
    _, linear = jax.linearize(lambda x: rest(x, *args, **kwargs), stream)
    return jax.vmap(linear)(jnp.stack(parts))
