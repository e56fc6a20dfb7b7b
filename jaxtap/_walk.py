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

Gradients are paired with the call of a site by `Token`s: see `_tap`. In the walk a token is no
array but the set of the calls that it may stand for.
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
from jaxtap._fold import Folds, Thread, bodies, same_fold
from jaxtap._mark import marking, scopes_of
from jaxtap._plan import Plan
from jaxtap._sites import Site, SiteError
from jaxtap._tap import Mark, tap_effect, tap_p


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One execution of a mark in the program: the `number`th of its path, in some branch."""

    mark: Mark
    number: int
    branches: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Token:
    """Which calls a residual without elements may have come from."""

    calls: frozenset[Call]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A recorded value or gradient, and how it came to have the axes it has."""

    site: Site
    grad: bool
    value: Any
    valid: Any = None
    lead: int = 0
    loops: tuple[str, ...] = ()
    step: Any = None

    @property
    def arrays(self) -> list[Any]:
        return [self.value] if self.valid is None else [self.value, self.valid]

    def with_arrays(self, arrays: Iterator[Any]) -> Entry:
        value = next(arrays)
        valid = None if self.valid is None else next(arrays)
        return dataclasses.replace(self, value=value, valid=valid)


@dataclasses.dataclass(frozen=True)
class Staged:
    """A body after the walk: what it takes, what it gives, and what it recorded."""

    jaxpr: Any
    real: tuple[int, ...]
    outs: tuple[Token | None, ...]
    entries: tuple[Entry, ...]
    threads: tuple[Thread, ...]
    certain: tuple[bool, ...]

    @property
    def count(self) -> int:
        """How many of its results are the body's own."""
        return sum(token is None for token in self.outs)


