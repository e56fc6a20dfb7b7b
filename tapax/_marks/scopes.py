"""Scopes: the names around a mark, which JAX's name stack stores and the walk joins.

Every equation has a name stack, but the stack starts empty in the body of every jit, scan or remat.
So the walk joins the names in a body to those of the equation that calls it. A function that is
traced once and called in two scopes thus has two sites.

A `ModuleScope` is the scope of a module. It stores the path relative to the calling module, which
stays correct when several modules call one traced body.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from tapax import _jax
from tapax._jax import Equation
from tapax._sites import join


class ScopeName(str):
    """A scope of tapax in JAX's name stack, which also contains names of other libraries.

    `entry` identifies the `with` block that put the scope there, also after the scope is renamed.
    """

    __slots__ = ("entry",)
    entry: object

    def __new__(cls, name: str) -> Self:
        scope = super().__new__(cls, name)
        scope.entry = object()
        return scope


class ModuleScope(ScopeName):
    """The path of a module relative to the calling module: an attribute, an index, a key.

    `up` is the number of modules to leave first: a module may call a module of an ancestor or, with
    an empty path, the ancestor itself. `root` is the name of the module if no module is around it.
    If the path is known only after the program is traced, `anchor` is the number of the anchor that
    determines the part of the path before `tail`. That path is in the model named `model`, and
    starts `above` modules further out.
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
        scope = super().__new__(cls, path)
        scope.root, scope.up = root, up
        scope.anchor, scope.model, scope.tail = anchor, model, tail
        scope.above = above
        return scope

    def out_of(self, modules: int) -> ModuleScope:
        """Return the scope with `up` set to `modules`."""
        scope = ModuleScope(self, self.root, modules, anchor=self.anchor, tail=self.tail)
        scope.model, scope.above = self.model, self.above
        return self._renamed(scope)

    def moved(self, path: str) -> ModuleScope:
        """Return the scope with the path that its anchor determined."""
        found = join(path, self.tail)
        return self._renamed(ModuleScope(found, join(self.model, found), self.up + self.above))

    def rooted(self, name: str, path: str) -> ModuleScope:
        """Return the scope in the root `name`, which has the model at `path`."""
        inside = join(path, self.tail)
        whole = join(name, inside)
        # If a backward pass runs within the root, only the rest of the path is to be added.
        return self._renamed(ModuleScope(inside if path else whole, whole, self.up))

    def outermost(self) -> ModuleScope:
        """Return the scope for a place that is not inside of any module."""
        return self._renamed(ModuleScope(self.root, self.root))

    def _renamed(self, scope: ModuleScope) -> ModuleScope:
        scope.entry = self.entry
        return scope


class GroundScope(ScopeName):
    """A nameless scope to which a `GroundedScope` inside of it returns."""

    __slots__ = ()


class GroundedScope(ScopeName):
    """A nameless scope that leaves all scopes entered since the innermost `GroundScope`."""

    __slots__ = ()


Scopes = tuple[ScopeName, ...]


def scopes_of(eqn: Equation, outer: Scopes = ()) -> Scopes:
    """Return the scopes of an equation in a body that is called within the scopes `outer`."""
    names = [name for name in _jax.names_of(eqn) if isinstance(name, ScopeName)]
    if not names:
        return outer
    scopes = list(outer)
    for name in _without_repetition(names, outer):
        if isinstance(name, ModuleScope):
            _leave(scopes, name.up)
            inside = any(isinstance(scope, ModuleScope) for scope in scopes)
            if name or not inside:
                scopes.append(name if inside else name.outermost())
        elif isinstance(name, GroundedScope):
            while scopes and not isinstance(scopes[-1], GroundScope):
                scopes.pop()
        else:
            scopes.append(name)
    return tuple(scopes)


def _without_repetition(names: Iterable[ScopeName], outer: Scopes) -> list[ScopeName]:
    """Return the scopes among `names` without those that JAX repeats.

    The transpose of a remat or of a custom rule has the scopes around the backward pass, and then
    those of the forward equation, which start from the same outermost scope. With `jax_remat3`,
    equations in the body start from that scope too.
    """
    entered: dict[object, ScopeName] = {}
    for name in names:
        entered.setdefault(name.entry, name)
    around = {scope.entry for scope in outer}
    repeated = [i for i, entry in enumerate(entered) if entry in around]
    # Scopes that were left again before the last repeated one are not in `outer`.
    return list(entered.values())[repeated[-1] + 1 if repeated else 0 :]


def _leave(scopes: list[ScopeName], modules: int) -> None:
    """Remove the scopes of the innermost modules, and the scopes inside these modules."""
    while modules and any(isinstance(scope, ModuleScope) for scope in scopes):
        modules -= isinstance(scopes.pop(), ModuleScope)


def path_in(scopes: Scopes, name: str) -> str:
    """Return the path of a mark within some scopes; the mark of a module's result has no name."""
    around = "/".join(scope for scope in scopes if scope)
    if not name or name[0] in ".:":
        return around + name
    return f"{around}/{name}" if around else name
