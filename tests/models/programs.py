"""Losses that nest JAX's transformations around marks: one table, many tests.

Each row has a function of the `sow` to use, which returns a loss of one array, and, for each name,
the number of leading loop axes of its values.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_policies as policies

W = np.linspace(-0.9, 1.1, 9).reshape(3, 3)


class Case(NamedTuple):
    program: Callable[[Any], Callable[[Any], Any]]
    loops: dict[str, int]
    differentiable: bool = True


CASES: dict[str, Case] = {}


def case(differentiable: bool = True, **loops: int) -> Callable[..., Any]:
    def add(program: Any) -> Any:
        CASES[program.__name__] = Case(program, loops, differentiable)
        return program

    return add


def _remat(sow, fn, **options):
    """Apply `jax.checkpoint`, except in oracles: it traces even under `disable_jit`."""
    return fn if getattr(sow, "eager", False) else jax.checkpoint(fn, **options)


def _w(x):
    return jnp.asarray(W, x.dtype)


@case(h=0)
def straight(sow):
    return lambda x: jnp.sum(sow(jnp.sin(x), "h") ** 2)


@case(a=0, b=0)
def jitted(sow):
    @jax.jit
    def inner(x):
        return sow(jnp.tanh(sow(_w(x) @ x, "a")), "b")

    return lambda x: jnp.sum(jax.jit(inner)(x) ** 3)


@case(h=1)
def scanned(sow):
    def body(c, w):
        c = sow(jnp.tanh(w @ c), "h")
        return c, jnp.sum(c)

    def loss(x):
        c, ys = lax.scan(body, x, jnp.stack([_w(x)] * 4))
        return jnp.sum(c) + jnp.sum(ys**2)

    return loss


@case(h=1)
def unrolled_scan(sow):
    def body(c, t):
        return sow(jnp.sin(c + t), "h"), None

    return lambda x: jnp.sum(lax.scan(body, x, jnp.arange(5, dtype=x.dtype), unroll=2)[0] ** 2)


@case(h=2, o=1)
def nested_scans(sow):
    def inner(c, t):
        return sow(jnp.cos(c * t), "h"), None

    def outer(c, t):
        c, _ = lax.scan(inner, c, jnp.arange(1, 4, dtype=c.dtype))
        return sow(c + t, "o"), None

    return lambda x: jnp.sum(lax.scan(outer, x, jnp.arange(2, dtype=x.dtype))[0] ** 2)


@case(h=1)
def fori(sow):
    return lambda x: jnp.sum(lax.fori_loop(0, 3, lambda i, c: sow(jnp.sin(c) + i, "h"), x))


@case(h=1)
def mapped(sow):
    return lambda x: jnp.sum(lax.map(lambda v: sow(v**2, "h"), x) ** 2)


@case(differentiable=False, w=1)
def while_loop(sow):
    def loss(x):
        body = lambda c: (c[0] + 1, sow(jnp.sin(c[1]) * 2, "w"))
        return jnp.sum(lax.while_loop(lambda c: c[0] < 4, body, (0, x))[1])

    return loss


@case(h=0)
def remat(sow):
    block = _remat(sow, lambda x: sow(jnp.sin(_w(x) @ x), "h"))
    return lambda x: jnp.sum(block(x) ** 2)


@case(a=0, b=0)
def remat_dots_saved(sow):
    block = _remat(
        sow, lambda x: sow(jnp.sin(sow(_w(x) @ x, "a")), "b"), policy=policies.dots_saveable
    )
    return lambda x: jnp.sum(block(x) ** 2)


@case(a=0, b=0)
def remat_everything_saved(sow):
    block = _remat(
        sow, lambda x: sow(jnp.sin(sow(_w(x) @ x, "a")), "b"), policy=policies.everything_saveable
    )
    return lambda x: jnp.sum(block(x) ** 2)


@case(a=1, b=1)
def remat_in_scan(sow):
    block = _remat(sow, lambda c, w: sow(jnp.tanh(sow(w @ c, "a")), "b"))

    def body(c, w):
        return block(c, w), None

    return lambda x: jnp.sum(lax.scan(body, x, jnp.stack([_w(x)] * 3))[0] ** 2)


@case(h=1)
def remat_around_scan(sow):
    def body(c, t):
        return sow(jnp.sin(c + t), "h"), None

    inner = _remat(sow, lambda x: lax.scan(body, x, jnp.arange(3, dtype=x.dtype))[0])
    return lambda x: jnp.sum(inner(x) ** 2)


@case(h=2)
def remat_scan_in_remat_scan(sow):
    def inner(c, t):
        return _remat(sow, lambda c: sow(jnp.sin(c + t), "h"))(c), None

    def outer(c, t):
        run = _remat(sow, lambda c: lax.scan(inner, c, jnp.arange(3, dtype=c.dtype))[0])
        return run(c) * t, None

    return lambda x: jnp.sum(lax.scan(outer, x, jnp.arange(1, 3, dtype=x.dtype))[0])


@case(h=1)
def jit_in_scan_in_jit(sow):
    inner = jax.jit(lambda c: sow(jnp.sin(c), "h"))
    run = jax.jit(lambda x: lax.scan(lambda c, _: (inner(c), None), x, None, length=3)[0])
    return lambda x: jnp.sum(run(x) ** 2)


@case(h=0)
def dropped(sow):
    def loss(x):
        h = jnp.sin(x)
        sow(h, "h")
        return jnp.sum(h**2)

    return loss


@case(h=1)
def dropped_in_scan(sow):
    def body(c, t):
        sow(jnp.cos(c), "h")
        return jnp.sin(c) + t, None

    return lambda x: jnp.sum(lax.scan(body, x, jnp.arange(3, dtype=x.dtype))[0])


@case(h=0)
def complex_values(sow):
    return lambda x: jnp.sum(jnp.abs(sow(jnp.exp(1j * x), "h") + x) ** 2)


@case(h=0, n=0)
def integers(sow):
    return lambda x: jnp.sum(sow(x, "h") ** 2) + sow(jnp.arange(3), "n")[1]
