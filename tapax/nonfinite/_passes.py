"""The passes of a search over one program, and the equation that they find: see `_search`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tapax import _jax
from tapax._calling.program import TracedCall
from tapax._calling.source_lines import line_of
from tapax._jax import Atom, Equation, Jaxpr, Value
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._jaxpr.meshes import first_mesh, replicate
from tapax._jaxpr.restage import mesh_axes
from tapax._marks.marked_jaxprs import strip
from tapax._marks.operations import internal_operations
from tapax._marks.scopes import path_in
from tapax._walk.plan import Plan
from tapax.nonfinite import _source_location
from tapax.nonfinite._control_flow import HANDLERS
from tapax.nonfinite._equation_numbers import (
    EquationNumbers,
    NumberedEquation,
    frame_body,
    is_inexact,
)
from tapax.nonfinite._errors import guard_callbacks, guarded_run
from tapax.nonfinite._finding import Finding, Range
from tapax.nonfinite._frames import (
    CLASS,
    DEVICES,
    INF,
    NAN,
    NONE,
    REMOTE,
    UNSURE,
    SearchOptions,
    decode_origin,
)
from tapax.nonfinite._measurement import EquationRun, Measurement, measure
from tapax.nonfinite._origins import OriginWalk
from tapax.nonfinite._phase import ResultFlow, is_differentiated, is_marked

_FAST_COMPILATION = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options that halve the time to compile for a CPU; the program takes up to four times as long."""
_QUICK = 2.0
"""The most seconds of processor time that a program may take for its search to be compiled with
`_FAST_COMPILATION`. Other work on the machine does not count."""


class SearchPasses:
    """The passes over one program, each compiled once."""

    def __init__(self, jaxpr: Jaxpr, masked: bool):
        self.jaxpr, self.masked = jaxpr, masked
        plain = strip(self.jaxpr)

        def flag(*arrays: Value) -> Any:
            with internal_operations():
                outs = _jax.as_function(plain)(*arrays)
                return [jnp.isfinite(x).all() for x in outs if is_inexact(jax.typeof(x))]

        self._flag = jax.jit(flag)
        self._searches: dict[SearchOptions, Any] = {}
        self._was_timed = self._is_quick = False
        self._measurements: dict[Any, Any] = {}

    def __call__(self, *arrays: Value) -> Any:
        try:
            fine = self._is_finite(arrays)
        except Exception:
            found = _GuardedPasses(self.jaxpr).locate(arrays)
            if found is None:
                raise
            return found
        if fine and not self.masked:
            return None
        row = self._row(self.masked, arrays)
        if row is not None and row[0] // CLASS == REMOTE and not self.masked:
            # The value came from another device, where it reached no result.
            row = self._row(True, arrays) or row
        if row is None:
            return None if self.masked else self._report_unexplained(arrays)
        return self._locate(row, arrays)

    def _is_finite(self, arrays: Sequence[Any]) -> bool:
        if not self._was_timed:
            self._flag.lower(*arrays).compile()
        start = time.process_time()
        fine = all(map(bool, jax.device_get(self._flag(*arrays))))
        if not self._was_timed:
            self._was_timed, self._is_quick = True, time.process_time() - start < _QUICK
        return fine

    def _row(self, masked: bool, arrays: Sequence[Any]) -> list[int] | None:
        row = np.asarray(self.second_pass(masked, False, arrays)(*arrays)).tolist()
        if row[0] // CLASS == UNSURE:
            row = np.asarray(self.second_pass(masked, True, arrays)(*arrays)).tolist()
        return None if row[0] >= NONE else row

    def second_pass(self, masked: bool, tells_nan: bool, arrays: Sequence[Any]) -> Any:
        """Make the jitted function that returns the row of the first bad value."""
        devices = set[jax.Device]().union(*(x.devices() for x in arrays if _is_placed(x)))
        divided = len(devices) > 1 or first_mesh(self.jaxpr) is not None
        options = SearchOptions(masked, tells_nan, divided)

        def run(*arrays: Value) -> Any:
            with internal_operations():
                return OriginWalk(self.jaxpr, options, HANDLERS).run(arrays)

        if options not in self._searches:
            compile_fast = self._is_quick and {device.platform for device in devices} <= {"cpu"}
            compiler_options = _FAST_COMPILATION if compile_fast else None
            self._searches[options] = jax.jit(run, compiler_options=compiler_options)
        return self._searches[options]

    def _locate(self, row: list[int], arrays: Sequence[Any]) -> Any:
        kind, number, place = decode_origin(row[0])
        if number is None:  # an argument, by its place among all arrays
            return place
        known, jaxpr = EquationNumbers(), self.jaxpr
        numbers, times, frames, path = [], [], [], []
        *keys, device = row
        constant = kind in (NAN, INF)
        for i in range(0, len(keys), 2):
            kind, number, _ = decode_origin(keys[i])
            assert number is not None
            found = known.find(jaxpr, number, path[-1].scopes if path else ())
            path += found
            closed_over = known.find_constant(jaxpr, number, found)
            if closed_over is not None:
                scopes = path[-1].scopes if path else ()
                return describe_value("constant", path_in(scopes, ""), closed_over)
            numbers.append(number)
            body = frame_body(found[-1].eqn)
            if body is None:
                break
            numbers[-1] = found[-1].number
            frames.append(found[-1].eqn)
            times.append(keys[i + 1])
            jaxpr = body
        run = EquationRun(tuple(numbers), tuple(times))
        return BadEquation(self, run, tuple(path), tuple(frames), device, constant, tuple(arrays))

    def _report_unexplained(self, arrays: Sequence[Any]) -> Finding:
        """Report a bad result that is finite when the program is compiled in another way."""
        outs = jax.jit(_jax.as_function(strip(self.jaxpr)))(*arrays)
        inexact = [i for i, x in enumerate(outs) if is_inexact(jax.typeof(x))]
        at = next((i for i in inexact if not jnp.isfinite(outs[i]).all()), 0)
        return describe_value("result", f"{at}", outs[at])

    def measure(self, target: EquationRun, arrays: Sequence[Any]) -> Any:
        if target not in self._measurements:
            measurement, mesh = Measurement(self.jaxpr, target), first_mesh(self.jaxpr)

            def run(*arrays: Value) -> Any:
                with internal_operations():
                    measures = measurement.run(arrays)
                    return measures if mesh is None else replicate(measures, mesh)

            self._measurements[target] = jax.jit(run)
        return [np.asarray(x) for x in self._measurements[target](*arrays)]


