"""Adapters: each says what a module of its framework is, where it is, and how its calls are seen.

An adapter is imported when its framework has been imported by the user, and not before. Adding a
framework is adding a file here, with an `ADAPTER`, and a row to the table.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator

from jaxtap._modules import Adapter, FunctionCall

FRAMEWORKS = {
    "flax.nnx": "nnx",
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


@contextlib.contextmanager
def opened(call: FunctionCall) -> Iterator[FunctionCall]:
    """The call of a function with the stateful objects of every framework taken apart."""
    with contextlib.ExitStack() as stack:
        for adapter in present():
            call = stack.enter_context(adapter.opened(call))
        yield call
