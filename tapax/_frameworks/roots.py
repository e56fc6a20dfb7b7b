"""What the roots of a program are called: by their class, or by what holds them if there are more.

A root is a module that no other module calls. Whether a program has several roots of one class is
known when it has been traced. So each root is anchored (see `_frameworks.anchors`): `Roots`
collects the model that every anchor belongs to, told by where its arrays come from, and the names
of the arguments or variables that hold it. A model that is the only one of its class is called by
that. Others are called by what holds them, `policy` and `value`; where no holder can be told, by
the class.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from tapax._jax import Function
from tapax._sites import segment


@dataclasses.dataclass(frozen=True)
class RootPlace:
    """A root that an anchor was resolved to.

    `name` is that of its class, `key` tells it from others, `holders` are the paths of what holds
    it, the most telling first. `path` is that of the module from there.
    """

    name: str
    key: Hashable
    holders: tuple[str, ...]
    path: str = ""


class Roots:
    """The roots of a program, and what they are called."""

    def __init__(self) -> None:
        self._found: dict[str, dict[Hashable, tuple[str, ...]]] = {}
        self._names: dict[tuple[str, Hashable], str] = {}

    def add(self, root: RootPlace) -> None:
        """Adds a root; the same one may come several times."""
        self._found.setdefault(root.name, {}).setdefault(root.key, root.holders)

    def settle(self) -> bool:
        """Decides on the names when all roots are known; false if all are those of classes."""
        for name, holders in self._found.items():
            for key, held in _chosen_holders(holders).items():
                self._names[name, key] = held
        return bool(self._names)

    def name(self, root: RootPlace) -> str:
        """Returns the name of a root."""
        return self._names.get((root.name, root.key), root.name)


def _chosen_holders(found: dict[Hashable, tuple[str, ...]]) -> dict[Hashable, str]:
    """The short path of what holds each of several roots of one class; none if there is one."""
    known = {key: holders for key, holders in found.items() if holders}
    first = {key: holders[0] for key, holders in known.items()}
    if len(set(first.values())) < 2:
        # A function that is called with several models has one variable for all of them.
        second = {key: holders[-1] for key, holders in known.items()}
        if len(set(second.values())) < max(2, len(second)):
            return {}
        first = second
    short = _short_names(set(first.values()))
    return {key: short[held] for key, held in first.items()}


def _short_names(paths: set[str]) -> dict[str, str]:
    """Shortens paths to what tells them apart: a name, and the indices behind it.

    >>> sorted(_short_names({"agent/policy", "agent/value", "nets/0"}).values())
    ['nets/0', 'policy', 'value']
    >>> sorted(_short_names({"a/net", "b/net"}).values())
    ['a/net', 'b/net']
    """

    def short(path: str, more: int) -> str:
        parts = path.split("/")
        named = [0, *(i for i, part in enumerate(parts) if i and not part.isdigit())]
        return "/".join(parts[named[max(0, len(named) - 1 - more)] :])

    for more in itertools.count():
        names = {path: short(path, more) for path in paths}
        if len(set(names.values())) == len(paths):
            return names
    raise AssertionError


def name_arguments(fn: Function) -> Callable[[Sequence[Any]], list[str]]:
    """Returns a function that names the first two keys of an argument in `(args, kwargs)`."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    before = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_POSITIONAL), None)

    def name(keys: Sequence[Any]) -> list[str]:
        if len(keys) < 2:
            return []
        kind, which = (getattr(key, "idx", getattr(key, "key", "")) for key in keys[:2])
        if kind == 1 or not isinstance(which, int):
            return [segment(which)]
        if before is not None and which >= before:
            return [parameters[before].name, str(which - before)]
        return [positional[which] if which < len(positional) else str(which)]

    return name
