"""The walk: an interpreter that goes over a traced program and collects what its taps carry.

`Interpreter.run` evaluates a jaxpr equation by equation. A tap is taken out: its operand goes
through, and what the plan selects is recorded. An equation that holds no tap is bound as it stands.
One that holds a tap in its body goes to its handler (`_walk.handlers`), which re-stages it with a
body that returns what was recorded inside as extra results.

What is recorded is a list of `Entry`s. Leaving a body changes them: a scan stacks them, a branch
adds a mask, a mesh adds an axis. The axes of an entry are, in order: loops and meshes (`lead` of
them), mapped axes, the value's own.

Marks with a reducer are not recorded but folded: see `_walk.folds`. Folds are threaded through
bodies as operands and extra results.

Gradients are paired with the call of a site by `Token`s: see `_marks.tap`. In the walk a token is
the set of the calls that it may stand for. Inside another capture, whose own walk comes later, taps
are left in the program, and a token has its array too.
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
from tapax._jaxpr.evaluate import evaluate
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._jaxpr.meshes import first_mesh
from tapax._marks.change import change_p, identity
from tapax._marks.context import active_policy
from tapax._marks.marked_jaxprs import TAPS, TappedBodies, is_of_two, strip
from tapax._marks.scopes import Scopes, scopes_of
from tapax._marks.tap import MAKES_TOKEN, Mark, operands, tap_effect, tap_p
from tapax._sites import SiteError
from tapax._walk.calls import Call, Token
from tapax._walk.changes import Around, Change, Changes, Key, layers_of
from tapax._walk.entries import Slots, StagedBody, Threads
from tapax._walk.plan import Plan
from tapax._walk.recorder import MetTap, Recorder


class WalkHooks:
    """What a walk does at the points where another use of it may do something else.

    Every method goes on as the walk itself does, unless a subclass decides otherwise.
    """

    def equation(self, walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
        """Evaluates an equation."""
        return walk.evaluate_equation(eqn, args)

    def tap(self, walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
        """Evaluates a tap."""
        return walk.evaluate_tap(eqn, args)

    def record(self, walk: Interpreter, tap: MetTap) -> None:
        """Records the value, or the gradient, of one call of a site."""
        walk.record(tap)

    def differentiate_edited(self, walk: Interpreter, edited: Sequence[Key]) -> None:
        """Sees the derivative of a function with a rule of its own in which something is edited."""
        raise SiteError(
            f"The site {edited[0].name!r} is edited inside a function with a derivative rule of "
            "its own (jax.custom_jvp or jax.custom_vjp), and that rule is the derivative of the "
            "function without the edit. Edit the function that takes the derivative instead: "
            "tapax.edit(jax.grad(fn), ...)."
        )

    def last_test(self, walk: Interpreter, record: Callable[[], None]) -> None:
        """Sees the end of a while loop, where what its predicate marks is recorded."""
        record()

    def opaque(self, walk: Interpreter, eqn: Equation) -> None:
        """Sees an equation with taps inside that the walk cannot reach."""

    def inside(
        self, walk: Interpreter, branch: int | None, around: Sequence[Around]
    ) -> contextlib.AbstractContextManager[Any]:
        """Wraps the walk of a body: a branch of this number, or the body of loops and meshes."""
        return contextlib.nullcontext()


class Interpreter(Recorder):
    """Goes over one program under one plan. `Walk` is the interpreter with its handlers."""

    handlers: ClassVar[Mapping[Kind, Handler]] = {}

    def __init__(self, plan: Plan, changes: Changes | None = None, hooks: WalkHooks | None = None):
        super().__init__(plan)
        self.changes = changes or Changes({}, {}, {})
        self.hooks = hooks or WalkHooks()
        self.lost: dict[str, str] = {}
        self.scopes: Scopes = ()
        self.mesh: Any = None
        self.nested = active_policy() is not None
        self.of_two = False
        self.shield = ""
        """What the walk is in that takes no derivative of its body from outside."""
        self._program: Jaxpr | None = None
        self._tapped = TappedBodies()
        self._recomputing = False
        self._replaying = frozenset[Call]()
        self._branches: tuple[int, ...] = ()

    def run(self, jaxpr: Jaxpr, args: Sequence[Value]) -> list[Value]:
        """Evaluates a jaxpr on `args`, recording what the plan selects."""
        inner = _jax.open_jaxpr(jaxpr)
        self._program = self._program or jaxpr

        def apply(number: int, eqn: Equation, values: list[Value]) -> list[Value]:
            del number
            if kind_of(eqn) is Kind.COND:
                self.of_two = is_of_two(inner, eqn)
            return _jax.in_context(eqn, self.hooks.equation, self, eqn, values)

        return evaluate(jaxpr, args, apply)

    @functools.cached_property
    def first_mesh(self) -> Mesh | None:
        """The first mesh that the program uses."""
        assert self._program is not None
        return first_mesh(self._program)

    def evaluate_equation(self, eqn: Equation, args: list[Value]) -> list[Value]:
        """Evaluates an equation; one that holds taps or takes tokens goes to its handler."""
        if eqn.primitive is tap_p:
            return self.hooks.tap(self, eqn, args)
        if eqn.primitive is change_p:
            return [self._derivative(eqn, args)]
        tokens = [a for a in args if type(a) is Token]
        tapped = tap_effect in eqn.effects
        if not tokens and not tapped:
            tapped = any(self._holds_taps(body) for body in bodies(eqn))
            if not tapped:
                return _jax.bind_equation(eqn, args)
        handler = self.handlers.get(kind_of(eqn))
        if handler is not None:
            outer, self.scopes = self.scopes, scopes_of(eqn, self.scopes)
            try:
                return handler(self, eqn, args)
            finally:
                self.scopes = outer
        if tapped:
            return self._opaque(eqn, args)
        # A residual without elements is only ever moved about: reshaped, selected, broadcast.
        calls = frozenset[Call]().union(*(t.calls for t in tokens))
        if not all(v.aval.size == 0 for v in eqn.outvars):
            return _jax.bind_equation(eqn, self.materialize(eqn.invars, args))
        if not self.nested:
            return [Token(calls)] * len(eqn.outvars)
        outs = _jax.bind_equation(eqn, self.materialize(eqn.invars, args))
        return [Token(calls, x) for x in outs]

    def _holds_taps(self, jaxpr: Jaxpr) -> bool:
        """Whether a body has to be walked: what is only computed once more may be edited too."""
        return self._tapped.has_taps(jaxpr) or bool(self.changes.within(jaxpr))

    @staticmethod
    def materialize(atoms: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The operands with tokens made into the empty arrays that they stand for."""
        return [
            a if type(a) is not Token else (_jax.zeros(v.aval) if a.array is None else a.array)
            for v, a in zip(atoms, args, strict=True)
        ]

    def evaluate_tap(self, eqn: Equation, args: list[Value]) -> list[Value]:
        """Takes a tap out of the program: changes and records what it marks."""
        mark, kind = eqn.params["mark"], eqn.params["kind"]
        own = operands(kind, mark)
        (x, *rest), live = args[:own], args[own] if len(args) > own else None
        # Whoever gives a condition does not know whether it is to be mapped.
        live = None if live is None or not live.ndim else live
        marked = eqn.invars[0].aval
        if isinstance(eqn.invars[0], _jax.Literal):
            x = typed.asarray(x, marked.dtype)
        grad = kind.startswith("grad")
        new = kind == "value" and not (self._recomputing and self._calls.of(mark))
        if new:
            scopes = scopes_of(eqn, self.scopes)
            here, layers = mark.within(scopes), layers_of(self.around, scopes)
            calls = [self._calls.new(here, eqn, self._branches, layers)]
        elif grad:
            owner = self._owner(eqn, rest[0])
            calls = [] if owner is None else [owner]
        else:
            calls = self._calls.standing_for(rest[0] if rest else None, eqn)
            calls = [c for c in calls if c in self._replaying] if self._replaying else calls
        if not kind.startswith("tangent"):
            change = self._change("grad" if grad else "value", calls, eqn)
            x = self.changes.apply(change, [x], eqn.params["axes"]) if change else x
        array = None
        if self.nested:
            bound = tap_p.bind(x, *self.materialize(eqn.invars[1:], args[1:]), **eqn.params)
            x, array = bound[0], bound[1] if len(bound) > 1 else None
        if new or grad:
            for call in calls:
                self.hooks.record(self, MetTap(eqn, [x, *rest[1:]], live, call, grad))
        return [x, Token(frozenset(calls), array)] if kind in MAKES_TOKEN else [x]

    def _change(self, of: str, calls: Sequence[Call], eqn: Equation) -> Change | None:
        """How one of some calls is changed; raises if it depends on which one it is."""
        calls = self._calls.narrowed(calls, eqn, self._branches)
        level = eqn.params["level"] if of == "grad" else None
        found = {self.changes.find(Key(of, call.name), level) for call in calls}
        if len(found) > 1:
            raise SiteError(
                f"The site {calls[0].name!r}, marked at {calls[0].mark.source}, is one of "
                f"{len(calls)} calls that share one traced function, and they are not edited "
                "alike: which of them it is cannot be told where its value is computed once more. "
                "Edit all of them alike, or give each a jit or a checkpoint of its own."
            )
        return found.pop() if found else None

    def _derivative(self, eqn: Equation, args: list[Any]) -> Any:
        """The derivative of what an edit does to a site."""
        params = eqn.params
        token, *operands = args
        calls = self._calls.standing_for(token, eqn, self._branches)
        change = self._change(params["of"], calls, eqn)
        if change is None and not self.nested:
            return identity(*operands, order=params["order"])
        (array,) = self.materialize(eqn.invars[:1], args[:1])
        if change is None:
            return change_p.bind(array, *operands, **params)

        def then(x: Value) -> Any:
            if not self.nested:
                return x
            fixed = {k: params[k] for k in ("mark", "of", "branches", "level")}
            here: Any = {"order": 0, "transposed": False, "axes": (), "in_value": ()}
            return change_p.bind(array, x, **fixed, **here)

        which = {k: params[k] for k in ("order", "transposed")}
        in_value = params["in_value"]
        return self.changes.apply(change, operands, params["axes"], in_value, then, **which)

    def _owner(self, eqn: Equation, token: Value) -> Call | None:
        """The call that a gradient belongs to; None if it is nobody's, and not asked for."""
        mark, calls = eqn.params["mark"], self._calls.standing_for(token, eqn, self._branches)
        if len(calls) == 1:
            return calls[0]
        asked = [c for c in calls if self._asks_for_gradient(c, eqn)]
        if not asked and calls:
            return None
        raise SiteError(
            f"The gradient of the {mark.described}, belongs to one of {len(calls)} calls, and "
            "which one cannot be told. The calls share one traced function: give each a jit or a "
            "checkpoint of its own, or leave the site out of `grads`."
        )

    def _asks_for_gradient(self, call: Call, eqn: Equation) -> bool:
        site = self._site(call, eqn, grad=True)
        changed = self.changes.find(Key("grad", call.name), eqn.params["level"])
        return changed is not None or bool(self.plan.choose(site, grad=True))

    def enter(self, *jaxprs: Any, once: bool = False) -> Threads:
        """What must be threaded through some bodies; one that runs `once` may change its folds."""
        folds = self.folds.enter(jaxprs, self.scopes, once=once)
        return Threads(folds, self.changes.needed(jaxprs))

    def handed(self, threads: Threads) -> list[Any]:
        """The arrays that bodies are given besides their operands: folds, and parts of changes."""
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
        """Within, what is recorded and folded is a body's own.

        Marks that are met when it is `recomputing`, or `replaying` some calls, are no new calls.
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

    def calls_since(self, before: int) -> frozenset[Call]:
        """The calls that the walk has come across since there were so many of them.

        A body that is computed once more has those of the first time.
        """
        return frozenset(self._calls.all[before:]) or self._replaying

    @property
    def calls_made(self) -> int:
        """How many calls the walk has come across."""
        return len(self._calls.all)

    def rewinder(self) -> Callable[[], None]:
        """A function that takes the numbers of calls back to where they are now.

        A loop that is evaluated, under `jax.disable_jit()`, has one body and not many calls.
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
        """Walks a body into a jaxpr: operands and threads in; results, entries and folds out.

        All results come out if they are to be `whole`; if not, tokens are left out.
        """
        threads = self.enter(jaxpr, once=True) if threads is None else threads
        ins, scopes = Slots.of(args), self.scopes

        def body(*flat: Value) -> Any:
            arrays = iter(flat)
            values, handed = ins.fill(arrays), list(arrays)
            count = len(handed) - len(threads.parts)
            with self.inside(**where):
                self.folds.restore(threads.folds, handed[:count])
                self.changes.hand_down(threads.parts, handed[count:])
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
            *ins.arrays(args), *self.handed(threads)
        )
        outs, entries, folds, certain = found.value
        return StagedBody(made, ins, outs, entries, threads, folds, certain)

    def operands(
        self, staged: StagedBody, args: Sequence[Value]
    ) -> tuple[list[Value], list[int | None]]:
        """The arrays that a staged body takes, and which operands of the equation they are."""
        own, handed = staged.ins.arrays(args), self.handed(staged.threads)
        return [*own, *handed], [*staged.ins.kept, *(None for _ in handed)]

    def unstage(self, staged: StagedBody, results: Sequence[Any]) -> list[Any]:
        """Takes apart what a staged body gave: records its entries, returns its own results."""
        flat = iter(results)
        outs = staged.outs.fill(flat)
        self.entries += [e.with_arrays(flat) for e in staged.entries]
        self.folds.restore(staged.folds, list(flat), staged.certain)
        return outs

    def _opaque(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """An equation that is no business of ours holds marks: they are lost, and said to be."""
        self.hooks.opaque(self, eqn)
        name = _jax.operation_name(eqn)
        stripped: list[Mark] = []
        params = {name: strip(value, stripped) for name, value in eqn.params.items()}
        for mark in stripped:
            mark = mark.within(scopes_of(eqn, self.scopes))
            self.lost[mark.path] = (
                f"it is marked at {mark.source}, inside a call of {name!r}, which "
                "is opaque: only what goes in and comes out of it can be captured, "
                f"with tapax.ops({eqn.primitive.name!r})"
            )
        plain = eqn.replace(params=params, effects=frozenset(eqn.effects) - TAPS)
        return _jax.bind_equation(plain, self.materialize(eqn.invars, args))


Handler = Callable[[Interpreter, Any, list[Any]], list[Any]]
