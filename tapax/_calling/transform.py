"""From the call of a function to a walked program: when to trace, to compile, and to reuse it.

A `Transform` says what to do with the program. Like a function under `jax.jit`, the function is
compiled once for each structure, shape and type of its arguments. If it is not jitted, and a value
that it closes over was replaced, it is traced again. Under a transformation, or in another jitted
function, it becomes part of that program instead. Under `jax.disable_jit()` it is evaluated one
operation at a time.
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
from tapax._calling.free_variables import FreeVariables
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
from tapax._marks.user_warning import warn_user
from tapax._sites import name_of, wrong_type
from tapax._walk.plan import Plan

P = ParamSpec("P")


class Transform:
    """A task for a traced program. Equal transforms perform equal tasks."""

    plan: Plan
    stateless = False
    """True if a call does not update the objects that the function changes."""
    is_traceable = True
    """True if JAX can trace `run`; otherwise `run` takes only arrays whose values are known."""
    no_values = ""
    """The error for a call under a transformation, unless `is_traceable`; `{}` is the function."""

    @property
    def is_reusable(self) -> bool:
        """Return whether equal transforms do equal work even after objects in them change."""
        return True

    def prepare(self, call: TracedCall) -> Any:
        """Compute from the program what `run` needs; only the types of the arrays are known."""
        return None

    def check(self, prepared: PyTree, operands: PyTree) -> None:
        """Raise for operands whose values are wrong, if the values are known."""

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        """Return the results of the program (None if it has no results) and an extra pytree."""
        raise NotImplementedError

    def finish(self, out: PyTree, extra: PyTree) -> Any:
        """Make the user's result from the result of the function and the extra pytree."""
        return out


class _KnownStructure(NamedTuple):
    """The structure of arguments, and the positions of the numbers whose values are needed."""

    treedef: Any
    needed: frozenset[int]


class _CallCache:
    """The programs and structures from earlier calls of a function, for later calls."""

    def __init__(self) -> None:
        self.programs: dict[Any, Any] = {}
        self.structures: dict[Any, _KnownStructure] = {}
        self.memory: dict[Any, Any] = {}
        self.lock = threading.RLock()
        self.replacements = 0


_caches: dict[int, dict[Transform, _CallCache]] = {}


def _keeps_values(fn: Function) -> bool:
    """Return whether a plain call of a function may keep the closed-over values of an earlier one.

    A jitted function does. A module has no closed-over values.
    """
    return registry.has_repeatable_calls(fn) or _jax.jit_options(fn) is not None


def _cache_of(fn: Function, transform: Transform) -> _CallCache:
    """Return the cache of a function, which equal transforms share if its calls are repeatable.

    The cache disappears with the function, which it must not keep alive.
    """
    if not transform.is_reusable or not _keeps_values(fn):
        return _CallCache()
    if not FreeVariables.of(transform).complete:  # a function in it may read something else now
        return _CallCache()
    new: dict[Transform, _CallCache] = {}
    found = _caches.setdefault(id(fn), new)
    if found is new:
        weakref.finalize(fn, _caches.pop, id(fn), None).atexit = False
    try:
        known = found.setdefault(transform, _CallCache())
    except TypeError:  # the transform contains a predicate that is not hashable
        return _CallCache()
    if len(found) > 64:  # a loop may create a new predicate in each iteration
        found.pop(next(iter(found)), None)
    return known


class _Compiled(NamedTuple):
    """A program under a transform: the result of `prepare`, and the function that runs it."""

    program: Program
    prepared: Any
    run: Callable[..., Any]
    free: FreeVariables = FreeVariables()


_PATIENCE = 5
"""The number of replaced values after which a function warns that it is compiled each time."""

_FoundProgram = tuple[_Compiled, list[Value]] | None
"""The program of a call and its arrays; None if the call has more state to split."""


