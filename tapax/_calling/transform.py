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
from typing import Any, NamedTuple, ParamSpec

import jax
from jax.core import Tracer

from tapax import _jax
from tapax._calling.program import Program, TracedCall, trace
from tapax._calling.signature import (
    FlatArguments,
    Signature,
    find_needed,
    numbers,
    places_in,
    split,
    split_traced,
)
from tapax._frameworks import registry
from tapax._frameworks.interface import FunctionCall
from tapax._jax import Function, Jaxpr, PyTree, Value, pytrees
from tapax._jaxpr.restage import is_eager
from tapax._sites import name_of, wrong_type
from tapax._walk.plan import Plan

P = ParamSpec("P")


class Transform:
    """Something to do with a traced program. Equal transforms do the same."""

    plan: Plan
    stateless = False
    """Whether objects that the function changes stay as they are."""
    is_traceable = True
    """Whether `run` can be traced; if not, it is called on arrays whose values are known."""
    no_values = ""
    """The error for a call under a transformation, if it is not; `{}` is the function's name."""

    @property
    def is_reusable(self) -> bool:
        """Whether equal transforms do the same at any time: objects in them may change."""
        return True

    def prepare(self, call: TracedCall) -> Any:
        """What it has to know about the program. Only the types of the arrays may be looked at."""
        return None

    def check(self, prepared: PyTree, operands: PyTree) -> None:
        """Raises for operands whose values are wrong, where they are known."""

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        """The results of the program, or None if it has none; and a pytree of whatever else."""
        raise NotImplementedError

    def finish(self, out: PyTree, extra: PyTree) -> Any:
        """What the user gets, of the function's result and whatever else."""
        return out


class _KnownStructure(NamedTuple):
    """The structure of arguments, and the places of numbers that the function needs there."""

    treedef: Any
    needed: frozenset[int]


class _CallCache:
    """What calls of a function have found out, for the calls that come after."""

    def __init__(self) -> None:
        self.programs: dict[Any, Any] = {}
        self.structures: dict[Any, _KnownStructure] = {}
        self.memory: dict[Any, Any] = {}
        self.lock = threading.RLock()


_caches: dict[int, dict[Transform, _CallCache]] = {}


def _cache_of(fn: Function, transform: Transform) -> _CallCache:
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


class _Compiled(NamedTuple):
    """A traced function under a transform: what the transform knows of it, and how it is run."""

    program: Program
    prepared: Any
    run: Callable[..., Any]


_FoundProgram = tuple[_Compiled, list[Value]] | None
"""The program of a call, and its arrays; None if there is more to take apart."""


