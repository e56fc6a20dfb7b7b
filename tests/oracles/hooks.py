"""A recorder of module results and their gradients without tapax, for published models.

A hook is the interceptor of a framework, or a replaced method of a class. `Hook.run` runs a loss
once and records the result of every module. `Hook.grads` repeats it with a zero added to each of
these arrays, and differentiates by the zeros.
"""

import contextlib
from collections import Counter

import jax
import jax.numpy as jnp
from jax.core import Tracer


class Hook:
    """A recorder of the results of modules by name, which can add to them."""

    def __init__(self, seen):
        self._seen = seen  # seen(note) is a context in which note(name, result) is called
        self._zeros = {}
        self.values = {}
        self._calls = Counter()

    def _note(self, name, out):
        def leaf(keys, x):
            if not isinstance(x, jax.Array):
                return x
            path = name + (
                f":{jax.tree_util.keystr(keys, simple=True, separator='.')}" if keys else ""
            )
            number = self._calls[path]
            self._calls[path] += 1
            path += f"@{number}" if number else ""
            if path in self._zeros:
                x = x + self._zeros[path]
            self.values[path] = x
            return x

        return jax.tree_util.tree_map_with_path(leaf, out)

    def run(self, loss, zeros=None):
        self._zeros, self.values, self._calls = zeros or {}, {}, Counter()
        with self._seen(self._note):
            return loss()

    def grads(self, loss):
        """Return the values, and the gradients of the loss by them.

        The value is None for a module inside a vmap, which returns a tracer.
        """
        self.run(loss)
        values = {k: None if isinstance(v, Tracer) else v for k, v in self.values.items()}
        known = {k: v for k, v in values.items() if v is not None}
        floating = {k: v for k, v in known.items() if jnp.issubdtype(v.dtype, jnp.inexact)}
        zeros = jax.tree.map(jnp.zeros_like, floating)
        return values, jax.grad(lambda zeros: self.run(loss, zeros))(zeros)


@contextlib.contextmanager
def replaced(classes, name, make):
    """Replace a method of some classes."""
    originals = {cls: cls.__dict__[name] for cls in classes if name in cls.__dict__}
    for cls, original in originals.items():
        type.__setattr__(cls, name, make(cls, original))
    try:
        yield
    finally:
        for cls, original in originals.items():
            type.__setattr__(cls, name, original)


def of_objects(paths, method="__call__"):
    """Make the hook for modules that are objects; `paths` gives each a name by its identity."""

    @contextlib.contextmanager
    def seen(note):
        modules = [module for module, _ in paths.values()]
        classes = {base for module in modules for base in type(module).__mro__[:-1]}

        def make(cls, original):
            def call(self, *args, **kwargs):
                out = original.__get__(self, type(self))(*args, **kwargs)
                first = next(c for c in type(self).__mro__ if method in c.__dict__)
                return note(paths[id(self)][1], out) if first is cls and id(self) in paths else out

            return call

        with replaced(classes, method, make):
            yield

    return Hook(seen)


def of_linen(root):
    from flax import linen as nn

    @contextlib.contextmanager
    def seen(note):
        def intercept(run, args, kwargs, context):
            out = run(*args, **kwargs)
            if context.method_name != "__call__":
                return out
            return note("/".join((root, *context.module.path)), out)

        with nn.intercept_methods(intercept):
            yield

    return Hook(seen)


def of_haiku():
    import haiku as hk

    @contextlib.contextmanager
    def seen(note):
        def intercept(run, args, kwargs, context):
            out = run(*args, **kwargs)
            if context.method_name != "__call__":
                return out
            parts = context.module.module_name.split("/")
            return note("/".join(part for part in parts if not part.startswith("~")), out)

        with hk.intercept_methods(intercept):
            yield

    return Hook(seen)