class TransformedFunction:
    """A function under a transform, traced and compiled once for each kind of call.

    A call under a transformation becomes part of the transformed program, and is traced each time.
    `jitted` means that the transformation is a `jax.jit` made for this function: everything that
    it does not trace is static.
    """

    def __init__(self, fn: Callable[..., Any], transform: Transform, *, jitted: bool = False):
        self.fn = fn
        self._transform = transform
        self._jitted = jitted
        self._keeps_values = _keeps_values(fn)
        self._known = _cache_of(fn, transform)

    def __call__(self, operands: PyTree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function with `operands` of the transform."""
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
        """Trace the function; return the program and the arrays among these arguments."""
        call = self._open(args, kwargs)
        with _jax.known_loops():
            return registry.run_opened(call, self._trace, self._traced_call)

    def _traced_call(
        self, call: FunctionCall, traced: tuple[Program, Signature, list[Value]]
    ) -> TracedCall:
        program, _, arrays = traced
        if self._transform.stateless:  # the program returns only the result of the function
            return TracedCall(program, arrays, returned=program.numbered(lambda out: out))
        return TracedCall(program, arrays, returned=program.numbered(call.user_result))

    def arrays(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Value]:
        """Return the arrays among the arguments, including arrays in objects."""
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
        # Comparing large structures is slow, unless they are the same object.
        return split(self.fn, dataclasses.replace(flat, treedef=known.treedef), known.needed)

    def _trace(self, call: FunctionCall) -> tuple[Program, Signature, list[Value]]:
        """Trace the function; numbers whose values it needs become static."""
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
        """Trace a call that becomes part of another program, or runs one operation at a time."""
        program, _, arrays = self._trace(call)
        if call.found_more():
            return None
        known = not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(operands))
        return self._prepare(program, TracedCall(program, arrays, operands, known)), arrays

    def _find_compiled(self, call: FunctionCall, operands: PyTree) -> _FoundProgram:
        """Return the compiled program of a call, from the cache if an equal call came before."""
        signature, arrays = self._split(call)
        found = None
        if signature.is_repeatable:
            found = self._current(_key(signature, operands, arrays))
        if found is None:
            with self._known.lock:
                program, signature, arrays = self._trace(call)
                if call.found_more():
                    return None
                found = self._compile(program, TracedCall(program, arrays, operands))
                if signature.is_repeatable:
                    key = _key(signature, operands, arrays)
                    found = self._current(key) or self._known.programs.setdefault(key, found)
        return found, arrays

    def _current(self, key: Any) -> _Compiled | None:
        """Return the program of an earlier call, unless a variable that it read was replaced."""
        found: _Compiled | None = self._known.programs.get(key)
        variable = None if found is None else found.free.find_changed()
        if variable is None:
            return found
        self._known.programs.pop(key, None)
        self._known.replacements += 1
        if self._known.replacements == _PATIENCE:
            warn_user(
                f"{name_of(self.fn)} was traced and compiled {_PATIENCE} times more, because it "
                f"reads the variable {variable!r}, whose value changes from call to call. Pass the "
                "value as an argument, and it is compiled once."
            )
        return None

    def _prepare(self, program: Program, call: TracedCall) -> _Compiled:
        transform, checked = self._transform, call.checked
        prepared = transform.prepare(call)

        # Later calls reuse this function, so it must not keep the arrays of this call alive.
        def captured(operands: PyTree, *arrays: Value) -> Any:
            return transform.run(TracedCall(program, arrays, operands, checked), prepared)

        captured.__name__ = captured.__qualname__ = name_of(self.fn)
        return _Compiled(program, prepared, captured)

    def _compile(self, program: Program, call: TracedCall) -> _Compiled:
        found = self._prepare(program, call)
        free = FreeVariables.of(self._transform)
        if not self._keeps_values:
            read = FreeVariables.of(self.fn, _jax.jaxpr_consts(program.jaxpr))
            free = free._replace(readings=(*read.readings, *free.readings))
        found = found._replace(free=free)
        if not self._transform.is_traceable:
            return found
        donated = () if self._transform.stateless else (i + 1 for i in _donated(program.jaxpr))
        jit: Function = getattr(jax, "jit")  # noqa: B009  (not in `typed`: scripts replace it)
        return found._replace(run=jit(found.run, donate_argnums=tuple(donated)))


def static_numbers(call: FunctionCall) -> frozenset[int]:
    """Return the positions in the arguments of a call at which a framework keeps numbers static."""
    found = (places_in(call.arguments, parts) for parts in registry.static_parts(call))
    return frozenset[int]().union(*found)


def _key(signature: Signature, operands: PyTree, arrays: Sequence[Any]) -> Any:
    leaves, treedef = pytrees.flatten(operands)
    types = tuple(map(jax.typeof, (*leaves, *arrays)))
    return signature, treedef, types, _jax.trace_context(), registry.context()


def _donated(jaxpr: Jaxpr) -> tuple[int, ...]:
    """Return the inputs of a program that are donated to a jitted function inside."""
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
    """Make a function of the arguments of `fn` that returns the result of the transform."""
    call = TransformedFunction(fn, transform)

    @functools.wraps(fn, updated=())
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
        return call(operands, args, kwargs)

    return wrapper


def check_function(fn: Function, function: str, *, returns_function: bool = True) -> None:
    """Refuse an object that is not a function, or that JAX cannot trace.

    `function` names the caller; `returns_function` is True if `jax.jit` takes what it returns.
    """
    if isinstance(fn, (jax.stages.Compiled, jax.stages.Lowered, jax.stages.Traced)):
        compiled = f"jax.jit(tapax.{function}(fn)).lower(...).compile()"
        raise TypeError(
            f"`{function}` was given a {type(fn).__name__}, a function already traced or compiled "
            "ahead of time: there is nothing left to trace. Give it the function itself"
            + (f", and compile the result instead: {compiled}." if returns_function else ".")
        )
    if not callable(fn):
        raise wrong_type(f"`{function}` takes a function, but was given", fn)
