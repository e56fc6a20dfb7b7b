"""The one table of what every primitive is.

>>> import jax, jax.numpy as jnp
>>> program = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) + 1)(1.0)
>>> for equation in program.eqns:
...     print(equation.primitive, kind_of(equation))
jit Kind.JIT
add Kind.ELEMENTWISE

The rows hold JAX's own primitives alone: a primitive of another library is not what its name says.
An adapter registers those whose kind it knows.
One that holds a `call_jaxpr` with the operands and results of the equation is a call, whoever
defines it. A primitive in no row is `OPAQUE`; a warning tells when a tap is inside of one.

Adding a primitive is adding its name to a row. If it has a body that is re-staged in a new way, the
walk needs a handler too: see `tapax._walk.handlers`.
"""

import enum
from collections.abc import Mapping
from typing import Any

from tapax import _jax
from tapax._jax import Equation, Primitive


class Kind(enum.Flag):
    """What a primitive is. A primitive may be of several kinds."""

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
    """Returns each operand unchanged, derivatives included."""
    REARRANGEMENT = enum.auto()
    """Returns every element of its operand, in other places, perhaps several times."""
    SELECTION = enum.auto()
    """Returns some elements of its first operand."""
    ELEMENTWISE = enum.auto()
    """Computes each element from the elements of the operands in the same place."""
    REDUCTION = enum.auto()
    """Combines the elements along the axes that its parameter `axes` names."""
    CUMULATIVE = enum.auto()
    """Combines the elements before each along its parameter `axis`."""
    MATRIX_PRODUCT = enum.auto()
    COLLECTIVE = enum.auto()
    CALLBACK = enum.auto()
    DEBUG = enum.auto()
    PLACEHOLDER = enum.auto()
    """Fills in for a value that a branch does not have."""
    WRITE = enum.auto()
    """Writes to the reference that is its first operand."""

    KEEPS_FINITE = enum.auto()
    """Returns elements that are finite exactly where those of its operand are."""
    BOUNDED = enum.auto()
    """Returns finite elements if all of its operands are finite."""
    SWALLOWS_INFINITY = enum.auto()
    """Usually returns finite elements where those of its operands are infinite."""
    PAIRED = enum.auto()
    """Has a result for each of its first operands, computed from that operand alone."""


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
    """Returns the kinds of an equation; `OPAQUE` if no row has its primitive."""
    kind = kind_of_operation(eqn.primitive, eqn.params)
    if kind is Kind.CALL and not _runs_its_body(eqn):
        return Kind.OPAQUE
    return kind


def kind_of_operation(primitive: Primitive, params: Mapping[str, Any]) -> Kind:
    """Returns the kinds of a primitive with some parameters."""
    called = _jax.called_hi_primitive(primitive, params)
    if called is not None:
        own = type(called).__module__.startswith("jax.")
        return _BY_NAME.get(type(called).__name__, Kind.OPAQUE) if own else Kind.OPAQUE
    body: Any = params.get("call_jaxpr")
    is_call = hasattr(_jax.open_jaxpr(body), "eqns")
    return kind_of_primitive(primitive) or (Kind.CALL if is_call else Kind.OPAQUE)


def _runs_its_body(eqn: Equation) -> bool:
    """Whether a call gives its body its operands and returns the results: a map does not."""
    inner = _jax.open_jaxpr(_jax.call_body(eqn))
    pairs = zip((eqn.invars, eqn.outvars), (inner.invars, inner.outvars), strict=True)
    return all(
        [getattr(v.aval, "shape", None) for v in one]
        == [getattr(v.aval, "shape", None) for v in other]
        for one, other in pairs
    )


def register_primitive(primitive: Primitive, kind: Kind) -> None:
    """Says what a primitive of another library is."""
    _known[primitive] = kind


def kind_of_primitive(primitive: Primitive) -> Kind:
    """Returns the kinds of a primitive, whatever its parameters are."""
    if primitive not in _known:
        named = _BY_NAME.get(primitive.name, Kind.OPAQUE)
        own = bool(named) and _jax.is_own_primitive(primitive)
        _known[primitive] = named if own else Kind.OPAQUE
    return _known[primitive]
