"""The selections that pick sites.

A *site* is a named value in a program. Its `path` is the name in the mark, after the names of the
scopes around it: `teacher/h`. Its `name` also numbers the call: the first call of `h` is `h`, the
second `h@1`. The name of a leaf of a structured value ends with a colon and the key of the leaf:
`rnn:0`, `attn:weights`. Each name belongs to one array.

A *selection* picks sites:

>>> h = Site("net/h", call=2)
>>> [picks(s, h) for s in ("net/h", "net/*", "**", "**/h", "*", "net/h@2", "net/h@0")]
[True, True, True, True, False, True, False]

- a glob: `*` matches inside one segment, `**` any number of segments, `?` one character. A pattern
  without `@` matches every call, and a pattern without `:` every leaf. A number after the name of a
  scanned module picks one of its layers: `Stack/layers/3`.
- a predicate on `Site`.
- a rule: `ops`, `lines` and `named` mark the results of operations.
- `at`: some iterations of a loop, or a part of a value.
- a combination of these by `&`, `|` and `~`: see `glob`.
- a sequence of selections: it picks the sites that any of them picks.
- a mapping from selections to a reducer, a function of the value, or several of these: their
  results replace the value. See `reduce`. A reducer alone applies to every site.

`None` and an empty sequence pick nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from tapax._jax import SEQUENCES, Function, Value
from tapax._sites.errors import SiteError, name_of
from tapax._sites.layers import LayerNumber, find_layers, find_missing_layer, find_unnumbered_layer
from tapax._sites.matching import ASKED, Complement, Intersection, Selector, Union, picks, show
from tapax._sites.parts import At, Index
from tapax._sites.rules import Rule
from tapax._sites.site import ScannedLayers, Site
from tapax.reduce import Reducer


@dataclasses.dataclass(frozen=True, eq=False)
class ValueFunction:
    """A function of a value, or of a value and its site, whose result replaces the value.

    A function without a hash, such as a module whose fields are arrays, equals only itself.
    """

    fn: Callable[..., Any]

    @property
    def _key(self) -> Any:
        try:
            hash(self.fn)
        except TypeError:
            return id(self.fn)
        return self.fn

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ValueFunction) and self._key == other._key

    @property
    def label(self) -> str:
        """The suffix that tells this result of a site from others."""
        return re.sub(r"\W+", "_", name_of(self.fn).rpartition(".")[2]).strip("_")

    def __call__(self, x: Value, site: Site) -> Any:
        return call_on_site(self.fn, x, site)


def call_on_site(fn: Function, x: Value, site: Site) -> Any:
    """Call a function of a value, or of a value and its site."""
    return fn(x, site) if takes_site(fn) else fn(x)


def takes_site(fn: Function) -> bool:
    """Return whether a function of a value takes the site as well."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return False
    if "site" in signature.parameters:
        return True
    try:
        signature.bind(None)
    except TypeError:
        return True
    return False


@dataclasses.dataclass(frozen=True)
class Reduced(Selector):
    """The sites of a selection, with the reducers whose results replace their values."""

    selection: Any
    reducers: tuple[Reducer | ValueFunction, ...]

    def picks(self, site: Site) -> bool:
        return matches(self.selection, site)

    def __str__(self) -> str:
        return show(self.selection)


@dataclasses.dataclass(frozen=True)
class IfAny(Selector):
    """A selection that may pick nothing without an error or a warning."""

    selection: Any

    def picks(self, site: Site) -> bool:
        return matches(self.selection, site)

    def __str__(self) -> str:
        return show(self.selection)


@dataclasses.dataclass(frozen=True)
class OneSite(Selector):
    """The site with a name, even if only a rule picks such sites."""

    name: str

    def picks(self, site: Site) -> bool:
        return site.name == self.name

    def __str__(self) -> str:
        return repr(self.name)


_MAPPINGS: tuple[type[Any], ...] = (Mapping,)
Reductions: TypeAlias = (
    "Mapping[Any, Reducer | Callable[..., Any] | Sequence[Reducer | Callable[..., Any]]]"
)
Selection: TypeAlias = (
    "str | Selector | Callable[[Site], bool] | Sequence[Selection] | Reductions | Reducer | None"
)


