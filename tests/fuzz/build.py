"""A program as a JAX function: `build(program, sow)(x, n)`.

`sow(value, name)` is called at every mark. With `jaxtap.sow` it is the program under test, with
`plain` the program without marks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from .leaf import Env, Sow, do, mix, weights
from .program import (
    Block,
    Cond,
    Custom,
    Do,
    Fori,
    Grad,
    Jit,
    Jvp,
    Map,
    Node,
    Program,
    Remat,
    Scan,
    Shard,
    Switch,
    Twice,
    Vmap,
    While,
)
from .sites import MESHES

Run = Callable[[jax.Array, Env], jax.Array]

CUSTOM_N = np.array([1, 2, 3], np.int32)
"""The integers that a custom function sees, in place of tracers it may not close over."""

POLICIES: dict[str, Any] = {
    "default": None,
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("kept"),
}


def plain(value: Any, name: str) -> Any:
    """The mark that does nothing."""
    del name
    return value


class Jnp:
    """The namespace of `leaf.do` on JAX arrays."""

    @staticmethod
    def sin(x: Any) -> Any:
        return jnp.sin(x)

    @staticmethod
    def tanh(x: Any) -> Any:
        return jnp.tanh(x)

    @staticmethod
    def sum(x: Any) -> Any:
        return jnp.sum(x)

    @staticmethod
    def where(mask: Any, x: Any, y: Any) -> Any:
        return jnp.where(mask, x, y)

    @staticmethod
    def stop(x: Any) -> Any:
        return lax.stop_gradient(x)

    @staticmethod
    def add(x: Any, y: Any) -> Any:
        return x + _const(y, x)

    @staticmethod
    def mul(x: Any, y: Any) -> Any:
        return x * _const(y, x)

    @staticmethod
    def dot(matrix: np.ndarray, x: Any) -> Any:
        return _const(matrix, x) @ x

    @staticmethod
    def half(x: Any) -> Any:
        return x.astype(jnp.bfloat16)

    @staticmethod
    def full(x: Any, like: Any) -> Any:
        return x.astype(like.dtype)

    @staticmethod
    def named(x: Any) -> Any:
        return checkpoint_name(x, "kept")


XP = Jnp()


def _const(y: Any, like: Any) -> Any:
    return y.astype(like.dtype) if isinstance(y, np.ndarray) else y


def build(program: Program, sow: Sow = plain) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The program as a function of its two arguments."""
    body = _block(program.body, sow)

    def fn(x: jax.Array, n: jax.Array) -> jax.Array:
        return body(x, Env(x, n))

    return fn


def _block(block: Block, sow: Sow) -> Run:
    # Built once, before any call: a body that runs twice is then one function to JAX's caches.
    runs = [_node(node, sow) for node in block]

    def run(x: jax.Array, env: Env) -> jax.Array:
        for r in runs:
            x = r(x, env)
        return x

    return run


def _node(node: Node, sow: Sow) -> Run:
    match node:
        case Do():
            return lambda x, env: do(XP, node, x, env, sow)
        case Jit(body, inline):
            return jax.jit(_block(body, sow), inline=inline)
        case Twice(body):
            inner = _block(body, sow)
            return lambda x, env: inner(inner(x, env), env)
        case Remat(body, policy):
            inner = _block(body, sow)
            return lambda x, env: jax.checkpoint(
                lambda v: inner(v, Env(x, env.n)), policy=POLICIES[policy]
            )(x)
        case Scan() | Map() | Fori() | While():
            return _loop(node, _block(node.body, sow))
        case Cond(true, false, test):
            yes, no = _block(true, sow), _block(false, sow)

            def cond(x: jax.Array, env: Env) -> jax.Array:
                pred = env.n[0] % 2 == 0 if test == "int" else jnp.sum(x) > 0.1
                inner = Env(x, env.n)
                return lax.cond(pred, lambda v: yes(v, inner), lambda v: no(v, inner), 0.9 * x)

            return cond
        case Switch(branches, test):
            bodies = [_block(b, sow) for b in branches]

            def switch(x: jax.Array, env: Env) -> jax.Array:
                k = (
                    env.n[1] % len(bodies)
                    if test == "int"
                    else jnp.sum(x > 0.1).astype(jnp.int32) % len(bodies)
                )
                inner = Env(x, env.n)
                return lax.switch(k, [lambda v, b=b: b(v, inner) for b in bodies], 0.9 * x)

            return switch
        case Vmap():
            return _vmap(node, _block(node.body, sow))
        case Grad(body, kind):
            return _grad(kind, _block(body, sow))
        case Jvp(body, kind):
            return _jvp(kind, _block(body, sow))
        case Custom():
            return _custom(node, sow)
        case Shard():
            return _shard(node, sow)
    raise AssertionError(node)


