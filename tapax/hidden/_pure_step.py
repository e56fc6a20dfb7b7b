"""Recurrent modules as pure steps, by what the adapter of their framework says of them."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tapax._frameworks.interface import Module
from tapax._frameworks.recurrent_cells import (
    HiddenError,
    RecurrentCell,
    join_inputs,
    refuse_other,
    split_inputs,
)
from tapax._frameworks.registry import recurrent_cell
from tapax._jax import PyTree
from tapax.hidden._step import Step, trace_step


class PureStep(NamedTuple):
    """A recurrent module as `step(params, state, *inputs, **keywords) -> (state, out)`."""

    step: Callable[..., tuple[Any, Any]]
    params: Any
    state: Any


def functional(
    model: Module, *inputs: PyTree, state: PyTree = None, **keywords: PyTree
) -> PureStep:
    """Makes a pure step of a recurrent module, with its parameters and its initial state.

    A cell of a framework starts from its own initial state. Another module that is called like a
    step, `model(state, *inputs) -> (state, out)`, needs `state`. `inputs` and `keywords` are an
    example of what the module is called on.

    The parameters hold everything else that the module keeps, such as the key of a dropout, and
    the step does not change them. They are empty for a module whose framework keeps parameters
    itself, within a transformed function.

    >>> import jax.numpy as jnp, tapax
    >>> from flax import nnx
    >>> cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
    >>> step, params, state = tapax.hidden.functional(cell, jnp.ones(3))
    >>> state, out = step(params, state, jnp.ones(3))
    >>> state.shape
    (4,)
    """
    cell = recurrent_cell(model, join_inputs(inputs, keywords), state)
    if cell is None:
        refuse_other(model, "A function step(state, *inputs) is a pure step already.")
    return PureStep(cell.step, cell.params, _get_state(model, cell))


def trace_step_or_module(step: Any, inputs: Sequence[Any], state: PyTree) -> Step:
    """Traces a pure step, or a recurrent module, for `inputs` and `state`.

    A function takes its state first. So does a module without a state of its own.
    """
    cell = recurrent_cell(step, inputs, state)
    if state is None and (cell is None or (cell.state is None and len(inputs) > 1)):
        if callable(step) and not _takes(step, inputs):
            refuse_other(step, "Give a function step(state, *inputs) its state, then its inputs.")
        return trace_step(step, inputs[0] if inputs else None, inputs[1:])
    if cell is None:
        return trace_step(step, state, inputs)

    def bound(state: PyTree, *inputs: PyTree, **keywords: PyTree) -> Any:
        return cell.step(cell.params, state, *inputs, **keywords)

    bound.__qualname__ = type(step).__name__  # what error messages call it
    traced = trace_step(bound, _get_state(step, cell), inputs, paths=cell.paths)
    if cell.objects is None:
        return traced
    numbers = {s.path: i for i, s in enumerate(traced.states)}
    order = tuple(numbers[path] for path in cell.objects)
    objects = tuple(cell.objects[s.path] for s in traced.states)
    return dataclasses.replace(traced, order=order, objects=objects)


def _takes(step: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a function can be called with these arguments, as far as its signature tells."""
    given, keywords = split_inputs(args)
    try:
        inspect.signature(step).bind(*given, **keywords)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def _get_state(model: Module, cell: RecurrentCell) -> Any:
    if cell.state is None:
        raise HiddenError(
            f"`model` is of type {type(model).__name__}, which says nothing of its hidden state. "
            "Give it: state=..., for a model that is called as model(state, *inputs) and returns "
            "the new state and what it puts out."
        )
    return cell.state
