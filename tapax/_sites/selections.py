"""Sites, their names, and the selections that pick some of them.

A *site* is a named value in a program. Its `path` is what the user called it, with the scopes
around it: `teacher/h`. Its `name` tells one call from another: the first call of `h` is `h`, the
second `h@1`. A leaf of a structured value has its key behind a colon: `rnn:0`, `attn:weights`.
One name, one array.

A *selection* picks sites:

>>> h = Site("net/h", call=2)
>>> [matches(s, h) for s in ("net/h", "net/*", "**", "**/h", "*", "net/h@2", "net/h@0")]
[True, True, True, True, False, True, False]

- a glob: `*` stays inside one segment, `**` spans any number of them, `?` is one character. A
  pattern without `@` stands for every call, one without `:` for every leaf.
- a sequence of selections: any of them.
- a predicate on `Site`.
- a rule: `ops`, `lines` and `named` mark values that nobody marked; `at` picks iterations.
- a mapping from selections to a reducer, or to several: their values are reduced. See `reduce`.

`None` and an empty sequence pick nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import numpy as np

from tapax._jax import SEQUENCES, ArrayLike
from tapax._sites.errors import SiteError, wrong_type
from tapax._sites.site import Site
from tapax.reduce import Reducer


class Operation(NamedTuple):
    """An operation in a user's code: its name, its line, and the label of a `checkpoint_name`.

    `is_call` if it runs a function, and its results are those of the operations in there.
    """

    name: str
    source: str
    label: str | None
    is_call: bool


@dataclasses.dataclass(frozen=True)
class Rule:
    """Marks values that nobody marked. Its class has the name of the function that makes it."""

    names: tuple[str, ...]

    def marks(self, operation: Operation) -> bool:
        """Whether it marks the results of an operation."""
        raise NotImplementedError

    def matches(self, site: Site) -> bool:
        """Whether a site is one that it marks."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({', '.join(map(repr, self.names))})"


class Ops(Rule):
    """Marks the results of every operation with one of these names. See `ops`."""

    def marks(self, operation: Operation) -> bool:
        return operation.name in self.names

    def matches(self, site: Site) -> bool:
        return site.kind == "op" and site.op in self.names


class Lines(Rule):
    """Marks the results of every operation written on one of these lines. See `lines`."""

    def marks(self, operation: Operation) -> bool:
        # The operations in a call are on the line too.
        here = any(_on_line(operation.source, place) for place in self.names)
        return here and not operation.is_call

    def matches(self, site: Site) -> bool:
        return site.kind == "op" and any(_on_line(site.source, place) for place in self.names)


class Named(Rule):
    """Marks the values with one of these `checkpoint_name`s. See `named`."""

    def marks(self, operation: Operation) -> bool:
        return operation.label is not None and operation.label in self.names

    def matches(self, site: Site) -> bool:
        return site.kind == "name" and site.path.rsplit("/", 1)[-1] in self.names


@dataclasses.dataclass(frozen=True, eq=False)
class At:
    """Some iterations of the innermost loop around the sites of a selection. See `at`."""

    selection: Any
    step: Any

    def _identity(self) -> Any:
        # An array is what it is, and not equal to another.
        fixed = isinstance(self.step, (int, StepSlice))
        return self.selection, self.step if fixed else id(self.step)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, At) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def matches(self, site: Site) -> bool:
        return matches(self.selection, site)

    def __str__(self) -> str:
        return f"at({self.selection!r}, step={self.step})"


@dataclasses.dataclass(frozen=True)
class Reduced:
    """The sites of a selection, whose values are reduced: what a mapping says."""

    selection: Any
    reducers: tuple[Reducer, ...]

    def matches(self, site: Site) -> bool:
        return matches(self.selection, site)

    def __str__(self) -> str:
        return str(self.selection)


_MAPPINGS: tuple[type[Any], ...] = (Mapping,)
Reductions: TypeAlias = "Mapping[Any, Reducer | Sequence[Reducer]]"
Selection: TypeAlias = (
    "str | Rule | At | Reduced | Callable[[Site], bool] | Sequence[Selection] | Reductions | None"
)


def ops(*names: str) -> Ops:
    """Every result of these operations, by the name JAX gives them: `ops("dot_general", "sin")`.

    Each becomes a site `scope/operation`, its gradient included.
    """
    return Ops(_strings("ops", names))


def lines(*places: str) -> Lines:
    """Every result computed on these lines of source: `lines("model.py:120")`."""
    for place in _strings("lines", places):
        if not re.fullmatch(r".+:\d+", place):
            raise SiteError(
                f"`lines` takes places such as 'model.py:120', a file and a line number, "
                f"but was given {place!r}."
            )
    return Lines(places)


def named(*names: str) -> Named:
    """Every value given one of these names by `jax.ad_checkpoint.checkpoint_name`."""
    return Named(_strings("named", names))


