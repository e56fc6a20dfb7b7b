"""Measures one equation of a program, in one iteration of the loops around it.

All other equations are bound unchanged. Loops carry only the few numbers that are measured: the
ranges of the operands, how many elements of the results are bad, and which is the first.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

import tapax.nonfinite._evaluation as evaluation
from tapax import _jax
from tapax._marks.marked_jaxprs import strip
from tapax.nonfinite import _equation_numbers


class EquationRun(NamedTuple):
    """One run of an equation: its number in each frame around it, and the iteration of each."""

    numbers: tuple[int, ...]
    times: tuple[int, ...]


Measures = list[Any]
"""Two arrays: for each operand its least and its largest finite element, and how many are bad; and
for each result how many are NaN, how many infinite, and the place of the first of them."""


def measure(args: Sequence[Any], outs: Sequence[Any]) -> Measures:
    """Measure the operands and results of an equation."""
    wide = jax.dtypes.canonicalize_dtype(np.float64)
    reals = [jnp.stack([x.astype(wide) for x in finite_range(a)]) for a in args]
    counts = [count_bad(jnp.asarray(x)) for x in outs]
    return [
        jnp.stack(reals) if reals else jnp.zeros((0, 3), wide),
        jnp.stack(counts) if counts else jnp.zeros((0, 3), jnp.int32),
    ]


def finite_range(x: Any) -> list[Any]:
    """The least and the largest finite element of a value, by magnitude if it is complex."""
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


def count_bad(x: Any) -> Any:
    """How many elements are NaN, how many are infinite, and which is the first."""
    if not _equation_numbers.is_inexact(jax.typeof(x)):
        return jnp.zeros(3, jnp.int32)
    nan = jnp.isnan(x)
    inf = ~nan & jnp.isinf(x)
    first = jnp.argmax((nan | inf).reshape(-1))
    return jnp.stack([jnp.sum(nan), jnp.sum(inf), first]).astype(jnp.int32)


class Measurement:
    """One evaluation of a program that measures one equation."""

    def __init__(self, jaxpr: Any, target: EquationRun):
        self.jaxpr = jaxpr
        self.target = target
        self.equations = _equation_numbers.EquationNumbers()

    def run(self, args: Sequence[Any]) -> Measures:
        return self._body(self.jaxpr, args, 0, 0)[1]

    def _body(
        self, jaxpr: Any, args: Sequence[Any], base: int, level: int
    ) -> tuple[list[Any], Measures]:
        inner = _jax.open_jaxpr(jaxpr)
        env = dict(_jax.jaxpr_inputs(jaxpr, args))
        offsets = self.equations.offsets(jaxpr)
        ends = [*offsets[1:], self.equations.size(jaxpr)]
        measures: Measures = []
        for eqn, offset, end in zip(inner.eqns, offsets, ends, strict=True):
            values = evaluation.read(env, eqn.invars)
            if base + offset <= self.target.numbers[level] < base + end:
                found = _jax.in_context(eqn, self._equation, eqn, values, base + offset, level)
                outs, measures = found
            else:
                outs = _jax.in_context(eqn, evaluation.bind, eqn, values)
            env.update(zip(eqn.outvars, outs, strict=True))
        return evaluation.read(env, inner.outvars), measures

    def _equation(self, eqn: Any, args: list[Any], number: int, level: int) -> Any:
        name = eqn.primitive.name
        if _equation_numbers.frame_body(eqn) is not None and level + 1 < len(self.target.numbers):
            return {"scan": self._scan, "while": self._while, "shard_map": self._shard_map}[name](
                eqn, args, level + 1
            )
        call = _equation_numbers.called_body(eqn, args)
        if not _equation_numbers.inlined_bodies(eqn) or self.target.numbers[level] == number:
            outs = evaluation.bind(eqn, args)
            return outs, measure(args, outs)
        if call is not None:
            return self._body(*call, number + 1, level)
        if name == "cond":
            return self._cond(eqn, args, number, level)
        assert _jax.kind_of(eqn) in _equation_numbers.REMATS
        staged = self._stage(eqn.params["jaxpr"], args, number + 1, level)
        return _split(eqn, evaluation.bind_remat(eqn, staged, args))

    def _stage(self, jaxpr: Any, args: Sequence[Any], base: int, level: int) -> Any:
        """Stage a body as a jaxpr that returns the measures after its results."""

        def flat(*args: Any) -> list[Any]:
            outs, measures = self._body(jaxpr, args, base, level)
            return [*map(jnp.asarray, outs), *measures]

        return jax.make_jaxpr(flat)(*args)

    def _cond(self, eqn: Any, args: list[Any], number: int, level: int) -> Any:
        index, *values = args
        starts = self.equations.body_starts(eqn, number)
        here = max(i for i, s in enumerate(starts) if s <= self.target.numbers[level])
        chosen = self._stage(eqn.params["branches"][here], values, starts[here], level)
        types = [v.aval for v in _jax.open_jaxpr(chosen).outvars[len(eqn.outvars) :]]

        def padded(branch: Any) -> Any:
            def flat(*args: Any) -> list[Any]:
                return [*jaxpr_as_fun(strip(branch))(*args), *map(_jax.zeros, types)]

            return jax.make_jaxpr(flat)(*values)

        branches = tuple(
            chosen if i == here else padded(b) for i, b in enumerate(eqn.params["branches"])
        )
        params = dict(eqn.params, branches=branches)
        return _split(eqn, eqn.primitive.bind(index, *values, **params))

    def _scan(self, eqn: Any, args: list[Any], level: int) -> Any:
        loop = evaluation.Scan(eqn, args)
        types = _jax.open_jaxpr(loop.body).invars[len(args) - len(loop.xs) :]
        single = [_jax.zeros(v.aval) for v in types]
        staged = self._stage(loop.body, [*loop.consts, *loop.init, *single], 0, level)

        def step(carry: Any, x: Any) -> Any:
            state, held, count = carry
            outs, held = self._iterate(staged, [*loop.consts, *state, *x], held, count, level)
            return (outs[: loop.ncarry], held, count + 1), outs[loop.ncarry :]

        (state, held, _), ys = loop.run(step, (loop.init, _nothing(staged), jnp.int32(0)))
        return [*state, *ys], held

    def _while(self, eqn: Any, args: list[Any], level: int) -> Any:
        loop = evaluation.While(eqn, args)
        staged = self._stage(loop.body, [*loop.consts, *loop.init], 0, level)

        def check(carry: Any) -> Any:
            # What was measured is all that is wanted.
            return loop.any_goes_on(carry[0]) & (carry[2] <= self.target.times[level - 1])

        def step(carry: Any) -> Any:
            state, held, count = carry
            new, held = self._iterate(staged, [*loop.consts, *state], held, count, level)
            return loop.keep_done(new, state), held, count + 1

        carry = loop.init, _nothing(staged), jnp.int32(0)
        state, held, _ = lax.while_loop(check, step, carry)
        return list(state), held

    def _iterate(self, staged: Any, args: list[Any], held: Measures, count: Any, level: int) -> Any:
        """The results of an iteration, and its measures if it is the one that is wanted."""
        *outs, reals, counts = jaxpr_as_fun(staged)(*args)
        wanted = count == self.target.times[level - 1]
        pairs = zip([reals, counts], held, strict=True)
        return outs, [jnp.where(wanted, new, old) for new, old in pairs]

    def _shard_map(self, eqn: Any, args: list[Any], level: int) -> Any:
        params, order = eqn.params, evaluation.mesh_axes(eqn)
        varying = frozenset(order if params["check_vma"] else ())

        def local(*flat: Any) -> list[Any]:
            outs, measures = self._body(params["jaxpr"], flat, 0, level)
            measures = [_jax.with_varying(m, varying) for m in measures]
            return [*outs, *(m.reshape((1,) * len(order) + m.shape) for m in measures)]

        specs = [*params["out_specs"], *[PartitionSpec(*order)] * 2]
        options = evaluation.shard_map_options(eqn)
        mapped = jax.shard_map(local, in_specs=params["in_specs"], out_specs=specs, **options)
        return _split(eqn, mapped(*args))


def _nothing(staged: Any) -> Measures:
    """Measures before any were taken."""
    return [_jax.zeros(v.aval) for v in _jax.open_jaxpr(staged).outvars[-2:]]


def _split(eqn: Any, results: Sequence[Any]) -> tuple[list[Any], Measures]:
    own = len(eqn.outvars)
    return list(results[:own]), list(results[own:])
