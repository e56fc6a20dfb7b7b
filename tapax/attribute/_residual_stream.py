"""The residual stream: what it would say at each layer, and what each component wrote into it."""

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
    """A function that returns what `fn` would, were each of the sites the last: `[sites, ...]`.

    `unembed` makes logits of the stream. Without it, that is what `fn` itself does after the last
    of the sites, its final norm included.

    nostalgebraist, interpreting GPT: the logit lens, 2020.

    >>> import tapax
    >>> def f(x):
    ...     for i in range(2):
    ...         x = tapax.sow(x + 1, f"resid/{i}")
    ...     return 10 * x
    >>> logit_lens(f, "resid/*")(0.0).tolist()
    [10.0, 20.0]
    """
    return compile_method(_read_logits, fn, check(sites, "sites"), unembed)


def _read_logits(fn: Function, sites: Any, unembed: Any, *args: Any) -> Any:
    _, taps = capture(fn, values=drop_steps(sites), grads=None)(*args)
    found = find_visits(sites, taps)
    values = [visit.value_in(taps) for visit in found]
    last, shape = found[-1], values[-1].shape
    for visit, value in zip(found, values, strict=True):
        if value.shape != shape:
            raise SiteError(
                f"The lens reads values of one shape, but that of {visit.where}, is "
                f"{list(value.shape)}, and that of {last.where}, is {list(shape)}."
            )
    if unembed is None:
        unembed = lambda value: suffix(fn, last.at)(value, *args)  # noqa: E731
    return jax.vmap(unembed)(jnp.stack(values))


def direct_logit_attribution(
    fn: Callable[..., Any], sites: Any, final: Any, *, frozen: Value = None
) -> Callable[..., Any]:
    """A function that returns what each component adds to the output directly: `[sites, ...]`.

    The sites are what is added to the residual stream, `final` is the stream in the end, and `fn`
    returns logits, or differences of them. A share is what the rest of `fn` makes of the component,
    which is linear but for its norm, whose scale is to be `frozen`: a selection of values that are
    held, such as `tapax.ops("rsqrt")`. Then the shares of all that is added sum up to the
    output, less the part that does not depend on the stream (biases). Without `frozen`, the rest is
    linearised.

    Elhage et al., A Mathematical Framework for Transformer Circuits, 2021; Wang et al., 2022
    (arXiv:2211.00593).

    >>> import tapax
    >>> def f(x):
    ...     x = tapax.sow(3 * x, "embed")
    ...     x = tapax.sow(x + tapax.sow(x**2, "mlp"), "resid")
    ...     return 10 * x
    >>> direct_logit_attribution(f, ["embed", "mlp"], "resid")(1.0).tolist()
    [30.0, 90.0]
    """
    return compile_method(
        _attribute_logits, fn, check(sites, "sites"), check(final, "final"), frozen
    )


def _attribute_logits(fn: Function, sites: Any, final: Any, frozen: Value, *args: Any) -> Any:
    whole = (*drop_steps(sites), *drop_steps(final, "final"))
    _, taps = capture(fn, values=whole, grads=None)(*args)
    end = find_one_visit(final, taps, "final")
    stream = end.value_in(taps)
    parts = []
    for visit in find_visits(sites, taps):
        value = visit.value_in(taps)
        if not is_broadcastable(value.shape, stream.shape):
            raise SiteError(
                f"What is added to the stream has its shape, {list(stream.shape)}, but "
                f"{visit.where}, has values of shape {list(value.shape)}."
            )
        parts.append(jnp.broadcast_to(value, stream.shape))
    held = fn if frozen is None else edit(fn, [(frozen, jax.lax.stop_gradient)])
    _, linear = jax.linearize(lambda x: suffix(held, end.at)(x, *args), stream)
    return jax.vmap(linear)(jnp.stack(parts))
