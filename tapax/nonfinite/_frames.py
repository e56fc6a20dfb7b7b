"""Origins as numbers, and the frames that solve them: see `_origins`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from tapax import _jax
from tapax._jax import PyTree, Value
from tapax.nonfinite._badness import FINE, NOT_A_NUMBER, BadElements, bad_elements, worst_of_each

CLASS, _HERE = 2**27, 2**20
UNSURE, MADE, GIVEN, INDIRECT_MADE, INDIRECT_GIVEN, NAN, REMOTE, INF, _NOTHING = range(9)
_DIRECT = MADE * CLASS, (GIVEN + 1) * CLASS
_TO_INDIRECT = (INDIRECT_MADE - MADE) * CLASS
NONE = _NOTHING * CLASS
Origin = int | None
"""The index of a value's origin in its frame; None for a value that can have no bad element."""
Origins = list[Origin]
_SOURCES = 4


def origin_at(kind: int, number: int) -> int:
    """Return the origin of a value that an equation of the frame made."""
    return kind * CLASS + _HERE + number


def input_origin(kind: int, place: int) -> int:
    """Return the origin of an input of a frame, by its place in time."""
    return kind * CLASS + place


def decode_origin(origin: int) -> tuple[int, int | None, int]:
    """Split an origin into its class, the number of its equation, and its place as an input."""
    kind, low = divmod(origin, CLASS)
    return (kind, None, low) if low < _HERE else (kind, low - _HERE, 0)


class SearchOptions(NamedTuple):
    """The options of a search."""

    masked: bool
    """True if values that reach no result count too."""
    tells_nan: bool
    """True to tell NaNs from infinities in every value, so that no origin is `UNSURE`. Otherwise
    the search does so only in values that may come from an infinite constant."""
    divided: bool
    """True if the compiler may have to divide values among devices."""


class _Pending(NamedTuple):
    """An origin that is not solved yet; None as `bad` means that its value is bad in any case."""

    sources: list[int]
    bad: BadElements | None
    here: int
    tells_nan: bool
    indirect: bool


