"""Steps: pure functions `step(state, *inputs) -> (state, out)`, traced, with their states by name.

A state is any pytree of arrays. Its leaves are the hidden states, and the keys that lead to one are
its path: `{"rnn": [{"h": ...}, ...]}` has `("rnn", 0, "h")`. A state that is an array alone has the
path `("h",)`. The name of a hidden state is its path in one string, `rnn/0/h`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax._frameworks.recurrent_cells import (
    HiddenError,
    StatePath,
    call_with_inputs,
    cast_operands,
    name_state,
)
from tapax._jax import PyTree, Value
from tapax._sites import name_of
from tapax.hidden._definitions import Definitions, find_definitions


@dataclasses.dataclass(frozen=True)
class HiddenState:
    """A hidden state of a step: its path, and what it is like.

    `num_state` is more than one if the last axis holds several states of every unit.
    """

    path: StatePath
    shape: tuple[int, ...]
    dtype: Any
    num_state: int = 1

    @property
    def name(self) -> str:
        return name_state(self.path)

    @property
    def is_float(self) -> bool:
        return self.dtype is not None and bool(jnp.issubdtype(self.dtype, jnp.inexact))

    @property
    def varshape(self) -> tuple[int, ...]:
        """The shape of the units."""
        return self.shape[:-1] if self.num_state > 1 else self.shape


@dataclasses.dataclass(frozen=True)
class Step:
    """A traced step.

    `jaxpr` takes the leaves of the state and of the inputs, and returns the leaves of the new state
    and of the output. `objects` are the objects that a framework has for the states, if it does;
    `order` has the numbers of the states in the order in which a module reads them.
    """

    fn: Any
    jaxpr: Any
    states: tuple[HiddenState, ...]
    state_tree: Any
    in_tree: Any
    out_tree: Any
    order: Sequence[int]
    objects: tuple[Any, ...] = ()

    def flatten(self, state: PyTree, inputs: Sequence[Any]) -> list[Any]:
        """Makes the operands of `jaxpr`; raises if it was traced for other structures or shapes."""
        leaves, treedef = jax.tree.flatten((state, *inputs))
        if treedef != self.in_tree:
            raise HiddenError(
                f"{name_of(self.fn)} was traced for a state and inputs of the structure "
                f"{self.in_tree}, but was given {treedef}. Trace it for these."
            )
        return cast_operands(name_of(self.fn), self.jaxpr, leaves)

    def find_definitions(self, *, in_loops: bool = True) -> Definitions:
        """Finds where the step defines its new states."""
        wanted = {i: s.name for i, s in enumerate(self.states) if s.is_float}
        return find_definitions(self.jaxpr, wanted, in_loops=in_loops)

    def join(self, results: Sequence[Any]) -> tuple[Any, Any]:
        """Makes the new state and the output of the results of `jaxpr`."""
        count = self.state_tree.num_leaves
        return self.state_tree.unflatten(results[:count]), self.out_tree.unflatten(results[count:])


def trace_step(
    step: Callable[..., Any],
    state: PyTree,
    inputs: Sequence[Any],
    *,
    paths: Any = None,
    counts: bool = False,
) -> Step:
    """Traces a step for `state` and `inputs`; raises if it does not return a state and an output.

    `paths` are the paths of the leaves of the state, where its own keys do not name them. With
    `counts`, the state may also hold integers and random keys, which are not hidden states.
    """
    if not callable(step):
        raise HiddenError(
            f"`step` must be a function step(state, *inputs) -> (state, out), but is {step!r} of "
            f"type {type(step).__name__}."
        )
    states = list_hidden_states(state, paths, counts)
    args = state, *inputs
    jaxpr, out_tree = trace_leaves(step, args, state, states, _describe)
    state_tree, in_tree = jax.tree.structure(state), jax.tree.structure(args)
    return Step(step, jaxpr, states, state_tree, in_tree, out_tree, range(len(states)))


def trace_leaves(
    step: Callable[..., Any],
    args: Sequence[Any],
    state: PyTree,
    states: Sequence[HiddenState],
    describe: Callable[[Any], str],
) -> tuple[Any, Any]:
    """Traces `step(*args) -> (state, out)`, from leaves to leaves; returns the structure of `out`.

    It raises if the step does not return a pair, which `describe` describes, or another kind of
    state than `state`.
    """
    arrays, in_tree = jax.tree.flatten(tuple(args))

    def flat(*arrays: Value) -> tuple[list[Value], PyTree]:
        result = call_with_inputs(step, *in_tree.unflatten(arrays))
        if not (isinstance(result, (tuple, list)) and len(result) == 2):
            raise HiddenError(
                f"{name_of(step)} returns {describe(result)}, but a step returns two things: "
                "the new state, and what it puts out."
            )
        new, out = result
        _check_new_state(step, states, state, new)
        return jax.tree.leaves(new), out

    jaxpr, (_, out) = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    return jaxpr, jax.tree.structure(out)


def list_hidden_states(
    state: PyTree, paths: Sequence[StatePath] | None = None, counts: bool = False
) -> tuple[HiddenState, ...]:
    """Lists the leaves of a state; raises if one is not a floating-point array."""
    keyed = jax.tree_util.tree_leaves_with_path(state)
    if not keyed:
        raise HiddenError(
            f"The state {state!r} has no arrays in it, but a step has at least one hidden state."
        )
    own = [tuple(map(_path_key, keys)) or ("h",) for keys, _ in keyed]
    made = tuple(
        HiddenState(tuple(path), tuple(jnp.shape(leaf)), _dtype(leaf))
        for path, (_, leaf) in zip(paths or own, keyed, strict=True)
    )
    for one in made:
        if not one.is_float and not (counts and any(other.is_float for other in made)):
            raise HiddenError(
                f"The hidden state {one.name!r} is of type {one.dtype or 'no array'}, but a hidden "
                "state has to be of a floating-point type, for there is no derivative by another. "
                "Close over it, or hand it to the step as an input."
            )
    return made


def _path_key(key: Any) -> str | int:
    number = getattr(key, "idx", getattr(key, "key", None))
    return number if isinstance(number, int) else jax.tree_util.keystr((key,), simple=True)


def _check_new_state(step: Any, states: Sequence[HiddenState], state: PyTree, new: Value) -> None:
    """Refuses a step that returns another kind of state than it was given."""
    old, treedef = jax.tree.flatten(state)
    leaves, new_tree = jax.tree.flatten(new)
    if new_tree != treedef:
        raise HiddenError(
            f"{name_of(step)} was given a state of the structure {treedef}, but returns one of the "
            f"structure {new_tree}: a step returns a state like the one it is given."
        )
    for one, before, after in zip(states, old, leaves, strict=True):
        for what, was, now in (
            ("shape", list(jnp.shape(before)), list(jnp.shape(after))),
            ("type", _dtype(before), _dtype(after)),
        ):
            if was != now:
                raise HiddenError(
                    f"The hidden state {one.name!r} goes into {name_of(step)} with {what} {was} "
                    f"and comes out with {what} {now}: a step returns a state like the one it is "
                    "given."
                )


def _dtype(leaf: PyTree) -> Any:
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        extended = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        return leaf.dtype if extended else jax.dtypes.canonicalize_dtype(leaf.dtype)
    is_number = isinstance(leaf, (bool, int, float, complex))
    return jax.dtypes.canonicalize_dtype(type(leaf)) if is_number else None


def _describe(result: PyTree) -> str:
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of {len(result)}"
    return f"one value of type {type(result).__name__}"
