"""Jaxprs and the parameters of their equations, whatever the version of JAX.

Before jax 0.11 a closed jaxpr holds an open one; since then they are the same class.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from jax._src.interpreters import partial_eval as _partial_eval
from jax.extend.core import Primitive, jaxpr_as_fun

from tapax._jax.types import AbstractValue, Equation, Jaxpr, OpenJaxpr, PyTree, Value


def open_jaxpr(jaxpr: Jaxpr) -> OpenJaxpr:
    """The object that has `eqns`, `invars` and `outvars`."""
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
    return inner


def as_function(jaxpr: Jaxpr) -> Callable[..., list[Value]]:
    """A function that evaluates a closed jaxpr."""
    return jaxpr_as_fun(jaxpr)  # pyright: ignore[reportArgumentType]


def jaxpr_consts(jaxpr: Jaxpr) -> Sequence[Any]:
    """The constants of a closed jaxpr; none for an open one."""
    return getattr(jaxpr, "consts", ())


def jaxpr_inputs(jaxpr: Jaxpr, args: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs every input variable of a jaxpr, constants included, with its value."""
    inner = open_jaxpr(jaxpr)
    variables = [*inner.constvars, *inner.invars]
    values = [*jaxpr_consts(jaxpr), *args]
    return zip(variables, values, strict=True)


def closed(jaxpr: Jaxpr) -> tuple[OpenJaxpr, Sequence[Any]]:
    """A jaxpr as `remat` wants its body: constants turned into leading inputs, and those."""
    consts = jaxpr_consts(jaxpr)
    inner: Any = open_jaxpr(jaxpr)
    return cast(Any, _partial_eval.convert_constvars_jaxpr(inner)), consts


def dce(jaxpr: Jaxpr, results: Sequence[int] | None = None) -> Jaxpr:
    """A closed jaxpr with some of its results, all if None, and the equations those need."""
    inner: Any = open_jaxpr(jaxpr)
    wanted = [results is None or i in results for i in range(len(inner.outvars))]
    kept, _ = _partial_eval.dce_jaxpr(inner, wanted, instantiate=True)
    return with_open_jaxpr(jaxpr, cast(Any, kept))


def with_open_jaxpr(jaxpr: Jaxpr, inner: OpenJaxpr) -> Jaxpr:
    """A jaxpr, closed if `jaxpr` is, with the constants of `jaxpr` and the equations of `inner`."""
    closed: Any = jaxpr
    return inner if open_jaxpr(jaxpr) is jaxpr else closed.replace(jaxpr=inner)


def hidden_body(value: PyTree) -> Any:
    """The jaxpr inside a parameter that is no jaxpr: that of a `call_hi_primitive`; or None."""
    # What `call_hi_primitive` calls knows how to `expand` itself.
    if hasattr(value, "eqns") or not callable(getattr(value, "expand", None)):
        return None
    traced = getattr(value, "traced", None)
    places = ((value, "jaxpr"), (traced, "jaxpr"), (value, "solve_jaxpr"))
    found = (getattr(holder, name, None) for holder, name in places)
    # JAX 0.11 wraps what is mapped in another one, as `prim`.
    return next((jaxpr for jaxpr in found if jaxpr is not None), None) or hidden_body(
        getattr(value, "prim", None)
    )


def called_hi_primitive(primitive: Primitive, params: Mapping[str, Any]) -> Any:
    """The object that a `call_hi_primitive` calls; None for any other primitive."""
    return params["_prim"] if primitive.name == "call_hi_primitive" else None


def operation_name(eqn: Equation) -> str:
    """The name of an equation's primitive, or of what a `call_hi_primitive` calls."""
    return operation(eqn.primitive, eqn.params)[0]


def operation(primitive: Primitive, params: Mapping[str, Any]) -> tuple[str, str | None]:
    """The name of an operation, and the name it gives its operand, if it is `checkpoint_name`."""
    if primitive.name == "call_hi_primitive":
        called = params["_prim"]
        name = type(called).__name__
        return name, getattr(called, "name", None) if name == "CheckpointName" else None
    return primitive.name, params["name"] if primitive.name == "name" else None


def call_body(eqn: Equation) -> Jaxpr:
    """The body of an equation that has one, whatever parameter it is in."""
    for name in ("jaxpr", "call_jaxpr"):
        if name in eqn.params:
            return eqn.params[name]
    return hidden_body(eqn.params["_prim"])


def remat_options(eqn: Equation) -> tuple[Any, Any]:
    """The policy of a remat, and whether common subexpressions are kept."""
    params = eqn.params if "jaxpr" in eqn.params else vars(eqn.params["_prim"])
    return params["policy"], params.get("prevent_cse", True)


def scan_split(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def is_reference(aval: AbstractValue) -> bool:
    """Whether a value is a reference to an array, which is read and written."""
    return hasattr(aval, "inner_aval")
