"""Entries, which a walk records, and the inputs and results of the bodies that it walks."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from tapax import _jax
from tapax._sites import LayerNumber, Site, SiteError
from tapax._walk.calls import Call, Token
from tapax._walk.folds import FoldThread
from tapax._walk.plan import Reading
from tapax._walk.reductions import Reduction


@dataclasses.dataclass(frozen=True)
class Slots:
    """The operands or results of an equation, which are arrays or tokens."""

    tokens: tuple[Token | None, ...]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Slots:
        # The array of a token must not outlive its trace.
        bare = (Token(v.calls, v.array is not None) if type(v) is Token else None for v in values)
        return cls(tuple(bare))

    @property
    def kept(self) -> list[int]:
        """The indices of the values with an array."""
        return [i for i, token in enumerate(self.tokens) if token is None or token.array]

    def arrays(self, values: Sequence[Any]) -> list[Any]:
        picked = (values[i] for i in self.kept)
        return [v.array if type(v) is Token else v for v in picked]

    def padded(self, values: Sequence[Any]) -> list[Any]:
        """Return the array of every value, or None for a token without one."""
        kept = set(self.kept)
        bare = (v.array if type(v) is Token else v for v in values)
        return [v if i in kept else None for i, v in enumerate(bare)]

    def fill(self, arrays: Iterator[Any]) -> list[Any]:
        """Return the values with their arrays taken from `arrays`, in order."""
        return [
            next(arrays) if t is None else Token(t.calls, next(arrays) if t.array else None)
            for t in self.tokens
        ]


class Entry(NamedTuple):
    """A recorded value or gradient, with the axes that loops and meshes have added.

    - `value`: the array, or the state of the `reduction`, a tuple of arrays.
    - `valid`: a mask, or a count of the recorded values; None if one is recorded for certain.
    - `lead`: the number of leading axes of loops and meshes; `loops` describes them.
    - `steps`: the requested iterations of the loops that are still around it, innermost first.
    - `layer`: the numbers of its scanned layers, outermost first.
    - `recomputed`: whether it is the cotangent of a recomputed value, a part of a gradient.
    - `folded`: whether it is a fold inside a shard_map.
    - `reading`: the result that the plan requests; None for an entry that no plan requests.
    """

    site: Site
    call: Call
    grad: bool
    value: Any
    valid: Any = None
    lead: int = 0
    loops: tuple[str, ...] = ()
    steps: tuple[Any, ...] = ()
    layer: tuple[int, ...] = ()
    recomputed: bool = False
    folded: bool = False
    reduction: Reduction | None = None
    reading: Reading | None = None

    @property
    def state(self) -> list[Any]:
        """The arrays of the value, or of the state of its reducer."""
        return [self.value] if self.reduction is None else list(self.value)

    @property
    def is_over_loops(self) -> bool:
        """Return whether its reducer merges the iterations of the loops around it."""
        return self.reduction is not None and self.reduction.reducer.over_loops

    @property
    def is_total(self) -> bool:
        """Return whether the innermost loop carries it instead of stacking it."""
        return self.is_over_loops and self.step is None

    @property
    def step(self) -> Any:
        """The requested iterations of the innermost loop."""
        return self.steps[0] if self.steps else None

    def left_loop(self, loop: str, axes: int = 0) -> Entry:
        """Return the entry outside of a loop, which has added `axes` leading axes."""
        # A layer looks as if the model ran its layers without a loop.
        loops = self.loops if isinstance(self.step, LayerNumber) else (loop, *self.loops)
        return self._replace(lead=self.lead + axes, steps=self.steps[1:], loops=loops)

    @property
    def arrays(self) -> list[Any]:
        return self.state if self.valid is None else [*self.state, self.valid]

    @property
    def even(self) -> Entry:
        """The entry with arrays that all vary over the same axes of a mesh, as a state requires."""
        axes = frozenset[str]().union(*(_jax.varying_axes(jax.typeof(x)) for x in self.arrays))
        return self.with_arrays(iter([_jax.with_varying(x, axes) for x in self.arrays]))

    @property
    def bare(self) -> Entry:
        """The entry without its arrays, which must not outlive their trace."""
        nothing = None if self.reduction is None else (None,) * self.reduction.arrays
        return self._replace(value=nothing, valid=None if self.valid is None else True)

    def with_arrays(self, arrays: Iterator[Any]) -> Entry:
        if self.reduction is None:
            value = next(arrays)
        else:
            value = tuple(next(arrays) for _ in range(self.reduction.arrays))
        valid = None if self.valid is None else next(arrays)
        return self._replace(value=value, valid=valid)


class Threads(NamedTuple):
    """The extra inputs of a body: folds, and the parts of changes."""

    folds: tuple[FoldThread, ...]
    parts: tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class StagedBody:
    """A walked body: its jaxpr, inputs and results, and the entries and folds among the results."""

    jaxpr: Any
    ins: Slots
    outs: Slots
    entries: tuple[Entry, ...]
    threads: Threads
    folds: tuple[FoldThread, ...]
    certain: tuple[bool, ...]

    @property
    def count(self) -> int:
        """The number of results of the original body."""
        return len(self.outs.kept)

    @property
    def types(self) -> list[Any]:
        """The types of the extra results: entries, then folds."""
        return [v.aval for v in _jax.open_jaxpr(self.jaxpr).outvars[self.count :]]


def refuse_folded(entry: Entry) -> None:
    """Raise for a fold inside a shard_map that leaves a loop or a branch."""
    if entry.folded:
        raise SiteError(
            f"The {entry.site.described}, is folded separately on each device of a shard_map, "
            "which is inside a loop or a branch, and such a fold cannot continue from one "
            "iteration to the next. Sow it without `reduce`, or outside of the shard_map."
        )
