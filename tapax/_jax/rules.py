"""Registering and wrapping JAX's own rules: effects, derivatives, remat, batching, and others."""

import sys
from collections.abc import Callable
from typing import Any

import jax
from jax._src import effects as _effects
from jax._src import util as _util
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import remat as _remat
from jax.extend.core import Primitive, mapped_aval
from jax.interpreters import ad, batching, mlir

from tapax._jax.types import Function, Value


def register_rules(
    primitive: Primitive, lowering: Function, batch: Function, jvp: Function, transpose: Function
) -> None:
    """Registers how a primitive is compiled, batched, differentiated and transposed."""
    mlir.register_lowering(primitive, lowering)
    batching.fancy_primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose


def register_partial_eval_custom(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Registers what happens to `primitive` when remat splits a body in two."""
    _partial_eval.partial_eval_jaxpr_custom_rules[primitive] = rule


def wrap_partial_eval_custom(
    primitive: Primitive, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Puts `wrap(rule)` in the place of the rule by which remat splits a primitive."""
    rules = _partial_eval.partial_eval_jaxpr_custom_rules
    rules[primitive] = wrap(rules[primitive])


def wrap_partial_eval(primitive: Primitive, again: Callable[[Any], Any]) -> None:
    """Lets `again` change the parameters of an equation that JAX evaluates in part, then whole.

    So it does with a while loop that is linearized: what is known of it runs at once, and the whole
    loop once more with the tangents.
    """
    rule = _partial_eval.custom_partial_eval_rules[primitive]

    def partial_eval(trace: Any, *tracers: Any, **params: Any) -> Any:
        kept = len(trace.effect_handles)
        outs = rule(trace, *tracers, **params)
        unknown: list[Any] = [t for t in outs if isinstance(t, _partial_eval.JaxprTracer)]
        # What is taken out of a scan is what does not change in it, and that is not the marks.
        if unknown and len(unknown) < len(outs) and not _within(_HOISTING):
            recipe = unknown[0].recipe
            changed = {k: again(v) for k, v in recipe.params.items()}
            recipe = recipe._replace(params=changed, effects=frozenset())
            for tracer in unknown:
                tracer.recipe = recipe
            del trace.effect_handles[kept:]
        return outs

    _partial_eval.custom_partial_eval_rules[primitive] = partial_eval


def register_remat(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Registers the same for the remat that `jax_remat3` turns on.

    `rule(*operands, **params)` gives the results, residuals, and a function that makes the results
    once more from the residuals and the operands. JAX has come to take the residuals apart; before,
    the function closed over them.
    """

    def apart(trace: Any, *args: Any, **params: Any) -> Any:
        del trace
        return rule(*args, **params)

    def closed_over(trace: Any, *args: Any, **params: Any) -> Any:
        out, residuals, again = apart(trace, *args, **params)
        return out, lambda *args: again(residuals, *args)

    takes_residuals = "res" in _remat.RematTrace.process_primitive.__code__.co_varnames
    _remat.rules[primitive] = apart if takes_residuals else closed_over


_HOISTING = frozenset({"_scan_known_hoisting", "_scan_partial_eval_custom"})


def register_partial_eval(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Registers what happens to `primitive` where JAX takes what does not change out of a scan.

    `rule(stage, tracers, params)` is called there, with a function that leaves an equation in the
    loop; everywhere else a primitive is evaluated if its operands are known.
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
    """Whether remat is splitting a while loop, out of which no residual can be carried."""
    return _within(frozenset({"_while_partial_eval_custom"}))


def _within(functions: frozenset[str]) -> bool:
    """Whether one of these functions of JAX's is running."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in functions:
            return True
        frame = frame.f_back
    return False


def wrap_batcher(
    primitive: Primitive, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Puts `wrap(rule)` in the place of the rule by which `vmap` batches a primitive."""
    rules = batching.fancy_primitive_batchers
    rules[primitive] = wrap(rules[primitive])


def unmapped(x: Value, dim: int | None) -> Any:
    """The type that one example of a mapped value has."""
    aval = jax.typeof(x)
    return aval if dim is None else mapped_aval(aval.shape[dim], dim, aval)


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


def hold_weakly(parameter: type) -> None:
    """Has JAX's caches of equations forget parameters of a class that nobody else holds."""
    _util.weakref_cache_key_types.add(parameter)
