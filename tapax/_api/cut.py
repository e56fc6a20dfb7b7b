"""Cuts: a function up to one of its sites, and the function from there on.

>>> import jax.numpy as jnp, tapax
>>> def f(x):
...     h = tapax.sow(jnp.sin(x), "h")
...     return jnp.exp(h)
>>> h = tapax.prefix(f, "h")(1.0)
>>> bool(tapax.suffix(f, "h")(h, 1.0) == f(1.0))
True

What lies on the other side of the cut is not computed. Values that go around the site, such as a
residual stream around one layer, are computed from the arguments, which is why `suffix` takes them.

A site in a loop is passed once for every iteration: `tapax.at("h", step=3)` cuts there. The scan is
taken apart into the iterations before, that one, and those after it.

Objects that the function changes, such as the statistics of a model, stay as they are.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._api.change_builder import ChangeBuilder
from tapax._calling.program import TracedCall
from tapax._calling.survey import Spot, survey
from tapax._calling.transform import Transform, TransformedFunction, check_function, transformed
from tapax._jax import Equation, PyTree, Value
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._jaxpr.restage import Scan
from tapax._marks.marked_jaxprs import Uids, strip
from tapax._marks.operations import internal_operations
from tapax._sites import At, OneSite, Selection, SiteError, as_array, check, flatten, show
from tapax._walk.changes import Part
from tapax._walk.interpreter import Interpreter, WalkHooks
from tapax._walk.plan import Plan
from tapax._walk.walk import Walk

P = ParamSpec("P")


def prefix(fn: Callable[P, Any], site: Selection, *, modules: Any = True) -> Callable[P, Any]:
    """A function that returns the value of a site of `fn`, and computes nothing after it."""
    check_function(fn, "prefix")
    return transformed(fn, _PrefixTransform(_cut(site, modules)))


def suffix(fn: Callable[..., Any], site: Selection, *, modules: Any = True) -> Callable[..., Any]:
    """A function of the value of a site of `fn`, and of its arguments, that returns what `fn` does.

    It computes nothing that only leads to the site.
    """
    check_function(fn, "suffix")
    call = TransformedFunction(fn, _SuffixTransform(_cut(site, modules)))

    @functools.wraps(fn, updated=())
    def after(value: PyTree, *args: Any, **kwargs: Any) -> Any:
        return call(as_array(value, f"What {site!r} is to start with"), args, kwargs)

    return after


def _cut(site: Any, modules: Any) -> Plan:
    """Plan a cut: it should pick one site, and perhaps one iteration."""
    for part in flatten(check(site, "site")):
        if isinstance(part, At) and (part.index is not None or not isinstance(part.step, int)):
            what = f"index={part.index}" if part.index is not None else f"step={part.step}"
            raise SiteError(
                f"A cut is at one iteration, whose number is known when the function is traced, "
                f"and at a whole value, but tapax.{part} has {what}."
            )
    return Plan.make(site, None, modules=modules, replacing=True, names=("site", ""))


@dataclasses.dataclass(frozen=True)
class _CutTransform(Transform):
    """Cuts a program at a site."""

    plan: Plan
    stateless = True

    def prepare(self, call: TracedCall) -> Any:
        spot = self._only(survey(call, self.plan))
        steps = spot.readings[0].steps
        if len(steps) > len(spot.loops):
            spot.check_step(0, None)
        plan = dataclasses.replace(self.plan, values=OneSite(spot.site.name))
        # Peeling a loop leaves the depths of those around it as they are.
        for depth, step in zip(spot.loops, steps, strict=False):
            if step is not None:
                call = _split(call, spot, depth, step)
                spot = self._only(survey(call, plan))
        if any(a.is_loop for a in spot.around):
            loops = ", ".join(str(a) for a in spot.around if a.is_loop)
            raise SiteError(
                f"The {spot.site.described}, is in the loops {loops}, so the program crosses it "
                f"more than once. Cut at one iteration of a scan: tapax.at({spot.site.name!r}, "
                "step=0)."
            )
        if spot.branches:
            raise SiteError(
                f"The {spot.site.described}, is in a branch, which may not run, so the function "
                "cannot be cut there. Mark a value outside of the conditional."
            )
        return call.program, spot

    def _only(self, spots: Sequence[Spot]) -> Spot:
        if len(spots) == 1 and len(spots[0].readings) == 1:
            return spots[0]
        asked = show(self.plan.values)
        if not spots:
            raise SiteError(f"A cut was asked for at {asked}, but it picks no site.")
        found = [(spot.site, reading.path) for spot in spots for reading in spot.readings]
        names = ", ".join(repr(dataclasses.replace(s, path=path).name) for s, path in found[:5])
        site = spots[0].site
        more = " and more" if len(found) > 5 else ""
        raise SiteError(
            f"A cut is at one site, but {asked} picks {len(found)}, so the program "
            f"crosses it more than once: {names}{more}. Name one of them: the first, marked at "
            f"{site.source}, is {f'{site.path}@{site.call}'!r}."
        )


class _PrefixTransform(_CutTransform):
    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        program, spot = prepared
        name = spot.site.name
        plan = dataclasses.replace(self.plan, values=OneSite(name))

        def before(*arrays: Value) -> Any:
            return program.walk(plan, arrays)[1].values[name]

        return None, evaluate_needed(before, call.arrays)

    def finish(self, out: PyTree, extra: PyTree) -> Any:
        return extra


class _SuffixTransform(_CutTransform):
    def prepare(self, call: TracedCall) -> Any:
        program, spot = super().prepare(call)
        if not spot.reaches:
            raise SiteError(
                f"The {spot.site.described}, is where the function is to start, but its value "
                "never reaches a result. Use what tapax.sow returned in the place of the value "
                "that it was given."
            )
        shape, dtype = jnp.shape(call.operands), jnp.result_type(call.operands)
        if shape != spot.site.shape or dtype != spot.own.dtype:
            raise SiteError(
                f"The {spot.site.described}, was given a value of type {dtype}{list(shape)}, but "
                f"its values are of type {spot.own.dtype}{list(spot.site.shape)}."
            )
        return program, spot

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        program, spot = prepared

        def after(value: PyTree, *arrays: Value) -> Any:
            builder = ChangeBuilder()
            part = Part(value, spot.depths, len(spot.mapped))
            builder.change(spot, lambda x, counters, part: part, [part])
            return TracedCall(program, arrays).run_changed(builder.changes())

        return evaluate_needed(after, [call.operands, *call.arrays]), ()


def evaluate_needed(fn: Callable[..., Any], arrays: Sequence[Any]) -> Any:
    """Evaluate a function without the operations that its results do not need."""
    made, shape = jax.make_jaxpr(fn, return_shape=True)(*arrays)
    with internal_operations():
        outs = _jax.as_function(_jax.dce(made))(*arrays)
    return jax.tree.unflatten(jax.tree.structure(shape), outs)


def _split(call: TracedCall, spot: Spot, depth: int, step: int) -> TracedCall:
    """The call with one iteration of the loop at a depth around a site written out."""
    if spot.around[depth].kind is not Kind.SCAN:
        raise SiteError(
            f"The {spot.site.described}, is in a while loop: how often that runs is not known "
            "beforehand, so the function cannot be cut at one of its iterations."
        )
    spot.check_step(step, depth)
    walk = Walk(Plan(None, None), hooks=_PeelHooks(spot.uid, depth, step))
    walk.nested = True
    made = jax.make_jaxpr(lambda *arrays: call.program.run(walk, arrays))(*call.arrays)
    return dataclasses.replace(call, program=dataclasses.replace(call.program, jaxpr=made))


class _PeelHooks(WalkHooks):
    """Leaves taps where they are, and takes one iteration out of the scan around a site."""

    def __init__(self, uid: int, depth: int, step: int):
        self._uid, self._depth, self._step = uid, depth, step
        self._uids = Uids()

    def equation(self, walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
        if kind_of(eqn) is not Kind.SCAN or len(walk.around) != self._depth:
            return walk.evaluate_equation(eqn, args)
        loop = Scan.of(eqn, walk.materialize(eqn.invars, args))
        if self._uid not in self._uids.within(loop.body):
            return walk.evaluate_equation(eqn, args)

        def once(values: list[Value]) -> tuple[list[Value], None]:
            results = walk.run(loop.body, values)
            return walk.materialize(_jax.open_jaxpr(loop.body).outvars, results), None

        return loop.peel(self._step % loop.length, _jax.as_function(strip(loop.body)), once)[0]
