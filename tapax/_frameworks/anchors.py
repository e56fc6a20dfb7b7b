"""Anchors: equations that tell which of several equal modules a twin is, by its arrays.

A transformation that takes a module as an argument builds a copy of it inside, a *twin*. In a loop
over equal blocks, nothing in the source says which block the twin copies, and JAX may trace the
body of the loop once for all blocks. But every call takes the arrays of one block. So tapax binds
an *anchor* to the arrays of the twin: an equation without results, whose parameter lists the
modules that the twin may copy. `resolve` follows the arguments of the program to the anchors,
through all bodies on the way, and puts the right names into the scopes.

`resolve` duplicates a body that several calls share, one copy for each call.

The arrays of a root get anchors too, since its name depends on the other roots of the program: see
`_frameworks.roots`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.interpreters import ad, batching, mlir

from tapax import _jax
from tapax._frameworks.origins import PassedOperands, body_origins
from tapax._frameworks.roots import Root, Roots, name_arguments
from tapax._jax import Args, Atom, Equation, Function, Jaxpr, PyTree, Value, Var
from tapax._jaxpr.bodies import bodies
from tapax._jaxpr.rewrite import map_equation_bodies, rewrite
from tapax._marks.scopes import ModuleScope
from tapax._sites import join, segment


@dataclasses.dataclass(frozen=True)
class Anchor:
    """The possible paths of a module, and the paths `leaves` of its anchored arrays.

    A leaf is None if several choices share the array, so that it does not tell them apart. For each
    leaf, `arrays` has the array of each choice if it is a constant: that of a model that the
    function closes over.
    """

    choices: tuple[str, ...]
    leaves: tuple[str | None, ...]
    arrays: tuple[tuple[Any, ...], ...] = dataclasses.field(repr=False, compare=False)
    uid: int = dataclasses.field(default_factory=itertools.count(1).__next__)

    @classmethod
    def of(cls, leaves: Sequence[str], modules: Mapping[str, Mapping[str, Any]]) -> Anchor:
        """Make the anchor for a copy of one of several modules: the arrays of each, by path."""
        arrays = [tuple(module.get(leaf) for module in modules.values()) for leaf in leaves]
        told = [None if _is_shared(x) else leaf for leaf, x in zip(leaves, arrays, strict=True)]
        chosen = told if any(told) else leaves
        return cls(tuple(modules), tuple(chosen), tuple(map(_constant_arrays, arrays)))

    def choose(self, origins: Sequence[Any]) -> str | None:
        """Return the choice to which arrays of these origins belong; None if there is no match.

        An origin is the path of an argument, a constant array of the program, or a variable for an
        array that the program computes. The program may compute some arrays of a module anew, such
        as the count of a dropout, so the first origin with a match decides.
        """
        found = map(self._choose, self.leaves, self.arrays, origins)
        return next((choice for choice in found if choice is not None), None)

    def _choose(self, leaf: str | None, arrays: Sequence[Any], origin: Any) -> str | None:
        if leaf is None or origin is None:
            return None
        if isinstance(origin, str):
            ends = [c for c in self.choices if f"/{origin}".endswith(f"/{c}/{leaf}")]
            return max(ends, key=len, default=None)
        return next((c for c, x in zip(self.choices, arrays, strict=True) if x is origin), None)


def _is_shared(arrays: Sequence[Any]) -> bool:
    known = [id(x) for x in arrays if x is not None]
    return len(set(known)) < len(known)


def _constant_arrays(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Replace traced arrays by None, as they must not outlive their trace."""
    return tuple(None if isinstance(x, Tracer) else x for x in arrays)