def at(selection: Selection, *, step: slice | ArrayLike) -> At:
    """The iterations `step` of the innermost loop around the selected sites.

    An integer gives the value of that one iteration, a slice gives them stacked. In an edit, `step`
    may be an array with one integer, which may be traced.
    """
    if isinstance(step, slice):
        return At(selection, StepSlice.of(step))
    if isinstance(step, (int, np.integer)) and not isinstance(step, bool):
        return At(selection, int(step))
    if isinstance(step, (jax.Array, np.ndarray)) and np.issubdtype(step.dtype, np.integer):
        if step.ndim == 0:
            return At(selection, step)
        raise SiteError(
            f"`at` takes one iteration as `step`, but was given an array of shape "
            f"{list(step.shape)}. Use jax.vmap for several."
        )
    raise wrong_type(
        "`at` takes an integer or a slice of iterations as `step`, but was given", step
    )


@dataclasses.dataclass(frozen=True)
class StepSlice:
    """A slice that can be hashed on every Python (before 3.12 slices cannot)."""

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


def _strings(function: str, names: tuple[Any, ...]) -> tuple[str, ...]:
    if not names or not all(isinstance(n, str) for n in names):
        raise TypeError(f"`{function}` takes one or more strings, but was given {names!r}.")
    return names


def _on_line(source: str, place: str) -> bool:
    return source == place or source.endswith((os.sep + place, "/" + place))


def matches(selection: Selection, site: Site) -> bool:
    """Whether `selection` picks `site`."""
    if selection is None:
        return False
    if isinstance(selection, str):
        return site.kind not in ("op", "name") and bool(
            _pattern(selection).fullmatch(_subject(selection, site))
        )
    if isinstance(selection, (Rule, At, Reduced)):
        return selection.matches(site)
    if callable(selection):
        return bool(selection(site))
    return any(matches(part, site) for part in selection)


def _subject(pattern: str, site: Site) -> str:
    """What of a site's name a pattern is held against: only the parts that it mentions."""
    path = site.path if ":" in pattern else site.path.partition(":")[0]
    call = f"@{site.call}" if "@" in pattern else ""
    return path + call + (f"~{site.pullback}" if "~" in pattern else "")


@functools.lru_cache(maxsize=4096)
def _pattern(glob: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|/\*\*|\*\*|\*|\?)", glob)
    table = {"**/": r"(?:.*/)?", "/**": r"(?:/.*)?", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    return re.compile("".join(table.get(part) or re.escape(part) for part in parts))


def is_exact(selection: Any) -> bool:
    """Whether a selection is the name of one site, which must be returned or raise."""
    return isinstance(selection, str) and not re.search(r"[*?]", selection)


def check(selection: Any, argument: str, *, reducing: bool = False) -> Selection:
    """Refuses, in words, what is no selection; a list becomes a tuple, so that it can be hashed.

    A mapping to reducers is one where values can be reduced.
    """
    if selection is None or isinstance(selection, (str, Rule)):
        if selection == "":
            raise SiteError(f"`{argument}` is an empty string, which can match no site.")
        return selection
    if isinstance(selection, At):
        return At(check(selection.selection, argument), selection.step)
    if isinstance(selection, Reducer):
        raise TypeError(
            f"`{argument}` is the reducer {selection}, but which sites is it for? Write "
            f"{argument}={{'**': tapax.reduce.{selection}}} for all of them."
        )
    if callable(selection):
        return cast(Selection, selection)
    if isinstance(selection, (*SEQUENCES, set, frozenset)):
        return tuple(check(part, argument, reducing=reducing) for part in selection)
    if isinstance(selection, _MAPPINGS) and reducing:
        return tuple(
            Reduced(check(key, argument), _reducers(reducers, argument))
            for key, reducers in selection.items()
        )
    raise TypeError(
        f"`{argument}` must be a selection of sites: a glob such as '**/attn', a predicate on "
        f"Site, a rule such as tapax.ops('dot_general'), or a sequence of these. It is "
        f"{selection!r}, of type {type(selection).__name__}."
    )


def _reducers(reducers: Any, argument: str) -> tuple[Reducer, ...]:
    several = tuple(reducers) if isinstance(reducers, SEQUENCES) else (reducers,)
    if not several:
        raise TypeError(
            f"`{argument}` maps a selection to no reducer at all: give one, or several."
        )
    for reducer in several:
        if not isinstance(reducer, Reducer):
            raise TypeError(
                f"`{argument}` maps a selection to {reducer!r} of type {type(reducer).__name__}, "
                "which is no reducer: take one of tapax.reduce, such as tapax.reduce.rms or "
                "tapax.reduce.histogram(edges), or several in a list."
            )
        if reducer.paired and argument != "grads":
            raise TypeError(
                f"`{argument}` maps a selection to tapax.reduce.{reducer}, which compares a "
                "gradient with its value: give it in `grads`."
            )
    return several


def flatten(selection: Selection) -> Iterator[Any]:
    """The single selections that a selection is made of."""
    if isinstance(selection, tuple):
        for part in cast(tuple[Selection, ...], selection):
            yield from flatten(part)
    elif selection is not None:
        yield selection


def rules(selection: Selection) -> Iterator[Rule]:
    """The rules in a selection that mark values nobody marked."""
    for part in flatten(selection):
        if isinstance(part, (At, Reduced)):
            yield from rules(part.selection)
        elif isinstance(part, Rule):
            yield part
