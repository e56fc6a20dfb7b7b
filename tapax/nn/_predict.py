"""Predictions of an ensemble, with their uncertainty."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tapax._frameworks.interface import Module
from tapax._jax import PyTree
from tapax.nn._arguments import check_key, check_members
from tapax.nn._batches import tile, unfold
from tapax.nn._compilation import compiled
from tapax.nn._ensembles import Subensemble
from tapax.nn._random import RandomFunction

KINDS = ("classification", "regression")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prediction:
    """The prediction of an ensemble for a batch, with its uncertainty; `predict` returns it.

    For classes, uncertainties are entropies in nats; for numbers, they are variances.

    Attributes:
        members: The logits, or the numbers, of each member, with a first axis of members; a pair of
            arrays if the members return means and variances.
        mean: The mean of the members' probabilities, `[B, ..., classes]`, or of their numbers,
            `[B, ...]`.
        total: The total uncertainty, `[B, ...]`: the entropy of `mean`, or the sum of `aleatoric`
            and `epistemic`.
        aleatoric: The uncertainty of the data, which every member sees: the mean of the members'
            entropies, or of their variances. None for a regression without variances.
        epistemic: The uncertainty of the model, on which members disagree: the mutual information
            of class and member, or the variance of the members' means.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> model = lambda key, x: x + jax.random.normal(key)  # members differ by a shift
        >>> x = jnp.array([1.0, 2.0])
        >>> draw = {"num_members": 1000, "key": jax.random.key(0)}
        >>> p = tapax.nn.predict(model, x, kind="regression", **draw)
        >>> p.members.shape, [round(float(v)) for v in p.epistemic]
        ((1000, 2), [1, 1])
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
    """Predict with all members of an ensemble for a plain batch `[B, ...]`.

    The members are those of a model with BatchEnsemble layers, or of a `subensemble`, or draws of a
    function of a random key, such as `dropout`, `noise` and `weight_noise` make. Put models in
    evaluation mode.

    Args:
        model: The ensemble. With `key`, any function that takes a key first is an ensemble:
            `lambda key, x: net.apply(variables, x, rngs={"dropout": key})`.
        *args: The arguments of one member, without the key. A model with BatchEnsemble layers takes
            one argument, the batch.
        kind: `"classification"`, for which a member returns logits `[B, ..., classes]`; or
            `"regression"`, for which it returns numbers `[B, ...]` or a pair of means and
            variances.
        num_members: How many members to draw. It is needed only for functions of a key.
        key: The random key with which to draw the members.
        plain_first: Whether the first member is the model without its perturbations; only for a
            `RandomFunction`.

    Returns:
        A `Prediction`, with the mean, and total, aleatoric and epistemic uncertainty.

    Raises:
        TypeError: If the results of the model do not fit `kind`, a key is missing, or `plain_first`
            is given for a model that is not a `RandomFunction`.
        ValueError: If `kind` is not one of these two strings, or if the number of members is not
            known: a function of a key without `num_members`, or a model without BatchEnsemble
            layers.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> from tapax import nn
        >>> x = jax.random.normal(jax.random.key(0), (5, 3))
        >>> model = nn.batch_ensemble(nnx.Linear(3, 10, rngs=nnx.Rngs(0)), 4, rngs=0)
        >>> p = nn.predict(model, x)
        >>> p.members.shape, p.mean.shape, p.epistemic.shape
        ((4, 5, 10), (5, 10), (5,))
        >>> noisy = nn.weight_noise(nnx.Linear(3, 10, rngs=nnx.Rngs(0)), 0.1)
        >>> p = nn.predict(noisy, x, num_members=4, key=jax.random.key(0))
        >>> p.members.shape
        (4, 5, 10)
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` must be 'classification' or 'regression', but is {kind!r}.")
    if plain_first and not isinstance(model, RandomFunction):
        raise TypeError(
            "`plain_first` needs a function that tapax.nn.dropout, noise or weight_noise made, but "
            f"the model is a {type(model).__name__}, whose plain model is not known."
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
    """Run all members; stack their results along a first axis."""
    if isinstance(model, Subensemble):
        if key is not None or num_members not in (None, model.num_members):
            raise ValueError(
                f"The number of heads of the subensemble, {model.num_members}, is fixed. Leave "
                "`num_members` and `key` out."
            )
        return model(*args)
    if isinstance(model, RandomFunction) or key is not None:
        key = check_key(key)
        if num_members is None:
            raise ValueError("`num_members`, the number of members to draw, must be given.")
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
    """Count the members of the layers of a model."""
    numbers: set[int] = set()
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(model, nnx.Module):
        nodes = (node for _, node in nnx.iter_graph(model))
        numbers = {node.num_members for node in nodes if hasattr(node, "__tap_members__")}
    return only_number(numbers, "a model with {}, of type " + type(model).__name__)


def only_number(numbers: set[int], holder: str) -> int:
    """Return the only number of members; `holder` describes the layers in an error."""
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
    # A mean of divergences avoids the difference of large numbers, and is not negative.
    epistemic = jnp.maximum(_sum_weighted(p, log_p - log_mean).mean(0), 0)
    entropies = -_sum_weighted(p, log_p)
    return Prediction(logits, mean, -_sum_weighted(mean, log_mean), entropies.mean(0), epistemic)


def _sum_weighted(p: jax.Array, x: jax.Array) -> jax.Array:
    """Sum `p * x` over classes, without the classes of zero probability."""
    return jnp.sum(jnp.where(p > 0, p * jnp.where(p > 0, x, 0), 0), axis=-1)


def _regress(out: PyTree) -> Prediction:
    means, variances = out if isinstance(out, tuple) else (out, None)
    epistemic = _widen(means).var(0)
    aleatoric = None if variances is None else _widen(variances).mean(0)
    total = epistemic if aleatoric is None else epistemic + aleatoric
    return Prediction(out, _widen(means).mean(0), total, aleatoric, epistemic)
