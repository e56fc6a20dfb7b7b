"""Anchors: which of several equal modules a copy of one is, told by where its arrays come from.

A transformation that takes a module as an argument puts a twin of it together inside. In a loop
over equal blocks nothing in the program's source says which block the twin is a copy of; and JAX
may trace the loop's body once for all of them. But every call is given the arrays of one block. So
one of the twin's arrays is *anchored*: an equation that has no result, with the modules that the
twin may be a copy of. `resolve` follows the arguments of the program to the anchors, through
every body they are handed to, and puts the right names into the scopes.

A body that several calls share becomes a body for each.

The arrays of a root are anchored too, since its name depends on what other roots there are: see
`_frameworks.roots`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.interpreters import ad, batching, mlir

from tapax import _jax
from tapax._frameworks.roots import RootPlace, Roots, name_arguments
from tapax._jax import Args, Atom, Equation, Function, Jaxpr, PyTree, Value, Var
from tapax._jaxpr.bodies import bodies
from tapax._jaxpr.kinds import CALLS, CUSTOM_RULES, Kind, kind_of
from tapax._jaxpr.rewrite import map_equation_bodies, rewrite
from tapax._marks.scopes import ModuleScope
from tapax._sites import join, segment


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


@dataclasses.dataclass(frozen=True)
class RootAnchor:
    """A model that no module calls: what it may be called, and by what its arrays are known.

    `leaves` are the paths of the anchored arrays from the model, of the class `name`; all of them
    may be in a `collection`. `part` has the places that the model may have in another, of the class
    `whole`. `holder` is the variable that holds the model, and `constants` are the models of its
    kind whose arrays are constants, each with the first of the anchored ones.
    """

    name: str
    leaves: tuple[str, ...]
    holder: str
    constants: tuple[tuple[str, Any], ...] = dataclasses.field(repr=False, compare=False)
    whole: str = ""
    part: Anchor | None = None
    collection: str = ""
    uid: int = dataclasses.field(default_factory=itertools.count(-1, -1).__next__)

    def place(self, origins: Sequence[Any]) -> RootPlace:
        """The root that arrays of these origins belong to."""
        if not origins:
            return RootPlace(self.name, self.holder, (self.holder,) if self.holder else ())
        choice = self.part.choose(origins[0]) if self.part is not None else None
        name, path = (self.name, "") if choice is None else (self.whole, choice)
        models = [
            _model_of(origin, join(self.collection, join(path, leaf)), join(path, leaf))
            for origin, leaf in zip(origins, self.leaves, strict=True)
        ]
        key = tuple(key for key, _ in models)
        named = next((named for _, named in models if named is not None), None)
        held = self.holder if choice is None else ""
        held = next((path for path, x in self.constants if x() is origins[0]), held)
        # The argument that holds a model names it better than a variable that holds a copy.
        order = [held] if named is None else [held, named.named]
        holders = order[::-1] if named is not None and named.is_module else order
        return RootPlace(name, key, tuple(dict.fromkeys(filter(None, holders))), path)


def _model_of(origin: Any, *leaves: str) -> tuple[Any, ArgumentPath | None]:
    """What tells the model that an array is of from others, and where it is among arguments."""
    for leaf in leaves if isinstance(origin, ArgumentPath) else ():
        if f"/{origin}".endswith(f"/{leaf}"):
            path, named = str(origin)[: -len(leaf) - 1], origin.named[: -len(leaf) - 1]
            return path, ArgumentPath(path, named, origin.is_module)
    return (origin if isinstance(origin, str) else id(origin)), None


class AnchorEffect(_jax.Effect):
    """Keeps anchors alive."""


anchor_effect = AnchorEffect()
anchor_p = _jax.Primitive("anchor")
anchor_p.multiple_results = True


def anchor(x: Value, choices: tuple[str, ...], leaf: str, arrays: Sequence[Any]) -> int:
    """Anchors an array; returns what a `ModuleScope` refers to it by."""
    made = Anchor(choices, leaf, constant_arrays(arrays))
    anchor_p.bind(x, anchor=made)
    return made.uid


def constant_arrays(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The arrays that are not traced; a traced one, for which None comes, may not be kept."""
    return tuple(None if isinstance(x, Tracer) else x for x in arrays)


def anchor_root(made: RootAnchor, xs: Sequence[Value]) -> int:
    """Anchors arrays of a root; returns what a `ModuleScope` refers to it by."""
    anchor_p.bind(*xs, anchor=made)
    return made.uid


class ArgumentPath(str):
    """Where an array is among the arguments of a program.

    `named` is the same path with the names that the user gave the arguments; `is_module` if the
    array is in a module there.
    """

    __slots__ = ("is_module", "named")
    named: str
    is_module: bool

    def __new__(cls, path: str, named: str, is_module: bool) -> ArgumentPath:
        made = super().__new__(cls, path)
        made.named, made.is_module = named, is_module
        return made


def argument_paths(
    fn: Function,
    arguments: PyTree,
    is_module: Callable[[Any], bool],
    own_keys: tuple[int, ...] = (),
) -> list[ArgumentPath]:
    """Where each array among the arguments of a call of `fn` is: positional ones, then keywords.

    Both are at `own_keys`, if more was added to the arguments.
    """
    flatten = jax.tree_util.tree_flatten_with_path
    modules = {keys for keys, leaf in flatten(arguments, is_leaf=is_module)[0] if is_module(leaf)}
    name = name_arguments(fn)

    def path(keys: tuple[Any, ...]) -> ArgumentPath:
        inside = any(keys[:i] in modules for i in range(len(keys) + 1))
        for i, key in enumerate(keys):
            held = getattr(key, "key", None)
            if isinstance(held, PathKey):
                named = join(held.named, leaf_path(keys[i + 1 :]))
                return ArgumentPath(leaf_path(keys), named, True)
        around = tuple(getattr(key, "idx", None) for key in keys[: len(own_keys)])
        own = keys[len(own_keys) :] if around == own_keys else ()
        first = [] if not own or getattr(own[0], "idx", 2) == 2 else name(own)
        rest = own[2 if first else 1 :] if own else keys
        named = "/".join([*first, *map(_key_path, rest)])
        return ArgumentPath(leaf_path(keys), named, inside)

    return [path(keys) for keys, _ in flatten(arguments)[0]]


