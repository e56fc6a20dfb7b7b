"""A plan: the selections of a capture or edit, checked and hashable.

>>> plan = Plan.make(values="**", grads=None)
>>> plan.choose(Site("h"), grad=False)
[Reading(path='h', steps=(), index=None, by=None)]
>>> plan.choose(Site("h"), grad=True)
[]
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, cast

from jax.core import Tracer

from tapax._jax import Function, PyTree
from tapax._marks.context import MarkingPolicy, ModuleFilter, Structure
from tapax._marks.tap import Mark
from tapax._sites import (
    ASKED,
    At,
    IfAny,
    Index,
    LayerNumber,
    ModuleDepth,
    ModulesWithout,
    Reduced,
    Rule,
    Selection,
    Site,
    SiteError,
    StepSlice,
    ValueFunction,
    asked_kinds,
    check,
    find,
    flatten,
    is_exact,
    is_machinery,
    matches,
    missing_layers,
    nearest,
    rules,
    show,
    unnumbered_layer,
    wrong_type,
)
from tapax.reduce import Reducer


@dataclasses.dataclass(frozen=True)
class Reading:
    """One result to keep of a site: its path, the iterations, the part, and the reducer.

    `steps` has the requested iterations of each loop, innermost first.
    """

    path: str
    steps: tuple[Any, ...] = ()
    index: Index | None = None
    by: Reducer | ValueFunction | None = None

    @property
    def layer(self) -> tuple[int, ...]:
        """The numbers of the scanned layers in its path, outermost first."""
        return tuple(step for step in reversed(self.steps) if isinstance(step, LayerNumber))

    @property
    def is_part(self) -> bool:
        """Return whether only some entries or iterations of the value are kept."""
        return self.index is not None or any(step is not None for step in self.steps)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The values and gradients to capture, and the number of iterations of a while loop to keep.

    If the plan is `changing`, they are the values and gradients to edit; if it is `replacing`, the
    values to perturb, or those at which a cut function starts.
    """

    values: Selection
    grads: Selection
    steps: int | None = None
    modules: Selection = "**"
    policy: ModuleFilter | None = True
    changing: bool = False
    replacing: bool = False
    names: tuple[str, str] = ("values", "grads")
    """The names of the arguments with the selections, for messages."""

    @classmethod
    def make(
        cls,
        values: Any,
        grads: PyTree,
        steps: Any = None,
        modules: Any = True,
        *,
        changing: bool = False,
        replacing: bool = False,
        reducing: bool = False,
        names: tuple[str, str] = ("values", "grads"),
    ) -> Plan:
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int)):
            raise wrong_type("`steps` must be a number of iterations, but is", steps)
        if steps is not None and steps < 1:
            raise SiteError(f"`steps` must be at least 1, but is {steps}.")
        which, policy = _modules(modules)
        both = zip((values, grads), names, strict=True)
        sites = [_fixed(check(part, name, reducing=reducing)) for part, name in both]
        return cls(sites[0], sites[1], steps, which, policy, changing, replacing, names)

    def marking_policy(self, structure: Structure | None = None) -> MarkingPolicy:
        """Return what to mark for this plan, in a function with arguments of `structure`."""
        both = self.values, self.grads
        asked, of_grads = asked_kinds(both[0]) | asked_kinds(both[1]), asked_kinds(both[1])
        changes = self.changing or self.replacing
        return MarkingPolicy(
            rules=frozenset(rule for selection in both for rule in rules(selection)),
            modules=frozenset[ModuleFilter](() if self.policy is None else {self.policy}),
            asked=asked,
            structure=structure,
            changing=self.changing,
            replacing=self.replacing,
            pairs=any(r.paired for _, r in self.reducers),
            uses_weights="weights" in (asked if changes else of_grads),
        )

    @property
    def asks(self) -> bool:
        """Return whether the plan selects anything, without a restriction of `modules`."""
        parts = (*flatten(self.values), *flatten(self.grads))
        every = self.policy is True and self.modules == "**"
        return every and bool(parts)

    @property
    def over_loops(self) -> bool:
        """Return whether the plan has reducers over loops."""
        return any(reducer.over_loops for _, reducer in self.reducers)

    @property
    def reducers(self) -> Iterator[tuple[Any, Reducer]]:
        """Every reducer, with its selection."""
        for selection in (self.values, self.grads):
            for part in flatten(selection):
                if isinstance(part, Reduced):
                    reducers = (by for by in part.reducers if isinstance(by, Reducer))
                    yield from ((part.selection, reducer) for reducer in reducers)

    def sees(self, site: Site, mark: Mark) -> bool:
        """Return whether a site exists for this plan: modules of another capture may not.

        Values that a reducer closes over have marks, but are not sites.
        """
        if site.kind not in ("module", *ASKED):
            return site.kind != "closed"
        module = site
        if site.kind in ASKED:  # inputs and weights belong to their module
            path = site.path.rpartition(ASKED[site.kind])[0]
            module = dataclasses.replace(site, kind="module", path=path)
        if self.policy not in mark.admitted or not matches(self.modules, module):
            return False
        return callable(self.policy) or not is_machinery(site.module) or self._names(site)

    def _names(self, site: Site) -> bool:
        """Return whether a selection names the module itself, and not only a module around it."""
        for part in (*_plain(self.modules), *_plain(self.values), *_plain(self.grads)):
            if isinstance(part, str) and matches(part, site):
                name = part.rpartition("/")[2].removesuffix(ASKED.get(site.kind, ""))
                if name.strip("*"):
                    return True
        return False

    def choose(self, site: Site, grad: bool) -> list[Reading]:
        """Return what to keep of the value or gradient of a site; an empty list if not selected."""
        whole: dict[str, tuple[Reading, Any]] = {}
        reduced: dict[Reading, None] = {}
        for part in flatten(self.grads if grad else self.values):
            for found in find(part, site):
                if isinstance(part, Reduced):
                    reduced.update((Reading(*found, by), None) for by in part.reducers)
                    continue
                new = Reading(*found)
                known, first = whole.setdefault(new.path, (new, part))
                if known != new:
                    raise SiteError(
                        f"`{self.names[grad]}` asks for the {site.described}, both as "
                        f"{show(first)} and as {show(part)}, but every name has one array. Capture "
                        "the whole value, and index the result."
                    )
        return [*reduced, *(reading for reading, _ in whole.values())]

    def names_value(self, site: Site) -> bool:
        """Return whether the exact name of a site selects its whole value, in all iterations."""
        return any(is_exact(part) and matches(part, site) for part in flatten(self.values))

    def verify(
        self,
        sites: Sequence[Site],
        values: Sequence[Site],
        grads: Sequence[Site],
        lost: dict[str, str],
    ) -> None:
        """Raise if a selection picks nothing, or an exactly named site was not captured.

        `sites` are all sites of the program, including gradients as sites of the kind `grad`.
        `values` and `grads` are the captured ones. `lost` says why some cannot be captured.
        """
        marked = [s for s in sites if s.kind != "grad"]
        for part in flatten(self.modules):
            self._verify_module(part, marked)
        for part in _plain(self.values):
            self._verify_one(self.names[0], part, values, marked, lost)
        reached = any(s.kind == "grad" for s in sites)
        for part in _plain(self.grads):
            found = [s for s in marked if matches(part, s)]
            if is_exact(part) and found and not any(matches(part, s) for s in grads):
                raise SiteError(_no_gradient(found[0], part, reached))
            self._verify_one(self.names[1], part, grads, marked, lost)
        self._verify_steps(values)

    def _verify_module(self, part: Any, marked: Sequence[Site]) -> None:
        if callable(part) or part == "**":
            return
        if not any(matches(part, s) for s in marked if s.kind == "module"):
            raise SiteError(
                f"modules={part!r} matches no module that tracing the function reached. "
                "tapax.sites(fn)(*args) lists the modules."
            )

    def _verify_one(
        self,
        argument: str,
        part: Any,
        captured: Sequence[Site],
        marked: Sequence[Site],
        lost: dict[str, str],
    ) -> None:
        if part == "**" or isinstance(part, IfAny):
            return
        if any(matches(part, s) for s in (*captured, *marked)):
            return
        asked = f"{argument}={show(part)}"
        if isinstance(part, Rule):
            raise SiteError(
                f"{asked} picks nothing: the program has no such operation. Rules use the names of "
                "operations that jax.make_jaxpr prints."
            )
        for site in marked:
            layers = missing_layers(part, site)
            if layers is not None:
                raise SiteError(
                    f"{asked} picks nothing: {layers.path!r} has {layers.length} layers in a loop, "
                    f"numbered 0 to {layers.length - 1}."
                )
            single = unnumbered_layer(part, site)
            if single is not None:
                raise SiteError(
                    f"{asked} picks nothing, because the layers are in a loop: {site.path!r} picks "
                    f"all of them, and {single!r} a single one."
                )
        if not isinstance(part, str):
            raise SiteError(
                f"{asked} picks none of the {len(marked)} sites that tracing the function reached. "
                f"{nearest('', [s.name for s in marked])}"
            )
        for path, why in lost.items():
            if matches(part, Site(path)):
                raise SiteError(f"The site {path!r} cannot be captured: {why}.")
        what = "no site with that name" if is_exact(part) else "no site that it matches"
        names = [*(s.name for s in marked), *lost]
        near = _ABOUT_WEIGHTS if ASKED["weights"] in part else nearest(part, names)
        raise SiteError(f"{asked} picks nothing: tracing the function reached {what}. {near}")

    def verify_reduced(
        self, reduced: Sequence[tuple[Site, Reducer]], refused: Sequence[tuple[Site, Reducer, str]]
    ) -> None:
        """Raise for reducers requested for sites whose dtype they reject.

        A selection may match some sites with other dtypes, which are left out, but not only such.
        """
        asked = [(part, r) for selection, r in self.reducers for part in _plain(selection)]
        for site, reducer, why in refused:
            for part, wanted in asked:
                others = any(r == reducer and matches(part, s) for s, r in reduced)
                if wanted == reducer and matches(part, site) and not others:
                    raise SiteError(why)

    def _verify_steps(self, values: Sequence[Site]) -> None:
        if self.steps is None:
            return
        values = [s for s in values if s.reducer is None or not s.reducer.over_loops]
        loops = [s for s in values if any(name.startswith("while") for name in s.loops)]
        exact = [part for part in _plain(self.values) if is_exact(part)]
        for site in values:
            if not loops or (site not in loops and any(matches(p, site) for p in exact)):
                where = f"in the loops {', '.join(site.loops)}" if site.loops else "in no loop"
                raise SiteError(
                    f"steps={self.steps} does not apply to the {site.described}, which is {where}: "
                    "`steps` is the number of iterations of a while loop to keep. Leave `steps` "
                    "out, or select only sites in a while loop."
                )
        if not values:
            raise SiteError(
                f"steps={self.steps} has no effect, because no value is captured: `steps` is the "
                "number of iterations of a while loop to keep. Leave `steps` out, or select values."
            )


