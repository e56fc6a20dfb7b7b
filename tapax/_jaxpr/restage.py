"""Restaging: binding equations with new bodies.

Each function takes an equation, its operands, and a new body with more inputs, carries or results.
Only this module works out the parameters that JAX needs for the new body: its shardings, its specs,
and the results that one branch returns and another does not.
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
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._jaxpr.leading_axes import vmapped, where

T = TypeVar("T")
Branch = Callable[..., tuple[list[Value], list[Value]]]
"""A branch: a function that returns results common to all branches, and private ones."""
Body = Callable[..., list[Value]]
Source = int | None
"""For an operand or result of the new equation, its number in the old one; None if it is new."""


def is_eager() -> bool:
    """Return whether JAX evaluates operations one at a time, under `jax.disable_jit()`."""
    config: Any = jax.config
    return bool(config.jax_disable_jit)


def bind_jit(
    eqn: Equation,
    body: Jaxpr,
    operands: Sequence[Value],
    sources: Sequence[Source],
    results: Sequence[Source],
) -> list[Value]:
    """Bind a jit with another body; `sources` and `results` number its operands and results."""

    def pick(name: str, numbers: Sequence[Source], new: object) -> tuple[Any, ...]:
        return tuple(new if i is None else eqn.params[name][i] for i in numbers)

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
    """Bind a plain call with another body; `sources` number its operands."""
    params = dict(eqn.params)
    params["jaxpr" if "jaxpr" in params else "call_jaxpr"] = body
    excluded = params.get("exclude_mask")  # a parameter of `program_order`
    if excluded is not None:
        # JAX 0.11 does not extend the mask when a transposed call has more operands.
        marked = {i for i, is_excluded in enumerate(excluded) if is_excluded}
        params["exclude_mask"] = tuple(i in marked for i in sources)
    return _jax.bind_equation(eqn.replace(params=params), operands)


def bind_remat(
    eqn: Equation, body: Jaxpr, operands: Sequence[Value], sources: Sequence[Source]
) -> list[Value]:
    """Bind a remat with another body; it stays a remat, so that it still saves memory."""
    if _jax.called_hi_primitive(eqn.primitive, eqn.params) is not None:
        policy, prevent_cse = _jax.remat_options(eqn)
        remat = typed.checkpoint(_jax.as_function(body), policy=policy, prevent_cse=prevent_cse)
        return remat(*operands)
    jaxpr, consts = _jax.closed(body)
    params = dict(eqn.params, jaxpr=jaxpr)
    kept: bool | tuple[bool, ...] = params["prevent_cse"]
    if isinstance(kept, tuple):
        known = (False if i is None else kept[i] for i in sources)
        params["prevent_cse"] = (*(False for _ in consts), *known)
    return eqn.primitive.bind(*consts, *operands, **params)


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan, with its operands separated into constants, initial carries and inputs."""

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
        """Run another step function in the order of the scan, over `xs` instead if given."""
        options: dict[str, Any] = {"reverse": self.reverse, "unroll": self.eqn.params["unroll"]}
        if self.eqn.params.get("_split_transpose"):
            options["_split_transpose"] = True
        return lax.scan(step, carry, self.xs if xs is None else xs, self.length, **options)

    def peel(
        self, index: int, body: Body, once: Callable[[list[Value]], tuple[list[Value], T]]
    ) -> tuple[list[Value], T]:
        """Take one iteration out of the loop: `once` runs it, and `body` runs all others.

        `once` returns the results of the iteration and an extra object, which `peel` returns too.
        """
        around = [slice(0, index), slice(index + 1, self.length)]
        before, after = around[::-1] if self.reverse else around
        carry, early = self._run_part(before, body, self.init)
        outs, extra = once([*self.consts, *carry, *(x[index] for x in self.xs)])
        carry, late = self._run_part(after, body, outs[: len(self.init)])
        parts = [early, [y[None] for y in outs[len(self.init) :]], late]
        ran = [part for part in (reversed(parts) if self.reverse else parts) if part is not None]
        stacked = [jnp.concatenate(ys) for ys in zip(*ran, strict=True)]
        return [*carry, *stacked], extra

    def _run_part(
        self, part: slice, body: Body, carry: list[Value]
    ) -> tuple[list[Value], list[Value] | None]:
        """Run the iterations in `part`; the stacked results are None if `part` is empty."""
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
    """A while loop, with its operands separated, and its test as a function of its carry."""

    eqn: Equation
    test: Jaxpr
    test_consts: list[Value]
    consts: list[Value]
    init: list[Value]

    @classmethod
    def of(cls, eqn: Equation, operands: Sequence[Value], test: Jaxpr) -> While:
        """Separate the operands of a while loop; `test` replaces its equivalent `cond_jaxpr`."""
        start = eqn.params["cond_nconsts"]
        split = start + eqn.params["body_nconsts"]
        init = [typed.asarray(x) for x in operands[split:]]
        return cls(eqn, test, list(operands[:start]), list(operands[start:split]), init)

    @property
    def body(self) -> Jaxpr:
        return self.eqn.params["body_jaxpr"]

    @property
    def is_mapped(self) -> bool:
        """Return whether `vmap` has given the test a result for each example."""
        return bool(_jax.open_jaxpr(self.test).outvars[0].aval.shape)

    def goes_on(self, state: Sequence[Value]) -> Value:
        """Run the test; return one boolean, or one for each example if the loop is mapped."""
        return _jax.as_function(self.test)(*self.test_consts, *state)[0]

    def any_goes_on(self, state: Sequence[Value]) -> Value:
        """Run the test; return whether any example goes on."""
        go = self.goes_on(state)
        return jnp.any(go) if self.is_mapped else go

    def keep_finished(self, new: Sequence[Value], state: Sequence[Value]) -> list[Value]:
        """Return `new`, but `state` for the examples that have finished, as JAX does."""
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
    """Choose `x` where `mask` is true, else `y`, without making the result vary over devices.

    The type of a carry may say that it is equal on all devices, even where one device leaves the
    loop before another. Later operations rely on that type, but `where` would take the type of the
    mask, so a loop of at most one iteration makes the choice.
    """

    def choose(go: Value, x: Value, y: Value) -> Value:
        def is_due(carry: tuple[Value, Value]) -> Value:
            return go & carry[1]

        return lax.while_loop(
            is_due, lambda _: (x, typed.asarray(False)), (y, typed.asarray(True))
        )[0]

    return vmapped(choose, mask.ndim)(mask, x, y)