class PathKey(str):
    """A key of a dict that is a path itself; `named` is that path in the names of the user."""

    __slots__ = ("named",)
    named: str

    def __new__(cls, path: str, named: str) -> PathKey:
        made = super().__new__(cls, path)
        made.named = named
        return made


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
    roots = Roots()
    resolved = _resolve(jaxpr, origins, roots)
    # What a root is called depends on all others.
    return _resolve(jaxpr, origins, roots) if roots.settle() else resolved


def _resolve(jaxpr: Jaxpr, origins: Sequence[Any], roots: Roots) -> Jaxpr:
    if not is_anchored(jaxpr):
        return jaxpr
    inner = _jax.open_jaxpr(jaxpr)
    # The constants of a body may be elsewhere, as they are in a primitive of another library.
    known: dict[Any, Any] = dict(zip(inner.constvars, _jax.jaxpr_consts(jaxpr), strict=False))
    known.update(zip(inner.invars, origins, strict=True))
    chosen: dict[int, Callable[[ModuleScope], ModuleScope]] = {}

    def origin(v: Any) -> Any:
        found = v.val if isinstance(v, _jax.Literal) else known.get(v)
        return v if found is None else found  # what is computed is its own origin

    def visit(eqn: Equation, names: dict[Var, Atom]) -> Iterator[Equation]:
        del names
        from_where = [origin(v) for v in eqn.invars]
        if eqn.primitive is anchor_p:
            move = _decide(eqn.params["anchor"], from_where, roots)
            if move is not None:
                chosen[eqn.params["anchor"].uid] = move
            return
        known.update(_passed_on(eqn, from_where))

        def resolve_body(body: Jaxpr) -> Jaxpr:
            return _resolve(body, _body_origins(eqn, body, from_where), roots)

        # What holds an anchor holds a mark as well, and so has an effect.
        new = map_equation_bodies(eqn, resolve_body, _ANCHORS) if eqn.effects else eqn
        yield _renamed(new, chosen)

    return rewrite(jaxpr, visit, _ANCHORS)


def _passed_on(eqn: Equation, origins: Sequence[Any]) -> dict[Var, Any]:
    """The origins of results that are operands; a call of an identity returns some, too."""
    kind = kind_of(eqn)
    if kind & _PASSING or eqn.primitive.name in _KEEPING:
        return {eqn.outvars[0]: origins[0]}
    if not kind & (CALLS | CUSTOM_RULES):
        return {}
    inner = _jax.open_jaxpr(next(bodies(eqn)))
    if len(inner.invars) != len(origins):
        return {}
    known = dict(zip(inner.invars, origins, strict=True))
    # A long one returns what it was given as it is, if it does: a residual.
    for each in inner.eqns if len(inner.eqns) <= _FEW else ():
        found = (None if isinstance(v, _jax.Literal) else known.get(v) for v in each.invars)
        known.update(_passed_on(each, [*found]))
    pairs = zip(eqn.outvars, inner.outvars, strict=True)
    found = {out: known.get(v) for out, v in pairs if not isinstance(v, _jax.Literal)}
    return {out: origin for out, origin in found.items() if origin is not None}


_FEW = 16


def _decide(
    made: Anchor | RootAnchor, origins: Sequence[Any], roots: Roots
) -> Callable[[ModuleScope], ModuleScope] | None:
    """How the scopes of an anchor are named; None if they stay as they are."""
    if isinstance(made, Anchor):
        choice = made.choose(origins[0])
        return None if choice is None else lambda scope: scope.moved(choice)
    place = made.place(origins)
    roots.add(place)
    name = roots.name(place)
    if name == made.name and not place.path:
        return None
    return lambda scope: scope.rooted(name, place.path)


_ANCHORS: frozenset[Any] = frozenset({anchor_effect})
_PASSING = Kind.COPY | Kind.REARRANGEMENT | Kind.SELECTION
"""What an array may go through on its way and still be that array."""
_KEEPING = frozenset({"convert_element_type", "stop_gradient"})
"""The same, of primitives that are like others in all else."""


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


def _renamed(eqn: Equation, chosen: dict[int, Callable[[ModuleScope], ModuleScope]]) -> Any:
    def rename(name: str) -> str:
        if not isinstance(name, ModuleScope) or name.anchor not in chosen:
            return name
        return chosen[name.anchor](name)

    return _jax.rename_scopes(eqn, rename) if chosen else eqn


def _bind_again(args: Args, tangents_or_dims: PyTree, **params: Any) -> Any:
    del tangents_or_dims  # there is no result that could have any
    return anchor_p.bind(*args, **params), []


_jax.allow_effect(AnchorEffect)
_jax.cache_weakly(Anchor)
_jax.cache_weakly(RootAnchor)
anchor_p.def_impl(lambda *args, **params: [])
anchor_p.def_effectful_abstract_eval(lambda *args, **params: ([], {anchor_effect}))
mlir.register_lowering(anchor_p, lambda ctx, *args, **params: [])
ad.primitive_jvps[anchor_p] = _bind_again
batching.primitive_batchers[anchor_p] = _bind_again
# An anchor stays in the loop that it is in, with the names that it is for.
_jax.register_partial_eval(anchor_p, lambda stage, tracers, params: stage())
