"""The style of plots: colours, and common parts.

All styles are set on the figure itself, without reading or changing the `rcParams` of the user.
"""

import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from tapax._sites.roles import Place
from tapax.monitoring._records import Histogram

ROLES = {
    "#0072b2": "o",
    "#e08600": "s",
    "#009e73": "^",
    "#cc79a7": "D",
    "#3b1f6b": "v",
    "#56b4e9": "P",
    "#5c3a1e": "X",
}
"""Colours of roles with their markers. Colour-blind readers can tell them apart, too."""
RoleColours: TypeAlias = "dict[str, tuple[str, str]]"
"""A colour and a marker for each role."""
STREAM, PLAIN = "#bfc5ca", "#3d4a54"
"""The colours of the results of whole layers, and of sites without a role."""
INK, MUTED, GUIDE, PAPER = "#1c2328", "#5b666e", "#e4e8eb", "#ffffff"
BAD, OUTSIDE = "#d01c1f", "#a9b2b9"
DEPTH, HEAT = "viridis", "viridis"
SMALL, TEXT, TITLE = 7.5, 8.5, 10.0
"""Font sizes in points: of tick labels, of other text, of titles."""
LABEL: dict[str, Any] = {"size": TEXT, "color": MUTED}
"""The style of the text along an axis."""
LINE = 0.15
"""The height of a label, in inches."""

TITLES = {
    "value": "Values",
    "grad": "Gradients",
    "param": "Weights",
    "param_grad": "Gradients of weights",
    "update": "Updates",
}
STATISTICS = {
    "rms": "root mean square",
    "zeros": "fraction of zeros",
    "nonfinite": "number of NaN and Inf",
    "var": "variance",
    "update_ratio": "norm of gradient / norm of value",
}
BEYOND, EMPTY = "share beyond the bins", "nothing in the bins"

MARKS: dict[str, dict[str, Any]] = {
    "NaN": {"marker": "X", "color": BAD, "markersize": 7, "markeredgecolor": PAPER},
    "Inf": {"marker": "^", "color": BAD, "markersize": 7, "markeredgecolor": PAPER},
    "−Inf": {"marker": "v", "color": BAD, "markersize": 7, "markeredgecolor": PAPER},
    "zero": {"marker": "o", "color": PAPER, "markersize": 5, "markeredgecolor": MUTED},
}


HOLLOW: dict[str, Any] = {"color": OUTSIDE, "linewidth": 1.0, "linestyle": ":"}
PATCHES = {"NaN or Inf": BAD, "all zero": GUIDE, BEYOND: OUTSIDE}


class Plot(Figure):
    """A figure unknown to pyplot: nobody has to close it, and a notebook shows it once."""

    def _repr_png_(self) -> bytes:
        # Without this, notebooks show figures only if pyplot was imported.
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=self.dpi)
        return file.getvalue()


def new_figure(width: float, height: float) -> Plot:
    return Plot((width, height), dpi=100, facecolor=PAPER, layout="constrained")


def dress_axes(
    axes: Axes, title: str = "", x: str = "", y: str = "", strong: bool = True, pad: float = 6.0
) -> None:
    """Set the style of axes."""
    axes.set_facecolor(PAPER)
    axes.tick_params(which="major", color=OUTSIDE, labelcolor=INK, labelsize=SMALL)
    axes.tick_params(which="minor", color=OUTSIDE, labelcolor=MUTED, labelsize=SMALL - 1)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set(color=OUTSIDE, linewidth=0.8)
    axes.grid(True, color=GUIDE, linewidth=0.7)
    axes.set_axisbelow(True)
    size, weight = (TITLE, "bold") if strong else (TEXT, "normal")
    looks: dict[str, Any] = {"size": size, "color": INK, "weight": weight, "parse_math": False}
    axes.set_title(title, loc="left", pad=pad, **looks)
    axes.set_xlabel(x, **LABEL)
    axes.set_ylabel(y, **LABEL)


def title_of(kind: str, stat: str) -> str:
    return f"{TITLES[kind]}: {stat}" if kind else stat


def name_of(stat: str) -> str:
    return STATISTICS.get(stat, stat)


def by_depth(count: int) -> ListedColormap:
    """Make a colour for each layer, dark to light, without the lightest, too faint on white."""
    return ListedColormap(colormaps[DEPTH](np.linspace(0, 0.88, max(count, 2))))


