"""The oracle runs a program in Python loops and numpy, and records every execution of a mark.

It does not use JAX: a scan is a `for`, a branch an `if`, a vmap a loop over examples, a shard_map a
loop over devices, a gradient the tape of `tape.py`. The gradient of a mark is the gradient by a
zero added to it, with one zero per execution.

    >>> run(Program((Do("sin", "a"),))).sites[0].label
    'a'
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from .leaf import Env, do, mix, weights
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
)
from .sites import MESHES, Path, Site, sites
from .tape import Tape, Var, backward, custom, identity, leaf

CUSTOM_N = np.array([1, 2, 3], np.int32)

XP = Tape()

BUDGET = 4000
"""Marks and nodes a program may execute before it counts as too large to be worth checking."""


class Undecided(Exception):
    """An undecidable program: rounding decides a comparison in it, or it is too large."""


@dataclass(frozen=True)
class Cotangent:
    """The cotangent of a mark in one gradient. `active`: the value depends on its variable."""

    value: np.ndarray
    coarse: bool
    active: bool


@dataclass(eq=False)
class Record:
    """One execution of a mark.

    `index`: its position along the site's axes. `gradients`: the gradients around it, by token,
    outermost first. `cotangents`: one from each gradient that has run, innermost first. `coarse`:
    it went through bfloat16.
    """

    index: tuple[int, ...]
    value: np.ndarray
    var: Var | None
    gradients: tuple[int, ...]
    coarse: bool = False
    cotangents: list[Cotangent] = field(default_factory=list)


@dataclass(frozen=True)
class Reference:
    """The results of the program. `records`: by site path, in the order of execution."""

    out: np.ndarray
    coarse: bool
    sites: list[Site]
    records: dict[Path, list[Record]]


@dataclass(frozen=True)
class _Where:
    path: Path = ()
    index: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    differentiated: bool = False

    def into(self, *tags: int | str) -> _Where:
        return replace(self, path=(*self.path, *tags))

    def at(self, *index: int) -> _Where:
        return replace(self, index=(*self.index, *index))


def run(program: Program) -> Reference:
    """Run the program on its arguments, or raise `Undecided`."""
    x, n = program.arguments()
    machine = _Machine()
    start = leaf(x)
    out = machine.block(program.body, start, Env(start, n), _Where())
    return Reference(out.value, out.coarse, sites(program), dict(machine.records))


def _decide(x: Var, threshold: float) -> bool:
    margin = 0.1 if x.coarse else 1e-3
    if abs(float(x.value) - threshold) < margin:
        raise Undecided(f"{x.value} is too close to {threshold}")
    return float(x.value) > threshold


def _mean(parts: list[Var]) -> Var:
    total = parts[0]
    for p in parts[1:]:
        total = Tape.add(total, p)
    return Tape.mul(total, 1 / len(parts))


class _Machine:
    """An interpreter of blocks, with its records."""

    def __init__(self) -> None:
        self.records: dict[Path, list[Record]] = defaultdict(list)
        self.log: list[Record] = []
        self.tokens = count()
        self.spent = 0

    def sow(self, value: Any, where: _Where) -> Any:
        """Record one execution; the returned variable has a separate cotangent."""
        if not isinstance(value, Var):
            record = Record(where.index, np.asarray(value), None, where.gradients)
        else:
            value = identity(value)
            record = Record(where.index, value.value, value, where.gradients, value.coarse)
        self.records[where.path].append(record)
        self.log.append(record)
        return value

    def block(self, block: Block, x: Var, env: Env, where: _Where) -> Var:
        for i, node in enumerate(block):
            self.spent += 1
            if self.spent > BUDGET:
                raise Undecided("too large")
            x = self.node(node, x, env, where.into(i))
        return x

    def node(self, node: Node, x: Var, env: Env, where: _Where) -> Var:
        inner = Env(x, env.n)
        match node:
            case Do():
                ruled = where.into("rule")
                return do(
                    XP,
                    node,
                    x,
                    env,
                    lambda v, name: self.sow(v, where),
                    lambda v: self.sow(v, ruled),
                )
            case Jit(body) | Scope(body):
                return self.block(body, x, env, where)
            case Twice(body):
                return self.block(
                    body, self.block(body, x, env, where.into("first")), env, where.into("second")
                )
            case Remat(body):
                return self.block(body, x, inner, where)
            case Scan() | Map() | Fori() | While():
                return self.loop(node, x, env, where)
            case Cond(true, false, test):
                taken = env.n[0] % 2 == 0 if test == "int" else _decide(Tape.sum(x), 0.1)
                tag, branch = ("true", true) if taken else ("false", false)
                return self.block(branch, Tape.mul(x, 0.9), inner, where.into(tag))
            case Switch(branches, test):
                if test == "int":
                    k = int(env.n[1])
                else:
                    k = sum(_decide(Var(v, coarse=x.coarse), 0.1) for v in x.value)
                k %= len(branches)
                return self.block(branches[k], Tape.mul(x, 0.9), inner, where.into(k))
            case Vmap():
                return self.vmap(node, x, env, where)
            case Grad():
                return self.grad(node, x, inner, where)
            case Jvp():
                return self.jvp(node, x, inner, where)
            case Custom():
                return self.custom(node, x, where)
            case Shard():
                return self.shard(node, x, env, where)
        raise AssertionError(node)

    def loop(self, node: Scan | Map | Fori | While, x: Var, env: Env, where: _Where) -> Var:
        def body(v: Var, i: int, n: np.ndarray) -> Var:
            return self.block(node.body, v, Env(x, n), where.at(i))

        c = x
        match node:
            case Scan(length=length, xs=xs, reverse=reverse):
                ys = []
                for t in reversed(range(length)) if reverse else range(length):
                    c = mix(XP, c, Tape.mul(x, weights(length)[t])) if xs else c
                    c = body(c, t, env.n + t if xs else env.n)
                    ys.append(c)
                return mix(XP, c, _mean(ys))
            case Map(length=length):
                return _mean(
                    [body(Tape.mul(x, weights(length)[t]), t, env.n) for t in range(length)]
                )
            case Fori(trips=trips, lower=lower):
                for i in range(trips):
                    c = body(c, i, env.n + lower + i)
            case While(limit=limit, test=test):
                trips = limit if test == "value" else int(env.n[0]) % (limit + 1)
                for i in range(trips):
                    if test == "value" and not _decide(Tape.sum(c), -0.2):
                        break
                    c = body(c, i, env.n + i)
        return c

    def vmap(self, node: Vmap, x: Var, env: Env, where: _Where) -> Var:
        outs = []
        for e in range(node.size):
            outer = x if node.outer is None else Tape.mul(x, weights(node.size, 2)[e])
            n = env.n + e if node.map_n else env.n
            outs.append(
                self.block(
                    node.body, Tape.mul(x, weights(node.size)[e]), Env(outer, n), where.at(e)
                )
            )
        return _mean(outs)

    def grad(self, node: Grad, x: Var, env: Env, where: _Where) -> Var:
        token, begin = next(self.tokens), len(self.log)
        start = identity(x, token)
        inside = replace(where, gradients=(*where.gradients, token), differentiated=True)
        y = self.block(node.body, start, env, inside)
        loss = Tape.sum(Tape.sin(y))
        # Seeding `vjp` with cos(y) is differentiating sum(sin(y)): all three kinds have the same
        # cotangents.
        cts = backward(loss, start)
        for record in self.log[begin:]:
            var = record.var
            if var is not None and token in record.gradients:
                ct = cts.get(var.order, leaf(np.zeros(var.value.shape)))
                coarse = ct.coarse or var.coarse
                record.cotangents.append(Cotangent(ct.value, coarse, token in var.active))
        g = cts[start.order]
        match node.kind:
            case "grad":
                return mix(XP, x, g)
            case "value_and_grad":
                return mix(XP, Tape.add(Tape.mul(loss, 0.2), x), g)
            case _:
                return mix(XP, y, g)

    def jvp(self, node: Jvp, x: Var, env: Env, where: _Where) -> Var:
        start = identity(x)
        y = self.block(node.body, start, env, replace(where, differentiated=True))
        # The pullback is linear in its cotangent u; differentiating <pullback(u), v> with respect
        # to u pushes v forward.
        u = leaf(np.zeros(y.value.shape))
        pulled = backward(y, start, seed=u)[start.order]
        tangent = Tape.mul(x, weights(1, 3)[0])
        pushed = backward(Tape.sum(Tape.mul(pulled, tangent)), u)[u.order]
        return mix(XP, y, pushed)

    def custom(self, node: Custom, x: Var, where: _Where) -> Var:
        shielded = replace(where, gradients=(), differentiated=False)
        xs = Tape.stop(x) if where.differentiated else x
        env = Env(xs, CUSTOM_N)
        if node.own is not None and where.differentiated:
            y = self.block(node.own, xs, env, shielded.into("own"))
        else:
            y = self.block(node.body, xs, env, shielded.into("body"))
        if not where.differentiated:
            return y
        outside = replace(where.into("bwd"), gradients=where.gradients[:-1])

        def pull(ct: Var) -> Var:
            if node.bwd is not None and where.gradients:
                ct = self.sow(ct, outside)
            return Tape.mul(Tape.mul(ct, Tape.cos(x)), node.scale)

        return custom(x, y, pull)

    def shard(self, node: Shard, x: Var, env: Env, where: _Where) -> Var:
        names, shape, split = MESHES[node.mesh]
        sizes = [s for a, s in zip(names, shape, strict=True) if a in split]
        places = list(np.ndindex(*sizes))
        inner = Env(x, env.n)
        rows = weights(len(places))
        vs = [
            self.block(node.pre, Tape.mul(x, w), inner, where.at(*p).into("pre"))
            for p, w in zip(places, rows, strict=True)
        ]
        if node.mean:
            means: dict[tuple[int, ...], Var] = {
                rest: _mean([v for p, v in zip(places, vs, strict=True) if p[1:] == rest])
                for rest in {p[1:] for p in places}
            }
            mark: Callable[[Var, _Where], Var] = (
                self.sow if node.name is not None else lambda v, _: v
            )
            vs = [
                mix(XP, v, mark(means[p[1:]], where.at(*p).into("mean")))
                for p, v in zip(places, vs, strict=True)
            ]
        return _mean(
            [
                self.block(node.post, v, inner, where.at(*p).into("post"))
                for p, v in zip(places, vs, strict=True)
            ]
        )
