"""The walk: an interpreter that goes over a traced program and collects what its taps carry.

`Walk.run` evaluates a jaxpr equation by equation. A tap is taken out: its operand goes through,
and what the plan selects is recorded. An equation that holds no tap is bound as it stands. One
that holds a tap in its body goes to its row of `HANDLERS`, which re-stages it with a body that
returns what was recorded inside as extra results.

What is recorded is a list of `Entry`s. Leaving a body changes them: a scan stacks them, a branch
adds a mask, a mesh adds an axis. The axes of an entry are, in order: loops and meshes (`lead` of
them), mapped axes, the value's own.

Marks with a reducer are not recorded but folded into *accumulators*, which are threaded through
bodies as carries and extra results: their size does not grow with the length of a loop.

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
from jaxtap._mark import marking
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


@dataclasses.dataclass
class Accumulator:
    """The fold of a reducing mark so far. `seen` says whether it has folded anything yet."""

    mark: Mark
    state: Any
    seen: Any
    mapped: int


@dataclasses.dataclass(frozen=True)
class Staged:
    """A body after the walk: what it takes, what it gives, and what it recorded."""

    jaxpr: Any
    real: tuple[int, ...]
    outs: tuple[Token | None, ...]
    entries: tuple[Entry, ...]
    keys: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many of its results are the body's own."""
        return sum(token is None for token in self.outs)


