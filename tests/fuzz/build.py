"""A program as a JAX function: `build(program, sow)(x, n)`.

The function calls `sow(value, name)` at every mark. With `tapax.sow` it is the program under test,
with `plain` the program without marks.

`by_hand(program, mark)(given, x, n)` is the program with changes written into its source.
It calls `mark(value, path, given, at)`, which distinguishes the two calls of one function and knows
the number of every iteration, example and device around the mark, as counted by the loops
themselves. `given` holds the inputs of the changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import tapax

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
    Scope,
    Shard,
    Switch,
    Twice,
    Vmap,
    While,
    is_explicit,
)
from .sites import MESHES, Path

Mark = Callable[[Any, Path, Any, tuple[Any, ...]], Any]
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
    """Mark nothing and return the value."""
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
    """Build the program as a function of its two arguments."""
    body = _Builder(sow, None).block(program.body, ())
    return lambda x, n: body(x, Env(x, n))


def mesh_of(program: Program) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a program runs: an explicit mesh, if it uses one."""
    if not is_explicit(program.body):
        return contextlib.nullcontext()
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((2, 2), ("d", "e"), (explicit,) * 2, devices=jax.devices()[:4])
    return jax.set_mesh(mesh)


def by_hand(program: Program, mark: Mark) -> Callable[[Any, jax.Array, jax.Array], jax.Array]:
    """Build the program with a change at each of its marks."""
    body = _Builder(plain, mark).block(program.body, ())
    return lambda given, x, n: body(x, Env(x, n, (given,)))


def _inside(env: Env, outer: jax.Array, *at: Any, n: Any = None) -> Env:
    """Return the environment of a body in a construct, with its numbers if it counts them."""
    return Env(outer, env.n if n is None else n, None if env.at is None else (*env.at, *at))