class _GuardedPasses(SearchPasses):
    """The passes over a program that raises, with guards that keep it running."""

    def __init__(self, jaxpr: Jaxpr):
        super().__init__(guard_callbacks(jaxpr), True)

    def locate(self, arrays: Sequence[Any]) -> Any:
        """Locate the first bad value; return None if the program raised before any bad value."""
        row = self._row(True, arrays)
        made = None if row is None else self._locate(row, arrays)
        if isinstance(made, BadEquation) and not kind_of(made.path[-1].eqn) & Kind.CALLBACK:
            return made
        # No equation made a bad value, but an argument may be bad.
        bad = (i for i, x in enumerate(arrays) if is_inexact(jax.typeof(x)) and jnp.isnan(x).any())
        return next(bad, None)

    def _row(self, masked: bool, arrays: Sequence[Any]) -> list[int] | None:
        with guarded_run():
            return super()._row(masked, arrays)

    def measure(self, target: EquationRun, arrays: Sequence[Any]) -> Any:
        with guarded_run():
            return super().measure(target, arrays)


def _is_placed(x: Value) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def describe_value(operation: str, path: str, x: Value) -> Finding:
    """Make the finding for a value that no operation made."""
    _, ((nan, inf, first),) = map(np.asarray, measure([], [x]))
    position = _position(first, jnp.shape(x))
    return Finding(
        path=path,
        operation=operation,
        index=position,
        position=position,
        kind="nan" if nan else "inf",
        count=int(nan + inf),
        shape=tuple(jnp.shape(x)),
        dtype=jax.typeof(x).dtype,
    )


def _position(first: Any, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(first), tuple(shape)))


