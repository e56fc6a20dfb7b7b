"""`capture` and `sites`: trace a function with its marks, walk the program, return what it holds.

>>> import jax, jax.numpy as jnp, jaxtap as jt
>>> @jax.jit
... def step(w, x):
...     def loss(w):
...         h = jt.sow(jnp.tanh(x @ w), "h")
...         return jnp.sum(h**2)
...
...     return w - 0.1 * jax.grad(loss)(w)
>>> w, taps = jt.capture(step)(jnp.ones((3, 2)), jnp.ones(3))
>>> taps.values["h"].shape, taps.grads["h"].shape
((2,), (2,))
>>> jt.sites(step)(jnp.ones((3, 2)), jnp.ones(3)).names
['h']

The captured function is compiled, once for each structure, shape and type of its arguments, as a
function under `jax.jit` is; and like one it keeps the closed-over values it was traced with. Under
a transformation, or in another jitted function, it becomes part of that program instead. Under
`jax.disable_jit()` it is evaluated one operation at a time.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxtap import (
    _compat,
    _control,  # noqa: F401  (rows of the walk's table)
    _guard,  # noqa: F401
    _while,  # noqa: F401
    adapters,
)
from jaxtap._arguments import (
    Signature,
    find_needed,
    in_order,
    name_of,
    numbers,
    order_of,
    split,
)
from jaxtap._mark import marked, not_the_users
from jaxtap._modules import FunctionCall, tracing
from jaxtap._plan import Plan
from jaxtap._record import Entry
from jaxtap._sites import Selection, Site, SiteError
from jaxtap._taps import SiteTable, Taps
from jaxtap._walk import Walk, eager

P = ParamSpec("P")
R = TypeVar("R")


def capture(
    fn: Callable[P, R],
    values: Selection = "**",
    grads: Selection = "**",
    *,
    modules: Any = True,
    steps: int | None = None,
) -> Callable[P, tuple[R, Taps]]:
    """A function that returns what `fn` does, and the `Taps`: what happened inside.

    `values` and `grads` select the sites whose values and whose gradients to return; gradients are
    those that `fn` itself takes. A site that is named exactly is returned, or the call raises
    `SiteError`. `steps` keeps the first iterations of while loops instead of the last.

    Every result of a module of Flax, Equinox, Haiku or brainstate is a site. `modules=False`, a
    selection, or a filter `(module, method_name) -> bool` narrows that.
    """
    _check_function(fn, "capture")
    plan = Plan.make(values, grads, steps, modules)
    if _compat.jit_options(fn) is None:
        return _Captured(fn, plan)
    try:
        return _jitted(fn, plan)
    except TypeError:  # a predicate that cannot be hashed
        return _jitted.__wrapped__(fn, plan)


def sites(fn: Callable[P, Any]) -> Callable[P, SiteTable]:
    """A function that lists every site of `fn` for some arguments. It traces, computes nothing."""
    _check_function(fn, "sites")
    captured = capture(fn)

    @functools.wraps(fn)
    def listed(*args: P.args, **kwargs: P.kwargs) -> SiteTable:
        if isinstance(captured, _Captured):
            return captured.survey(args, kwargs)
        return captured.eval_shape(*args, **kwargs)[1].sites  # pyright: ignore

    return listed


def _check_function(fn: Any, function: str) -> None:
    if isinstance(fn, (jax.stages.Compiled, jax.stages.Lowered, jax.stages.Traced)):
        raise TypeError(
            f"`{function}` was given a {type(fn).__name__}, a function already traced or compiled "
            "ahead of time: there is nothing left to trace. Give it the function itself, and "
            "compile the captured function instead: jax.jit(jt.capture(fn)).lower(...).compile()."
        )
    if not callable(fn):
        raise TypeError(
            f"`{function}` takes a function, but was given {fn!r} of type {type(fn).__name__}."
        )


@dataclasses.dataclass(frozen=True)
class _Program:
    """A traced function: its jaxpr, and how its results are put together again."""

    jaxpr: Any
    treedef: Any
    statics: tuple[tuple[int, Any], ...]
    order: Any

    def join(self, arrays: Sequence[Any]) -> Any:
        leaves = list(arrays)
        for i, leaf in self.statics:
            leaves.insert(i, leaf)
        return in_order(self.treedef.unflatten(leaves), self.order)


def _trace(fn: Any, run: Any, plan: Plan, arrays: Sequence[Any], join: Any) -> _Program:
    """Traces `run`, the call of `fn`, on the arguments that `join` makes from arrays."""
    cell: dict[str, Any] = {}

    def flat(*arrays: Any) -> list[Any]:
        out = run(join(arrays))
        leaves, treedef = jax.tree.flatten(out)
        statics = tuple((i, x) for i, x in enumerate(leaves) if not isinstance(x, jax.Array))
        for _, x in statics:
            _check_result(fn, x)
        cell.update(treedef=treedef, statics=statics, order=order_of(out))
        fixed = {i for i, _ in statics}
        return [x for i, x in enumerate(leaves) if i not in fixed]

    with (
        adapters.seen(),
        marked(plan.marking),
        tracing(),
        jax.disable_jit(False),
        _compat.no_names(),
    ):
        jaxpr = jax.make_jaxpr(flat)(*arrays)
    return _Program(jaxpr, **cell)


def _check_result(fn: Any, x: Any) -> None:
    """Refuses a result that may hide traced values where nothing can find them."""
    if not isinstance(x, (str, bytes, bool, int, float, complex, np.generic, np.ndarray, *_FIXED)):
        raise TypeError(
            f"{name_of(fn)} returns {type(x).__name__}, which is neither an array nor a container "
            "that JAX knows, so what is in it cannot be returned from a traced program. Return a "
            "pytree: register the class with jax.tree_util.register_dataclass."
        )


_FIXED = (type(None), enum.Enum, type, np.dtype)


def _walked(plan: Plan, program: _Program, arrays: Sequence[Any]) -> tuple[list[Any], Taps]:
    walk = Walk(plan)
    with not_the_users():
        outs = walk.run(program.jaxpr, arrays)
        outs = walk.materialize(_compat.open_jaxpr(program.jaxpr).outvars, outs)
        return outs, _collect(walk)


def _collect(walk: Walk) -> Taps:
    values, grads, valid = {}, {}, {}
    sites: dict[str, Site] = {}
    entries = [*_summed(walk.entries), *walk.fold_entries()]
    marked = [site.name for site in walk.sites if site.kind != "grad"]
    order = {name: i for i, name in enumerate(marked)}
    taken: tuple[list[Site], list[Site]] = ([], [])
    for entry in sorted(entries, key=lambda e: (e.grad, order.get(e.site.name, len(order)))):
        shape, dtype = tuple(entry.value.shape), entry.value.dtype
        site = dataclasses.replace(entry.site, shape=shape, dtype=dtype, loops=entry.loops)
        name = site.name
        into = grads if entry.grad else values
        if name in into:
            raise SiteError(
                f"The site {name!r}, marked at {site.source}, has more than one fold: one of them "
                "is inside a shard_map, where every device has its own. Give it another name."
            )
        if entry.step is not None:
            raise SiteError(
                f"`step` was given for the site {name!r}, marked at {site.source}, which is in no "
                "loop. Leave `step` out."
            )
        into[name] = entry.value
        taken[entry.grad].append(site)
        # A gradient that was not computed is zero, and so right: its mask is that of the value.
        if entry.valid is not None and name not in valid and not (entry.grad and name in values):
            valid[name] = entry.valid
        sites.setdefault(name, site)
    walk.plan.verify(walk.sites, taken[0], taken[1], walk.lost)
    for path, why in walk.lost.items():
        warnings.warn(f"The site {path!r} is not captured: {why}.", stacklevel=6)
    return Taps(values, grads, valid, SiteTable(tuple(sites.values())))


def _summed(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Puts the cotangents of copies that remat made where they belong.

    JAX's newer remat takes gradients through the copy alone: then they are the gradients. Otherwise
    the first gradient of a call is that of its own loss; a second one, of a loss made from that, is
    the sum over the value and its copy.
    """
    copies: dict[Any, list[Entry]] = {}
    direct: dict[Any, list[Entry]] = {}
    for entry in entries:
        if entry.grad:
            (copies if entry.again else direct).setdefault(entry.call, []).append(entry)
        else:
            yield entry
    for call, own in direct.items():
        if call not in copies:
            yield from own
            continue
        first, *second = own
        yield first
        parts = [*second, *copies[call]]
        if len(second) > 1 or len({p.value.shape for p in parts}) > 1:
            raise SiteError(
                f"The site {first.site.name!r}, marked at {first.site.source}, is in a checkpoint "
                "through which several second derivatives are taken, and which part belongs to "
                "which cannot be told. Leave it out of `grads`."
            )
        yield _pulled_back(parts[0], 1, functools.reduce(jnp.add, [p.value for p in parts]))
    for call, parts in copies.items():
        if call not in direct:
            for number, part in enumerate(parts):
                yield _pulled_back(part, number, part.value)


