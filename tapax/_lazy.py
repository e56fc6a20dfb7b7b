"""Names of a package that are imported when they are first used."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_LOADERS: dict[str, Callable[[str], Any]] = {}
"""The `__getattr__` of each package, by the name of the package."""
_EXTRAS = ("brainstate", "flax", "ray")
"""Packages that an extra of the same name installs."""


def load_lazily(
    package: str, public: Iterable[str], modules: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a `__getattr__` and a `__dir__` for `package`, which has the `public` names.

    `modules` says which names come from which module. Those from `package` itself are its
    submodules. If one needs a package that is not installed, the error names the extra.
    """
    sources = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if sources[name] == package:
            return _import_module(f"{package}.{name}", f"{package}.{name}")
        value = getattr(_import_module(sources[name], f"{package}.{name}"), name)
        setattr(sys.modules[package], name, value)
        return value

    _LOADERS[package] = load
    return load, lambda: sorted(public)


def load_later(package: str, name: str) -> Any:
    """Return a public name of `package`, for a module below it, which may not import it."""
    return _LOADERS[package](name)


def _import_module(module: str, wanted: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        install = f"pip install 'tapax[{package}]'"
        raise ModuleNotFoundError(
            f"{wanted} needs {package}, which is not installed: {install}.", name=error.name
        ) from error
