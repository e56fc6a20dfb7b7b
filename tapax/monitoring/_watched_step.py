"""The copy of a step that a monitor runs on the calls that it watches."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, NamedTuple

from tapax._calling.collect import collect
from tapax._calling.program import TracedCall
from tapax._calling.transform import Transform
from tapax._jax import PyTree
from tapax._marks.operations import internal_operations
from tapax._walk.plan import Plan
from tapax._walk.walk import Walk
from tapax.monitoring._packed_arrays import PackedArrays
from tapax.monitoring._parameters import (
    KnownParameters,
    ParameterCapture,
    ParameterPlan,
    ParameterWatch,
)


class Captured(NamedTuple):
    """The results of the copy of a step: statistics of sites, and of gradients of parameters."""

    statistics: PackedArrays
    """The packed taps."""
    parameters: ParameterCapture | None


def make_transform(plan: Plan, parameters: ParameterWatch | None) -> Transform:
    """Make the transform that captures the selected sites and the gradients of parameters."""
    if parameters is None:
        return _WatchedStep(plan)
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    return _WatchedStep(ParameterPlan(**fields), parameters)


@dataclasses.dataclass(frozen=True)
class _WatchedStep(Transform):
    """A transform that computes the statistics that the plan selects, and nothing else."""

    plan: Plan
    parameters: ParameterWatch | None = None
    stateless = True

    @property
    def is_reusable(self) -> bool:
        return self.parameters is None  # the names of parameters depend on the arguments

    def prepare(self, call: TracedCall) -> KnownParameters | None:
        effects = {str(effect) for effect in call.program.jaxpr.effects}
        if effects & {"IO", "OrderedIO"}:
            warnings.warn(
                "The monitored step contains an io_callback, which runs twice on every "
                "watched call. If it reads data or counts, the run differs from one without a "
                "monitor. Move the callback out of the step.",
                stacklevel=10,
            )
        return None if self.parameters is None else self.parameters.prepare(call)

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        program = call.program.only(lambda out: ())
        if self.parameters is None:
            _, taps = program.walk(self.plan, call.arrays)
            with internal_operations():
                return None, Captured(PackedArrays.of(taps), None)
        walk = Walk(self.plan, hooks=self.parameters.hooks(prepared))
        program.run(walk, call.arrays)
        with internal_operations():
            entries = [e for e in walk.entries if e.site.kind == "param"]
            walk.entries = [e for e in walk.entries if e.site.kind != "param"]
            gradients = self.parameters.gradients(prepared, entries)
            return None, Captured(PackedArrays.of(collect(walk, warn=False)), gradients)

    def finish(self, out: PyTree, extra: PyTree) -> Any:
        return extra
