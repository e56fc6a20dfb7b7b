"""Batches of members, and predictions with their uncertainty.

>>> import jax.numpy as jnp
>>> x = jnp.arange(3.0)
>>> tile(x, 2).tolist()  # the same rows for every member
[0.0, 1.0, 2.0, 0.0, 1.0, 2.0]
>>> unfold(tile(x, 2), 2).shape, fold(unfold(tile(x, 2), 2)).shape
((2, 3), (6,))
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tapax._frameworks.interface import Module
from tapax._jax import PyTree, Value
from tapax.nn._factors import EnsembleLayer, check_members

KINDS = ("classification", "regression")


def fold(x: Value) -> Any:
    """`[E, B, ...]` as `[E * B, ...]`: what a layer takes. Of a pytree, every array."""

    def leaf(x: Value) -> jax.Array:
        x = jnp.asarray(x)
        if x.ndim < 2:
            raise ValueError(
                f"`x` of `fold` must have an axis of members and one of rows, but has the shape "
                f"{list(x.shape)}."
            )
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    return jax.tree.map(leaf, x)


def unfold(x: Value, num_members: int) -> Any:
    """`[E * B, ...]` as `[E, B, ...]`: one member after the other. Of a pytree, every array."""
    members = check_members(num_members)

    def leaf(x: Value) -> jax.Array:
        x = jnp.asarray(x)
        if x.ndim == 0 or x.shape[0] % members:
            raise ValueError(
                f"`x` of `unfold` has the shape {list(x.shape)}, but its first axis must be a "
                f"multiple of num_members={members}."
            )
        return x.reshape(members, x.shape[0] // members, *x.shape[1:])

    return jax.tree.map(leaf, x)


def tile(x: Value, num_members: int) -> Any:
    """A plain batch `[B, ...]` once for each member, `[E * B, ...]`. Of a pytree, every array."""
    members = check_members(num_members)

    def leaf(x: Value) -> jax.Array:
        x = jnp.asarray(x)
        if x.ndim == 0:
            raise ValueError("`x` of `tile` must have an axis of rows, but has the shape [].")
        each = jnp.broadcast_to(x, (members, *x.shape))
        return each.reshape(members * x.shape[0], *x.shape[1:])

    return jax.tree.map(leaf, x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prediction:
    """What an ensemble predicts for a batch, and how sure it is. See `predict`.

    `total` uncertainty has two parts: `aleatoric`, that of the data, which every member sees, and
    `epistemic`, that of the model, on which members disagree.
    """

    members: Any
    mean: jax.Array
    total: jax.Array
    aleatoric: jax.Array | None
    epistemic: jax.Array


def predict(
    model: Callable[[Any], Any],
    x: Value,
    *,
    kind: str = "classification",
    num_members: int | None = None,
) -> Prediction:
    """What all members of a model predict for a plain batch `[B, ...]`.

    >>> import jax
    >>> from flax import nnx
    >>> from tapax import nn
    >>> model = nn.batch_ensemble(nnx.Linear(3, 10, rngs=nnx.Rngs(0)), 4, rngs=0)
    >>> p = nn.predict(model, jax.numpy.ones((5, 3)))
    >>> p.members.shape, p.mean.shape, p.epistemic.shape
    ((4, 5, 10), (5, 10), (5,))

    For `kind="classification"` the model returns logits `[E * B, ..., classes]`. `members` are the
    logits of each member, `mean` the mean of their probabilities; `total` is the entropy of that
    mean, `aleatoric` the mean of the members' entropies, and `epistemic` the difference, which is
    the mutual information of class and member; all in nats.

    For `kind="regression"` it returns numbers `[E * B, ...]`, or a pair of means and variances.
    `epistemic` is the variance of the members' means, `aleatoric` the mean of their variances, None
    for a model that gives none, and `total` their sum.

    The model should be in evaluation mode. `num_members` is needed where it is a function, or has
    no BatchEnsemble layer.
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` must be 'classification' or 'regression', but is {kind!r}.")
    members = count_members(model) if num_members is None else check_members(num_members)
    out = model(tile(x, members))
    pair = kind == "regression" and isinstance(out, (tuple, list)) and len(out) == 2
    for array in out if pair else (out,):
        if not isinstance(array, jax.Array) or not jnp.issubdtype(array.dtype, jnp.floating):
            either = " or a pair of them, means and variances" if kind == "regression" else ""
            is_array = isinstance(array, jax.Array)
            found = f"one of the dtype {array.dtype}" if is_array else f"a {type(array).__name__}"
            raise TypeError(
                f"`model` must return an array of real numbers{either} for kind={kind!r}, but "
                f"returned {found}."
            )
    if kind == "classification":
        return _classify(unfold(out, members))
    return _regress(unfold(tuple(out) if pair else out, members))


def count_members(model: Module) -> int:
    """Counts the members of the layers of a model."""
    numbers = set()
    if isinstance(model, nnx.Module):
        layers = (node for _, node in nnx.iter_graph(model) if isinstance(node, EnsembleLayer))
        numbers = {layer.num_members for layer in layers}
    return only_number(numbers, "a model with {}, of type " + type(model).__name__)


def only_number(numbers: set[int], holder: str) -> int:
    """The one number of members that layers have; `holder` says what has {} in it."""
    if len(numbers) != 1:
        found = f"layers of {sorted(numbers)} members" if numbers else "no BatchEnsemble layer"
        raise ValueError(f"`num_members` must be given for {holder.format(found)}.")
    return numbers.pop()


def _widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _classify(logits: jax.Array) -> Prediction:
    if logits.ndim < 3 or logits.shape[-1] < 2:
        raise ValueError(
            "`model` must return logits of 2 classes or more along the last axis for "
            f"kind='classification', but each member returned the shape {list(logits.shape[1:])}."
        )
    log_p = jax.nn.log_softmax(_widen(logits))
    log_mean = jax.nn.logsumexp(log_p, axis=0) - jnp.log(logits.shape[0])
    p, mean = jnp.exp(log_p), jnp.exp(log_mean)
    # As a mean of divergences it is no difference of large numbers, and not negative.
    epistemic = jnp.maximum(_sum_weighted(p, log_p - log_mean).mean(0), 0)
    entropies = -_sum_weighted(p, log_p)
    return Prediction(logits, mean, -_sum_weighted(mean, log_mean), entropies.mean(0), epistemic)


def _sum_weighted(p: jax.Array, x: jax.Array) -> jax.Array:
    """The sum of `p * x` over classes, where those of no probability count nothing."""
    return jnp.sum(jnp.where(p > 0, p * jnp.where(p > 0, x, 0), 0), axis=-1)


def _regress(out: PyTree) -> Prediction:
    means, variances = out if isinstance(out, tuple) else (out, None)
    epistemic = _widen(means).var(0)
    aleatoric = None if variances is None else _widen(variances).mean(0)
    total = epistemic if aleatoric is None else epistemic + aleatoric
    return Prediction(out, _widen(means).mean(0), total, aleatoric, epistemic)
