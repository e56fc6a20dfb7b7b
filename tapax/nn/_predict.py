"""Batches of members, and predictions with their uncertainty.

>>> import jax.numpy as jnp
>>> x = jnp.arange(3.0)
>>> tile(x, 2).tolist()  # the same rows for every member
[0.0, 1.0, 2.0, 0.0, 1.0, 2.0]
>>> unfold(tile(x, 2), 2).shape, fold(unfold(tile(x, 2), 2)).shape
((2, 3), (6,))
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tapax._frameworks.interface import Module
from tapax._jax import PyTree, Value
from tapax.nn._arguments import check_key, check_members
from tapax.nn._compilation import compiled
from tapax.nn._ensembles import Subensemble
from tapax.nn._random import RandomFunction

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
    model: Callable[..., Any],
    *args: Any,
    kind: str = "classification",
    num_members: int | None = None,
    key: Any = None,
    plain_first: bool = False,
) -> Prediction:
    """What all members of an ensemble predict for a plain batch `[B, ...]`.

    The members are those of a model with BatchEnsemble layers; or draws of a function of a random
    key, as `dropout`, `noise` and `weight_noise` make it; or those of a `subensemble`. Models
    should be in evaluation mode.

    Args:
        model: the ensemble. A function of your own that takes a key before other arguments is one
            too, if `key` is given: `lambda key, x: net.apply(variables, x, rngs={"dropout": key})`.
        *args: the arguments of one member, without the key. A model with BatchEnsemble layers takes
            one, the batch.
        kind: `"classification"`, for which a member returns logits `[B, ..., classes]`; or
            `"regression"`, for which it returns numbers `[B, ...]` or a pair of means and
            variances.
        num_members: how many members to draw. A model whose layers know may leave it out.
        key: a random key, from which the members are drawn.
        plain_first: whether the first member is the model without its perturbations.

    Returns:
        A `Prediction`. For classes, `members` are the logits of each member, `mean` the mean of
        their probabilities; `total` is the entropy of that mean, `aleatoric` the mean of the
        members' entropies, and `epistemic` the difference, which is the mutual information of class
        and member; all in nats. For numbers, `epistemic` is the variance of the members' means,
        `aleatoric` the mean of their variances, None for a model that gives none, and `total` their
        sum.

    Raises:
        TypeError: the model returns other things than `kind` says, or a key is missing.
        ValueError: `kind` is neither, or nothing tells the number of members.

    >>> import jax
    >>> from flax import nnx
    >>> from tapax import nn
    >>> model = nn.batch_ensemble(nnx.Linear(3, 10, rngs=nnx.Rngs(0)), 4, rngs=0)
    >>> p = nn.predict(model, jax.numpy.ones((5, 3)))
    >>> p.members.shape, p.mean.shape, p.epistemic.shape
    ((4, 5, 10), (5, 10), (5,))
    >>> noisy = nn.weight_noise(nnx.Linear(3, 10, rngs=nnx.Rngs(0)), 0.1)
    >>> p = nn.predict(noisy, jax.numpy.ones((5, 3)), num_members=4, key=jax.random.key(0))
    >>> p.members.shape
    (4, 5, 10)
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` must be 'classification' or 'regression', but is {kind!r}.")
    if plain_first and not isinstance(model, RandomFunction):
        raise TypeError(
            "`plain_first` is for functions that tapax.nn.dropout, noise or weight_noise made: the "
            f"plain model is not known of a {type(model).__name__}."
        )
    out = _run_members(model, args, num_members, key, plain_first)
    pair = kind == "regression" and isinstance(out, (tuple, list)) and len(out) == 2
    arrays: tuple[Any, ...] = tuple(out) if pair else (out,)
    for array in arrays:
        if not isinstance(array, jax.Array) or not jnp.issubdtype(array.dtype, jnp.floating):
            either = " or a pair of them, means and variances" if kind == "regression" else ""
            is_array = isinstance(array, jax.Array)
            found = f"one of the dtype {array.dtype}" if is_array else f"a {type(array).__name__}"
            raise TypeError(
                f"`model` must return an array of real numbers{either} for kind={kind!r}, but "
                f"returned {found}."
            )
    if kind == "classification":
        return _classify(arrays[0])
    return _regress(arrays if pair else out)


def _run_members(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    num_members: int | None,
    key: Any,
    plain_first: bool,
) -> Any:
    """What all members return, along a first axis."""
    if isinstance(model, Subensemble):
        if key is not None or num_members not in (None, model.num_members):
            raise ValueError(
                f"The subensemble has the {model.num_members} heads that it was made with: leave "
                "`num_members` and `key` out."
            )
        return model(*args)
    if isinstance(model, RandomFunction) or key is not None:
        key = check_key(key)
        if num_members is None:
            raise ValueError("`num_members` must be given: how many members to draw.")
        if isinstance(model, RandomFunction):
            draw = model.sample_after_plain if plain_first else model.sample
            return draw(key, num_members, *args)
        keys = jax.random.split(key, check_members(num_members))
        return compiled(_draw_all)(model, keys, args)
    if len(args) != 1:
        raise TypeError(
            f"A model with BatchEnsemble layers takes one batch, but was given {len(args)} "
            "arguments. A function of a random key needs one: key=jax.random.key(0)."
        )
    members = count_members(model) if num_members is None else check_members(num_members)
    out = model(tile(args[0], members))
    return unfold(out, members) if _is_arrays(out) else out


def _draw_all(model: Callable[..., Any], keys: jax.Array, args: tuple[Any, ...]) -> Any:
    return jax.vmap(lambda key: model(key, *args))(keys)


def _is_arrays(out: PyTree) -> bool:
    return all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(out))


def count_members(model: Module) -> int:
    """Counts the members of the layers of a model."""
    numbers: set[int] = set()
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(model, nnx.Module):
        nodes = (node for _, node in nnx.iter_graph(model))
        numbers = {node.num_members for node in nodes if hasattr(node, "__tap_members__")}
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