class Walk:
    """One walk over one program, under one plan."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.entries: list[Entry] = []
        self.folds = Folds(plan)
        self.sites: list[Site] = []
        self.graded: set[str] = set()
        self.lost: dict[str, str] = {}
        self._calls: Counter[str] = Counter()
        self._pullbacks: Counter[Any] = Counter()
        self._by_uid: dict[int, list[Call]] = {}
        self._marks: dict[str, Mark] = {}
        self._recomputing = False
        self._branches: tuple[int, ...] = ()
        self.scopes: tuple[str, ...] = ()
        self._predicate: tuple[int, ...] = ()

    def run(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr on `args`, recording what the plan selects."""
        env = dict(_compat.jaxpr_inputs(jaxpr, args))
        inner = _compat.open_jaxpr(jaxpr)

        def read(atom: Any) -> Any:
            if isinstance(atom, _compat.Literal):
                return _compat.literal_value(atom)
            return env[atom]

        for eqn in inner.eqns:
            operands = [read(v) for v in eqn.invars]
            outs = _compat.in_context(eqn, self._equation, eqn, operands)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in inner.outvars]

    def _equation(self, eqn: Any, args: list[Any]) -> list[Any]:
        if eqn.primitive is tap_p:
            return self._tap(eqn, args)
        tokens = [a for a in args if type(a) is Token]
        tapped = tap_effect in eqn.effects
        if not tokens and not tapped:
            # A kernel keeps its effects to itself.
            if any(tap_effect in _compat.open_jaxpr(body).effects for body in bodies(eqn)):
                return self._opaque(eqn, args)
            return _compat.bind_equation(eqn, args)
        handler = HANDLERS.get(eqn.primitive.name)
        if handler is not None:
            outer, self.scopes = self.scopes, (*self.scopes, *scopes_of(eqn))
            try:
                return handler(self, eqn, args)
            finally:
                self.scopes = outer
        if tapped:
            return self._opaque(eqn, args)
        # A residual without elements is only ever moved about: reshaped, selected, broadcast.
        calls = frozenset().union(*(t.calls for t in tokens))
        if all(v.aval.size == 0 for v in eqn.outvars):
            return [Token(calls)] * len(eqn.outvars)
        return _compat.bind_equation(eqn, self.materialize(eqn.invars, args))

    @staticmethod
    def materialize(atoms: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The operands with tokens made into the empty arrays that they stand for."""
        return [
            _compat.zeros(v.aval) if type(a) is Token else a
            for v, a in zip(atoms, args, strict=True)
        ]

    # --- taps ---------------------------------------------------------------------------------

    def _tap(self, eqn: Any, args: list[Any]) -> list[Any]:
        mark, kind, axes = (eqn.params[k] for k in ("mark", "kind", "axes"))
        x, *rest = args
        if isinstance(eqn.invars[0], _compat.Literal):
            x = jnp.asarray(x, eqn.invars[0].aval.dtype)
        if kind == "value":
            again = self._by_uid.get(mark.uid) if self._recomputing else None
            if again:
                return [x, Token(frozenset(again))]
            call = self._call(mark.within((*self.scopes, *scopes_of(eqn))))
            value = self._record(eqn, x, axes, rest[0] if rest else None, call, grad=False)
            return [value, Token(frozenset({call}))]
        if kind == "grad":
            token, *live = rest
            call = self._owner(mark, token)
            return [self._record(eqn, x, axes, live[0] if live else None, call, grad=True)]
        return [x]

    def _call(self, mark: Mark) -> Call:
        first = self._marks.setdefault(mark.path, mark)
        if not same_fold(first, mark):
            raise SiteError(
                f"The site {mark.path!r} is sown at {first.source} and at {mark.source} with "
                "reducers that differ, so its calls cannot be folded into one. Give both the same "
                "`reduce` and `init`, or another name to one of them."
            )
        call = Call(mark, self._calls[mark.path], self._branches)
        self._calls[mark.path] += 1
        self._by_uid.setdefault(mark.uid, []).append(call)
        return call

    def _owner(self, mark: Mark, token: Any) -> Call:
        """The call that a gradient belongs to."""
        calls = token.calls if type(token) is Token else self._by_uid.get(mark.uid, ())
        calls = [c for c in calls if c.mark.uid == mark.uid]
        if len(calls) > 1:
            # Residuals of branches share their places: this one is read in a branch of its own.
            calls = [c for c in calls if c.branches == self._branches]
        if len(calls) != 1:
            raise SiteError(
                f"The gradient of the site {mark.path!r}, marked at {mark.source}, belongs to one "
                f"of {len(calls)} calls, and which one cannot be told. Give each call a scope of "
                "its own, with jt.scope(name), or leave the site out of `grads`."
            )
        return calls[0]

    def _record(
        self, eqn: Any, x: Any, axes: tuple[int, ...], live: Any, call: Call, *, grad: bool
    ) -> Any:
        mark = call.mark
        number = 0
        if grad:
            number = self._pullbacks[call]
            self._pullbacks[call] += 1
            self.graded.add(mark.path)
        if marking() is not None:
            x = self._hand_on(eqn, x, live)
        x_out = x
        site = Site(
            mark.path,
            mark.kind,
            tuple(x.shape),
            x.dtype,
            mark.source,
            call=0 if mark.reduce is not None and not grad else call.number,
            pullback=number,
            op=mark.op,
        )
        chosen = self.plan.choose(site, grad)
        if not grad:
            self.sites.append(site)
        if chosen is None:
            return x_out
        x = _front(x, axes)
        if len(axes) < len(self._predicate):
            x = jnp.broadcast_to(x, (*self._predicate, *x.shape))
            axes = (*range(len(self._predicate)),)
        if getattr(x, "weak_type", False):
            x = jax.lax.convert_element_type(x, x.dtype)
        if mark.reduce is not None and not grad:
            self.folds.add(mark, x, len(axes), live)
            return x_out
        if live is not None:
            x = where(live, x, _compat.zeros(jax.typeof(x)))
        self.entries.append(Entry(site, grad, x, live, step=chosen.step))
        return x_out

    def _hand_on(self, eqn: Any, x: Any, live: Any) -> Any:
        """Marks the value once more, for a capture around this one."""
        if eqn.params["kind"] != "value":
            return x
        return tap_p.bind(x, *([] if live is None else [live]), **eqn.params)[0]

    # --- bodies -------------------------------------------------------------------------------

    def enter(self, *jaxprs: Any) -> tuple[Thread, ...]:
        """What must be threaded through some bodies."""
        return self.folds.enter(jaxprs, self._predicate, self.scopes)

    @contextlib.contextmanager
    def inside(self, *, recomputing: bool = False, branch: int | None = None) -> Iterator[None]:
        """Within, what is recorded and folded is a body's own."""
        before = self.entries, self.folds.items, self._recomputing, self._branches
        self.entries = []
        self._recomputing |= recomputing
        if branch is not None:
            self._branches = (*self._branches, branch)
        try:
            yield
        finally:
            self.entries, self.folds.items, self._recomputing, self._branches = before

    @contextlib.contextmanager
    def predicated(self, shape: tuple[int, ...]) -> Iterator[None]:
        """Within is the body of a loop whose predicate has these mapped axes."""
        before = self._predicate
        self._predicate = shape if len(shape) > len(before) else before
        try:
            yield
        finally:
            self._predicate = before

    def stage(
        self,
        jaxpr: Any,
        args: Sequence[Any],
        threads: tuple[Thread, ...],
        *,
        recomputing: bool = False,
        branch: int | None = None,
    ) -> Staged:
        """Walks a body into a jaxpr: operands and threads in; results, entries and threads out."""
        real = tuple(i for i, a in enumerate(args) if type(a) is not Token)
        cell: dict[str, Any] = {}

        def body(*flat: Any) -> list[Any]:
            operands = list(args)
            for i, x in zip(real, flat, strict=False):
                operands[i] = x
            with self.inside(recomputing=recomputing, branch=branch):
                self.folds.restore(threads, flat[len(real) :])
                outs = self.run(jaxpr, operands)
                cell.update(
                    outs=tuple(o if type(o) is Token else None for o in outs),
                    entries=tuple(self.entries),
                    certain=self.folds.certain(threads),
                )
                return [
                    *(o for o in outs if type(o) is not Token),
                    *(a for e in self.entries for a in e.arrays),
                    *self.folds.arrays(threads),
                ]

        made = jax.make_jaxpr(body)(*(args[i] for i in real), *self.folds.arrays(threads))
        return Staged(made, real, threads=threads, **cell)

    def unstage(self, staged: Staged, results: Sequence[Any]) -> list[Any]:
        """Takes apart what a staged body gave: records its entries, returns its own results."""
        flat = iter(results)
        outs = [next(flat) if token is None else token for token in staged.outs]
        self.entries += [e.with_arrays(flat) for e in staged.entries]
        self.folds.restore(staged.threads, list(flat), staged.certain)
        return outs

    def _opaque(self, eqn: Any, args: list[Any]) -> list[Any]:
        """An equation that is no business of ours holds marks: they are lost, and said to be."""
        stripped: list[Mark] = []
        params = dict(eqn.params)
        for name, value in params.items():
            if isinstance(value, (list, tuple)) or hasattr(value, "eqns"):
                params[name] = strip(value, stripped)
        for mark in stripped:
            self.lost[mark.path] = (
                f"it is marked at {mark.source}, inside a call of {eqn.primitive.name!r}, which "
                "is opaque: only what goes in and comes out of it can be captured, "
                f"with jt.ops({eqn.primitive.name!r})"
            )
        return _compat.bind_equation(eqn.replace(params=params), self.materialize(eqn.invars, args))


def strip(value: Any, marks: list[Mark] | None = None) -> Any:
    """A jaxpr, or a structure with some in it, without its taps, whose marks go to `marks`."""
    marks = [] if marks is None else marks
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(strip(v, marks) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(strip(v, marks) for v in value)
    inner = _compat.open_jaxpr(value)
    if not hasattr(inner, "eqns") or tap_effect not in inner.effects:
        return value
    renamed: dict[Any, Any] = {}

    def rename(v: Any) -> Any:
        return v if isinstance(v, _compat.Literal) else renamed.get(v, v)

    eqns = []
    for eqn in inner.eqns:
        if eqn.primitive is tap_p:
            marks.append(eqn.params["mark"])
            renamed[eqn.outvars[0]] = rename(eqn.invars[0])
            continue
        params = {k: strip(v, marks) for k, v in eqn.params.items()}
        effects = frozenset(e for e in eqn.effects if e is not tap_effect)
        invars = [rename(v) for v in eqn.invars]
        eqns.append(eqn.replace(invars=invars, params=params, effects=effects))
    effects = frozenset(e for e in inner.effects if e is not tap_effect)
    outvars = [rename(v) for v in inner.outvars]
    plain = inner.replace(eqns=eqns, outvars=outvars, effects=effects)
    return plain if inner is value else value.replace(jaxpr=plain)


def where(mask: Any, x: Any, y: Any) -> Any:
    """`x` where the mask, which has the leading axes of `x`, is true; `y` elsewhere."""
    mask = mask.astype(bool)
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, y)


def _front(x: Any, axes: tuple[int, ...]) -> Any:
    order = tuple(range(len(axes)))
    return x if axes == order else jnp.moveaxis(x, axes, order)


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
