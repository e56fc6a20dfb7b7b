"""The hypothesis strategy `programs()`.

Rules for the positions of nodes, and their reasons:
- no while loop under a gradient: JAX cannot transpose one (a custom rule around it lifts that);
- no custom_vjp and no gradient under a jvp: JAX refuses the first, the second has two cotangents;
- a custom rule with separate code only under at most one gradient: a second one would
  differentiate that code;
- shard_map only outside loops, branches and maps, so that its axes come first. Sizes are kept so
  small that a program costs little more than its compilation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Any, get_args

from hypothesis import assume
from hypothesis import strategies as st

from .leaf import VECTORS
from .program import (
    Block,
    Both,
    By,
    Cond,
    Custom,
    Do,
    Edit,
    Either,
    Fori,
    Glob,
    Grad,
    How,
    Index,
    Jit,
    Jvp,
    Map,
    Node,
    Not,
    Of,
    Pick,
    Program,
    Remat,
    Rule,
    Scan,
    Scope,
    Shard,
    Switch,
    Twice,
    Vmap,
    What,
    While,
)
from .readings import readings
from .sites import Site, picked, sites

DEPTH = 4
EXECUTIONS = 48
"""How often the innermost body of a program may run."""

NAMES = {"half": ("h",), "int": ("k",), "scalar": ("s",)}
"""Few names, so that calls share them; one per dtype and shape."""


@dataclass(frozen=True)
class _Context:
    """The position of a node. `free`: axes of an explicit mesh that nothing is sharded over yet."""

    depth: int = DEPTH
    runs: int = 1
    grads: int = 0
    jvp: bool = False
    outermost: bool = True
    devices: int = 1
    custom: bool = True
    scopes: bool = False
    free: tuple[str, ...] = ()


class _Draw:
    """The generator of one program. `fresh` numbers the marks of derivative rules."""

    def __init__(self, draw: st.DrawFn, second_order: bool) -> None:
        self.draw = draw
        self.fresh = count()
        self.second_order = second_order

    def one(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def block(self, c: _Context) -> Block:
        size = self.draw(st.integers(1, 3 if c.depth == DEPTH else 2))
        return tuple(self.node(c) for _ in range(size))

    def inside(self, c: _Context, times: int = 1, **changes: Any) -> Block:
        return self.block(
            replace(
                c, **{"depth": c.depth - 1, "runs": c.runs * times, "outermost": False, **changes}
            )
        )

    def do(self, c: _Context) -> Do:
        # bfloat16 is rare, because nothing after it can be compared closely.
        op = self.one(
            *VECTORS, *VECTORS, "outer", "outer", "scalar", "scalar", "int", "int", "half"
        )
        names = NAMES.get(op, ("a", "b"))
        name = self.one(*names, *names, None)
        if op == "outer" and c.grads > 1:
            # JAX moves constant values out of a loop before it differentiates a second time,
            # so that a second gradient by them does not exist for each iteration.
            name = None
        use = self.one("through", "side", "drop", "stop") if name else "through"
        return Do(op, name, use)

    def node(self, c: _Context) -> Node:
        # Half of a body is constructs while depth remains, so that full depth is common, and
        # so are marks next to the constructs.
        if c.depth == 0 or (self.draw(st.booleans()) and c.depth < DEPTH):
            return self.do(c)
        kinds: list[type[Node]] = [Do, Jit, Remat, Cond, Switch]
        if c.scopes:
            kinds += [Scope] * 4
        if c.custom:
            kinds += [Custom]
        if c.runs * 2 <= EXECUTIONS:
            kinds += [Scan, Map, Fori, Vmap, Twice, *([Vmap] * 2 * len(c.free))]
            if c.grads == 0:
                kinds += [While, While]
        if not c.jvp and c.grads < (2 if self.second_order else 1):
            kinds += [Grad, Grad, Grad]
        if c.grads == 0 and not c.jvp:
            kinds += [Jvp]
        if c.outermost and c.devices >= 4:
            kinds += [Shard]
        return self.construct(self.draw(st.sampled_from(kinds)), c)

    def construct(self, kind: type[Node], c: _Context) -> Node:
        few = min(3, EXECUTIONS // c.runs)
        if kind is Do:
            return self.do(c)
        if kind is Jit:
            return Jit(self.inside(c, outermost=c.outermost), inline=self.draw(st.booleans()))
        if kind is Scope:
            return Scope(self.inside(c, outermost=c.outermost), self.one("L", "M"))
        if kind is Remat:
            policy = self.one("default", "everything", "nothing", "dots", "names")
            return Remat(self.inside(c, outermost=c.outermost), policy)
        if kind is Twice:
            return Twice(self.inside(c, 2, outermost=c.outermost))
        if kind is Scan:
            length = self.draw(st.integers(1, few))
            flags = {"xs": self.draw(st.booleans()), "reverse": self.draw(st.booleans())}
            return Scan(self.layer(c, length), length, **flags, unroll=self.one(1, 2))
        if kind is Map:
            length = self.draw(st.integers(1, few))
            return Map(self.layer(c, length), length)
        if kind is Fori:
            trips = self.draw(st.integers(1, few))
            return Fori(self.layer(c, trips), trips, lower=self.one(0, 2))
        if kind is While:
            limit = self.draw(st.integers(1, few))
            return While(self.inside(c, limit), limit, self.one("int", "value", "fori"))
        if kind is Cond:
            return Cond(self.inside(c), self.inside(c), self.one("int", "value"))
        if kind is Switch:
            branches = tuple(self.inside(c) for _ in range(self.one(2, 3)))
            return Switch(branches, self.one("int", "value"))
        if kind is Vmap:
            size = self.one(2, 4) if c.runs * 4 <= EXECUTIONS else 2
            axes = {
                "in_axis": self.one(0, 1, -1),
                "out_axis": self.one(0, 1),
                "outer": self.one(None, 0, 1),
            }
            axes["sharded"] = self.one(*c.free, *c.free, None)
            body = self.inside(c, size, free=tuple(a for a in c.free if a != axes["sharded"]))
            return Vmap(body, size, **axes, map_n=self.draw(st.booleans()))
        if kind is Grad:
            how = self.one("grad", "value_and_grad", "vjp")
            return Grad(self.inside(c, grads=c.grads + 1, outermost=c.outermost), how)
        if kind is Jvp:
            return Jvp(self.inside(c, jvp=True), self.one("jvp", "linearize"))
        if kind is Custom:
            return self.custom(c)
        if kind is Shard:
            mesh = self.one("line", "grid", "row")
            times = 2 if mesh == "row" else 4
            mean = self.draw(st.booleans())
            name = self.one("a", "b", None) if mean else None
            post = self.inside(c, times) if mean else ()
            return Shard(self.inside(c, times), post, mesh, mean, name)
        raise AssertionError(kind)

    def layer(self, c: _Context, length: int) -> Block:
        """Draw the body of a loop; with scopes, half of the bodies are scanned layers."""
        body = self.inside(c, length)
        return (Scope(body, self.one("L", "M")),) if c.scopes and self.one(True, False) else body

    def custom(self, c: _Context) -> Custom:
        kind = "jvp" if c.jvp else self.one("vjp", "jvp")
        shielded = {"grads": 0, "jvp": False}
        body = self.inside(c, **shielded)
        own, bwd = None, None
        if c.grads <= 1 and self.draw(st.booleans()):
            # With separate names, because JAX also traces the primal body and discards it.
            own = (*self.inside(c, **shielded), Do("tanh", f"own{next(self.fresh)}"))
        if c.grads == 1 and kind == "vjp" and self.draw(st.booleans()):
            bwd = f"bwd{next(self.fresh)}"
        return Custom(body, kind, self.one(0.75, -0.5), own, bwd)


@st.composite
def programs(
    draw: st.DrawFn, *, devices: int = 1, second_order: bool = True, scopes: bool = False
) -> Program:
    """Draw random programs, without a mesh if there are fewer than four devices.

    With four, some run on an explicit mesh; others have shard_maps over other meshes.
    """
    context = _mesh(draw, _Context(devices=devices, scopes=scopes))
    program = Program(_Draw(draw, second_order).block(context))
    steps = None
    if any(site.counted for site in sites(program)):
        steps = draw(st.sampled_from([None, 1, 2, 4]))
    how = draw(st.sampled_from(get_args(How)))
    return replace(program, seed=draw(st.integers(0, 99)), how=how, steps=steps)


def _mesh(draw: st.DrawFn, context: _Context) -> _Context:
    if context.devices >= 4 and draw(st.integers(0, 3)) == 0:
        return replace(context, devices=1, free=("d", "e"))
    return context


@st.composite
def edited(draw: st.DrawFn, *, devices: int = 1, parts: bool = False) -> Program:
    """Draw programs with up to three edits; with `parts`, most edit parts of values."""
    program = draw(programs(devices=devices, scopes=parts))
    found = sites(program)
    assume(found)
    edits = tuple(_edit(draw, found, parts) for _ in range(draw(st.integers(1, 3))))
    return replace(program, steps=None, edits=edits)


def _edit(draw: st.DrawFn, found: list[Site], parts: bool) -> Edit:
    # Prefer sites with a gradient and sites in loops.
    site = draw(st.sampled_from([*found, *(s for s in found if s.grads), *_looped(found)]))
    name = draw(st.sampled_from([site.name, f"{site.name}@{site.call}"]))
    of: Of = "value"
    if site.grads and site.dtype != "int":
        of = draw(st.sampled_from(get_args(Of)))
    what = draw(st.sampled_from(get_args(What)))
    whole = Edit(name, what, of, traced=draw(st.booleans()), axes=draw(st.booleans()))
    if parts:
        # The order of two writes to one element is undefined.
        indices = [index for index in get_args(Index) if index != "twice"]
        whole = replace(whole, index=draw(st.sampled_from([*indices, None])))
    step, stop = _steps(draw, site)
    tries = (replace(whole, step=step, stop=stop), replace(whole, step=step, stop=stop, axes=False))
    fitting = [edit for edit in tries if picked(edit, found)]
    return fitting[0] if fitting else Edit(name, what, of)


def _looped(found: list[Site]) -> list[Site]:
    return [site for site in found if site.loop is not None]


def _steps(draw: st.DrawFn, site: Site) -> tuple[int | None, int | None]:
    """Draw one iteration of the innermost loop, a range of iterations, or all."""
    if site.loop is None or draw(st.booleans()):
        return None, None
    axis = site.axes[site.loop]
    low, high = (0, 2) if axis.kind == "while" else (-axis.size, axis.size - 1)
    step = draw(st.integers(low, high))
    several = step >= 0 and draw(st.booleans())
    return step, step + draw(st.integers(1, 2)) if several else None


@st.composite
def selected(draw: st.DrawFn, *, devices: int = 1) -> Program:
    """Draw programs with up to three captured selections, with parts and functions."""
    program = draw(programs(devices=devices, scopes=True))
    found = sites(program, rules=True)
    assume(found)
    picks = tuple(_pick(draw, found) for _ in range(draw(st.integers(1, 3))))
    program = replace(program, steps=None, picks=picks)
    asked = [readings(program, of) for of in get_args(Of)]
    # Some must raise.
    assume(not any(each.wrong for each in asked) or draw(st.integers(0, 7)) == 0)
    return program


def _pick(draw: st.DrawFn, found: list[Site]) -> Pick:
    one = lambda *options: draw(st.sampled_from(options))
    differentiated = [s for s in found if s.grads and s.dtype != "int"]
    layered = [s for s in found if s.layers]
    site = one(*found, *differentiated, *layered, *layered, *_looped(found))
    numbered = _layer_name(draw, site)
    if numbered and one(True, False):
        body = (one(*numbered),)
    elif one(*range(3)):
        name = site.name.rpartition("/")[2]
        rule: Node = Rule(name) if site.rule else Glob(site.name)
        names = [Glob(f"{site.name}@{site.call}"), Glob(f"**/{name}@{site.call}")]
        body = (one(rule, rule, *([] if site.rule else names)),)
    else:
        body = tuple(_selection(draw, found, 2) for _ in range(one(1, 1, 2)))
    of: Of = one("value", "grad", "grad") if site in differentiated else "value"
    step, stop = _steps(draw, site)
    index = one(None, *get_args(Index))
    bys = [by for by in get_args(By) if of == "value" or by != "square"]
    return Pick(body, of, step, stop, index, one(None, None, *bys))


def _layer_name(draw: st.DrawFn, site: Site) -> list[Node]:
    """Draw the name of a site in one of its scanned layers."""
    if site.rule or not site.layers:
        return []
    axis, path = draw(st.sampled_from(site.layers))
    number = draw(st.integers(0, site.axes[axis].size - 1))
    rest = site.name.removeprefix(f"{path}/")
    return [Glob(f"{path}/{number}/{rest}"), Glob(f"{path}/{number}/**")]


def _selection(draw: st.DrawFn, found: list[Site], depth: int) -> Node:
    one = lambda *options: draw(st.sampled_from(options))
    kind = one(Glob, Rule, *([Both, Both, Either, Not] * (depth > 0)))
    if kind is Rule:
        return Rule(one("dot_general", "kept"))
    if kind is Glob:
        scope, _, name = draw(st.sampled_from(found)).name.rpartition("/")
        scopes = [f"{scope}/**", f"{scope}/*", scope, f"**/{scope.rpartition('/')[2]}/**"]
        return Glob(one("**", "*", "?", f"**/{name}", name, *(scopes if scope else [])))
    count = 1 if kind is Not else 2
    return kind(tuple(_selection(draw, found, depth - 1) for _ in range(count)))


@st.composite
def losses(draw: st.DrawFn, *, devices: int = 1) -> Program:
    """Draw programs that are one gradient in which nothing hides a mark."""
    context = _Context(depth=DEPTH - 1, grads=1, devices=devices, custom=False)
    body = _Draw(draw, second_order=False).block(_mesh(draw, context))
    how = draw(st.sampled_from(get_args(How)))
    return Program((Grad(body),), draw(st.integers(0, 99)), how)
