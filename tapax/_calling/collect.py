"""Collection of `Taps` from the entries that a walk recorded."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tapax._jax import PyTree, pytrees
from tapax._marks.sow import leaf_name
from tapax._marks.user_warning import warn_user
from tapax._results import SiteDict, Taps
from tapax._results.flow import LazyFlow
from tapax._results.site_table import make_site_table
from tapax._sites import Site, SiteError
from tapax._walk.entries import Entry
from tapax._walk.recorder import Recorder
from tapax._walk.site_flow import find_flow
from tapax._walk.walk import Walk


def collect(walk: Walk, *, warn: bool) -> Taps:
    """Make `Taps` from the records of a walk; with `warn`, warn if the program has no sites."""
    entries = recorded(walk)
    reduced = [(e.site, e.reduction.reducer) for e in entries if e.reduction is not None]
    walk.plan.verify_reduced(reduced, walk.refused)
    # The flow of data is found only if somebody looks at it.
    flow = LazyFlow(functools.partial(find_flow, walk.program))
    taps = make_taps(entries, walk.sites, flow)
    sites = {site.name: site for site in taps.sites}
    values, grads = ([sites[name] for name in part] for part in (taps.values, taps.grads))
    walk.plan.verify(walk.sites, values, grads, walk.lost | walk.missing)
    if warn and walk.plan.asks and not walk.sites and not walk.lost | walk.missing:
        warn_user(
            "The function has no sites, so nothing is captured: it marks no value with tapax.sow, "
            "and calls no module of Flax, Equinox, Haiku, Keras or brainstate. Mark a value, or "
            "select operations of any program with tapax.ops or tapax.lines."
        )
    for path, why in walk.lost.items():
        warn_user(f"The site {path!r} is not captured: {why}.")
    warn_of_missing(walk)
    return taps


def warn_of_missing(walk: Walk) -> None:
    """Warn of selected sites that have no value, unless another call gave the site one."""
    known = {site.path for site in walk.sites}
    for path, why in walk.missing.items():
        if path not in known:
            warn_user(f"The site {path!r} does not exist: {why}.")


def recorded(walk: Recorder) -> list[Entry]:
    """Return the entries and folds of a walk, with cotangents of copies assigned to their calls."""
    return [*_summed(walk.entries), *walk.fold_entries()]


def make_taps(
    entries: Sequence[Entry], sites: Sequence[Site], flow: LazyFlow | None = None
) -> Taps:
    """Finish entries, in the order of the `sites` of their program, whose data flow is `flow`."""
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
                f"The {site.described}, has more than one fold: one is inside a shard_map, where "
                "every device has a separate one. Give one of them another name."
                if entry.folded
                else f"Two reducers of one name select {name!r}, marked at {site.source}, so the "
                "result would have two arrays of that name. Rename one: reducer.named(...)."
            )
        if any(step is not None for step in entry.steps):
            raise SiteError(
                f"`step` was given for the {site.described}, which is in no loop. Leave `step` out."
            )
        into[name] = entry.value
        # Where the program did not compute a gradient, zero is its correct value, so a gradient has
        # the mask of its value.
        if entry.valid is not None and name not in valid and not (entry.grad and name in values):
            valid[name] = entry.valid
        known = found.setdefault(name, site)
        if known is not site:
            found[name] = dataclasses.replace(known, grad_reducer=site.grad_reducer)
    return Taps(values, grads, valid, make_site_table(tuple(found.values()), flow))


def _places(sites: Sequence[Site]) -> Callable[[Entry], tuple[int, tuple[int, ...], int]]:
    """Make a sort key for entries: their position in the program.

    The arrays of a fold have the position of its first value. Values of single layers come in the
    order of the layers, as if the program ran the layers without a loop.
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
"""The most elements of a state that `_finish` finishes together with other states."""


def _finish(entries: Sequence[Entry]) -> list[Any]:
    """Compute the results of the entries with a state; equal reducers finish together."""
    results: list[Any] = [None] * len(entries)
    alike: dict[Any, list[int]] = {}
    for i, entry in enumerate(entries):
        reduction = entry.reduction
        if reduction is None:
            continue
        if reduction.is_finished:
            results[i] = reduction.treedef.unflatten(entry.state)
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
    """Replace the state of an entry by its result; yield an entry for each leaf of the result."""
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
    """Assign the cotangents of copies that remat made to the gradients of their calls.

    JAX's newer remat differentiates through the copy alone, whose cotangents are then the
    gradients. Otherwise the first gradient of a call is that of the loss itself. A second gradient,
    of a loss that contains the first gradient, is the sum over the value and its copy.
    """
    copies: dict[Any, list[Entry]] = {}
    direct: dict[Any, list[Entry]] = {}
    for entry in entries:
        if entry.grad:
            # The plan may ask for several results of one gradient.
            reducer = entry.reduction and entry.reduction.reducer
            (copies if entry.recomputed else direct).setdefault(
                (entry.call, entry.reading, reducer), []
            ).append(entry)
        else:
            yield entry
    for which, own in direct.items():
        if which not in copies:
            yield from own
            continue
        first, *second = own
        yield first
        yield _sum(second, copies[which])
    for which, parts in copies.items():
        if which not in direct:
            for number, part in enumerate(parts):
                yield _pulled_back(part, number, part.value)


def _sum(second: Sequence[Entry], copies: Sequence[Entry]) -> Entry:
    """Add the parts of a second gradient: those of the value, and those of its copies."""
    parts = [*second, *copies]
    first = parts[0]
    if len(parts) == 1:
        return _pulled_back(first, 1, first.value)
    if first.reduction is not None or (first.reading is not None and first.reading.by is not None):
        raise SiteError(
            f"The {first.site.described}, is in a checkpoint through which a second derivative is "
            "taken: its gradient is the sum of several parts, so the program can neither reduce it "
            "nor pass it to a function. Capture it whole."
        )
    if len(second) > 1 or len({p.value.shape for p in parts}) > 1:
        raise SiteError(
            f"The {first.site.described}, is in a checkpoint through which several second "
            "derivatives are taken, so tapax cannot tell which part belongs to which. Leave it out "
            "of `grads`."
        )
    return _pulled_back(first, 1, functools.reduce(jnp.add, [p.value for p in parts]))


def _pulled_back(entry: Entry, number: int, value: PyTree) -> Entry:
    site = dataclasses.replace(entry.site, pullback=number)
    return entry._replace(site=site, value=value, recomputed=False)
