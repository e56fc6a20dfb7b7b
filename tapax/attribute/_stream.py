"""The residual stream: what it would say at each layer, and what each component wrote into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import tapax
from tapax._sites.errors import SiteError
from tapax._sites.selections import check
from tapax.attribute._rows import bare, compiled, fits, one, rows


def logit_lens(
    fn: Callable[..., Any], sites: Any, unembed: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    """A function that returns what `fn` would, were each of the sites the last: `[sites, ...]`.

    `unembed` makes logits of the stream. Without it, that is what `fn` itself does after the last
    of the sites, its final norm included.

    nostalgebraist, interpreting GPT: the logit lens, 2020.

    >>> def f(x):
    ...     for i in range(2):
    ...         x = tapax.sow(x + 1, f"resid/{i}")
    ...     return 10 * x
    >>> logit_lens(f, "resid/*")(0.0).tolist()
    [10.0, 20.0]
    """
    return compiled(_seen, fn, check(sites, "sites"), unembed)


def _seen(fn: Any, sites: Any, unembed: Any, *args: Any) -> Any:
    _, taps = tapax.capture(fn, values=bare(sites), grads=None)(*args)
    found = rows(sites, taps)
    last = found[-1]
    for row in found:
        if row.of(taps).shape != last.of(taps).shape:
            raise SiteError(
                f"The lens reads values of one shape, but that of {row.where}, is "
                f"{list(row.of(taps).shape)}, and that of {last.where}, is "
                f"{list(last.of(taps).shape)}."
            )
    if unembed is None:
        unembed = lambda value: tapax.suffix(fn, last.at)(value, *args)  # noqa: E731
    return jax.vmap(unembed)(jnp.stack([row.of(taps) for row in found]))


def direct_logit_attribution(
    fn: Callable[..., Any], sites: Any, final: Any, *, frozen: Any = None
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

    >>> def f(x):
    ...     x = tapax.sow(3 * x, "embed")
    ...     x = tapax.sow(x + tapax.sow(x**2, "mlp"), "resid")
    ...     return 10 * x
    >>> direct_logit_attribution(f, ["embed", "mlp"], "resid")(1.0).tolist()
    [30.0, 90.0]
    """
    return compiled(_shares, fn, check(sites, "sites"), check(final, "final"), frozen)


def _shares(fn: Any, sites: Any, final: Any, frozen: Any, *args: Any) -> Any:
    whole = (*bare(sites), *bare(final, "final"))
    _, taps = tapax.capture(fn, values=whole, grads=None)(*args)
    end = one(final, taps, "final")
    stream = end.of(taps)
    parts = []
    for row in rows(sites, taps):
        value = row.of(taps)
        if not fits(value.shape, stream.shape):
            raise SiteError(
                f"What is added to the stream has its shape, {list(stream.shape)}, but "
                f"{row.where}, has values of shape {list(value.shape)}."
            )
        parts.append(jnp.broadcast_to(value, stream.shape))
    held = fn if frozen is None else tapax.edit(fn, [(frozen, jax.lax.stop_gradient)])
    _, linear = jax.linearize(lambda x: tapax.suffix(held, end.at)(x, *args), stream)
    return jax.vmap(linear)(jnp.stack(parts))