class Found(NamedTuple):
    """A site that a selection picks: its path, and the iterations and the part to take.

    `steps` has the requested iterations of each loop, innermost first.
    """

    path: str
    steps: tuple[Any, ...] = ()
    part: Index | None = None


def find(selection: Selection, site: Site) -> Iterator[Found]:
    """Yield a `Found` if a selection picks a site, or one for each layer that it picks."""
    if isinstance(selection, At):
        for found in find(selection.selection, site):
            steps = _with_step(found.steps, selection.step)
            yield found._replace(steps=steps, part=selection.index)
    elif isinstance(selection, (Reduced, IfAny)):
        yield from find(selection.selection, site)
    elif isinstance(selection, tuple):
        for part in cast(Sequence[Selection], selection):
            yield from find(part, site)
    elif picks(selection, site):
        yield Found(site.path)
    elif site.layers and isinstance(selection, (str, Selector)):
        is_picked = functools.partial(picks, selection)
        yield from (Found(*layer) for layer in find_layers(_globs(selection), site, is_picked))


def matches(selection: Selection, site: Site) -> bool:
    """Return whether a selection picks a site, or one of the layers that share it."""
    return next(find(selection, site), None) is not None


def _with_step(steps: tuple[Any, ...], step: Any) -> tuple[Any, ...]:
    """Set the iterations of the innermost loop without a layer number to `step`."""
    if step is None:
        return steps
    at = next((i for i, s in enumerate(steps) if not isinstance(s, LayerNumber)), len(steps))
    return (*steps[:at], step, *steps[at + 1 :])


def missing_layers(selection: Selection, site: Site) -> ScannedLayers | None:
    """Find the scanned layers of a site of which a selection names a layer that does not exist."""
    return find_missing_layer(_globs(selection), site, functools.partial(picks, selection))


def unnumbered_layer(selection: Selection, site: Site) -> str | None:
    """Find a single layer of a site that a selection matches without naming its number."""
    return find_unnumbered_layer(site, functools.partial(picks, selection))


def is_exact(selection: Any) -> bool:
    """Return whether a selection is the exact name of a site, which must exist."""
    return isinstance(selection, str) and not re.search(r"[*?]", selection)


def check(selection: Any, argument: str, *, reducing: bool = False) -> Selection:
    """Raise unless `selection` is a selection, and make it hashable: sequences become tuples.

    With `reducing`, a reducer or a mapping to reducers is a selection too.
    """
    if isinstance(selection, str):
        if not selection:
            raise SiteError(f"`{argument}` is an empty string, which matches no site.")
        return selection
    if selection is None or isinstance(selection, (Rule, IfAny, Reduced)):
        return selection
    if isinstance(selection, At):
        return _check_at(selection, argument)
    if isinstance(selection, Union):
        return (check(selection.first, argument), check(selection.second, argument))
    if isinstance(selection, Intersection):
        return _check_intersection(selection, argument)
    if isinstance(selection, Complement):
        return Complement(_check_whole(selection.selection, argument, "~"))
    if isinstance(selection, Reducer):
        if reducing:
            return Reduced("**", _check_reducers(selection, argument))
        raise TypeError(
            f"`{argument}` is the reducer {selection}, but must be a selection of sites: a glob "
            "such as '**/attn', a predicate on Site, or a rule such as tapax.ops('dot_general')."
        )
    if callable(selection):
        return cast(Selection, selection)
    if isinstance(selection, (*SEQUENCES, set, frozenset)):
        return tuple(check(part, argument, reducing=reducing) for part in selection)
    if isinstance(selection, _MAPPINGS) and reducing:
        return tuple(
            Reduced(check(key, argument), _check_reducers(reducers, argument))
            for key, reducers in selection.items()
        )
    raise TypeError(
        f"`{argument}` must be a selection of sites: a glob such as '**/attn', a predicate on "
        f"Site, a rule such as tapax.ops('dot_general'), or a sequence of these. It is "
        f"{selection!r}, of type {type(selection).__name__}."
    )


def _check_at(selection: At, argument: str) -> Selection:
    return _narrow(check(selection.selection, argument), selection, argument)


