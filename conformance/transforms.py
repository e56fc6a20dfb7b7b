"""JAX's own transformations of one call, `run(m, x, p) -> (y, aux)`.

`m` is what is called, `x` the input, `p` one input more for every call and `aux` one output more,
for libraries whose functions ask for values to be handed in and out. Both may be None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from conformance.problem import WIDTH

Run = Callable[[Any, Any, Any], tuple[Any, Any]]


def jit(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    return jax.jit(run)(m, x, p)


def vmap(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    return jax.vmap(run, in_axes=(None, 0, 0))(m, x, p)


def remat(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    return jax.checkpoint(run)(m, x, p)


def scan(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    def body(carry: Any, inputs: Any) -> Any:
        m, state = carry
        row, p = inputs
        out, aux = run(m, state + row, p)
        state = jnp.tanh(out)
        return (m, state), (state, aux)

    return lax.scan(body, (m, jnp.zeros(WIDTH)), (x, p))[1]


def shard_map(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(), P("d"), P("d")), "out_specs": P("d")}
    return jax.jit(jax.shard_map(run, mesh=mesh, **specs))(m, x, p)


def cond(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    return lax.cond(x[0] > -9.0, lambda m, x: run(m, x, p)[0], lambda m, x: x, m, x), None


def fori_loop(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    def body(_: Any, carry: Any) -> Any:
        m, x = carry
        return m, jnp.tanh(run(m, x, p)[0])

    return lax.fori_loop(0, 3, body, (m, x))[1], None


def while_loop(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    def body(carry: Any) -> Any:
        m, i, x = carry
        return m, i + 1, jnp.tanh(run(m, x, p)[0])

    return lax.while_loop(lambda carry: carry[1] < 3, body, (m, 0, x))[2], None


def stack(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    """A scan over `m`, which holds the weights of all layers."""

    def body(x: Any, inputs: Any) -> Any:
        m, p = inputs
        out, aux = run(m, x, p)
        return jnp.tanh(out), aux

    return lax.scan(body, x, (m, p))


RAW: dict[str, Any] = {
    f.__name__: f for f in (jit, vmap, remat, scan, shard_map, cond, fori_loop, while_loop)
}


def closed(name: str) -> Any:
    """The body of a model whose layer is closed over in a transformed function."""

    def body(net: Any, x: Any) -> Any:
        layer = net.lin
        return RAW[name](lambda m, x, p: (layer(x), None), None, x)[0]

    return body


def argument(name: str) -> Any:
    """The body of a model whose layer is an argument of a transformed function."""

    def body(net: Any, x: Any) -> Any:
        return RAW[name](lambda m, x, p: (m(x), None), net.lin, x)[0]

    return body
