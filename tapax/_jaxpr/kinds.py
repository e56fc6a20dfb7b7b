"""The one table that classifies primitives.

>>> import jax, jax.numpy as jnp
>>> program = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) + 1)(1.0)
>>> for equation in program.eqns:
...     print(equation.primitive, kind_of(equation))
jit Kind.JIT
add Kind.ELEMENTWISE

The rows name primitives of JAX only. A primitive of another library may have the name of a JAX
primitive and do something else, so an adapter registers the ones that it knows. A primitive with
a parameter `call_jaxpr`, whose inputs and results match those of the equation, is a call, whoever
defines it. A primitive in no row is `OPAQUE`; the walk warns if it finds a tap inside of one.

To add a primitive, add its name to a row. If its body must be restaged in a new way, the walk
also needs a handler: see `tapax._walk.handlers`.
"""

import enum
from collections.abc import Mapping
from typing import Any

from tapax import _jax
from tapax._jax import Equation, Primitive


class Kind(enum.Flag):
    """The class of a primitive, or several classes combined."""

    OPAQUE = 0
    JIT = enum.auto()
    CALL = enum.auto()
    REMAT = enum.auto()
    CUSTOM_JVP = enum.auto()
    CUSTOM_VJP = enum.auto()
    SCAN = enum.auto()
    WHILE = enum.auto()
    COND = enum.auto()
    SHARD_MAP = enum.auto()
    LINEAR_SOLVE = enum.auto()

    COPY = enum.auto()
    """Returns each operand unchanged; so do its derivatives."""
    REARRANGEMENT = enum.auto()
    """Returns every element of its operand at other positions, perhaps several times."""
    SELECTION = enum.auto()
    """Returns some elements of its first operand."""
    ELEMENTWISE = enum.auto()
    """Computes each element from the elements of its operands at the same position."""
    REDUCTION = enum.auto()
    """Combines the elements along the axes in its parameter `axes`."""
    CUMULATIVE = enum.auto()
    """Combines each element with those before it along the axis in its parameter `axis`."""
    MATRIX_PRODUCT = enum.auto()
    COLLECTIVE = enum.auto()
    CALLBACK = enum.auto()
    DEBUG = enum.auto()
    PLACEHOLDER = enum.auto()
    """Makes a placeholder for a value that one branch of a conditional lacks."""
    WRITE = enum.auto()
    """Writes to its first operand, a reference."""

    KEEPS_FINITE = enum.auto()
    """Returns elements that are finite exactly where the elements of its operand are."""
    BOUNDED = enum.auto()
    """Returns finite elements if all of its operands are finite."""
    SWALLOWS_INFINITY = enum.auto()
    """Usually returns finite elements where those of its operands are infinite."""
    PAIRED = enum.auto()
    """Computes each result from the operand of the same number alone."""


CALLS = Kind.JIT | Kind.CALL
CUSTOM_RULES = Kind.CUSTOM_JVP | Kind.CUSTOM_VJP
LOOPS = Kind.SCAN | Kind.WHILE

