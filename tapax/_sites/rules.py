"""Rules: selections that mark values themselves, by the operation that computes a value."""

import dataclasses
import os
import re
from typing import Any, NamedTuple

from tapax._sites.errors import SiteError
from tapax._sites.matching import Selector
from tapax._sites.site import Site


class Operation(NamedTuple):
    """An operation in the user's code: its name, its line, and the label of a `checkpoint_name`.

    `is_call` is true for an operation that runs a function: the operations inside compute its
    results.
    """

    name: str
    source: str
    label: str | None
    is_call: bool


@dataclasses.dataclass(frozen=True)
class Rule(Selector):
    """A selection that marks values. Its class has the name of the function that makes it."""

    names: tuple[str, ...]

    def marks(self, operation: Operation) -> bool:
        """Return whether the rule marks the results of an operation."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({', '.join(map(repr, self.names))})"


class Ops(Rule):
    """The results of every operation with one of these names: see `ops`."""

    def marks(self, operation: Operation) -> bool:
        return operation.name in self.names

    def picks(self, site: Site) -> bool:
        return site.kind == "op" and site.op in self.names


class Lines(Rule):
    """The results of every operation on one of these lines of source: see `lines`."""

    def marks(self, operation: Operation) -> bool:
        # The operations inside a call have this line too, and mark its results.
        here = any(_is_on_line(operation.source, place) for place in self.names)
        return here and not operation.is_call

    def picks(self, site: Site) -> bool:
        return site.kind == "op" and any(_is_on_line(site.source, place) for place in self.names)


class Named(Rule):
    """The values with one of these `checkpoint_name`s: see `named`."""

    def marks(self, operation: Operation) -> bool:
        return operation.label is not None and operation.label in self.names

    def picks(self, site: Site) -> bool:
        return site.kind == "name" and site.path.rsplit("/", 1)[-1] in self.names


def ops(*names: str) -> Ops:
    """Select every result of some operations, by the names of their primitives.

    Each result becomes a site `scope/operation`, with its gradient.

    Args:
        *names: The names, as a jaxpr shows them: `"dot_general"`, `"sin"`.

    Returns:
        A selection, which combines with others by `&`, `|` and `~`: see `tapax.glob`.

    Raises:
        TypeError: If there are no names, or one is not a string.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: jnp.exp(jnp.sin(x))
        >>> _, taps = tapax.capture(f, values=tapax.ops("sin"))(jnp.pi / 2)
        >>> {name: float(x) for name, x in taps.values.items()}
        {'sin': 1.0}
    """
    return Ops(_strings("ops", names))


def lines(*places: str) -> Lines:
    """Select every result that some lines of source compute.

    Args:
        *places: Files and line numbers, such as `"model.py:120"`. The file is a path, or the last
            part of a path.

    Returns:
        A selection, which combines with others by `&`, `|` and `~`: see `tapax.glob`.

    Raises:
        TypeError: If there are no places, or one is not a string.
        SiteError: If a place does not end in a colon and a line number.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> selection = tapax.lines("model.py:120", "model.py:121")
        >>> selection.picks(tapax.Site("net/sin", kind="op", source="/home/me/model.py:121"))
        True
    """
    for place in _strings("lines", places):
        if not re.fullmatch(r".+:\d+", place):
            raise SiteError(
                "`lines` takes a file and a line number, such as 'model.py:120', but was given "
                f"{place!r}."
            )
    return Lines(places)


def named(*names: str) -> Named:
    """Select every value to which `jax.ad_checkpoint.checkpoint_name` gives one of `names`.

    Args:
        *names: The names, such as `"ffn1"`.

    Returns:
        A selection, which combines with others by `&`, `|` and `~`: see `tapax.glob`.

    Raises:
        TypeError: If there are no names, or one is not a string.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> f = lambda x: checkpoint_name(x**2, "square") + 1
        >>> _, taps = tapax.capture(f, values=tapax.named("square"))(3.0)
        >>> {name: float(x) for name, x in taps.values.items()}
        {'square': 9.0}
    """
    return Named(_strings("named", names))


def _strings(function: str, names: tuple[Any, ...]) -> tuple[str, ...]:
    if not names or not all(isinstance(n, str) for n in names):
        raise TypeError(f"`{function}` takes one or more strings, but was given {names!r}.")
    return names


def _is_on_line(source: str, place: str) -> bool:
    return source == place or source.endswith((os.sep + place, "/" + place))
