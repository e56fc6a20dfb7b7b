"""The plot of a log: numbers over training, values next to gradients, and histograms below."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm, Normalize
from matplotlib.figure import SubFigure
from matplotlib.patheffects import withStroke

import tapax.plot._style as style
from tapax.monitoring._records import AlertEvent, Histogram
from tapax.plot._series import Number, Statistic, is_on_log_axis

LINES, COLUMNS = 10, 400
"""The largest number of layers to draw as lines, and of columns in a heat map."""
LAYERS, RIDGES = 4, 16
"""The largest number of layers, and of records, whose histograms to draw."""
ALERTS = 8

NumbersByRow = Mapping[str, Mapping[int, Number]]


def draw(
    found: Mapping[Statistic, NumbersByRow],
    shown: Sequence[Statistic],
    alerts: Sequence[AlertEvent],
    note: str,
) -> style.Plot:
    """Draw the statistics in `shown`."""
    order = {row: i for i, row in enumerate(dict.fromkeys(r for s in found.values() for r in s))}
    bands: list[tuple[float, Any]] = []
    used: set[str] = set()
    ridged = [s for s in shown if _has_histograms(found[s])]
    for stat in dict.fromkeys(stat for kind, stat in shown if (kind, stat) not in ridged):
        panels = [(s, found[s]) for s in shown if s[1] == stat and s not in ridged]
        rows = sorted({row for _, series in panels for row in series}, key=order.__getitem__)
        height = 2.6 if len(rows) <= LINES else min(1.0 + 0.2 * len(rows), 7.0)
        bands.append((height, (_scales, panels, rows)))
    bands += [(2.9, (_ridges, stat, found[stat])) for stat in ridged]
    key = _key(alerts)
    figure = style.new_figure(10.0, sum(height for height, _ in bands) + 0.35 + 0.17 * len(key))
    parts = figure.subfigures(len(bands), 1, squeeze=False, height_ratios=[h for h, _ in bands])
    for part, (height, (drawn, *what)) in zip(parts[:, 0], bands, strict=True):
        part.set_facecolor(style.PAPER)
        used |= drawn(part, *what) if drawn is _ridges else drawn(part, *what, alerts, height)
    style.draw_legend(figure, used)
    lines = [*key, *([note] if note else [])]
    if lines:
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", parse_math=False, **style.LABEL)
    return figure


def _has_histograms(series: NumbersByRow) -> bool:
    return any(isinstance(n, Histogram) for by_step in series.values() for n in by_step.values())


def _scales(
    part: SubFigure,
    panels: Sequence[tuple[Statistic, NumbersByRow]],
    rows: list[str],
    alerts: Sequence[AlertEvent],
    height: float,
) -> set[str]:
    """Draw one statistic: of values on the left, of gradients on the right."""
    axes = part.subplots(1, len(panels), squeeze=False)[0]
    used: set[str] = set()
    for axis, ((kind, stat), series) in zip(axes, panels, strict=True):
        title, pad = style.title_of(kind, stat), 14.0 if alerts else 6.0
        style.dress_axes(axis, title, "step", style.name_of(stat), pad=pad)
        steps = sorted({step for by_step in series.values() for step in by_step})
        grid = np.full((len(rows), len(steps)), np.nan)
        there = np.zeros(grid.shape, bool)
        column = {step: i for i, step in enumerate(steps)}
        for i, row in enumerate(rows):
            for step, number in series.get(row, {}).items():
                grid[i, column[step]], there[i, column[step]] = number, True
        log = is_on_log_axis(stat, grid[there])
        if len(rows) <= LINES:
            used |= _lines(axis, np.array(steps), grid, there, log, rows)
        else:
            used |= _heat(part, axis, np.array(steps), grid, there, log)
        _mark_alerts(axis, alerts, cased=len(rows) > LINES)
    if len(rows) > LINES:
        kept = style.label_rows(axes[0], rows, (height - 0.8) / len(rows), 26)
        for axis in axes[1:]:
            axis.set_yticks(kept, [""] * len(kept))
        for axis in axes:
            axis.tick_params(axis="y", length=0)
    elif len(rows) > 1:
        _colour_key(part, axes, rows)
    return used


def _lines(
    axis: Axes, steps: np.ndarray, grid: np.ndarray, there: np.ndarray, log: bool, rows: list[str]
) -> set[str]:
    used: set[str] = set()
    style.set_limits(axis, "y", grid[there], log)
    colours = style.by_depth(len(rows))
    for i, row in enumerate(rows):
        xs, ys = steps[there[i]], grid[i, there[i]]
        seen = np.where([style.mark_of(y, log) is None for y in ys], ys, np.nan)
        dots = "o" if len(xs) <= 40 else ""
        axis.plot(xs, seen, dots + "-", color=colours(i), lw=1.4, ms=2.5, label=row, zorder=3)
        used |= style.mark_beyond_axis(axis, "y", log, xs, ys)
    return used


def _colour_key(part: SubFigure, axes: Any, rows: list[str]) -> None:
    """Draw a colour bar that names the layers."""
    common, labels = style.shorten_names(rows)
    norm = BoundaryNorm(np.arange(len(rows) + 1) - 0.5, len(rows))
    mapped = ScalarMappable(norm, style.by_depth(len(rows)))
    bar = part.colorbar(mapped, ax=list(axes), ticks=range(len(rows)), aspect=30, pad=0.015)
    bar.ax.set_yticks(range(len(rows)), labels, parse_math=False)
    _dress_bar(bar, f"{common}/…" if common else "")
    bar.ax.invert_yaxis()


def _dress_bar(bar: Any, title: str) -> None:
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", length=0, labelsize=style.SMALL, labelcolor=style.INK)
    bar.ax.tick_params(which="minor", labelcolor=style.MUTED, labelsize=style.SMALL - 1)
    bar.set_label(title, **style.LABEL, parse_math=False)


def _heat(
    part: SubFigure, axis: Axes, steps: np.ndarray, grid: np.ndarray, there: np.ndarray, log: bool
) -> set[str]:
    """Draw a heat map with a row for each layer; zero, NaN and Inf have the colours of marks."""
    starts = _starts(len(steps))
    edges = _edges(steps)[[*starts, len(steps)]]
    rows = np.arange(len(grid) + 1) - 0.5
    usual = there & np.isfinite(grid) & ((grid > 0) | (not log))
    cells = np.maximum.reduceat(np.where(usual, grid, -np.inf), starts, 1)
    shown = np.ma.masked_where(np.isneginf(cells), cells)
    low, high = (shown.min(), shown.max()) if shown.count() else (0.1, 1.0)
    norm = (LogNorm if log else Normalize)(low, high if high > low else low + (abs(low) or 1.0))
    looks: dict[str, Any] = {"rasterized": True, "zorder": 1}
    mesh = axis.pcolormesh(edges, rows, shown, cmap=style.HEAT, norm=norm, **looks)
    used: set[str] = set()
    wrong = {
        "all zero": (there & (grid <= 0) & log, style.GUIDE),
        "NaN or Inf": (there & ~np.isfinite(grid), style.BAD),
    }
    for name, (where, colour) in wrong.items():
        where = np.logical_or.reduceat(where, starts, 1)
        if name == "all zero":
            where &= np.ma.getmaskarray(shown)
        if where.any():
            used.add(name)
            cells = np.ma.masked_where(~where, np.ones(where.shape))
            axis.pcolormesh(edges, rows, cells, cmap=ListedColormap([colour]), label=name, **looks)
    axis.set(ylim=(rows[-1], rows[0]), ylabel="")
    axis.grid(False)
    bar = part.colorbar(mesh, ax=axis, aspect=30, pad=0.015)
    _dress_bar(bar, "")
    if log:
        style.label_decades(bar.ax.yaxis, *bar.ax.get_ylim())
    return used


def _starts(count: int) -> np.ndarray:
    """Return the first record of each column of a heat map, which shows the largest number."""
    return np.unique(np.linspace(0, count, min(count, COLUMNS), endpoint=False).astype(int))


def _edges(steps: np.ndarray) -> np.ndarray:
    """Return the edges between steps, half-way from one step to the next."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middle = (steps[1:] + steps[:-1]) / 2
    return np.array([steps[0] * 2 - middle[0], *middle, steps[-1] * 2 - middle[-1]])


