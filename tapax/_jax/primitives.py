"""JAX's own primitives, told from those of other libraries that have the same names."""

import sys

from jax.extend.core import Primitive

_own: dict[str, set[Primitive]] = {}
_modules_seen: set[str] = set()


def is_own_primitive(primitive: Primitive) -> bool:
    """Whether JAX itself defines a primitive."""
    if primitive in _own.get(primitive.name, ()):
        return True
    _collect()
    return primitive in _own.get(primitive.name, ())


def _collect() -> None:
    """Adds the primitives of the modules of JAX that were imported since the last call."""
    for name, module in list(sys.modules.items()):
        if name.startswith("jax._src.") and name not in _modules_seen:
            _modules_seen.add(name)
            for value in list(vars(module).values()):
                if isinstance(value, Primitive):
                    _own.setdefault(value.name, set()).add(value)
