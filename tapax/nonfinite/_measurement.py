"""The measurement of one equation of a program, in one iteration of the loops around it.

All other equations are bound unchanged. Loops carry only the few measured numbers: the ranges of
the operands, the number of bad elements of the results, and the place of the first.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tapax import _jax
from tapax._jax import Equation, Jaxpr, PyTree, Value
from tapax._jaxpr.evaluate import evaluate_equations, read
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._jaxpr.restage import (
    Branch,
    Scan,
    While,
    bind_cond,
    bind_remat,
    bind_shard_map,
    mesh_axes,
)
from tapax._marks.marked_jaxprs import strip
from tapax.nonfinite._equation_numbers import (
    FRAMES,
    EquationNumbers,
    bind_plain,
    called_body,
    inlined_bodies,
    is_inexact,
)


class EquationRun(NamedTuple):
    """One run of an equation: its number in each frame around it, and the iterations of these."""

    numbers: tuple[int, ...]
    times: tuple[int, ...]


Measures = list[Any]
"""Two arrays: for each operand its least and its largest finite element and the number of bad
elements; for each result the numbers of NaNs and of infinities, and the place of the first."""
Measured = tuple[list[Value], Measures]
"""The results of equations, and the measures."""


def measure(args: Sequence[Any], outs: Sequence[Any]) -> Measures:
    """Measure the operands and results of an equation."""
    wide = jax.dtypes.canonicalize_dtype(np.float64)
    reals = [jnp.stack([x.astype(wide) for x in finite_range(a)]) for a in args]
    counts = [count_bad(jnp.asarray(x)) for x in outs]
    return [
        jnp.stack(reals) if reals else jnp.zeros((0, 3), wide),
        jnp.stack(counts) if counts else jnp.zeros((0, 3), jnp.int32),
    ]


def finite_range(x: Value) -> list[Any]:
    """Return the least and the largest finite element, and the number of bad elements.

    The elements of a complex value are compared by magnitude.
    """
    aval = jax.typeof(x)
    plain = jnp.issubdtype(aval.dtype, np.number) or aval.dtype == bool
    if _jax.is_reference(aval) or not aval.size or not plain:
        return [jnp.float32(np.inf), jnp.float32(-np.inf), jnp.float32(0)]
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return [x.min(), x.max(), jnp.zeros_like(x.min())]
    fine = jnp.isfinite(x)
    size = jnp.abs(x) if jnp.iscomplexobj(x) else x
    if size.dtype.itemsize < 4:
        size = size.astype(jnp.float32)
    return [
        jnp.where(fine, size, jnp.inf).min(),
        jnp.where(fine, size, -jnp.inf).max(),
        jnp.sum(~fine).astype(size.dtype),
    ]


def count_bad(x: Value) -> Any:
    """Count the elements that are NaN and that are infinite, and find the first of both."""
    if not is_inexact(jax.typeof(x)):
        return jnp.zeros(3, jnp.int32)
    nan = jnp.isnan(x)
    inf = ~nan & jnp.isinf(x)
    first = jnp.argmax(_jax.whole(nan | inf).reshape(-1))
    return jnp.stack([jnp.sum(nan), jnp.sum(inf), first]).astype(jnp.int32)


class Measurement:
    """One evaluation of a program that measures one equation."""

    def __init__(self, jaxpr: Jaxpr, target: EquationRun):
        self.jaxpr = jaxpr
        self.target = target
        self.equations = EquationNumbers()

    def run(self, args: Sequence[Any]) -> Measures:
        return self._body(self.jaxpr, args, 0, 0)[1]

    def _body(self, jaxpr: Jaxpr, args: Sequence[Any], base: int, level: int) -> Measured:
        inner = _jax.open_jaxpr(jaxpr)
        offsets = self.equations.offsets(jaxpr)
        ends = [*offsets[1:], self.equations.size(jaxpr)]
        target = self.target.numbers[level] - base
        spans = enumerate(zip(offsets, ends, strict=True))
        (here,) = (i for i, (start, end) in spans if start <= target < end)
        eqn = inner.eqns[here]
        env = dict(_jax.jaxpr_inputs(jaxpr, args))
        evaluate_equations(inner.eqns[:here], env, _bind)
        values = [read(env, v) for v in eqn.invars]
        found = _jax.in_context(eqn, self._equation, eqn, values, base + offsets[here], level)
        outs, measures = found
        env.update(zip(eqn.outvars, outs, strict=True))
        evaluate_equations(inner.eqns[here + 1 :], env, _bind)
        return [read(env, v) for v in inner.outvars], measures

    def _equation(self, eqn: Equation, args: list[Value], number: int, level: int) -> Measured:
        kind = kind_of(eqn)
        if kind & FRAMES and level + 1 < len(self.target.numbers):
            loops = {Kind.SCAN: self._scan, Kind.WHILE: self._while}
            return loops.get(kind, self._shard_map)(eqn, args, level + 1)
        call = called_body(eqn, args)
        if not inlined_bodies(eqn) or self.target.numbers[level] == number:
            outs = bind_plain(eqn, args)
            return outs, measure(args, outs)
        if call is not None:
            return self._body(*call, number + 1, level)
        if kind is Kind.COND:
            return self._cond(eqn, args, number, level)
        staged = self._stage(_jax.call_body(eqn), args, number + 1, level)
        return _split(eqn, bind_remat(eqn, staged, args, range(len(args))))

    def _stage(self, jaxpr: Jaxpr, args: Sequence[Value], base: int, level: int) -> Jaxpr:
        """Stage a body as a jaxpr that returns the measures after its results."""

        def flat(*args: Value) -> list[Value]:
            outs, measures = self._body(jaxpr, args, base, level)
            return [*map(jnp.asarray, outs), *measures]

        return jax.make_jaxpr(flat)(*args)

    def _cond(self, eqn: Equation, args: list[Value], number: int, level: int) -> Measured:
        index, *values = args
        starts = self.equations.body_starts(eqn, number)
        here = max(i for i, s in enumerate(starts) if s <= self.target.numbers[level])
        chosen = self._stage(eqn.params["branches"][here], values, starts[here], level)
        num_results = len(eqn.outvars)

        def branch_of(body: Jaxpr) -> Branch:
            def branch(*flat: Value) -> tuple[list[Value], list[Value]]:
                results = _jax.as_function(body)(*flat)
                return results[:num_results], results[num_results:]

            return branch

        bodies = [chosen if i == here else strip(b) for i, b in enumerate(eqn.params["branches"])]
        types = [[v.aval for v in _jax.open_jaxpr(body).outvars[num_results:]] for body in bodies]
        outs, measures = bind_cond(eqn, index, values, [branch_of(b) for b in bodies], types)
        return outs, measures[here]

    def _scan(self, eqn: Equation, args: list[Value], level: int) -> Measured:
        loop = Scan.of(eqn, args)
        types = _jax.open_jaxpr(loop.body).invars[len(args) - len(loop.xs) :]
        single = [_jax.zeros(v.aval) for v in types]
        init = [jnp.asarray(x) for x in loop.init]
        staged = self._stage(loop.body, [*loop.consts, *init, *single], 0, level)

        def step(carry: PyTree, x: Value) -> Any:
            state, measures, count = carry
            outs, measures = self._iterate(
                staged, [*loop.consts, *state, *x], measures, count, level
            )
            return (outs[: len(init)], measures, count + 1), outs[len(init) :]

        (state, measures, _), ys = loop.run(step, (init, _nothing(staged), jnp.int32(0)))
        return [*state, *ys], measures

    def _while(self, eqn: Equation, args: list[Value], level: int) -> Measured:
        loop = While.of(eqn, args, strip(eqn.params["cond_jaxpr"]))
        staged = self._stage(loop.body, [*loop.consts, *loop.init], 0, level)

        def check(carry: PyTree) -> Any:
            # Nothing uses the results of the loop, so it may stop after the measured iteration.
            return loop.any_goes_on(carry[0]) & (carry[2] <= self.target.times[level - 1])

        def step(carry: PyTree) -> Any:
            state, measures, count = carry
            new, measures = self._iterate(staged, [*loop.consts, *state], measures, count, level)
            return loop.keep_finished(new, state), measures, count + 1

        carry = loop.init, _nothing(staged), jnp.int32(0)
        state, measures, _ = lax.while_loop(check, step, carry)
        return list(state), measures

    def _iterate(
        self, staged: Jaxpr, args: list[Value], measures: Measures, count: Value, level: int
    ) -> Measured:
        """Run an iteration; return its results, and its measures if it is the target."""
        *outs, reals, counts = _jax.as_function(staged)(*args)
        wanted = count == self.target.times[level - 1]
        pairs = zip([reals, counts], measures, strict=True)
        return outs, [jnp.where(wanted, new, old) for new, old in pairs]

    def _shard_map(self, eqn: Equation, args: list[Value], level: int) -> Measured:
        varying = frozenset(mesh_axes(eqn) if eqn.params["check_vma"] else ())

        def local(*flat: Value) -> tuple[list[Value], list[Value], None]:
            outs, measures = self._body(eqn.params["jaxpr"], flat, 0, level)
            return outs, [_jax.with_varying(m, varying) for m in measures], None

        found = bind_shard_map(eqn, local, args, eqn.params["in_specs"])
        return found.results, found.extra


def _bind(number: int, eqn: Equation, values: list[Value]) -> list[Value]:
    del number
    return _jax.in_context(eqn, bind_plain, eqn, values)


def _nothing(staged: Any) -> Measures:
    """Make the measures before the first iteration: zeros."""
    return [_jax.zeros(v.aval) for v in _jax.open_jaxpr(staged).outvars[-2:]]


def _split(eqn: Equation, results: Sequence[Any]) -> Measured:
    num_results = len(eqn.outvars)
    return list(results[:num_results]), list(results[num_results:])
