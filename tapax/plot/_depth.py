"""The plot of a capture: a row for each site, from the input down, a panel for each statistic."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

import tapax.plot._style as style
from tapax.monitoring._records import Histogram
from tapax.plot._series import Number, Statistic, is_on_log_axis

ROW, TALLEST = 0.24, 12.0
"""The height of a row in inches, and of all of them at most."""


def draw(
    found: Mapping[Statistic, Mapping[str, Number]], shown: Sequence[Statistic], note: str
) -> style.Plot:
    """A figure of the statistics that are shown."""
    order = dict.fromkeys(row for numbers in found.values() for row in numbers)
    rows = [row for row in order if any(row in found[stat] for stat in shown)]
    row = min(ROW, TALLEST / len(rows))
    width = 3.0 + 3.5 * len(shown) if len(shown) < 3 else 2.8 + 2.4 * len(shown)
    figure = style.new_figure(width, 1.4 + row * max(len(rows), 3))
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    used, ridged = set[str](), False
    for axis, (kind, stat) in zip(axes, shown, strict=True):
        numbers = found[kind, stat]
        style.dress_axes(axis, style.title_of(kind, stat))
        if any(isinstance(number, Histogram) for number in numbers.values()):
            used |= _ridges(axis, kind, rows, numbers)
            ridged = True
        else:
            used |= _dots(axis, kind, stat, rows, numbers)
        axis.tick_params(axis="y", length=0)
    style.label_rows(axes[0], rows, row)
    axes[0].set_ylim(len(rows) - 0.4, -1.4 if ridged else -0.7)  # room for the first ridge
    style.draw_legend(figure, used)
    if note:
        figure.supxlabel(note, **style.LABEL)
    return figure


def _dots(
    axis: Axes, kind: str, stat: str, rows: list[str], numbers: Mapping[str, Any]
) -> set[str]:
    places = [i for i, row in enumerate(rows) if row in numbers]
    xs = np.array([numbers[rows[i]] for i in places])
    log, colour = is_on_log_axis(stat, xs), style.KINDS[kind]
    style.set_limits(axis, "x", xs, log)
    seen = np.where([style.mark_of(x, log) is None for x in xs], xs, np.nan)
    at = dict(zip(places, seen, strict=True))
    # A line joins the same part of one layer after another, which differs least from it.
    for group in style.group_parts(rows):
        joined = [i for i in group if i in at]
        line = [at[i] for i in joined]
        axis.plot(line, joined, color=style.tint(colour, 0.35), linewidth=0.9, zorder=2)
    size = 5.5 if len(rows) <= 60 else 3.5
    axis.plot(seen, places, "o", color=colour, markersize=size, label=f"{kind} {stat}", zorder=3)
    axis.set_xlabel(style.name_of(stat), **style.LABEL)
    return style.mark_beyond_axis(axis, "x", log, places, xs)


def _ridges(axis: Axes, kind: str, rows: list[str], numbers: Mapping[str, Any]) -> set[str]:
    height = 0.8 if len(rows) <= 4 else 1.5
    used: set[str] = set()
    for i, row in enumerate(rows):
        if row in numbers:
            used |= style.add_ridge(axis, numbers[row], i, height, style.KINDS[kind], row)
    along = style.set_ridge_axis(axis, numbers.values())
    axis.set_xlabel(along, **style.LABEL)
    return used
