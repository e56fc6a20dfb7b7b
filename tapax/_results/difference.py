"""`Difference`: the differences of two captures, site by site."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tapax._lazy import load_later
from tapax._results.comparison import Tolerance
from tapax._results.tabular import Tabular
from tapax._results.taps import SiteDict

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, eq=False)
class SiteDifference:
    """The difference of the value, or the gradient, of one site in two captures `a` and `b`.

    `tapax.diff` defines the scale and the unit in the last place.

    Attributes:
        name: The name of the site in `a`.
        other_name: The name of the site in `b`.
        kind: `value` or `grad`.
        types: The types of the arrays in `a` and in `b`, such as `"float32[4,8]"`.
        differs: Whether the error exceeds the tolerance, or the arrays cannot be compared.
        reason: The reason why the arrays cannot be compared; empty if they can.
        dtype: The name of the coarser of the two dtypes.
        absolute: The largest error of an element.
        relative: The largest error of an element, relative to the scale.
        ulps: The largest error of an element, in units in the last place of `dtype`.
        index: The index of the element with the largest absolute error; None if the arrays are
            equal or cannot be compared.
        iteration: The first iteration that differs, as an index for each loop around the site.
        ulps_by_iteration: The largest error in each iteration, in units in the last place: an array
            with an axis for each loop.
        differs_by_iteration: Whether each iteration differs: an array of booleans with an axis for
            each loop.

    Example:
        >>> import numpy as np, tapax
        >>> a, b = {"h": np.float32([1, 2])}, {"h": np.float32([1, 2.5])}
        >>> difference = tapax.diff(a, b).values["h"]
        >>> difference.is_identical, difference.index, difference.absolute
        (False, (1,), 0.5)
    """

    name: str
    other_name: str
    kind: str
    types: tuple[str, str]
    differs: bool
    reason: str = ""
    dtype: str = ""
    absolute: float = 0.0
    relative: float = 0.0
    ulps: float = 0.0
    index: tuple[int, ...] | None = None
    iteration: tuple[int, ...] = ()
    ulps_by_iteration: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(()))
    differs_by_iteration: np.ndarray = dataclasses.field(default_factory=lambda: np.ones((), bool))

    @property
    def is_identical(self) -> bool:
        """True if the arrays are equal bit for bit, with NaN at the same indices."""
        return not self.reason and not self.absolute

    def __str__(self) -> str:
        what = "gradient" if self.kind == "grad" else "value"
        place = f"{self.name}{_brackets(self.iteration)}"
        if self.is_identical:
            return f"{place}: the {what} is the same"
        if self.reason:
            return f"{place}: the {what}s cannot be compared, because {self.reason}"
        at = "" if not self.index else f" at {list(self.index)}"
        if math.isinf(self.absolute):
            return f"{place}: the {what} is NaN or infinite in one capture alone{at}"
        verb = "differs" if self.differs else "is equal within the tolerance, but differs"
        return (
            f"{place}: the {what} {verb} by {self.absolute:.3g} (relative {self.relative:.2g}, "
            f"{self.ulps:.3g} units in the last place of {self.dtype}){at}"
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Difference(Tabular):
    """The differences of two captures `a` and `b`, site by site, as `tapax.diff` returns them.

    A difference is true if the captures differ, as in `if tapax.diff(a, b): ...`. It prints as a
    table.

    Attributes:
        values: A `SiteDifference` for each value that both captures contain, by its name in `a`, in
            the order of the program.
        grads: A `SiteDifference` for each gradient that both captures contain, likewise.
        first: The site whose value differs first when the program runs; None if all are equal.
        first_grad: The site whose gradient differs first when the backward pass runs, from the last
            site to the first; None if all are equal.
        only_a: The names of the sites that only `a` contains. They do not count as a difference.
        only_b: The names, in `b`, of the sites that only `b` contains. They do not count as a
            difference.
        tolerance: The tolerance of the comparison, with the attributes `rtol`, `atol` and `ulps`.

    Example:
        >>> import numpy as np, tapax
        >>> a = {"up": np.float32([1, 2]), "down": np.float32([0.5])}
        >>> b = {"up": np.float32([1, 2]), "down": np.float32([0.25])}
        >>> difference = tapax.diff(a, b)
        >>> bool(difference), difference.equal, difference.first.name
        (True, False, 'down')
        >>> [name for name, each in difference.values.items() if each.differs]
        ['down']
    """

    values: SiteDict
    grads: SiteDict
    first: SiteDifference | None
    first_grad: SiteDifference | None
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    tolerance: Tolerance

    @property
    def equal(self) -> bool:
        """True if all values and gradients in both captures are equal within the tolerance."""
        return self.first is None and self.first_grad is None

    def __bool__(self) -> bool:
        return not self.equal

    def plot(self) -> Any:
        """Draw the errors of values and gradients by depth, as `tapax.plot.difference` does.

        Returns:
            A matplotlib figure.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.

        Example:
            >>> import numpy as np, tapax
            >>> a, b = {"h": np.float32([1, 2])}, {"h": np.float32([1, 2.5])}
            >>> figure = tapax.diff(a, b).plot()
            >>> len(figure.axes)
            1
        """
        return load_later("tapax", "plot").difference(self)

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        from tapax._results.tables import number_column

        numbers = [number_column(header, "blue") for header in ("error", "relative", "ulps")]
        table = Table("site", "of", "type", *numbers, "at", "differs", title=self._title())
        names = dict.fromkeys([*self.values, *self.grads])
        found = [of[name] for name in names for of in (self.values, self.grads) if name in of]
        for each in found:
            cells = each.kind, _types(each), *_errors(each), _brackets(each.index or ())
            verdict = _verdict(each)
            table.add_row(each.name, *cells, Text(verdict, style="red") if verdict else "")
        table.caption = " ".join(self._remarks())
        return table

    def _title(self) -> str:
        parts = []
        for what, found, first in (
            ("values", self.values, self.first),
            ("gradients", self.grads, self.first_grad),
        ):
            if found:
                different = sum(each.differs for each in found.values())
                where = f", first {_label(first)}" if first is not None else ""
                parts.append(f"{different or 'none'} of {len(found)} {what} differ{where}")
        return "; ".join(parts)

    def _remarks(self) -> Iterator[str]:
        yield f"Tolerance: {self.tolerance}."
        inexact = [each for each in self.values.values() if not each.is_identical]
        if self.first is not None and inexact and inexact[0] is not self.first:
            yield f"The first value that is not the same bit for bit is {inexact[0].name!r}."
        for side, names in (("a", self.only_a), ("b", self.only_b)):
            if names:
                more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                yield f"Only {side} has {', '.join(map(repr, names[:_NAMED]))}{more}."


_NAMED = 5
"""The number of sites that a remark names, of the sites that only one capture contains."""


def _label(found: SiteDifference) -> str:
    return repr(f"{found.name}{_brackets(found.iteration)}")


def _brackets(index: Sequence[int]) -> str:
    return f"[{','.join(map(str, index))}]" if index else ""


def _types(found: SiteDifference) -> str:
    a, b = found.types
    return a if a == b else f"{a or 'none'} | {b or 'none'}"


def _errors(found: SiteDifference) -> list[str]:
    numbers = found.absolute, found.relative, found.ulps
    return ["", "", ""] if found.reason else [f"{x:.3g}" for x in numbers]


def _verdict(found: SiteDifference) -> str:
    if found.reason or not found.differs:
        return found.reason
    way = "back" if found.kind == "grad" else "on"
    return f"from {_brackets(found.iteration)} {way}" if found.iteration else "yes"
