"""Statistics of parameters in a monitor: weights, gradients, and the update ratio.

A parameter is an array by which the step takes a gradient, among the arguments of the step or in a
model that the step closes over. For each parameter, and for each module with parameters, a record
has statistics of the weights before the step, `Net/mlp/kernel/param_rms`; statistics of the
gradient, `Net/mlp/kernel/param_grad_rms`; and `Net/mlp/kernel/update_ratio`, the root mean square
of the change in the step over that of the weights. The numbers of a module, `Net/mlp/param_rms`,
cover all parameters below it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._calling.collect import make_taps
from tapax._calling.program import TracedCall
from tapax._jax import Args, Kwargs, PyTree, Static, Value, pytrees
from tapax._marks.sow import leaf_name
from tapax._marks.user_warning import warn_user
from tapax._results import Taps
from tapax._sites import Site, SiteError, flatten, matches, name_of, nearest
from tapax._walk.entries import Entry
from tapax._walk.plan import Plan
from tapax.monitoring._named_arrays import (
    Argument,
    find_replaced,
    find_updated,
    list_arguments,
    name_models,
)
from tapax.monitoring._packed_arrays import PackedArrays
from tapax.monitoring._parameter_gradients import GradientHooks, find_parameters
from tapax.monitoring._parameter_updates import ParameterUpdates
from tapax.monitoring._readings import (
    StatisticRequest,
    label_results,
    make_requests,
    read_numbers,
    split_statistics,
)
from tapax.monitoring._records import Number
from tapax.reduce import Reducer, rms


@dataclasses.dataclass(frozen=True)
class ParameterPlan(Plan):
    """A plan that also marks parameters."""

    def marking_policy(self, structure: Any = None) -> Any:
        return dataclasses.replace(super().marking_policy(structure), parameters=True)


@dataclasses.dataclass(frozen=True, eq=False)
class KnownParameters:
    """The parameters of a program, and where they are.

    `names` maps the `uid` of a mark to the name of its parameter, and `inputs` maps the name to the
    number of an input of the program. `models` maps the beginning of such names to the name of a
    model. `updates` has the results with the new values; None if the program is a copy of the step.
    """

    names: Mapping[int, str]
    inputs: Mapping[str, int]
    donated: frozenset[str]
    models: Mapping[str, str]
    updates: ParameterUpdates | None = None

    @functools.cached_property
    def nodes(self) -> dict[str, list[str]]:
        """The parameters and the modules with parameters, each with all parameters in it."""
        nodes: dict[str, list[str]] = {}
        for name in dict.fromkeys(self.names.values()):
            segments = self._with_model(name).split("/")
            for length in range(1, len(segments) + 1):
                nodes.setdefault("/".join(segments[:length]), []).append(name)
        return nodes

    def _with_model(self, name: str) -> str:
        for path, model in self.models.items():
            if name.startswith(f"{path}/"):
                return model + name.removeprefix(path)
        return name


class ParameterCapture(NamedTuple):
    """The parameters of a step and their statistics, on the device, packed.

    `gradients` are taps. `numbers` has the statistics of weights and updates by module and request;
    it is None after a copy of the step, which makes no updates.
    """

    known: Static[KnownParameters]
    gradients: PackedArrays
    numbers: PackedArrays | None


class ParameterWatch:
    """The selection and the measurement of the parameters of a monitored step.

    A watched call runs, in this order: `open`, the captured step, `close`. If the captured step is
    a copy: `open`, the copy, `hold`, the step, `measure`, `close`.
    """

    def __init__(self, step: Callable[..., Any], selection: Any):
        chosen = {"**": rms} if selection is True else selection
        self._step = step
        self._requests = make_requests("param", chosen)
        for request in self._requests:
            if request.reducer.paired:
                raise TypeError(
                    f"tapax.reduce.{request.reducer} compares a gradient with its value, and "
                    "`params` has no such pairs. Give it to `grads`."
                )
        self._gradient_requests = [
            dataclasses.replace(r, kind="param_grad", key=r.key.replace("param#", "param_grad#"))
            for r in self._requests
        ]
        self._call: tuple[Args, Kwargs] = (), {}
        self._arguments: list[Argument] = []
        self._before: dict[str, Any] = {}
        self._copies: dict[str, Any] = {}
        self._warned = False
        self._measure = jax.jit(self._statistics, static_argnums=2)

    def open(self, args: Args, kwargs: Kwargs) -> None:
        """Note the arguments of a call before the step runs."""
        self._call, self._arguments = (args, kwargs), []

    def close(self) -> None:
        """Forget the arguments of a call."""
        self._call, self._arguments, self._before, self._copies = ((), {}), [], {}, {}

    def _list_arguments(self) -> list[Argument]:
        if not self._arguments:  # most calls do not need the list, and making it is slow
            self._arguments = list_arguments(self._step, *self._call)
        return self._arguments

    def prepare(self, call: TracedCall, *, updates: bool) -> KnownParameters:
        """Find the parameters of the program that was traced for a call.

        If `updates`, find the results with their new values too.
        """
        places: dict[int, list[str]] = {}
        for argument in self._list_arguments():
            for name, x in argument.arrays().items():
                places.setdefault(id(x), []).append(name)
        # An array may have two names, as when a target network shares the arrays of the model.
        given = {i: names.pop(0) for i, x in enumerate(call.arrays) if (names := places.get(id(x)))}
        found, shared = find_parameters(call.program.jaxpr)
        names = {uid: given[origin] for uid, origin in found.items() if origin in given}
        if shared := [given[origin] for origin in sorted(shared) if origin in given]:
            _warn_shared(shared)
        if not names:
            raise SiteError(
                f"`params` was given, but {name_of(self._step)} takes no gradient by an array "
                "among its arguments, or in a model of NNX, brainstate or Keras that it closes "
                "over. Pass the parameters to the step, and differentiate inside it, or leave "
                "`params` out."
            )
        donated = frozenset(given[i] for i in _donated(call.program.jaxpr) if i in given)
        origins = {given[origin]: origin for origin in found.values() if origin in given}
        models = name_models(self._list_arguments(), origins)
        known = KnownParameters(names, origins, donated, models)
        self._verify(known)
        if not updates:
            return known
        made = ParameterUpdates.of(call.program, self._list_arguments(), list(origins))
        self._warn_unknown(made.unknown)
        return dataclasses.replace(known, updates=made)

    def _verify(self, known: KnownParameters) -> None:
        for request in self._requests:
            for part in flatten(request.selection):
                if not any(matches(part, _site(node)) for node in known.nodes):
                    raise SiteError(
                        f"params={part!r} selects nothing: no parameter has that name, and no "
                        f"module with parameters. {nearest(str(part), list(known.nodes))}"
                    )

    def _chosen(self, node: str, requests: Iterable[StatisticRequest]) -> list[StatisticRequest]:
        return [r for r in requests if matches(r.selection, _site(node))]

    def hooks(self, known: KnownParameters) -> GradientHooks:
        """Make the hooks that record gradients, for the parameters and for their modules."""
        reducers: dict[str, dict[Reducer, None]] = {}
        for node, members in known.nodes.items():
            for request in self._chosen(node, self._gradient_requests):
                (reducer,) = request.mapping.values()
                for name in members:
                    reducers.setdefault(name, {})[reducer] = None
        return GradientHooks(known.names, {name: list(r) for name, r in reducers.items()})

    def gradients(self, known: KnownParameters, entries: Sequence[Entry]) -> ParameterCapture:
        """Make the statistics of gradients from the entries that the hooks recorded."""
        numbered = list(_numbered(entries))
        made: list[Entry] = []
        for node, members in known.nodes.items():
            for request in self._chosen(node, self._gradient_requests):
                (reducer,) = request.mapping.values()
                own = [e for e in numbered if e.site.path in members and _reducer(e) == reducer]
                for group in _alike(own):
                    merged = _merged(group) if len(members) > 1 else group[0]
                    if merged is not None:
                        site = dataclasses.replace(merged.site, path=node)
                        made.append(merged._replace(site=site))
        taps = make_taps(made, [_site(node) for node in known.nodes])
        return ParameterCapture(Static(known), PackedArrays.of(taps), None)

    def measure_inside(
        self, captured: ParameterCapture, arrays: Sequence[Value], outs: Sequence[Value]
    ) -> tuple[ParameterCapture, list[Any]]:
        """Measure weights and updates inside of the program; return its own results too.

        `arrays` are the inputs of the program, and `outs` its results.
        """
        known = captured.known.value
        assert known.updates is not None
        before = {name: arrays[i] for name, i in known.inputs.items()}
        kept, after = known.updates.take(outs, before)
        return captured._replace(numbers=self._statistics(before, after, known)), kept

    def hold(self, captured: ParameterCapture) -> None:
        """Keep the parameters from before the step, as copies if the step donates them."""
        known = captured.known.value
        arguments = self._list_arguments()
        arrays = {n: x for argument in arguments for n, x in argument.arrays().items()}
        self._before = {n: arrays[n] for n in dict.fromkeys(known.names.values())}
        self._copies = {n: jnp.copy(self._before[n]) for n in known.donated & set(self._before)}

    def measure(self, captured: ParameterCapture, result: PyTree) -> ParameterCapture:
        """Measure the weights before the step, and their change in the step."""
        replaced = find_replaced(self._arguments, self._before)
        after, unknown = find_updated(self._arguments, replaced, result, self._before)
        self._warn_unknown(unknown)
        before = {**self._before, **self._copies}
        return captured._replace(numbers=self._measure(before, after, captured.known.value))

    def _warn_unknown(self, arguments: Sequence[str]) -> None:
        if arguments and not self._warned:
            self._warned = True
            warn_user(
                f"The update of the parameters in {', '.join(map(repr, arguments))} is not "
                f"recorded: {name_of(self._step)} does not return one structure like that "
                "argument. Return the new parameters as they were given."
            )

    def _statistics(
        self, before: dict[str, Value], after: dict[str, Value], known: KnownParameters
    ) -> PackedArrays:
        found: dict[tuple[str, str], Any] = {}
        for node, members in known.nodes.items():
            requests = self._chosen(node, self._requests)
            for request in requests:
                state = _state_of(request.reducer, [before[name] for name in members])
                if state is not None:
                    found[node, request.key] = request.reducer.finish(state)
            if requests and all(name in after for name in members):
                change = sum(_squares(_wide(after[n]) - _wide(before[n])) for n in members)
                weights = sum(_squares(_wide(before[n])) for n in members)
                found[node, "update"] = jnp.sqrt(change) / jnp.sqrt(weights)
        return PackedArrays.of(found)

    def read(self, found: ParameterCapture) -> dict[str, Number]:
        """Read the numbers of a step, on the thread of the delivery."""
        record: dict[str, Number] = {}
        by_key = {r.key: r for r in self._requests}
        for (node, key), result in (found.numbers.fetch() if found.numbers else {}).items():
            if key == "update":
                record[f"{node}/update_ratio"] = float(result)
                continue
            request = by_key[key]
            for stat, number in _split(request, result):
                record[f"{node}/param_{stat}"] = number
        taps: Taps = found.gradients.fetch()
        labels = label_results(self._gradient_requests, taps.sites)
        record |= {r.name: r.number for r in read_numbers(labels, taps.grads, taps.valid)}
        return record


def _site(node: str) -> Site:
    return Site(node, kind="param")


def _reducer(entry: Entry) -> Reducer:
    assert entry.reduction is not None
    return entry.reduction.reducer


def _numbered(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Number the entries of each parameter as its first, second, ... gradient."""
    calls: dict[tuple[str, Any], list[Any]] = {}
    for entry in entries:
        if entry.recomputed:  # a part of a second derivative
            continue
        known = calls.setdefault((entry.site.path, _reducer(entry)), [])
        known.append(entry.call)
        yield entry._replace(site=dataclasses.replace(entry.site, call=len(known) - 1))


