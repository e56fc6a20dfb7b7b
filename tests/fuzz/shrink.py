"""`shrink(program, fails)` makes a failing program small.

Hypothesis shrinks the choices that made a program, and cannot lift a body out of its construct.
This function cuts the tree itself: it drops a node, replaces it by one of its blocks, or sets a
field to its default, as long as the program is well formed and still fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from .program import (
    Block,
    Custom,
    Do,
    Edit,
    Grad,
    Jit,
    Jvp,
    Node,
    Program,
    Remat,
    Scope,
    Shard,
    Twice,
    Vmap,
    While,
    is_explicit,
    nodes,
)
from .program import blocks as blocks_of
from .sites import picked, sites


@dataclass(frozen=True)
class _Around:
    grads: int = 0
    jvp: bool = False
    outermost: bool = True
    split: tuple[str, ...] = ()


def well_formed(program: Program) -> bool:
    """Return whether JAX and the reference accept the program: see `generate.py`."""
    found = sites(program)
    one_mesh = not is_explicit(program.body) or not any(
        isinstance(node, Shard) for node in nodes(program.body)
    )
    fine = one_mesh and _fine(program.body, _Around())
    return fine and all(picked(e, found) for e in program.edits)


def _fine(block: Block, around: _Around) -> bool:
    return all(
        _allowed(n, around) and all(_fine(b, _in(n, around)) for b in blocks_of(n)) for n in block
    )


def _allowed(node: Node, around: _Around) -> bool:
    match node:
        case While():
            return around.grads == 0
        case Grad():
            return not around.jvp and around.grads < 2
        case Jvp():
            return around.grads == 0 and not around.jvp
        case Custom(kind=kind, own=own, bwd=bwd):
            own_rule = own is not None or bwd is not None
            return not (around.jvp and kind == "vjp") and not (own_rule and around.grads > 1)
        case Shard():
            return around.outermost
        case Vmap(sharded=axis):
            return axis is None or axis not in around.split
    return True


def _in(node: Node, around: _Around) -> _Around:
    match node:
        case Jit() | Remat() | Scope() | Twice():
            return around
        case Grad():
            return replace(around, grads=around.grads + 1)
        case Jvp():
            return replace(around, jvp=True, outermost=False)
        case Custom():
            return _Around(outermost=False, split=around.split)
        case Vmap(sharded=axis) if axis is not None:
            return replace(around, outermost=False, split=(*around.split, axis))
    return replace(around, outermost=False)


def smaller(program: Program) -> Iterator[Program]:
    """Yield the programs one cut away, larger cuts first."""
    for cut in _cuts(program):
        if not any(site.counted for site in sites(cut)):
            cut = replace(cut, steps=None)
        if well_formed(cut):
            yield cut


def _block_cuts(block: Block) -> Iterator[Block]:
    for i, node in enumerate(block):
        before, after = block[:i], block[i + 1 :]
        if before or after:
            yield before + after
        for inner in blocks_of(node):
            yield before + inner + after
        for cut in _cuts(node):
            yield (*before, cut, *after)


def _cuts(node: Any) -> Iterator[Any]:
    for field in fields(node):
        value = getattr(node, field.name)
        if field.default is not MISSING and value != field.default:
            yield replace(node, **{field.name: field.default})
        if field.name == "branches":
            for i, branch in enumerate(value):
                for block in _block_cuts(branch):
                    yield replace(node, branches=(*value[:i], block, *value[i + 1 :]))
        elif isinstance(value, tuple):
            for block in _block_cuts(value):
                yield replace(node, **{field.name: block})
    if isinstance(node, Do) and node.name is not None:
        yield Do(node.op)
    if isinstance(node, Do) and node.op != "sin":
        yield replace(node, op="sin")
    if isinstance(node, Edit) and "@" in node.name:
        yield replace(node, name=node.name.partition("@")[0])
        yield replace(node, name=f"{node.name.partition('@')[0]}@0")


def shrink(program: Program, fails: Callable[[Program], bool], *, seconds: float = 60) -> Program:
    """Return the smallest program found that `fails`, in at most about `seconds`."""
    end = time.monotonic() + seconds
    again = True
    while again:
        again = False
        for cut in smaller(program):
            if time.monotonic() > end:
                return program
            if fails(cut):
                program, again = cut, True
                break
    return program