def _fixed(selection: Selection) -> Selection:
    """Require that the iterations and indices in a selection are numbers, not traced values."""
    if isinstance(selection, tuple):
        return tuple(map(_fixed, cast(tuple[Selection, ...], selection)))
    if isinstance(selection, Reduced):
        return Reduced(_fixed(selection.selection), selection.reducers)
    if not isinstance(selection, At):
        return selection
    index, is_traced = selection.index, isinstance(selection.step, Tracer)
    if is_traced or (index is not None and index.numbers):
        what = "step" if is_traced else "index"
        raise SiteError(
            f"`{what}` is traced in tapax.{selection}, but a capture needs its value while it "
            "traces the function. Capture the whole value, and index the result."
        )
    step: Any = selection.step
    if step is None or isinstance(step, (int, StepSlice)):
        return selection
    return At(selection.selection, int(step), index)


def _modules(modules: Any) -> tuple[Selection, ModuleFilter | None]:
    """Convert the argument `modules` to a selection of modules and a module filter."""
    if isinstance(modules, bool):
        return "**", modules or None
    if callable(modules) and _takes_two(modules):
        return "**", cast(ModuleFilter, modules)
    if isinstance(modules, int):
        if modules < 0:
            raise SiteError(f"`modules` is {modules}, but a depth counts from 0, the root.")
        return ModuleDepth(modules), True
    if isinstance(modules, ModulesWithout):
        return modules, True
    return check(modules, "modules"), True


def _takes_two(fn: Function) -> bool:
    try:
        inspect.signature(fn).bind(None, "")
    except (TypeError, ValueError):
        return False
    return True


def _plain(selection: Selection) -> Iterator[Any]:
    """Yield the single selections in a selection, without `at` and reducers."""
    for part in flatten(selection):
        if isinstance(part, (At, Reduced)):
            yield from _plain(part.selection)
        else:
            yield part


_ABOUT_WEIGHTS = (
    "Attention weights are sites of the attention layers of Flax, Equinox, Haiku and Keras, and of "
    "modules that call jax.nn.dot_product_attention. Mark the weights of other attention layers "
    "with tapax.sow."
)


def _no_gradient(site: Site, asked: str, reached: bool) -> str:
    if not reached:
        why = (
            "the program takes no gradient, or its gradients reach no marked value. Take the "
            "gradient inside the captured function, as a train step does, and use the value that "
            "tapax.sow returns"
        )
    else:
        why = (
            "no cotangent reached it. The differentiated result does not depend on its value, or "
            "the code after the mark does not use the value that tapax.sow returned"
        )
    return f"grads={asked!r} picks the {site.described}, which has no gradient: {why}."
