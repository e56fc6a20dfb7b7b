"""Recurrent modules as pure steps, with the help of the adapter of their framework."""

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
    """A recurrent module as a pure function; `functional` returns it.

    Attributes:
        step: A function `step(params, state, *inputs, **keywords) -> (state, out)`.
        params: A pytree of the parameters, and of everything else in the module except its hidden
            state.
        state: The initial state, a pytree.

    Example:
        >>> import jax, tapax
        >>> from flax import nnx
        >>> cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
        >>> x = jax.random.normal(jax.random.key(0), (3,))
        >>> pure = tapax.hidden.functional(cell, x)
        >>> state, out = pure.step(pure.params, pure.state, x)
        >>> state.shape
        (4,)
    """

    step: Callable[..., tuple[Any, Any]]
    params: Any
    state: Any


def functional(
    model: Module, *inputs: PyTree, state: PyTree = None, **keywords: PyTree
) -> PureStep:
    """Convert a recurrent module to a pure step, with its parameters and its initial state.

    The parameters contain everything in the module except its hidden state, such as the key of a
    dropout, and the step does not change them. For a core of Haiku they are empty, because the
    transformed function around the core keeps the parameters.

    Args:
        model: A recurrent module of a supported framework.
        *inputs: An example of the inputs of a call.
        state: The initial state of a module that is called as `model(state, *inputs)`. A cell of a
            framework has a default initial state.
        **keywords: An example of the keyword inputs of a call.

    Returns:
        A `PureStep`: `(step, params, state)`.

    Raises:
        HiddenError: If `model` is not a recurrent module, or if it has no initial state and `state`
            is not given.

    Example:
        >>> import jax, tapax
        >>> from flax import nnx
        >>> cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
        >>> x = jax.random.normal(jax.random.key(0), (3,))
        >>> step, params, state = tapax.hidden.functional(cell, x)
        >>> new, out = step(params, state, x)
        >>> bool((new == cell(state, x)[0]).all())
        True
    """
    cell = recurrent_cell(model, join_inputs(inputs, keywords), state)
    if cell is None:
        refuse_other(model, "A function step(state, *inputs) is a pure step already.")
    return PureStep(cell.step, cell.params, _get_state(model, cell))


def trace_step_or_module(step: Any, inputs: Sequence[Any], state: PyTree) -> Step:
    """Trace a pure step, or a recurrent module, for `inputs` and `state`.

    A function takes its state first. So does a module that does not contain its state.
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

    bound.__qualname__ = type(step).__name__  # the name in error messages
    traced = trace_step(bound, _get_state(step, cell), inputs, paths=cell.paths)
    if cell.objects is None:
        return traced
    numbers = {s.path: i for i, s in enumerate(traced.states)}
    order = tuple(numbers[path] for path in cell.objects)
    objects = tuple(cell.objects[s.path] for s in traced.states)
    return dataclasses.replace(traced, order=order, objects=objects)


def _takes(step: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Return whether the signature of a function accepts these arguments."""
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
            f"`model` is of type {type(model).__name__}, which does not define its hidden state. "
            "Pass state=... for a model that is called as model(state, *inputs) and returns the "
            "new state and the output."
        )
    return cell.state