def pick_role_colours(roles: Sequence[str], places: Mapping[str, Place]) -> RoleColours:
    """Choose a colour and a marker for each of some roles, as many as there are colours.

    `places` contains all rows of a capture, drawn or not, so that a role has the same colour in
    every plot, unless another role in the plot has that colour already.
    """
    every = dict.fromkeys(p.role for p in places.values() if p.is_part) | dict.fromkeys(roles)
    parents = {role.rpartition("/")[0] for role in every}
    # The blocks of a layer, which have parts themselves, come before its small parts.
    order = sorted(every, key=lambda role: (role.count("/"), role not in parents))
    palette = list(ROLES.items())
    picked: RoleColours = {}
    for i, role in enumerate(order):
        if role in roles and len(picked) < len(palette):
            turn = i % len(palette)
            free = (x for x in (*palette[turn:], *palette) if x not in picked.values())
            picked[role] = next(free)
    return picked


def tint(colour: str, share: float) -> tuple[float, ...]:
    """Mix a colour with the background, to make an opaque tint."""
    mixed = zip(to_rgb(colour), to_rgb(PAPER), strict=True)
    return tuple(share * a + (1 - share) * b for a, b in mixed)


def draw_legend(figure: FigureBase, names: Iterable[str], keys: Sequence[Line2D] = ()) -> None:
    """Draw a legend above a figure: `keys`, and then the marks with some names."""
    names = dict.fromkeys(names)
    handles: list[Any] = list(keys)
    handles += [
        Line2D([], [], linestyle="", label=name, **MARKS[name]) for name in MARKS if name in names
    ]
    handles += [Patch(color=PATCHES[name], label=name) for name in PATCHES if name in names]
    if EMPTY in names:
        handles.append(Line2D([], [], label=EMPTY, **HOLLOW))
    if handles:
        figure.legend(
            handles=handles,
            loc="outside upper right",
            ncols=len(handles),
            frameon=False,
            fontsize=TEXT,
            labelcolor=INK,
        )


def set_limits(axes: Axes, along: str, numbers: np.ndarray, log: bool) -> None:
    """Set the limits of an axis, with room for the marks at its ends."""
    finite = numbers[np.isfinite(numbers) & ((numbers > 0) | (not log))]
    if log:
        axes.set(**{f"{along}scale": "log"})
        exponents = np.log10(finite) if finite.size else np.zeros(1)
        low, high = exponents.min(), exponents.max()
        # The axis must be long enough for two labels.
        pad = max(0.05 * (high - low), 0.15, (0.8 - (high - low)) / 2)
        ends = 10.0 ** max(low - pad, -307), 10.0 ** min(high + pad, 308)
        axes.set(**{f"{along}lim": ends})
        label_decades(getattr(axes, f"{along}axis"), *ends)
    elif finite.size:
        low, high = finite.min(), finite.max()
        pad = 0.08 * (high - low) or 0.08 * abs(high) or 0.5
        axes.set(**{f"{along}lim": (low - pad, high + pad)})


def label_decades(axis: Any, low: float, high: float) -> None:
    """Label two and five times a power of ten, too, if there are few powers."""
    if high / low <= 120:
        axis.set_major_formatter(FuncFormatter(_rounded))
        axis.set_minor_formatter(FuncFormatter(_rounded))
    else:
        axis.set_minor_formatter(NullFormatter())


def _rounded(number: float, place: Any) -> str:
    """Format one, two or five times a power of ten; the label of other numbers is empty."""
    exponent = math.floor(math.log10(number) + 1e-9)
    digit = round(number / 10.0**exponent)
    if digit not in (1, 2, 5):
        return ""
    if -3 <= exponent <= 3:
        return f"{number:g}"
    return rf"${digit}\times10^{{{exponent}}}$" if digit > 1 else f"$10^{{{exponent}}}$"


def mark_of(number: float, log: bool) -> str | None:
    """Return the mark for a number that the axis cannot show; None for any other number."""
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Inf" if number > 0 else "−Inf"
    return "zero" if log and number <= 0 else None


def mark_beyond_axis(
    axes: Axes, along: str, log: bool, places: Iterable[float], numbers: np.ndarray
) -> set[str]:
    """Mark the numbers that the axis cannot show at its edge; return the names of the marks."""
    used: dict[str, list[float]] = {}
    for place, number in zip(places, numbers, strict=True):
        if (name := mark_of(number, log)) is not None:
            used.setdefault(name, []).append(place)
    for name, at in used.items():
        edge = [0.0 if name in ("zero", "−Inf") else 1.0] * len(at)
        xs, ys = (edge, at) if along == "x" else (at, edge)
        transform = axes.get_yaxis_transform() if along == "x" else axes.get_xaxis_transform()
        looks = {"linestyle": "", "clip_on": False, "zorder": 9, **MARKS[name]}
        axes.plot(xs, ys, label=name, transform=transform, **looks)
    return set(used)


