"""What every rule of online learning is: a pair of functions, and what goes in and out of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._frameworks.recurrent_cells import HiddenError
from tapax._sites.errors import name_of
from tapax.hidden.online._program import check_params, check_state


class Learned(NamedTuple):
    """What an update gives: the gradient of this step's loss, the loss, what the step put out."""

    grads: Any
    loss: Any
    out: Any


class Online(NamedTuple):
    """A rule of online learning: two pure functions.

    `init(params, state, *inputs)` makes the memory for a new sequence that begins with `state`. Of
    the parameters and the inputs it takes only shapes and types: `jax.ShapeDtypeStruct` will do.

    `update(memory, params, *inputs, target=None)` takes one step, and returns what was `Learned`
    and the memory for the next one.
    """

    init: Callable[..., Any]
    update: Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """What is known of the past: its size does not depend on how much of it there was.

    `state` is the hidden state as it is now, and may be replaced. `traces` are the influences of
    the parameters on it, as the rule keeps them. `feedback` are the fixed random matrices of
    `e_prop`, where it has any; `count` is how many steps were taken, where it matters.
    """

    state: Any
    traces: Any
    feedback: Any = ()
    count: Any = ()


def wide(dtype: Any) -> Any:
    """The type that traces of values of a type have: of no less than 32 bits."""
    return jnp.promote_types(dtype, jnp.float32)


class Planned:
    """A function of the shapes of a step's arguments, computed once for each."""

    def __init__(self, step: Any, make: Callable[..., Any]) -> None:
        if not callable(step):
            raise HiddenError(f"`step` is a function (params, state, *inputs), but is {step!r}.")
        self._make, self._step, self._made = make, step, {}

    def __call__(self, params: Any, state: Any, inputs: Sequence[Any]) -> Any:
        check_params(params)
        check_state(state)
        leaves, tree = jax.tree.flatten((params, state, *inputs))
        avals = tuple(map(_type_of, leaves))
        key = tree, avals, _jax.trace_context()
        if key not in self._made:
            like = [jax.ShapeDtypeStruct(s, d, weak_type=w) for s, d, w in avals]
            given, old, *rest = tree.unflatten(like)
            made, lasting = self._make(self._step, given, old, rest)
            if not lasting:
                return made
            self._made[key] = made
        return self._made[key]


def _type_of(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, bool(leaf.weak_type)
    aval = jax.typeof(leaf)
    return aval.shape, aval.dtype, bool(aval.weak_type)


def scalar_loss(loss: Callable[..., Any], out: Any, target: Any) -> Any:
    """The loss of a step; raises if it is no number."""
    value = loss(out, target)
    shape, dtype = jnp.shape(value), getattr(value, "dtype", type(value))
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        raise HiddenError(
            f"`loss` ({name_of(loss)}) returned an array of shape {list(shape)} and type {dtype}, "
            "but the loss of a step is one real number: take a sum or a mean."
        )
    return value


def check_loss(loss: Any) -> None:
    if not callable(loss):
        raise HiddenError(f"`loss` is a function (out, target) -> scalar, but is {loss!r}.")


def check_decay(decay: Any) -> None:
    """Refuses what is no number from 0 up to 1, 1 not included."""
    is_number = isinstance(decay, (int, float)) and not isinstance(decay, bool)
    if not is_number or not 0 <= decay < 1:
        raise HiddenError(f"`decay` is a number in [0, 1), but is {decay!r}.")


def settled(state: Any) -> Any:
    """A state as arrays of a type of their own, as every later one is."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), state)


def state_of(memory: Any) -> Any:
    """The hidden state in a memory; raises if it is none."""
    if not isinstance(memory, Memory):
        raise HiddenError(f"`memory` is what `init` returned, but is a {type(memory).__name__}.")
    return memory.state


def check_traces(memory: Any, like: Any) -> None:
    """Refuses a memory that was made for arguments of other shapes."""
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)  # noqa: E731
    if shapes(memory.traces) != shapes(like):
        raise HiddenError(
            f"`memory` has traces of shapes {shapes(memory.traces)}, but for these parameters and "
            f"inputs they are {shapes(like)}: `init` was given others."
        )


def as_grads(params: Any, trained: Sequence[int], grads: Sequence[Any]) -> Any:
    """Gradients like the parameters, in their types; zeros for those that have none."""
    leaves, tree = jax.tree.flatten(params)
    made = [jnp.zeros_like(leaf) for leaf in leaves]
    for i, grad in zip(trained, grads, strict=True):
        made[i] = jnp.asarray(grad, jnp.result_type(leaves[i])).reshape(jnp.shape(leaves[i]))
    return tree.unflatten(made)
