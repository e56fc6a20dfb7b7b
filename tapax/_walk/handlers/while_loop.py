"""The handler of while loops, and the buffers in which their bodies leave what is recorded.

How often a while loop runs is not known beforehand, so what its body records cannot be stacked.
Instead the loop carries, for each entry, its last value and how often there was one; or, where the
first few iterations are asked for, those and a mask.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._jax import Equation, Jaxpr, Value, typed
from tapax._jaxpr.kinds import Kind
from tapax._jaxpr.leading_axes import where
from tapax._jaxpr.restage import While
from tapax._marks.marked_jaxprs import strip
from tapax._marks.tap import Mark, tap_effect
from tapax._sites import SiteError, StepSlice
from tapax._walk.calls import Call, Token
from tapax._walk.carried_states import joined, nothing_yet, selected
from tapax._walk.changes import Around, CounterKey
from tapax._walk.entries import Entry, refuse_folded
from tapax._walk.interpreter import Interpreter
from tapax._walk.replayed_loops import BACKWARD, FIRST, ReplayedLoop, find_loop

_AROUND = Around(Kind.WHILE, "while", None)


def walk_while(walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
    test = eqn.params["cond_jaxpr"]
    _refuse_changes(walk, test)
    first, replay = find_loop(eqn, FIRST), find_loop(eqn, BACKWARD)
    replaying = None if replay is None else _replayed(eqn, args, replay)
    args = walk.materialize(eqn.invars, args)
    loop = While.of(eqn, args, test if walk.nested else strip(test))
    counter = CounterKey(len(walk.around))
    before = walk.calls_made
    with walk.inside():
        if walk.changes.counts(loop.body, counter.depth):
            walk.changes.count(typed.zeros((), jnp.int32), counter.depth)
        threads = walk.enter(loop.body)
        folds, parts = walk.folds.arrays(threads.folds), walk.changes.arrays(threads.parts)
        inputs = [*loop.consts, *loop.init]
        options: dict[str, Any] = {"around": [_AROUND], "replaying": replaying}
        staged = walk.stage(loop.body, inputs, threads, whole=True, **options)
        items = walk.folds.items
    walk.folds.items = items
    types = iter(staged.types)
    buffers = [
        _Buffer.of(walk, e, [next(types) for _ in e.arrays], backwards=replay is not None)
        for e in staged.entries
    ]
    tested = tap_effect in _jax.open_jaxpr(test).effects
    # If the loop ends on one device before it does on another, so does what is recorded in it.
    over = _jax.varying_axes(_jax.open_jaxpr(test).outvars[0].aval)
    # Whoever asks for nothing in the loop finds it as it was, without a count.
    counts = [typed.zeros((), jnp.int32)] if buffers or counter in threads.parts or tested else []

    def step(carry: _Carry) -> _Carry:
        count = carry.counts[0] if carry.counts else None
        keys = zip(threads.parts, parts, strict=True)
        iteration = count if replay is None else carry.state[replay.iteration].astype(jnp.int32)
        given = [iteration if key == counter else part for key, part in keys]
        inputs = [*loop.consts, *carry.state, *carry.folds, *given]
        results = iter(_jax.as_function(staged.jaxpr)(*inputs))
        new = loop.keep_finished([next(results) for _ in loop.init], carry.state)
        entries = [e.with_arrays(results) for e in staged.entries]
        kept = iter(carry.held)
        updated = [
            x
            for buffer, entry in zip(buffers, entries, strict=True)
            for x in buffer.update([next(kept) for _ in range(buffer.count)], entry, iteration)
        ]
        counted = [_jax.with_varying(x + 1, over) for x in carry.counts]
        return _Carry(new, list(results), counted, [_jax.with_varying(x, over) for x in updated])

    start = [x for buffer in buffers for x in buffer.start()]
    counts, held = ([_jax.with_varying(x, over) for x in part] for part in (counts, start))
    carry = _Carry(loop.init, [typed.asarray(x) for x in folds], counts, held)
    end = jax.lax.while_loop(lambda carry: loop.any_goes_on(carry.state), step, carry)
    walk.folds.restore(threads.folds, end.folds)
    arrays = iter(end.held)
    for buffer in buffers:
        walk.entries.append(buffer.finish([next(arrays) for _ in range(buffer.count)]))
    if tested:
        last = [*loop.test_consts, *end.state], end.counts[0] + 1
        walk.hooks.last_test(walk, lambda: _last_test(walk, test, *last))
    outs: list[Any] = list(end.state)
    calls = walk.calls_since(before)
    if first is not None and calls:
        outs[first.count] = Token(calls, outs[first.count])
    return outs


def _replayed(eqn: Equation, args: list[Value], replay: ReplayedLoop) -> frozenset[Call]:
    """The calls that a backward loop computes once more; none where that cannot be told."""
    skipped = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    left = args[skipped + replay.left]
    return left.calls if type(left) is Token else frozenset()


class _Carry(NamedTuple):
    """What a loop carries: its own state, folds, the number of the iteration, and buffers."""

    state: list[Value]
    folds: list[Value]
    counts: list[Value]
    held: list[Value]


def _refuse_changes(walk: Interpreter, test: Jaxpr) -> None:
    if walk.changes.within(test):
        marks: list[Mark] = []
        strip(test, marks)
        raise SiteError(
            f"The {marks[0].described}, is in the predicate of a while loop, where it cannot be "
            "edited or perturbed. Mark the value in the body."
        )


def _last_test(walk: Interpreter, test: Jaxpr, args: list[Any], count: Any) -> None:
    """Records what the predicate of a loop marks: it ran last on what the loop ended with."""
    nested, walk.nested = walk.nested, False  # the tap in the loop is there for the other capture
    with walk.inside(around=[_AROUND]):
        before = walk.folds.items
        walk.run(test, args)
        entries, folded = walk.entries, set(walk.folds.items) - set(before)
    if folded:
        raise SiteError(
            f"The site {folded.pop()!r} folds its values, but is in the predicate of a while loop, "
            "where only the last value can be captured. Sow it without `reduce`, or in the body."
        )
    walk.nested = nested
    for entry in entries:
        if entry.reduction is not None:
            raise SiteError(
                f"The {entry.site.described}, is in the predicate of a while loop, where only its "
                "last value can be captured, and no reducer can see the others. Capture it whole, "
                "or mark the value in the body."
            )
        if walk.plan.steps is not None or entry.step is not None:
            raise SiteError(
                f"The {entry.site.described}, is in the predicate of a while loop, where only its "
                "last value can be captured. Leave `steps` and `step` out, or mark the value in "
                "the body."
            )
        valid = count if entry.valid is None else entry.valid
        walk.entries.append(entry._replace(valid=valid).left_loop("while"))


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """What a while loop carries for an entry: its last value and their count, or the first few."""

    entry: Entry
    types: list[Any]
    window: tuple[int, int, int] | None
    single: bool
    backwards: bool

    @classmethod
    def of(cls, walk: Interpreter, entry: Entry, types: list[Any], *, backwards: bool) -> _Buffer:
        refuse_folded(entry)
        window, single = None, False
        if entry.step is not None:
            window, single = _window(entry), not isinstance(entry.step, StepSlice)
        elif walk.plan.steps is not None and not entry.is_total:
            window = (0, walk.plan.steps, 1)
        return cls(entry, types, window, single, backwards)

    @property
    def count(self) -> int:
        """How many arrays it has: those of a value, and one that says when there was one."""
        return len(self.entry.state) + 1

    def _ran(self, valid: Value) -> Any:
        """How often an entry was recorded in one iteration."""
        return typed.ones((), jnp.int32) if valid is None else valid.astype(jnp.int32)

    def start(self) -> list[Any]:
        if self.window is None and self.entry.reduction is not None:
            return nothing_yet(self.entry, self.types)
        valid = None if self.entry.valid is None else _jax.zeros(self.types[-1])
        ran = self._ran(valid)
        last = jax.typeof(ran if self.window is None else ran > 0)
        types = [*self.types[: self.count - 1], last]
        if self.window is not None:
            types = [_jax.stacked(t, self.window[1]) for t in types]
        # Devices that take other branches keep other values, even of what is the same on all.
        over = _jax.varying_axes(last)
        return [_jax.with_varying(_jax.zeros(t), over) for t in types]

    def update(self, held: list[Any], entry: Entry, iteration: Value) -> list[Any]:
        if self.window is None and entry.reduction is not None:
            return joined(self.entry, held, entry, backwards=self.backwards)
        *values, counted = held
        ran = self._ran(entry.valid)
        if self.window is None:
            new: list[Value] = entry.state
            # The last iteration is the first that a loop takes that runs backwards.
            kept = ran * (counted == 0) if self.backwards else ran
            if entry.valid is not None or self.backwards:
                new = [where(kept, x, y) for x, y in zip(new, values, strict=True)]
            return [*new, counted + ran]
        start, length, stride = self.window
        offset = iteration - start
        place = jnp.where((offset >= 0) & (offset % stride == 0), offset // stride, length)
        new = [*entry.state, ran > 0]
        if self.backwards:
            # It gets to an iteration several times, and takes it once.
            old = [x.at[place].get(mode="fill", fill_value=0) for x in held]
            new = [where(ran, x, y) for x, y in zip(new, old, strict=True)]
        elif entry.valid is not None:
            new = [where(ran, x, _jax.zeros(jax.typeof(x))) for x in new]
        both = zip(held, new, strict=True)
        return [old.at[place].set(x, mode="drop") for old, x in both]

    def finish(self, held: list[Any]) -> Entry:
        stacked = self.window is not None and not self.single
        if self.single:
            held = [x[0] for x in held]
        entry = self.entry._replace(valid=True).with_arrays(iter(held)).left_loop("while", stacked)
        if not entry.is_over_loops or self.single:
            return entry
        return selected(entry) if self.window else entry._replace(loops=self.entry.loops)


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
            f"step={step} was asked for of the {entry.site.described}, which is in a while loop: "
            "how often that runs is not known beforehand, so `step` must count from the start and "
            "have an end."
        )
    return first, count, stride
