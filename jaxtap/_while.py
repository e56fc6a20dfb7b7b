"""The handler of while loops, and the buffers in which their bodies leave what is recorded.

How often a while loop runs is not known beforehand, so what its body records cannot be stacked.
Instead the loop carries, for each entry, its last value and how often there was one; or, where the
first few iterations are asked for, those and a mask.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from jaxtap import _compat
from jaxtap._sites import SiteError, StepSlice
from jaxtap._walk import Entry, Staged, Walk, eager, handles, strip, where


@handles("while")
def _while(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    """The buffers of what is recorded are carried.

    With a mapped predicate JAX itself keeps the carry of an example that is done, so that the
    buffers, whose leading axes are those of the predicate, stop with their example.
    """
    params = eqn.params
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    ntest, nbody = params["cond_nconsts"], params["body_nconsts"]
    args = walk.materialize(eqn.invars, args)
    tconsts, bconsts, init = args[:ntest], args[ntest : ntest + nbody], args[ntest + nbody :]
    predicate = _compat.open_jaxpr(test).outvars[0].aval
    shape = tuple(predicate.shape)
    plain_test = strip(test)
    with walk.predicated(shape):
        threads = walk.enter(body)
        folds = walk.folds.arrays(threads)
        staged = walk.stage(body, [*bconsts, *init], threads)
    buffers = [_Buffer.of(walk, entry, var, shape) for entry, var in _typed(staged)]
    varying = _compat.varying_axes(predicate)
    start = [b.start() for b in buffers]
    count = _compat.with_varying(jnp.zeros(shape, jnp.int32), varying)

    def step(*flat: Any) -> list[Any]:
        consts, rest = flat[:nbody], flat[nbody:]
        state, rest = rest[: len(init)], rest[len(init) :]
        carried, rest = rest[: len(folds)], rest[len(folds) :]
        count, rest = rest[0], list(rest[1:])
        results = jaxpr_as_fun(staged.jaxpr)(*consts, *state, *carried)
        new = results[len(init) : len(results) - len(folds)]
        arrays = iter(new)
        entries = [e.with_arrays(arrays) for e in staged.entries]
        iteration = jnp.max(count) if shape else count
        updated = []
        for buffer, entry in zip(buffers, entries, strict=True):
            held = [rest.pop(0) for _ in range(2)]
            updated += buffer.update(held, entry, iteration)
        return [
            *results[: len(init)],
            *results[len(results) - len(folds) :],
            count + 1,
            *updated,
        ]

    def check(*flat: Any) -> Any:
        return jaxpr_as_fun(plain_test)(*flat[: ntest + len(init)])

    carry = [*init, *folds, count, *(x for pair in start for x in pair)]
    results = _loop(eqn, check, step, tconsts, bconsts, carry)
    flat = iter(results)
    own = [next(flat) for _ in init]
    walk.folds.restore(threads, [next(flat) for _ in folds])
    count = next(flat)
    for buffer in buffers:
        walk.entries.append(buffer.finish(next(flat), next(flat)))
    if plain_test is not test:
        _last_test(walk, test, [*tconsts, *own], count + 1)
    return own


def _last_test(walk: Walk, test: Any, args: list[Any], count: Any) -> None:
    """Records what the predicate of a loop marks: it ran last on what the loop ended with."""
    with walk.inside():
        walk.run(test, args)
        entries = walk.entries
    for entry in entries:
        if walk.plan.steps is not None or entry.step is not None:
            raise SiteError(
                f"The site {entry.site.name!r}, marked at {entry.site.source}, is in the predicate "
                "of a while loop, where only its last value can be captured. Leave `steps` and "
                "`step` out, or mark the value in the body."
            )
        valid = count if entry.valid is None else entry.valid
        walk.entries.append(dataclasses.replace(entry, valid=valid, loops=("while", *entry.loops)))


def _loop(eqn: Any, check: Any, step: Any, tconsts: Any, bconsts: Any, carry: list[Any]) -> Any:
    if eager() and not any(isinstance(x, Tracer) for x in (*tconsts, *bconsts, *carry)):
        while check(*tconsts, *carry)[0]:
            carry = step(*bconsts, *carry)
        return carry
    carry = [jnp.asarray(c) for c in carry]
    params = dict(
        eqn.params,
        cond_jaxpr=jax.make_jaxpr(check)(*tconsts, *carry),
        body_jaxpr=jax.make_jaxpr(step)(*bconsts, *carry),
    )
    return eqn.primitive.bind(*tconsts, *bconsts, *carry, **params)


def _typed(staged: Staged) -> list[tuple[Entry, list[Any]]]:
    """The entries of a staged body, each with the types of its arrays."""
    types = iter(v.aval for v in _compat.open_jaxpr(staged.jaxpr).outvars[staged.count :])
    return [(e, [next(types) for _ in e.arrays]) for e in staged.entries]


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """What a while loop carries for an entry: its last value and their count, or the first few.

    The axes of the predicate come first, then (where several iterations are kept) that of the
    iterations, then those of the entry.
    """

    entry: Entry
    types: list[Any]
    shape: tuple[int, ...]
    window: tuple[int, int, int] | None
    single: bool

    @classmethod
    def of(cls, walk: Walk, entry: Entry, types: list[Any], shape: tuple[int, ...]) -> _Buffer:
        window, single = None, False
        if entry.step is not None and not entry.loops:
            window, single = _window(entry), not isinstance(entry.step, StepSlice)
        elif walk.plan.steps is not None and not entry.grad:
            window = (0, walk.plan.steps, 1)
        return cls(entry, types, shape, window, single)

    def _inward(self, x: Any) -> Any:
        """The axes of the predicate brought first: an entry has those of its loops before."""
        n, lead = len(self.shape), self.entry.lead
        if not n or not lead:
            return x
        return jnp.moveaxis(x, tuple(range(lead, lead + n)), tuple(range(n)))

    def _ran(self, valid: Any, like: Any) -> Any:
        """How often an entry was recorded in one iteration, with the axes of the predicate."""
        if valid is None:
            n, lead = len(self.shape), self.entry.lead
            extent = like.shape[: n + lead] if n else ()
            return jnp.ones(extent, jnp.int32)
        if valid.ndim < self.entry.lead + len(self.shape):
            valid = valid.reshape(valid.shape + (1,) * len(self.shape))
            extent = (*valid.shape[: self.entry.lead], *self.shape)
            valid = jnp.broadcast_to(valid, extent)
        return self._inward(valid).astype(jnp.int32)

    def start(self) -> list[Any]:
        value, *valid = (_compat.zeros(t) for t in self.types)
        value = self._inward(value)
        ran = self._ran(valid[0] if valid else None, value) * 0
        varying = _compat.varying_axes(self.types[-1])
        if self.window is not None:
            n, length = len(self.shape), self.window[1]
            value = jnp.zeros((*value.shape[:n], length, *value.shape[n:]), value.dtype)
            ran = jnp.zeros((*ran.shape[:n], length, *ran.shape[n:]), bool)
            value = _compat.with_varying(value, _compat.varying_axes(self.types[0]))
        return [value, _compat.with_varying(ran, varying)]

    def update(self, held: list[Any], entry: Entry, iteration: Any) -> list[Any]:
        value, counted = held
        new = self._inward(entry.value)
        ran = self._ran(entry.valid, new)
        if self.window is None:
            value = new if entry.valid is None else where(ran, new, value)
            return [value, counted + ran]
        start, length, stride = self.window
        offset = iteration - start
        place = jnp.where((offset >= 0) & (offset % stride == 0), offset // stride, length)
        at = (slice(None),) * len(self.shape) + (place,)
        if entry.valid is not None:
            new = where(ran, new, jnp.zeros_like(new))
        return [value.at[at].set(new, mode="drop"), counted.at[at].set(ran > 0, mode="drop")]

    def finish(self, value: Any, valid: Any) -> Entry:
        n, lead = len(self.shape), self.entry.lead
        grown = lead + (self.window is not None)
        if n and grown:
            value, valid = (
                jnp.moveaxis(x, tuple(range(n)), tuple(range(grown, grown + n)))
                if x.ndim >= n + grown
                else x
                for x in (value, valid)
            )
        if self.single:
            value, valid, grown = value[0], valid[0], grown - 1
        return dataclasses.replace(
            self.entry,
            value=value,
            valid=valid,
            lead=grown,
            step=None if not self.entry.loops else self.entry.step,
            loops=("while", *self.entry.loops),
        )


def _window(entry: Entry) -> tuple[int, int, int]:
    """The first iteration, how many, and how far apart, that were asked for of a while loop."""
    step = entry.step
    if isinstance(step, int):
        first, count, stride = step, 1, 1
    else:
        first, stride = step.start or 0, step.stride or 1
        count = 0 if step.stop is None else len(range(first, step.stop, stride))
    if first < 0 or stride < 1 or count < 1:
        raise SiteError(
            f"step={step} was asked for of the site {entry.site.name!r}, marked at "
            f"{entry.site.source}, which is in a while loop: how often that runs is not known "
            "beforehand, so `step` must count from the start and have an end."
        )
    return first, count, stride