def uneven_axes(eqn: Equation) -> frozenset[str]:
    """Return the mesh axes whose devices may differ in the branch or the number of iterations."""
    if kind_of(eqn) is Kind.COND:
        return _jax.varying_axes(eqn.invars[0].aval)
    if kind_of(eqn) is Kind.WHILE:
        return _jax.varying_axes(_jax.open_jaxpr(eqn.params["cond_jaxpr"]).outvars[0].aval)
    return frozenset()


def bind_cond(
    eqn: Equation,
    index: Value,
    operands: Sequence[Value],
    branches: Sequence[Branch],
    private: Sequence[Sequence[AbstractValue]] = (),
) -> tuple[list[Value], list[list[Value]]]:
    """Bind a conditional whose new branches return more results.

    Every branch returns the common results, followed by private results of the types in `private`.
    If another branch runs, the private results are zeros. So they vary over the mesh axes over
    which `index` varies.
    """
    over = uneven_axes(eqn)

    def padded(number: int) -> Body:
        def branch(*flat: Value) -> list[Value]:
            common, returned = branches[number](*flat)
            for i, types in enumerate(private):
                more = returned if i == number else map(_jax.zeros, types)
                common = [*common, *(_jax.with_varying(x, over) for x in more)]
            return common

        return branch

    functions = [padded(i) for i in range(len(branches))]
    if is_eager() and not isinstance(index, Tracer):
        results = functions[int(index)](*operands)
    else:
        jaxprs, operands = _close_branches(functions, operands)
        written_for = _jax.traced_for(eqn.params["branches"][0])
        jaxprs = tuple(_jax.with_traced_for(jaxpr, written_for) for jaxpr in jaxprs)
        results = eqn.primitive.bind(index, *operands, **dict(eqn.params, branches=jaxprs))
    flat = iter(results)
    common = [next(flat) for _ in range(len(results) - sum(map(len, private)))]
    return common, [[next(flat) for _ in types] for types in private]


def _close_branches(
    functions: Sequence[Body], operands: Sequence[Value]
) -> tuple[tuple[Jaxpr, ...], Sequence[Value]]:
    """Trace branches; traced values that any branch closes over become operands of all."""
    jaxprs = [typed.make_jaxpr(fn)(*operands) for fn in functions]
    consts = [list(_jax.jaxpr_consts(jaxpr)) for jaxpr in jaxprs]
    if not any(isinstance(c, Tracer) for some in consts for c in some):
        return tuple(jaxprs), operands
    together = [*itertools.chain(*consts), *operands]

    def lifted(number: int) -> Body:
        inner, closed_over = _jax.closed(jaxprs[number])
        start = sum(map(len, consts[:number]))

        def branch(*flat: Value) -> list[Value]:
            given = flat[start : start + len(closed_over)]
            return evaluate(inner, [*given, *flat[len(flat) - len(operands) :]])

        return branch

    return tuple(typed.make_jaxpr(lifted(i))(*together) for i in range(len(jaxprs))), together


def mesh_axes(eqn: Equation) -> list[str]:
    """Return the mesh axes over which a shard_map maps, in the order of the mesh."""
    return [a for a in eqn.params["mesh"].axis_names if a in eqn.params["newly_manual_axes"]]


class MeshResults(NamedTuple):
    """The results of a restaged shard_map: those of the equation, and the extra ones, stacked.

    `axes[i]` are the mesh axes over which `extra[i]` varies; they are its leading axes. `static` is
    the Python object that the body returned.
    """

    results: list[Value]
    extra: list[Value]
    axes: list[tuple[str, ...]]
    static: Any


def bind_shard_map(
    eqn: Equation,
    body: Callable[..., tuple[list[Value], list[Value], Any]],
    operands: Sequence[Value],
    in_specs: Sequence[PartitionSpec],
) -> MeshResults:
    """Bind a shard_map whose new body returns extra results of each device.

    The body returns the results of the equation, with None for a result to leave out; the extra
    results; and a Python object. The number of results, and the axes over which they vary, are
    known only after tracing the body, and tracing works only where the mesh axes are bound: inside
    another shard_map, which is not run.
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
            results, extra, static = body(*flat)
            return results, extra, _jax.Static(static)

        return _jax.Static(typed.make_jaxpr(with_static, return_shape=True)(*flat))

    traced = jax.shard_map(trace, out_specs=PartitionSpec(), **options)
    jaxpr, (wanted, _, static) = typed.eval_shape(traced, *operands).value
    kept = [spec for spec, x in zip(params["out_specs"], wanted, strict=True) if x is not None]
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
