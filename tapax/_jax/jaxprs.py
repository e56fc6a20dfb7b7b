"""Jaxprs and the parameters of their equations, whatever the version of JAX.

Before jax 0.11 a closed jaxpr holds an open one; since then they are the same class.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax._src.interpreters import partial_eval as _partial_eval
from jax.extend.core import Primitive


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
    # What `call_hi_primitive` calls knows how to `expand` itself.
    if hasattr(value, "eqns") or not callable(getattr(value, "expand", None)):
        return None
    traced = getattr(value, "traced", None)
    places = ((value, "jaxpr"), (traced, "jaxpr"), (value, "solve_jaxpr"))
    found = (getattr(holder, name, None) for holder, name in places)
    return next((jaxpr for jaxpr in found if jaxpr is not None), None)


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


def is_reference(aval: Any) -> bool:
    """Whether a value is a reference to an array, which is read and written."""
    return hasattr(aval, "inner_aval")
