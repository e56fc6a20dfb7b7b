"""Traces that diagonal rules keep, and how they go from one step to the next."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from tapax._frameworks.recurrent_cells import HiddenError
from tapax.hidden.online._evaluated_step import EvaluatedStep
from tapax.hidden.online._flat_step import FlatStep, trace_flat_step
from tapax.hidden.online._influence_layouts import InfluenceLayout, choose_layout
from tapax.hidden.online._learner import ShapeCache, check_loss, widen_dtype
from tapax.hidden.online._unit_groups import (
    INDIRECT,
    SIGNALS,
    DrivingWeight,
    UnitGroup,
    find_unit_groups,
)

Trace = dict[int, Any]
"""The influence of a weight on states, by their numbers."""


def plan_diagonal_rule(step: Any, loss: Any, indirect: Any, signal: Any = "new") -> ShapeCache:
    """Plans a diagonal rule: the flat step and its groups, for each kind of arguments."""
    check_loss(loss)
    for name, given, known in (("indirect", indirect, INDIRECT), ("signal", signal, SIGNALS)):
        if given not in known:
            expected = ", ".join(map(repr, known))
            raise HiddenError(f"`{name}` is one of {expected}, but is {given!r}.")

    def make(*args: Any) -> Any:
        program = trace_flat_step(*args)
        return (program, find_unit_groups(program, indirect, signal)), program.is_reusable

    return ShapeCache(step, make)


def list_traced(
    program: FlatStep, group: UnitGroup
) -> Iterator[tuple[int, DrivingWeight, InfluenceLayout]]:
    """Lists the weights of a group that have a trace, with their indices and layouts."""
    for i, source in enumerate(group.sources):
        if source.traced:
            yield i, source, choose_layout(program, group, source)


def make_zeros(program: FlatStep, lay: InfluenceLayout, states: Iterable[int]) -> Trace:
    """Makes the trace of a weight without any influence yet."""
    return {k: jnp.zeros(lay.shape, widen_dtype(program.states[k].dtype)) for k in states}


def list_kept(group: UnitGroup, source: DrivingWeight) -> tuple[int, ...]:
    """Lists the states that a weight reaches and whose traces the next step needs."""
    return tuple(k for k in group.kept if k in source.states)


def advance(
    now: EvaluatedStep,
    group: UnitGroup,
    index: int,
    lay: InfluenceLayout,
    carried: Mapping[Any, Any],
    driven: Mapping[int, Any],
    old: Trace,
    states: Iterable[int],
) -> Trace:
    """Takes a trace one step on: the old influence, passed on, and the new one."""
    source = group.sources[index]
    data = None if source.dot is None else now.data[source.dot.at]
    made = {}
    for k in states:
        if source.units is None:
            total = now.differentiate_weight(group, source, k)
        else:
            total = lay.fresh(
                driven[k], data if data is None else data.astype(widen_dtype(data.dtype))
            )
        for j, eps in old.items():
            if (k, j) in group.carries:
                total = total + lay.lift(carried[k, j]) * eps
        made[k] = total.astype(widen_dtype(now.olds[k].dtype))
    return made


def pull_back_signal(
    group: UnitGroup, signal: Mapping[int, Any], carried: Any, beside: Any
) -> Trace:
    """Pulls the signal back to the old states, through the units themselves and beside them."""
    made = {}
    for j in group.kept:
        total = beside[j]
        for k in group.states:
            if (k, j) in group.carries:
                total = total + signal[k] * carried[k, j]
        made[j] = total
    return made


def compute_instant(
    now: EvaluatedStep, group: UnitGroup, source: DrivingWeight, signal: Mapping[int, Any]
) -> Any:
    """Computes the gradient by a weight without a trace, from its influence within this step."""
    return now.pull_back(group, source)(dict(signal))


def add_gradient(weight: Any, more: Any) -> Any:
    """Adds to the gradient by a weight, in its dtype."""
    return weight + more.astype(weight.dtype)