class OriginFrame:
    """The origins of the values in one run of a body, and the tables of the frames inside it.

    `axes` are the mesh axes over which values differ in the body, `typed` the axes that types
    record; `width` is the width of a row. The origin of a NaN made from an infinite constant is the
    equation that made the NaN. The origin is `UNSURE` if it depends on whether an element is NaN
    and the search does not tell NaNs from infinities in that value.
    """

    def __init__(
        self,
        width: int,
        options: SearchOptions,
        axes: frozenset[str] = frozenset(),
        typed: frozenset[str] = frozenset(),
    ):
        self.width, self.options = width, options
        self.axes, self.typed = axes, typed
        self.slots: list[int] = []
        self.tables: list[Any] = []
        self._solved = [jnp.full(1, NONE, jnp.int32)]
        self._pending: list[_Pending] = []
        self._count = 1
        self._constant: set[int] = set()

    def inner(self, loop: bool) -> OriginFrame:
        """Make the frame of a body: an inner frame if `loop`, otherwise a part of this one."""
        width = self.width - 2 if loop else self.width
        return OriginFrame(width, self.options, self.axes, self.typed)

    def vary(self, x: Value) -> Any:
        """Convert `x` to the type of all rows and origins here: varying over the mesh axes."""
        return _jax.with_varying(x, self.typed)

    def worst_of_each(self, values: Sequence[BadElements | None]) -> Any:
        """Compute the badness of the worst element of each value; None means an infinite value."""
        return worst_of_each(values, self.vary, divided=self.options.divided)

    def add_value(self, sources: Sequence[Origin], x: Value, here: int) -> int:
        """Add the origin of `x`: the earliest of `sources`, or `here`; `NONE` if `x` is finite."""
        tell_nan = self.options.tells_nan or any(self.constants_among(sources))
        return self.add(sources, bad_elements(x, tell_nan=tell_nan), here, tells_nan=tell_nan)

    def add(
        self,
        sources: Sequence[Origin],
        bad: BadElements | None,
        here: int,
        *,
        tells_nan: bool = True,
        indirect: bool = False,
    ) -> int:
        """Add the origin of a value with the elements `bad`: the earliest of `sources`, or `here`.

        None as `bad` means that the value is bad in any case. With `indirect`, the origin gets the
        indirect class of its source.
        """
        some = sorted({o for o in sources if o is not None})
        while len(some) > _SOURCES:
            head, some = some[:_SOURCES], some[_SOURCES:]
            some.append(self.add(head, None, NONE))
        if here // CLASS == INF or any(self.constants_among(some)):
            self._constant.add(self._count)
        self._pending.append(_Pending(some, bad, here, tells_nan, indirect))
        self._count += 1
        return self._count - 1

    def add_discrete(self, sources: Sequence[Origin]) -> Origin:
        """Add the origin of a value that no element shows to be bad; None without any source."""
        some = [o for o in sources if o is not None]
        return self.add(some, None, NONE, indirect=True) if some else None

    def constants_among(self, origins: Sequence[Origin]) -> list[bool]:
        """Return, for each origin, whether its value may come from an infinite constant."""
        return [origin in self._constant for origin in origins]

    def forget_constants(self, origin: Origin) -> None:
        """Record that an operation swallowed the infinite constants from which its value came."""
        self._constant.discard(origin)

    def add_known(self, origins: Any, constant: Sequence[bool] = ()) -> list[int]:
        """Add a vector of known origins; `constant` flags origins of infinite constants."""
        self._solve()
        self._solved.append(origins)
        added = range(self._count, self._count + origins.shape[0])
        self._constant.update(itertools.compress(added, constant))
        self._count = added.stop
        return list(added)

    def pack(self, origins: Sequence[Origin]) -> Any:
        """Gather some origins into one vector."""
        self._solve()
        places = np.asarray([o or 0 for o in origins], np.int32)
        return self._solved[0][places]

    def _solve(self) -> None:
        if not self._pending:
            self._solved = [jnp.concatenate([self.vary(x) for x in self._solved])]
            return
        pending, self._pending = self._pending, []
        start, count = self._count - len(pending), len(pending)
        table = np.zeros((count, _SOURCES), np.int32)
        for i, p in enumerate(pending):
            table[i, : len(p.sources)] = p.sources
        here = np.asarray([p.here for p in pending], np.int32)
        told = np.asarray([p.tells_nan for p in pending])
        shift = np.asarray([p.indirect * _TO_INDIRECT for p in pending], np.int32)
        worst = self.worst_of_each([p.bad for p in pending])
        # The origin of a NaN made from an infinite constant is the equation that made the NaN.
        limit = jnp.where(worst == NOT_A_NUMBER, input_origin(INF, 0), NONE).astype(np.int32)

        def one(carry: PyTree, x: Value) -> Any:
            origins, place = carry
            sources, limit, fine, here, told, shift = x
            before = origins.at[sources].get(mode="promise_in_bounds").min()
            is_direct = (before >= _DIRECT[0]) & (before < _DIRECT[1])
            before = lax.select(is_direct, before + shift, before)
            bad = lax.select(before < limit, before, here)
            is_unsure = ~told & (before >= input_origin(INF, 0)) & (before < NONE)
            bad = lax.select(is_unsure, np.int32(origin_at(UNSURE, 0)), bad)
            new = lax.select(fine, np.int32(NONE), bad)
            origins = lax.dynamic_update_index_in_dim(origins, new, place, 0)
            return (origins, place + 1), None

        known = [self.vary(x) for x in self._solved]
        origins = jnp.concatenate([*known, self.vary(_none(count))])
        items = tuple(map(self.vary, (table, limit, worst == FINE, here, told, shift)))
        (origins, _), _ = lax.scan(one, (origins, np.int32(start)), items)
        self._solved = [origins]

    def earliest_made(self) -> Any:
        """Return the earliest origin of a value made in this frame, used or not."""
        self._solve()
        (origins,) = self._solved
        return jnp.where(origins < input_origin(GIVEN, 0), origins, NONE).min()[None]

    def rows(self, origins: Any) -> Any:
        """Return the rows of a vector of origins, from the tables where a table has the origin."""
        own = jnp.pad(origins[:, None], ((0, 0), (0, self.width - 1)))
        if not self.slots:
            return own
        tables = jnp.concatenate([self.vary(t) for t in self.tables])
        match = (origins % CLASS - _HERE)[:, None] == np.asarray(self.slots, np.int32)
        return jnp.where(match.any(1)[:, None], _picked(match, tables), own)

    def add_results(self, number: int, rows: PyTree) -> list[int]:
        """Add the origins of the results of the frame of equation `number`, from their rows."""
        from_inside = rows[:, 0] % CLASS == _HERE + number
        rank = ranks(rows)
        origins = jnp.where(from_inside, rows[:, 0] + 1 + rank, rows[:, 0])
        count = rows.shape[0]
        self.slots += [number + 1 + i for i in range(count)]
        match = rank[None, :] == np.arange(count, dtype=np.int32)[:, None]
        self.tables.append(_picked(match, rows))
        return self.add_known(origins)


