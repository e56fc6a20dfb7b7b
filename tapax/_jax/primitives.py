"""JAX's own primitives, told from those of other libraries that have the same names."""

import sys
import threading

from jax.extend.core import Primitive

_own: dict[str, set[Primitive]] = {}
_lock = threading.Lock()


def is_own_primitive(primitive: Primitive) -> bool:
    """Whether JAX itself defines a primitive."""
    with _lock:
        if primitive not in _own.get(primitive.name, ()):
            _collect()
        return primitive in _own.get(primitive.name, ())


def _collect() -> None:
    """Adds the primitives of all modules of JAX that are imported by now."""
    for name, module in list(sys.modules.items()):
        if name.startswith("jax._src."):
            for value in list(vars(module).values()):
                if isinstance(value, Primitive):
                    _own.setdefault(value.name, set()).add(value)
