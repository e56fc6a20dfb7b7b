"""The walk: an interpreter that goes over a traced program and collects what its taps carry.

`Walk.run` evaluates a jaxpr equation by equation. A tap is taken out: its operand goes through,
and what the plan selects is recorded. An equation that holds no tap is bound as it stands. One
that holds a tap in its body goes to its row of `HANDLERS`, which re-stages it with a body that
returns what was recorded inside as extra results.

What is recorded is a list of `Entry`s. Leaving a body changes them: a scan stacks them, a branch
adds a mask, a mesh adds an axis. The axes of an entry are, in order: loops and meshes (`lead` of
them), mapped axes, the value's own.

Marks with a reducer are not recorded but folded: see `_fold`. Folds are threaded through bodies as
operands and extra results.

Gradients are paired with the call of a site by `Token`s: see `_tap`. In the walk a token is the set
of the calls that it may stand for. Inside another capture, whose own walk comes later, taps are
left in the program, and a token has its array too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtap import _compat
from jaxtap._bodies import bodies, is_of_two, strip
from jaxtap._fold import Folds, Thread, same_fold
from jaxtap._mark import leaf_name, marking
from jaxtap._plan import Plan
from jaxtap._record import Call, Entry, Slots, Staged, Token, where
from jaxtap._scopes import Scopes, scopes_of
from jaxtap._sites import Site, SiteError
from jaxtap._tap import Mark, operands, tap_effect, tap_p


class Walk:
    """One walk over one program, under one plan."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.entries: list[Entry] = []
        self.folds = Folds(plan)
        self.sites: list[Site] = []
        self.lost: dict[str, str] = {}
        self.scopes: Scopes = ()
        self.loops: tuple[tuple[str, int | None], ...] = ()
        self.nested = marking() is not None
        self.of_two = False
        self._calls: Counter[str] = Counter()
        self._pullbacks: Counter[Any] = Counter()
        self._known: dict[tuple[str, int], Call] = {}
        self._by_uid: dict[int, list[Call]] = {}
        self._marks: dict[str, Mark] = {}
        self._recomputing = False
        self._branches: tuple[int, ...] = ()

    def run(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr on `args`, recording what the plan selects."""
        env = dict(_compat.jaxpr_inputs(jaxpr, args))
        inner = _compat.open_jaxpr(jaxpr)

        def read(atom: Any) -> Any:
            if isinstance(atom, _compat.Literal):
                return _compat.literal_value(atom)
            return env[atom]

        for eqn in inner.eqns:
            values = [read(v) for v in eqn.invars]
            if eqn.primitive.name == "cond":
                self.of_two = is_of_two(inner, eqn)
            outs = _compat.in_context(eqn, self._equation, eqn, values)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in inner.outvars]

    def _equation(self, eqn: Any, args: list[Any]) -> list[Any]:
        if eqn.primitive is tap_p:
            return self._tap(eqn, args)
        tokens = [a for a in args if type(a) is Token]
        tapped = tap_effect in eqn.effects
        if not tokens and not tapped:
            # Some equations keep the effects of their bodies to themselves.
            tapped = any(tap_effect in _compat.open_jaxpr(body).effects for body in bodies(eqn))
            if not tapped:
                return _compat.bind_equation(eqn, args)
        handler = HANDLERS.get(_compat.kind_of(eqn))
        if handler is not None:
            outer, self.scopes = self.scopes, scopes_of(eqn, self.scopes)
            try:
                return handler(self, eqn, args)
            finally:
                self.scopes = outer
        if tapped:
            return self._opaque(eqn, args)
        # A residual without elements is only ever moved about: reshaped, selected, broadcast.
        calls = frozenset().union(*(t.calls for t in tokens))
        if not all(v.aval.size == 0 for v in eqn.outvars):
            return _compat.bind_equation(eqn, self.materialize(eqn.invars, args))
        if not self.nested:
            return [Token(calls)] * len(eqn.outvars)
        outs = _compat.bind_equation(eqn, self.materialize(eqn.invars, args))
        return [Token(calls, x) for x in outs]

    @staticmethod
    def materialize(atoms: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The operands with tokens made into the empty arrays that they stand for."""
        return [
            a if type(a) is not Token else (_compat.zeros(v.aval) if a.array is None else a.array)
            for v, a in zip(atoms, args, strict=True)
        ]

    # --- taps ---------------------------------------------------------------------------------

    def _tap(self, eqn: Any, args: list[Any]) -> list[Any]:
        mark, kind = eqn.params["mark"], eqn.params["kind"]
        own = operands(kind)
        (x, *rest), live = args[:own], args[own] if len(args) > own else None
        if isinstance(eqn.invars[0], _compat.Literal):
            x = jnp.asarray(x, eqn.invars[0].aval.dtype)
        token = rest[0] if rest else None
        array = None
        if self.nested:
            bound = tap_p.bind(x, *self.materialize(eqn.invars[1:], args[1:]), **eqn.params)
            x, array = bound[0], bound[1] if len(bound) > 1 else None
        if kind == "value":
            again = self._by_uid.get(mark.uid) if self._recomputing else None
            if again:
                return [x, Token(frozenset(again), array)]
            call = self._call(mark.within(scopes_of(eqn, self.scopes)), eqn)
            self._record(eqn, x, live, call, grad=False)
            return [x, Token(frozenset({call}), array)]
        if kind == "copy":
            return [x, Token(frozenset(self._by_uid.get(mark.uid, ())), array)]
        if kind.startswith("grad"):
            call = self._owner(eqn, mark, token)
            if call is not None:
                self._record(eqn, x, live, call, grad=True)
        return [x]

    def _call(self, mark: Mark, eqn: Any) -> Call:
        first = self._marks.setdefault(mark.path, mark)
        if not same_fold(first, mark):
            raise SiteError(
                f"The site {mark.path!r} is sown at {first.source} and at {mark.source} with "
                "reducers that differ, so its calls cannot be folded into one. Give both the same "
                "`reduce` and `init`, or another name to one of them."
            )
        number = self._calls[mark.path] + eqn.params["shift"]
        self._calls[mark.path] += 1
        branches = (*self._branches, *eqn.params["branches"])
        known = self._known.get((mark.path, number))
        if known is not None and known.branches == branches:
            return known  # another iteration of a loop that is evaluated
        call = self._known[mark.path, number] = Call(mark, number, branches)
        self._by_uid.setdefault(mark.uid, []).append(call)
        return call

    def _owner(self, eqn: Any, mark: Mark, token: Any) -> Call | None:
        """The call that a gradient belongs to; None if it is nobody's, and not asked for."""
        calls = token.calls if type(token) is Token else self._by_uid.get(mark.uid, ())
        calls = [c for c in calls if c.mark.uid == mark.uid]
        if len(calls) > 1:
            # Residuals of branches share their places: this one is read in a branch of its own.
            branches = (*self._branches, *eqn.params["branches"])
            calls = [c for c in calls if c.branches == branches] or calls
        if len(calls) == 1:
            return calls[0]
        asked = [c for c in calls if self.plan.choose(self._site(c, eqn, grad=True), grad=True)]
        if not asked and calls:
            return None
        raise SiteError(
            f"The gradient of the site {mark.path!r}, marked at {mark.source}, belongs to one of "
            f"{len(calls)} calls, and which one cannot be told. The calls share one traced "
            "function: give each a jit or a checkpoint of its own, or leave the site out of "
            "`grads`."
        )

    def _site(self, call: Call, eqn: Any, *, grad: bool, pullback: int = 0) -> Site:
        """The site as a predicate sees it: with the loops that it is known to be in."""
        mark, aval = call.mark, eqn.invars[0].aval
        axes = eqn.params["axes"]
        front = [aval.shape[a] for a in axes]
        own = [n for i, n in enumerate(aval.shape) if i not in axes]
        folded = mark.reduce is not None and not grad
        lengths = [] if folded else [n for _, n in self.loops if n is not None]
        return Site(
            mark.path,
            mark.kind,
            (*lengths, *front, *own),
            aval.dtype,
            mark.source,
            () if folded else tuple(name for name, _ in self.loops),
            call=0 if folded else call.number,
            pullback=pullback,
            op=mark.op,
            module=mark.module,
            method=mark.method,
            collection=mark.collection,
        )

    def _record(self, eqn: Any, x: Any, live: Any, call: Call, *, grad: bool) -> None:
        again = eqn.params["kind"] == "grad again"
        number = self._pullbacks[call] if grad else 0
        if grad and not again:
            self._pullbacks[call] += 1
        site = self._site(call, eqn, grad=grad, pullback=number)
        if not self.plan.sees(site, call.mark):
            return
        self.sites.append(dataclasses.replace(site, kind="grad") if grad else site)
        chosen = self.plan.choose(site, grad)
        if chosen is None:
            return
        axes = eqn.params["axes"]
        order = tuple(range(len(axes)))
        x = x if axes == order else jnp.moveaxis(x, axes, order)
        if getattr(x, "weak_type", False):
            x = jax.lax.convert_element_type(x, x.dtype)
        if call.mark.reduce is not None and not grad:
            self.folds.add(call.mark, x, len(axes), live)
            return
        if live is not None:
            x = where(live, x, _compat.zeros(jax.typeof(x)))
        self.entries.append(Entry(site, call, grad, x, live, step=chosen.step, again=again))

    def fold_entries(self) -> list[Entry]:
        """The folds as entries; a structured one has one for each leaf."""
        entries = []
        for path, fold in self.folds.items.items():
            site = next(s for s in self.sites if s.path == path)
            for keys, leaf in jax.tree_util.tree_leaves_with_path(fold.state):
                name = path + (f":{leaf_name(keys)}" if keys else "")
                entries.append(
                    Entry(
                        dataclasses.replace(site, path=name),
                        self._known[path, 0],
                        False,
                        jnp.asarray(leaf),
                        None if fold.seen is True else fold.seen,
                        folded=True,
                    )
                )
        return entries

    # --- bodies -------------------------------------------------------------------------------

    def enter(self, *jaxprs: Any) -> tuple[Thread, ...]:
        """What must be threaded through some bodies."""
        return self.folds.enter(jaxprs, self.scopes)

    @contextlib.contextmanager
    def inside(
        self,
        *,
        recomputing: bool = False,
        branch: int | None = None,
        loop: tuple[str, int | None] | None = None,
    ) -> Iterator[None]:
        """Within, what is recorded and folded is a body's own."""
        before = self.entries, self.folds.items, self._recomputing, self._branches, self.loops
        self.entries = []
        self._recomputing |= recomputing
        if branch is not None:
            self._branches = (*self._branches, branch)
        if loop is not None:
            self.loops = (*self.loops, loop)
        try:
            yield
        finally:
            self.entries, self.folds.items, self._recomputing, self._branches, self.loops = before

    @contextlib.contextmanager
    def replayed(self) -> Iterator[Callable[[], None]]:
        """Yields a function that takes the numbers of calls back to where they are now.

        A loop that is evaluated, under `jax.disable_jit()`, has one body and not many calls.
        """
        calls, pullbacks, sites = Counter(self._calls), Counter(self._pullbacks), len(self.sites)

        def rewind() -> None:
            self._calls, self._pullbacks = Counter(calls), Counter(pullbacks)
            del self.sites[sites:]

        yield rewind

    def stage(
        self,
        jaxpr: Any,
        args: Sequence[Any],
        threads: tuple[Thread, ...],
        **where: Any,
    ) -> Staged:
        """Walks a body into a jaxpr: operands and threads in; results, entries and threads out."""
        ins = Slots.of(args)
        cell: dict[str, Any] = {}

        def body(*flat: Any) -> list[Any]:
            arrays = iter(flat)
            values = ins.fill(arrays)
            with self.inside(**where):
                self.folds.restore(threads, list(arrays))
                outs = self.run(jaxpr, values)
                cell.update(
                    outs=Slots.of(outs),
                    entries=tuple(e.bare for e in self.entries),
                    certain=self.folds.certain(threads),
                )
                return [
                    *cell["outs"].arrays(outs),
                    *(a for e in self.entries for a in e.arrays),
                    *self.folds.arrays(threads),
                ]

        made = jax.make_jaxpr(body)(*ins.arrays(args), *self.folds.arrays(threads))
        return Staged(made, ins, threads=threads, **cell)

    def unstage(self, staged: Staged, results: Sequence[Any]) -> list[Any]:
        """Takes apart what a staged body gave: records its entries, returns its own results."""
        flat = iter(results)
        outs = staged.outs.fill(flat)
        self.entries += [e.with_arrays(flat) for e in staged.entries]
        self.folds.restore(staged.threads, list(flat), staged.certain)
        return outs

    def _opaque(self, eqn: Any, args: list[Any]) -> list[Any]:
        """An equation that is no business of ours holds marks: they are lost, and said to be."""
        stripped: list[Mark] = []
        params = {name: strip(value, stripped) for name, value in eqn.params.items()}
        for mark in stripped:
            mark = mark.within(scopes_of(eqn, self.scopes))
            self.lost[mark.path] = (
                f"it is marked at {mark.source}, inside a call of {_compat.kind_of(eqn)!r}, which "
                "is opaque: only what goes in and comes out of it can be captured, "
                f"with jt.ops({eqn.primitive.name!r})"
            )
        effects = frozenset(e for e in eqn.effects if e is not tap_effect)
        return _compat.bind_equation(
            eqn.replace(params=params, effects=effects), self.materialize(eqn.invars, args)
        )


def eager() -> bool:
    """Whether operations are evaluated one at a time, under `jax.disable_jit()`."""
    return bool(jax.config.jax_disable_jit)  # pyright: ignore[reportAttributeAccessIssue]


Handler = Callable[[Walk, Any, list[Any]], list[Any]]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Puts a handler into the table, under the names of the primitives that it handles."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register
