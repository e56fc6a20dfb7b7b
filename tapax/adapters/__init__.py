"""Adapters: each says what a module of its framework is, where it is, and how its calls are seen.

An adapter is imported when its framework has been imported by the user, and not before. Adding a
framework is adding a file here, with an `ADAPTER`, and a row to the table.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tapax._adapter import Adapter, FunctionCall, Reopen
from tapax._arguments import places_in

T = TypeVar("T")

FRAMEWORKS = {
    "flax.nnx": "nnx",
    "flax.linen": "linen",
    "equinox": "equinox",
    "haiku": "haiku",
    "brainstate": "brainstate",
}
"""The adapter of each framework, by the package whose import makes it needed."""


def present() -> list[Adapter]:
    """The adapters of the frameworks that have been imported."""
    return [
        importlib.import_module(f"{__name__}.{name}").ADAPTER
        for package, name in FRAMEWORKS.items()
        if package in sys.modules
    ]


@contextlib.contextmanager
def seen() -> Iterator[None]:
    """Within, the calls of the modules of every framework are seen."""
    with contextlib.ExitStack() as stack:
        for adapter in present():
            stack.enter_context(adapter.seen())
        yield


def traced(trace: Callable[[], T]) -> T:
    """Traces a program, in the way of every framework."""
    for adapter in present():
        trace = functools.partial(adapter.traced, trace)
    return trace()


def lasting(fn: Any) -> bool:
    """Whether equal arguments mean equal calls of a function, in any of the frameworks."""
    return any(adapter.lasting(fn) for adapter in present())


def fixed(call: FunctionCall) -> frozenset[int]:
    """The places among the arguments of a call at which numbers are static."""
    kept = (adapter.keeps_numbers(call) for adapter in present())
    return frozenset().union(*(places_in(call.arguments, parts) for parts in kept if parts))


@contextlib.contextmanager
def opened(call: FunctionCall) -> Iterator[FunctionCall]:
    """The call of a function with the stateful objects of every framework taken apart."""
    with contextlib.ExitStack() as stack:
        for adapter in present():
            call = stack.enter_context(adapter.opened(call))
        yield call


def on_opened(call: FunctionCall, run: Callable[[FunctionCall], T]) -> T:
    """What `run` makes of the call taken apart; anew as long as there is more to take apart."""
    while True:
        try:
            with opened(call) as taken:
                return run(taken)
        except Reopen:
            continue
