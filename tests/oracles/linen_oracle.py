"""Results of Linen modules and their gradients, computed without tapax.

An interceptor of Linen records the result of every method, or adds a zero to it by which `jax.grad`
differentiates. Under `jax.disable_jit()` loops and branches run in Python; a program without any
(`plain`) is compiled, which is faster.
"""

import sys
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tests.oracles.closeness import assert_close


def _in_trial():
    """Return whether `nn.scan` runs its body only to find the constants in it."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals["__name__"] == "flax.core.axes_scan" and frame.f_locals.get("init_mode"):
            return True
        frame = frame.f_back
    return False


def _run(fn, root, visit):
    def interceptor(next_fun, args, kwargs, context):
        out = next_fun(*args, **kwargs)
        module, method = context.module, context.method_name
        private = method.startswith("_") and method != "__call__"
        if private or method == "setup" or not hasattr(type(module), method) or _in_trial():
            return out
        name = "/".join((root, *module.path)) + ("" if method == "__call__" else f".{method}")

        def leaf(keys, x):
            if not isinstance(x, jax.Array):
                return x
            key = jax.tree_util.keystr(keys, simple=True, separator=".")
            return visit(f"{name}:{key}" if keys else name, x)

        return jax.tree_util.tree_map_with_path(leaf, out)

    with nn.intercept_methods(interceptor):
        return fn()


def _evaluated(fn, plain):
    if plain:
        return jax.jit(fn)()
    with jax.disable_jit():
        return fn()


def values(fn, root, plain=False):
    """Return the results of every module, in the order of execution."""

    def recorded():
        seen = defaultdict(list)

        def record(name, x):
            seen[name].append(x)
            return x

        _run(fn, root, record)
        return dict(seen)

    return _evaluated(recorded, plain)


def grads(loss, root, seen=None, plain=False):
    """Compute the gradient of a loss by every result of every module."""
    seen = values(loss, root, plain) if seen is None else seen

    def perturbed(eps):
        left = {name: list(e) for name, e in eps.items()}
        return _run(loss, root, lambda name, x: x + left[name].pop(0) if name in left else x)

    zeros = {name: list(map(jnp.zeros_like, xs)) for name, xs in seen.items()}
    return _evaluated(lambda: jax.grad(perturbed)(zeros), plain)


def agree(found, sites, expected, tol=1e-5):
    """Assert that captured arrays, with loop axes first, equal those of the oracle."""
    calls = defaultdict(list)
    for name, x in found.items():
        if sites[name].kind == "module":
            x = np.asarray(x)
            loops = len(sites[name].loops)
            calls[name.split("@")[0]] += list(x.reshape(-1, *x.shape[loops:]))
    assert calls.keys() == expected.keys()
    for name, xs in calls.items():
        assert len(xs) == len(expected[name]), name
        for x, y in zip(xs, expected[name], strict=True):
            assert_close(x, y, tol, err_msg=name)
