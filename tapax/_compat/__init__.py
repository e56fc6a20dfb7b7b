"""Everything that depends on the version of JAX, and every private import, in one place.

The rest of the library uses public names of JAX and the functions below. A difference between
versions is found by what JAX can do, never by its version number, so that a version that was not
out when this was written has a fair chance to work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src import source_info_util as _source_info
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.sharding_impls import UNSPECIFIED  # pyright: ignore[reportPrivateImportUsage]
from jax.core import ShapedArray
from jax.extend.core import Literal, Primitive, mapped_aval, unmapped_aval

from tapax._compat._rules import (
    is_splitting_while,
    register_partial_eval,
    register_partial_eval_custom,
    register_remat,
    unmapped,
    wrap_batcher,
    wrap_partial_eval,
    wrap_partial_eval_custom,
)

__all__ = [
    "UNSPECIFIED",
    "Literal",
    "Primitive",
    "is_splitting_while",
    "register_partial_eval",
    "register_partial_eval_custom",
    "register_remat",
    "unmapped",
    "wrap_batcher",
    "wrap_partial_eval",
    "wrap_partial_eval_custom",
]

Effect = _effects.Effect


def allow_effect(effect: type) -> None:
    """Lets `effect` through every transformation, and keeps it alive in partial evaluation."""
    for allowed in (
        _effects.lowerable_effects,
        _effects.control_flow_allowed_effects,
        _effects.custom_derivatives_allowed_effects,
        _effects.remat_allowed_effects,
        _effects.partial_eval_kept_effects,
    ):
        allowed.add_type(effect)


# --- jaxprs -----------------------------------------------------------------------------------
# Before jax 0.11 a closed jaxpr holds an open one; since then they are the same class.


def open_jaxpr(jaxpr: Any) -> Any:
    """The object that has `eqns`, `invars` and `outvars`."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def jaxpr_consts(jaxpr: Any) -> Sequence[Any]:
    """The constants of a closed jaxpr; none for an open one."""
    return getattr(jaxpr, "consts", ())


