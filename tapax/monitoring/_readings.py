"""Readings: the numbers that a monitor requests, and their names.

A monitor requests many statistics at once, some for its records and some for its alerts, perhaps
several of one site. A `StatisticRequest` finds its result by a key: its reducer returns a dict with
that key. So the monitor never confuses a statistic of a value with a statistic of a gradient, nor
two statistics that share a name.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tapax._jax import Value, typed
from tapax._results import SiteTable
from tapax._sites import At, Site, ValueFunction, check, flatten, matches
from tapax._sites.selections import takes_site
from tapax.monitoring._records import Histogram, Number
from tapax.reduce import Reducer, rms
from tapax.reduce._reducer import measure_of


@dataclasses.dataclass(frozen=True)
class StatisticRequest:
    """A request for a statistic of the values, or of the gradients, of some sites."""

    kind: str
    selection: Any
    reducer: Reducer
    stat: str
    key: str

    @property
    def mapping(self) -> dict[Any, Reducer]:
        """The selection, mapped to a reducer whose result has the key of the request."""
        return {self.selection: _keyed(self.reducer, self.key)}


@functools.lru_cache(maxsize=1024)
def _keyed(reducer: Reducer, key: str) -> Reducer:
    # Cached, so that monitors with equal requests are equal and share one trace of the step.
    finish, measure, direct = reducer.finish, measure_of(reducer), reducer.direct

    def keyed(state: Any) -> dict[str, Any]:
        return {key: finish(state)}

    if direct is not None and measure is not None:
        direct = direct._replace(finish=keyed, measure=lambda x: {key: measure(x)})
    return dataclasses.replace(reducer, finish=keyed, direct=direct)


class Reading(NamedTuple):
    """A requested number, with the label of its site and iteration, and its statistic."""

    request: StatisticRequest
    label: str
    stat: str
    number: Number

    @property
    def name(self) -> str:
        return f"{self.label}/{self.request.kind}_{self.stat}"


def _pair_reducers(kind: str, selection: Any) -> Iterator[tuple[Any, Reducer]]:
    """Pair each part of a selection with each of its reducers; without reducers, with `rms`."""
    argument = f"{kind}s"
    if isinstance(selection, (Mapping, Reducer)):
        for part in flatten(check(selection, argument, reducing=True)):
            for reducer in part.reducers:
                is_function = isinstance(reducer, ValueFunction)
                yield part.selection, _as_reducer(reducer, argument) if is_function else reducer
    elif isinstance(selection, (list, tuple)):
        for part in selection:
            yield from _pair_reducers(kind, part)
    elif selection is not None:
        yield check(selection, argument), rms


@functools.lru_cache(maxsize=1024)
def _as_reducer(function: ValueFunction, argument: str) -> Reducer:
    """Make a reducer whose result is what a function returns for the last value."""
    # Cached, so that monitors with equal functions share one trace of the step.
    if takes_site(function.fn):
        raise TypeError(
            f"`{argument}` maps a selection to the function {function.label!r}, which takes a "
            "value and a site. A monitor passes only the value."
        )

    def apply(x: Value) -> Value:
        out = function.fn(x)
        if not isinstance(out, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            raise TypeError(
                f"The function {function.label!r} in `{argument}` returns {type(out).__name__}, "
                "but must return a number or an array, which the record then contains."
            )
        return jnp.asarray(out)

    def start(x: Value) -> Value:
        made = typed.eval_shape(apply, x)
        return jnp.zeros(made.shape, made.dtype)

    return Reducer(
        init=start,
        update=lambda state, x: apply(x),
        combine=lambda a, b: b,
        name=function.label,
        over_maps=False,
    )


def make_requests(kind: str, selection: Any) -> list[StatisticRequest]:
    """Make a request for each reducer; different reducers that share a label get full names."""
    pairs = list(_pair_reducers(kind, selection))
    labels: dict[str, set[Reducer]] = {}
    stats: dict[str, Reducer] = {}
    for _, reducer in pairs:
        labels.setdefault(reducer.label, set()).add(reducer)
    made = []
    for i, (selection, reducer) in enumerate(pairs):
        stat = reducer.label if len(labels[reducer.label]) == 1 else str(reducer)
        for one in _names(reducer, stat):
            if stats.setdefault(one, reducer) != reducer:
                raise TypeError(
                    f"`{kind}s` has two reducers with the name {one!r}, which a record cannot "
                    "tell apart. Rename one: reducer.named(...), or give a function another name."
                )
        made.append(StatisticRequest(kind, selection, reducer, stat, f"{kind}#{i}"))
    return made


def _names(reducer: Reducer, stat: str) -> list[str]:
    """List the statistics in a result of `reducer`, whose name in the record is `stat`."""
    if reducer.labels is None:
        return [stat]
    suffix = stat.removeprefix(reducer.name)
    return [label + suffix for label in reducer.labels]


class ResultLabels(NamedTuple):
    """The labels of the numbers in one result, by their indices along the axes of loops."""

    name: str
    request: StatisticRequest
    stat: str
    places: tuple[tuple[tuple[int, ...], str], ...]


def label_results(requests: Sequence[StatisticRequest], sites: SiteTable) -> list[ResultLabels]:
    """Label the result of each request; the labels serve all steps with these sites."""
    by_key = {r.key: r for r in requests}
    labels = []
    for site in sites:
        base, key, leaf = _split_path(site.path)
        one = by_key[key]
        stat = f"{one.stat}.{leaf}" if leaf else one.stat
        own = dataclasses.replace(site, path=base)
        labels.append(ResultLabels(site.name, one, stat, tuple(_places(one, own))))
    return labels


_RESULT = re.compile(r"(.*?):(?:[^:/]*\.)?((?:value|grad|param_grad)#\w+)(?:\.(.*))?", re.DOTALL)


def _split_path(path: str) -> tuple[str, str, str]:
    """Split a path into the path of the mark, the key of the request, and the result's leaf."""
    found = _RESULT.fullmatch(path)
    assert found is not None, path
    return found[1], found[2], found[3] or ""


