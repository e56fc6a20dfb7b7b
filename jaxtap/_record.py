"""What a walk writes down: entries; and what goes in and out of the bodies that it walks."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxtap import _compat
from jaxtap._calls import Call, Token
from jaxtap._fold import Thread
from jaxtap._sites import Site, SiteError


@dataclasses.dataclass(frozen=True)
class Slots:
    """Operands or results of an equation, with the places of arrays and of tokens apart."""

    tokens: tuple[Token | None, ...]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Slots:
        return cls(tuple(_bare(v) if type(v) is Token else None for v in values))

    @property
    def kept(self) -> list[int]:
        """Which of them have an array."""
        return [i for i, token in enumerate(self.tokens) if token is None or token.array]

    def arrays(self, values: Sequence[Any]) -> list[Any]:
        picked = (values[i] for i in self.kept)
        return [v.array if type(v) is Token else v for v in picked]

    def fill(self, arrays: Iterator[Any]) -> list[Any]:
        """The operands with these arrays, which are taken in order."""
        filled: list[Any] = []
        for token in self.tokens:
            if token is None:
                filled.append(next(arrays))
            else:
                filled.append(Token(token.calls, next(arrays) if token.array else None))
        return filled


def _bare(token: Token) -> Token:
    """A token without its array, which must not outlive the trace that it belongs to."""
    return Token(token.calls, token.array is not None)


class Entry(NamedTuple):
    """A recorded value or gradient, and how it came to have the axes it has.

    `again` if it is the cotangent of a copy that remat computed: a part of a gradient. `folded` if
    it is the fold of a mesh. `step` is what is asked for of the innermost loop, until it is met.
    """

    site: Site
    call: Call
    grad: bool
    value: Any
    valid: Any = None
    lead: int = 0
    loops: tuple[str, ...] = ()
    step: Any = None
    again: bool = False
    folded: bool = False

    @property
    def arrays(self) -> list[Any]:
        return [self.value] if self.valid is None else [self.value, self.valid]

    @property
    def bare(self) -> Entry:
        """The entry without its arrays, which must not outlive the trace they belong to."""
        return self._replace(value=None, valid=None if self.valid is None else True)

    def with_arrays(self, arrays: Iterator[Any]) -> Entry:
        value = next(arrays)
        valid = None if self.valid is None else next(arrays)
        return self._replace(value=value, valid=valid)


class Threads(NamedTuple):
    """What goes through a body besides its operands: folds, and the parts of changes."""

    folds: tuple[Thread, ...]
    parts: tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class Staged:
    """A body after the walk: what it takes, what it gives, and what it recorded."""

    jaxpr: Any
    ins: Slots
    outs: Slots
    entries: tuple[Entry, ...]
    threads: Threads
    certain: tuple[bool, ...]

    @property
    def count(self) -> int:
        """How many of its results are the body's own."""
        return len(self.outs.kept)

    @property
    def types(self) -> list[Any]:
        """The types of what it gives besides: entries, then folds."""
        return [v.aval for v in _compat.open_jaxpr(self.jaxpr).outvars[self.count :]]


def refuse_folded(entry: Entry) -> None:
    """A fold of a mesh cannot go on from one iteration to the next, or be one of two branches."""
    if entry.folded:
        raise SiteError(
            f"The site {entry.site.path!r}, marked at {entry.site.source}, is folded inside a "
            "shard_map that is in a loop or a branch, and every device has a fold of its own. Sow "
            "it without `reduce`, or outside of the shard_map."
        )


def where(mask: Any, x: Any, y: Any) -> Any:
    """`x` where the mask, which has the leading axes of `x`, is true; `y` elsewhere."""
    mask = mask.astype(bool)
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, y)