def _pulled_back(entry: Entry, number: int, value: Any) -> Entry:
    site = dataclasses.replace(entry.site, pullback=number)
    return entry._replace(site=site, value=value, again=False)


@functools.lru_cache(maxsize=64)
def _jitted(fn: Any, plan: Plan) -> Any:
    """A jitted function, captured: a jitted function, with the same options.

    So its static, donated and sharded arguments stay so, and calls take JAX's fast path. The same
    capture of the same function is the same function: it may well be written in a loop.
    """
    inner, options = fn.__wrapped__, _compat.jit_options(fn) or {}
    if "out_shardings" in options:
        options["out_shardings"] = (options["out_shardings"], None)

    @functools.wraps(inner)
    def captured(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        # Under `jax.disable_jit()` there are no tracers, and what is no array is static.
        wanted = (jax.Array, np.ndarray) if eager() else Tracer
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, wanted)]

        def join(arrays: Sequence[Any]) -> Any:
            filled = list(leaves)
            for i, x in zip(places, arrays, strict=True):
                filled[i] = x
            return treedef.unflatten(filled)

        arrays = [leaves[i] for i in places]
        program = _trace(inner, lambda call: inner(*call[0], **call[1]), plan, arrays, join)
        outs, taps = _walked(plan, program, arrays)
        return program.join(outs), taps

    return jax.jit(captured, **options)


