"""Functions with separate implementations for GPUs and other devices."""

import functools
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tapax._jax.rules import register_dce
from tapax._jax.types import Value

ArraysFunction = Callable[..., Sequence[Value]]


def for_gpu(
    name: str,
    plain: ArraysFunction,
    faster: ArraysFunction,
    *,
    on_cpu: ArraysFunction | None = None,
    on_one_device: bool = False,
) -> ArraysFunction:
    """Make a function that JAX compiles as `faster` on an NVIDIA GPU and as `plain` elsewhere.

    If `on_cpu` is given, JAX compiles it on a CPU. All take arrays and static keyword arguments,
    and return equal arrays. Derivatives and `vmap` use `plain`. Set `on_one_device` if XLA cannot
    partition `faster`: JAX then compiles `plain` in programs for several devices.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def abstract_eval(*avals: Any, **options: Any) -> list[Any]:
        return jax.make_jaxpr(partial(plain, **options))(*avals).out_avals

    def lower_for_gpu(ctx: Any, *operands: Any, **options: Any) -> Any:
        devices = getattr(ctx.module_context.axis_context, "num_devices", None)
        chosen = plain if on_one_device and devices != 1 else faster
        return mlir.lower_fun(chosen, multiple_results=True)(ctx, *operands, **options)

    def batch(arrays: Sequence[Value], dims: Sequence[int | None], **options: Any) -> Any:
        outs = jax.vmap(partial(plain, **options), in_axes=tuple(dims))(*arrays)
        return outs, [0] * len(outs)

    def differentiate(primals: Any, tangents: Any, **options: Any) -> Any:
        made = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(partial(plain, **options), tuple(primals), tuple(made))

    primitive.def_impl(plain)
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=True))
    mlir.register_lowering(primitive, lower_for_gpu, platform="cuda")
    if on_cpu is not None:
        lower_for_cpu = mlir.lower_fun(on_cpu, multiple_results=True)
        mlir.register_lowering(primitive, lower_for_cpu, platform="cpu")
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = differentiate
    return primitive.bind


_together_p = Primitive("together")
_together_p.multiple_results = True


def together_on_gpu(arrays: Sequence[Value]) -> list[Any]:
    """Return the arrays; on an NVIDIA GPU, every use of one of them waits for all of them."""
    return _together_p.bind(*arrays)


def _batch_together(arrays: Sequence[Value], dims: Sequence[int | None]) -> Any:
    return together_on_gpu(arrays), dims


def _differentiate_together(primals: Sequence[Value], tangents: Sequence[Any]) -> Any:
    return together_on_gpu(primals), tangents


def _transpose_together(cotangents: Sequence[Any], *operands: Any) -> list[Any]:
    both = zip(cotangents, operands, strict=True)
    return [ct if ad.is_undefined_primal(x) else None for ct, x in both]


def _drop_unused(used: Sequence[bool], *rest: Any) -> Any:
    """Keep the arrays that are used, without waiting for those that are not."""
    if not any(used):
        return [False] * len(used), None
    eqn = rest[-1]  # some versions of JAX pass more before it
    keep = functools.partial(itertools.compress, selectors=used)
    return list(used), eqn.replace(invars=[*keep(eqn.invars)], outvars=[*keep(eqn.outvars)])


_together_p.def_impl(lambda *arrays: list(arrays))
_together_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(_together_p, lambda ctx, *operands: operands)
mlir.register_lowering(
    _together_p,
    mlir.lower_fun(lambda *arrays: lax.optimization_barrier(arrays), multiple_results=True),
    platform="cuda",
)
batching.primitive_batchers[_together_p] = _batch_together
ad.primitive_jvps[_together_p] = _differentiate_together
ad.primitive_transposes[_together_p] = _transpose_together
register_dce(_together_p, _drop_unused)
