"""Scopes: the names around a mark, kept in JAX's name stack, and joined when a program is walked.

Every equation has the names within which it was traced, but they start anew in the body of every
jit, scan or remat. So the walk joins those of a body to those of the equation that calls it, and a
function that is traced once and called in two scopes has two sites.

A `ModuleScope` is the scope of a module: where it is, seen from the module that called it. Relative
as it is, it stays right where one traced body is called by several modules.
"""

from __future__ import annotations

from tapax import _jax
from tapax._jax import Equation
from tapax._sites import join


class ScopeName(str):
    """A name in JAX's name stack that is a scope of ours, and not anybody else's."""

    __slots__ = ()


class ModuleScope(ScopeName):
    """The path of a module from the module that called it: an attribute, an index, a key.

    `up` is how many modules to leave first: a module may call one that an ancestor owns, or, if the
    path is empty, the ancestor itself. `root` is its name where no module is around it. If the path
    is not known until the program is traced, there is an `anchor`, which tells what goes before
    `tail`, in the model of the name `model`, `above` modules further out.
    """

    __slots__ = ("above", "anchor", "model", "root", "tail", "up")
    root: str
    up: int
    anchor: int | None
    model: str
    tail: str
    above: int

    def __new__(
        cls,
        path: str,
        root: str,
        up: int = 0,
        *,
        anchor: int | None = None,
        model: str = "",
        tail: str = "",
        above: int = 0,
    ) -> ModuleScope:
        place = super().__new__(cls, path)
        place.root, place.up = root, up
        place.anchor, place.model, place.tail = anchor, model, tail
        place.above = above
        return place

    def out_of(self, modules: int) -> ModuleScope:
        """The place, once some modules have been left."""
        place = ModuleScope(self, self.root, modules, anchor=self.anchor, tail=self.tail)
        place.model, place.above = self.model, self.above
        return place

    def moved(self, path: str) -> ModuleScope:
        """The place, now that its path is known."""
        found = join(path, self.tail)
        return ModuleScope(found, join(self.model, found), self.up + self.above)

    def rooted(self, name: str, path: str) -> ModuleScope:
        """The place in a root, now that its name is known and the path of the model in it."""
        inside = join(path, self.tail)
        whole = join(name, inside)
        # Where a backward pass runs within the root, only the rest is to be added.
        return ModuleScope(inside if path else whole, whole, self.up)


class GroundScope(ScopeName):
    """A scope without a name: those entered above it do not count for what is `GroundedScope`."""

    __slots__ = ()


class GroundedScope(ScopeName):
    """The scope, without a name, of a mark that is named as if it were made on the ground."""

    __slots__ = ()


Scopes = tuple[ScopeName, ...]


def scopes_of(eqn: Equation, outer: Scopes = ()) -> Scopes:
    """The scopes of an equation, in a body that is called within those of `outer`."""
    scopes = list(outer)
    for name in _jax.names_of(eqn):
        if isinstance(name, ModuleScope):
            _leave(scopes, name.up)
            inside = any(isinstance(scope, ModuleScope) for scope in scopes)
            if name or not inside:
                scopes.append(name if inside else ModuleScope(name.root, name.root))
        elif isinstance(name, GroundedScope):
            while scopes and not isinstance(scopes[-1], GroundScope):
                scopes.pop()
        elif isinstance(name, ScopeName):
            scopes.append(name)
    return tuple(scopes)


def _leave(scopes: list[ScopeName], modules: int) -> None:
    """Takes the scopes of the innermost modules away, and what is within them."""
    while modules and any(isinstance(scope, ModuleScope) for scope in scopes):
        modules -= isinstance(scopes.pop(), ModuleScope)


def path_in(scopes: Scopes, name: str) -> str:
    """The path of a mark within some scopes; that of a module's own result has no name."""
    around = "/".join(scope for scope in scopes if scope)
    if not name or name[0] in ".:":
        return around + name
    return f"{around}/{name}" if around else name
