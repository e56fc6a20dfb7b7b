"""Names of a package that are imported when they are first used."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def load_lazily(
    package: str, public: Iterable[str], modules: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns a `__getattr__` and a `__dir__` for `package`, which has the `public` names.

    `modules` says which names come from which module. Those from `package` itself are its
    submodules.
    """
    sources = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if sources[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(sources[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(public)
