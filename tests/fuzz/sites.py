"""Names, order and axes of the sites of a program, from its text alone.

Sites in branches that do not run and in loops of no iterations exist too, so names and shapes
cannot come from a run. A site is one call of `sow` in the program as it is executed; its path is
the position of that call in the tree:

    >>> [(s.label, s.path) for s in sites(Program((Twice((Do("sin", "a"),)),)))]
    [('a', (0, 'first', 0)), ('a@1', (0, 'second', 0))]

`reference.py` records under the same paths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from .leaf import RULES
from .parts import has_part
from .program import (
    DIM,
    Block,
    Cond,
    Custom,
    Do,
    Edit,
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

Path = tuple[int | str, ...]
Dtype = Literal["float", "bfloat16", "int"]

MESHES: dict[str, tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]] = {
    "line": (("d",), (4,), ("d",)),
    "grid": (("d", "e"), (2, 2), ("d", "e")),
    "row": (("d", "e"), (2, 2), ("d",)),
}
"""Mesh axis names, mesh shape, and the axes that x is split over."""

COND_ORDER = ("true", "false")
"""The order in which the branches of `lax.cond` number their calls: that of the source."""


@dataclass(frozen=True)
class Axis:
    """A construct around a site that makes it run more than once."""

    kind: Literal["shard", "loop", "while", "map"]
    size: int


@dataclass(frozen=True)
class Site:
    """One call of `sow`.

    `grads` counts the gradients that differentiate it. `conditional`: it is in a branch or a
    while loop. `layers` has the scanned layers around it: which of its axes is their loop, and
    the path of the scope. `rule`: only a rule marks it.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    axes: tuple[Axis, ...]
    grads: int
    conditional: bool
    label: str = ""
    layers: tuple[tuple[int, str], ...] = ()
    rule: bool = False

    @property
    def counted(self) -> bool:
        """True if a while loop is around the site."""
        return any(a.kind == "while" for a in self.axes)

    @property
    def call(self) -> int:
        """The number of the call among those of its name."""
        return int(self.label.partition("@")[2] or 0)

    @property
    def loop(self) -> int | None:
        """The axis of the innermost loop."""
        loops = [i for i, a in enumerate(self.axes) if a.kind in ("loop", "while")]
        return loops[-1] if loops else None

    @property
    def lead(self) -> list[int]:
        """The axes in the order of a capture: devices, loops, maps."""
        rank = {"shard": 0, "loop": 1, "while": 1, "map": 2}
        return sorted(range(len(self.axes)), key=lambda i: rank[self.axes[i].kind])


@dataclass(frozen=True)
class _Where:
    """The surroundings of a node.

    `differentiated`: a gradient or a jvp applies to it, so custom rules replace custom bodies.
    `scopes` are the names around it, `loops` the number of scopes around each of its loops.
    """

    path: Path = ()
    axes: tuple[Axis, ...] = ()
    scopes: tuple[str, ...] = ()
    loops: tuple[tuple[int, int], ...] = ()
    grads: int = 0
    differentiated: bool = False
    conditional: bool = False

    def into(self, *tags: int | str, axis: Axis | None = None, conditional: bool = False) -> _Where:
        axes = self.axes if axis is None else (*self.axes, axis)
        loops = self.loops
        if axis is not None and axis.kind == "loop":
            loops = (*loops, (len(self.axes), len(self.scopes)))
        return replace(
            self,
            path=(*self.path, *tags),
            axes=axes,
            loops=loops,
            conditional=self.conditional or conditional,
        )

    @property
    def layers(self) -> tuple[tuple[int, str], ...]:
        """The first scope in each loop, whose iterations are its layers, or in the innermost."""
        inside = [(i, outer + 1) for i, outer in self.loops if len(self.scopes) > outer]
        loops = {"/".join(self.scopes[:count]): i for i, count in inside}
        return tuple((i, path) for path, i in loops.items())


def sites(program: Program, *, rules: bool = False) -> list[Site]:
    """Return every site in program order, labelled by name, with `@k` for its k-th further call.

    With `rules`, include the sites that rules mark.
    """
    seen: Counter[str] = Counter()
    out = []
    late: list[Site] = []
    for site in (*_block(program.body, _Where(), late), *late):
        if site.rule and not rules:
            continue
        k = seen[site.name]
        seen[site.name] += 1
        out.append(replace(site, label=f"{site.name}@{k}" if k else site.name))
    return out


