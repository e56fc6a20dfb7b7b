"""The adapters of the frameworks that the user has imported, and functions that apply them all.

tapax imports an adapter only after the user has imported its framework. To add a framework, add a
module with an `ADAPTER`, and a row to the table.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

from tapax._frameworks.interface import Adapter, FunctionCall, Module
from tapax._frameworks.recurrent_cells import RecurrentCell, StatefulProgram
from tapax._jax import Function, PyTree

R = TypeVar("R")
T = TypeVar("T")

ADAPTERS = {
    "flax.nnx": "tapax._frameworks.nnx.adapter",
    "flax.linen": "tapax._frameworks.linen.adapter",
    "equinox": "tapax._frameworks.equinox",
    "haiku": "tapax._frameworks.haiku",
    "brainstate": "tapax._frameworks.brainstate.adapter",
    "keras.src.backend.jax.trainer": "tapax._frameworks.keras.adapter",
}
"""The module of each adapter, by the module of the framework that requires it."""


def loaded_adapters() -> list[Adapter]:
    """Return the adapters of the frameworks that have been imported."""
    needed = [module for package, module in ADAPTERS.items() if package in sys.modules]
    adapters = (importlib.import_module(module).ADAPTER for module in needed)
    return [adapter for adapter in adapters if adapter is not None]


def is_module(value: PyTree) -> bool:
    """Return whether a value is a module of any framework."""
    return any(adapter.is_module(value) for adapter in loaded_adapters())


@contextlib.contextmanager
def observe_calls() -> Iterator[None]:
    """Observe the calls of the modules of every framework within the context."""
    with contextlib.ExitStack() as stack:
        for adapter in loaded_adapters():
            stack.enter_context(adapter.observe_calls())
        yield


def trace_program(trace: Callable[[], T]) -> T:
    """Trace a program through the `trace_program` of every adapter."""
    for adapter in loaded_adapters():
        trace = functools.partial(adapter.trace_program, trace)
    return trace()


def context() -> Hashable:
    """Return a hashable value of all settings of the frameworks on which a trace depends."""
    return tuple(adapter.context() for adapter in loaded_adapters())


def has_repeatable_calls(fn: Function) -> bool:
    """Return whether equal arguments mean equal calls of a function, in any framework."""
    return any(adapter.has_repeatable_calls(fn) for adapter in loaded_adapters())


def static_parts(call: FunctionCall) -> list[Callable[[Any], bool]]:
    """Return predicates for the parts of a call's arguments in which numbers are static."""
    kept = (adapter.static_parts(call) for adapter in loaded_adapters())
    return [parts for parts in kept if parts is not None]


@contextlib.contextmanager
def open_call(call: FunctionCall) -> Iterator[FunctionCall]:
    """Split the stateful objects of every framework in a call into arrays."""
    with contextlib.ExitStack() as stack:
        for adapter in loaded_adapters():
            call = stack.enter_context(adapter.open_call(call))
        yield call


def run_opened(
    call: FunctionCall, find: Callable[[FunctionCall], T], run: Callable[[FunctionCall, T], R]
) -> R:
    """Run a call with its stateful objects split: `find` returns its program, `run` the result.

    Tracing a function may reveal more state to split; then `open_call` runs a second time.
    """
    while True:
        with open_call(call) as opened:
            program = find(opened)
            if not opened.found_more():
                return run(opened, program)


def recurrent_cell(module: Module, inputs: Sequence[Any], state: PyTree) -> RecurrentCell | None:
    """Describe a recurrent module of any framework as a pure step; None for anything else."""
    adapter = _find_recurrent(module)
    return adapter and adapter.recurrent_cell(module, inputs, state)


def stateful_program(
    module: Module, inputs: Sequence[Any], state: PyTree
) -> StatefulProgram | None:
    """Trace a recurrent module that writes its hidden states in place; None for others."""
    adapter = _find_recurrent(module)
    return adapter and adapter.stateful_program(module, inputs, state)


def _find_recurrent(module: Module) -> Adapter | None:
    return next((a for a in loaded_adapters() if isinstance(module, a.recurrent_type)), None)
