"""A plan: what a capture is asked for, checked once, hashable; and what it was asked for in vain.

>>> plan = Plan.make(values="**", grads=None)
>>> plan.choose(Site("h"), grad=False)
Choice(step=None)
>>> plan.choose(Site("h"), grad=True) is None
True
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxtap._sites import (
    At,
    Rule,
    Selection,
    Site,
    SiteError,
    check,
    flatten,
    is_exact,
    matches,
    nearest,
    rules,
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A site was selected, perhaps for some iterations alone."""

    step: Any = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which values and which gradients to capture, and how many iterations of a while loop."""

    values: Selection
    grads: Selection
    steps: int | None = None

    @classmethod
    def make(cls, values: Any, grads: Any, steps: Any = None) -> Plan:
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int)):
            raise TypeError(
                f"`steps` must be a number of iterations, but is {steps!r} of type "
                f"{type(steps).__name__}."
            )
        if steps is not None and steps < 1:
            raise SiteError(f"`steps` must be at least 1, but is {steps}.")
        return cls(check(values, "values"), check(grads, "grads"), steps)

    @property
    def rules(self) -> frozenset[Rule]:
        return frozenset((*rules(self.values), *rules(self.grads)))

    def choose(self, site: Site, grad: bool) -> Choice | None:
        """Whether, and how, to capture a site."""
        for part in flatten(self.grads if grad else self.values):
            if matches(part, site):
                return Choice(part.step if isinstance(part, At) else None)
        return None

    def verify(
        self,
        sites: Sequence[Site],
        values: Sequence[Site],
        grads: Sequence[Site],
        graded: set[str],
        lost: dict[str, str],
    ) -> None:
        """Raises for what was asked for and cannot be given.

        `sites` are all that the program has, `values` and `grads` those captured, `graded` the
        paths that a gradient reached, `lost` why some cannot be captured.
        """
        names = [s.name for s in sites]
        for argument, selection in (("values", self.values), ("grads", self.grads)):
            for part in flatten(selection):
                inner = part.selection if isinstance(part, At) else part
                for name in flatten(inner) if isinstance(inner, tuple) else (inner,):
                    self._verify_one(argument, name, sites, graded, lost, names)
                if isinstance(part, At):
                    taken = [s for s in (*values, *grads) if matches(part, s)]
                    for site in taken:
                        if not site.loops:
                            raise SiteError(
                                f"`step` was given for {part.selection!r}, but the site "
                                f"{site.name!r}, marked at {site.source}, is in no loop. "
                                "Leave `step` out."
                            )
        self._verify_steps(values)

    def _verify_one(
        self,
        argument: str,
        part: Any,
        sites: Sequence[Site],
        graded: set[str],
        lost: dict[str, str],
        names: Sequence[str],
    ) -> None:
        if callable(part) or part == "**":
            return
        found = [s for s in sites if matches(part, s)]
        asked = f"{argument}={part!r}" if isinstance(part, str) else f"{argument}=jt.{part}"
        if not found:
            if isinstance(part, str):
                for path, why in lost.items():
                    if matches(part, Site(path)):
                        raise SiteError(f"The site {path!r} cannot be captured: {why}.")
                what = "no site has that name" if is_exact(part) else "it matches no site"
                raise SiteError(
                    f"{asked} was asked for, but {what}: no marked value of that name was reached "
                    f"when the function was traced. {nearest(part, [*names, *lost])}"
                )
            raise SiteError(
                f"{asked} was asked for, but the program has no such operation. Rules name "
                "operations as jax.make_jaxpr prints them."
            )
        if argument == "grads" and is_exact(part):
            missing = next((s for s in found if s.path not in graded), None)
            if missing is not None and not any(s.path in graded for s in found):
                raise SiteError(self._no_gradient(missing, graded))

    def _no_gradient(self, site: Site, graded: set[str]) -> str:
        if not graded:
            why = (
                "the program takes no gradient, or none that reaches a marked value. Take it "
                "inside the captured function, as a train step does"
            )
        else:
            why = (
                "no cotangent reached it. Its value does not influence what is differentiated, "
                "or the value that jt.sow returned is not the one that is used afterwards"
            )
        return (
            f"grads={site.name!r} was asked for, but the site {site.name!r}, marked at "
            f"{site.source}, has no gradient: {why}."
        )

    def _verify_steps(self, values: Sequence[Site]) -> None:
        if self.steps is None:
            return
        loops = [s for s in values if any(name.startswith("while") for name in s.loops)]
        exact = [p for p in flatten(self.values) if is_exact(p)]
        for site in values:
            if not loops or (site not in loops and any(matches(p, site) for p in exact)):
                where = f"in the loops {', '.join(site.loops)}" if site.loops else "in no loop"
                raise SiteError(
                    f"steps={self.steps} was asked for, but the site {site.name!r}, marked at "
                    f"{site.source}, is {where}: `steps` is how many iterations of a while loop "
                    "to keep. Leave it out, or select sites in a while loop."
                )
        if not values:
            raise SiteError(
                f"steps={self.steps} was asked for, but no value is captured: `steps` is how many "
                "iterations of a while loop to keep."
            )
