"""Perturbations that are added to the values of sites: one for each call, iteration and example.

A perturbation has the shape of what a capture of its site returns: loops first, then mapped axes.
It is carried through the bodies of the program with a number, that of the iterations so far, which
says which part of it is due. What is added to can be differentiated as any program can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtap import _compat
from jaxtap._fold import Thread
from jaxtap._mark import not_the_users
from jaxtap._plan import Plan
from jaxtap._program import trace
from jaxtap._scopes import scopes_of
from jaxtap._sites import Site, SiteError
from jaxtap._tap import tap_effect
from jaxtap._taps import SiteTable
from jaxtap._walk import Walk


def add(
    run: Callable[[Any], Any],
    arguments: Any,
    choose: Callable[[SiteTable], Mapping[str, Any]],
) -> Any:
    """What `run` returns for some arguments, with perturbations added to the values of its sites.

    `choose` gives those perturbations by the names of the sites that there are.
    """
    leaves, treedef = jax.tree.flatten(arguments)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    pick = lambda of_leaves: [of_leaves[i] for i in places]  # noqa: E731

    def join(arrays: Sequence[Any]) -> Any:
        filled = list(leaves)
        for i, x in zip(places, arrays, strict=True):
            filled[i] = x
        return treedef.unflatten(filled)

    arrays = pick(leaves)
    plan = Plan.make("**", None, modules=False)
    program = trace(run, run, plan, arguments, arrays, join, pick)
    sites = jax.eval_shape(lambda *arrays: program.walk(plan, arrays)[1], *arrays).sites
    walk = _Adding({name: _parts(sites[name], p) for name, p in choose(sites).items()})
    with not_the_users():
        outs = walk.run(program.jaxpr, arrays)
    return program.join(walk.materialize(_compat.open_jaxpr(program.jaxpr).outvars, outs))


def _parts(site: Site, perturbation: Any) -> Any:
    """A perturbation as a stack with one part for each time that its site is reached."""
    if any(loop.startswith("while") for loop in site.loops):
        raise SiteError(
            f"The site {site.name!r}, marked at {site.source}, is in a while loop, which may reach "
            "it any number of times: there is no perturbation for each. Leave it out of the "
            "perturbations, and take its gradients from jt.capture."
        )
    if jnp.shape(perturbation) != site.shape:
        raise SiteError(
            f"The perturbation of the site {site.name!r}, marked at {site.source}, has shape "
            f"{list(jnp.shape(perturbation))}, but its values have shape {list(site.shape)}. Make "
            "perturbations with the inputs that they are for."
        )
    loops = len(site.loops)
    return jnp.reshape(perturbation, (-1, *site.shape[loops:])).astype(site.dtype)


class _Supply:
    """What is threaded through bodies in the place of folds: perturbations, and their numbers."""

    def __init__(self, parts: Mapping[str, Any]):
        self.names = list(parts)
        self.items = (*parts.values(), *(jnp.zeros((), jnp.int32) for _ in parts))

    def take(self, name: str) -> Any:
        """The part of a perturbation that is due."""
        i, items = self.names.index(name), list(self.items)
        number = items[i + len(self.names)]
        items[i + len(self.names)] = number + 1
        self.items = tuple(items)
        return jax.lax.dynamic_index_in_dim(items[i], number, keepdims=False)

    def enter(self, jaxprs: Sequence[Any], scopes: Any) -> tuple[Thread, ...]:
        del scopes
        marked = any(tap_effect in _compat.open_jaxpr(jaxpr).effects for jaxpr in jaxprs)
        return (Thread("perturbations", flagged=False),) if marked and self.names else ()

    def arrays(self, threads: Sequence[Thread]) -> list[Any]:
        return list(self.items) if threads else []

    def restore(self, threads: Any, arrays: Sequence[Any], certain: Any = ()) -> None:
        del certain
        if threads:
            self.items = tuple(arrays)

    def certain(self, threads: Sequence[Thread]) -> tuple[bool, ...]:
        return tuple(False for _ in threads)


class _Adding(Walk):
    """A walk that leaves taps where they are and adds to their values."""

    def __init__(self, parts: Mapping[str, Any]):
        super().__init__(Plan(None, None))
        self.nested = True  # the taps are those of the capture around this
        self.folds: Any = _Supply(parts)
        self._backwards = False

    def _equation(self, eqn: Any, args: list[Any]) -> list[Any]:
        before = self._backwards
        self._backwards |= eqn.primitive.name == "scan" and eqn.params["reverse"]
        try:
            return super()._equation(eqn, args)
        finally:
            self._backwards = before

    def _tap(self, eqn: Any, args: list[Any]) -> list[Any]:
        mark = eqn.params["mark"].within(scopes_of(eqn, self.scopes))
        number = self._calls[mark.path] + eqn.params["shift"]
        name = Site(mark.path, call=number).name
        if eqn.params["kind"] == "value" and name in self.folds.names:
            if self._backwards:
                raise SiteError(
                    f"The site {name!r}, marked at {mark.source}, is in a scan that runs "
                    "backwards, to which perturbations cannot be added. Take its gradients from "
                    "jt.capture."
                )
            axes = eqn.params["axes"]
            part = jnp.moveaxis(self.folds.take(name), range(len(axes)), axes)
            args = [args[0] + part, *args[1:]]
        return super()._tap(eqn, args)
