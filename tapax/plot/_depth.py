"""The plot of a capture: a row for each site, from the input down, a panel for each statistic."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

import tapax.plot._style as style
from tapax._sites.roles import Place
from tapax.plot._series import Number, Statistic, has_histograms, is_on_log_axis

ROW, TALLEST = 0.24, 12.0
"""The height of a row, and the largest height of all rows, in inches."""


def draw(
    found: Mapping[Statistic, Mapping[str, Number]],
    shown: Sequence[Statistic],
    places: Mapping[str, Place],
    note: str,
) -> style.Plot:
    """Draw the statistics in `shown`; `places` contains all rows of the capture."""
    order = dict.fromkeys(row for numbers in found.values() for row in numbers)
    rows = [row for row in order if any(row in found[stat] for stat in shown)]
    row = min(ROW, TALLEST / len(rows))
    width = 3.0 + 3.5 * len(shown) if len(shown) < 3 else 2.8 + 2.4 * len(shown)
    figure = style.new_figure(width, 1.4 + row * max(len(rows), 3))
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    parts = dict.fromkeys(places[row].role for row in rows if places[row].is_part)
    colours = style.pick_role_colours(list(parts), places)
    used, ridged = set[str](), False
    for axis, (kind, stat) in zip(axes, shown, strict=True):
        numbers = found[kind, stat]
        style.dress_axes(axis, style.title_of(kind, stat))
        if has_histograms(numbers):
            used |= _ridges(axis, rows, numbers, places, colours)
            ridged = True
        else:
            used |= _dots(axis, (kind, stat), rows, numbers, places, colours)
        axis.tick_params(axis="y", length=0)
    style.label_rows(axes[0], rows, row)
    axes[0].set_ylim(len(rows) - 0.4, -1.4 if ridged else -0.7)  # room for the first ridge
    style.draw_legend(figure, used)
    if note:
        figure.supxlabel(note, **style.LABEL)
    return figure


def _colour_of(place: Place, colours: style.RoleColours) -> str:
    """Return the colour of a role, or the plain colour for whole layers and other sites."""
    return colours[place.role][0] if place.is_part and place.role in colours else style.PLAIN


def _dots(
    axis: Axes,
    statistic: Statistic,
    rows: Sequence[str],
    numbers: Mapping[str, Any],
    places: Mapping[str, Place],
    colours: style.RoleColours,
) -> set[str]:
    kind, stat = statistic
    numbered = [i for i, row in enumerate(rows) if row in numbers]
    xs = np.array([numbers[rows[i]] for i in numbered])
    log = is_on_log_axis(stat, xs)
    style.set_limits(axis, "x", xs, log)
    seen = np.where([style.mark_of(x, log) is None for x in xs], xs, np.nan)
    size = 5.5 if len(rows) <= 60 else 3.5
    dots = {"markersize": size, "color": style.PLAIN, "zorder": 3, "label": f"{kind} {stat}"}
    axis.plot(seen, numbered, "o", **dots)
    # A line joins the same part of successive layers, which are the rows to compare.
    groups: dict[tuple[str, str], dict[int, float]] = {}
    for i, x in zip(numbered, seen, strict=True):
        place = places[rows[i]]
        if place.depth:
            groups.setdefault((place.stack, place.role), {})[i] = x
    for (_, role), at in groups.items():
        colour = _colour_of(places[rows[min(at)]], colours)
        line = {"color": style.tint(colour, 0.35), "linewidth": 0.9, "label": role}
        axis.plot(list(at.values()), list(at), zorder=2, **line)
        axis.scatter(list(at.values()), list(at), size**2, color=colour, zorder=4)
    axis.set_xlabel(style.name_of(stat), **style.LABEL)
    return style.mark_beyond_axis(axis, "x", log, numbered, xs)


def _ridges(
    axis: Axes,
    rows: Sequence[str],
    numbers: Mapping[str, Any],
    places: Mapping[str, Place],
    colours: style.RoleColours,
) -> set[str]:
    height = 0.8 if len(rows) <= 4 else 1.5
    used: set[str] = set()
    for i, row in enumerate(rows):
        if row in numbers:
            colour = _colour_of(places[row], colours)
            used |= style.add_ridge(axis, numbers[row], i, height, colour, row)
    along = style.set_ridge_axis(axis, numbers.values())
    axis.set_xlabel(along, **style.LABEL)
    return used
