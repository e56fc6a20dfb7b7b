"""What a walk writes down: entries; and what goes in and out of the bodies that it walks."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from tapax import _jax
from tapax._sites import LayerNumber, Site, SiteError
from tapax._walk.calls import Call, Token
from tapax._walk.folds import FoldThread
from tapax._walk.reductions import Reduction


@dataclasses.dataclass(frozen=True)
class Slots:
    """Operands or results of an equation, with the places of arrays and of tokens apart."""

    tokens: tuple[Token | None, ...]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Slots:
        # A token's array must not outlive the trace that it belongs to.
        bare = (Token(v.calls, v.array is not None) if type(v) is Token else None for v in values)
        return cls(tuple(bare))

    @property
    def kept(self) -> list[int]:
        """Which of them have an array."""
        return [i for i, token in enumerate(self.tokens) if token is None or token.array]

    def arrays(self, values: Sequence[Any]) -> list[Any]:
        picked = (values[i] for i in self.kept)
        return [v.array if type(v) is Token else v for v in picked]

    def padded(self, values: Sequence[Any]) -> list[Any]:
        """The arrays of all, with None for those without one."""
        kept = set(self.kept)
        bare = (v.array if type(v) is Token else v for v in values)
        return [v if i in kept else None for i, v in enumerate(bare)]

    def fill(self, arrays: Iterator[Any]) -> list[Any]:
        """The operands with these arrays, which are taken in order."""
        return [
            next(arrays) if t is None else Token(t.calls, next(arrays) if t.array else None)
            for t in self.tokens
        ]


class Entry(NamedTuple):
    """A recorded value or gradient, and how it came to have the axes it has.

    `again` if it is the cotangent of a copy that remat computed: a part of a gradient. `folded` if
    it is the fold of a mesh. `steps` are what is asked for of the loops that are still around it,
    from the innermost on; `layer` are the numbers of the scanned layers that it is of, from the
    outermost on.
    If there is a `reduction`, `value` is a tuple of arrays: its state.
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
    again: bool = False
    folded: bool = False
    reduction: Reduction | None = None

    @property
    def state(self) -> list[Any]:
        """The arrays of the value, or of what it is reduced to."""
        return [self.value] if self.reduction is None else list(self.value)

    @property
    def is_over_loops(self) -> bool:
        """Whether a reducer merges the iterations of the loops around it."""
        return self.reduction is not None and self.reduction.reducer.over_loops

    @property
    def is_total(self) -> bool:
        """Whether the innermost loop carries it, instead of stacking it."""
        return self.is_over_loops and self.step is None

    @property
    def step(self) -> Any:
        """What is asked for of the innermost loop."""
        return self.steps[0] if self.steps else None

    def left_loop(self, loop: str, axes: int = 0) -> Entry:
        """The entry outside of a loop, which has added so many axes."""
        # Layers are as if they were written out: their loop does not show.
        loops = self.loops if isinstance(self.step, LayerNumber) else (loop, *self.loops)
        return self._replace(lead=self.lead + axes, steps=self.steps[1:], loops=loops)

    @property
    def arrays(self) -> list[Any]:
        return self.state if self.valid is None else [*self.state, self.valid]

    @property
    def even(self) -> Entry:
        """The entry with arrays that vary over the same axes of a mesh, as one state's do."""
        axes = frozenset[str]().union(*(_jax.varying_axes(jax.typeof(x)) for x in self.arrays))
        return self.with_arrays(iter([_jax.with_varying(x, axes) for x in self.arrays]))

    @property
    def bare(self) -> Entry:
        """The entry without its arrays, which must not outlive the trace they belong to."""
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
    """What goes through a body besides its operands: folds, and the parts of changes."""

    folds: tuple[FoldThread, ...]
    parts: tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class StagedBody:
    """A body after the walk: what it takes, what it gives, and what it recorded and folded."""

    jaxpr: Any
    ins: Slots
    outs: Slots
    entries: tuple[Entry, ...]
    threads: Threads
    folds: tuple[FoldThread, ...]
    certain: tuple[bool, ...]

    @property
    def count(self) -> int:
        """How many of its results are the body's own."""
        return len(self.outs.kept)

    @property
    def types(self) -> list[Any]:
        """The types of what it gives besides: entries, then folds."""
        return [v.aval for v in _jax.open_jaxpr(self.jaxpr).outvars[self.count :]]


def refuse_folded(entry: Entry) -> None:
    """A fold of a mesh cannot go on from one iteration to the next, or be one of two branches."""
    if entry.folded:
        raise SiteError(
            f"The {entry.site.described}, is folded inside a shard_map that is in a loop or a "
            "branch, and every device has a fold of its own. Sow it without `reduce`, or outside "
            "of the shard_map."
        )
