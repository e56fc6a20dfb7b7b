"""Names of the roots of a program: their classes, or their variables if several share a class.

A root is a module that no other module calls. The number of roots of one class is known only after
the program is traced. So each root has an anchor (see `_frameworks.anchors`). `Roots` collects the
model of every anchor, which the origins of its arrays identify, and the names of the arguments or
variables that refer to it. A model that is the only one of its class has the name of the class.
Other models have the names of their variables, such as `policy` and `value`, or that of the class
if no variable is known. No variable refers to a model whose constructor is still running, so that
model is not counted, and has the name of its class.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from tapax._frameworks.users_code import find_signature
from tapax._jax import Function
from tapax._sites import segment


@dataclasses.dataclass(frozen=True)
class Root:
    """A root to which an anchor belongs.

    `name` is the name of its class, and `key` identifies it. `holders` are the paths of the
    variables that refer to it, the most telling first. `path` is the path of the anchored module in
    the root.
    """

    name: str
    key: Hashable
    holders: tuple[str, ...]
    path: str = ""


class Roots:
    """The roots of a program, and their names."""

    def __init__(self) -> None:
        self._found: dict[str, dict[Hashable, dict[str, None]]] = {}
        self._names: dict[tuple[str, Hashable], str] = {}

    def add(self, root: Root) -> None:
        """Add a root, which may have been added before, with other variables."""
        holders = self._found.setdefault(root.name, {}).setdefault(root.key, {})
        holders.update(dict.fromkeys(root.holders))

    def settle(self) -> bool:
        """Choose the names once all roots are known; return False if all are names of classes."""
        for name, found in self._found.items():
            known = {key: [*holders] for key, holders in found.items() if holders}
            for key, holder in _chosen_holders(known).items():
                self._names[name, key] = holder
        return bool(self._names)

    def name(self, root: Root) -> str:
        """Return the name of a root."""
        return self._names.get((root.name, root.key), root.name)


def _chosen_holders(found: Mapping[Hashable, Sequence[str]]) -> dict[Hashable, str]:
    """Return a short path of a variable for each of several roots of one class, if these differ."""
    # A function that is called with several models refers to all of them by one variable.
    count = collections.Counter(holder for holders in found.values() for holder in holders)
    chosen = {
        key: next((holder for holder in holders if count[holder] == 1), holders[0])
        for key, holders in found.items()
    }
    if len(set(chosen.values())) < 2:
        return {}
    short = _short_names(set(chosen.values()))
    return {key: short[holder] for key, holder in chosen.items()}


def _short_names(paths: set[str]) -> dict[str, str]:
    """Shorten paths as long as they differ: to a name and the indices after it.

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
    """Return a function that names the first two keys of an argument in `(args, kwargs)`."""
    try:
        parameters = list(find_signature(fn).parameters.values())
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