def jaxpr_inputs(jaxpr: Any, args: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs every input variable of a jaxpr, constants included, with its value."""
    inner = open_jaxpr(jaxpr)
    variables = [*inner.constvars, *inner.invars]
    values = [*jaxpr_consts(jaxpr), *args]
    return zip(variables, values, strict=True)


def closed(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr as `remat` wants its body: constants turned into leading inputs, and those."""
    consts = jaxpr_consts(jaxpr)
    return _partial_eval.convert_constvars_jaxpr(open_jaxpr(jaxpr)), consts


def dce(jaxpr: Any, results: Sequence[int] | None = None) -> Any:
    """A closed jaxpr with some of its results, all if None, and the equations those need."""
    inner = open_jaxpr(jaxpr)
    wanted = [results is None or i in results for i in range(len(inner.outvars))]
    kept, _ = _partial_eval.dce_jaxpr(inner, wanted, instantiate=True)
    return kept if inner is jaxpr else jaxpr.replace(jaxpr=kept)


def hidden_body(value: Any) -> Any:
    """The jaxpr inside a parameter that is no jaxpr: that of a `call_hi_primitive`; or None."""
    for path in (("jaxpr",), ("traced", "jaxpr"), ("solve_jaxpr",)):
        found = value if _is_hi(value) else None
        for name in path:
            found = getattr(found, name, None)
        if found is not None:
            return found
    return None


def _is_hi(value: Any) -> bool:
    """Whether a parameter is what `call_hi_primitive` calls: it knows how to `expand` itself."""
    return not hasattr(value, "eqns") and callable(getattr(value, "expand", None))


def kind_of(eqn: Any) -> str:
    """What an equation is: the name of its primitive, or of what a `call_hi_primitive` calls."""
    name = eqn.primitive.name
    return type(eqn.params["_prim"]).__name__ if name == "call_hi_primitive" else name


def call_body(eqn: Any) -> Any:
    """The body of a call with a custom rule, whatever parameter it is in."""
    body = eqn.params.get("call_jaxpr")
    return hidden_body(eqn.params["_prim"]) if body is None else body


def remat_parts(eqn: Any) -> tuple[Any, Any, Any]:
    """The body of a remat, its policy, and whether common subexpressions are kept."""
    params = eqn.params if "jaxpr" in eqn.params else vars(eqn.params["_prim"])
    return params["jaxpr"], params["policy"], params["prevent_cse"]


def with_shape(aval: Any, shape: tuple[int, ...]) -> Any:
    """A type like another, strong, of another shape, on as many devices."""
    return ShapedArray(shape, aval.dtype, manual_axis_type=aval.manual_axis_type)


def stacked(aval: Any, length: int) -> Any:
    """The type of several values along a new leading axis."""
    return unmapped_aval(length, 0, aval)


def unstacked(aval: Any) -> Any:
    """The type of what lies along the first axis."""
    return mapped_aval(aval.shape[0], 0, aval)


def operation(primitive: Primitive, params: dict[str, Any]) -> tuple[str, str | None]:
    """The name of an operation, and the name it gives its operand, if it is `checkpoint_name`."""
    if primitive.name == "call_hi_primitive":
        called = params["_prim"]
        name = type(called).__name__
        return name, getattr(called, "name", None) if name == "CheckpointName" else None
    return primitive.name, params["name"] if primitive.name == "name" else None


def scan_split(params: dict[str, Any]) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


# --- equations --------------------------------------------------------------------------------


def map_results(fn: Callable[[Any], Any], out: Any, primitive: Primitive) -> Any:
    """What binding a primitive gave, with every result made another; a shard_map's are no list."""
    if not primitive.multiple_results:
        return fn(out)
    return [fn(x) for x in out] if isinstance(out, (list, tuple)) else out.map(fn)


def in_context(eqn: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """Calls `fn` under the name stack, the source line and the settings of an equation."""
    names = _source_info.current_name_stack() + eqn.source_info.name_stack
    with _source_info.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        return fn(*args)


def names_of(eqn: Any) -> Iterator[str]:
    """The names in an equation's name stack, outermost first."""
    return (part.name for part in eqn.source_info.name_stack.stack)


def transforms_of(eqn: Any) -> set[str]:
    """The transformations that made an equation: `jvp`, `transpose`, `vmap`."""
    parts = eqn.source_info.name_stack.stack
    return {part.name for part in parts if type(part).__name__ == "Transform"}


def lines_of(eqn: Any) -> Iterator[tuple[str, int]]:
    """The files and lines that an equation was traced from, innermost first."""
    traceback = eqn.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        yield frame.file_name, frame.line_num


def is_reference(aval: Any) -> bool:
    """Whether a value is a reference to an array, which is read and written."""
    return hasattr(aval, "inner_aval")


def rename_scopes(eqn: Any, rename: Callable[[str], str]) -> Any:
    """An equation with other names in its name stack."""
    stack = eqn.source_info.name_stack
    parts = tuple(part._replace(name=rename(part.name)) for part in stack.stack)
    info = eqn.source_info.replace(name_stack=dataclasses.replace(stack, stack=parts))
    return eqn.replace(source_info=info)


def no_names() -> contextlib.AbstractContextManager[Any]:
    """Within, the name stack starts anew."""
    return _source_info.reset_name_stack()


def bind_equation(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates one equation, just as it stands, on `args`; always returns a list."""
    params = eqn.primitive.get_bind_params(eqn.params)
    out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


# --- state of the trace -----------------------------------------------------------------------


def trace_state_clean() -> bool:
    """Whether no transformation is under way on this thread."""
    return _core.trace_state_clean()


def is_traced_here(tracer: Any) -> bool:
    """Whether a traced value belongs to the innermost transformation under way."""
    return tracer._trace is _core.trace_ctx.trace


def trace_context() -> Any:
    """Everything besides arguments that decides what a trace looks like; hashable."""
    return _config.trace_context()


_bind = Primitive.bind
_lock = threading.Lock()
_intercepting: list[Callable[..., Any]] = []


@contextlib.contextmanager
def intercept_bind(hook: Callable[..., Any]) -> Iterator[None]:
    """Routes `Primitive.bind` through `hook(bind, primitive, args, params)`, on every thread.

    The hook must be the same in every use, and tell by itself whether it has to do with a thread:
    the first to enter installs it, the last to leave takes it out.
    """

    def bind(self: Any, *args: Any, **params: Any) -> Any:
        return hook(_bind, self, args, params)

    with _lock:
        _intercepting.append(bind)
        Primitive.bind = bind
    try:
        yield
    finally:
        with _lock:
            _intercepting.remove(bind)
            if not _intercepting:
                Primitive.bind = _bind


# --- jit --------------------------------------------------------------------------------------


_Jitted = type(jax.jit(lambda: None))


def jit_options(fn: Any) -> dict[str, Any] | None:
    """The keyword arguments with which `jax.jit` made `fn`; None if it did not.

    A function that wraps a jitted one, as `jax.grad` makes it, has its attributes too: the type
    decides.
    """
    if type(fn) is not _Jitted:
        return None
    info = getattr(fn, "_jit_info")  # noqa: B009  (what pyright takes for the type has none)
    if any((*info.in_layouts_leaves, *info.out_layouts_leaves, info.device, info.backend)):
        return None  # these are kept by the equation that calling `fn` makes
    options: dict[str, Any] = {
        "static_argnums": info.static_argnums or None,
        "static_argnames": info.static_argnames or None,
        "donate_argnums": info.donate_argnums or None,
        "donate_argnames": info.donate_argnames or None,
        "keep_unused": info.keep_unused,
        "compiler_options": dict(info.compiler_options_kvs) or None,
    }
    for name in ("in_shardings", "out_shardings"):
        leaves = getattr(info, f"{name}_leaves")
        if not all(leaf is UNSPECIFIED for leaf in leaves):
            treedef = getattr(info, f"{name}_treedef")
            # In the arguments of `jit` None is what UNSPECIFIED is inside.
            options[name] = treedef.unflatten(
                [None if leaf is UNSPECIFIED else leaf for leaf in leaves]
            )
    return options


# --- shard_map --------------------------------------------------------------------------------


def varying_axes(aval: Any) -> frozenset[str]:
    """The manual mesh axes over which a value differs from device to device."""
    kind = getattr(aval, "manual_axis_type", None)
    if kind is not None:
        return frozenset(kind.varying)
    return frozenset(getattr(aval, "vma", ()))


def with_varying(x: Any, axes: frozenset[str]) -> Any:
    """`x`, declared to vary over `axes` too, as a carry or a branch must be to match another."""
    missing = tuple(sorted(axes - varying_axes(jax.typeof(x))))
    if not missing:
        return x
    return jax.lax.pcast(x, missing, to="varying")


def zeros(aval: Any) -> Any:
    """An array of zeros of the type `aval`, random keys and device-varying types included."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        out = jax.random.wrap_key_data(
            jnp.zeros(data.shape, data.dtype), impl=aval.dtype._impl.name
        )
    else:
        out = jnp.zeros(aval.shape, aval.dtype)
    out = with_varying(out, varying_axes(aval))
    # In explicit mode the sharding is part of the type.
    spec = aval.sharding.spec
    return jax.reshard(out, aval.sharding) if any(part is not None for part in spec) else out


def literal_value(literal: Any) -> Any:
    """A literal as an array of its own type: a bare Python number would be weakly typed."""
    value, aval = literal.val, literal.aval
    if isinstance(value, (bool, int, float, complex)) and not getattr(aval, "weak_type", False):
        return np.asarray(value, aval.dtype)
    return value