class TransformedFunction:
    """A function under a transform, traced and compiled once for each kind of call.

    A call under a transformation becomes a part of that, and is traced each time. If it is
    `jitted`, that is a `jax.jit` made for it: all that is not traced there is static.
    """

    def __init__(self, fn: Callable[..., Any], transform: Transform, *, jitted: bool = False):
        self.fn = fn
        self._transform = transform
        self._jitted = jitted
        self._known = _cache_of(fn, transform)

    def __call__(self, operands: PyTree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function."""
        call = self._open(args, kwargs)
        is_clean = _jax.trace_state_clean()
        if not (is_clean or self._transform.is_traceable):
            raise TypeError(self._transform.no_values.format(name_of(self.fn)))
        inline = self._transform.is_traceable and (not is_clean or is_eager())
        find = self._stage if inline else self._find_compiled
        with _jax.known_loops():
            if self._jitted:
                return self._run(call, self._stage(call, operands), operands)
            return registry.run_opened(
                call,
                lambda call: find(call, operands),
                lambda call, found: self._run(call, found, operands),
            )

    def traced_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedCall:
        """The traced function, and the arrays among these arguments."""
        call = self._open(args, kwargs)
        with _jax.known_loops():
            return registry.run_opened(call, self._trace, self._traced_call)

    def _traced_call(
        self, call: FunctionCall, traced: tuple[Program, Signature, list[Value]]
    ) -> TracedCall:
        program, _, arrays = traced
        if self._transform.stateless:  # then the program returns nothing but the function's own
            return TracedCall(program, arrays, returned=program.numbered(lambda out: out))
        return TracedCall(program, arrays, returned=program.numbered(call.user_result))

    def arrays(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Value]:
        """The arrays among the arguments, those in objects included."""
        call = self._open(args, kwargs)
        return registry.run_opened(call, self._split, lambda call, parts: parts[1])

    def _open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FunctionCall:
        return FunctionCall(self.fn, args, kwargs, memory=self._known.memory)

    def _run(self, call: FunctionCall, found: _FoundProgram, operands: PyTree) -> Any:
        assert found is not None
        compiled, arrays = found
        self._transform.check(compiled.prepared, operands)
        outs, extra = compiled.run(operands, *arrays)
        out = None if outs is None else compiled.program.join(outs)
        if outs is not None and not self._transform.stateless:
            out = call.close(out)
        return self._transform.finish(out, extra)

    def _split(self, call: FunctionCall) -> tuple[Signature, list[Value]]:
        flat = FlatArguments.of(call.arguments)
        known = self._known.structures.get(flat.treedef)
        if known is None:
            return split(self.fn, flat, frozenset())
        # Large structures are slow to compare, unless they are the same object.
        return split(self.fn, dataclasses.replace(flat, treedef=known.treedef), known.needed)

    def _trace(self, call: FunctionCall) -> tuple[Program, Signature, list[Value]]:
        """The traced function; numbers that it needs the values of are made static."""
        flat = FlatArguments.of(call.arguments)

        def attempt(needed: frozenset[int]) -> Any:
            if self._jitted:
                signature, arrays = split_traced(call.arguments)
            else:
                signature, arrays = split(self.fn, flat, needed)
            program = trace(self.fn, call, self._transform.plan, signature)
            if self._transform.stateless and not call.found_more():
                program = program.only(call.user_result)
            return program, signature, arrays

        if self._jitted:
            return attempt(frozenset())
        known = self._known.structures.get(flat.treedef)
        static = static_numbers(call) if known is None else known.needed
        needed, result = find_needed(attempt, numbers(call.arguments), static)
        self._known.structures[flat.treedef] = _KnownStructure(flat.treedef, needed)
        return result

    def _stage(self, call: FunctionCall, operands: PyTree) -> _FoundProgram:
        """The program of a call that becomes a part of another, or is evaluated step by step."""
        program, _, arrays = self._trace(call)
        if call.found_more():
            return None
        known = not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(operands))
        return self._prepare(program, TracedCall(program, arrays, operands, known)), arrays

    def _find_compiled(self, call: FunctionCall, operands: PyTree) -> _FoundProgram:
        """The compiled program of a call, from the cache if an equal call came before."""
        signature, arrays = self._split(call)
        found = None
        if signature.is_repeatable:
            found = self._known.programs.get(_key(signature, operands, arrays))
        if found is None:
            with self._known.lock:
                program, signature, arrays = self._trace(call)
                if call.found_more():
                    return None
                found = self._compile(program, TracedCall(program, arrays, operands))
                if signature.is_repeatable:
                    key = _key(signature, operands, arrays)
                    found = self._known.programs.setdefault(key, found)
        return found, arrays

    def _prepare(self, program: Program, call: TracedCall) -> _Compiled:
        transform, checked = self._transform, call.checked
        prepared = transform.prepare(call)

        # It is kept for later calls, and must not keep the arrays of this one.
        def captured(operands: PyTree, *arrays: Value) -> Any:
            return transform.run(TracedCall(program, arrays, operands, checked), prepared)

        captured.__name__ = captured.__qualname__ = name_of(self.fn)
        return _Compiled(program, prepared, captured)

    def _compile(self, program: Program, call: TracedCall) -> _Compiled:
        found = self._prepare(program, call)
        if not self._transform.is_traceable:
            return found
        donated = () if self._transform.stateless else (i + 1 for i in _donated(program.jaxpr))
        jit: Function = getattr(jax, "jit")  # noqa: B009  (not in `typed`: scripts replace it)
        return found._replace(run=jit(found.run, donate_argnums=tuple(donated)))


def static_numbers(call: FunctionCall) -> frozenset[int]:
    """The places among the arguments of a call at which a framework keeps numbers static."""
    found = (places_in(call.arguments, parts) for parts in registry.static_parts(call))
    return frozenset[int]().union(*found)


def _key(signature: Signature, operands: PyTree, arrays: Sequence[Any]) -> Any:
    leaves, treedef = pytrees.flatten(operands)
    types = tuple(map(jax.typeof, (*leaves, *arrays)))
    return signature, treedef, types, _jax.trace_context(), registry.context()


def _donated(jaxpr: Jaxpr) -> tuple[int, ...]:
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


def transformed(
    fn: Callable[P, Any], transform: Transform, operands: PyTree = ()
) -> Callable[P, Any]:
    """A function of the arguments of `fn` that returns what the transform gives."""
    call = TransformedFunction(fn, transform)

    @functools.wraps(fn, updated=())
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
        return call(operands, args, kwargs)

    return wrapper


def check_function(fn: Function, function: str) -> None:
    """Refuses what is no function, or none that can be traced."""
    if isinstance(fn, (jax.stages.Compiled, jax.stages.Lowered, jax.stages.Traced)):
        raise TypeError(
            f"`{function}` was given a {type(fn).__name__}, a function already traced or compiled "
            "ahead of time: there is nothing left to trace. Give it the function itself, and "
            f"compile the result instead: jax.jit(tapax.{function}(fn)).lower(...).compile()."
        )
    if not callable(fn):
        raise wrong_type(f"`{function}` takes a function, but was given", fn)