def _places(request: StatisticRequest, site: Site) -> Iterator[tuple[tuple[int, ...], str]]:
    loops = _iterations(request, site)
    ranges = [loop for loop in loops if not isinstance(loop, int)]
    for place in itertools.product(*(range(len(r)) for r in ranges)):
        along = iter([r[i] for r, i in zip(ranges, place, strict=True)])
        index = ",".join(str(loop if isinstance(loop, int) else next(along)) for loop in loops)
        yield place, f"{site.name}[{index}]" if index else site.name


def _iterations(request: StatisticRequest, site: Site) -> list[Any]:
    """List the iterations along each axis of a loop; an integer if one iteration is selected."""
    if request.reducer.over_loops:
        return []
    step = _step(request.selection, site)
    found: list[Any] = []
    for i, loop in enumerate(site.loops):
        size = re.search(r"\[(\d+)\]", loop)
        if step is not None and i == len(site.loops) - 1:
            every = range(int(size[1])) if size else range(2**31)
            found.append(every[step] if isinstance(step, int) else every[step.slice])
        elif size is not None:  # a while loop has no axis
            found.append(range(int(size[1])))
    return found


def _step(selection: Any, site: Site) -> Any:
    parts = list(flatten(selection))
    if not any(isinstance(part, At) for part in parts):
        return None
    part = next((part for part in parts if matches(part, site)), None)
    return part.step if isinstance(part, At) else None


def read_numbers(
    labels: Sequence[ResultLabels], arrays: Mapping[str, Any], valid: Mapping[str, Any]
) -> Iterator[Reading]:
    """Read the numbers of the iterations that ran from captured NumPy arrays."""
    for name, request, stat, places in labels:
        array = np.asarray(arrays[name])
        mask = valid.get(name)
        if mask is not None:
            mask = np.asarray(mask).astype(bool)
        for place, label in places:
            if mask is None or mask[place[: mask.ndim]].any():
                for one, number in split_statistics(request.reducer, stat, array[place]):
                    yield Reading(request, label, one, number)


def split_statistics(reducer: Reducer, stat: str, array: Value) -> Iterator[tuple[str, Number]]:
    """Split a result into numbers, each with the name of its statistic."""
    if reducer.edges is not None:
        yield stat, Histogram(array.astype(np.float64), np.array(reducer.edges))
        return
    if np.iscomplexobj(array):
        yield from split_statistics(reducer, f"{stat}.real", array.real)
        yield from split_statistics(reducer, f"{stat}.imag", array.imag)
        return
    array = np.asarray(array, np.float64)
    if reducer.labels is not None and array.shape[-1:] == (len(reducer.labels),):
        for i, name in enumerate(_names(reducer, stat)):
            yield name, _number(array[..., i])
    else:
        yield stat, _number(array)


def _number(array: np.ndarray) -> Number:
    return array if array.ndim else float(array)