_ROWS: dict[Kind, str] = {
    Kind.JIT: "jit",
    Kind.CALL: "call closed_call eval_jaxpr program_order",
    Kind.REMAT: "remat2 RematTraced",
    Kind.CUSTOM_JVP: "custom_jvp_call CustomJVPTraced",
    Kind.CUSTOM_VJP: "custom_vjp_call CustomVJPTraced",
    Kind.SCAN: "scan",
    Kind.WHILE: "while",
    Kind.COND: "cond",
    Kind.SHARD_MAP: "shard_map",
    Kind.LINEAR_SOLVE: "custom_linear_solve",
    Kind.COPY: """
        CheckpointName copy device_put layout_constraint name optimization_barrier pvary
        reduced_vary_cast reduced_vary_cast_p relayout reshard sharding_constraint
        vary_unreduced_cast vary_unreduced_cast_p
    """,
    Kind.REARRANGEMENT: "broadcast_in_dim reshape rev squeeze transpose",
    Kind.SELECTION: "dynamic_slice gather slice split",
    Kind.ELEMENTWISE: """
        abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
        clamp complex conj convert_element_type cos cosh digamma div eq erf erf_inv erfc exp exp2
        expm1 floor ge gt igamma igammac imag integer_pow is_finite le lgamma log log1p log2
        logistic lt max min mul ne neg nextafter not one_minus_square or polygamma polynomial pow
        real reduce_precision regularized_incomplete_beta rem round rsqrt select_n sign sin sinh
        sqrt square sub tan tanh xor zeta
    """,
    Kind.REDUCTION: """
        reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
    """,
    Kind.CUMULATIVE: "cumlogsumexp cummax cummin cumprod cumsum",
    Kind.MATRIX_PRODUCT: "conv_general_dilated dot_general ragged_dot_general scaled_dot",
    Kind.COLLECTIVE: """
        all_gather all_gather_invariant all_gather_reduced all_to_all pmax pmin ppermute psum
        psum_invariant ragged_all_to_all reduce_scatter unreduced_psum
    """,
    Kind.CALLBACK: "ffi_call io_callback pure_callback",
    Kind.DEBUG: "debug_callback debug_print",
    Kind.PLACEHOLDER: "empty empty2",
    Kind.WRITE: "addupdate swap",
    Kind.KEEPS_FINITE: "abs conj convert_element_type neg stop_gradient",
    Kind.BOUNDED: """
        ceil clamp concatenate convert_element_type cos dynamic_slice dynamic_update_slice erf floor
        iota logistic max min pad reduce_max reduce_min round sign sin slice tanh
    """,
    Kind.SWALLOWS_INFINITY: "div erf erfc exp exp2 logistic rsqrt tanh",
    Kind.PAIRED: "all_gather pmax pmin psum psum_invariant sort",
}

_BY_NAME: dict[str, Kind] = {}
for _kind, _names in _ROWS.items():
    for _name in _names.split():
        _BY_NAME[_name] = _BY_NAME.get(_name, Kind.OPAQUE) | _kind

_known: dict[Primitive, Kind] = {}


def kind_of(eqn: Equation) -> Kind:
    """Return the kinds of an equation; `OPAQUE` if no row names its primitive."""
    kind = kind_of_operation(eqn.primitive, eqn.params)
    if kind is Kind.CALL and not _runs_its_body(eqn):
        return Kind.OPAQUE
    return kind


def kind_of_operation(primitive: Primitive, params: Mapping[str, Any]) -> Kind:
    """Return the kinds of a primitive with the parameters `params`."""
    called = _jax.called_hi_primitive(primitive, params)
    if called is not None:
        is_jax = type(called).__module__.startswith("jax.")
        return _BY_NAME.get(type(called).__name__, Kind.OPAQUE) if is_jax else Kind.OPAQUE
    body: Any = params.get("call_jaxpr")
    is_call = hasattr(_jax.open_jaxpr(body), "eqns")
    return kind_of_primitive(primitive) or (Kind.CALL if is_call else Kind.OPAQUE)


def _runs_its_body(eqn: Equation) -> bool:
    """Return whether the body of a call has its operands and results; that of a map does not."""
    inner = _jax.open_jaxpr(_jax.call_body(eqn))
    pairs = zip((eqn.invars, eqn.outvars), (inner.invars, inner.outvars), strict=True)
    return all(
        [getattr(v.aval, "shape", None) for v in one]
        == [getattr(v.aval, "shape", None) for v in other]
        for one, other in pairs
    )


def register_primitive(primitive: Primitive, kind: Kind) -> None:
    """Register the kind of a primitive of another library."""
    _known[primitive] = kind


def kind_of_primitive(primitive: Primitive) -> Kind:
    """Return the kinds of a primitive, whatever its parameters."""
    if primitive not in _known:
        named = _BY_NAME.get(primitive.name, Kind.OPAQUE)
        is_jax = bool(named) and _jax.is_jax_primitive(primitive)
        _known[primitive] = named if is_jax else Kind.OPAQUE
    return _known[primitive]
