"""Access to jaxprs and to the parameters of their equations in every supported version of JAX.

Before jax 0.11 a closed jaxpr contains an open one; since then both have one class.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from jax._src.interpreters import partial_eval as _partial_eval
from jax.extend.core import Primitive, jaxpr_as_fun

from tapax._jax.types import AbstractValue, Equation, Jaxpr, OpenJaxpr, PyTree, Value


def open_jaxpr(jaxpr: Jaxpr) -> OpenJaxpr:
    """Return the object with the attributes `eqns`, `invars` and `outvars`."""
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
    return inner


def as_function(jaxpr: Jaxpr) -> Callable[..., list[Value]]:
    """Return a function that evaluates a closed jaxpr."""
    return jaxpr_as_fun(jaxpr)  # pyright: ignore[reportArgumentType]


def jaxpr_consts(jaxpr: Jaxpr) -> Sequence[Any]:
    """Return the constants of a closed jaxpr, or an empty sequence for an open one."""
    return getattr(jaxpr, "consts", ())


def traced_for(jaxpr: Jaxpr) -> str:
    """Return the name of the JAX function that traced a body, such as `cond` or `switch`.

    Transformations of JAX keep it.
    """
    info: Any = cast(Any, open_jaxpr(jaxpr)).debug_info
    return info.traced_for


def with_traced_for(jaxpr: Jaxpr, name: str) -> Jaxpr:
    """Return a closed jaxpr that says it was traced for the function `name` of JAX."""
    inner: Any = open_jaxpr(jaxpr)
    info = inner.debug_info._replace(traced_for=name)
    return with_open_jaxpr(jaxpr, inner.replace(debug_info=info))


def jaxpr_inputs(jaxpr: Jaxpr, args: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Pair every input variable of a jaxpr, constants included, with its value."""
    inner = open_jaxpr(jaxpr)
    variables = [*inner.constvars, *inner.invars]
    values = [*jaxpr_consts(jaxpr), *args]
    return zip(variables, values, strict=True)


def closed(jaxpr: Jaxpr) -> tuple[OpenJaxpr, Sequence[Any]]:
    """Turn the constants of a jaxpr into leading inputs, as `remat` requires; return both."""
    consts = jaxpr_consts(jaxpr)
    inner: Any = open_jaxpr(jaxpr)
    return cast(Any, _partial_eval.convert_constvars_jaxpr(inner)), consts


def dce(jaxpr: Jaxpr, results: Sequence[int] | None = None) -> Jaxpr:
    """Keep the results numbered `results`, and the equations that compute them.

    With None, keep all results. `jaxpr` is closed.
    """
    inner: Any = open_jaxpr(jaxpr)
    wanted = [results is None or i in results for i in range(len(inner.outvars))]
    kept, _ = _partial_eval.dce_jaxpr(inner, wanted, instantiate=True)
    return with_open_jaxpr(jaxpr, cast(Any, kept))


def with_open_jaxpr(jaxpr: Jaxpr, inner: OpenJaxpr) -> Jaxpr:
    """Combine the constants of `jaxpr` with the equations of `inner`; closed if `jaxpr` is."""
    closed: Any = jaxpr
    return inner if open_jaxpr(jaxpr) is jaxpr else closed.replace(jaxpr=inner)


def hidden_body(value: PyTree) -> Any:
    """Return the jaxpr inside the callee of a `call_hi_primitive`, or None for other parameters."""
    # The callees of `call_hi_primitive` have a method `expand`.
    if hasattr(value, "eqns") or not callable(getattr(value, "expand", None)):
        return None
    traced = getattr(value, "traced", None)
    candidates = ((value, "jaxpr"), (traced, "jaxpr"), (value, "solve_jaxpr"))
    found = (getattr(holder, name, None) for holder, name in candidates)
    # JAX 0.11 wraps a mapped callee in another, which has it as `prim`.
    return next((jaxpr for jaxpr in found if jaxpr is not None), None) or hidden_body(
        getattr(value, "prim", None)
    )


def called_hi_primitive(primitive: Primitive, params: Mapping[str, Any]) -> Any:
    """Return the callee of a `call_hi_primitive`, or None for any other primitive."""
    return params["_prim"] if primitive.name == "call_hi_primitive" else None


def operation_name(eqn: Equation) -> str:
    """Return the name of an equation's primitive, or of the callee of a `call_hi_primitive`."""
    return operation(eqn.primitive, eqn.params)[0]


def operation(primitive: Primitive, params: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the name of an operation, and the label that a `checkpoint_name` assigns, or None."""
    if primitive.name == "call_hi_primitive":
        called = params["_prim"]
        name = type(called).__name__
        return name, getattr(called, "name", None) if name == "CheckpointName" else None
    return primitive.name, params["name"] if primitive.name == "name" else None


def call_body(eqn: Equation) -> Jaxpr:
    """Return the body of a call, whichever parameter contains it."""
    for name in ("jaxpr", "call_jaxpr"):
        if name in eqn.params:
            return eqn.params[name]
    return hidden_body(eqn.params["_prim"])


def remat_options(eqn: Equation) -> tuple[Any, Any]:
    """Return the policy of a remat and its option `prevent_cse`."""
    params = eqn.params if "jaxpr" in eqn.params else vars(eqn.params["_prim"])
    return params["policy"], params.get("prevent_cse", True)


def scan_split(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carries among the operands of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def is_reference(aval: AbstractValue) -> bool:
    """Return whether `aval` is the type of a mutable array reference."""
    return hasattr(aval, "inner_aval")
