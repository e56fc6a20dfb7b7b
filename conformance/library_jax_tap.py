"""jax-tap: `jaxtap.record` with a tap on the primitive of the layer.

It reads values alone: gradients are out of its scope. In a program that computes a gradient, the
tap takes the first matrix product of the path, which is the forward one.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jaxtap

from conformance import operations
from conformance.framework import Broken
from conformance.library import Library
from conformance.problem import Case, Found


class JaxTap(Library):
    name = "jax-tap"
    packages = ("jax-tap", "jax")
    modules = ("jaxtap",)

    def missing(self, case: Case, what: str) -> bool:
        return what == "gradient" or operations.missing(case)

    def value(self, case: Case) -> Found:
        program = operations.program(case)
        if program.ran:
            program.step(*program.args, **program.kwargs)
        primitive = "absent" if case.refused else operations.PRIMITIVE
        tapped, recorder = jaxtap.record(program.step, taps=[jaxtap.on(primitive, output=0)])
        if program.between:
            with contextlib.suppress(Broken):
                tapped(*program.args, **program.kwargs)
            program.between()
            jax.effects_barrier()
            recorder.events.clear()
        out = tapped(*program.args, **program.kwargs)
        jax.effects_barrier()
        events = [e for e in recorder.events if operations.PRIMITIVE in e.path]
        if operations.has_gradient(case):
            events = [e for e in events if e.path.endswith(f"{operations.PRIMITIVE}[0]")]
        arrays: list[Any] = [event.value for event in events]
        loss = out[0] if isinstance(out, tuple) else out
        changed = "no error" if case.refused else ""
        return Found(loss, operations.by_layer(case, arrays), changed)


LIBRARY = JaxTap()
