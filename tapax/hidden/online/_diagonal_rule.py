"""Diagonal rules of online learning: their traces, and the update that they share.

Rules differ in the trace of a weight, in the signal that reaches a group of units, and in the
gradient that they compute from the two: `make_diagonal_rule` makes a rule from functions for these.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tapax._frameworks.recurrent_cells import HiddenError
from tapax._jax import PyTree
from tapax.hidden.online import _learner, _unit_groups
from tapax.hidden.online._evaluated_step import EvaluatedStep, evaluate_step
from tapax.hidden.online._flat_step import FlatStep
from tapax.hidden.online._influence_layouts import FullLayout, InfluenceLayout, choose_layout
from tapax.hidden.online._learner import OnlineGradients, OnlineMemory, OnlineRule, widen_dtype
from tapax.hidden.online._unit_groups import DrivingWeight, UnitGroup

Trace = dict[int, Any]
"""The influence of a weight on states, by their numbers."""


@dataclasses.dataclass(frozen=True, eq=False)
class TracedWeight:
    """A weight with a trace, and the layout of its influence on the units of a group."""

    program: FlatStep
    group: UnitGroup
    source: DrivingWeight
    layout: InfluenceLayout

    def make_zeros(self, states: Iterable[int]) -> Trace:
        """Make a zero trace for some states."""
        dtypes = {k: widen_dtype(self.program.states[k].dtype) for k in states}
        return {k: jnp.zeros(self.layout.shape, dtype) for k, dtype in dtypes.items()}

    def start(self) -> Trace:
        """Make the first trace, for the states that the weight reaches and the next step needs."""
        return self.make_zeros(k for k in self.group.kept if k in self.source.states)


@dataclasses.dataclass(frozen=True, eq=False)
class EvaluatedGroup:
    """A group of an evaluated step, the memory before that step, and derivatives of the units.

    `carried` contains the derivatives with respect to the old values of the units themselves,
    `driven` those with respect to the product or the weight that drives the units.
    """

    now: EvaluatedStep
    memory: OnlineMemory
    group: UnitGroup
    carried: Mapping[tuple[int, int], Any]
    driven: Mapping[DrivingWeight, Mapping[int, Any]]

    def advance(self, weight: TracedWeight, old: Trace, states: Iterable[int]) -> Trace:
        """Advance a trace by one step: propagate the old influence, and add the new one."""
        source, layout = weight.source, weight.layout
        data = None if source.dot is None else self.now.data[source.dot.at]
        data = data if data is None else data.astype(widen_dtype(data.dtype))
        made = {}
        for k in states:
            if isinstance(layout, FullLayout):
                total = self.now.differentiate_weight(self.group, source, k)
            else:
                total = layout.fresh(self.driven[source][k], data)
            for j, eps in old.items():
                if (k, j) in self.group.carries:
                    total = total + layout.lift(self.carried[k, j]) * eps
            made[k] = total.astype(widen_dtype(self.now.olds[k].dtype))
        return made


def make_diagonal_rule(
    step: Callable[..., Any],
    loss: Callable[..., Any],
    indirect: str,
    find_signal: Callable[[EvaluatedGroup], Any],
    learn: Callable[[EvaluatedGroup, TracedWeight, Any, Any], tuple[Sequence[Any], Any]],
    *,
    start_trace: Callable[[TracedWeight], Any] = TracedWeight.start,
    start_fields: Callable[[FlatStep, Sequence[UnitGroup]], dict[str, Any]] = lambda *_: {},
    signal: str = "new",
    whole: bool = False,
) -> OnlineRule:
    """Make a rule that keeps a trace for each weight of a step.

    `start_trace` makes the first trace of a weight, `start_fields` the other fields of the memory.
    `learn(here, weight, signal, trace)`, with the signal that `find_signal` finds for a group,
    returns terms of the gradient with respect to the weight, and the next trace. The rule adds the
    terms to the gradient within the step, if `whole`, or to its part that bypasses new states.
    """
    _learner.check_loss(loss)
    known = {
        "indirect": (indirect, _unit_groups.INDIRECT),
        "signal": (signal, _unit_groups.SIGNALS),
    }
    for name, (given, choices) in known.items():
        if given not in choices:
            expected = ", ".join(map(repr, choices))
            raise HiddenError(f"`{name}` must be one of {expected}, but is {given!r}.")

    def plan(program: FlatStep) -> tuple[FlatStep, Sequence[UnitGroup], list[list[TracedWeight]]]:
        groups = _unit_groups.find_unit_groups(program, indirect, signal)
        return program, groups, [_list_traced(program, group) for group in groups]

    planned = _learner.cache_by_shape(step, plan)

    def init(params: PyTree, state: PyTree, *inputs: PyTree) -> OnlineMemory:
        program, groups, weights = planned(params, state, inputs)
        traces = [list(map(start_trace, some)) for some in weights]
        return OnlineMemory(_learner.settle_dtypes(state), traces, **start_fields(program, groups))

    def update(
        memory: OnlineMemory, params: PyTree, *inputs: PyTree, target: PyTree = None
    ) -> tuple[OnlineGradients, OnlineMemory]:
        program, groups, weights = planned(params, _learner.get_state(memory), inputs)
        _learner.check_traces(memory, lambda: [list(map(start_trace, some)) for some in weights])
        now, back = evaluate_step(
            step, program, params, memory.state, inputs, loss=loss, target=target
        )
        grads = list((now.whole_gradients if whole else now.beside_gradients)[0])
        traces = []
        for group, traced, olds in zip(groups, weights, memory.traces, strict=True):
            here = EvaluatedGroup(now, memory, group, *now.differentiate_units(group))
            signal = find_signal(here)
            made = []
            for weight, old in zip(traced, olds, strict=True):
                terms, new = learn(here, weight, signal, old)
                at = weight.source.weight
                for term in terms:
                    grads[at] = grads[at] + term.astype(grads[at].dtype)
                made.append(new)
            for source in () if whole else group.sources:
                if not source.traced:
                    grads[source.weight] += now.pull_back(group, source)(signal)
            traces.append(made)
        by_params = _learner.make_grads(params, program.trained, back(grads))
        count = jax.tree.map(lambda n: n + 1, memory.count)
        memory = dataclasses.replace(memory, state=now.state, traces=traces, count=count)
        return OnlineGradients(by_params, now.loss(jax.tree.leaves(now.out)), now.out), memory

    return OnlineRule(init, update)


def _list_traced(program: FlatStep, group: UnitGroup) -> list[TracedWeight]:
    return [
        TracedWeight(program, group, source, choose_layout(program, group, source))
        for source in group.sources
        if source.traced
    ]
