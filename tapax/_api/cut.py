"""Cuts: `prefix` runs a function up to one of its sites, `suffix` from that site on.

A cut at one iteration of a scan splits the scan into the iterations before it, that iteration, and
the iterations after it.
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
from tapax._jax import Equation, Jaxpr, PyTree, Value
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._jaxpr.restage import Scan
from tapax._jaxpr.rewrite import drop_after_results
from tapax._marks.marked_jaxprs import Uids, strip
from tapax._marks.operations import internal_operations
from tapax._sites import At, OneSite, Selection, SiteError, as_array, check, flatten, show
from tapax._walk.changes import Part
from tapax._walk.interpreter import Interpreter, WalkHooks
from tapax._walk.plan import Plan
from tapax._walk.walk import Walk

P = ParamSpec("P")


def prefix(fn: Callable[P, Any], site: Selection, *, modules: Any = True) -> Callable[P, Any]:
    """Make a function that returns the value of a site of `fn`, and computes nothing after it.

    Objects that `fn` changes, such as the statistics of a model, stay as they are.

    Args:
        fn: The function to cut, jitted or not.
        site: Selects the site. It must be one call, outside of branches and loops;
            `tapax.at("h", step=3)` selects one iteration of a scan.
        modules: The modules whose results are sites, as in `tapax.capture`.

    Returns:
        A function of the arguments of `fn` that returns the value of the site.

    Raises:
        TypeError: If `fn` is not a function.
        SiteError: If `site` selects a part of a value, or a traced iteration. When the returned
            function is called: if `site` does not pick exactly one site, or if the site is in a
            branch, in a while loop, or in a scan without a `step`.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> def f(x):
        ...     h = tapax.sow(jnp.sin(x), "h")
        ...     return jnp.exp(h)
        >>> float(tapax.prefix(f, "h")(jnp.pi / 2))
        1.0
        >>> def powers(x):
        ...     double = lambda x, _: (2 * tapax.sow(x, "x"), None)
        ...     return jax.lax.scan(double, x, length=10)[0]
        >>> float(tapax.prefix(powers, tapax.at("x", step=3))(1.5))
        12.0
    """
    check_function(fn, "prefix")
    return transformed(fn, _PrefixTransform(_cut(site, modules)))


def suffix(fn: Callable[..., Any], site: Selection, *, modules: Any = True) -> Callable[..., Any]:
    """Make a function that starts from the value of a site of `fn` and returns the result of `fn`.

    It skips every operation that only leads to the site. It takes the arguments of `fn` too,
    because values that bypass the site, such as a residual stream around one layer, are computed
    from them. Objects that `fn` changes, such as the statistics of a model, stay as they are.

    Args:
        fn: The function to cut, jitted or not.
        site: Selects the site, as in `tapax.prefix`.
        modules: The modules whose results are sites, as in `tapax.capture`.

    Returns:
        A function of the value of the site, followed by the arguments of `fn`. It returns the
        result of `fn`.

    Raises:
        TypeError: If `fn` is not a function, or, when the returned function is called, if the value
            is not an array.
        SiteError: As for `tapax.prefix`. Also when the returned function is called: if the value
            differs in shape or dtype from the values of the site, or if the site never reaches a
            result of `fn`.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> def f(x):
        ...     h = tapax.sow(jnp.sin(x), "h")
        ...     return jnp.exp(h) + x
        >>> rest = tapax.suffix(f, "h")
        >>> float(rest(0.0, 2.0))  # exp(0) + 2
        3.0
        >>> h = tapax.prefix(f, "h")(2.0)
        >>> bool(rest(h, 2.0) == f(2.0))
        True
    """
    check_function(fn, "suffix")
    call = TransformedFunction(fn, _SuffixTransform(_cut(site, modules)))

    @functools.wraps(fn, updated=())
    def after(value: PyTree, /, *args: Any, **kwargs: Any) -> Any:
        return call(as_array(value, f"The value of {site!r}"), args, kwargs)

    return after


def _cut(site: Any, modules: Any) -> Plan:
    """Plan a cut at the site, or at one iteration of it; refuse a part of a value."""
    for part in flatten(check(site, "site")):
        if isinstance(part, At) and (part.index is not None or not isinstance(part.step, int)):
            what = f"index={part.index}" if part.index is not None else f"step={part.step}"
            raise SiteError(
                f"tapax.{part} has {what}, but a cut needs a whole value, in one iteration whose "
                "number is known when the function is traced. Give `step` as an integer, and leave "
                "`index` out."
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
        # Peeling a loop does not change the depths of the loops around it.
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
            raise SiteError(
                f"A cut needs one site, but {asked} picks none. tapax.sites(fn)(*args) lists them."
            )
        found = [(spot.site, reading.path) for spot in spots for reading in spot.readings]
        names = ", ".join(repr(dataclasses.replace(s, path=path).name) for s, path in found[:5])
        site = spots[0].site
        more = " and more" if len(found) > 5 else ""
        raise SiteError(
            f"A cut needs one site, but {asked} picks {len(found)}: {names}{more}. Name one of "
            f"them: the first, marked at {site.source}, is {f'{site.path}@{site.call}'!r}."
        )


class _PrefixTransform(_CutTransform):
    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        program, spot = prepared
        name = spot.site.name
        plan = dataclasses.replace(self.plan, values=OneSite(name))

        def before(*arrays: Value) -> Any:
            return program.walk(plan, arrays)[1].values[name]

        return None, evaluate_before_end(before, call.arrays)

    def finish(self, out: PyTree, extra: PyTree) -> Any:
        return extra


class _SuffixTransform(_CutTransform):
    def prepare(self, call: TracedCall) -> Any:
        program, spot = super().prepare(call)
        if not spot.reaches:
            raise SiteError(
                f"The function cannot start at the {spot.site.described}, because its value never "
                "reaches a result. Use the value that tapax.sow returns, instead of the value "
                "passed to it."
            )
        shape, dtype = jnp.shape(call.operands), jnp.result_type(call.operands)
        if shape != spot.site.shape or dtype != spot.own.dtype:
            raise SiteError(
                f"The first argument is {dtype}{list(shape)}, but the values of the "
                f"{spot.site.described}, are {spot.own.dtype}{list(spot.site.shape)}. Pass a value "
                "of that shape and dtype."
            )
        return program, spot

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        program, spot = prepared

        def after(value: PyTree, *arrays: Value) -> Any:
            builder = ChangeBuilder()
            part = Part(value, spot.depths, len(spot.mapped))
            builder.change(spot, lambda x, counters, part: part, [part])
            return TracedCall(program, arrays).run_changed(builder.changes())

        return _evaluate(after, [call.operands, *call.arrays], _jax.dce), ()


def evaluate_before_end(fn: Callable[..., Any], arrays: Sequence[Any]) -> Any:
    """Evaluate a function until its results are known; later effects, such as prints, do not run.

    Leave out operations that neither the results nor earlier effects need.
    """

    def shorten(jaxpr: Jaxpr) -> Jaxpr:
        return _jax.dce(drop_after_results(_jax.dce(jaxpr)))

    return _evaluate(fn, arrays, shorten)


def _evaluate(
    fn: Callable[..., Any], arrays: Sequence[Any], shorten: Callable[[Jaxpr], Jaxpr]
) -> Any:
    """Evaluate a function, whose program `shorten` makes shorter."""
    made, shape = jax.make_jaxpr(fn, return_shape=True)(*arrays)
    with internal_operations():
        outs = _jax.as_function(shorten(made))(*arrays)
    return jax.tree.unflatten(jax.tree.structure(shape), outs)


def _split(call: TracedCall, spot: Spot, depth: int, step: int) -> TracedCall:
    """Write one iteration of the scan at `depth` around a site out of the loop."""
    if spot.around[depth].kind is not Kind.SCAN:
        raise SiteError(
            f"The {spot.site.described}, is in a while loop, and the number of its iterations is "
            "not known in advance, so the function cannot be cut at one of them. Use a scan."
        )
    spot.check_step(step, depth)
    walk = Walk(Plan(None, None), hooks=_PeelHooks(spot.uid, depth, step))
    walk.nested = True
    made = jax.make_jaxpr(lambda *arrays: call.program.run(walk, arrays))(*call.arrays)
    return dataclasses.replace(call, program=dataclasses.replace(call.program, jaxpr=made))


class _PeelHooks(WalkHooks):
    """Hooks that peel one iteration off the scan around a site; all taps stay in the program."""

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
