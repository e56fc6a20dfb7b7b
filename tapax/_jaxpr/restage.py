"""Equations with bodies, bound again with other bodies.

Each function takes an equation and its operands, and a new body with more inputs, carries or
results. What JAX needs to know of the new body (its shardings, its specs, what a branch returns
that another does not) is worked out here, and nowhere else.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from tapax import _jax
from tapax._jax import AbstractValue, Equation, Jaxpr, PyTree, Value, typed
from tapax._jaxpr.evaluate import evaluate
from tapax._jaxpr.leading_axes import vmapped, where

T = TypeVar("T")
Branch = Callable[..., tuple[list[Value], list[Value]]]
"""A branch: it returns results that all branches have, and others of its own."""
Body = Callable[..., list[Value]]
Source = int | None
"""The operand or result of the old equation that one of the new equation is; None for a new one."""


def is_eager() -> bool:
    """Whether operations are evaluated one at a time, under `jax.disable_jit()`."""
    config: Any = jax.config
    return bool(config.jax_disable_jit)


def bind_jit(
    eqn: Equation,
    body: Jaxpr,
    operands: Sequence[Value],
    sources: Sequence[Source],
    results: Sequence[Source],
) -> list[Value]:
    """Binds a jit with another body; `sources` are its operands, `results` its results."""

    def pick(name: str, places: Sequence[Source], new: object) -> tuple[Any, ...]:
        return tuple(new if i is None else eqn.params[name][i] for i in places)

    params = dict(
        eqn.params,
        jaxpr=body,
        donated_invars=pick("donated_invars", sources, False),
        in_shardings=pick("in_shardings", sources, _jax.UNSPECIFIED),
        in_layouts=pick("in_layouts", sources, None),
        out_shardings=pick("out_shardings", results, _jax.UNSPECIFIED),
        out_layouts=pick("out_layouts", results, None),
    )
    return eqn.primitive.bind(*operands, **params)


def bind_call(
    eqn: Equation, body: Jaxpr, operands: Sequence[Value], sources: Sequence[Source]
) -> list[Value]:
    """Binds a plain call with another body; `sources` are its operands."""
    params = dict(eqn.params)
    params["jaxpr" if "jaxpr" in params else "call_jaxpr"] = body
    excluded = params.get("exclude_mask")  # of `program_order`
    if excluded is not None:
        # JAX 0.11 leaves it as it was where the transposed call has more operands.
        marked = {i for i, is_excluded in enumerate(excluded) if is_excluded}
        params["exclude_mask"] = tuple(i in marked for i in sources)
    return _jax.bind_equation(eqn.replace(params=params), operands)


def bind_remat(
    eqn: Equation, body: Jaxpr, operands: Sequence[Value], sources: Sequence[Source]
) -> list[Value]:
    """Binds a remat with another body as a remat, so that it still drops what it should drop."""
    if _jax.called_hi_primitive(eqn.primitive, eqn.params) is not None:
        policy, prevent_cse = _jax.remat_options(eqn)
        again = typed.checkpoint(_jax.as_function(body), policy=policy, prevent_cse=prevent_cse)
        return again(*operands)
    jaxpr, consts = _jax.closed(body)
    params = dict(eqn.params, jaxpr=jaxpr)
    kept: bool | tuple[bool, ...] = params["prevent_cse"]
    if isinstance(kept, tuple):
        own = (False if i is None else kept[i] for i in sources)
        params["prevent_cse"] = (*(False for _ in consts), *own)
    return eqn.primitive.bind(*consts, *operands, **params)


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan, with its operands apart."""

    eqn: Equation
    consts: list[Value]
    init: list[Value]
    xs: list[Value]

    @classmethod
    def of(cls, eqn: Equation, operands: Sequence[Value]) -> Scan:
        nconsts, ncarry = _jax.scan_split(eqn.params)
        split = nconsts + ncarry
        return cls(
            eqn, list(operands[:nconsts]), list(operands[nconsts:split]), list(operands[split:])
        )

    @property
    def body(self) -> Jaxpr:
        return self.eqn.params["jaxpr"]

    @property
    def length(self) -> int:
        return self.eqn.params["length"]

    @property
    def reverse(self) -> bool:
        return self.eqn.params["reverse"]

    def run(
        self, step: Callable[[Any, Any], tuple[Any, Any]], carry: PyTree, xs: Any = None
    ) -> tuple[Any, Any]:
        """Runs another step, over other inputs if `xs` is given, in the order of the scan."""
        options: dict[str, Any] = {"reverse": self.reverse, "unroll": self.eqn.params["unroll"]}
        if self.eqn.params.get("_split_transpose"):
            options["_split_transpose"] = True
        return lax.scan(step, carry, self.xs if xs is None else xs, self.length, **options)

    def peel(
        self, index: int, body: Body, once: Callable[[list[Value]], tuple[list[Value], T]]
    ) -> tuple[list[Value], T]:
        """Takes one iteration out of the loop: `once` runs it, and `body` runs all others.

        `once` returns the results of the iteration, and something else, which `peel` passes on.
        """
        around = [slice(0, index), slice(index + 1, self.length)]
        before, after = around[::-1] if self.reverse else around
        carry, early = self._run_part(before, body, self.init)
        outs, passed_on = once([*self.consts, *carry, *(x[index] for x in self.xs)])
        carry, late = self._run_part(after, body, outs[: len(self.init)])
        parts = [early, [y[None] for y in outs[len(self.init) :]], late]
        ran = [part for part in (reversed(parts) if self.reverse else parts) if part is not None]
        stacked = [jnp.concatenate(ys) for ys in zip(*ran, strict=True)]
        return [*carry, *stacked], passed_on

    def _run_part(
        self, part: slice, body: Body, carry: list[Value]
    ) -> tuple[list[Value], list[Value] | None]:
        """Runs some of the iterations; the second result is None if there are none."""
        length = len(range(self.length)[part])
        if not length:
            return carry, None

        def step(carry: list[Value], x: list[Value]) -> tuple[list[Value], list[Value]]:
            outs = body(*self.consts, *carry, *x)
            return outs[: len(carry)], outs[len(carry) :]

        xs = [x[part] for x in self.xs]
        return lax.scan(step, carry, xs, length, self.reverse, self.eqn.params["unroll"])


