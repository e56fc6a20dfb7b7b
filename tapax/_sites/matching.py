"""Matching of sites against selections, and combinations of selections.

A glob, a predicate or a `Selector` either picks a site or does not. Some sites exist only because a
selection asks for them: the results of operations, which rules such as `tapax.ops` mark, the inputs
of modules, and the weights of attention layers. A glob picks such a site only if the glob contains
the text in `ASKED`, but it may *admit* it: in `tapax.ops("dot_general") & "**/attn"` the rule picks
the matrix products, and the glob admits those inside a module `attn`.

>>> attn = Site("GPT/h/0/attn")
>>> product = Site("GPT/h/0/attn/out/dot_general", kind="op", op="dot_general")
>>> picks("**/attn", attn), picks("**/attn", product), admits("**/attn", product)
(True, False, True)
>>> picks(glob("**/attn") & ~glob("**/0/**"), attn)
False
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

from tapax._sites.errors import name_of, wrong_type
from tapax._sites.site import Site

RULED = ("op", "name")
"""The kinds of sites that only rules pick."""
ASKED = {"input": ".input", "weights": ":weights"}
"""The text that a glob must contain to pick a site of each of these kinds."""


class Selector:
    """A selection that combines with others by `&`, `|` and `~`."""

    def picks(self, site: Site) -> bool:
        """Return whether the selection picks `site`."""
        raise NotImplementedError

    def admits(self, site: Site) -> bool:
        """Return whether the selection lets through a site that another selection picks."""
        return self.picks(site)

    def __and__(self, other: Any) -> Selector:
        return Intersection(self, _operand("&", other))

    def __rand__(self, other: Any) -> Selector:
        return Intersection(_operand("&", other), self)

    def __or__(self, other: Any) -> Selector:
        return Union(self, _operand("|", other))

    def __ror__(self, other: Any) -> Selector:
        return Union(_operand("|", other), self)

    def __invert__(self) -> Selector:
        return Complement(self)


@dataclasses.dataclass(frozen=True)
class Intersection(Selector):
    """The sites that at least one of two selections picks and both admit."""

    first: Any
    second: Any

    def picks(self, site: Site) -> bool:
        picked = picks(self.first, site) or picks(self.second, site)
        return picked and self.admits(site)

    def admits(self, site: Site) -> bool:
        return admits(self.first, site) and admits(self.second, site)

    def __str__(self) -> str:
        return f"{show(self.first)} & {show(self.second)}"


@dataclasses.dataclass(frozen=True)
class Union(Selector):
    """The sites that at least one of two selections picks."""

    first: Any
    second: Any

    def picks(self, site: Site) -> bool:
        return picks(self.first, site) or picks(self.second, site)

    def admits(self, site: Site) -> bool:
        return admits(self.first, site) or admits(self.second, site)

    def __str__(self) -> str:
        return f"({show(self.first)} | {show(self.second)})"


@dataclasses.dataclass(frozen=True)
class Complement(Selector):
    """The sites that a selection does not admit, except those that exist only on request."""

    selection: Any

    def picks(self, site: Site) -> bool:
        return site.kind not in (*RULED, *ASKED) and self.admits(site)

    def admits(self, site: Site) -> bool:
        return not admits(self.selection, site)

    def __str__(self) -> str:
        return f"~{show(self.selection)}"


class Glob(str, Selector):
    """A glob that combines with other selections: see `glob`."""

    __slots__ = ()
    __and__, __or__, __invert__ = Selector.__and__, Selector.__or__, Selector.__invert__

    def picks(self, site: Site) -> bool:
        return picks(str(self), site)

    def admits(self, site: Site) -> bool:
        return admits(str(self), site)


def glob(pattern: str) -> Glob:
    """Make a glob that combines with other selections by `&`, `|` and `~`.

    `a & b` selects the sites that both select, `a | b` those that `a` or `b` selects, and `~a` all
    sites except those of `a`. `tapax.ops("dot_general") & "**/attn"` selects the matrix products
    inside modules `attn`.

    Everywhere else a plain string is enough. It is also enough on one side of `&` or `|`, if the
    other side is a rule or a `glob`.

    Args:
        pattern: The pattern. `*` stays inside one segment, `**` spans any number of segments, `?`
            matches one character. A pattern without `@` matches every call, a pattern without `:`
            every leaf of a structured value.

    Returns:
        A selection, which is also a string.

    Raises:
        TypeError: If `pattern` is not a string.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> def f(x):
        ...     for i in range(3):
        ...         with tapax.scope(f"block{i}"):
        ...             x = tapax.sow(jnp.sin(x), "mlp")
        ...     return x
        >>> others = tapax.glob("**/mlp") & ~tapax.glob("block0/**")
        >>> list(tapax.capture(f, values=others)(1.0)[1].values)
        ['block1/mlp', 'block2/mlp']
    """
    given: Any = pattern
    if not isinstance(given, str):
        raise wrong_type("`glob` takes a string, but was given", given)
    return Glob(given)


def _operand(operator: str, other: Any) -> Any:
    if isinstance(other, (str, Selector)) or callable(other):
        return other
    raise TypeError(
        f"`{operator}` combines a selection with another selection: a glob, a rule such as "
        f"tapax.ops('dot_general'), or a predicate on Site. It was given {other!r} of type "
        f"{type(other).__name__}."
    )


def picks(selection: Any, site: Site) -> bool:
    """Return whether a selection picks a site."""
    if selection is None:
        return False
    if isinstance(selection, str):
        return _is_asked(selection, site.kind) and _matches(selection, site)
    if isinstance(selection, Selector):
        return selection.picks(site)
    if callable(selection):
        return bool(selection(site))
    return any(picks(part, site) for part in selection)


def admits(selection: Any, site: Site) -> bool:
    """Return whether a selection lets through a site that another selection picks."""
    if isinstance(selection, str):
        return any(_matches(selection, around) for around in _with_scopes(site))
    if isinstance(selection, Selector):
        return selection.admits(site)
    if selection is None or callable(selection):
        return picks(selection, site)
    return any(admits(part, site) for part in selection)


def _is_asked(pattern: str, kind: str) -> bool:
    return kind not in RULED and ASKED.get(kind, "") in pattern


def _with_scopes(site: Site) -> Iterator[Site]:
    """Yield a site and, if it exists only on request, the modules and scopes around it."""
    yield site
    if site.kind in ASKED:
        yield dataclasses.replace(site, path=site.path.rpartition(ASKED[site.kind])[0])
    elif site.kind in RULED:
        path = site.path
        while path := path.rpartition("/")[0]:
            yield dataclasses.replace(site, path=path)


def _matches(pattern: str, site: Site) -> bool:
    return bool(_compiled(pattern).fullmatch(_subject(pattern, site)))


def _subject(pattern: str, site: Site) -> str:
    """Return the name of a site, reduced to the parts that `pattern` mentions."""
    path = site.path if ":" in pattern else site.path.partition(":")[0]
    call = f"@{site.call}" if "@" in pattern else ""
    return path + call + (f"~{site.pullback}" if "~" in pattern else "")


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|/\*\*|\*\*|\*|\?)", pattern)
    table = {"**/": r"(?:.*/)?", "/**": r"(?:/.*)?", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    text = "".join(table.get(part) or re.escape(part) for part in parts)
    return re.compile(text, re.DOTALL)


def show(selection: Any) -> str:
    """Return a selection as messages quote it."""
    if isinstance(selection, str):
        return repr(str(selection))
    if isinstance(selection, Selector):
        text = str(selection)
        return text if isinstance(selection, (Intersection, Union, Complement)) else f"tapax.{text}"
    if isinstance(selection, tuple):
        return f"[{', '.join(map(show, cast(Sequence[Any], selection)))}]"
    return name_of(selection) if callable(selection) else repr(selection)
