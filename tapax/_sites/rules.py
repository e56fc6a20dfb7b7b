"""Rules: selections of values that nobody marked, by the operation that computes them."""

import dataclasses
import os
import re
from typing import Any, NamedTuple

from tapax._sites.errors import SiteError
from tapax._sites.matching import Selector
from tapax._sites.site import Site


class Operation(NamedTuple):
    """An operation in a user's code: its name, its line, and the label of a `checkpoint_name`.

    `is_call` if it runs a function, and its results are those of the operations in there.
    """

    name: str
    source: str
    label: str | None
    is_call: bool


@dataclasses.dataclass(frozen=True)
class Rule(Selector):
    """Marks values that nobody marked. Its class has the name of the function that makes it."""

    names: tuple[str, ...]

    def marks(self, operation: Operation) -> bool:
        """Whether it marks the results of an operation."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({', '.join(map(repr, self.names))})"


class Ops(Rule):
    """Marks the results of every operation with one of these names. See `ops`."""

    def marks(self, operation: Operation) -> bool:
        return operation.name in self.names

    def picks(self, site: Site) -> bool:
        return site.kind == "op" and site.op in self.names


class Lines(Rule):
    """Marks the results of every operation written on one of these lines. See `lines`."""

    def marks(self, operation: Operation) -> bool:
        # The operations in a call are on the line too.
        here = any(_is_on_line(operation.source, place) for place in self.names)
        return here and not operation.is_call

    def picks(self, site: Site) -> bool:
        return site.kind == "op" and any(_is_on_line(site.source, place) for place in self.names)


class Named(Rule):
    """Marks the values with one of these `checkpoint_name`s. See `named`."""

    def marks(self, operation: Operation) -> bool:
        return operation.label is not None and operation.label in self.names

    def picks(self, site: Site) -> bool:
        return site.kind == "name" and site.path.rsplit("/", 1)[-1] in self.names


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


def _strings(function: str, names: tuple[Any, ...]) -> tuple[str, ...]:
    if not names or not all(isinstance(n, str) for n in names):
        raise TypeError(f"`{function}` takes one or more strings, but was given {names!r}.")
    return names


def _is_on_line(source: str, place: str) -> bool:
    return source == place or source.endswith((os.sep + place, "/" + place))
