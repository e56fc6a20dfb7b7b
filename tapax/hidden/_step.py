"""Steps: pure functions `step(state, *inputs) -> (state, out)`, traced, with their states by name.

A state is any pytree of arrays. Its leaves are the hidden states, and the path of a hidden state
consists of its keys: `{"rnn": [{"h": ...}, ...]}` contains `("rnn", 0, "h")`. A state that is a
single array has the path `("h",)`. The name of a hidden state joins its path, `rnn/0/h`.
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
    """A hidden state of a step: its path, shape and dtype.

    `HiddenPerturbation.perturb_hidden_states` and `HiddenGroup.hidden_states` contain such states.

    Attributes:
        path: The keys of the state in the pytree of all states.
        shape: The shape.
        dtype: The dtype.
        num_state: The number of states of every unit; if there are several, they are along the last
            axis.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> step = lambda state, x: ({"rnn": [0.5 * state["rnn"][0] + x]}, x)
        >>> (group,) = tapax.hidden.hidden_groups(step, {"rnn": [jnp.zeros(3)]}, jnp.ones(3))
        >>> (state,) = group.hidden_states
        >>> state.path, state.name, state.varshape, state.is_float
        (('rnn', 0), 'rnn/0', (3,), True)
    """

    path: StatePath
    shape: tuple[int, ...]
    dtype: Any
    num_state: int = 1

    @property
    def name(self) -> str:
        """The name of the state: its path, joined by slashes."""
        return name_state(self.path)

    @property
    def is_float(self) -> bool:
        """True if the state contains real or complex numbers."""
        return self.dtype is not None and bool(jnp.issubdtype(self.dtype, jnp.inexact))

    @property
    def varshape(self) -> tuple[int, ...]:
        """The shape of the array of units."""
        return self.shape[:-1] if self.num_state > 1 else self.shape


@dataclasses.dataclass(frozen=True)
class Step:
    """A traced step.

    `jaxpr` takes the leaves of the state and of the inputs, and returns the leaves of the new state
    and of the output. `objects` are the objects of a framework for the states, if there are any;
    `order` lists the numbers of the states in the order in which a module reads them.
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
        """Make the operands of `jaxpr`; raise if it was traced for other structures or shapes."""
        leaves, treedef = jax.tree.flatten((state, *inputs))
        if treedef != self.in_tree:
            raise HiddenError(
                f"{name_of(self.fn)} was traced for a state and inputs of the structure "
                f"{self.in_tree}, but was called with {treedef}. Pass these as the example instead."
            )
        return cast_operands(name_of(self.fn), self.jaxpr, leaves)

    def find_definitions(self, *, in_loops: bool = True) -> Definitions:
        """Find the definitions of the new states of the step."""
        wanted = {i: s.name for i, s in enumerate(self.states) if s.is_float}
        return find_definitions(self.jaxpr, wanted, in_loops=in_loops)

    def join(self, results: Sequence[Any]) -> tuple[Any, Any]:
        """Make the new state and the output from the results of `jaxpr`."""
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
    """Trace a step for `state` and `inputs`; raise if it does not return a state and an output.

    `paths` are the paths of the leaves of the state; by default they consist of its keys. With
    `counts`, the state may also contain integers and random keys, which are not hidden states.
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
    """Trace `step(*args) -> (state, out)`, from leaves to leaves; return the structure of `out`.

    Raise if the step does not return a pair, with a description by `describe`, or if it returns
    another kind of state than `state`.
    """
    arrays, in_tree = jax.tree.flatten(tuple(args))

    def flat(*arrays: Value) -> tuple[list[Value], PyTree]:
        result = call_with_inputs(step, *in_tree.unflatten(arrays))
        if not (isinstance(result, (tuple, list)) and len(result) == 2):
            raise HiddenError(
                f"{name_of(step)} returns {describe(result)}, but a step must return a pair: the "
                "new state and the output."
            )
        new, out = result
        _check_new_state(step, states, state, new)
        return jax.tree.leaves(new), out

    jaxpr, (_, out) = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    return jaxpr, jax.tree.structure(out)


def list_hidden_states(
    state: PyTree, paths: Sequence[StatePath] | None = None, counts: bool = False
) -> tuple[HiddenState, ...]:
    """List the leaves of a state; raise if one is not a floating-point array."""
    keyed = jax.tree_util.tree_leaves_with_path(state)
    if not keyed:
        raise HiddenError(
            f"The state {state!r} contains no arrays, but a step needs at least one hidden state."
        )
    default = [tuple(map(_path_key, keys)) or ("h",) for keys, _ in keyed]
    made = tuple(
        HiddenState(tuple(path), tuple(jnp.shape(leaf)), _dtype(leaf))
        for path, (_, leaf) in zip(paths or default, keyed, strict=True)
    )
    for one in made:
        if not one.is_float and not (counts and any(other.is_float for other in made)):
            raise HiddenError(
                f"The hidden state {one.name!r} is of type {one.dtype or 'no array'}, but a hidden "
                "state must have a floating-point type, because it is differentiated. Close over "
                "the value, or pass it to the step as an input."
            )
    return made


def _path_key(key: Any) -> str | int:
    number = getattr(key, "idx", getattr(key, "key", None))
    return number if isinstance(number, int) else jax.tree_util.keystr((key,), simple=True)


def _check_new_state(step: Any, states: Sequence[HiddenState], state: PyTree, new: Value) -> None:
    """Refuse a step that returns another kind of state than it takes."""
    old, treedef = jax.tree.flatten(state)
    leaves, new_tree = jax.tree.flatten(new)
    if new_tree != treedef:
        raise HiddenError(
            f"{name_of(step)} takes a state of the structure {treedef}, but returns one of the "
            f"structure {new_tree}. A step must return a state like the one it takes."
        )
    for one, before, after in zip(states, old, leaves, strict=True):
        for what, was, now in (
            ("shape", list(jnp.shape(before)), list(jnp.shape(after))),
            ("type", _dtype(before), _dtype(after)),
        ):
            if was != now:
                raise HiddenError(
                    f"The hidden state {one.name!r} enters {name_of(step)} with {what} {was} and "
                    f"leaves it with {what} {now}. A step must return a state like the one it "
                    "takes."
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