@dataclass(frozen=True)
class _Builder:
    sow: Sow
    mark: Mark | None

    def block(self, block: Block, path: Path) -> Run:
        # Build once, before any call: JAX then caches a body that runs twice as one function.
        runs = [self.node(node, (*path, i)) for i, node in enumerate(block)]

        def run(x: jax.Array, env: Env) -> jax.Array:
            for r in runs:
                x = r(x, env)
            return x

        return run

    def marked(self, value: Any, name: str, path: Path, env: Env) -> Any:
        if self.mark is None:
            return self.sow(value, name)
        assert env.at is not None
        return self.mark(value, path, env.at[0], env.at[1:])

    def node(self, node: Node, path: Path) -> Run:
        match node:
            case Do():
                return lambda x, env: do(
                    XP, node, x, env, lambda v, name: self.marked(v, name, path, env)
                )
            case Jit(body, inline):
                return jax.jit(self.block(body, path), inline=inline)
            case Scope(body, name):
                return _scoped(name, self.block(body, path))
            case Twice(body):
                one = self.block(body, (*path, "first"))
                two = one if self.mark is None else self.block(body, (*path, "second"))
                return lambda x, env: two(one(x, env), env)
            case Remat(body, policy):
                inner = self.block(body, path)
                return lambda x, env: jax.checkpoint(
                    lambda v: inner(v, _inside(env, x)), policy=POLICIES[policy]
                )(x)
            case Scan() | Map() | Fori() | While():
                return _loop(node, self.block(node.body, path))
            case Cond(true, false, test):
                return _cond(
                    test, self.block(true, (*path, "true")), self.block(false, (*path, "false"))
                )
            case Switch(branches, test):
                return _switch(test, [self.block(b, (*path, k)) for k, b in enumerate(branches)])
            case Vmap():
                return _vmap(node, self.block(node.body, path))
            case Grad(body, kind):
                return _grad(kind, self.block(body, path))
            case Jvp(body, kind):
                return _jvp(kind, self.block(body, path))
            case Custom():
                return self.custom(node, path)
            case Shard():
                return self.shard(node, path)
        raise AssertionError(node)

    def custom(self, node: Custom, path: Path) -> Run:
        body = self.block(node.body, (*path, "body"))
        own = None if node.own is None else self.block(node.own, (*path, "own"))

        def env(x: jax.Array, at: Any) -> Env:
            # Traced like x: a loop over a known number would be a scan.
            return Env(x, CUSTOM_N + (0 * x).astype(jnp.int32), at)

        def primal(x: jax.Array, at: Any) -> jax.Array:
            return body(x, env(x, at))

        def forward(x: jax.Array, at: Any) -> jax.Array:
            return f(x, at) if own is None else own(x, env(x, at))

        def bwd(kept: Any, ct: jax.Array) -> tuple[jax.Array, None]:
            x, at = kept
            if node.bwd is not None:
                ct = self.marked(ct, node.bwd, (*path, "bwd"), Env(x, None, at))
            return node.scale * jnp.cos(x) * ct, None

        def rule(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
            return forward(*primals), node.scale * jnp.cos(primals[0]) * tangents[0]

        if node.kind == "vjp":
            f = jax.custom_vjp(primal)
            f.defvjp(lambda x, at: (forward(x, at), (x, at)), bwd)
        else:
            f = jax.custom_jvp(primal)
            f.defjvp(rule)
        # The inputs of edits have no derivative here. Without `x`, they would have the forward rule
        # run, which may compute another value than the body.
        return lambda x, env: f(x, lax.stop_gradient(env.at))

    def shard(self, node: Shard, path: Path) -> Run:
        names, shape, split = MESHES[node.mesh]
        pre, post = self.block(node.pre, (*path, "pre")), self.block(node.post, (*path, "post"))
        spec = P(split, None)

        def run(x: jax.Array, env: Env) -> jax.Array:
            def local(x: jax.Array, outer: jax.Array, n: jax.Array) -> jax.Array:
                inner = env
                if env.at is not None:
                    # Outside branches that only some devices take: JAX sums the gradients of all
                    # devices where a value begins to differ among them.
                    given = jax.tree.map(lambda v: lax.pcast(v, split, to="varying"), env.at[0])
                    places = map(lax.axis_index, split)
                    inner = env._replace(at=(given, *env.at[1:], *places))
                inner = _inside(inner, outer, n=n)
                v = pre(x[0], inner)
                if node.mean:
                    m = lax.pmean(v, "d")
                    if node.name is not None:
                        m = self.marked(m, node.name, (*path, "mean"), inner)
                    v = mix(XP, v, m)
                return post(v, inner)[None]

            devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
            mesh = jax.sharding.Mesh(devices, names)
            size = int(np.prod([s for a, s in zip(names, shape, strict=True) if a in split]))
            ys = jax.shard_map(local, mesh=mesh, in_specs=(spec, P(), P()), out_specs=spec)(
                x * _const(weights(size), x), x, env.n
            )
            return ys.mean(0)

        return run


def _scoped(name: str, body: Run) -> Run:
    def run(x: jax.Array, env: Env) -> jax.Array:
        with tapax.scope(name):
            return body(x, env)

    return run


def _cond(test: str, yes: Run, no: Run) -> Run:
    def cond(x: jax.Array, env: Env) -> jax.Array:
        pred = env.n[0] % 2 == 0 if test == "int" else jnp.sum(x) > 0.1
        inner = _inside(env, x)
        return lax.cond(pred, lambda v: yes(v, inner), lambda v: no(v, inner), 0.9 * x)

    return cond


def _switch(test: str, bodies: list[Run]) -> Run:
    def switch(x: jax.Array, env: Env) -> jax.Array:
        k = (
            env.n[1] % len(bodies)
            if test == "int"
            else jnp.sum(x > 0.1).astype(jnp.int32) % len(bodies)
        )
        inner = _inside(env, x)
        return lax.switch(k, [lambda v, b=b: b(v, inner) for b in bodies], 0.9 * x)

    return switch


def _numbers(size: int) -> jax.Array:
    return jnp.arange(size, dtype=jnp.int32)


def _loop(node: Scan | Map | Fori | While, body: Run) -> Run:
    def scan(x: jax.Array, env: Env, node: Scan) -> jax.Array:
        def step(c: jax.Array, per: Any) -> tuple[jax.Array, jax.Array]:
            row, t = per
            n = env.n
            if row is not None:
                c, n = mix(XP, c, row), n + t
            c = body(c, _inside(env, x, t, n=n))
            return c, c

        rows = x * _const(weights(node.length), x) if node.xs else None
        xs = rows, _numbers(node.length) if node.xs or env.at is not None else None
        c, ys = lax.scan(step, x, xs, length=node.length, reverse=node.reverse, unroll=node.unroll)
        return mix(XP, c, ys.mean(0))

    def run(x: jax.Array, env: Env) -> jax.Array:
        match node:
            case Scan():
                return scan(x, env, node)
            case Map(length=length):
                step = lambda per: body(per[0], _inside(env, x, per[1]))
                count = None if env.at is None else _numbers(length)
                return lax.map(step, (x * _const(weights(length), x), count)).mean(0)
            case Fori(trips=trips, lower=lower):
                step = lambda i, v: body(v, _inside(env, x, i - lower, n=env.n + jnp.int32(i)))
                return lax.fori_loop(lower, lower + trips, step, x)
            case While(limit=limit, test="fori"):
                trips = env.n[0] % (limit + 1)
                step = lambda i, v: body(v, _inside(env, x, i, n=env.n + i.astype(jnp.int32)))
                return lax.fori_loop(0, trips, step, x)
            case While(limit=limit, test=test):
                trips = env.n[0] % (limit + 1) if test == "int" else jnp.int32(limit)

                def go(state: tuple[jax.Array, jax.Array]) -> jax.Array:
                    i, v = state
                    return (i < trips) if test == "int" else (i < trips) & (jnp.sum(v) > -0.2)

                step = lambda s: (s[0] + 1, body(s[1], _inside(env, x, s[0], n=env.n + s[0])))
                return lax.while_loop(go, step, (jnp.int32(0), x))[1]

    return run


def _vmap(node: Vmap, body: Run) -> Run:
    def split(x: jax.Array, axis: int) -> jax.Array:
        """Make an array with one row for each example, with the rows along `axis`."""
        if node.sharded is not None:
            x = jax.reshard(x, P(node.sharded, *[None] * (x.ndim - 1)))
        return jnp.moveaxis(x, 0, axis)

    def run(x: jax.Array, env: Env) -> jax.Array:
        xs = split(x * _const(weights(node.size), x), node.in_axis)
        outer = x if node.outer is None else split(x * _const(weights(node.size, 2), x), node.outer)
        n = split(env.n + _numbers(node.size)[:, None], 0) if node.map_n else env.n
        axes = (node.in_axis, node.outer, 0 if node.map_n else None, 0)
        one = lambda v, o, k, e: body(v, _inside(env, o, e, n=k))
        count = None if env.at is None else split(_numbers(node.size), 0)
        ys = jax.vmap(one, in_axes=axes, out_axes=node.out_axis)(xs, outer, n, count)
        return ys.mean(node.out_axis)

    return run


def _grad(kind: str, body: Run) -> Run:
    def run(x: jax.Array, env: Env) -> jax.Array:
        f = lambda v: body(v, _inside(env, x))
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
        f = lambda v: body(v, _inside(env, x))
        tangent = x * _const(weights(1, 3)[0], x)
        if kind == "jvp":
            y, t = jax.jvp(f, (x,), (tangent,))
        else:
            y, push = jax.linearize(f, x)
            t = push(tangent)
        return mix(XP, y, t)

    return run
