"""Renaming of sites, from the names of one capture to those of another.

>>> rename_names(["model.layers.0.mlp", "model.norm"], {"model.layers.*.mlp": "GPT/blocks/*/mlp"})
{'model.layers.0.mlp': 'GPT/blocks/0/mlp', 'model.norm': 'model.norm'}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from tapax._sites import SiteError, nearest, wrong_type

Rename: TypeAlias = "Mapping[str, str] | Callable[[str], str | None] | Sequence[tuple[str, str]]"

_WILDCARDS = r"(\*\*/|/\*\*|\*\*|\*|\?)"


def rename_names(names: Iterable[str], rename: Rename | None) -> dict[str, str]:
    """Map each of `names` to its new name; names that `rename` does not match stay as they are."""
    names = list(names)
    if rename is None:
        return {name: name for name in names}
    if isinstance(rename, Mapping):
        function = _by_pairs(list(rename.items()))
    elif callable(rename):
        function = rename
    elif isinstance(rename, Sequence) and not isinstance(rename, str):
        function = _by_pairs(rename)
    else:
        raise wrong_type(
            "`rename` must be a dict, a function of a name, or pairs of globs, but is", rename
        )
    renamed: dict[str, str] = {}
    sources: dict[str, str] = {}
    for name in names:
        new = function(name)
        if new is not None and not isinstance(new, str):
            raise wrong_type(f"`rename` must return a name for {name!r}, but returned", new)
        renamed[name] = name if new is None else new
        first = sources.setdefault(renamed[name], name)
        if first != name:
            raise SiteError(
                f"`rename` gives two sites of `b` the name {renamed[name]!r}: {first!r} and "
                f"{name!r}. Give each a different name."
            )
    if names and not callable(rename) and all(function(name) is None for name in names):
        patterns = [*rename] if isinstance(rename, Mapping) else [pair[0] for pair in rename]
        if patterns:
            raise SiteError(
                f"`rename` matches no site of `b`: its first pattern is {patterns[0]!r}. "
                f"{nearest(patterns[0], names)}"
            )
    return renamed


def _by_pairs(pairs: Sequence[Any]) -> Callable[[str], str | None]:
    """Make a function that renames by the first pair whose pattern matches."""
    rules = [_rule(pair) for pair in pairs]

    def rename(name: str) -> str | None:
        found = (rule(name) for rule in rules)
        return next((new for new in found if new is not None), None)

    return rename


def _rule(pair: Any) -> Callable[[str], str | None]:
    if not (
        isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(x, str) for x in pair)
    ):
        raise wrong_type("`rename` must contain pairs of strings, from `b` to `a`, but has", pair)
    source, target = pair
    parts = re.split(_WILDCARDS, target)
    pattern, count = _pattern(source)
    if len(parts) // 2 != count:
        raise ValueError(
            f"`rename` has the pair {source!r}, {target!r}, with {count} wildcards in the first "
            f"and {len(parts) // 2} in the second, but each wildcard of the second takes the text "
            "that one of the first matches. Give both the same number of wildcards."
        )

    def rename(name: str) -> str | None:
        # A pattern without a call or a leaf matches all of them, as in selections.
        path = name if re.search(r"[:@~]", source) else re.split(r"[:@~]", name)[0]
        found = pattern.fullmatch(path)
        if found is None:
            return None
        filled = list(parts)
        for i, text in enumerate(found.groups()):
            filled[2 * i + 1] = _fill(parts[2 * i + 1], text)
        return "".join(filled) + name[len(path) :]

    return rename


def _pattern(glob: str) -> tuple[re.Pattern[str], int]:
    """Convert a glob to a regular expression with a group for each wildcard; count the wildcards.

    `*` stays inside one segment. Dots separate the segments of PyTorch's names, which have no
    slashes.
    """
    between = "/" if "/" in glob or "." not in glob else "."
    one = f"[^{re.escape(between)}]"
    table = {
        "**/": "((?:.*/)?)",
        "/**": "((?:/.*)?)",
        "**": "(.*)",
        "*": f"({one}*)",
        "?": f"({one})",
    }
    parts = re.split(_WILDCARDS, glob)
    return re.compile("".join(table.get(x) or re.escape(x) for x in parts)), len(parts) // 2


def _fill(wildcard: str, text: str) -> str:
    """Fill a wildcard of the new name; the slashes at its ends belong to the wildcard."""
    text = text.strip("/")
    if not text or wildcard in ("**", "*", "?"):
        return text
    return f"/{text}" if wildcard == "/**" else f"{text}/"