def _loop(node: Scan | Map | Fori | While, body: Run) -> Run:
    def scan(x: jax.Array, env: Env, node: Scan) -> jax.Array:
        def step(c: jax.Array, per: Any) -> tuple[jax.Array, jax.Array]:
            n = env.n
            if per is not None:
                c, n = mix(XP, c, per[0]), n + per[1]
            c = body(c, Env(x, n))
            return c, c

        rows = _const(weights(node.length), x)
        xs = (x * rows, jnp.arange(node.length, dtype=jnp.int32)) if node.xs else None
        c, ys = lax.scan(step, x, xs, length=node.length, reverse=node.reverse, unroll=node.unroll)
        return mix(XP, c, ys.mean(0))

    def run(x: jax.Array, env: Env) -> jax.Array:
        match node:
            case Scan():
                return scan(x, env, node)
            case Map(length=length):
                ys = lax.map(lambda v: body(v, Env(x, env.n)), x * _const(weights(length), x))
                return ys.mean(0)
            case Fori(trips=trips, lower=lower):
                step = lambda i, v: body(v, Env(x, env.n + jnp.int32(i)))
                return lax.fori_loop(lower, lower + trips, step, x)
            case While(limit=limit, test="fori"):
                trips = env.n[0] % (limit + 1)
                step = lambda i, v: body(v, Env(x, env.n + i.astype(jnp.int32)))
                return lax.fori_loop(0, trips, step, x)
            case While(limit=limit, test=test):
                trips = env.n[0] % (limit + 1) if test == "int" else jnp.int32(limit)

                def go(state: tuple[jax.Array, jax.Array]) -> jax.Array:
                    i, v = state
                    return (i < trips) if test == "int" else (i < trips) & (jnp.sum(v) > -0.2)

                step = lambda s: (s[0] + 1, body(s[1], Env(x, env.n + s[0])))
                return lax.while_loop(go, step, (jnp.int32(0), x))[1]

    return run


def _vmap(node: Vmap, body: Run) -> Run:
    def run(x: jax.Array, env: Env) -> jax.Array:
        xs = jnp.moveaxis(x * _const(weights(node.size), x), 0, node.in_axis)
        outer = (
            x
            if node.outer is None
            else jnp.moveaxis(x * _const(weights(node.size, 2), x), 0, node.outer)
        )
        n = env.n + jnp.arange(node.size, dtype=jnp.int32)[:, None] if node.map_n else env.n
        axes = (node.in_axis, node.outer, 0 if node.map_n else None)
        ys = jax.vmap(lambda v, o, k: body(v, Env(o, k)), in_axes=axes, out_axes=node.out_axis)(
            xs, outer, n
        )
        return ys.mean(node.out_axis)

    return run


def _grad(kind: str, body: Run) -> Run:
    def run(x: jax.Array, env: Env) -> jax.Array:
        f = lambda v: body(v, Env(x, env.n))
        loss = lambda v: jnp.sum(jnp.sin(f(v)))
        match kind:
            case "grad":
                return mix(XP, x, jax.grad(loss)(x))
            case "value_and_grad":
                v, g = jax.value_and_grad(loss)(x)
                return mix(XP, 0.2 * v + x, g)
            case _:
                y, pull = jax.vjp(f, x)
                return mix(XP, y, pull(jnp.cos(y))[0])

    return run


def _jvp(kind: str, body: Run) -> Run:
    def run(x: jax.Array, env: Env) -> jax.Array:
        f = lambda v: body(v, Env(x, env.n))
        tangent = x * _const(weights(1, 3)[0], x)
        if kind == "jvp":
            y, t = jax.jvp(f, (x,), (tangent,))
        else:
            y, push = jax.linearize(f, x)
            t = push(tangent)
        return mix(XP, y, t)

    return run


def _custom(node: Custom, sow: Sow) -> Run:
    body = _block(node.body, sow)
    own = None if node.own is None else _block(node.own, sow)

    def env(x: jax.Array) -> Env:
        # Traced as x is: a loop over a known number would be a scan.
        return Env(x, CUSTOM_N + (0 * x).astype(jnp.int32))

    def primal(x: jax.Array) -> jax.Array:
        return body(x, env(x))

    def forward(x: jax.Array) -> jax.Array:
        return f(x) if own is None else own(x, env(x))

    def bwd(x: jax.Array, ct: jax.Array) -> tuple[jax.Array]:
        if node.bwd is not None:
            ct = sow(ct, node.bwd)
        return (node.scale * jnp.cos(x) * ct,)

    def rule(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return forward(primals[0]), node.scale * jnp.cos(primals[0]) * tangents[0]

    if node.kind == "vjp":
        f = jax.custom_vjp(primal)
        f.defvjp(lambda x: (forward(x), x), bwd)
    else:
        f = jax.custom_jvp(primal)
        f.defjvp(rule)
    return lambda x, _: f(x)


def _shard(node: Shard, sow: Sow) -> Run:
    names, shape, split = MESHES[node.mesh]
    pre, post = _block(node.pre, sow), _block(node.post, sow)
    spec = P(split, None)

    def local(x: jax.Array, outer: jax.Array, n: jax.Array) -> jax.Array:
        env = Env(outer, n)
        v = pre(x[0], env)
        if node.mean:
            m = lax.pmean(v, "d")
            v = mix(XP, v, m if node.name is None else sow(m, node.name))
        return post(v, env)[None]

    def run(x: jax.Array, env: Env) -> jax.Array:
        devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
        mesh = jax.sharding.Mesh(devices, names)
        size = int(np.prod([s for a, s in zip(names, shape, strict=True) if a in split]))
        ys = jax.shard_map(local, mesh=mesh, in_specs=(spec, P(), P()), out_specs=spec)(
            x * _const(weights(size), x), x, env.n
        )
        return ys.mean(0)

    return run
