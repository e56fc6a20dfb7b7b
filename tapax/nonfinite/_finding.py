"""`Finding`, which `find_nonfinite` returns, and its printed form."""

import dataclasses
import os
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Range:
    """An operand: its type, its least and largest finite element, and how many are not finite.

    Of complex numbers they are the magnitudes; None if no element is finite.
    """

    shape: tuple[int, ...]
    dtype: Any
    min: float | None
    max: float | None
    nonfinite: int

    def __str__(self) -> str:
        if self.min is None or self.max is None:
            span = "nothing finite"
        else:
            span = f"from {self.min:.6g} to {self.max:.6g}"
        return span + (f", {self.nonfinite} not finite" if self.nonfinite else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Where the first value that is not finite was made.

    `loops` are the loops around it, outermost first, and `iterations` their iterations. `index` is
    that of the first bad element of the result, without the axes that `vmap` maps over: those are
    in `mapped`, of the sizes `examples`; `position` is that in the result as the program has it.
    `device` has an index for each axis of the mesh. `count` elements of the result are bad.
    """

    path: str
    operation: str
    source: str = ""
    phase: str = "forward"
    iterations: tuple[int, ...] = ()
    loops: tuple[str, ...] = ()
    index: tuple[int, ...]
    mapped: tuple[int, ...] = ()
    examples: tuple[int, ...] = ()
    position: tuple[int, ...]
    device: dict[str, int] = dataclasses.field(default_factory=dict)
    kind: str
    operands: tuple[Range, ...] = ()
    count: int
    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        what = {"nan": "a NaN", "inf": "an infinity"}[self.kind]
        if self.operation in ("argument", "result"):
            lines = [f"The first non-finite value is {what} in the {self.operation} {self.path}."]
            if self.operation == "result":
                lines[0] += " It cannot be traced to an operation: compiled otherwise, it is gone."
            return "\n".join([*lines, f"  value      {self._result()}"])
        constant = self.operation == "constant"
        where = ["that is a constant" if constant else f"made by `{self.operation}`"]
        where[0] += f" in {self.path}" if self.path else ""
        if self.source:
            where.append(f"at {_short(self.source)}")
        where.append(f"in the {self.phase} pass")
        where += [f"iteration {i} of {n}" for i, n in zip(self.iterations, self.loops, strict=True)]
        where += [
            f"example {i} of a vmap over {n}"
            for i, n in zip(self.mapped, self.examples, strict=True)
        ]
        if self.device:
            where.append("device " + ", ".join(f"{a}={i}" for a, i in self.device.items()))
        names = [_typed(r.shape, r.dtype) for r in self.operands]
        wide = max(map(len, [*names, _typed(self.shape, self.dtype)]))
        lines = [f"The first non-finite value is {what} {', '.join(where)}."]
        for i, (name, operand) in enumerate(zip(names, self.operands, strict=True)):
            lines.append(f"  operand {i:<2} {name:{wide}}  {operand}")
        lines.append(f"  result     {self._result(wide)}")
        return "\n".join(lines)

    def _result(self, wide: int = 0) -> str:
        size = int(np.prod(self.shape, dtype=np.int64))
        what = {"nan": "NaN", "inf": "infinite"}[self.kind]
        first = list(self.position)
        return (
            f"{_typed(self.shape, self.dtype):{wide}}  {self.count} of {size} "
            f"{'is' if self.count == 1 else 'are'} {what}"
            + (f", first at {first}" if first else "")
        )


def _typed(shape: tuple[int, ...], dtype: Any) -> str:
    return f"{np.dtype(dtype).name}[{','.join(map(str, shape))}]"


def _short(source: str) -> str:
    """A file as seen from where the program runs, if it is below."""
    path = os.path.relpath(source) if os.path.isabs(source) else source
    return source if path.startswith("..") else path