@dataclasses.dataclass(frozen=True)
class While:
    """A while loop, with its operands apart, and its test as a function of what it carries."""

    eqn: Equation
    test: Jaxpr
    test_consts: list[Value]
    consts: list[Value]
    init: list[Value]

    @classmethod
    def of(cls, eqn: Equation, operands: Sequence[Value], test: Jaxpr) -> While:
        """`test` takes the place of the loop's own, and computes the same."""
        start = eqn.params["cond_nconsts"]
        split = start + eqn.params["body_nconsts"]
        init = [typed.asarray(x) for x in operands[split:]]
        return cls(eqn, test, list(operands[:start]), list(operands[start:split]), init)

    @property
    def body(self) -> Jaxpr:
        return self.eqn.params["body_jaxpr"]

    @property
    def is_mapped(self) -> bool:
        """Whether `vmap` has made the test differ from example to example."""
        return bool(_jax.open_jaxpr(self.test).outvars[0].aval.shape)

    def goes_on(self, state: Sequence[Value]) -> Value:
        """Runs the test; it has one answer for each example if the loop is mapped."""
        return _jax.as_function(self.test)(*self.test_consts, *state)[0]

    def any_goes_on(self, state: Sequence[Value]) -> Value:
        """Runs the test for all examples together."""
        go = self.goes_on(state)
        return jnp.any(go) if self.is_mapped else go

    def keep_finished(self, new: Sequence[Value], state: Sequence[Value]) -> list[Value]:
        """Returns the new state; an example that has finished keeps its old one, as in JAX."""
        new = [typed.asarray(x) for x in new]
        if not self.is_mapped:
            return new
        go = self.goes_on(state)
        over = _jax.varying_axes(jax.typeof(go))
        return [
            (where if over <= _jax.varying_axes(jax.typeof(y)) else _keep_type)(go, x, y)
            for x, y in zip(new, state, strict=True)
        ]


def _keep_type(mask: Value, x: Value, y: Value) -> Value:
    """`where`, but of the type of `x` and `y` where the mask differs from device to device.

    By its type a value that a loop carries is the same on all devices, even if one ends the loop
    before another. The operations after it rely on the type, so a loop of one iteration decides.
    """

    def choose(go: Value, x: Value, y: Value) -> Value:
        def is_due(carry: tuple[Value, Value]) -> Value:
            return go & carry[1]

        return lax.while_loop(
            is_due, lambda _: (x, typed.asarray(False)), (y, typed.asarray(True))
        )[0]

    return vmapped(choose, mask.ndim)(mask, x, y)


