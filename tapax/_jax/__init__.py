"""The only package that depends on the version of JAX or imports private names from it.

The rest of tapax uses public names of JAX and the functions below. These functions detect what the
installed JAX can do and never compare version numbers, so a later release has a fair chance to
work unchanged.
"""

from jax._src.sharding_impls import UNSPECIFIED  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core import Literal

from tapax._jax.callbacks import call_host
from tapax._jax.emission import emit_equation, jit_once
from tapax._jax.equations import (
    bind_equation,
    implement_equation,
    in_context,
    lines_of,
    map_results,
    names_of,
    no_names,
    passes_of,
    rename_scopes,
    transforms_of,
)
from tapax._jax.gradients import intercept_vjp
from tapax._jax.jaxprs import (
    as_function,
    call_body,
    called_hi_primitive,
    closed,
    dce,
    hidden_body,
    is_reference,
    jaxpr_consts,
    jaxpr_inputs,
    open_jaxpr,
    operation,
    operation_name,
    remat_options,
    scan_split,
    traced_for,
    with_open_jaxpr,
    with_traced_for,
)
from tapax._jax.jitted import jit_options
from tapax._jax.kernels import for_gpu, together_on_gpu
from tapax._jax.primitives import is_jax_primitive
from tapax._jax.processes import gather, local_elements, spans_processes
from tapax._jax.pytrees import Static, map_leaves
from tapax._jax.rules import (
    Effect,
    allow_effect,
    cache_weakly,
    is_splitting_while,
    register_jet,
    register_partial_eval,
    register_partial_eval_custom,
    register_remat,
    register_rules,
    unmapped,
    wrap_batcher,
    wrap_partial_eval,
    wrap_partial_eval_custom,
)
from tapax._jax.tracing import (
    intercept_bind,
    is_traced_here,
    known_loops,
    trace_context,
    trace_state_clean,
)
from tapax._jax.types import (
    SEQUENCES,
    AbstractValue,
    Args,
    ArrayLike,
    Atom,
    Equation,
    Function,
    Jaxpr,
    Kwargs,
    OpenJaxpr,
    Primitive,
    PyTree,
    Value,
    Var,
    device_nbytes,
    is_on_host,
    key_generator,
    like,
    literal_value,
    on_mesh,
    shard_count,
    spread,
    stacked,
    unstacked,
    varying_axes,
    whole,
    with_axes_first,
    with_spec,
    with_varying,
    zeros,
)
