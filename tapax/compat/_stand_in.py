"""Modules that replace another module: they define some names, and take the others from it."""

import types
from collections.abc import Callable, Sequence
from typing import Any


def stand_in(
    module: str, original: types.ModuleType, defined: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a `__getattr__` and a `__dir__` for `module`, which defines some names itself."""

    def names() -> list[str]:
        return sorted({*defined, *(name for name in dir(original) if not name.startswith("_"))})

    def load(name: str) -> Any:
        if name == "__all__":
            return names()
        if name.startswith("__") or not hasattr(original, name):
            raise AttributeError(
                f"module {module!r} has no attribute {name!r}, nor has {original.__name__!r}"
            )
        return getattr(original, name)

    return load, names
