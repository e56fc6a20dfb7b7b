"""Streamed loops: the outermost loops of a program, which emit statistics of every n-th iteration.

A scan of 10,000 iterations with `every=100` becomes a scan of 100 chunks. A chunk first evaluates a
copy of the loop body on the inputs of its first iteration, keeps only the statistics, and emits
them; then it runs its 100 iterations as the plain program does. So the results equal those of the
plain program, the other iterations do no extra work, not even a test, and a record costs one more
iteration. A while loop becomes two nested while loops that count iterations.

A reverse scan, such as the scan of a gradient, has the same chunks, and emits at the end of each
chunk.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._calling.collect import recorded
from tapax._jax import Equation, Jaxpr, Static, Value, typed
from tapax._jaxpr.kinds import LOOPS, Kind, kind_of
from tapax._jaxpr.restage import Scan, While
from tapax._marks.marked_jaxprs import strip
from tapax._sites import Site, SiteError
from tapax._walk.changes import Around
from tapax._walk.entries import Entry, Slots
from tapax._walk.folds import Folds
from tapax._walk.interpreter import Interpreter, WalkHooks
from tapax._walk.plan import Plan
from tapax.monitoring._emission import CountedIteration, Emission, Receiver, emit, merge_examples


class Receivers(Protocol):
    """A function that makes the receiver of a loop. `length` is None if it is unknown."""

    def __call__(self, *, length: int | None, reverse: bool) -> Receiver: ...


@dataclasses.dataclass(frozen=True)
class _WatchedBody:
    """A copy of the body of a loop that returns only the entries that the plan selects."""

    jaxpr: Jaxpr
    ins: Slots
    entries: tuple[Entry, ...]
    sites: tuple[Site, ...]

    def run(self, args: Sequence[Value]) -> list[Entry]:
        arrays = map(jax.lax.stop_gradient, self.ins.arrays(args))
        results = iter(_jax.as_function(self.jaxpr)(*arrays))
        return [entry.with_arrays(results) for entry in self.entries]


class StreamHooks(WalkHooks):
    """Hooks that stream the outermost loops of a program; the walk itself records nothing.

    `entries` lists the entries that the loops emit; `loops` is the number of loops.
    """

    def __init__(self, plan: Plan, every: int, receivers: Receivers):
        self.entries: list[Entry] = []
        self.loops = 0
        self._plan, self._every, self._receivers = plan, every, receivers
        self._depth = 0
        self._watching = False
        self._branches = 0

    def equation(self, walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
        kind = kind_of(eqn)
        if self._watching and kind & Kind.DEBUG:
            return []  # only the plain iteration prints
        if self._depth or not kind & LOOPS:
            return walk.evaluate_equation(eqn, args)
        self.loops += 1
        self._depth += 1
        try:
            return (self._scan if kind & Kind.SCAN else self._while)(walk, eqn, args)
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def inside(
        self, walk: Interpreter, branch: int | None, around: Sequence[Around]
    ) -> Generator[None]:
        del walk, around
        self._branches += branch is not None
        try:
            yield
        finally:
            self._branches -= branch is not None

    def _watch(
        self, walk: Interpreter, body: Jaxpr, around: Around, args: Sequence[Any]
    ) -> _WatchedBody:
        """Make the watched copy of a body; `args` are its arguments, or their types."""
        ins = Slots.of(args)
        alone = _jax.dce(body, [])

        def watched(*flat: Value) -> Any:
            with walk.inside(around=[around]):
                walk.folds.items = {}
                walk.run(alone, ins.fill(iter(flat)))
                entries = recorded(walk)
                return [a for e in entries for a in e.arrays], Static([e.bare for e in entries])

        before = walk.plan, walk.folds, walk.nested
        walk.plan, walk.folds, walk.nested = self._plan, Folds(self._plan), False
        self._watching = True
        try:
            jaxpr, (_, found) = typed.make_jaxpr(watched, return_shape=True)(*ins.arrays(args))
        finally:
            self._watching = False
            walk.plan, walk.folds, walk.nested = before
        return _WatchedBody(jaxpr, ins, tuple(found.value), tuple(walk.sites))

    def _emit(
        self,
        walk: Interpreter,
        emission: Emission,
        entries: Sequence[Entry],
        number: Value,
        active: Value,
    ) -> None:
        """Emit the entries of one iteration; in a shard_map, the first device emits for all."""
        on_device = typed.asarray(True)
        for axis in (a for a in walk.around if a.kind is Kind.SHARD_MAP):
            on_device &= jax.lax.axis_index(axis.name) == 0
            entries = [_gathered(entry, axis) for entry in entries]
        arrays = [a for e in entries for a in e.arrays]
        bare = tuple(e.bare for e in entries)
        # A new emission each time, so that the compiler does not merge two callbacks.
        emitted = dataclasses.replace(emission, entries=bare, conditional=bool(self._branches))
        emit(emitted, CountedIteration(number, active, on_device), arrays)

    def _scan(self, walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
        loop, every = Scan.of(eqn, args), self._every
        ncarry, start = len(loop.init), len(loop.consts)
        init = walk.materialize(eqn.invars[start : start + ncarry], loop.init)
        slots = Slots.of(loop.xs)
        xs = slots.arrays(loop.xs)
        rewind = walk.rewinder()
        slices = slots.fill(_jax.unstacked(jax.typeof(x)) for x in xs)
        around = Around(Kind.SCAN, "scan", loop.length)
        watched = self._watch(walk, loop.body, around, [*loop.consts, *init, *slices])
        rewind()
        self.entries += watched.entries
        if not watched.entries or not loop.length:
            return walk.handlers[Kind.SCAN](walk, eqn, args)
        receive = self._receivers(length=loop.length, reverse=loop.reverse)
        emission = Emission(receive, sites=watched.sites)
        ys_slots: list[Slots] = []

        def run_plain(state: list[Value], xs: list[Value], length: int) -> Any:
            """Run `length` iterations as the plain program does."""
            rewind()
            part = eqn.replace(params=dict(eqn.params, length=length))
            given = [*loop.consts, *state, *slots.fill(iter(xs))]
            outs = walk.handlers[Kind.SCAN](walk, part, given)
            ys_slots[:] = [Slots.of(outs[ncarry:])]
            return outs[:ncarry], ys_slots[0].arrays(outs[ncarry:])

        def run_chunk(number: Value, state: list[Value], xs: list[Value], length: int) -> Any:
            """Run `length` iterations, and stream the first of them."""
            parts: list[list[Value]] = []
            if loop.reverse and length > 1:
                state, ys = run_plain(state, [x[1:] for x in xs], length - 1)
                parts.append(ys)
            entries = watched.run([*loop.consts, *state, *slots.fill(x[0] for x in xs)])
            self._emit(walk, emission, entries, number * every, typed.asarray(True))
            if loop.reverse:
                xs, length = [x[:1] for x in xs], 1
            state, ys = run_plain(state, xs, length)
            return state, _concatenated([ys, *parts])

        def run_chunks(state: list[Value], xs: list[Value]) -> Any:
            def step(carry: Any, xs: list[Value]) -> Any:
                number, state = carry
                state, ys = run_chunk(number, state, xs, every)
                return (number + (-1 if loop.reverse else 1), state), ys

            first = typed.asarray(chunks - 1 if loop.reverse else 0, jnp.int32)
            xs = [x.reshape(chunks, every, *x.shape[1:]) for x in xs]
            (_, state), ys = jax.lax.scan(step, (first, state), xs, chunks, loop.reverse)
            return state, [y.reshape(chunks * every, *y.shape[2:]) for y in ys]

        chunks, rest = divmod(loop.length, every)
        whole = chunks * every
        state, parts = init, []
        order = ("rest", "chunks") if loop.reverse else ("chunks", "rest")
        for part in order:
            if part == "chunks" and chunks:
                state, ys = run_chunks(state, [x[:whole] for x in xs] if rest else xs)
                parts.append(ys)
            elif part == "rest" and rest:
                number = typed.asarray(chunks, jnp.int32)
                state, ys = run_chunk(number, state, [x[whole:] for x in xs] if whole else xs, rest)
                parts.append(ys)
        stacked = _concatenated(parts[::-1] if loop.reverse else parts)
        return [*state, *ys_slots[0].fill(iter(stacked))]

    def _while(self, walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
        test = eqn.params["cond_jaxpr"]
        args = walk.materialize(eqn.invars, args)
        loop = While.of(eqn, args, test if walk.nested else strip(test))
        inputs = [*loop.consts, *loop.init]
        rewind = walk.rewinder()
        around = Around(Kind.WHILE, "while", None)
        watched = self._watch(walk, loop.body, around, inputs)
        rewind()
        if not watched.entries:
            return walk.handlers[Kind.WHILE](walk, eqn, args)
        self.entries += watched.entries
        _refuse_uneven(walk, loop, watched.entries[0])
        staged = walk.stage(loop.body, inputs, whole=True, around=[around])
        emission = Emission(self._receivers(length=None, reverse=False), sites=watched.sites)
        zero = typed.zeros((), jnp.int32)

        def run_once(carry: Any) -> Any:
            count, state = carry
            results = _jax.as_function(staged.jaxpr)(
                *walk.operands(staged, [*loop.consts, *state])[0]
            )
            return count + 1, loop.keep_finished(results[: len(state)], state)

        def run_chunk(carry: Any) -> Any:
            past, state = carry
            entries = watched.run([*loop.consts, *state])
            self._emit(walk, emission, entries, past, loop.any_goes_on(state))
            count, state = jax.lax.while_loop(
                lambda carry: (carry[0] < self._every) & loop.any_goes_on(carry[1]),
                run_once,
                (zero, state),
            )
            return past + count, state

        count, state = jax.lax.while_loop(
            lambda carry: loop.any_goes_on(carry[1]), run_chunk, (zero, list(loop.init))
        )
        self._emit(walk, emission, [], count, typed.asarray(True))
        return list(state)


def _concatenated(parts: list[list[Value]]) -> list[Value]:
    if len(parts) == 1:
        return parts[0]
    return [jnp.concatenate(ys) for ys in zip(*parts, strict=True)]


def _gathered(entry: Entry, axis: Around) -> Entry:
    """Merge an entry over the devices along an axis of a mesh, if it varies over the axis."""
    entry = entry.even
    varying = _jax.varying_axes(jax.typeof(entry.arrays[0]))
    if not axis.unchecked and axis.name not in varying:
        return entry
    gathered = [jax.lax.all_gather(x, axis.name) for x in entry.arrays]
    assert axis.size is not None
    return merge_examples(entry.with_arrays(iter(gathered)), axis.size, None)


def _refuse_uneven(walk: Interpreter, loop: While, entry: Entry) -> None:
    """Raise if a loop may end on one device before it ends on another."""
    axes = [a for a in walk.around if a.kind is Kind.SHARD_MAP]
    over = _jax.varying_axes(_jax.open_jaxpr(loop.test).outvars[0].aval)
    if over or any(axis.unchecked for axis in axes):
        raise SiteError(
            f"The {entry.site.described}, cannot be streamed: its while loop is inside a shard_map "
            "and may end on one device before it does on another, so tapax cannot combine the "
            "devices. Stream a loop around the shard_map, or a scan."
        )