def bind_cond(
    eqn: Equation,
    index: Value,
    operands: Sequence[Value],
    branches: Sequence[Branch],
    private: Sequence[Sequence[AbstractValue]] = (),
) -> tuple[list[Value], list[list[Value]]]:
    """Binds a conditional whose branches return more.

    Each branch returns results that all branches have, and `private` ones of its own, of the given
    types. Where another branch runs, the private results are zeros.
    """

    def padded(number: int) -> Body:
        def branch(*flat: Value) -> list[Value]:
            common, own = branches[number](*flat)
            for i, types in enumerate(private):
                common = [*common, *(own if i == number else map(_jax.zeros, types))]
            return common

        return branch

    functions = [padded(i) for i in range(len(branches))]
    if is_eager() and not isinstance(index, Tracer):
        results = functions[int(index)](*operands)
    else:
        jaxprs, operands = _close_branches(functions, operands)
        results = eqn.primitive.bind(index, *operands, **dict(eqn.params, branches=jaxprs))
    flat = iter(results)
    common = [next(flat) for _ in range(len(results) - sum(map(len, private)))]
    return common, [[next(flat) for _ in types] for types in private]


def _close_branches(
    functions: Sequence[Body], operands: Sequence[Value]
) -> tuple[tuple[Jaxpr, ...], Sequence[Value]]:
    """Traces branches; what they close over becomes operands of them all."""
    jaxprs = [typed.make_jaxpr(fn)(*operands) for fn in functions]
    consts = [list(_jax.jaxpr_consts(jaxpr)) for jaxpr in jaxprs]
    if not any(isinstance(c, Tracer) for some in consts for c in some):
        return tuple(jaxprs), operands
    together = [*itertools.chain(*consts), *operands]

    def lifted(number: int) -> Body:
        inner, own = _jax.closed(jaxprs[number])
        start = sum(map(len, consts[:number]))

        def branch(*flat: Value) -> list[Value]:
            given = flat[start : start + len(own)]
            return evaluate(inner, [*given, *flat[len(flat) - len(operands) :]])

        return branch

    return tuple(typed.make_jaxpr(lifted(i))(*together) for i in range(len(jaxprs))), together


def mesh_axes(eqn: Equation) -> list[str]:
    """The axes of the mesh that a shard_map maps over, in the order of the mesh."""
    return [a for a in eqn.params["mesh"].axis_names if a in eqn.params["newly_manual_axes"]]


class MeshResults(NamedTuple):
    """What a shard_map returned: its own results, and those of each device, stacked.

    `axes[i]` are the axes of the mesh that `extra[i]` varies over, and has as its leading axes.
    `static` is the Python object that the body returned.
    """

    own: list[Value]
    extra: list[Value]
    axes: list[tuple[str, ...]]
    static: Any


def bind_shard_map(
    eqn: Equation,
    body: Callable[..., tuple[list[Value], list[Value], Any]],
    operands: Sequence[Value],
    in_specs: Sequence[PartitionSpec],
) -> MeshResults:
    """Binds a shard_map whose body returns more, of each device.

    The body returns the results of the equation, None for one that is left out; the extra ones;
    and a Python object. What leaves it, and over which axes that varies, is known once it was
    traced; and that can be done only where the axes of the mesh have a meaning.
    """
    params, order = eqn.params, mesh_axes(eqn)
    options: dict[str, Any] = {
        "mesh": params["mesh"],
        "in_specs": tuple(in_specs),
        "axis_names": frozenset(order),
        "check_vma": params["check_vma"],
    }

    def trace(*flat: Value) -> _jax.Static[Any]:
        def with_static(*flat: Value) -> Any:
            own, extra, static = body(*flat)
            return own, extra, _jax.Static(static)

        return _jax.Static(typed.make_jaxpr(with_static, return_shape=True)(*flat))

    traced = jax.shard_map(trace, out_specs=PartitionSpec(), **options)
    jaxpr, (own, _, static) = typed.eval_shape(traced, *operands).value
    kept = [spec for spec, x in zip(params["out_specs"], own, strict=True) if x is not None]
    avals = [v.aval for v in _jax.open_jaxpr(jaxpr).outvars[len(kept) :]]

    def axes_of(aval: AbstractValue) -> tuple[str, ...]:
        varying = _jax.varying_axes(aval) if params["check_vma"] else frozenset(order)
        return tuple(a for a in order if a in varying)

    axes = [axes_of(aval) for aval in avals]

    def spread(*flat: Value) -> tuple[list[Value], list[Value]]:
        results = _jax.as_function(jaxpr)(*flat)
        pairs = zip(results[len(kept) :], axes, strict=True)
        return results[: len(kept)], [x.reshape((1,) * len(a) + x.shape) for x, a in pairs]

    out_specs = kept, [PartitionSpec(*over) for over in axes]
    found, stacked = jax.shard_map(spread, out_specs=out_specs, **options)(*operands)
    return MeshResults(found, stacked, axes, static.value)
