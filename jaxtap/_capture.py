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

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from jaxtap import _compat, adapters
from jaxtap._adapter import FunctionCall
from jaxtap._arguments import Signature, find_needed, name_of, numbers, split
from jaxtap._plan import Plan
from jaxtap._program import Program, trace
from jaxtap._sites import Selection, SiteError
from jaxtap._taps import SiteTable, Taps
from jaxtap._walk import eager

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

        def pick(parts: list[Any]) -> list[Any]:
            return [parts[i] for i in places]

        arrays, arguments = pick(leaves), (args, kwargs)
        run = lambda call: _rebound(inner)(*call[0], **call[1])  # noqa: E731
        program = trace(inner, run, plan, arguments, arrays, join, pick)
        outs, taps = program.walk(plan, arrays)
        return program.join(outs), taps

    return jax.jit(captured, **options)


def _rebound(fn: Any) -> Any:
    """A method that was bound before, as it is now: its class may have been patched since."""
    if not inspect.ismethod(fn):
        return fn
    now = getattr(fn.__self__, fn.__name__, None)
    if not inspect.ismethod(now) or inspect.unwrap(now.__func__) is not inspect.unwrap(fn.__func__):
        return fn
    return now


class _Learned:
    """What calls of a captured function have found out, for the calls that come after."""

    def __init__(self) -> None:
        self.programs: dict[Any, Any] = {}
        self.needed: dict[Any, frozenset[int]] = {}
        self.memory: dict[Any, Any] = {}
        self.lock = threading.RLock()


_learned: dict[int, dict[Plan, _Learned]] = {}


def _learned_of(fn: Any, plan: Plan) -> _Learned:
    """What is known of a function, from other captures of it too if it is one that lasts.

    It is forgotten with the function, which it must not keep alive.
    """
    if not adapters.lasting(fn):
        return _Learned()
    new: dict[Plan, _Learned] = {}
    found = _learned.setdefault(id(fn), new)
    if found is new:
        weakref.finalize(fn, _learned.pop, id(fn), None).atexit = False
    try:
        known = found.setdefault(plan, _Learned())
    except TypeError:  # a predicate that cannot be hashed
        return _Learned()
    if len(found) > 64:  # predicates that are written in a loop
        found.pop(next(iter(found)), None)
    return known


class _Captured(Generic[P, R]):
    """A captured function: traced and compiled once for each kind of call."""

    def __init__(self, fn: Callable[P, R], plan: Plan):
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._plan = plan
        known = _learned_of(fn, plan)
        self._programs, self._needed, self._memory = known.programs, known.needed, known.memory
        self._lock = known.lock

    def __repr__(self) -> str:
        return f"capture({name_of(self._fn)})"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> tuple[R, Taps]:
        return adapters.on_opened(self._call(args, kwargs), self._run)

    def _call(self, args: Any, kwargs: Any) -> FunctionCall:
        return FunctionCall(self._fn, args, kwargs, memory=self._memory)

    def _run(self, call: FunctionCall) -> tuple[R, Taps]:
        inline = not _compat.trace_state_clean() or eager()
        out, taps = (self._inline if inline else self._compiled)(call)
        return call.close(out), taps

    def survey(self, args: Any, kwargs: Any) -> SiteTable:
        """The sites of the function, for these arguments."""
        program, _, arrays = adapters.on_opened(self._call(args, kwargs), self._program)

        def abstract(*arrays: Any) -> Taps:
            return program.walk(self._plan, arrays)[1]

        return jax.eval_shape(abstract, *arrays).sites

    def _program(self, call: FunctionCall) -> tuple[Program, Signature, list[Any]]:
        """The traced function; numbers that it needs the values of are made static."""
        structure = jax.tree.structure(call.arguments)

        def attempt(needed: frozenset[int]) -> Any:
            signature, arrays = split(self._fn, call.arguments, needed)
            whole = call.arguments, arrays, signature.join, signature.traced
            return trace(self._fn, call.run, self._plan, *whole), signature, arrays

        known = self._needed.get(structure)
        if known is None:
            known = adapters.fixed(call)
        needed, result = find_needed(attempt, numbers(call.arguments), known)
        self._needed[structure] = needed
        return result

    def _inline(self, call: FunctionCall) -> Any:
        program, _, arrays = self._program(call)
        outs, taps = program.walk(self._plan, arrays)
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

    def _compile(self, program: Program) -> Any:
        plan = self._plan

        def captured(*arrays: Any) -> Any:
            return program.walk(plan, arrays)

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
