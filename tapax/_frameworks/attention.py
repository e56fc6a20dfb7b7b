"""The weights of attention, as sites `.../attn:weights` of the module that computes them.

These sites exist only if a selection asks for them. If an attention layer computes its weights as
an array, tapax marks that array: before dropout, as Flax sows it. `jax.nn.dot_product_attention`
may be a fused kernel, in which the weights never exist. There tapax computes them from the queries,
keys and masks, in addition to the kernel. A change of the weights, or their gradient, has a meaning
only if the result depends on them, so tapax then computes the result from them instead of calling
the kernel.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax._frameworks.module_calls import mark_weights
from tapax._frameworks.patches import Patch, Replacements
from tapax._jax import Function, Value
from tapax._marks.context import active_policy


class _Softmax(threading.local):
    """A thread-local flag: whether `jax.nn.softmax` returns attention weights."""

    marked = False


_softmax = _Softmax()


def observe_attention() -> contextlib.AbstractContextManager[Any]:
    """Mark attention weights within the context, if a selection asks for them."""
    return _patch()


@contextlib.contextmanager
def mark_softmax() -> Generator[None]:
    """Take the results of `jax.nn.softmax` within the context for attention weights."""
    before, _softmax.marked = _softmax.marked, True
    try:
        yield
    finally:
        _softmax.marked = before


def marks_softmax(original: Function) -> Any:
    """Wrap a function that computes attention weights by `jax.nn.softmax`."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with mark_softmax():
            return original(*args, **kwargs)

    return call


def marks_result(original: Function) -> Any:
    """Wrap a function that returns attention weights."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return mark_weights(original(*args, **kwargs))

    return call


def _marked_softmax(original: Function) -> Any:
    @functools.wraps(original)
    def softmax(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        return mark_weights(out) if _softmax.marked else out

    return softmax


def _marked_attention(original: Function) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def attention(*args: Any, **kwargs: Any) -> Any:
        here = active_policy()
        if here is None or "weights" not in here.asked:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        weights = mark_weights(_weights(**given.arguments))
        if not here.uses_weights or given.arguments.get("return_residual"):
            return original(*args, **kwargs)
        return _weighted(weights, **given.arguments)

    return attention


def _weights(
    query: Value,
    key: Value,
    bias: Value | None = None,
    mask: Value | None = None,
    scale: float | None = None,
    **masks: Any,
) -> Any:
    """Compute the weights of `jax.nn.dot_product_attention`: [batch, heads, queries, keys]."""
    query, key = jnp.asarray(query), jnp.asarray(key)
    groups = query.shape[-2] // key.shape[-2]
    key = jnp.repeat(key, groups, axis=-2)
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    logits = jnp.einsum("...tnh,...snh->...nts", query, key, preferred_element_type=dtype)
    logits = logits * jnp.asarray(1 / np.sqrt(query.shape[-1]) if scale is None else scale, dtype)
    if bias is not None:
        logits = (logits + bias).astype(dtype)
    allowed = _allowed(mask, logits.shape[-2], logits.shape[-1], **masks)
    lowest = -0.7 * min(jnp.finfo(dtype).max, jnp.finfo(jnp.float32).max)
    logits = logits if allowed is None else jnp.where(allowed, logits, jnp.asarray(lowest, dtype))
    weights = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).astype(key.dtype)
    lengths = masks.get("query_seq_lengths")
    if lengths is not None:
        # The results for padding queries are zero.
        here = jnp.arange(logits.shape[-2]) < jnp.asarray(lengths)[:, None]
        weights = weights * here[:, None, :, None].astype(weights.dtype)
    # Masks and lengths have an axis of examples even if the queries have none.
    return weights.reshape(weights.shape[-query.ndim :])


def _allowed(
    mask: Value | None,
    queries: int,
    keys: int,
    is_causal: bool = False,
    query_seq_lengths: Value | None = None,
    key_value_seq_lengths: Value | None = None,
    local_window_size: Any = None,
    **rest: Any,
) -> Any:
    """Make the mask of the keys that each query sees; None if it sees all of them."""
    del rest
    query, key = jnp.arange(queries)[:, None], jnp.arange(keys)
    found = [] if mask is None else [jnp.asarray(mask)]
    if is_causal:
        found.append(key <= query)
    if local_window_size is not None:
        is_one = isinstance(local_window_size, int)
        left, right = (local_window_size,) * 2 if is_one else local_window_size
        found.append((query <= key + left) & (query >= key - right))
    for lengths, position in ((query_seq_lengths, query), (key_value_seq_lengths, key)):
        if lengths is not None:
            found.append(position < jnp.asarray(lengths)[:, None, None, None])
    return functools.reduce(jnp.logical_and, found) if found else None


def _weighted(weights: Value, query: Value, value: Value, **rest: Any) -> Any:
    """Compute the result of attention from its weights."""
    del rest
    value = jnp.asarray(value)
    value = jnp.repeat(value, jnp.asarray(query).shape[-2] // value.shape[-2], axis=-2)
    return jnp.einsum("...nts,...snh->...tnh", weights, value)


def _replacements() -> Replacements:
    yield jax.nn, "softmax", _marked_softmax
    yield jax.nn, "dot_product_attention", _marked_attention


_patch = Patch(_replacements)
