"""Changes: functions that a walk applies to the values and gradients of some sites.

A change is a function of the value as it was marked: of one call, one iteration, one example. Its
further operands, its `Part`s, may be equal everywhere, or have an axis for every loop, mesh and map
around the site, like the result of a capture of the site. The walk passes them down into the bodies
of the program: a scan passes one slice to each iteration, a shard_map one shard to each device. So
no change indexes an array, and the gradient of a perturbation is no larger than the perturbation.

In the same way, the walk passes the number of the iteration to changes that apply only to some
iterations.
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
    """A loop, or an axis of a mesh, around a site. The `size` of a while loop is None.

    A captured value has an axis for a mesh axis if it varies over that axis, or if `unchecked` is
    true because JAX does not track it. `scopes` are the scopes around a loop.
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
        """Return whether it is a loop; otherwise `name` is the name of a mesh axis."""
        return bool(self.kind & LOOPS)


def layers_of(around: Sequence[Around], scopes: Scopes) -> tuple[ScannedLayers, ...]:
    """Find the scanned layers around a mark, from its scopes and the loops around it.

    A loop scans over the first module inside of it. If that is one module for several loops, such
    as a loop over batches around a loop over layers, the innermost of them scans over it.
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
    """An operand of a change, with axes for some loops and meshes around its site, outermost first.

    `depths` numbers these loops and meshes; 0 is the outermost. `mapped` batch axes come next.
    """

    array: Any
    depths: tuple[int, ...] = ()
    mapped: int = 0


class CounterKey(NamedTuple):
    """The key of the part that numbers the iterations of the loop at a depth."""

    depth: int


@dataclasses.dataclass(frozen=True)
class Change:
    """A function that replaces a value `x` by `fn(x, counters, *parts)`, of the type of `x`.

    `parts` are the keys of its parts; `counted` are the depths of the loops whose current iteration
    is in `counters`. Changes with equal fingerprints are equal. The change of a gradient has the
    `level` of its derivative.
    """

    fingerprint: Hashable
    fn: Callable[..., Any] = dataclasses.field(compare=False)
    parts: tuple[Hashable, ...] = dataclasses.field(default=(), compare=False)
    counted: frozenset[int] = frozenset()
    level: int | None = None


class Key(NamedTuple):
    """The key of a change: the value or the gradient (`of`) of a site."""

    of: str
    name: str


class PartKey(NamedTuple):
    """The key of a part: its number among the parts of a change."""

    change: Key
    number: int


class Changes:
    """The changes of a walk, and their parts as they are in the current body."""

    def __init__(
        self,
        changes: Mapping[Key, Change],
        sites: Mapping[int, Iterable[Key]],
        parts: Mapping[Hashable, Part],
    ):
        self._changes = dict(changes)
        self._sites = {uid: tuple(keys) for uid, keys in sites.items()}
        self._uids = Uids()
        self._met: list[str] = []
        self.parts: dict[Hashable, Part] = dict(parts)

    def find(self, key: Key, level: int | None = None) -> Change | None:
        """Return the change of a site; a gradient is changed in its innermost derivative only.

        An outer derivative differentiates the changed gradient, like any function.
        """
        change = self._changes.get(key)
        return change if change is None or change.level == level else None

    def needed(self, jaxprs: Sequence[Any]) -> tuple[Hashable, ...]:
        """Return the keys of the parts that some bodies may need."""
        found = [self._changes[key] for jaxpr in jaxprs for key in self.within(jaxpr)]
        keys = dict.fromkeys(part for change in found for part in change.parts)
        counters = {CounterKey(depth): None for change in found for depth in change.counted}
        keys.update((key, None) for key in counters if key in self.parts)
        return tuple(keys)

    def counts(self, jaxpr: Jaxpr, depth: int) -> bool:
        """Return whether a change in the body of the loop at `depth` needs the iteration."""
        return any(depth in self._changes[key].counted for key in self.within(jaxpr))

    def within(self, jaxpr: Jaxpr) -> list[Key]:
        """Return the keys of the changes in a body."""
        if not self._changes:
            return []
        keys = (key for uid in self._uids.within(jaxpr) for key in self._sites.get(uid, ()))
        return [key for key in keys if key in self._changes]

    def meet(self, names: Iterable[str]) -> None:
        """Note the names of the calls to which a tap belongs."""
        if self._changes:
            self._met += names

    def recorder(self) -> Callable[[Jaxpr], list[Key]]:
        """Return a function that lists the changes in a body that the walk enters from here on.

        They are fewer than those `within` the body, which a function that JAX traced once shares
        with all its other calls.
        """
        since = len(self._met)

        def met_in(jaxpr: Jaxpr) -> list[Key]:
            names = set(self._met[since:])
            return [key for key in self.within(jaxpr) if key.name in names]

        return met_in

    def arrays(self, keys: Sequence[Hashable]) -> list[Any]:
        return [self.parts[key].array for key in keys]

    def set_arrays(self, keys: Sequence[Hashable], arrays: Sequence[Any], below: int = 0) -> None:
        """Set the arrays of parts, without axes for loops and meshes above the depth `below`."""
        parts = dict(self.parts)
        for key, array in zip(keys, arrays, strict=True):
            part = parts[key]
            depths = tuple(d for d in part.depths if d >= below)
            parts[key] = Part(array, depths, part.mapped)
        self.parts = parts

    def at_depth(self, keys: Sequence[Hashable], depth: int, length: int) -> list[Hashable]:
        """Return the keys of the parts with an axis for the iterations of the loop at a depth."""
        # A function that is traced once may also be called in loops of other lengths.
        return [
            key
            for key in keys
            if self.parts[key].depths[:1] == (depth,) and self.parts[key].array.shape[0] == length
        ]

    def count(self, number: Any, depth: int) -> None:
        """Set the number of the current iteration of the loop at a depth."""
        self.parts = {**self.parts, CounterKey(depth): Part(number)}

    def apply(
        self,
        change: Change,
        operands: Sequence[Any],
        axes: tuple[int, ...],
        in_value: tuple[bool, ...] | None = None,
        then: Callable[[Any], Any] = lambda x: x,
        *,
        order: int = 0,
        transposed: bool = False,
    ) -> Any:
        """Apply a change, or its derivative, to operands with mapped `axes`.

        `in_value` says which axes the value has, and not only its derivative; by default all.
        `then` is applied to the changed value and differentiated with it.
        """
        in_value = (True,) * len(axes) if in_value is None else in_value
        varying = _jax.varying_axes(jax.typeof(operands[-1]))
        parts = [self.parts[key] for key in change.parts]
        counters = {depth: self.parts[CounterKey(depth)].array for depth in change.counted}
        if any(part.depths or part.mapped not in (0, sum(in_value)) for part in parts):
            raise SiteError(
                "A change with a value for every iteration or every example is applied in a loop "
                "or a vmap that is not around its site. Give one value for all of them."
            )

        def one(*flat: Value) -> Any:
            xs, ps = flat[: len(operands)], flat[len(operands) :]
            return derivative(lambda x: changed(x, *ps), order, transposed, *xs)

        def changed(x: Value, *ps: Value) -> Any:
            out = change.fn(x, counters, *ps)
            return then(_jax.like(_jax.with_varying(out, varying), jax.typeof(x)))

        positions = [a - sum(b < a for b in axes[:i]) for i, a in enumerate(axes)]
        for position, has_axis in reversed(list(zip(positions, in_value, strict=True))):
            part_axes = [0 if part.mapped and has_axis else None for part in parts]
            in_axes = (*(position for _ in operands), *part_axes)
            one = jax.vmap(one, in_axes=in_axes, out_axes=position)
        arrays = (self._shard_part(part, operands[-1], axes, in_value) for part in parts)
        return one(*map(typed.asarray, operands), *arrays)

    @staticmethod
    def _shard_part(part: Part, x: Value, axes: tuple[int, ...], in_value: tuple[bool, ...]) -> Any:
        """Return the array of a part, sharded like `x`."""
        aval = jax.typeof(x)
        array = _jax.with_varying(part.array, _jax.varying_axes(aval))
        if not part.mapped:
            return array
        mapped = [aval.sharding.spec[a] for a, has in zip(axes, in_value, strict=True) if has]
        return _jax.with_spec(array, [*mapped, *jax.typeof(array).sharding.spec[len(mapped) :]])
