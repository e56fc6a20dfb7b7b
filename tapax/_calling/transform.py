"""From the call of a function to a walked program: when it is traced, compiled, and kept.

A `Transform` says what to do with the program. The function is compiled once for each structure,
shape and type of its arguments, as a function under `jax.jit` is, and keeps the closed-over values
it was traced with. Under a transformation, or in another jitted function, it becomes part of that
program instead. Under `jax.disable_jit()` it is evaluated one operation at a time.
"""

import dataclasses
import functools
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
from jax.core import Tracer

from tapax import _jax
from tapax._calling.program import Program, TracedCall, trace
from tapax._calling.signature import Signature, find_needed, numbers, places_in, split
from tapax._frameworks import registry
from tapax._frameworks.interface import FunctionCall
from tapax._jaxpr.restage import is_eager
from tapax._sites import name_of, wrong_type
from tapax._walk.plan import Plan

P = ParamSpec("P")


class Transform:
    """Something to do with a traced program. Equal transforms do the same."""

    plan: Plan
    stateless = False
    """Whether objects that the function changes stay as they are."""

    @property
    def is_reusable(self) -> bool:
        """Whether equal transforms do the same at any time: objects in them may change."""
        return True

    def prepare(self, call: TracedCall) -> Any:
        """What it has to know about the program. Only the types of the arrays may be looked at."""
        return None

    def check(self, prepared: Any, operands: Any) -> None:
        """Raises for operands whose values are wrong, where they are known."""

    def run(self, call: TracedCall, prepared: Any) -> Any:
        """The results of the program, or None if it has none; and a pytree of whatever else."""
        raise NotImplementedError

    def finish(self, out: Any, extra: Any) -> Any:
        """What the user gets, of the function's result and whatever else."""
        return out


class _CallCache:
    """What calls of a function have found out, for the calls that come after."""

    def __init__(self) -> None:
        self.programs: dict[Any, Any] = {}
        self.needed: dict[Any, frozenset[int]] = {}
        self.memory: dict[Any, Any] = {}
        self.lock = threading.RLock()


_caches: dict[int, dict[Transform, _CallCache]] = {}


def _cache_of(fn: Any, transform: Transform) -> _CallCache:
    """The cache of a function, shared by equal transforms if calls of it can be repeated.

    It is forgotten with the function, which it must not keep alive.
    """
    repeatable = registry.has_repeatable_calls(fn) or _jax.jit_options(fn) is not None
    if not transform.is_reusable or not repeatable:
        return _CallCache()
    new: dict[Transform, _CallCache] = {}
    found = _caches.setdefault(id(fn), new)
    if found is new:
        weakref.finalize(fn, _caches.pop, id(fn), None).atexit = False
    try:
        known = found.setdefault(transform, _CallCache())
    except TypeError:  # a predicate that cannot be hashed
        return _CallCache()
    if len(found) > 64:  # predicates that are written in a loop
        found.pop(next(iter(found)), None)
    return known


