"""Descriptions of recurrent modules, from adapters for `tapax.hidden`.

An adapter describes a module as a `RecurrentCell`, a pure step with its parameters and its state.
If a module writes its hidden states in place, the adapter also traces it to a `StatefulProgram`, in
which every write is an equation with the name of the state.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tapax import _jax
from tapax._jax import Equation, Function, Jaxpr, PyTree
from tapax._sites import SiteError, nearest, segment

StatePath = tuple[str | int, ...]
"""The keys of a hidden state: names, and numbers for items of lists."""

_WRITE = "tapax.hidden: "


class HiddenError(SiteError, AssertionError):
    """The error for a step, a state or a perturbation that does not fit.

    The message says what `tapax.hidden` expects. It is a `SiteError`, and an `AssertionError`, as
    in braintrace.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> step = lambda state, x: (state + x, state)
        >>> try:
        ...     tapax.hidden.add_hidden_perturbation(step, jnp.array([1, 2]), 1)
        ... except tapax.hidden.HiddenError as error:
        ...     print(str(error).partition(",")[0])
        The hidden state 'h' is of type int32
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeywordInputs:
    """The keyword arguments of a step, as one of its inputs."""

    values: dict[str, Any]


def join_inputs(inputs: Sequence[Any], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """Join the positional and keyword inputs to one sequence."""
    return (*inputs, KeywordInputs(keywords)) if keywords else tuple(inputs)


def split_inputs(inputs: Iterable[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Undo `join_inputs`; the state may be among the inputs."""
    args, keywords = [], {}
    for one in inputs:
        if isinstance(one, KeywordInputs):
            keywords = one.values
        else:
            args.append(one)
    return args, keywords


def call_with_inputs(fn: Function, *inputs: PyTree) -> Any:
    """Call a function with inputs from `join_inputs`."""
    args, keywords = split_inputs(inputs)
    return fn(*args, **keywords)


def name_state(path: StatePath) -> str:
    """Return the name of the hidden state at a path."""
    return "/".join(map(segment, path))


@dataclasses.dataclass(frozen=True)
class RecurrentCell:
    """A recurrent module as `step(params, state, *inputs, **keywords) -> (state, out)`.

    `state` is None if the module does not define an initial state. `paths` are the paths of the
    leaves of `state` if its keys do not name them. `objects` are the framework's objects for the
    hidden states, by path, in the order in which the module reads them.
    """

    step: Callable[..., tuple[Any, Any]]
    params: Any
    state: Any = None
    paths: Sequence[StatePath] | None = None
    objects: Mapping[StatePath, Any] | None = None


@dataclasses.dataclass(frozen=True)
class StateObject:
    """A state of a module; its value is the next `num_leaves` operands of the program.

    `hidden_type` is the shape and dtype of a hidden state, and None for any other state.
    """

    path: StatePath
    object: Any
    num_leaves: int
    hidden_type: jax.ShapeDtypeStruct | None

    @property
    def name(self) -> str:
        return name_state(self.path)


@dataclasses.dataclass(frozen=True)
class StatefulProgram:
    """A traced module that writes its hidden states in place.

    `jaxpr` takes the leaves of the inputs and then of `states`; it returns the leaves of the output
    and then of `states`. `mark_write` has named each write of a hidden state in it.
    `flatten(state, inputs)` makes its operands, and `join(results)` makes `(state, out)`.
    """

    jaxpr: Any
    states: tuple[StateObject, ...]
    flatten: Callable[[Any, Sequence[Any]], Sequence[Any]]
    join: Callable[[Sequence[Any]], tuple[Any, Any]]


def cast_operands(name: str, jaxpr: Jaxpr, leaves: Sequence[Any]) -> list[Any]:
    """Cast the operands of a traced step to the types in its trace.

    Raise if an operand has another shape; `name` names the step in the error.
    """
    given = list(zip(_jax.open_jaxpr(jaxpr).invars, leaves, strict=True))
    for variable, leaf in given:
        if variable.aval.shape != jnp.shape(leaf):
            raise HiddenError(
                f"{name} was traced for an argument of shape {list(variable.aval.shape)}, but was "
                f"given one of shape {list(jnp.shape(leaf))}. Trace it for that shape."
            )
    return [jnp.asarray(leaf, variable.aval.dtype) for variable, leaf in given]


def mark_write(value: PyTree, name: str) -> Any:
    """Name a value in the traced program as a write to the hidden state `name`."""
    return jax.tree.map(lambda x: checkpoint_name(x, _WRITE + name), value)


def find_written_name(eqn: Equation) -> str | None:
    """Return the name of the hidden state in an equation of `mark_write`; None for any other."""
    label = _jax.operation(eqn.primitive, eqn.params)[1]
    return label.removeprefix(_WRITE) if label is not None and label.startswith(_WRITE) else None


def check_names(names: Iterable[str], known: Sequence[str]) -> None:
    """Raise for a name that no hidden state has."""
    for name in names:
        if name not in known:
            near = nearest(name, known).replace("The sites are", "The hidden states are")
            raise HiddenError(f"There is no hidden state {name!r}. {near}")


def find_input_shape(inputs: Sequence[Any]) -> tuple[int, ...]:
    """Return the shape of the first array among example inputs.

    The first input may be a pair, as for `hk.ResetCore`, or given by keyword.
    """
    return jnp.shape(jax.tree.leaves(inputs)[0])


def check_inputs(module: object, inputs: Sequence[Any]) -> None:
    """Raise if there is no example input with which to trace a module."""
    if not jax.tree.leaves(inputs):
        raise HiddenError(
            f"`inputs` is empty, but tapax traces {type(module).__name__} with an example input: "
            "give one."
        )


def refuse_loop(module: object, cell: str) -> NoReturn:
    """Raise for a module that runs over a whole sequence; `cell` says what to give instead."""
    raise HiddenError(
        f"`model` is of type {type(module).__name__}, which runs its cell over a whole sequence; "
        f"the cell has the hidden state. Give the cell: {cell}."
    )


def refuse_other(value: PyTree, fix: str) -> NoReturn:
    """Raise for a value that is not a recurrent module of any framework; `fix` says what to do."""
    raise HiddenError(
        f"`model` is of type {type(value).__name__}, but must be a recurrent module: a module of "
        f"brainstate, an RNN cell of Flax, a cell of Equinox, or a core of Haiku. {fix}"
    )


def pair_paths(state: PyTree, *names: str) -> Sequence[StatePath] | None:
    """Return the paths of a state that is a pair without names; None for any other state."""
    return [(name,) for name in names] if type(state) is tuple and len(state) == 2 else None