def bins(histogram: Histogram) -> tuple[bool, np.ndarray, np.ndarray, tuple[float, float]]:
    """Prepare a histogram for drawing.

    Return whether it is on a log axis, its finite edges, the density, scaled to a maximum of 1, and
    the shares below and above these edges.
    """
    edges, counts = histogram.edges, histogram.counts
    low, high = int(edges[0] == -np.inf), len(counts) - int(edges[-1] == np.inf)
    positive = edges[edges > 0]
    log = edges[0] >= 0 and len(positive) > 2 and positive[-2] / positive[0] >= 64
    if log and edges[low] == 0:
        low += 1
    inner = edges[low : high + 1]
    if len(inner) < 2:  # all bins are infinite
        inner = np.append(inner, [0.0])[0] + np.array([-1.0, 1.0])
        counts = np.insert(counts, low, 0)
        high = low + 1
    along = np.log10(inner) if log else inner
    density = counts[low:high] / np.diff(along)
    total = counts.sum() or 1.0
    shares = float(counts[:low].sum() / total), float(counts[high:].sum() / total)
    return bool(log), inner, density / (density.max(initial=0.0) or 1.0), shares


def add_ridge(
    axes: Axes, histogram: Histogram, row: int, height: float, colour: Any, name: str
) -> set[str]:
    """Draw a histogram on the base line of a row; return the names of the marks that it uses.

    Rows count from the top, so the height is negative. A row covers the rows above it. A separate
    bar shows the share of the numbers beyond the bins.
    """
    base, height, order = row + 0.3, -height, 2 + row
    log, edges, density, shares = bins(histogram)
    if not np.sum(histogram.counts):
        axes.plot([edges[0], edges[-1]], [base, base], label=name, zorder=order, **HOLLOW)
        return {EMPTY}
    middle = np.sqrt(edges[1:] * edges[:-1]) if log else (edges[1:] + edges[:-1]) / 2
    xs = np.array([edges[0], *middle, edges[-1]])
    ys = base + height * np.array([0.0, *density, 0.0])
    axes.fill_between(xs, base, ys, color=tint(colour, 0.35), linewidth=0, zorder=order)
    axes.plot(xs, ys, color=colour, linewidth=1.0, label=name, zorder=order + 0.1)
    for share, (start, end) in zip(shares, beyond(log, edges), strict=True):
        if share:
            top = base + height * share
            axes.fill_between([start, end], base, top, color=OUTSIDE, linewidth=0, zorder=order)
    return {BEYOND} if any(shares) else set()


def beyond(log: bool, edges: np.ndarray) -> list[tuple[float, float]]:
    """Return the positions of the bars for the numbers below and above the bins."""
    if log:
        step = (edges[-1] / edges[0]) ** 0.03
        return [(edges[0] / step**2, edges[0] / step), (edges[-1] * step, edges[-1] * step**2)]
    step = 0.03 * (edges[-1] - edges[0])
    return [(edges[0] - 2 * step, edges[0] - step), (edges[-1] + step, edges[-1] + 2 * step)]


def set_ridge_axis(axes: Axes, histograms: Iterable[Histogram]) -> str:
    """Set the axis of some histograms; return its label."""
    drawn = [(log, edges, beyond(log, edges)) for log, edges, *_ in map(bins, histograms)]
    log = all(log for log, *_ in drawn)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(min(d[2][0][0] for d in drawn), max(d[2][1][1] for d in drawn))
    return "magnitude" if log else "number"


def shorten_names(names: Sequence[str], most: int = 30) -> tuple[str, list[str]]:
    """Return the common beginning of names, and the names without it, elided in the middle."""
    split = [name.split("/") for name in names]
    shared = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*split, strict=False))
    common = [each[0] for each in shared]
    if len(set(names)) == 1:
        common = common[:-1]
    # A name that equals the common beginning is the model: it keeps its last segment.
    labels = ["/".join(parts[len(common) :] or parts[-1:]) for parts in split]
    return "/".join(common), [elide(label, most) for label in labels]


def elide(label: str, most: int) -> str:
    if len(label) <= most:
        return label
    head = (most - 1) // 2
    return f"{label[:head]}…{label[head + 1 - most :]}"


def label_rows(axes: Axes, rows: Sequence[str], height: float, most: int = 30) -> list[int]:
    """Label as many rows of a height as fit, on the left; return their numbers."""
    common, labels = shorten_names(rows, most)
    kept = pick_labelled_rows(rows, LINE / height)
    axes.set_yticks(kept, [labels[i] for i in kept], parse_math=False)
    axes.set_ylabel(f"{common}/…" if common else "", **LABEL)
    return kept


def pick_labelled_rows(names: Sequence[str], apart: float) -> list[int]:
    """Choose the rows to label, at least `apart` rows from each other; outer modules first."""
    kept: list[int] = []
    depths = [name.count("/") for name in names]
    for i in sorted(range(len(names)), key=lambda i: (depths[i], i)):
        if all(abs(i - k) >= apart for k in kept):
            kept.append(i)
    return sorted(kept)