class TransformedFunction:
    """A function under a transform, traced and compiled once for each kind of call."""

    def __init__(self, fn: Callable[..., Any], transform: Transform):
        self.fn = fn
        self._transform = transform
        self._known = _cache_of(fn, transform)

    def __call__(self, operands: Any, args: Any, kwargs: Any) -> Any:
        """Calls the function."""
        return registry.run_opened(self._open(args, kwargs), lambda call: self._run(call, operands))

    def traced_call(self, args: Any, kwargs: Any) -> TracedCall:
        """The traced function, and the arrays among these arguments."""
        program, _, arrays = registry.run_opened(self._open(args, kwargs), self._trace)
        return TracedCall(program, arrays)

    def _open(self, args: Any, kwargs: Any) -> FunctionCall:
        return FunctionCall(self.fn, args, kwargs, memory=self._known.memory)

    def _run(self, call: FunctionCall, operands: Any) -> Any:
        if self._transform.stateless:
            call = dataclasses.replace(call, close=lambda out: out)
        inline = not _jax.trace_state_clean() or is_eager()
        program, outs, extra = (self._inline if inline else self._compiled)(call, operands)
        out = None if outs is None else call.close(program.join(outs))
        return self._transform.finish(out, extra)

    def _trace(self, call: FunctionCall) -> tuple[Program, Signature, list[Any]]:
        """The traced function; numbers that it needs the values of are made static."""
        structure = jax.tree.structure(call.arguments)

        def attempt(needed: frozenset[int]) -> Any:
            signature, arrays = split(self.fn, call.arguments, needed)
            program = trace(self.fn, call.run, self._transform.plan, call.arguments, signature)
            if self._transform.stateless:
                program = program.only(call.own)
            return program, signature, arrays

        known = self._known.needed.get(structure)
        if known is None:
            known = static_numbers(call)
        needed, result = find_needed(attempt, numbers(call.arguments), known)
        self._known.needed[structure] = needed
        return result

    def _inline(self, call: FunctionCall, operands: Any) -> Any:
        program, _, arrays = self._trace(call)
        known = not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(operands))
        traced = TracedCall(program, arrays, operands, known)
        prepared = self._transform.prepare(traced)
        self._transform.check(prepared, operands)
        return program, *self._transform.run(traced, prepared)

    def _compiled(self, call: FunctionCall, operands: Any) -> Any:
        structure = jax.tree.structure(call.arguments)
        needed = self._known.needed.get(structure, frozenset())
        signature, arrays = split(self.fn, call.arguments, needed)
        found = None
        if signature.is_repeatable:
            found = self._known.programs.get(_key(signature, operands, arrays))
        if found is None:
            with self._known.lock:
                program, signature, arrays = self._trace(call)
                found = self._compile(program, operands, arrays)
                if signature.is_repeatable:
                    key = _key(signature, operands, arrays)
                    found = self._known.programs.setdefault(key, found)
        program, prepared, run = found
        self._transform.check(prepared, operands)
        return program, *run(operands, *arrays)

    def _compile(self, program: Program, operands: Any, arrays: Sequence[Any]) -> Any:
        transform = self._transform
        prepared = transform.prepare(TracedCall(program, arrays, operands))

        def captured(operands: Any, *arrays: Any) -> Any:
            return transform.run(TracedCall(program, arrays, operands), prepared)

        captured.__name__ = captured.__qualname__ = name_of(self.fn)
        donated = () if transform.stateless else (i + 1 for i in _donated(program.jaxpr))
        return program, prepared, jax.jit(captured, donate_argnums=tuple(donated))


def static_numbers(call: FunctionCall) -> frozenset[int]:
    """The places among the arguments of a call at which a framework keeps numbers static."""
    found = (places_in(call.arguments, parts) for parts in registry.static_parts(call))
    return frozenset().union(*found)


def _key(signature: Signature, operands: Any, arrays: Sequence[Any]) -> Any:
    leaves, treedef = jax.tree.flatten(operands)
    types = tuple(map(jax.typeof, (*leaves, *arrays)))
    return signature, treedef, types, _jax.trace_context()


def _donated(jaxpr: Any) -> tuple[int, ...]:
    """The inputs of a program that a jitted function in it is given for good."""
    inner = _jax.open_jaxpr(jaxpr)
    read = itertools.chain(*(eqn.invars for eqn in inner.eqns), inner.outvars)
    uses = Counter(v for v in read if not isinstance(v, _jax.Literal))
    given = [
        v
        for eqn in inner.eqns
        for v in itertools.compress(eqn.invars, eqn.params.get("donated_invars", ()))
    ]
    once = {v for v in given if not isinstance(v, _jax.Literal) and uses[v] == 1}
    return tuple(i for i, v in enumerate(inner.invars) if v in once)


def transformed(fn: Callable[P, Any], transform: Transform, operands: Any = ()) -> Callable[P, Any]:
    """A function of the arguments of `fn` that returns what the transform gives."""
    call = TransformedFunction(fn, transform)

    @functools.wraps(fn, updated=())
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
        return call(operands, args, kwargs)

    return wrapper


def check_function(fn: Any, function: str) -> None:
    """Refuses what is no function, or none that can be traced."""
    if isinstance(fn, (jax.stages.Compiled, jax.stages.Lowered, jax.stages.Traced)):
        raise TypeError(
            f"`{function}` was given a {type(fn).__name__}, a function already traced or compiled "
            "ahead of time: there is nothing left to trace. Give it the function itself, and "
            f"compile the result instead: jax.jit(tapax.{function}(fn)).lower(...).compile()."
        )
    if not callable(fn):
        raise wrong_type(f"`{function}` takes a function, but was given", fn)
