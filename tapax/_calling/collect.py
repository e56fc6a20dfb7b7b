"""Taps out of what a walk recorded."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tapax._jax import PyTree, pytrees
from tapax._marks.sow import leaf_name
from tapax._results import SiteDict, SiteTable, Taps
from tapax._sites import Site, SiteError
from tapax._walk.entries import Entry
from tapax._walk.recorder import Recorder
from tapax._walk.walk import Walk


def collect(walk: Walk, *, warn: bool) -> Taps:
    """Returns what a walk recorded. With `warn`, a program without sites is warned of."""
    entries = recorded(walk)
    reduced = [(e.site, e.reduction.reducer) for e in entries if e.reduction is not None]
    walk.plan.verify_reduced(reduced, walk.refused)
    taps = make_taps(entries, walk.sites)
    sites = {site.name: site for site in taps.sites}
    values, grads = ([sites[name] for name in part] for part in (taps.values, taps.grads))
    walk.plan.verify(walk.sites, values, grads, walk.lost)
    if warn and walk.plan.asks and not walk.sites and not walk.lost:
        warnings.warn(
            "The function has no sites, so nothing is captured: it marks no value with tapax.sow, "
            "and calls no module of Flax, Equinox, Haiku, Keras or brainstate. Mark a value, or "
            "select operations of any program with tapax.ops or tapax.lines.",
            stacklevel=6,
        )
    for path, why in walk.lost.items():
        warnings.warn(f"The site {path!r} is not captured: {why}.", stacklevel=6)
    return taps


def recorded(walk: Recorder) -> list[Entry]:
    """The entries and folds of a walk, with the cotangents of copies where they belong."""
    return [*_summed(walk.entries), *walk.fold_entries()]


def make_taps(entries: Sequence[Entry], sites: Sequence[Site]) -> Taps:
    """Finishes entries, in the order of the `sites` of their program."""
    values, grads, valid = SiteDict(), SiteDict(), SiteDict()
    found: dict[str, Site] = {}
    place = _places(sites)
    ordered = sorted(entries, key=lambda e: (e.grad, *place(e)))
    finished = _finish(ordered)
    for entry in (
        one for e, result in zip(ordered, finished, strict=True) for one in _results(e, result)
    ):
        shape, dtype = tuple(entry.value.shape), entry.value.dtype
        site = dataclasses.replace(entry.site, shape=shape, dtype=dtype, loops=entry.loops)
        name = site.name
        into = grads if entry.grad else values
        if name in into:
            raise SiteError(
                f"The {site.described}, has more than one fold: one of them is inside a shard_map, "
                "where every device has its own. Give it another name."
                if entry.folded
                else f"Two reducers with the same name were asked for: {name!r}, marked at "
                f"{site.source}, would be two arrays. Give one another name: reducer.named(...)."
            )
        if any(step is not None for step in entry.steps):
            raise SiteError(
                f"`step` was given for the {site.described}, which is in no loop. Leave `step` out."
            )
        into[name] = entry.value
        # A gradient that was not computed is zero, and so right: its mask is that of the value.
        if entry.valid is not None and name not in valid and not (entry.grad and name in values):
            valid[name] = entry.valid
        known = found.setdefault(name, site)
        found[name] = dataclasses.replace(known, grad_reducer=site.grad_reducer)
    return Taps(values, grads, valid, SiteTable(tuple(found.values())))


def _places(sites: Sequence[Site]) -> Callable[[Entry], tuple[int, tuple[int, ...], int]]:
    """Where an entry is in the program; the arrays of a fold are where its first value is.

    Values of single layers come in the order of the layers, as if those were written out.
    """
    marked = [site for site in sites if site.kind != "grad"]
    order = {site.name: i for i, site in reversed([*enumerate(marked)])}
    firsts = {site.layers[-1].path: order[site.name] for site in reversed(marked) if site.layers}

    def place(entry: Entry) -> tuple[int, tuple[int, ...], int]:
        whole = order.get(entry.site.path.partition(":")[0], len(order))
        here = order.get(entry.site.name, order.get(entry.call.name, whole))
        layers = entry.call.layers if entry.layer else ()
        return firsts[layers[-1].path] if layers else here, entry.layer, here

    return place


_SMALL = 4096
"""How many numbers a state may have to be finished together with others."""


def _finish(entries: Sequence[Entry]) -> list[Any]:
    """The results of the entries that have a state; of equal reducers together."""
    results: list[Any] = [None] * len(entries)
    alike: dict[Any, list[int]] = {}
    for i, entry in enumerate(entries):
        reduction = entry.reduction
        if reduction is None:
            continue
        types = tuple(map(jax.typeof, entry.state))
        if entry.valid is None and sum(t.size for t in types) <= _SMALL:
            alike.setdefault((reduction.reducer, reduction.mapped, entry.lead, types), []).append(i)
        else:
            results[i] = reduction.finish(entry.state, entry.valid, entry.lead)
    for numbers in alike.values():
        first = entries[numbers[0]]
        assert first.reduction is not None
        states = [entries[i].state for i in numbers]
        for i, result in zip(numbers, first.reduction.finish_all(states, first.lead), strict=True):
            results[i] = result
    return results


def _results(entry: Entry, result: PyTree) -> Iterator[Entry]:
    """An entry with a result in the place of its state; a structured one has several."""
    reduction = entry.reduction
    if reduction is None:
        yield entry
        return
    for keys, leaf in pytrees.leaves_with_path(result):
        name = leaf_name(keys)
        if name:
            name = f"{reduction.label}.{name}" if reduction.label else f":{name}"
        else:
            name = reduction.label
        by: dict[str, Any] = {"grad_reducer" if entry.grad else "reducer": reduction.reducer}
        site = dataclasses.replace(entry.site, path=entry.site.path + name, **by)
        yield entry._replace(site=site, value=leaf, reduction=None)


def _summed(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Puts the cotangents of copies that remat made where they belong.

    JAX's newer remat takes gradients through the copy alone: then they are the gradients. Otherwise
    the first gradient of a call is that of its own loss; a second one, of a loss made from that, is
    the sum over the value and its copy.
    """
    copies: dict[Any, list[Entry]] = {}
    direct: dict[Any, list[Entry]] = {}
    for entry in entries:
        if entry.grad:
            # The gradient of a call may be captured whole, and by several reducers.
            which = entry.call, entry.reduction and entry.reduction.reducer
            (copies if entry.recomputed else direct).setdefault(which, []).append(entry)
        else:
            yield entry
    for call, own in direct.items():
        if call not in copies:
            yield from own
            continue
        first, *second = own
        yield first
        parts = [*second, *copies[call]]
        if first.reduction is not None:
            raise SiteError(
                f"The {first.site.described}, is in a checkpoint through which a second derivative "
                "is taken: its gradient is the sum of several parts, and cannot be reduced in the "
                "program. Capture it whole."
            )
        if len(second) > 1 or len({p.value.shape for p in parts}) > 1:
            raise SiteError(
                f"The {first.site.described}, is in a checkpoint through which several second "
                "derivatives are taken, and which part belongs to which cannot be told. Leave it "
                "out of `grads`."
            )
        yield _pulled_back(parts[0], 1, functools.reduce(jnp.add, [p.value for p in parts]))
    for call, parts in copies.items():
        if call not in direct:
            for number, part in enumerate(parts):
                yield _pulled_back(part, number, part.value)


def _pulled_back(entry: Entry, number: int, value: PyTree) -> Entry:
    site = dataclasses.replace(entry.site, pullback=number)
    return entry._replace(site=site, value=value, recomputed=False)
