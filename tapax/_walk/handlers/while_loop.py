"""The handler of while loops, and the buffers that they carry for the entries of their bodies.

The number of iterations of a while loop is not known beforehand, so the loop cannot stack the
entries of its body. Instead it carries, for each entry, the last value and a count; or, if the plan
asks for certain iterations, their values and a mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._jax import Equation, Jaxpr, Value, typed
from tapax._jaxpr.kinds import Kind
from tapax._jaxpr.leading_axes import where
from tapax._jaxpr.restage import While, uneven_axes
from tapax._marks.marked_jaxprs import strip
from tapax._marks.tap import Mark, tap_effect
from tapax._sites import SiteError, StepSlice
from tapax._walk.calls import Call, Token
from tapax._walk.carried_states import combine_iteration, initial_states, selected
from tapax._walk.changes import Around, CounterKey, Key
from tapax._walk.entries import Entry, refuse_folded
from tapax._walk.interpreter import Interpreter
from tapax._walk.replayed_loops import BACKWARD, FIRST, ReplayedLoop, find_loop

_AROUND = Around(Kind.WHILE, "while", None)


def walk_while(walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
    test = eqn.params["cond_jaxpr"]
    first, replay = find_loop(eqn, FIRST), find_loop(eqn, BACKWARD)
    replaying = None if replay is None else _replayed(eqn, args, replay)
    args = walk.materialize(eqn.invars, args)
    loop = While.of(eqn, args, test if walk.nested else strip(test))
    counter = CounterKey(len(walk.around))
    before = walk.calls_made
    # If the number of iterations varies over devices, so do the entries and the folds.
    over = uneven_axes(eqn)
    with walk.inside():
        if walk.changes.counts(loop.body, counter.depth):
            number = _jax.with_varying(typed.zeros((), jnp.int32), over)
            walk.changes.count(number, counter.depth)
        threads = walk.enter(loop.body, uneven=over)
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
    if not tested:
        _refuse_changes(test, walk.changes.within(test))
    # Count iterations only if something in the loop needs the count.
    counts = [typed.zeros((), jnp.int32)] if buffers or counter in threads.parts or tested else []

    def step(carry: _Carry) -> _Carry:
        count = carry.counts[0] if carry.counts else None
        keys = zip(threads.parts, parts, strict=True)
        iteration = count if replay is None else carry.state[replay.iteration].astype(jnp.int32)
        given = [_jax.with_varying(iteration, over) if k == counter else part for k, part in keys]
        inputs = [*loop.consts, *carry.state, *carry.folds, *given]
        results = iter(_jax.as_function(staged.jaxpr)(*inputs))
        new = loop.keep_finished([next(results) for _ in loop.init], carry.state)
        entries = [e.with_arrays(results) for e in staged.entries]
        kept = iter(carry.buffered)
        updated = [
            x
            for buffer, entry in zip(buffers, entries, strict=True)
            for x in buffer.update([next(kept) for _ in range(buffer.count)], entry, iteration)
        ]
        counted = [_jax.with_varying(x + 1, over) for x in carry.counts]
        return _Carry(new, list(results), counted, [_jax.with_varying(x, over) for x in updated])

    start = [x for buffer in buffers for x in buffer.start()]
    counts, buffered = ([_jax.with_varying(x, over) for x in part] for part in (counts, start))
    carry = _Carry(loop.init, [typed.asarray(x) for x in folds], counts, buffered)
    end = jax.lax.while_loop(lambda carry: loop.any_goes_on(carry.state), step, carry)
    walk.folds.restore(threads.folds, end.folds)
    arrays = iter(end.buffered)
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
    """Return the calls that a backward loop recomputes; an empty set if no token tells."""
    skipped = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    left = args[skipped + replay.left]
    return left.calls if type(left) is Token else frozenset()


class _Carry(NamedTuple):
    """The carry of a restaged loop: its state, folds, the number of iterations, and buffers."""

    state: list[Value]
    folds: list[Value]
    counts: list[Value]
    buffered: list[Value]


def _refuse_changes(test: Jaxpr, changes: Sequence[Key]) -> None:
    if changes:
        marks: list[Mark] = []
        strip(test, marks)
        raise SiteError(
            f"The {marks[0].described}, is in the predicate of a while loop, where it cannot be "
            "edited or perturbed. Mark the value in the body."
        )


def _last_test(walk: Interpreter, test: Jaxpr, args: list[Any], count: Any) -> None:
    """Record the marks in the predicate of a loop, which ran last on the final state."""
    nested, walk.nested = walk.nested, False  # the outer capture sees the tap in the loop
    with walk.inside(around=[_AROUND]):
        before, changes_met_in = walk.folds.items, walk.changes.recorder()
        walk.run(test, args)
        _refuse_changes(test, changes_met_in(test))
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
    """The carry for an entry: its last value and a count, or the iterations in a window."""

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
        """The number of arrays: those of the value, and a count or a mask."""
        return len(self.entry.state) + 1

    def _ran(self, valid: Value) -> Any:
        """Return the number of recordings of an entry in one iteration."""
        return typed.ones((), jnp.int32) if valid is None else valid.astype(jnp.int32)

    def start(self) -> list[Any]:
        if self.window is None and self.entry.reduction is not None:
            return initial_states(self.entry, self.types)
        valid = None if self.entry.valid is None else _jax.zeros(self.types[-1])
        ran = self._ran(valid)
        last = jax.typeof(ran if self.window is None else ran > 0)
        types = [*self.types[: self.count - 1], last]
        if self.window is not None:
            types = [_jax.stacked(t, self.window[1]) for t in types]
        # Devices that take different branches keep different values, even of replicated arrays.
        over = _jax.varying_axes(last)
        return [_jax.with_varying(_jax.zeros(t), over) for t in types]

    def update(self, arrays: list[Any], entry: Entry, iteration: Value) -> list[Any]:
        if self.window is None and entry.reduction is not None:
            return combine_iteration(self.entry, arrays, entry, backwards=self.backwards)
        *values, counted = arrays
        ran = self._ran(entry.valid)
        if self.window is None:
            new: list[Value] = entry.state
            # A loop that runs backwards meets the last iteration first.
            kept = ran * (counted == 0) if self.backwards else ran
            if entry.valid is not None or self.backwards:
                new = [where(kept, x, y) for x, y in zip(new, values, strict=True)]
            return [*new, counted + ran]
        start, length, stride = self.window
        offset = iteration - start
        position = jnp.where((offset >= 0) & (offset % stride == 0), offset // stride, length)
        new = [*entry.state, ran > 0]
        if self.backwards:
            # The loop runs an iteration several times, but records it once.
            old = [x.at[position].get(mode="fill", fill_value=0) for x in arrays]
            new = [where(ran, x, y) for x, y in zip(new, old, strict=True)]
        elif entry.valid is not None:
            new = [where(ran, x, _jax.zeros(jax.typeof(x))) for x in new]
        both = zip(arrays, new, strict=True)
        return [old.at[position].set(x, mode="drop") for old, x in both]

    def finish(self, arrays: list[Any]) -> Entry:
        stacked = self.window is not None and not self.single
        if self.single:
            arrays = [x[0] for x in arrays]
        entry = self.entry._replace(valid=True).with_arrays(iter(arrays))
        entry = entry.left_loop("while", stacked)
        if not entry.is_over_loops or self.single:
            return entry
        return selected(entry) if self.window else entry._replace(loops=self.entry.loops)


def _window(entry: Entry) -> tuple[int, int, int]:
    """Return the first requested iteration of a while loop, the number of them and the stride."""
    step = entry.step
    if isinstance(step, int):
        first, count, stride = step, 1, 1
    else:
        first, stride = step.start or 0, step.stride or 1
        count = 0 if step.stop is None else len(range(first, step.stop, stride))
    if first < 0 or stride < 1 or count < 1:
        raise SiteError(
            f"step={step} was given for the {entry.site.described}, which is in a while loop. The "
            "number of its iterations is not known beforehand, so `step` must count from the start "
            "and have an end."
        )
    return first, count, stride
