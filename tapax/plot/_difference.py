"""`difference`: draw the errors between two captures by depth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from tapax._results import Difference, SiteDifference
from tapax._results.comparison import Tolerance
from tapax._sites import wrong_type
from tapax.plot._figures import _explain_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = {"value": "Values", "grad": "Gradients"}
_ROW, _TALLEST = 0.24, 12.0
"""The height of a row, and the largest height of all rows, in inches."""


def difference(difference: Difference) -> Figure:
    """Draw the errors between two captures by depth: a row for each site, from the input down.

    The error of a site is the largest error of its elements, in units in the last place of the
    coarser dtype: see `tapax.diff`. A site in a loop has a row for each iteration. Red marks errors
    beyond the tolerance; a dashed line shows the tolerance, if it is in these units. A mark at the
    left edge shows that two arrays are equal. A mark at the right edge shows that they cannot be
    compared, because their shapes differ or one capture lacks the array.

    Args:
        difference: The `Difference` that `tapax.diff` returns.

    Returns:
        A `matplotlib.figure.Figure`: values on the left, gradients on the right.

    Raises:
        TypeError: If `difference` is not a `Difference`.
        ModuleNotFoundError: If matplotlib is not installed.

    Example:
        >>> import numpy as np, tapax
        >>> a = {"up": np.float32([1, 2]), "down": np.float32([0.5])}
        >>> b = {"up": np.float32([1, 2]), "down": np.float32([0.25])}
        >>> figure = tapax.plot.difference(tapax.diff(a, b))
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['up', 'down']
    """
    if not isinstance(difference, Difference):
        raise wrong_type(
            "tapax.plot.difference takes the result of tapax.diff, but was given", difference
        )
    with _explain_matplotlib():
        import tapax.plot._style as style
    found = {"value": difference.values, "grad": difference.grads}
    shown = {kind: dict(_rows(each.values())) for kind, each in found.items() if each}
    rows = list(dict.fromkeys(row for points in shown.values() for row in points))
    height = min(_ROW, _TALLEST / len(rows))
    figure = style.new_figure(3.0 + 3.5 * len(shown), 1.4 + height * max(len(rows), 3))
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    used: set[str] = set()
    for axis, (kind, points) in zip(axes, shown.items(), strict=True):
        style.dress_axes(axis, _PANELS[kind])
        used |= _draw_points(axis, kind, rows, points, difference.tolerance)
        axis.set_xlabel("largest error, in units in the last place", **style.LABEL)
        axis.tick_params(axis="y", length=0)
    style.label_rows(axes[0], rows, height)
    axes[0].set_ylim(len(rows) - 0.4, -0.7)
    style.draw_legend(figure, used)
    figure.supxlabel(f"Tolerance: {difference.tolerance}. Beyond it: red.", **style.LABEL)
    return figure


def _rows(found: Iterable[SiteDifference]) -> Iterator[tuple[str, tuple[float, bool]]]:
    """Yield each row with its error, and whether the error exceeds the tolerance."""
    for each in found:
        if not each.ulps_by_iteration.size:  # a loop without iterations
            yield each.name, (0.0, False)
        for place, ulps in np.ndenumerate(each.ulps_by_iteration):
            row = f"{each.name}[{','.join(map(str, place))}]" if place else each.name
            differs = bool(each.differs_by_iteration[place])
            yield row, (np.inf if each.reason else float(ulps), differs)


def _draw_points(
    axis: Axes,
    kind: str,
    rows: list[str],
    points: Mapping[str, tuple[float, bool]],
    tolerance: Tolerance,
) -> set[str]:
    from tapax.plot import _style as style

    places = [i for i, row in enumerate(rows) if row in points]
    errors = np.array([points[rows[i]][0] for i in places])
    differs = np.array([points[rows[i]][1] for i in places])
    limit = 0.0 if tolerance.rtol or tolerance.atol else tolerance.ulps
    style.set_limits(axis, "x", np.append(errors, limit), log=True)
    if limit:
        axis.axvline(limit, color=style.MUTED, linewidth=1.0, linestyle="--", zorder=2)
    seen = np.where([style.mark_of(x, log=True) is None for x in errors], errors, np.nan)
    size = 5.5 if len(rows) <= 60 else 3.5
    for beyond, colour in ((False, style.PLAIN), (True, style.BAD)):
        label = f"{kind} {'beyond' if beyond else 'within'} the tolerance"
        xs = np.where(differs == beyond, seen, np.nan)
        axis.plot(xs, places, "o", color=colour, markersize=size, label=label, zorder=3)
    return style.mark_beyond_axis(axis, "x", True, places, errors)