@dataclasses.dataclass(frozen=True)
class RootAnchor:
    """The anchor of a root, a model that no module calls.

    - `name`: the name of the class of the model.
    - `leaves`: the paths of the anchored arrays in the model, perhaps inside a `collection`.
    - `holder`: the path of the variable that refers to the model.
    - `constants`: models of its kind with constant arrays; for each, the path of its variable and
      a reference to the first of its anchored arrays.
    - `part`: the possible paths of the model inside another, of the class `whole`.
    """

    name: str
    leaves: tuple[str, ...]
    holder: str
    constants: tuple[tuple[str, Any], ...] = dataclasses.field(repr=False, compare=False)
    whole: str = ""
    part: Anchor | None = None
    collection: str = ""
    uid: int = dataclasses.field(default_factory=itertools.count(-1, -1).__next__)

    def find_root(self, origins: Sequence[Any]) -> Root:
        """Find the root to which arrays of these origins belong."""
        if not origins:
            return Root(self.name, self.holder, (self.holder,) if self.holder else ())
        choice = self.part.choose(origins) if self.part is not None else None
        name, path = (self.name, "") if choice is None else (self.whole, choice)
        models = [
            _model_of(origin, join(self.collection, join(path, leaf)), join(path, leaf))
            for origin, leaf in zip(origins, self.leaves, strict=True)
        ]
        # Two models may share some arrays, so compare the first and the last.
        key = models[0][0], models[-1][0]
        named = next((named for _, named in models if named is not None), None)
        variable = self.holder if choice is None else ""
        variable = next((path for path, x in self.constants if x() is origins[0]), variable)
        # An argument that is a model names it better than a variable with a copy of the model.
        order = [variable] if named is None else [variable, named.named]
        holders = order[::-1] if named is not None and named.is_module else order
        return Root(name, key, tuple(dict.fromkeys(filter(None, holders))), path)


def _model_of(origin: Any, *leaves: str) -> tuple[Any, ArgumentPath | None]:
    """Return a key for the model that an array belongs to, and its path among the arguments."""
    for leaf in leaves if isinstance(origin, ArgumentPath) else ():
        if f"/{origin}".endswith(f"/{leaf}"):
            path, named = str(origin)[: -len(leaf) - 1], origin.named[: -len(leaf) - 1]
            return path, ArgumentPath(path, named, origin.is_module)
    return (origin if isinstance(origin, str) else id(origin)), None


class AnchorEffect(_jax.Effect):
    """The effect of anchors, which keeps them from being eliminated as dead code."""


anchor_effect = AnchorEffect()
anchor_p = _jax.Primitive("anchor")
anchor_p.multiple_results = True


def bind_anchor(made: Anchor | RootAnchor, xs: Sequence[Value]) -> int:
    """Bind an anchor to the arrays of its leaves; return its number, for a `ModuleScope`."""
    anchor_p.bind(*xs, anchor=made)
    return made.uid


class ArgumentPath(str):
    """The path of an array among the arguments of a program.

    `named` is that path with the user's names of the arguments. `is_module` is true if the array is
    inside a module.
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
    user_keys: tuple[int, ...] = (),
) -> list[ArgumentPath]:
    """List the paths of the arrays among the arguments of a call of `fn`.

    `user_keys` lead to the positional and keyword arguments of the user's call, if an adapter added
    others.
    """
    flatten = jax.tree_util.tree_flatten_with_path
    modules = {keys for keys, leaf in flatten(arguments, is_leaf=is_module)[0] if is_module(leaf)}
    name = name_arguments(fn)

    def path(keys: tuple[Any, ...]) -> ArgumentPath:
        inside = any(keys[:i] in modules for i in range(len(keys) + 1))
        for i, key in enumerate(keys):
            inner = getattr(key, "key", None)
            if isinstance(inner, PathKey):
                named = join(inner.named, leaf_path(keys[i + 1 :]))
                return ArgumentPath(leaf_path(keys), named, True)
        around = tuple(getattr(key, "idx", None) for key in keys[: len(user_keys)])
        given = keys[len(user_keys) :] if around == user_keys else ()
        first = [] if not given or getattr(given[0], "idx", 2) == 2 else name(given)
        rest = given[2 if first else 1 :] if given else keys
        named = "/".join([*first, *map(_key_path, rest)])
        return ArgumentPath(leaf_path(keys), named, inside)

    return [path(keys) for keys, _ in flatten(arguments)[0]]


class PathKey(str):
    """A key of a dict that is a path; `named` is that path with the user's names."""

    __slots__ = ("named",)
    named: str

    def __new__(cls, path: str, named: str) -> PathKey:
        made = super().__new__(cls, path)
        made.named = named
        return made


def leaf_path(keys: Sequence[Any]) -> str:
    """Join the keys of a leaf to a path."""
    return "/".join(map(_key_path, keys))


def _key_path(key: Value) -> str:
    inner = getattr(key, "key", None)
    if isinstance(inner, PathKey):
        return inner
    return segment(jax.tree_util.keystr((key,), simple=True))


