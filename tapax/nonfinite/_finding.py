"""`Finding`, the result of `find_nonfinite`, and its printed form."""

import dataclasses
import os
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Range:
    """The type of an operand and the range of its elements, in `Finding.operands`.

    Attributes:
        shape: The shape of the operand.
        dtype: Its dtype.
        min: The smallest finite element, or None if no element is finite. For complex numbers it is
            the smallest magnitude.
        max: The largest finite element, or None if no element is finite. For complex numbers it is
            the largest magnitude.
        nonfinite: The number of elements that are NaN or infinite.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> finding = tapax.find_nonfinite(lambda x: jnp.log(x - 1).sum())(jnp.array([1.0, 4.0]))
        >>> print(finding.operands[0])
        from 0 to 3
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
    """The place in a program where the first value that is not finite was made.

    It prints as a sentence and a table of the operands and the result.

    Attributes:
        path: The module path or the scope of the operation; for an argument, its name; for a
            result, its number.
        operation: The operation that made the value, such as `"log"`; or `"argument"`,
            `"constant"`, or `"result"` for a result that no operation explains.
        source: The line of the user's code, `file:line`.
        phase: The pass, `"forward"` or `"backward"`.
        iterations: The index of the iteration of each loop in `loops`, from 0. The backward pass of
            a scan has the indices of its forward pass.
        loops: The loops around the operation, outermost first, such as `"scan[4]"`.
        index: The index of the first bad element of the result, without the axes of `mapped`.
        mapped: The index of that element along each axis that `vmap` maps over.
        examples: The sizes of the axes of `mapped`.
        position: The index of that element on all axes of the result, including those of `vmap`.
        device: The index of the device along each axis of the mesh, by the name of the axis.
        kind: The kind of the bad elements: `"nan"` if one is NaN, otherwise `"inf"`.
        operands: A `Range` for each operand.
        count: The number of bad elements of the result.
        shape: The shape of the result.
        dtype: The dtype of the result.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> f = jax.vmap(lambda x: jnp.log(x).sum())
        >>> found = tapax.find_nonfinite(f)(jnp.array([[1.0, 2.0], [3.0, -1.0]]))
        >>> found.operation, found.kind, found.phase, found.count
        ('log', 'nan', 'forward', 1)
        >>> found.mapped, found.examples, found.index, found.position
        ((1,), (2,), (1,), (1, 1))
        >>> print(found.operands[0])
        from -1 to 3
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
                sentence += (
                    " No operation explains it: the value is finite if the program is compiled "
                    "differently."
                )
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
        """Return a label, a type and a phrase on the elements, for each operand and the result."""
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
    """Return the path relative to the working directory, if the file is below it."""
    path = os.path.relpath(source) if os.path.isabs(source) else source
    return source if path.startswith("..") else path