class Walk:
    """One walk over one program, under one plan."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.entries: list[Entry] = []
        self.accumulators: dict[str, Accumulator] = {}
        self.sites: list[Site] = []
        self.graded: set[str] = set()
        self.lost: dict[str, str] = {}
        self._calls: Counter[str] = Counter()
        self._pullbacks: Counter[Any] = Counter()
        self._by_uid: dict[int, list[Call]] = {}
        self._marks: dict[str, Mark] = {}
        self._recomputing = False
        self._branches: tuple[int, ...] = ()
        self._predicate: tuple[int, ...] = ()
        self._held: dict[int, tuple[Any, dict[str, tuple[Mark, Any, int]]]] = {}

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
        if not tokens and tap_effect not in eqn.effects:
            return _compat.bind_equation(eqn, args)
        handler = HANDLERS.get(eqn.primitive.name)
        if handler is not None:
            return handler(self, eqn, args)
        if tap_effect in eqn.effects:
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
        if kind == "value":
            again = self._by_uid.get(mark.uid) if self._recomputing else None
            if again:
                return [x, Token(frozenset(again))]
            call = self._call(mark)
            value = self._record(eqn, x, axes, rest[0] if rest else None, call, grad=False)
            return [value, Token(frozenset({call}))]
        if kind == "grad":
            token, *live = rest
            call = self._owner(mark, token)
            return [self._record(eqn, x, axes, live[0] if live else None, call, grad=True)]
        return [x]

    def _call(self, mark: Mark) -> Call:
        first = self._marks.setdefault(mark.path, mark)
        if not _same_fold(first, mark):
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
        x_out = x
        outer = marking()
        if outer is not None:
            x_out = self._hand_on(eqn, x, live, mark, outer.scope)
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
            self._fold(mark, x, len(axes), live)
            return x_out
        if live is not None:
            x = where(live, x, _compat.zeros(jax.typeof(x)))
        self.entries.append(Entry(site, grad, x, live, step=chosen.step))
        return x_out

    def _hand_on(self, eqn: Any, x: Any, live: Any, mark: Mark, scope: str) -> Any:
        """Marks the value once more, for a capture around this one."""
        if eqn.params["kind"] != "value":
            return x
        mark = dataclasses.replace(mark, path=scope + mark.path)
        rest = [] if live is None else [live]
        return tap_p.bind(x, *rest, **dict(eqn.params, mark=mark))[0]

    # --- reducers given to sow ----------------------------------------------------------------

    def _fold(self, mark: Mark, x: Any, mapped: int, live: Any) -> None:
        acc = self.accumulators.get(mark.path)
        if acc is None:
            acc = self._fresh(mark, jax.typeof(x), mapped)
            if live is None:
                acc = None
        reduce, init = mark.reduce, mark.init
        assert reduce is not None and init is not None

        def first(x: Any) -> Any:
            return reduce(init(), x)

        if acc is None or (acc.seen is False and live is None):
            state = _mapped(first, mapped)(x)
            self.accumulators[mark.path] = Accumulator(mark, state, True, mapped)
            return
        if acc.mapped != mapped:
            raise SiteError(
                f"The site {mark.path!r}, marked at {mark.source}, is folded under {mapped} "
                f"vmaps in one call and under {acc.mapped} in another. Give the calls two names."
            )
        if acc.seen is True and live is None:
            state = _mapped(reduce, mapped)(acc.state, x)
            self.accumulators[mark.path] = dataclasses.replace(acc, state=state)
            return

        batch = x.shape[:mapped]

        def fold(seen: Any, live: Any, state: Any, x: Any) -> tuple[Any, Any]:
            new = jax.lax.cond(
                seen,
                lambda: _cast(reduce(state, x), state),
                lambda: _cast(first(x), state),
            )
            new = jax.tree.map(lambda a, b: jnp.where(live, a, b), new, state)
            return seen | live, new

        seen = jnp.broadcast_to(_lift(acc.seen, batch), batch)
        live = jnp.broadcast_to(_lift(True if live is None else live, batch), batch)
        seen, state = _mapped(fold, mapped)(seen, live, acc.state, x)
        self.accumulators[mark.path] = dataclasses.replace(acc, state=state, seen=seen)

    def _fresh(self, mark: Mark, aval: Any, mapped: int) -> Accumulator:
        """An accumulator that has seen nothing yet, with the type that it will keep."""
        reduce, init = mark.reduce, mark.init
        assert reduce is not None and init is not None
        x = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        once = jax.eval_shape(_mapped(lambda x: reduce(init(), x), mapped), x)
        try:
            twice = jax.eval_shape(_mapped(reduce, mapped), once, x)
            stable = _types(once) == _types(twice)
        except TypeError:
            stable = False
        if not stable:
            raise SiteError(
                f"The reducer of the site {mark.path!r}, marked at {mark.source}, is used in a "
                f"loop or a branch, where its result must keep its type, but the first call gives "
                f"{_show(once)} and the second something else. Make `reduce` return what it takes."
            )
        varying = _compat.varying_axes(aval)
        state = jax.tree.map(
            lambda s: _compat.with_varying(jnp.zeros(s.shape, s.dtype), varying), once
        )
        return Accumulator(mark, state, False, mapped)

    def holds(self, jaxpr: Any) -> dict[str, tuple[Mark, Any, int]]:
        """The reducing marks in a body that the plan selects, with their operands' types."""
        key = id(_compat.open_jaxpr(jaxpr))
        if key in self._held:
            return self._held[key][1]
        found: dict[str, tuple[Mark, Any, int]] = {}
        for eqn in _compat.open_jaxpr(jaxpr).eqns:
            if tap_effect not in eqn.effects:
                continue
            if eqn.primitive is tap_p:
                mark, kind, axes = (eqn.params[k] for k in ("mark", "kind", "axes"))
                site = Site(mark.path, mark.kind, source=mark.source, op=mark.op)
                if kind == "value" and mark.reduce is not None and self.plan.choose(site, False):
                    aval = eqn.invars[0].aval
                    front = [aval.shape[a] for a in axes]
                    own = [n for i, n in enumerate(aval.shape) if i not in axes]
                    shape = (*self._predicate[len(axes) :], *front, *own)
                    found.setdefault(
                        mark.path,
                        (mark, aval.update(shape=shape, weak_type=False), len(shape) - len(own)),
                    )
            else:
                for inner in _bodies(eqn):
                    for path, held in self.holds(inner).items():
                        found.setdefault(path, held)
        self._held[key] = (jaxpr, found)
        return found

    def load(self, *jaxprs: Any) -> tuple[str, ...]:
        """Makes sure that the accumulators a body folds into exist, with the types they keep."""
        keys: dict[str, None] = {}
        for jaxpr in jaxprs:
            for path, (mark, aval, mapped) in self.holds(jaxpr).items():
                keys[path] = None
                if path not in self.accumulators:
                    self.accumulators[path] = self._fresh(mark, aval, mapped)
                acc = self.accumulators[path]
                state = jax.tree.map(jnp.asarray, acc.state)
                batch = jax.tree.leaves(state)[0].shape[: acc.mapped] if acc.mapped else ()
                seen = jnp.broadcast_to(_lift(acc.seen, batch), batch)
                self.accumulators[path] = dataclasses.replace(acc, state=state, seen=seen)
        return tuple(keys)

    def folded(self, keys: Sequence[str]) -> list[Any]:
        """The arrays of some accumulators."""
        return jax.tree.leaves(
            [(self.accumulators[k].state, self.accumulators[k].seen) for k in keys]
        )

    def refold(self, keys: Sequence[str], arrays: Sequence[Any]) -> None:
        """Puts arrays back into the accumulators they came from."""
        flat = iter(arrays)
        for key in keys:
            acc = self.accumulators[key]
            state = jax.tree.map(lambda _: next(flat), acc.state)
            self.accumulators[key] = dataclasses.replace(acc, state=state, seen=next(flat))

    # --- bodies -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def inside(self, *, recomputing: bool = False, branch: int | None = None) -> Iterator[None]:
        """Within, entries and accumulators are those of a body."""
        before = self.entries, dict(self.accumulators), self._recomputing, self._branches
        self.entries = []
        self._recomputing |= recomputing
        if branch is not None:
            self._branches = (*self._branches, branch)
        try:
            yield
        finally:
            self.entries, self.accumulators, self._recomputing, self._branches = before

    @contextlib.contextmanager
    def predicated(self, shape: tuple[int, ...]) -> Iterator[None]:
        """Within is the body of a loop whose predicate has these mapped axes."""
        before, held = self._predicate, self._held
        self._predicate, self._held = (shape if len(shape) > len(before) else before), {}
        try:
            yield
        finally:
            self._predicate, self._held = before, held

    def stage(
        self,
        jaxpr: Any,
        args: Sequence[Any],
        keys: Sequence[str],
        *,
        recomputing: bool = False,
        branch: int | None = None,
    ) -> Staged:
        """Walks a body into a jaxpr: operands and accumulators in; results, entries, folds out."""
        real = tuple(i for i, a in enumerate(args) if type(a) is not Token)
        cell: dict[str, Any] = {}

        def body(*flat: Any) -> list[Any]:
            operands = list(args)
            for i, x in zip(real, flat, strict=False):
                operands[i] = x
            with self.inside(recomputing=recomputing, branch=branch):
                self.refold(keys, flat[len(real) :])
                outs = self.run(jaxpr, operands)
                cell["outs"] = tuple(o if type(o) is Token else None for o in outs)
                cell["entries"] = tuple(self.entries)
                return [
                    *(o for o in outs if type(o) is not Token),
                    *(a for e in self.entries for a in e.arrays),
                    *self.folded(keys),
                ]

        made = jax.make_jaxpr(body)(*(args[i] for i in real), *self.folded(keys))
        return Staged(made, real, cell["outs"], cell["entries"], tuple(keys))

    def unstage(self, staged: Staged, results: Sequence[Any]) -> list[Any]:
        """Takes apart what a staged body gave: records its entries, returns its own results."""
        entries, outs = self.part(staged, results)
        self.entries += entries
        return outs

    def part(self, staged: Staged, results: Sequence[Any]) -> tuple[list[Entry], list[Any]]:
        """The entries and the own results of a staged body; takes its accumulators over."""
        flat = iter(results)
        outs = [next(flat) if token is None else token for token in staged.outs]
        entries = [e.with_arrays(flat) for e in staged.entries]
        self.refold(staged.keys, list(flat))
        return entries, outs

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
        return _compat.bind_equation(
            eqn.replace(params=params), self.materialize(eqn.invars, args)
        )


