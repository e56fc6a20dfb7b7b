"""Parts of the values of a site: some iterations of a loop, or some entries of an array."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from types import EllipsisType
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.core import Tracer

from tapax import _jax
from tapax._jax import SEQUENCES, ArrayLike, Value, typed
from tapax._sites.errors import SiteError, wrong_type
from tapax._sites.matching import Selector, admits, picks, show
from tapax._sites.site import Site

_ARRAYS: tuple[type[Any], ...] = (jax.Array, np.ndarray)
_INTEGERS: tuple[type[Any], ...] = (int, np.integer)
_TRACERS: tuple[type[Any], ...] = (Tracer,)
_LISTS: tuple[type[Any], ...] = (list,)
_SLICES: tuple[type[Any], ...] = (slice,)


@dataclasses.dataclass(frozen=True, eq=False)
class At(Selector):
    """A selection of some iterations or entries of the values of its sites: see `at`."""

    selection: Any
    step: Any = None
    index: Index | None = None

    def _identity(self) -> Any:
        # Arrays are compared by identity.
        is_fixed = self.step is None or isinstance(self.step, (int, StepSlice))
        numbers = () if self.index is None else tuple(map(id, self.index.numbers))
        return self.selection, self.step if is_fixed else id(self.step), self.index, numbers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, At) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def picks(self, site: Site) -> bool:
        return picks(self.selection, site)

    def admits(self, site: Site) -> bool:
        return admits(self.selection, site)

    def __str__(self) -> str:
        step = "" if self.step is None else f", step={self.step}"
        index = "" if self.index is None else f", index={self.index}"
        return f"at({show(self.selection)}{step}{index})"


def at(selection: Any, *, step: slice | ArrayLike | None = None, index: Any = None) -> At:
    """Select some iterations, or some entries, of the values that a selection picks.

    A capture returns, or reduces, only the selected part; an edit changes only that part.

    Args:
        selection: Selects the sites: a glob, a predicate, a rule, or a sequence of these.
        step: Iterations of the innermost loop around a site: an integer selects the value of one
            iteration, a slice selects a stack of them. In an edit, `step` may be a traced integer.
        index: Entries of the value as the program marks it, without the axes of loops and maps:
            `np.s_[:, -1]` for the last position, `np.s_[..., 3, :]` for a head. Any index of a
            NumPy array will do; in an edit, its integers may be traced.

    Returns:
        A selection. It is hashable, so that it can be a key of the `values` of `tapax.edit`.

    Raises:
        TypeError: If neither `step` nor `index` is given, if `step` is neither an integer nor a
            slice, or if `index` is not an index of an array.
        SiteError: If `step` is an array with several elements.

    Example:
        >>> import jax.numpy as jnp, numpy as np, tapax
        >>> f = lambda x: tapax.sow(x**2, "h").sum()
        >>> last = tapax.at("h", index=np.s_[-1])
        >>> x = jnp.array([1.0, 2.0, 3.0])
        >>> float(tapax.capture(f, values=last)(x)[1].values["h"])
        9.0
        >>> float(tapax.edit(f, values={last: 0.0})(x))
        5.0
    """
    if step is None and index is None:
        raise TypeError(
            "`at` was given neither `step` nor `index`. Give `step` to select iterations of a "
            "loop, or `index` to select entries of a value."
        )
    part = None if index is None else Index.of(index)
    return At(_hashable(selection), _checked_step(step), part)


def _hashable(selection: Any) -> Any:
    """Make a selection hashable: lists become tuples, and sets frozen sets."""
    if isinstance(selection, SEQUENCES):
        return tuple(map(_hashable, selection))
    return frozenset(cast(Iterable[Any], selection)) if isinstance(selection, set) else selection


def _checked_step(step: Any) -> Any:
    if step is None:
        return None
    if isinstance(step, _SLICES):
        return StepSlice.of(step)
    if _is_integer(step):
        return int(step)
    if isinstance(step, _ARRAYS) and np.issubdtype(step.dtype, np.integer):
        if step.ndim == 0:
            return step
        raise SiteError(
            f"`at` takes one iteration as `step`, but was given an array of shape "
            f"{list(step.shape)}. For several iterations, apply jax.vmap to the edited function."
        )
    raise wrong_type(
        "`at` takes an integer or a slice of iterations as `step`, but was given", step
    )


@dataclasses.dataclass(frozen=True)
class StepSlice:
    """A slice that is hashable in every Python; built-in slices are only since Python 3.12."""

    start: int | None
    stop: int | None
    stride: int | None

    @classmethod
    def of(cls, s: slice) -> StepSlice:
        return cls(s.start, s.stop, s.step)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop, self.stride)

    def __str__(self) -> str:
        return str(self.slice)


@dataclasses.dataclass(frozen=True)
class _IndexArray:
    """An array in an index, compared by its elements."""

    array: np.ndarray = dataclasses.field(compare=False)
    content: tuple[Any, ...]

    @classmethod
    def of(cls, array: Any) -> _IndexArray:
        made = np.asarray(array)
        return cls(made, (made.dtype.str, made.shape, made.tobytes()))


class _TracedInteger:
    """A placeholder for a traced integer in an index."""


_TRACED = _TracedInteger()
_Item: TypeAlias = "int | StepSlice | _IndexArray | _TracedInteger | EllipsisType | None"


@dataclasses.dataclass(frozen=True)
class Index:
    """A hashable index of a value: the contents of the brackets of `x[...]`.

    `numbers` are the traced integers in it, in order. Equality ignores them.
    """

    items: tuple[_Item, ...]
    numbers: tuple[Any, ...] = dataclasses.field(default=(), compare=False)

    @classmethod
    def of(cls, index: Any) -> Index:
        given = cast(Sequence[Any], index) if isinstance(index, tuple) else (index,)
        numbers = tuple(item for item in given if isinstance(item, _TRACERS))
        return cls(tuple(map(_item, given)), numbers)

    @property
    def key(self) -> tuple[Any, ...]:
        """The index to use in `x[...]`."""
        numbers = iter(self.numbers)
        return tuple(next(numbers) if item is _TRACED else _plain(item) for item in self.items)

    def with_numbers(self, numbers: Sequence[Any]) -> Index:
        """Replace the traced integers."""
        return Index(self.items, tuple(numbers))

    def pick(self, x: Value) -> Any:
        """Return the part of `x` that the index selects, sharded like `x` where its axes divide."""
        return self._gathered(x, to_set=False)[self.key]

    def put(self, x: Value, part: Value) -> Any:
        """Return `x` with the part that the index selects replaced by `part`."""
        array = self._gathered(x, to_set=True)
        if array is not x:
            replaced = typed.eval_shape(self.pick, array)
            part = _jax.with_spec(part, replaced.sharding.spec)
        # If JAX does not know that no entry is set twice, it looks for entries that are, and fails
        # in a derivative of a sharded value.
        out = array.at[self.key].set(part, unique_indices=self._is_unique(x.shape))
        return _jax.with_spec(out, jax.typeof(x).sharding.spec)

    def _gathered(self, x: Value, *, to_set: bool) -> Any:
        """Replicate the axes of `x` that JAX cannot index because an explicit mesh shards them.

        JAX can read a slice of such an axis if the mesh divides its length, but cannot set it.
        """
        sharding = jax.typeof(x).sharding
        spec, axis = list(sharding.spec), 0
        for item, sizes in zip(self.items, self._axes_of(x.shape), strict=True):
            for size in sizes:
                taken = _taken(item, size)
                shards = _jax.shard_count(sharding, axis)
                is_readable = taken is not None and len(taken) % shards == 0
                if taken != range(size) and (to_set or not is_readable):
                    spec[axis] = None
                axis += 1
        return _jax.with_spec(x, spec)

    def _is_unique(self, shape: tuple[int, ...]) -> bool:
        """Return whether the index selects no entry of a value twice."""
        if not any(isinstance(item, _IndexArray) for item in self.items):
            return True
        # Only arrays select twice, so look at their axes alone.
        sizes: list[int] = []
        for item, axes in zip(self.items, self._axes_of(shape), strict=True):
            sizes += axes if isinstance(item, _IndexArray) else [1] * len(axes)
        sizes += [1] * (len(shape) - len(sizes))
        alone = Index(tuple(map(_whole, self.items)))
        places = np.arange(np.prod(sizes)).reshape(sizes)[alone.key]
        return np.unique(places).size == places.size

    def check(self, shape: tuple[int, ...], site: Site) -> tuple[int, ...]:
        """Return the shape of the selected part of a value; raise if `shape` has no such part."""
        known = Index(tuple(0 if item is _TRACED else item for item in self.items))
        try:
            part = np.broadcast_to(np.zeros((), bool), shape)[known.key]
            if not part.size and 0 not in shape:
                raise IndexError("it selects nothing")
            return part.shape
        except IndexError as error:
            raise SiteError(
                f"index={self} does not fit the {site.described}, whose values have shape "
                f"{list(shape)}: {error}. An index counts the axes of the value as it was marked, "
                "without the axes of loops and maps."
            ) from None

    def lengths(self, shape: tuple[int, ...]) -> list[int]:
        """Return the sizes of the axes of a value that the traced integers index."""
        taken = zip(self.items, self._axes_of(shape), strict=True)
        return [sizes[0] for item, sizes in taken if item is _TRACED]

    def _axes_of(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """List the sizes of the axes that each item of the index consumes."""
        taken = list(map(_axes, self.items))
        rest = len(shape) - sum(taken)
        axis, found = 0, list[tuple[int, ...]]()
        for item, axes in zip(self.items, taken, strict=True):
            end = axis + (rest if item is Ellipsis else axes)
            found.append(shape[axis:end])
            axis = end
        return found

    def __str__(self) -> str:
        return f"np.s_[{', '.join(map(_shown, self.items))}]"


def _is_integer(value: Any) -> bool:
    return isinstance(value, _INTEGERS) and not isinstance(value, bool)


def _item(item: Any) -> Any:
    if isinstance(item, _SLICES):
        return StepSlice.of(item)
    if item is None or item is Ellipsis:
        return item
    if _is_integer(item):
        return int(item)
    array: Any = np.asarray(item) if isinstance(item, _LISTS) else item
    kind = getattr(getattr(array, "dtype", None), "kind", "")
    if isinstance(array, _TRACERS):
        if kind in "iu" and array.ndim == 0:
            return _TRACED
    elif isinstance(array, _ARRAYS) and kind in "iub":
        return int(array) if array.ndim == 0 and kind in "iu" else _IndexArray.of(array)
    raise wrong_type(
        "`at` takes an index of an array as `index`: integers, which may be traced, slices, `...`, "
        "arrays of integers or booleans, or a tuple of these. It was given",
        item,
    )


def _plain(item: Any) -> Any:
    if isinstance(item, StepSlice):
        return item.slice
    return item.array if isinstance(item, _IndexArray) else item


def _taken(item: _Item, size: int) -> range | None:
    """Return what an item selects of an axis, or None if that is not a slice."""
    if item is Ellipsis:
        return range(size)
    return range(*item.slice.indices(size)) if isinstance(item, StepSlice) else None


def _whole(item: _Item) -> _Item:
    """Return the item that selects all of an axis of size 1, in place of a slice or an integer."""
    if isinstance(item, StepSlice):
        return StepSlice(None, None, None)
    return 0 if isinstance(item, (int, _TracedInteger)) else item


def _axes(item: Any) -> int:
    """Return the number of axes of a value that an item of an index consumes."""
    if item is None or item is Ellipsis:
        return 0
    is_mask = isinstance(item, _IndexArray) and item.array.dtype == bool
    return item.array.ndim if is_mask else 1


def _shown(item: Any) -> str:
    if isinstance(item, StepSlice):
        return ":".join("" if x is None else str(x) for x in _bounds(item))
    if isinstance(item, _IndexArray):
        return f"{item.array.dtype}{list(item.array.shape)}"
    if item is _TRACED:
        return "a traced integer"
    return "..." if item is Ellipsis else str(item)


def _bounds(part: StepSlice) -> Iterator[int | None]:
    yield from (part.start, part.stop)
    if part.stride is not None:
        yield part.stride