def picked(edit: Edit, found: list[Site]) -> list[Site]:
    """Return the sites of an edit: all calls of a name, or one. None if the edit does not fit."""
    name, _, call = edit.name.partition("@")
    out = [s for s in found if s.name == name and (not call or s.call == int(call))]
    if edit.of == "grad":
        out = [s for s in out if s.grads and s.dtype != "int"]
    fits = not edit.axes or (edit.what == "array" and len(out) == 1)
    fits &= edit.index is None or all(has_part(edit.index, site.shape) for site in out)
    return out if fits and all(_has_steps(edit, site) for site in out) else []


def _has_steps(edit: Edit, site: Site) -> bool:
    if edit.step is None:
        return edit.stop is None
    if site.loop is None or (edit.stop is not None and not 0 <= edit.step < edit.stop):
        return False
    axis = site.axes[site.loop]
    if axis.kind == "while":
        return edit.step >= 0
    return -axis.size <= edit.step < axis.size


def _block(block: Block, where: _Where, late: list[Site]) -> Iterator[Site]:
    for i, node in enumerate(block):
        yield from _node(node, where.into(i), late)


def _site(where: _Where, name: str, op: str = "sin", **changes: int) -> Site:
    shape = () if op == "scalar" else (DIM,)
    dtypes: dict[str, Dtype] = {"half": "bfloat16", "int": "int"}
    dtype = dtypes.get(op, "float")
    path = "/".join((*where.scopes, name))
    site = Site(where.path, path, shape, dtype, where.axes, where.grads, where.conditional)
    return replace(site, layers=where.layers, **changes)  # pyright: ignore[reportArgumentType]


def _node(node: Node, where: _Where, late: list[Site]) -> Iterator[Site]:
    match node:
        case Do(op, name):
            if op in RULES:
                yield _site(where.into("rule"), RULES[op], op, rule=True)
            if name is not None:
                yield _site(where, name, op)
        case Jit(body) | Remat(body):
            yield from _block(body, where, late)
        case Scope(body, name):
            yield from _block(body, replace(where, scopes=(*where.scopes, name)), late)
        case Twice(body):
            for tag in ("first", "second"):
                yield from _block(body, where.into(tag), late)
        case Scan(body, length) | Map(body, length) | Fori(body, length):
            yield from _block(body, where.into(axis=Axis("loop", length)), late)
        case While(body):
            yield from _block(body, where.into(axis=Axis("while", 0), conditional=True), late)
        case Cond(true, false):
            branches = {"true": true, "false": false}
            for tag in COND_ORDER:
                yield from _block(branches[tag], where.into(tag, conditional=True), late)
        case Switch(branches):
            for k, branch in enumerate(branches):
                yield from _block(branch, where.into(k, conditional=True), late)
        case Vmap(body, size):
            yield from _block(body, where.into(axis=Axis("map", size)), late)
        case Grad(body):
            # The backward pass comes after the whole forward pass and visits it in reverse.
            mine: list[Site] = []
            yield from _block(
                body, replace(where, grads=where.grads + 1, differentiated=True), mine
            )
            yield from reversed(mine)
        case Jvp(body):
            yield from _block(body, replace(where, differentiated=True), late)
        case Custom(body, own=own, bwd=bwd):
            # The rule shields its code: no gradient differentiates it.
            shielded = replace(where, grads=0, differentiated=False)
            if own is not None and where.differentiated:
                yield from _block(own, shielded.into("own"), late)
            else:
                yield from _block(body, shielded.into("body"), late)
            if bwd is not None and where.grads:
                late.append(_site(where.into("bwd"), bwd, grads=where.grads - 1))
        case Shard(pre, post, mesh, mean, name):
            names, shape, split = MESHES[mesh]
            for axis, size in zip(names, shape, strict=True):
                if axis in split:
                    where = where.into(axis=Axis("shard", size))
            yield from _block(pre, where.into("pre"), late)
            if mean and name is not None:
                yield _site(where.into("mean"), name)
            yield from _block(post, where.into("post"), late)
        case _:
            raise AssertionError(node)
