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
        rows = self._rows()
        wide = max(len(typed) for _, typed, _ in rows)
        lines = [f"  {label:<10} {typed:{wide}}  {text}" for label, typed, text in rows]
        return "\n".join([self._sentence(), *lines])

    def _repr_html_(self) -> str:
        from rich.table import Table
        from rich.text import Text

        from tapax._results.html import to_html

        table = Table("", "type", "elements", title=self._sentence())
        for label, typed, text in self._rows():
            is_bad = "finite" in text or "NaN" in text
            table.add_row(label, typed, Text(text, "red") if is_bad else text)
        return to_html(table)

    def _sentence(self) -> str:
        what = {"nan": "a NaN", "inf": "an infinity"}[self.kind]
        if self.operation in ("argument", "result"):
            sentence = f"The first non-finite value is {what} in the {self.operation} {self.path}."
            if self.operation == "result":
                sentence += " It cannot be traced to an operation: compiled otherwise, it is gone."
            return sentence
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
        return f"The first non-finite value is {what} {', '.join(where)}."

    def _rows(self) -> list[tuple[str, str, str]]:
        """The operands and the result: a label, a type, and a word on the elements of each."""
        size = int(np.prod(self.shape, dtype=np.int64))
        count = f"{self.count} of {size} {'is' if self.count == 1 else 'are'} "
        count += {"nan": "NaN", "inf": "infinite"}[self.kind]
        count += f", first at {list(self.position)}" if self.position else ""
        label = "value" if self.operation in ("argument", "result") else "result"
        operands = [] if label == "value" else self.operands
        rows = [(f"operand {i}", _typed(x), str(x)) for i, x in enumerate(operands)]
        return [*rows, (label, _typed(self), count)]


def _typed(x: Range | Finding) -> str:
    return f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"


def _short(source: str) -> str:
    """A file as seen from where the program runs, if it is below."""
    path = os.path.relpath(source) if os.path.isabs(source) else source
    return source if path.startswith("..") else path