def resolve(jaxpr: Jaxpr, origins: Sequence[Any]) -> Jaxpr:
    """Remove the anchors from a program, and set the scopes that they determine."""
    roots, passed = Roots(), PassedOperands()
    resolved = _resolve(jaxpr, origins, roots, passed)
    # The name of a root depends on all other roots.
    return _resolve(jaxpr, origins, roots, passed) if roots.settle() else resolved


def _resolve(jaxpr: Jaxpr, origins: Sequence[Any], roots: Roots, passed: PassedOperands) -> Jaxpr:
    if not is_anchored(jaxpr):
        return jaxpr
    inner = _jax.open_jaxpr(jaxpr)
    # A body may lack some of its constants, as in a primitive of another library.
    known: dict[Any, Any] = dict(zip(inner.constvars, _jax.jaxpr_consts(jaxpr), strict=False))
    known.update(zip(inner.invars, origins, strict=True))
    chosen: dict[int, Callable[[ModuleScope], ModuleScope]] = {}

    def origin(v: Any) -> Any:
        found = v.val if isinstance(v, _jax.Literal) else known.get(v)
        return v if found is None else found  # a computed array is identified by its variable

    def visit(eqn: Equation, names: dict[Var, Atom]) -> Iterator[Equation]:
        del names
        from_where = [origin(v) for v in eqn.invars]
        if eqn.primitive is anchor_p:
            move = _decide(eqn.params["anchor"], from_where, roots)
            if move is not None:
                chosen[eqn.params["anchor"].uid] = move
            return
        known.update((eqn.outvars[i], from_where[n]) for i, n in passed.find(eqn).items())

        def resolve_body(body: Jaxpr) -> Jaxpr:
            return _resolve(body, body_origins(eqn, body, from_where), roots, passed)

        # A body with an anchor has a mark as well, so its equation has an effect.
        new = map_equation_bodies(eqn, resolve_body, _ANCHORS) if eqn.effects else eqn
        yield _renamed(new, chosen)

    return rewrite(jaxpr, visit, _ANCHORS)


def _decide(
    made: Anchor | RootAnchor, origins: Sequence[Any], roots: Roots
) -> Callable[[ModuleScope], ModuleScope] | None:
    """Return a function that renames the scopes of an anchor; None if they keep their names."""
    if isinstance(made, Anchor):
        choice = made.choose(origins)
        return None if choice is None else lambda scope: scope.moved(choice)
    root = made.find_root(origins)
    roots.add(root)
    name = roots.name(root)
    if name == made.name and not root.path:
        return None
    return lambda scope: scope.rooted(name, root.path)


_ANCHORS: frozenset[Any] = frozenset({anchor_effect})


def is_anchored(jaxpr: Jaxpr) -> bool:
    """Return whether a program has anchors; some equations do not declare their effects."""
    inner = _jax.open_jaxpr(jaxpr)
    return anchor_effect in inner.effects or any(
        is_anchored(body) for eqn in inner.eqns if eqn.effects for body in bodies(eqn)
    )


def _renamed(eqn: Equation, chosen: dict[int, Callable[[ModuleScope], ModuleScope]]) -> Any:
    def rename(name: str) -> str:
        if not isinstance(name, ModuleScope) or name.anchor not in chosen:
            return name
        return chosen[name.anchor](name)

    return _jax.rename_scopes(eqn, rename) if chosen else eqn


def _rebind(args: Args, tangents_or_dims: PyTree, **params: Any) -> Any:
    del tangents_or_dims  # an anchor has no results, and so no tangents or axes
    return anchor_p.bind(*args, **params), []


_jax.allow_effect(AnchorEffect)
_jax.cache_weakly(Anchor)
_jax.cache_weakly(RootAnchor)
anchor_p.def_impl(lambda *args, **params: [])
anchor_p.def_effectful_abstract_eval(lambda *args, **params: ([], {anchor_effect}))
mlir.register_lowering(anchor_p, lambda ctx, *args, **params: [])
ad.primitive_jvps[anchor_p] = _rebind
batching.primitive_batchers[anchor_p] = _rebind
# JAX must not hoist an anchor out of its loop, where the scopes are that refer to it.
_jax.register_partial_eval(anchor_p, lambda stage, tracers, params: stage())