def _ridges(part: SubFigure, stat: Statistic, series: NumbersByRow) -> set[str]:
    """Draw the histograms of a few layers, with the first record on top."""
    picked = _spread(list(series), LAYERS)
    common, labels = style.shorten_names(list(series), 24)
    axes = part.subplots(1, len(picked), squeeze=False)[0]
    used: set[str] = set()
    for axis, row in zip(axes, picked, strict=True):
        style.dress_axes(axis, labels[list(series).index(row)], strong=False)
        steps = _spread(list(series[row]), RIDGES)
        height = 0.8 if len(steps) <= 3 else 1.6
        colours = style.by_depth(len(steps))
        drawn: list[Any] = [series[row][step] for step in steps]
        for i, (step, histogram) in enumerate(zip(steps, drawn, strict=True)):
            used |= style.add_ridge(axis, histogram, i, height, colours(i), str(step))
        axis.set_xlabel(style.set_ridge_axis(axis, drawn), **style.LABEL)
        kept = style.pick_labelled_rows([""] * len(steps), max(1.0, len(steps) / 9))
        axis.set_yticks(kept, [f"{steps[i]:,}" for i in kept])
        axis.set_ylim(len(steps) - 0.4, -height)
        axis.tick_params(axis="y", length=0)
    axes[0].set_ylabel("step", **style.LABEL)
    left = f"  ({len(picked)} of {len(series)} layers)" if len(picked) < len(series) else ""
    where = f" of {common}/…" if common else ""
    title = style.title_of(*stat) + where + left
    part.suptitle(
        title, x=0.01, ha="left", size=style.TITLE, color=style.INK, weight="bold", parse_math=False
    )
    return used