def _narrow(checked: Any, outer: At, argument: str) -> Selection:
    """Apply the step and index of `outer` to a selection that may have a step or index already."""
    parts = list(flatten(checked))
    if isinstance(checked, tuple) and any(isinstance(part, At) for part in parts):
        return tuple(_narrow(part, outer, argument) for part in parts)
    if not isinstance(checked, At):
        return At(checked, outer.step, outer.index)
    for name in ("step", "index"):
        if getattr(checked, name) is not None and getattr(outer, name) is not None:
            raise SiteError(
                f"`{argument}` has tapax.{outer}, which gives `{name}` twice. Give it once."
            )
    step = checked.step if outer.step is None else outer.step
    return At(checked.selection, step, outer.index or checked.index)


def _check_intersection(selection: Intersection, argument: str) -> Selection:
    """Check an intersection; if one side is an `At`, turn it into an `At` of the intersection."""
    both = [check(part, argument) for part in (selection.first, selection.second)]
    parts = [part for part in both if isinstance(part, At)]
    if len(parts) > 1:
        raise SiteError(
            f"`{argument}` has {show(selection)}, which combines two parts of values by `&`. "
            "Combine the selections by `&` first, and pass the result to one tapax.at."
        )
    bare = [part.selection if isinstance(part, At) else part for part in both]
    made = Intersection(*(_check_whole(part, argument, "&") for part in bare))
    return At(made, parts[0].step, parts[0].index) if parts else made


def _check_whole(selection: Any, argument: str, operator: str) -> Any:
    """Check an operand of a combination, which must select whole values."""
    checked = check(selection, argument)
    for part in flatten(checked):
        if isinstance(part, At):
            raise SiteError(
                f"`{argument}` combines tapax.{part} by `{operator}`, but it selects parts of "
                "values. Combine the selections first, and pass the result to tapax.at."
            )
    return checked


def _check_reducers(reducers: Any, argument: str) -> tuple[Reducer | ValueFunction, ...]:
    several = tuple(reducers) if isinstance(reducers, SEQUENCES) else (reducers,)
    if not several:
        raise TypeError(
            f"`{argument}` maps a selection to an empty list of reducers: give at least one."
        )
    found: list[Reducer | ValueFunction] = []
    for reducer in several:
        if isinstance(reducer, Reducer):
            if reducer.paired and argument != "grads":
                raise TypeError(
                    f"`{argument}` maps a selection to tapax.reduce.{reducer}, which compares a "
                    "gradient with its value: use it in `grads`."
                )
            found.append(reducer)
        elif str(getattr(reducer, "__module__", "")).startswith("tapax.reduce"):
            name = f"tapax.reduce.{name_of(reducer)}"
            raise TypeError(
                f"`{argument}` maps a selection to {name}, a function that makes a reducer: call "
                f"it, {name}(...)."
            )
        elif callable(reducer) and not isinstance(reducer, type):
            found.append(ValueFunction(reducer))
        else:
            raise TypeError(
                f"`{argument}` maps a selection to {reducer!r} of type {type(reducer).__name__}, "
                "which is neither a reducer nor a function of the value: use a reducer such as "
                "tapax.reduce.rms or tapax.reduce.histogram(edges), or several in a list."
            )
    return tuple(found)


def flatten(selection: Selection) -> Iterator[Any]:
    """Yield the single selections in nested sequences of selections."""
    if isinstance(selection, tuple):
        for part in cast(tuple[Selection, ...], selection):
            yield from flatten(part)
    elif selection is not None:
        yield selection


def _leaves(selection: Any) -> Iterator[Any]:
    """Yield the globs, rules and predicates in a selection, however they are combined."""
    for part in flatten(selection):
        if isinstance(part, (At, Reduced, IfAny, Complement)):
            yield from _leaves(part.selection)
        elif isinstance(part, (Intersection, Union)):
            yield from (*_leaves(part.first), *_leaves(part.second))
        else:
            yield part


def rules(selection: Selection) -> Iterator[Rule]:
    """Return the rules in a selection."""
    return (part for part in _leaves(selection) if isinstance(part, Rule))


def asked_kinds(selection: Selection) -> frozenset[str]:
    """Return the kinds of sites that exist only because this selection asks for them."""
    globs = _globs(selection)
    return frozenset(kind for kind, mark in ASKED.items() if any(mark in part for part in globs))


def _globs(selection: Selection) -> list[str]:
    return [part for part in _leaves(selection) if isinstance(part, str)]
