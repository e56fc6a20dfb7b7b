"""A rule of online learning: a pair of functions, and what they take and return."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._frameworks.recurrent_cells import HiddenError
from tapax._jax import Function, PyTree
from tapax._sites import name_of
from tapax.hidden.online._flat_step import FlatStep, check_params, check_state, trace_flat_step


class OnlineGradients(NamedTuple):
    """The gradient of the loss of one step, the loss, and the output of the step."""

    grads: Any
    loss: Any
    out: Any


class OnlineRule(NamedTuple):
    """A rule of online learning: two pure functions.

    `init(params, state, *inputs)` makes the memory for a new sequence that begins with `state`. Of
    the parameters and the inputs it takes only shapes and types: `jax.ShapeDtypeStruct` will do.

    `update(memory, params, *inputs, target=None)` takes one step, and returns the `OnlineGradients`
    and the memory for the next step.
    """

    init: Callable[..., Any]
    update: Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnlineMemory:
    """The past of a sequence, in a size that does not depend on the length of the past.

    `state` is the hidden state as it is now, and may be replaced. `traces` are the influences of
    the parameters on it, as the rule keeps them. `feedback` are the fixed random matrices of
    `e_prop`, where it has any; `count` is how many steps were taken, where it matters.
    """

    state: Any
    traces: Any
    feedback: Any = ()
    count: Any = ()


def widen_dtype(dtype: Any) -> Any:
    """The dtype of the traces of values of a dtype: 32 bits or more."""
    return jnp.promote_types(dtype, jnp.float32)


def cache_by_shape(step: Any, make: Callable[[FlatStep], Any]) -> Callable[..., Any]:
    """Makes a function of `(params, state, inputs)`: what `make` makes of the flat step for those.

    It is kept for each kind of arguments.
    """
    if not callable(step):
        raise HiddenError(f"`step` is a function (params, state, *inputs), but is {step!r}.")
    known: dict[Any, Any] = {}

    def find(params: PyTree, state: PyTree, inputs: Sequence[Any]) -> Any:
        check_params(params)
        check_state(state)
        leaves, tree = jax.tree.flatten((params, state, *inputs))
        avals = tuple(map(_get_type, leaves))
        key = tree, avals, _jax.trace_context()
        if key in known:
            return known[key]
        like = [jax.ShapeDtypeStruct(s, d, weak_type=w) for s, d, w in avals]
        given, old, *rest = tree.unflatten(like)
        program = trace_flat_step(step, given, old, rest)
        made = make(program)
        if program.is_reusable:
            known[key] = made
        return made

    return find


def _get_type(leaf: PyTree) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, bool(leaf.weak_type)
    aval = jax.typeof(leaf)
    return aval.shape, aval.dtype, bool(aval.weak_type)


def compute_loss(loss: Callable[..., Any], out: PyTree, target: PyTree) -> Any:
    """Computes the loss of a step; raises if it is not one real number."""
    value = loss(out, target)
    shape, dtype = jnp.shape(value), getattr(value, "dtype", type(value))
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        raise HiddenError(
            f"`loss` ({name_of(loss)}) returned an array of shape {list(shape)} and type {dtype}, "
            "but the loss of a step is one real number: take a sum or a mean."
        )
    return value


def check_loss(loss: Function) -> None:
    if not callable(loss):
        raise HiddenError(f"`loss` is a function (out, target) -> scalar, but is {loss!r}.")


def check_decay(decay: Any) -> None:
    """Refuses a decay that is not a number in [0, 1)."""
    is_number = isinstance(decay, (int, float)) and not isinstance(decay, bool)
    if not is_number or not 0 <= decay < 1:
        raise HiddenError(f"`decay` is a number in [0, 1), but is {decay!r}.")


def settle_dtypes(state: PyTree) -> Any:
    """Makes the dtypes of a state strong, as those of every later state are."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), state)


def get_state(memory: PyTree) -> Any:
    """The hidden state in a memory; raises if `memory` is not one."""
    if not isinstance(memory, OnlineMemory):
        raise HiddenError(f"`memory` is what `init` returned, but is a {type(memory).__name__}.")
    return memory.state


def check_traces(memory: PyTree, start: Callable[[], Any]) -> None:
    """Refuses a memory that was made for arguments of other shapes; `start` makes its traces."""
    given, expected = (jax.tree.map(jnp.shape, x) for x in (memory.traces, jax.eval_shape(start)))
    if given != expected:
        raise HiddenError(
            f"`memory` has traces of shapes {given}, but for these parameters and inputs they are "
            f"{expected}: `init` was given others."
        )


def make_grads(params: PyTree, trained: Sequence[int], grads: Sequence[Any]) -> Any:
    """Makes gradients like the parameters, with their dtypes, and zeros where there are none."""
    leaves, tree = jax.tree.flatten(params)
    made = [jnp.zeros_like(leaf) for leaf in leaves]
    for i, grad in zip(trained, grads, strict=True):
        made[i] = jnp.asarray(grad, jnp.result_type(leaves[i])).reshape(jnp.shape(leaves[i]))
    return tree.unflatten(made)
