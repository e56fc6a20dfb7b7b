"""Anchors: which of several equal modules a copy of one is, told by where its arrays come from.

A transformation that takes a module as an argument puts a twin of it together inside. In a loop
over equal blocks nothing in the program's source says which block the twin is a copy of; and JAX
may trace the loop's body once for all of them. But every call is given the arrays of one block. So
one of the twin's arrays is *anchored*: an equation that has no result, with the modules that the
twin may be a copy of. `resolve` follows the arguments of the program to the anchors, through
every body they are handed to, and puts the right names into the scopes.

A body that several calls share becomes a body for each.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core.primitives import convert_element_type_p
from jax.interpreters import ad, batching, mlir

from tapax import _jax
from tapax._jax import Args, Atom, Equation, Jaxpr, PyTree, Value, Var
from tapax._jaxpr.bodies import bodies
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._jaxpr.rewrite import map_equation_bodies, rewrite
from tapax._marks.scopes import ModuleScope
from tapax._sites import segment


@dataclasses.dataclass(frozen=True)
class Anchor:
    """The paths that a module may have, and that of the anchored array from there.

    `arrays` are the arrays of those modules where they are at hand: those of a model that the
    function closes over.
    """

    choices: tuple[str, ...]
    leaf: str
    arrays: tuple[Any, ...] = dataclasses.field(repr=False, compare=False)
    uid: int = dataclasses.field(default_factory=itertools.count(1).__next__)

    def choose(self, origin: Any) -> str | None:
        """The choice that an array of this origin belongs to; None if it cannot be told.

        An origin is a path, an array that is a constant of the program, or None if it is computed.
        """
        if isinstance(origin, str):
            ends = [c for c in self.choices if f"/{origin}".endswith(f"/{c}/{self.leaf}")]
            return max(ends, key=len, default=None)
        found = [c for c, x in zip(self.choices, self.arrays, strict=True) if x is origin]
        return found[0] if origin is not None and found else None


class AnchorEffect(_jax.Effect):
    """Keeps anchors alive."""


anchor_effect = AnchorEffect()
anchor_p = _jax.Primitive("anchor")
anchor_p.multiple_results = True


def anchor(x: Value, choices: tuple[str, ...], leaf: str, arrays: Sequence[Any]) -> int:
    """Anchors an array; returns what a `ModuleScope` refers to it by."""
    # A traced array must not outlive its trace.
    kept = tuple(None if isinstance(a, Tracer) else a for a in arrays)
    made = Anchor(choices, leaf, kept)
    anchor_p.bind(x, anchor=made)
    return made.uid


def labels(arguments: PyTree) -> list[str]:
    """Where each array among the arguments of a program is, as a path."""
    paths = jax.tree_util.tree_flatten_with_path(arguments)[0]
    return [leaf_path(keys) for keys, _ in paths]


class PathKey(str):
    """A key of a dict that is a path itself."""

    __slots__ = ()


def leaf_path(keys: Sequence[Any]) -> str:
    """The keys of a leaf as a path."""
    return "/".join(map(_key_path, keys))


def _key_path(key: Value) -> str:
    inner = getattr(key, "key", None)
    if isinstance(inner, PathKey):
        return inner
    return segment(jax.tree_util.keystr((key,), simple=True))


def resolve(jaxpr: Jaxpr, origins: Sequence[Any]) -> Jaxpr:
    """The program without anchors, and with the names that they tell."""
    if not is_anchored(jaxpr):
        return jaxpr
    inner = _jax.open_jaxpr(jaxpr)
    # The constants of a body may be elsewhere, as they are in a primitive of another library.
    known: dict[Any, Any] = dict(zip(inner.constvars, _jax.jaxpr_consts(jaxpr), strict=False))
    known.update(zip(inner.invars, origins, strict=True))
    chosen: dict[int, str] = {}

    def visit(eqn: Equation, names: dict[Var, Atom]) -> Iterator[Equation]:
        del names
        from_where = [v.val if isinstance(v, _jax.Literal) else known.get(v) for v in eqn.invars]
        if eqn.primitive is anchor_p:
            choice = eqn.params["anchor"].choose(from_where[0])
            if choice is not None:
                chosen[eqn.params["anchor"].uid] = choice
            return
        if kind_of(eqn) & _PASSING or eqn.primitive is convert_element_type_p:
            known[eqn.outvars[0]] = from_where[0]

        def resolve_body(body: Jaxpr) -> Jaxpr:
            return resolve(body, _body_origins(eqn, body, from_where))

        yield _renamed(map_equation_bodies(eqn, resolve_body, _ANCHORS), chosen)

    return rewrite(jaxpr, visit, _ANCHORS)


_ANCHORS: frozenset[Any] = frozenset({anchor_effect})
_PASSING = Kind.COPY | Kind.REARRANGEMENT | Kind.SELECTION
"""What an array may go through on its way and still be that array."""


def is_anchored(jaxpr: Jaxpr) -> bool:
    """Whether there are anchors in a program; some equations keep effects to themselves."""
    inner = _jax.open_jaxpr(jaxpr)
    return anchor_effect in inner.effects or any(
        is_anchored(body) for eqn in inner.eqns if eqn.effects for body in bodies(eqn)
    )


def _body_origins(eqn: Equation, body: Jaxpr, origins: list[Any]) -> list[Any]:
    """The origins of the inputs of a body of an equation, of which some may not be known."""
    count = len(_jax.open_jaxpr(body).invars)
    if kind_of(eqn) is Kind.WHILE:
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        own = origins[:first] if body is eqn.params["cond_jaxpr"] else origins[first:][:second]
        return [*own, *(None for _ in range(count - len(own)))]
    if len(origins) == count:
        return origins
    # The first operand of a conditional is its index.
    return origins[1:] if len(origins) == count + 1 else [None] * count


def _renamed(eqn: Equation, chosen: dict[int, str]) -> Any:
    def rename(name: str) -> str:
        if not isinstance(name, ModuleScope) or name.anchor not in chosen:
            return name
        return name.moved(chosen[name.anchor])

    return _jax.rename_scopes(eqn, rename) if chosen else eqn


def _bind_again(args: Args, tangents_or_dims: PyTree, **params: Any) -> Any:
    del tangents_or_dims  # there is no result that could have any
    return anchor_p.bind(*args, **params), []


_jax.allow_effect(AnchorEffect)
anchor_p.def_impl(lambda *args, **params: [])
anchor_p.def_effectful_abstract_eval(lambda *args, **params: ([], {anchor_effect}))
mlir.register_lowering(anchor_p, lambda ctx, *args, **params: [])
ad.primitive_jvps[anchor_p] = _bind_again
batching.primitive_batchers[anchor_p] = _bind_again
# An anchor stays in the loop that it is in, with the names that it is for.
_jax.register_partial_eval(anchor_p, lambda stage, tracers, params: stage())
