"""Recurrent modules as adapters describe them to `tapax.hidden`.

An adapter describes a module as a `RecurrentCell`, a pure step with its parameters and its state.
Where modules write their hidden states in place, it also traces one to a `StatefulProgram`, in
which every write is an equation that names the state.
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
"""The keys that lead to a hidden state: names, and numbers where a list holds it."""

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
    """The inputs of a step that are given by keyword, as one of its inputs."""

    values: dict[str, Any]


def join_inputs(inputs: Sequence[Any], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """Makes one sequence of the inputs by position and by keyword."""
    return (*inputs, KeywordInputs(keywords)) if keywords else tuple(inputs)


def split_inputs(inputs: Iterable[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Undoes `join_inputs`; the state may be among the inputs."""
    args, keywords = [], {}
    for one in inputs:
        if isinstance(one, KeywordInputs):
            keywords = one.values
        else:
            args.append(one)
    return args, keywords


def call_with_inputs(fn: Function, *inputs: PyTree) -> Any:
    """Calls a function with inputs of `join_inputs`."""
    args, keywords = split_inputs(inputs)
    return fn(*args, **keywords)


def name_state(path: StatePath) -> str:
    """The name of the hidden state at a path."""
    return "/".join(map(segment, path))


@dataclasses.dataclass(frozen=True)
class RecurrentCell:
    """A recurrent module as `step(params, state, *inputs, **keywords) -> (state, out)`.

    `state` is None if the module does not define an initial one. `paths` are the paths of the
    leaves of `state` where its keys do not name them. `objects` are the framework's own objects for
    the hidden states, by path, in the order in which the module reads them.
    """

    step: Callable[..., tuple[Any, Any]]
    params: Any
    state: Any = None
    paths: Sequence[StatePath] | None = None
    objects: Mapping[StatePath, Any] | None = None


@dataclasses.dataclass(frozen=True)
class StateObject:
    """A state of a module whose value is the next `num_leaves` operands of its program.

    `hidden_type` is the shape and dtype of a hidden state; it is None for any other state.
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

    `jaxpr` takes the leaves of the inputs and then those of `states`; it returns the leaves of the
    output and then those of `states`. `mark_write` named each write of a hidden state in it.
    `flatten(state, inputs)` makes its operands, `join(results)` makes `(state, out)`.
    """

    jaxpr: Any
    states: tuple[StateObject, ...]
    flatten: Callable[[Any, Sequence[Any]], Sequence[Any]]
    join: Callable[[Sequence[Any]], tuple[Any, Any]]


def cast_operands(name: str, jaxpr: Jaxpr, leaves: Sequence[Any]) -> list[Any]:
    """Casts the operands of a traced step to the types it was traced for.

    It raises if an operand has another shape; `name` names the step in the error.
    """
    given = list(zip(_jax.open_jaxpr(jaxpr).invars, leaves, strict=True))
    for variable, leaf in given:
        if variable.aval.shape != jnp.shape(leaf):
            raise HiddenError(
                f"{name} was traced for an argument of shape {list(variable.aval.shape)}, but was "
                f"given one of shape {list(jnp.shape(leaf))}. Trace it for this."
            )
    return [jnp.asarray(leaf, variable.aval.dtype) for variable, leaf in given]


def mark_write(value: PyTree, name: str) -> Any:
    """Names a value in the traced program as one that is written to the hidden state `name`."""
    return jax.tree.map(lambda x: checkpoint_name(x, _WRITE + name), value)


def find_written_name(eqn: Equation) -> str | None:
    """The name of the hidden state that an equation of `mark_write` names; None for any other."""
    label = _jax.operation(eqn.primitive, eqn.params)[1]
    return label.removeprefix(_WRITE) if label is not None and label.startswith(_WRITE) else None


def check_names(names: Iterable[str], known: Sequence[str]) -> None:
    """Refuses names that no hidden state has."""
    for name in names:
        if name not in known:
            near = nearest(name, known).replace("The sites are", "The hidden states are")
            raise HiddenError(f"There is no hidden state {name!r}. {near}")


def check_inputs(module: object, inputs: Sequence[Any]) -> None:
    """Refuses to trace a module without an example of its input."""
    if not inputs:
        raise HiddenError(
            f"`inputs` is empty, but {type(module).__name__} is traced for what it is called on: "
            "give an example of its input."
        )


def refuse_loop(module: object, cell: str) -> NoReturn:
    """Refuses a module that runs a whole sequence; `cell` is what to give in its place."""
    raise HiddenError(
        f"`model` is of type {type(module).__name__}, which runs over a whole sequence and has no "
        f"hidden state of its own. Give its cell: {cell}."
    )


def refuse_other(value: PyTree, fix: str) -> NoReturn:
    """Refuses what is not a recurrent module of any framework; `fix` is what to do about it."""
    raise HiddenError(
        f"`model` is of type {type(value).__name__}, but expected is a recurrent module: one of "
        f"brainstate, an RNN cell of Flax, a cell of Equinox, a core of Haiku. {fix}"
    )


def pair_paths(state: PyTree, *names: str) -> Sequence[StatePath] | None:
    """The paths of a state that is a pair without names; None for any other state."""
    return [(name,) for name in names] if type(state) is tuple and len(state) == 2 else None
