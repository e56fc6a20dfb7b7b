"""Registration and wrapping of JAX's rules: effects, derivatives, remat, batching and others."""

import sys
from collections.abc import Callable
from typing import Any

import jax
from jax._src import effects as _effects
from jax._src import util as _util
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import remat as _remat
from jax.experimental import jet as _jet
from jax.extend.core import Primitive, mapped_aval
from jax.interpreters import ad, batching, mlir

from tapax._jax.types import Function, Value


def register_rules(
    primitive: Primitive, lowering: Function, batch: Function, jvp: Function, transpose: Function
) -> None:
    """Register how JAX compiles, batches, differentiates and transposes a primitive."""
    mlir.register_lowering(primitive, lowering)
    batching.fancy_primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose


def register_partial_eval_custom(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register the rule by which remat splits `primitive` into a known and an unknown part."""
    _partial_eval.partial_eval_jaxpr_custom_rules[primitive] = rule


def register_dce(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register the rule by which JAX removes the results of `primitive` that nobody uses."""
    _partial_eval.dce_rules[primitive] = rule


def wrap_partial_eval_custom(
    primitive: Primitive, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace the rule by which remat splits a primitive with `wrap(rule)`."""
    rules = _partial_eval.partial_eval_jaxpr_custom_rules
    rules[primitive] = wrap(rules[primitive])


def wrap_partial_eval(primitive: Primitive, transform: Callable[[Any], Any]) -> None:
    """Apply `transform` to the parameters of an equation that JAX re-runs after a partial run.

    JAX linearizes a while loop that way: it runs the known part first, and later the whole loop
    together with the tangents.
    """
    rule = _partial_eval.custom_partial_eval_rules[primitive]

    def partial_eval(trace: Any, *tracers: Any, **params: Any) -> Any:
        kept = len(trace.effect_handles)
        outs = rule(trace, *tracers, **params)
        unknown: list[Any] = [t for t in outs if isinstance(t, _partial_eval.JaxprTracer)]
        # While JAX hoists invariant equations out of a scan, marks stay inside.
        if unknown and len(unknown) < len(outs) and not _within(_HOISTING):
            recipe = unknown[0].recipe
            changed = {k: transform(v) for k, v in recipe.params.items()}
            recipe = recipe._replace(params=changed, effects=frozenset())
            for tracer in unknown:
                tracer.recipe = recipe
            del trace.effect_handles[kept:]
        return outs

    _partial_eval.custom_partial_eval_rules[primitive] = partial_eval


def register_remat(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register the rule of `primitive` for the remat that the option `jax_remat3` enables.

    `rule(*operands, **params)` returns the results, residuals, and a function that recomputes the
    results from the residuals and the operands. Newer versions of JAX take the residuals
    separately; in older ones the function closes over them.
    """

    def separate(trace: Any, *args: Any, **params: Any) -> Any:
        del trace
        return rule(*args, **params)

    def closed_over(trace: Any, *args: Any, **params: Any) -> Any:
        out, residuals, recompute = separate(trace, *args, **params)
        return out, lambda *args: recompute(residuals, *args)

    takes_residuals = "res" in _remat.RematTrace.process_primitive.__code__.co_varnames
    _remat.rules[primitive] = separate if takes_residuals else closed_over


def register_jet(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register the rule of `primitive` for `jax.experimental.jet`.

    `rule(primals, series, **params)` returns the results and the Taylor coefficients of each from
    the first on, or None for a constant result.
    """

    def with_zeros(primals: Any, series: Any, **params: Any) -> Any:
        out, terms = rule(primals, series, **params)
        if not primitive.multiple_results:
            return out, terms
        return out, [_jet.zero_series if each is None else each for each in terms]

    _jet.jet_rules[primitive] = with_zeros


_HOISTING = frozenset({"_scan_known_hoisting", "_scan_partial_eval_custom"})


def register_partial_eval(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register the rule of `primitive` for JAX's hoisting of invariant equations out of a scan.

    While it hoists, JAX calls `rule(stage, tracers, params)`; `stage()` leaves the equation in the
    loop. Elsewhere JAX evaluates the primitive if its operands are known.
    """

    def partial_eval(trace: Any, *tracers: Any, **params: Any) -> Any:
        def stage() -> Any:
            inside = [trace.instantiate_const(t) for t in tracers]
            return trace.default_process_primitive(primitive, inside, params)

        if all(t.is_known() for t in tracers) and _within(_HOISTING):
            return rule(stage, tracers, params)
        return trace.default_process_primitive(primitive, tracers, params)

    _partial_eval.custom_partial_eval_rules[primitive] = partial_eval


def is_splitting_while() -> bool:
    """Return whether remat is splitting a while loop, which cannot return residuals."""
    return _within(frozenset({"_while_partial_eval_custom"}))


def _within(functions: frozenset[str]) -> bool:
    """Return whether one of these functions of JAX is on the call stack."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in functions:
            return True
        frame = frame.f_back
    return False


def wrap_batcher(
    primitive: Primitive, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace the rule by which `vmap` batches a primitive with `wrap(rule)`."""
    rules = batching.fancy_primitive_batchers
    rules[primitive] = wrap(rules[primitive])


def unmapped(x: Value, dim: int | None) -> Any:
    """Return the type of one example of `x`, which `vmap` maps along the axis `dim`."""
    aval = jax.typeof(x)
    return aval if dim is None else mapped_aval(aval.shape[dim], dim, aval)


Effect = _effects.Effect


def allow_effect(effect: type) -> None:
    """Allow `effect` in every transformation, and have partial evaluation keep it."""
    for allowed in (
        _effects.lowerable_effects,
        _effects.control_flow_allowed_effects,
        _effects.custom_derivatives_allowed_effects,
        _effects.remat_allowed_effects,
        _effects.partial_eval_kept_effects,
    ):
        allowed.add_type(effect)


def cache_weakly(parameter: type) -> None:
    """Have JAX's caches of equations refer to parameters of a class by weak references."""
    _util.weakref_cache_key_types.add(parameter)
