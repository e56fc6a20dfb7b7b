"""Recurrent modules of frameworks as steps: pure functions of parameters, a state and inputs.

A cell of Flax starts from its own initial carry, one of Equinox and Haiku from zeros; a module of
brainstate has its hidden states in it. Another module that is called like a step,
`model(state, *inputs) -> (state, out)`, has to be given its state.

>>> import jax.numpy as jnp, tapax
>>> from flax import nnx
>>> cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
>>> step, params, state = tapax.hidden.functional(cell, jnp.ones(3))
>>> state, out = step(params, state, jnp.ones(3))
>>> state.shape
(4,)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tapax.hidden._groups import HiddenGroup, groups_of
from tapax.hidden._perturbation import HiddenPerturbation, perturbation_of
from tapax.hidden._step import HiddenError, Path, Step, bound, trace


class Functional(NamedTuple):
    """A recurrent module as `step(params, state, *inputs) -> (state, out)`."""

    step: Callable[..., tuple[Any, Any]]
    params: Any
    state: Any


class _Cell(NamedTuple):
    """What a framework says of a module: how it is called, its parameters, where it starts."""

    call: Callable[..., tuple[Any, Any]]
    params: Any
    start: Any
    paths: Sequence[Path] | None = None


def functional(model: Any, *inputs: Any, state: Any = None) -> Functional:
    """A recurrent module, called on inputs like these, as a pure step, its parameters, its state.

    What else the module keeps, such as the key of a dropout, is among the parameters, and stays as
    it is. Haiku keeps parameters itself, within the transformed function: there they are none.
    """
    if is_brainstate(model):
        from tapax.hidden import _brainstate

        return Functional(*_brainstate.functional(model, inputs, state))
    cell = _cell(model, inputs)
    return Functional(cell.call, cell.params, _state(model, cell, state))


def add_hidden_perturbation_in_module(
    model: Any, *inputs: Any, state: Any = None
) -> HiddenPerturbation:
    """Adds a perturbation to every hidden state of a recurrent module, called on `inputs`.

    `perturb_jaxpr` takes and returns what that of `add_hidden_perturbation` does. That of a module
    of brainstate takes the inputs, then the values of all of its states in the order in which it
    reads them, and returns what it puts out, then these.
    """
    if is_brainstate(model):
        from tapax.hidden import _brainstate

        return _brainstate.perturbation(model, inputs, state)
    return perturbation_of(_traced(model, inputs, state))


def hidden_groups_in_module(model: Any, *inputs: Any, state: Any = None) -> list[HiddenGroup]:
    """The hidden states of a recurrent module, called on `inputs`, in groups: see `hidden_groups`.

    A group's `transition` and `diagonal_jacobian` take a state like that of `functional`.
    """
    if is_brainstate(model):
        from tapax.hidden import _brainstate

        return _brainstate.groups(model, inputs, state)
    return groups_of(_traced(model, inputs, state))


def _traced(model: Any, inputs: Sequence[Any], state: Any) -> Step:
    cell = _cell(model, inputs)
    step = bound(cell.call, cell.params, type(model).__name__)
    paths = cell.paths if state is None else None
    return trace(step, _state(model, cell, state), inputs, paths=paths)


def is_brainstate(model: Any) -> bool:
    package = sys.modules.get("brainstate")
    return package is not None and isinstance(model, package.graph.Node)


def _state(model: Any, cell: _Cell, state: Any) -> Any:
    if state is not None:
        return state
    if cell.start is None:
        raise HiddenError(
            f"`model` is of type {type(model).__name__}, which says nothing of its hidden state. "
            "Give it: state=..., for a model that is called as model(state, *inputs) and returns "
            "the new state and what it puts out."
        )
    return cell.start


def _cell(model: Any, inputs: Sequence[Any]) -> _Cell:
    if not inputs:
        raise HiddenError(
            f"`inputs` is empty, but {type(model).__name__} is traced for what it is called on: "
            "give an example of its input."
        )
    for package, make in _FRAMEWORKS.items():
        if package in sys.modules:
            made = make(sys.modules[package], model, inputs)
            if made is not None:
                return made
    raise HiddenError(
        f"`model` is of type {type(model).__name__}, but expected is a recurrent module: one of "
        "brainstate, an RNN cell of Flax, a cell of Equinox, a core of Haiku. For a function "
        "step(state, *inputs) there is add_hidden_perturbation."
    )


def _refuse_loop(model: Any, cell: str) -> None:
    raise HiddenError(
        f"`model` is of type {type(model).__name__}, which runs over a whole sequence and has no "
        f"hidden state of its own. Give its cell: {cell}."
    )


def _lstm(state: Any, *names: str) -> Sequence[Path] | None:
    """The paths of a state that is a pair without names."""
    return [(name,) for name in names] if type(state) is tuple and len(state) == 2 else None


def _nnx(nnx: Any, model: Any, inputs: Sequence[Any]) -> _Cell | None:
    if not isinstance(model, nnx.Module):
        return None
    if isinstance(model, nnx.RNN):
        _refuse_loop(model, "model.cell")
    graph, params = nnx.split(model)

    def call(params: Any, state: Any, *inputs: Any) -> tuple[Any, Any]:
        # Variables of this trace: those that were split off may not be updated in it.
        return nnx.merge(graph, jax.tree.map(lambda x: x, params))(state, *inputs)

    if not isinstance(model, nnx.RNNCellBase):
        return _Cell(call, params, None)
    start = model.initialize_carry(jnp.shape(inputs[0]), nnx.Rngs(0))
    return _Cell(call, params, start, _lstm(start, "c", "h"))


def _linen(linen: Any, model: Any, inputs: Sequence[Any]) -> _Cell | None:
    if not isinstance(model, linen.Module):
        return None
    if isinstance(model, linen.RNN):
        _refuse_loop(model, "model.cell, bound to its variables")
    if model.scope is None:
        raise HiddenError(
            f"`model` is a {type(model).__name__} without parameters, for modules of Linen have "
            "none until they are bound. Give model.bind(variables)."
        )
    unbound, variables = model.unbind()

    def call(variables: Any, state: Any, *inputs: Any) -> tuple[Any, Any]:
        return unbound.apply(variables, state, *inputs)  # pyright: ignore[reportReturnType]

    if not isinstance(model, linen.RNNCellBase):
        return _Cell(call, variables, None)
    start = unbound.initialize_carry(jax.random.key(0), jnp.shape(inputs[0]))
    return _Cell(call, variables, start, _lstm(start, "c", "h"))


def _equinox(eqx: Any, model: Any, inputs: Sequence[Any]) -> _Cell | None:
    del inputs
    if not isinstance(model, eqx.Module):
        return None
    params, rest = eqx.partition(model, eqx.is_array)
    is_lstm = isinstance(model, eqx.nn.LSTMCell)
    if not is_lstm and not isinstance(model, eqx.nn.GRUCell):
        return _Cell(lambda params, *args: eqx.combine(params, rest)(*args), params, None)

    def call(params: Any, state: Any, *inputs: Any) -> tuple[Any, Any]:
        new = eqx.combine(params, rest)(*inputs, state)
        return new, new[0] if is_lstm else new

    zeros = jnp.zeros(model.hidden_size, model.weight_hh.dtype)
    start = (zeros, zeros) if is_lstm else zeros
    return _Cell(call, params, start, _lstm(start, "h", "c"))


def _haiku(hk: Any, model: Any, inputs: Sequence[Any]) -> _Cell | None:
    if not isinstance(model, hk.RNNCore):
        return None
    ndim = len(getattr(model, "input_shape", ())) + 1
    batch = jnp.shape(inputs[0])[0] if jnp.ndim(inputs[0]) > ndim else None
    start = model.initial_state(batch)
    # Parameters come to be with the first call, which must not be one that is traced.
    model(*inputs, start)

    def call(params: Any, state: Any, *inputs: Any) -> tuple[Any, Any]:
        del params
        out, new = model(*inputs, state)
        return new, out

    return _Cell(call, {}, start)


_FRAMEWORKS: dict[str, Callable[[Any, Any, Sequence[Any]], _Cell | None]] = {
    "flax.nnx": _nnx,
    "flax.linen": _linen,
    "equinox": _equinox,
    "haiku": _haiku,
}
