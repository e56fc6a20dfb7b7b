"""What the methods share: the sites of a sweep, their arguments, and when they are compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import tapax
from tapax import _jax
from tapax._frameworks import registry
from tapax._sites.errors import SiteError
from tapax._sites.selections import At, StepSlice, check, flatten, is_exact, matches
from tapax._sites.site import Site


class Row(NamedTuple):
    """A value that is passed once: a site, or one iteration of a site in a loop."""

    site: Site
    selection: Any
    step: int | None

    @property
    def at(self) -> Any:
        """The selection of this value alone."""
        return self.selection if self.step is None else tapax.at(self.selection, step=self.step)

    @property
    def where(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"the site {self.site.name!r}{step}, marked at {self.site.source}"

    def of(self, taps: tapax.Taps) -> Any:
        """The value, of everything that was captured."""
        value = taps.values[self.site.name]
        return value if self.step is None else value[self.step]

    def same(self, other: Row) -> bool:
        return (self.site.name, self.step) == (other.site.name, other.step)


def bare(sites: Any, argument: str = "sites") -> Any:
    """A selection without its steps: what has to be captured to have every row."""
    parts = tuple(flatten(check(sites, argument)))
    if not parts:
        raise SiteError(f"`{argument}` is {sites!r}, which picks no site.")
    return tuple(p.selection if isinstance(p, At) else p for p in parts)


def rows(sites: Any, taps: tapax.Taps, argument: str = "sites") -> list[Row]:
    """The rows that a selection stands for, of which `taps` holds the values."""
    found = []
    for part in flatten(check(sites, argument)):
        inner = part.selection if isinstance(part, At) else part
        picked = [s for s in _each(taps.sites) if matches(inner, s)]
        if not picked:
            raise SiteError(f"`{argument}` holds {part!r}, which picks no site.")
        for site in picked:
            # No name picks what a rule such as `tapax.ops` has marked: there the rule itself does.
            ruled = site.kind in ("op", "name")
            if ruled and len(picked) > 1:
                raise SiteError(
                    f"`{argument}` holds {part}, which picks {len(picked)} values. Mark the one "
                    "that is meant with tapax.sow."
                )
            selection = inner if ruled else f"{site.path}@{site.call}"
            found += [Row(site, selection, step) for step in _steps(part, site, taps)]
    return found


def _each(sites: Sequence[Site]) -> list[Site]:
    return list({s.name: s for s in sites if s.pullback == 0}.values())


def _steps(part: Any, site: Site, taps: tapax.Taps) -> Sequence[int | None]:
    looped = len(site.loops) == 1 and site.loops[0].startswith("scan[")
    length = taps.values[site.name].shape[0] if looped else 0
    if not isinstance(part, At):
        return range(length) if looped else [None]
    if not looped:
        raise SiteError(
            f"`step` was given in tapax.{part} for the site {site.name!r}, marked at "
            f"{site.source}, which is in "
            f"{'the loops ' + ', '.join(site.loops) if site.loops else 'no loop'}, but must be in "
            "one scan."
        )
    if isinstance(part.step, StepSlice):
        return range(length)[part.step.slice]
    if not isinstance(part.step, int):
        raise TypeError(
            f"`step` must be an integer or a slice here, but is {part.step!r} for {site.name!r}."
        )
    if not -length <= part.step < length:
        raise SiteError(
            f"tapax.{part} is out of range: the site {site.name!r}, marked at {site.source}, is in "
            f"a loop of {length} iterations."
        )
    return [part.step % length]


def one(sites: Any, taps: tapax.Taps, argument: str) -> Row:
    """The only row of a selection."""
    found = rows(sites, taps, argument)
    if len(found) == 1:
        return found[0]
    names = ", ".join(repr(row.at) if row.step is None else f"tapax.{row.at}" for row in found[:5])
    raise SiteError(
        f"`{argument}` must pick one value, but {sites!r} picks {len(found)}: {names}"
        f"{' and more' if len(found) > 5 else ''}."
    )


def single(site: Any) -> bool:
    """Whether a selection is the name of one site."""
    return is_exact(site.selection if isinstance(site, At) else site)


def arguments(given: Any) -> tuple[Any, ...]:
    """The arguments of a call, given as a tuple, or as the only one."""
    alone = not isinstance(given, tuple) or hasattr(given, "_fields")
    return (given,) if alone else given


def check_alike(clean: Any, corrupt: Any) -> None:
    """Raises unless one program does for both calls."""
    leaves, trees = zip(*map(jax.tree.flatten_with_path, (clean, corrupt)), strict=True)
    if trees[0] != trees[1]:
        raise ValueError(
            "`clean` and `corrupt` must be the same arguments with other values, but differ in "
            f"structure: {trees[0]} and {trees[1]}."
        )
    for (path, a), (_, b) in zip(*leaves, strict=True):
        shapes = [list(np.shape(x)) if hasattr(x, "shape") else None for x in (a, b)]
        if shapes[0] != shapes[1]:
            place = f"argument {path[0].idx}" + jax.tree_util.keystr(path[1:])
            raise ValueError(
                f"`clean` and `corrupt` must be alike, but {place} has the shape {shapes[0]} in "
                f"one and {shapes[1]} in the other. Pad the shorter one."
            )


def check_array(out: Any) -> None:
    """Raises for a metric that is no array."""
    if not isinstance(out, (jax.Array, np.ndarray, np.generic, int, float)):
        raise TypeError(
            "The function must return a metric, a number or one array, but returns "
            f"{type(out).__name__}. Reduce it to what is to be compared, such as a difference of "
            "logits."
        )


def fits(shape: tuple[int, ...], into: tuple[int, ...]) -> bool:
    """Whether an array can be broadcast to a shape."""
    try:
        return np.broadcast_shapes(shape, into) == tuple(into)
    except ValueError:
        return False


def axis_of(row: Row, value: Any, axis: int) -> int:
    if not -value.ndim <= axis < value.ndim:
        raise SiteError(
            f"`axis` is {axis}, but {row.where}, has values of shape {list(value.shape)}, which "
            "have no such axis."
        )
    return axis % value.ndim


def compiled(body: Callable[..., Any], fn: Any, *options: Any) -> Callable[..., Any]:
    """`body(fn, *options, ...)`, compiled; for all calls with a function that is itself compiled.

    A plain function may mean something else at the next call, as what it closes over may.
    """
    if _jax.jit_options(fn) is None and not registry.has_repeatable_calls(fn):
        return _compile(body, fn, options)
    try:
        return _kept(body, fn, options)
    except TypeError:  # a predicate that cannot be hashed
        return _compile(body, fn, options)


def _compile(body: Callable[..., Any], fn: Any, options: tuple[Any, ...]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return body(fn, *options, *args, **kwargs)

    run.__name__ = run.__qualname__ = body.__name__.lstrip("_")
    return tapax.edit(run)


_kept = functools.lru_cache(maxsize=32)(_compile)
