"""Changes: what a walk does to the values and gradients of some sites, and the arrays it needs.

A change is a function of the value as it was marked: of one call, one iteration, one example. The
arrays that it needs besides, its `Part`s, may be the same everywhere, or have an axis for every
loop, mesh and map that the site is in, as what a capture of the site returns does. They are handed
down into the bodies of the program: a scan hands each iteration its own, a shard_map each device.
So nothing is indexed, and the gradient by a perturbation is no larger than the perturbation.

The number of the iteration of a loop is handed down in the same way to the changes that are for
some of its iterations alone.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from tapax import _jax
from tapax._jax import Jaxpr, Value, typed
from tapax._jaxpr.kinds import LOOPS, Kind
from tapax._marks.change import derivative
from tapax._marks.marked_jaxprs import Uids
from tapax._marks.scopes import Scopes, path_in
from tapax._sites import ScannedLayers, SiteError


class Around(NamedTuple):
    """A loop, or an axis of a mesh, that a site is in. The size of a while loop is not known.

    What is captured has an axis for a mesh's if it varies over it, or if that is not known.
    `scopes` are those in which a loop is run.
    """

    kind: Kind
    name: str
    size: int | None
    unchecked: bool = False
    scopes: Scopes = ()

    def __str__(self) -> str:
        return self.name if self.size is None else f"{self.name}[{self.size}]"

    @property
    def is_loop(self) -> bool:
        """Whether it is a loop; if not, `name` is that of an axis of a mesh."""
        return bool(self.kind & LOOPS)


def layers_of(around: Sequence[Around], scopes: Scopes) -> tuple[ScannedLayers, ...]:
    """The scanned layers that a mark within some scopes is in, of the loops around it.

    The module that a loop runs first is what it scans over; of several loops that run the same
    module first, as a loop over batches and one over layers in it do, it is the innermost.
    """
    loops = [a for a in reversed(around) if a.is_loop]
    found: dict[str, ScannedLayers] = {}
    for number, loop in enumerate(loops):
        outer = len(loop.scopes)
        inner = next((i for i, name in enumerate(scopes[outer:], outer + 1) if name), None)
        if loop.size is not None and inner is not None and scopes[:outer] == loop.scopes:
            path = path_in(scopes[:inner], "")
            found.setdefault(path, ScannedLayers(path, number, loop.size))
    return tuple(found.values())


@dataclasses.dataclass(frozen=True)
class Part:
    """An array that a change needs, with axes for some of what its site is in, outermost first.

    `depths` says for which: 0 is the outermost loop or mesh. `mapped` axes come next.
    """

    array: Any
    depths: tuple[int, ...] = ()
    mapped: int = 0


class CounterKey(NamedTuple):
    """The number of the iteration of the loop at a depth, as a part."""

    depth: int


@dataclasses.dataclass(frozen=True)
class Change:
    """`fn(x, counters, *parts)` is what a value `x` is replaced by, of the same type.

    `parts` are the keys of those it needs, `counted` the depths of the loops whose iterations
    `counters` numbers. Changes that do the `same` are equal. That of a gradient has the `level` of
    the derivative that it is of.
    """

    same: Hashable
    fn: Callable[..., Any] = dataclasses.field(compare=False)
    parts: tuple[Hashable, ...] = dataclasses.field(default=(), compare=False)
    counted: frozenset[int] = frozenset()
    level: int | None = None


class Key(NamedTuple):
    """What is changed: the value or the gradient (`of`) of a site."""

    of: str
    name: str


class PartKey(NamedTuple):
    """Which array of a change."""

    change: Key
    number: int


class Changes:
    """The changes of a walk, and those of their parts that are at hand where it is."""

    def __init__(
        self,
        changes: Mapping[Key, Change],
        sites: Mapping[int, Iterable[Key]],
        parts: Mapping[Hashable, Part],
    ):
        self._changes = dict(changes)
        self._sites = {uid: tuple(keys) for uid, keys in sites.items()}
        self._uids = Uids()
        self.parts: dict[Hashable, Part] = dict(parts)

    def find(self, key: Key, level: int | None = None) -> Change | None:
        """How a site is changed; a gradient is if it is of the innermost derivative there is.

        One of a derivative around that is taken of the changed gradient, as of any function.
        """
        change = self._changes.get(key)
        return change if change is None or change.level == level else None

    def needed(self, jaxprs: Sequence[Any]) -> tuple[Hashable, ...]:
        """The keys of the parts that some bodies may need."""
        found = [self._changes[key] for jaxpr in jaxprs for key in self.within(jaxpr)]
        keys = dict.fromkeys(part for change in found for part in change.parts)
        counters = {CounterKey(depth): None for change in found for depth in change.counted}
        keys.update((key, None) for key in counters if key in self.parts)
        return tuple(keys)

    def counts(self, jaxpr: Jaxpr, depth: int) -> bool:
        """Whether a change in the body of a loop at a depth wants to know the iteration."""
        return any(depth in self._changes[key].counted for key in self.within(jaxpr))

    def within(self, jaxpr: Jaxpr) -> list[Key]:
        """What is changed in a body."""
        if not self._changes:
            return []
        keys = (key for uid in self._uids.within(jaxpr) for key in self._sites.get(uid, ()))
        return [key for key in keys if key in self._changes]

    def arrays(self, keys: Sequence[Hashable]) -> list[Any]:
        return [self.parts[key].array for key in keys]

    def hand_down(self, keys: Sequence[Hashable], arrays: Sequence[Any], below: int = 0) -> None:
        """Puts arrays in the places of parts; their axes for what is above a depth are gone."""
        parts = dict(self.parts)
        for key, array in zip(keys, arrays, strict=True):
            part = parts[key]
            depths = tuple(d for d in part.depths if d >= below)
            parts[key] = Part(array, depths, part.mapped)
        self.parts = parts

    def at_depth(self, keys: Sequence[Hashable], depth: int, length: int) -> list[Hashable]:
        """Which parts have one array for each iteration of a loop at a depth."""
        # A function that is traced once may be called in other loops too, which are of other sizes.
        return [
            key
            for key in keys
            if self.parts[key].depths[:1] == (depth,) and self.parts[key].array.shape[0] == length
        ]

    def count(self, number: Any, depth: int) -> None:
        """Says which iteration of the loop at a depth this is."""
        self.parts = {**self.parts, CounterKey(depth): Part(number)}

    def apply(
        self,
        change: Change,
        operands: Sequence[Any],
        axes: tuple[int, ...],
        own: tuple[bool, ...] | None = None,
        then: Callable[[Any], Any] = lambda x: x,
        *,
        order: int = 0,
        transposed: bool = False,
    ) -> Any:
        """A change, or a derivative of it, of a value with mapped `axes`.

        `then` is what happens to the changed value next, and is differentiated with it.
        """
        own = (True,) * len(axes) if own is None else own
        varying = _jax.varying_axes(jax.typeof(operands[-1]))
        parts = [self.parts[key] for key in change.parts]
        counters = {depth: self.parts[CounterKey(depth)].array for depth in change.counted}
        if any(part.depths or part.mapped not in (0, sum(own)) for part in parts):
            raise SiteError(
                "A change with a value for every iteration or every example is in a loop or a map "
                "that its site is not in. Give it one value for all."
            )

        def one(*flat: Value) -> Any:
            xs, ps = flat[: len(operands)], flat[len(operands) :]
            return derivative(lambda x: changed(x, *ps), order, transposed, *xs)

        def changed(x: Value, *ps: Value) -> Any:
            out = change.fn(x, counters, *ps)
            return then(_jax.like(_jax.with_varying(out, varying), jax.typeof(x)))

        positions = [a - sum(b < a for b in axes[:i]) for i, a in enumerate(axes)]
        for position, is_own in reversed(list(zip(positions, own, strict=True))):
            lies = [0 if part.mapped and is_own else None for part in parts]
            in_axes = (*(position for _ in operands), *lies)
            one = jax.vmap(one, in_axes=in_axes, out_axes=position)
        arrays = (self._laid_out(part, operands[-1], axes, own) for part in parts)
        return one(*map(typed.asarray, operands), *arrays)

    @staticmethod
    def _laid_out(part: Part, x: Value, axes: tuple[int, ...], own: tuple[bool, ...]) -> Any:
        """The array of a part, on the devices of a mesh as the value is that it is for."""
        aval = jax.typeof(x)
        array = _jax.with_varying(part.array, _jax.varying_axes(aval))
        if not part.mapped:
            return array
        mapped = [aval.sharding.spec[a] for a, is_own in zip(axes, own, strict=True) if is_own]
        return _jax.with_spec(array, [*mapped, *jax.typeof(array).sharding.spec[len(mapped) :]])
