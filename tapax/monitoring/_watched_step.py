"""The program that a monitor runs on the calls that it watches: the step, or a copy of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tapax._calling.collect import collect
from tapax._calling.program import Program, TracedCall
from tapax._calling.transform import Transform, TransformedFunction
from tapax._jax import PyTree
from tapax._marks.operations import internal_operations
from tapax._marks.user_warning import warn_user
from tapax._results import Taps
from tapax._walk.plan import Plan
from tapax._walk.walk import Walk
from tapax.monitoring._packed_arrays import PackedArrays
from tapax.monitoring._parameter_updates import UpdatedResult, with_updates
from tapax.monitoring._parameters import (
    KnownParameters,
    ParameterCapture,
    ParameterPlan,
    ParameterWatch,
)


class Captured(NamedTuple):
    """The statistics of a watched call: those of sites, and those of parameters."""

    statistics: PackedArrays
    """The packed taps."""
    parameters: ParameterCapture | None


def watched_step(
    step: Callable[..., Any], plan: Plan, parameters: ParameterWatch | None, *, exact: bool
) -> TransformedFunction:
    """Make the function of a watched call, which returns a result and a `Captured`.

    If `exact`, it is a copy of the step: it computes the statistics alone, changes nothing, and
    returns None as the result. Otherwise it is the step, which also computes the statistics.
    """
    if parameters is None:
        return TransformedFunction(step, _WatchedStep(plan, None, stateless=exact))
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    transform = _WatchedStep(ParameterPlan(**fields), parameters, stateless=exact)
    return TransformedFunction(step if exact else with_updates(step), transform)


@dataclasses.dataclass(frozen=True)
class _WatchedStep(Transform):
    """A transform that computes the statistics that the plan selects.

    If it is `stateless`, the program has no other results.
    """

    plan: Plan
    parameters: ParameterWatch | None
    stateless: bool

    @property
    def is_reusable(self) -> bool:
        return self.parameters is None  # the names of parameters depend on the arguments

    def prepare(self, call: TracedCall) -> KnownParameters | None:
        effects = {str(effect) for effect in call.program.jaxpr.effects}
        if self.stateless and effects & {"IO", "OrderedIO"}:
            warn_user(
                "The monitored step contains an io_callback, which runs twice on every "
                "watched call. If it reads data or counts, the run differs from one without a "
                "monitor. Move the callback out of the step, or pass `exact=False`."
            )
        if self.parameters is None:
            return None
        return self.parameters.prepare(call, updates=not self.stateless)

    def run(self, call: TracedCall, prepared: KnownParameters | None) -> Any:
        program = call.program.only(lambda out: ()) if self.stateless else call.program
        if self.parameters is None or prepared is None:
            outs, taps = program.walk(self.plan, call.arrays)
            parameters = None
        else:
            outs, taps, parameters = self._watch_parameters(program, call.arrays, prepared)
        with internal_operations():
            captured = Captured(PackedArrays.of(taps), parameters)
        return None if self.stateless else outs, captured

    def _watch_parameters(
        self, program: Program, arrays: Sequence[Any], known: KnownParameters
    ) -> tuple[list[Any], Taps, ParameterCapture]:
        """Evaluate the program; return its results, the taps, and statistics of parameters."""
        assert self.parameters is not None
        walk = Walk(self.plan, hooks=self.parameters.hooks(known))
        outs = program.run(walk, arrays)
        with internal_operations():
            entries = [e for e in walk.entries if e.site.kind == "param"]
            walk.entries = [e for e in walk.entries if e.site.kind != "param"]
            found = self.parameters.gradients(known, entries)
            if known.updates is not None:
                found, outs = self.parameters.measure_inside(found, arrays, outs)
            return outs, collect(walk, warn=False), found

    def finish(self, out: PyTree, extra: Captured) -> tuple[Any, Captured]:
        return out.out if isinstance(out, UpdatedResult) else out, extra
