"""torchlens with its JAX backend: `torchlens.trace` of the function that computes the loss.

It records every operation of a function. Its gradients come from `GradOptions`, which computes the
derivative of the loss with respect to a zero added to each operation's result.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torchlens
from torchlens.backends.jax import GradOptions

from conformance import operations
from conformance.framework import Broken
from conformance.library import Library
from conformance.problem import Case, Found


class Torchlens(Library):
    name = "torchlens"
    packages = ("torchlens", "jax")
    modules = ("torchlens",)

    def missing(self, case: Case, what: str) -> bool:
        # It finds gradients of the result, not those that the program computes inside.
        if what == "gradient" and (case.refused or case.kind in ("train_scan", "train_while")):
            return True
        return operations.missing(case)

    def value(self, case: Case) -> Found:
        log = _trace(case)
        if case.refused:
            log["absent"]
            return Found(None, {}, "no error")
        ops = [op for op in log.ops if op.func_name == operations.PRIMITIVE]
        if operations.has_gradient(case):
            ops = [op for op in ops if op.layer_label == ops[0].layer_label]
        arrays = [op.out for op in ops]
        return Found(_loss(log), operations.by_layer(case, arrays))

    def gradient(self, case: Case) -> Found:
        log = _trace(case, gradient=True)
        records = log.intermediate_derived_grads.items()
        records = [record for name, record in records if operations.PRIMITIVE in name]
        if operations.has_gradient(case):
            records = [r for r in records if r.layer_label == records[0].layer_label]
        arrays = [record.grad for record in records]
        return Found(_loss(log), operations.by_layer(case, arrays))


def _loss(log: Any) -> Any:
    return log[log.output_layers[0]].out


def _trace(case: Case, gradient: bool = False) -> Any:
    program = operations.program(case)
    options: Any = {"input_kwargs": program.kwargs} if program.kwargs else {}
    if gradient:
        grads = {"intermediate_grads": True, "max_intermediate_grads": 1000}
        options["grad_options"] = GradOptions(params=program.args[0], **grads)
    if program.ran:
        program.step(*program.args)
    if program.between:
        with contextlib.suppress(Broken):
            torchlens.trace(program.step, program.args, backend="jax", **options)
        program.between()
    return torchlens.trace(program.step, program.args, backend="jax", **options)


LIBRARY = Torchlens()