@dataclasses.dataclass(frozen=True)
class BadEquation:
    """The equation that made the first bad value, and the run of the equation in which it did.

    `path` has the equations around the bad equation, outermost first, and then the equation.
    """

    passes: SearchPasses
    target: EquationRun
    path: tuple[NumberedEquation, ...]
    frames: tuple[Any, ...]
    device: int
    constant: bool
    arrays: tuple[Any, ...]

    def describe(self, trace: Callable[[Plan], TracedCall]) -> Finding:
        """Describe the equation; `trace` traces the function with the marks of a plan."""
        eqn = self.path[-1].eqn
        coordinates = self._coordinates()
        place = tuple(coordinates.values())
        reals, counts = (x[place] for x in self.passes.measure(self.target, self.arrays))
        bad = [i for i, (nan, inf, _) in enumerate(counts) if nan + inf]
        inexact = [i for i, v in enumerate(eqn.outvars) if is_inexact(v.aval)]
        which = (bad or inexact or [0])[0]
        nan, inf, first = counts[which].tolist()
        shape = eqn.outvars[which].aval.shape
        position = _position(first, shape)
        program = self._trace_marked(trace)
        marked = None
        if program is not None:
            own = self.passes.jaxpr
            marked = _source_location.counterpart(own, self.path[-1], program)
        axes = () if marked is None else _source_location.mapped_axes(marked, which)
        loops = [(e, t) for e, t in zip(self.frames, self.target.times, strict=True) if _is_loop(e)]
        return Finding(
            path=path_in(self.path[-1].scopes, ""),
            operation="constant" if self.constant else _jax.operation_name(eqn),
            source=line_of([equation.eqn for equation in self.path]),
            phase=self._phase(program, marked),
            iterations=tuple(_index(e, t) for e, t in loops),
            loops=tuple(_loop_name(e) for e, _ in loops),
            index=tuple(p for i, p in enumerate(position) if i not in axes),
            mapped=tuple(position[a] for a in axes),
            examples=tuple(shape[a] for a in axes),
            position=position,
            device=coordinates,
            kind="nan" if nan else "inf",
            operands=tuple(map(_range, eqn.invars, reals.tolist())),
            count=nan + inf,
            shape=tuple(shape),
            dtype=eqn.outvars[which].aval.dtype,
        )

    def _coordinates(self) -> dict[str, int]:
        """Return the index of the device along each axis of the meshes, outermost first."""
        found: dict[str, int] = {}
        rest = self.device
        for eqn in self.frames:
            if _is_loop(eqn):
                continue
            order = mesh_axes(eqn)
            rest, here = divmod(rest, DEVICES)
            sizes = [eqn.params["mesh"].shape[a] for a in order]
            found.update(zip(order, map(int, np.unravel_index(here, sizes)), strict=True))
        return found

    def _trace_marked(self, trace: Callable[[Plan], TracedCall]) -> Jaxpr | None:
        """Trace the program with every operation marked.

        Return None if the marks would tell nothing: `vmap` did not make the equation, and the
        program has no derivatives.
        """
        is_mapped = "vmap" in _source_location.transformations(self.path)
        if not is_mapped and not is_differentiated(self.passes.jaxpr):
            return None
        plan = dataclasses.replace(Plan.make(None, None), values=_source_location.EveryOperation())
        try:
            return trace(plan).program.jaxpr
        except Exception:
            # On an explicit mesh JAX cannot map every program with so many marks.
            if not jax.sharding.get_abstract_mesh().explicit_axes:
                raise
            return None

    def _phase(self, program: Jaxpr | None, marked: NumberedEquation | None) -> str:
        """Return the pass of the equation, found as `marked` in the marked `program`."""
        made_by = _source_location.transformations(self.path)
        is_transposed = "transpose" in _jax.transforms_of(self.path[-1].eqn)
        if is_transposed or program is None or marked is None:
            return "backward" if "transpose" in made_by else "forward"
        if self.constant and "transpose" not in made_by:
            return "forward"
        flow = ResultFlow(program, marked.eqn)
        if flow.is_value or "transpose" in made_by:
            return "forward" if flow.is_value else "backward"
        is_derived = "jvp" in made_by and not is_marked(marked.eqn, marked.jaxpr)
        if is_derived or flow.is_slope:
            return "forward" if flow.is_result and not is_derived else "backward"
        return "forward"


def _is_loop(eqn: Equation) -> bool:
    return kind_of(eqn) is not Kind.SHARD_MAP


def _loop_name(eqn: Equation) -> str:
    name = eqn.primitive.name
    return f"scan[{eqn.params['length']}]" if name == "scan" else name


def _index(eqn: Equation, time: int) -> int:
    """Return the index of an iteration, which counts down in a scan with `reverse`."""
    return eqn.params["length"] - 1 - time if eqn.params.get("reverse") else time


def _range(atom: Atom, numbers: Sequence[float]) -> Range:
    low, high, bad = numbers
    aval = atom.aval
    known = low <= high
    shape = tuple(getattr(aval, "shape", ()))
    return Range(shape, aval.dtype, low if known else None, high if known else None, int(bad))