def _spread(items: list[Any], most: int) -> list[Any]:
    """Pick at most `most` items, evenly spaced, including the first and the last."""
    places = np.unique(np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int))
    return [items[i] for i in places]


_OF = ("site", "stat")


def _key(alerts: Sequence[AlertEvent]) -> list[str]:
    """Write the lines that explain the numbered alerts; all alerts of a step share a number."""
    lines = []
    by_step: dict[int, list[AlertEvent]] = {}
    for alert in alerts:
        by_step.setdefault(alert.step, []).append(alert)
    for number, (step, found) in enumerate(sorted(by_step.items()), 1):
        sites, stats = (list(dict.fromkeys(getattr(a, of) for a in found)) for of in _OF)
        more = f" and {len(sites) - 3} more" if len(sites) > 3 else ""
        named = ", ".join(style.elide(site, 36) for site in sites[:3])
        lines.append(f"{number}  step {step:,}: {named}{more} ({', '.join(stats)})")
    if len(lines) > ALERTS:
        lines[ALERTS - 1 :] = [f"… and alerts at {len(lines) - ALERTS + 1} more steps"]
    return lines


def _mark_alerts(axis: Axes, alerts: Sequence[AlertEvent], cased: bool) -> None:
    """Draw a numbered line at each step with an alert; lines close to each other share a label.

    In a heat map, a line has a white casing, because it may cross a red field.
    """
    steps = sorted({alert.step for alert in alerts})
    casing = [withStroke(linewidth=3, foreground=style.PAPER)] if cased else []
    looks: dict[str, Any] = {"color": style.BAD, "path_effects": casing, "zorder": 8}
    for number, step in enumerate(steps, 1):
        axis.axvline(step, lw=1.0, ls=(0, (4, 2)), label=f"alert {number}", **looks)
    low, high = axis.get_xlim()
    groups: list[list[int]] = []
    for number, step in enumerate(steps, 1):
        if groups and step - steps[groups[-1][-1] - 1] < 0.04 * (high - low):
            groups[-1].append(number)
        else:
            groups.append([number])
    for group in groups:
        place = (steps[group[0] - 1] + steps[group[-1] - 1]) / 2
        text = str(group[0]) if len(group) == 1 else f"{group[0]}–{group[-1]}"
        axis.annotate(
            text,
            (place, 1.0),
            (0, 2),
            xycoords=axis.get_xaxis_transform(),
            textcoords="offset points",
            ha="center",
            va="bottom",
            size=style.SMALL,
            color=style.BAD,
            weight="bold",
        )