class _Captured(Generic[P, R]):
    """A captured function: traced and compiled once for each kind of call."""

    def __init__(self, fn: Callable[P, R], plan: Plan):
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._plan = plan
        self._programs: dict[Any, Any] = {}
        self._needed: dict[Any, frozenset[int]] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"capture({name_of(self._fn)})"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> tuple[R, Taps]:
        with adapters.opened(FunctionCall(self._fn, args, kwargs)) as call:
            if not _compat.trace_state_clean() or eager():
                out, taps = self._inline(call)
            else:
                out, taps = self._compiled(call)
            return call.close(out), taps

    def survey(self, args: Any, kwargs: Any) -> SiteTable:
        """The sites of the function, for these arguments."""
        with adapters.opened(FunctionCall(self._fn, args, kwargs)) as call:
            program, _, arrays = self._program(call)

        def abstract(*arrays: Any) -> Taps:
            return _walked(self._plan, program, arrays)[1]

        return jax.eval_shape(abstract, *arrays).sites

    def _program(self, call: FunctionCall) -> tuple[_Program, Signature, list[Any]]:
        """The traced function; numbers that it needs the values of are made static."""
        structure = jax.tree.structure(call.arguments)

        def trace(needed: frozenset[int]) -> Any:
            signature, arrays = split(self._fn, call.arguments, needed)
            program = _trace(self._fn, call.run, self._plan, arrays, signature.join)
            return program, signature, arrays

        known = self._needed.get(structure, frozenset())
        needed, result = find_needed(trace, numbers(call.arguments), known)
        self._needed[structure] = needed
        return result

    def _inline(self, call: FunctionCall) -> Any:
        program, _, arrays = self._program(call)
        outs, taps = _walked(self._plan, program, arrays)
        return program.join(outs), taps

    def _compiled(self, call: FunctionCall) -> Any:
        structure = jax.tree.structure(call.arguments)
        needed = self._needed.get(structure, frozenset())
        signature, arrays = split(self._fn, call.arguments, needed)
        key = signature, tuple(map(jax.typeof, arrays)), _compat.trace_context()
        found = self._programs.get(key) if signature.lasting else None
        if found is None:
            with self._lock:
                program, signature, arrays = self._program(call)
                found = self._compile(program)
                if signature.lasting:
                    key = signature, tuple(map(jax.typeof, arrays)), _compat.trace_context()
                    found = self._programs.setdefault(key, found)
        program, run = found
        outs, taps = run(*arrays)
        return program.join(outs), taps

    def _compile(self, program: _Program) -> Any:
        def captured(*arrays: Any) -> Any:
            outs, taps = _walked(self._plan, program, arrays)
            return outs, taps

        captured.__name__ = captured.__qualname__ = name_of(self._fn)
        donated = _donated(program.jaxpr)
        return program, jax.jit(captured, donate_argnums=donated)


def _donated(jaxpr: Any) -> tuple[int, ...]:
    """The inputs of a program that a jitted function in it is given for good."""
    inner = _compat.open_jaxpr(jaxpr)
    uses: dict[Any, int] = {}
    given = set()
    for eqn in inner.eqns:
        for i, v in enumerate(eqn.invars):
            if isinstance(v, _compat.Literal):
                continue
            uses[v] = uses.get(v, 0) + 1
            if eqn.params.get("donated_invars", ()) and eqn.params["donated_invars"][i]:
                given.add(v)
    for v in inner.outvars:
        if not isinstance(v, _compat.Literal):
            uses[v] = uses.get(v, 0) + 1
    return tuple(i for i, v in enumerate(inner.invars) if v in given and uses[v] == 1)


__all__ = ["SiteError", "capture", "sites"]
