"""Detection of JAX's primitives among those of other libraries with equal names."""

import sys
import threading

from jax.extend.core import Primitive

_jax_primitives: dict[str, set[Primitive]] = {}
_lock = threading.Lock()


def is_jax_primitive(primitive: Primitive) -> bool:
    """Return whether JAX itself defines a primitive."""
    with _lock:
        if primitive not in _jax_primitives.get(primitive.name, ()):
            _collect()
        return primitive in _jax_primitives.get(primitive.name, ())


def _collect() -> None:
    """Collect the primitives of all modules of JAX imported so far."""
    for name, module in list(sys.modules.items()):
        if name.startswith("jax._src."):
            for value in list(vars(module).values()):
                if isinstance(value, Primitive):
                    _jax_primitives.setdefault(value.name, set()).add(value)