class FrameInputs:
    """The inputs of a frame: their rows outside, and the origins that replace the rows inside."""

    def __init__(self, rows: PyTree):
        self.rows = rows
        self.rank = ranks(rows)
        kind = rows[:, 0] // CLASS
        self.origins = jnp.where(kind == _NOTHING, NONE, kind * CLASS + self.rank)

    def rows_outside(
        self, frame: OriginFrame, origins: Any, number: int, iteration: Value, device: Any = None
    ) -> Any:
        """Return the rows, outside the frame, of origins inside it."""
        inner = frame.rows(origins)
        kind, low = origins // CLASS, origins % CLASS
        count, width = inner.shape[0], inner.shape[1] + 2
        around = (kind * CLASS + _HERE + number)[:, None]
        when = jnp.broadcast_to(iteration, (count, 1))
        devices = inner[:, -1:] if device is None else inner[:, -1:] * DEVICES + device
        own = jnp.concatenate([around, when, inner[:, :-1], devices], 1)
        out = jnp.where((kind == _NOTHING)[:, None], finite_rows(count, width), own)
        if not self.rows.shape[0]:
            return out
        mine = (kind != _NOTHING) & (low < _HERE)
        given = _picked(low[:, None] == self.rank, self.rows)
        # Inside the frame an origin may have become indirect.
        first = (kind * CLASS + given[:, 0] % CLASS)[:, None]
        given = jnp.concatenate([first, given[:, 1:]], 1)
        return jnp.where(mine[:, None], given, out)


DEVICES = 4096
"""The base of device numbers, larger than any mesh: a row has one digit for each nested mesh."""


def finite_rows(count: int, width: int) -> Any:
    """Make the rows of finite values."""
    rows = np.zeros((count, width), np.int32)
    rows[:, 0] = NONE
    return rows


def _none(count: int) -> Any:
    return np.full(count, NONE, np.int32)


def _picked(match: Any, rows: PyTree) -> Any:
    """Return, for each row of the mask `match`, a row that it picks; the picked rows are equal."""
    return jnp.where(match[:, :, None], rows[None], 0).max(1)


def _before(a: Value, b: Value) -> Any:
    """Return whether each row of `a` comes before that of `b`; rows are along the last axis."""
    weights = 3 ** np.arange(a.shape[-1], dtype=np.int32)[::-1]
    return jnp.sum(jnp.sign(a - b) * weights, -1, dtype=jnp.int32) < 0


def ranks(rows: PyTree) -> Any:
    """Count the rows before each row; equal rows have equal ranks."""
    return jnp.sum(_before(rows[None, :], rows[:, None]), 1, dtype=jnp.int32)


def earlier_rows(a: Value, b: Value) -> Any:
    """Return the earlier row of each pair of rows."""
    return jnp.where(_before(b, a)[..., None], b, a)
