"""The walk: an interpreter that evaluates a traced program and records the operands of its taps.

`Interpreter.run` evaluates a jaxpr equation by equation. It removes each tap, passes its operand
on, and records it if the plan selects it. It binds equations without taps unchanged. Equations with
taps in their bodies go to a handler (`_walk.handlers`), which restages them with a body that
returns the recorded values as extra results.

The recorded values are a list of `Entry`s. Leaving a body changes them: a scan stacks them, a
branch adds a mask, a mesh adds an axis. The axes of an entry are, in order: those of loops and
meshes (`lead` of them), batch axes, and the axes of the value itself.

The walk folds marks with a reducer instead of recording them: see `_walk.folds`. It threads the
folds through bodies as operands and extra results.

`Token`s pair gradients with the calls of sites: see `_marks.tap`. In the walk a token is the set of
calls from which it may come. If another capture surrounds this one, its walk comes later, so this
walk leaves the taps in the program, and a token has an array too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar

from jax.sharding import Mesh

from tapax import _jax
from tapax._jax import Equation, Jaxpr, Static, Value, typed
from tapax._jaxpr.bodies import bodies
from tapax._jaxpr.evaluate import bind_in_context, evaluate
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._jaxpr.meshes import first_mesh
from tapax._jaxpr.shared_bodies import SharedBodies
from tapax._marks.change import change_p
from tapax._marks.marked_jaxprs import TAPS, TappedBodies, strip
from tapax._marks.scopes import Scopes, scopes_of
from tapax._marks.tap import MAKES_TOKEN, Mark, operands, tap_effect, tap_p
from tapax._marks.turns import Turns
from tapax._sites import SiteError
from tapax._walk.calls import Call, Token
from tapax._walk.changer import Changer
from tapax._walk.changes import Around, Changes, Key, layers_of
from tapax._walk.entries import Slots, StagedBody, Threads
from tapax._walk.plan import Plan
from tapax._walk.recorder import MetTap

_TAPS = (tap_p, change_p)


class WalkHooks:
    """The methods by which a subclass may change a walk; these are the defaults."""

    def equation(self, walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
        """Evaluate an equation."""
        return walk.evaluate_equation(eqn, args)

    def tap(self, walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
        """Evaluate a tap."""
        return walk.evaluate_tap(eqn, args)

    def record(self, walk: Interpreter, tap: MetTap) -> None:
        """Record the value or the gradient of one call of a site."""
        walk.record(tap)

    def differentiate_edited(self, walk: Interpreter, edited: Sequence[Key]) -> None:
        """Handle the derivative of a function with a custom rule and an edit inside."""
        raise SiteError(
            f"The site {edited[0].name!r} is edited inside a function with a custom derivative "
            "rule (jax.custom_jvp or jax.custom_vjp), which is the derivative of the function "
            "without the edit. Edit the function that takes the derivative instead: "
            "tapax.edit(jax.grad(fn), ...)."
        )

    def last_test(self, walk: Interpreter, record: Callable[[], None]) -> None:
        """Record the marks in the predicate of a while loop, at the end of the loop."""
        record()

    def opaque(self, walk: Interpreter, eqn: Equation) -> None:
        """Handle an equation with taps inside that the walk cannot reach."""

    def inside(
        self, walk: Interpreter, branch: int | None, around: Sequence[Around]
    ) -> contextlib.AbstractContextManager[Any]:
        """Wrap the walk of a body: branch number `branch`, or a body inside loops and meshes."""
        return contextlib.nullcontext()


class Interpreter(Changer):
    """An interpreter of one program under one plan. `Walk` is the interpreter with handlers."""

    handlers: ClassVar[Mapping[Kind, Handler]] = {}

    def __init__(self, plan: Plan, changes: Changes | None = None, hooks: WalkHooks | None = None):
        super().__init__(plan, changes or Changes({}, {}, {}))
        self.hooks = hooks or WalkHooks()
        self.lost: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.scopes: Scopes = ()
        self.mesh: Any = None
        self.shield = ""
        """The function around the walk, in words, if no derivative from outside enters it."""
        self._program: Jaxpr | None = None
        self._tapped = TappedBodies()
        self._bodies = SharedBodies()
        self._recomputing = False
        self._replaying = frozenset[Call]()

    def run(self, jaxpr: Jaxpr, args: Sequence[Value]) -> list[Value]:
        """Evaluate a jaxpr on `args`, and record the sites that the plan selects."""
        self._program = self._program or jaxpr
        sees_all = type(self.hooks).equation is not WalkHooks.equation

        def apply(number: int, eqn: Equation, values: list[Value]) -> list[Value]:
            if not sees_all and self._is_unmarked(eqn, values):
                return bind_in_context(number, eqn, values)
            return _jax.in_context(eqn, self.hooks.equation, self, eqn, values)

        return evaluate(jaxpr, args, apply)

    @property
    def program(self) -> Jaxpr:
        """The program of the walk, with its constants as inputs, so that it keeps no arrays."""
        assert self._program is not None
        return _jax.closed(self._program)[0]

    @functools.cached_property
    def _turns(self) -> Turns:
        assert self._program is not None
        return Turns(self._program)

    @functools.cached_property
    def first_mesh(self) -> Mesh | None:
        """The first mesh that the program uses."""
        assert self._program is not None
        return first_mesh(self._program)

    def evaluate_equation(self, eqn: Equation, args: list[Value]) -> list[Value]:
        """Evaluate an equation, by its handler if it has taps inside or tokens as operands."""
        if eqn.primitive is tap_p:
            return self.hooks.tap(self, eqn, args)
        if eqn.primitive is change_p:
            return [self.evaluate_derivative(eqn, args)]
        if self._is_unmarked(eqn, args):
            return _jax.bind_equation(eqn, args)
        handler = self.handlers.get(kind_of(eqn))
        if handler is not None:
            outer, self.scopes = self.scopes, scopes_of(eqn, self.scopes)
            try:
                return handler(self, eqn, args)
            finally:
                self.scopes = outer
        tokens = [a for a in args if type(a) is Token]
        if not tokens or tap_effect in eqn.effects:
            return self._opaque(eqn, args)
        # Equations only rearrange a residual without elements: reshape, select, broadcast.
        calls = frozenset[Call]().union(*(t.calls for t in tokens))
        if not all(v.aval.size == 0 for v in eqn.outvars):
            return _jax.bind_equation(eqn, self.materialize(eqn.invars, args))
        if not self.nested:
            return [Token(calls)] * len(eqn.outvars)
        outs = _jax.bind_equation(eqn, self.materialize(eqn.invars, args))
        return [Token(calls, x) for x in outs]

    def _is_unmarked(self, eqn: Equation, args: Sequence[Value]) -> bool:
        """Return whether an equation neither is nor contains a tap, and takes no token."""
        if eqn.primitive in _TAPS or tap_effect in eqn.effects or Token in map(type, args):
            return False
        return not any(self._must_walk(body) for body in bodies(eqn))

    def _must_walk(self, jaxpr: Jaxpr) -> bool:
        """Return whether the walk must enter a body; a recomputed value may be edited too."""
        return self._tapped.has_taps(jaxpr) or bool(self.changes.within(jaxpr))

    def evaluate_tap(self, eqn: Equation, args: list[Value]) -> list[Value]:
        """Remove a tap from the program; change and record its operand."""
        mark, kind = eqn.params["mark"], eqn.params["kind"]
        if mark.missing:
            return self._note_missing(eqn, args)
        count = operands(kind, mark)
        (x, *rest), active = args[:count], args[count] if len(args) > count else None
        # A condition that was never mapped has no meaning.
        active = None if active is None or not active.ndim else active
        marked = eqn.invars[0].aval
        if isinstance(eqn.invars[0], _jax.Literal):
            x = typed.asarray(x, marked.dtype)
        grad = kind.startswith("grad")
        new = kind == "value" and not (self._recomputing and self._calls.of(mark))
        if new:
            scopes = scopes_of(eqn, self.scopes)
            here, layers = mark.within(scopes), layers_of(self.around, scopes)
            calls = [self._calls.new(here, eqn, self._branches, layers, self._turns)]
        elif grad:
            call_of_gradient = self.find_gradient_call(eqn, rest[0])
            calls = [] if call_of_gradient is None else [call_of_gradient]
        else:
            calls = self._calls.possible_calls(rest[0] if rest else None, eqn)
            calls = [c for c in calls if c in self._replaying] if self._replaying else calls
        self.changes.meet(call.name for call in calls)
        if not new and self.plan.changing and not mark.changing:
            self.refuse_kept(calls, eqn)
        if not kind.startswith("tangent"):
            change = self.find_change("grad" if grad else "value", calls, eqn)
            x = self.changes.apply(change, [x], eqn.params["axes"]) if change else x
        array = None
        if self.nested:
            bound = tap_p.bind(x, *self.materialize(eqn.invars[1:], args[1:]), **eqn.params)
            x, array = bound[0], bound[1] if len(bound) > 1 else None
        if new or grad:
            first = len(self.entries)
            for call in calls:
                self.hooks.record(self, MetTap(eqn, [x, *rest[1:]], active, call, grad))
            x = self.reduce_before_use(x, first)
        return [x, Token(frozenset(calls), array)] if kind in MAKES_TOKEN else [x]

    def _note_missing(self, eqn: Equation, args: list[Value]) -> list[Value]:
        """Remove a tap of a site without a value; note the site if the plan selects it."""
        mark = eqn.params["mark"].within(scopes_of(eqn, self.scopes))
        site = mark.site()
        selected = (self.plan.choose(site, grad) for grad in (False, True))
        if self.plan.sees(site, mark) and any(selected):
            self.missing[mark.path] = mark.missing
        x, *arrays = args[0], *[None] * (len(eqn.outvars) - 1)
        if self.nested:
            x, *arrays = tap_p.bind(*self.materialize(eqn.invars, args), **eqn.params)
        return [x, *(Token(frozenset[Call](), array) for array in arrays)]

    def enter(
        self, *jaxprs: Any, once: bool = False, uneven: frozenset[str] = frozenset()
    ) -> Threads:
        """Return the threads of bodies; bodies that run `once` may change the types of folds.

        The devices along the mesh axes `uneven` run the bodies unevenly.
        """
        folds = self.folds.enter(jaxprs, self.scopes, once=once, uneven=uneven)
        return Threads(folds, self.changes.needed(jaxprs))

    def thread_arrays(self, threads: Threads) -> list[Any]:
        """Return the extra inputs of bodies: the arrays of folds and of the parts of changes."""
        return [*self.folds.arrays(threads.folds), *self.changes.arrays(threads.parts)]

    @contextlib.contextmanager
    def inside(
        self,
        *,
        recomputing: bool = False,
        replaying: frozenset[Call] | None = None,
        branch: int | None = None,
        around: Sequence[Around] = (),
        shield: str = "",
    ) -> Generator[None]:
        """Walk a body within the context, and record and fold separately there.

        While the walk is `recomputing`, or `replaying` some calls, marks are not new calls.
        """
        before = self.entries, self.folds.items, self._recomputing, self._branches, self.around
        parts, outer_shield, outer_replay = self.changes.parts, self.shield, self._replaying
        hook = self.hooks.inside(self, branch, around)
        self.entries = []
        self._recomputing |= recomputing or replaying is not None
        self._replaying = replaying or self._replaying
        if branch is not None:
            self._branches = (*self._branches, branch)
        self.around = (*self.around, *around)
        self.shield = shield or self.shield
        try:
            with hook:
                yield
        finally:
            self.shield, self._replaying = outer_shield, outer_replay
            self.entries, self.folds.items, self._recomputing, self._branches, self.around = before
            self.changes.parts = parts

    @property
    def runs_once(self) -> bool:
        return not (self.around or self._branches or self.shield)

    def calls_since(self, before: int) -> frozenset[Call]:
        """Return all calls but the first `before`, or the calls that a recomputed body replays."""
        return frozenset(self._calls.all[before:]) or self._replaying

    @property
    def calls_made(self) -> int:
        """The number of calls that the walk has met."""
        return len(self._calls.all)

    def rewinder(self) -> Callable[[], None]:
        """Return a function that resets the numbers of calls to their current state.

        Under `jax.disable_jit()` the iterations of a loop share the calls of one body.
        """
        calls, sites = self._calls.numbers(), len(self.sites)

        def rewind() -> None:
            self._calls.rewind(calls)
            del self.sites[sites:]

        return rewind

    def stage(
        self,
        jaxpr: Jaxpr,
        args: Sequence[Any],
        threads: Threads | None = None,
        *,
        whole: bool = False,
        **where: Any,
    ) -> StagedBody:
        """Walk a body into a jaxpr of operands and threads that returns results, entries and folds.

        With `whole`, the jaxpr returns all results; otherwise it leaves tokens out.
        """
        threads = self.enter(jaxpr, once=True) if threads is None else threads
        ins, scopes = Slots.of(args), self.scopes

        def body(*flat: Value) -> Any:
            arrays = iter(flat)
            values, extra = ins.fill(arrays), list(arrays)
            count = len(extra) - len(threads.parts)
            with self.inside(**where):
                self.folds.restore(threads.folds, extra[:count])
                self.changes.set_arrays(threads.parts, extra[count:])
                outs = self.run(jaxpr, values)
                if whole:
                    outs = self.materialize(_jax.open_jaxpr(jaxpr).outvars, outs)
                slots = Slots.of(outs)
                folds = self.folds.leave(threads.folds, jaxpr, scopes)
                arrays = [
                    *slots.arrays(outs),
                    *(a for e in self.entries for a in e.arrays),
                    *self.folds.arrays(folds),
                ]
                entries = tuple(e.bare for e in self.entries)
                return arrays, Static((slots, entries, folds, self.folds.certain(folds)))

        made, (_, found) = typed.make_jaxpr(body, return_shape=True)(
            *ins.arrays(args), *self.thread_arrays(threads)
        )
        made = self._bodies.share(made)
        outs, entries, folds, certain = found.value
        return StagedBody(made, ins, outs, entries, threads, folds, certain)

    def operands(
        self, staged: StagedBody, args: Sequence[Value]
    ) -> tuple[list[Value], list[int | None]]:
        """Return the inputs of a staged body, and their numbers among the equation's operands."""
        extra = self.thread_arrays(staged.threads)
        inputs = [*staged.ins.arrays(args), *extra]
        return inputs, [*staged.ins.kept, *(None for _ in extra)]

    def unstage(self, staged: StagedBody, results: Sequence[Any]) -> list[Any]:
        """Record the entries and folds of a staged body, and return the results of the equation."""
        flat = iter(results)
        outs = staged.outs.fill(flat)
        self.entries += [e.with_arrays(flat) for e in staged.entries]
        self.folds.restore(staged.folds, list(flat), staged.certain)
        return outs

    def _opaque(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Bind an equation whose body the walk cannot enter, without taps; list these as lost."""
        self.hooks.opaque(self, eqn)
        name = _jax.operation_name(eqn)
        stripped: list[Mark] = []
        params = {name: strip(value, stripped) for name, value in eqn.params.items()}
        for mark in stripped:
            mark = mark.within(scopes_of(eqn, self.scopes))
            self.lost[mark.path] = (
                f"it is marked at {mark.source}, inside a call of {name!r}, which "
                "is opaque: only its operands and results can be captured, "
                f"with tapax.ops({eqn.primitive.name!r})"
            )
        plain = eqn.replace(params=params, effects=frozenset(eqn.effects) - TAPS)
        return _jax.bind_equation(plain, self.materialize(eqn.invars, args))


Handler = Callable[[Interpreter, Any, list[Any]], list[Any]]
