"""Surveys, which find the chosen sites of a traced program before a transform changes them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tapax._calling.collect import warn_of_missing
from tapax._calling.program import TracedCall
from tapax._jax import Value, typed, varying_axes
from tapax._marks.marked_jaxprs import reaching
from tapax._marks.tap import split_shape
from tapax._sites import Site, SiteError
from tapax._walk.changes import Around, Key
from tapax._walk.interpreter import Interpreter, WalkHooks
from tapax._walk.plan import Plan, Reading
from tapax._walk.recorder import MetTap
from tapax._walk.walk import Walk


@dataclasses.dataclass(frozen=True)
class Spot:
    """A site at its place in the program.

    - `site`: the site, with the shape that a capture returns.
    - `around`: the loops and mesh axes around it.
    - `mapped`: the sizes of its batch axes.
    - `own`: the type of the value as it was marked.
    - `mesh`: the mesh of the shard_map around it.
    - `readings`: the results that the plan keeps of it.
    - `level`: the level of the innermost derivative, if it is a gradient.
    - `reaches`: whether results of the program depend on it.
    - `spec`: the mesh axes over which each axis of `site` is divided, where its type tells.
    - `shield`: the function around it, in words, if no derivative from outside enters it.
    """

    key: Key
    site: Site
    uid: int
    around: tuple[Around, ...]
    mapped: tuple[int, ...]
    own: Any
    mesh: Any
    readings: tuple[Reading, ...]
    level: int | None
    branches: bool
    reaches: bool
    spec: tuple[Any, ...]
    shield: str

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths of the loops and mesh axes for which a captured value has an axis."""
        return tuple(i for i, a in enumerate(self.around) if a.size is not None)

    @property
    def loops(self) -> list[int]:
        """The depths of the loops around the site, innermost first."""
        return [i for i, a in reversed([*enumerate(self.around)]) if a.is_loop]

    @property
    def loop(self) -> int | None:
        """The depth of the innermost loop."""
        return next(iter(self.loops), None)

    def check_step(self, step: int, loop: int | None) -> None:
        """Raise unless there is a loop at depth `loop` with an iteration `step`."""
        if loop is None:
            raise SiteError(
                f"`step` was given for the {self.site.described}, which is in no loop. Leave it "
                "out."
            )
        length = self.around[loop].size
        low = 0 if length is None else -length
        if step < low or (length is not None and step >= length):
            has = f"has {length} iterations" if length is not None else "counts from 0"
            raise SiteError(
                f"step={step} was given for the {self.site.described}, but its loop {has}."
            )


class SurveyHooks(WalkHooks):
    """Hooks that record the places of sites instead of their values."""

    def __init__(self, reached: frozenset[int]):
        self.spots: dict[Key, Spot] = {}
        self._reached = reached

    def record(self, walk: Interpreter, tap: MetTap) -> None:
        eqn, call, grad = tap.eqn, tap.call, tap.grad
        x = tap.values[0]
        site, readings = walk.chosen(eqn, call, grad=grad)
        if not readings:
            return
        mapped, own = split_shape(eqn)
        # A captured value has no axis for a mesh axis over which the value does not vary.
        varying = varying_axes(jax.typeof(x))
        around = tuple(
            a if a.is_loop or a.unchecked or a.name in varying else a._replace(size=None)
            for a in walk.around
        )
        sizes = (a.size for a in around if a.size is not None)
        named = tuple(str(a) for a in around if a.is_loop or a.size is not None)
        site = dataclasses.replace(
            site, call=call.number, shape=(*sizes, *mapped, *own), loops=named
        )
        key = Key("grad" if grad else "value", call.name)
        reaches = call.mark.uid in self._reached
        branches = bool(call.branches)
        own = jax.ShapeDtypeStruct(own, x.dtype)
        level = eqn.params["level"] if grad else None
        where = around, mapped, own, walk.mesh, tuple(readings), level, branches, reaches
        spec = _spec_of(x, eqn.params["axes"], around)
        spot = Spot(key, site, call.mark.uid, *where, spec, walk.shield)
        known = self.spots.setdefault(key, spot)
        if level is not None and known.level is not None and level < known.level:
            self.spots[key] = spot


def _spec_of(x: Value, axes: tuple[int, ...], around: Sequence[Around]) -> tuple[Any, ...]:
    """Return the mesh axes over which the captured value is divided."""
    aval: Any = jax.typeof(x)
    spec = (*aval.sharding.spec, *(None for _ in range(aval.ndim - len(aval.sharding.spec))))
    lead = (None if a.is_loop else a.name for a in around if a.size is not None)
    rest = (part for i, part in enumerate(spec) if i not in axes)
    return (*lead, *(spec[a] for a in axes), *rest)


def survey(call: TracedCall, plan: Plan, results: Sequence[int] | None = None) -> list[Spot]:
    """Find the sites that a plan chooses; raise if a selection picks nothing.

    `results` are the numbers of the results for `Spot.reaches`; None means all results.
    """
    hooks = SurveyHooks(reaching(call.program.jaxpr, results))
    return survey_with(hooks, call, plan)


def survey_with(hooks: SurveyHooks, call: TracedCall, plan: Plan) -> list[Spot]:
    """Find the sites that a plan chooses, as `hooks` record them."""
    walk = Walk(plan, hooks=hooks)
    typed.eval_shape(lambda *arrays: call.program.run(walk, arrays), *call.arrays)
    spots = list(hooks.spots.values())
    found = [[s.site for s in spots if s.key.of == of] for of in ("value", "grad")]
    plan.verify(walk.sites, found[0], found[1], walk.lost | walk.missing)
    warn_of_missing(walk)
    return spots


def program_order(
    spots: Sequence[Spot],
) -> Callable[[Spot, tuple[int, ...]], tuple[int, tuple[int, ...], int]]:
    """Make a sort key for results of sites: a function of a spot and the numbers of its layers.

    Results of single layers come in the order of the layers, as if the program had no loop.
    """
    order = {spot.key: i for i, spot in enumerate(spots)}
    firsts: dict[str, int] = {}
    for i, spot in enumerate(spots):
        if spot.site.layers:
            firsts.setdefault(spot.site.layers[-1].path, i)

    def place(spot: Spot, layer: tuple[int, ...]) -> tuple[int, tuple[int, ...], int]:
        here = order[spot.key]
        return firsts[spot.site.layers[-1].path] if layer else here, layer, here

    return place