def _bodies(eqn: Any) -> Iterator[Any]:
    """The jaxprs in an equation's parameters."""
    for value in eqn.params.values():
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if hasattr(_compat.open_jaxpr(part), "eqns"):
                yield part


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


def _lift(x: Any, batch: tuple[int, ...]) -> Any:
    """A mask with fewer axes than the batch, ready to be broadcast along the trailing ones."""
    x = jnp.asarray(x)
    return x.reshape(x.shape + (1,) * (len(batch) - x.ndim))


def _mapped(fn: Callable[..., Any], times: int) -> Callable[..., Any]:
    for _ in range(times):
        fn = jax.vmap(fn)
    return fn


def _types(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _show(tree: Any) -> str:
    return str(jax.tree.map(lambda s: f"{s.dtype}{list(s.shape)}", tree))


def _cast(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, s: jnp.asarray(x, s.dtype), tree, like)


def _same_fold(a: Mark, b: Mark) -> bool:
    return _same_function(a.reduce, b.reduce) and _same_function(a.init, b.init)


def _same_function(f: Any, g: Any) -> bool:
    """Whether two functions do the same: a lambda is a new object each time it is evaluated."""
    if f is g:
        return True
    if f is None or g is None or not (hasattr(f, "__code__") and hasattr(g, "__code__")):
        return f == g
    cells = [[c.cell_contents for c in h.__closure__ or ()] for h in (f, g)]
    return (
        f.__code__ == g.__code__
        and f.__defaults__ == g.__defaults__
        and len(cells[0]) == len(cells[1])
        and all(x is y for x, y in zip(*cells, strict=True))
    )


Handler = Callable[[Walk, Any, list[Any]], list[Any]]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Puts a handler into the table, under the names of the primitives that it handles."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


__all__ = ["HANDLERS", "Entry", "Staged", "Token", "Walk", "handles", "strip", "where"]