def _alike(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Group the entries that have one gradient number and the same loops."""
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.site.call, entry.lead, entry.loops), []).append(entry)
    yield from groups.values()


def _types(state: Iterable[Any]) -> list[Any]:
    return [(x.shape, x.dtype) for x in state]


def _merged(entries: Sequence[Entry]) -> Entry | None:
    """Merge the entries of several parameters; return None if the reducer keeps them apart."""
    first = entries[0]
    reduction = first.reduction
    assert reduction is not None
    if any(_types(e.state) != _types(first.state) for e in entries) or reduction.mapped:
        return None
    if len(entries) > 1 and not reduction.reducer.over_maps:
        return None
    states = [reduction.masked(e.state, e.valid) for e in entries]
    state = functools.reduce(lambda a, b: reduction.combine(a, b, first.lead), states)
    some = [e.valid for e in entries if e.valid is not None]
    valid = functools.reduce(jnp.maximum, some) if len(some) == len(entries) else None
    return first._replace(value=tuple(state), valid=valid)


def _state_of(reducer: Reducer, arrays: Sequence[Value]) -> Any:
    """Reduce some arrays to one state; return None if the reducer does not suit them."""
    if not all(reducer.takes(x.dtype) for x in arrays):
        return None
    if len(arrays) > 1 and not reducer.over_maps:
        return None
    states = [reducer.see(x) for x in arrays]
    types = [_types(jax.tree.leaves(state)) for state in states]
    if any(other != types[0] for other in types):
        return None
    return functools.reduce(reducer.combine, states)


def _split(request: StatisticRequest, result: PyTree) -> Iterator[tuple[str, Number]]:
    for keys, leaf in pytrees.leaves_with_path(result):
        name = leaf_name(keys)
        stat = f"{request.stat}.{name}" if name else request.stat
        yield from split_statistics(request.reducer, stat, leaf)


def _wide(x: Value) -> Value:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _squares(x: Value) -> Value:
    return jnp.sum(jnp.square(jnp.abs(x)))


def _warn_shared(names: Sequence[str]) -> None:
    warn_user(
        f"The gradients of {', '.join(names[:4])}{' and others' if len(names) > 4 else ''} are not "
        "recorded: one jitted function computes all of them, so tapax cannot tell them apart. "
        "Remove that jit, since the step is jitted as a whole, or differentiate each in a "
        "separate function."
    )


def _donated(jaxpr: Any) -> set[int]:
    """Find the arguments of a program that a jitted function in it donates."""
    inner = _jax.open_jaxpr(jaxpr)
    places = {v: i for i, v in enumerate(inner.invars)}
    given = (
        v
        for eqn in inner.eqns
        for v in itertools.compress(eqn.invars, eqn.params.get("donated_invars", ()))
        if not isinstance(v, _jax.Literal)
    )
    return {places[v] for v in given if v in places}
