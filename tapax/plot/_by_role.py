"""The plot by role: depth from left to right, a line for each kind of module.

A role has one colour and one marker, in every panel and for every capture. A wide grey line under
the others shows the results of whole layers, the residual stream of a transformer: a part that is
added to the stream often has the gradient of the stream. Grey points show the sites outside of the
layers, beside the layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

import tapax.plot._style as style
from tapax._sites.roles import Place
from tapax.plot._depth_axis import CHARACTER, DepthAxis
from tapax.plot._series import Number, Statistic, is_on_log_axis

PANEL, HEIGHT = 4.6, 2.9
"""The width and the height of a panel, in inches."""
OUTSIDE = 12
"""The largest number of sites outside of the layers to draw."""
DENSE = 16
"""The largest number of points with markers in a line."""
APART = "outside of the layers"
DASHES: dict[int, tuple[Any, ...]] = {
    1: ("-",),
    2: ((0, (3, 1.5)), "-"),
    3: ((0, (1, 1)), (0, (3, 1.5)), "-"),
    4: ((0, (1, 1)), (0, (3, 1.2, 1, 1.2)), (0, (3, 1.5)), "-"),
}
"""The styles of lines by the number of captures: the last one is solid."""

Found: TypeAlias = "Mapping[Statistic, Mapping[str, Number]]"


def draw(
    captures: Mapping[str, Found],
    shown: Sequence[Statistic],
    places: Mapping[str, Place],
    note: str,
) -> style.Plot:
    """Draw the statistics in `shown`; `places` contains all rows of the captures."""
    drawn = {row for found in captures.values() for stat in shown for row in found.get(stat, ())}
    in_layers = [row for row in places if row in drawn and places[row].depth]
    others = [row for row in places if row in drawn and not places[row].depth]
    roles, left_out = _choose_roles(in_layers, places, len(style.ROLES))
    outside, left_outside = _choose_roles(others, places, OUTSIDE)
    kept = {*(r for r in in_layers if places[r].role in roles), *outside}
    rows = [row for row in places if row in kept]
    axis = DepthAxis.of(rows, places, PANEL - 0.9)
    looks = _pick_looks(roles, places)
    stats = list(dict.fromkeys(stat for _, stat in shown))
    kinds = list(dict.fromkeys(kind for kind, _ in shown))
    figure = style.new_figure(max(PANEL * len(kinds), 6.0), HEIGHT * len(stats) + 0.8)
    panels = figure.subplots(len(stats), len(kinds), squeeze=False)
    used: set[str] = set()
    for (i, stat), (j, kind) in itertools.product(enumerate(stats), enumerate(kinds)):
        panel = panels[i, j]
        if (kind, stat) not in shown:
            panel.set_visible(False)
            continue
        style.dress_axes(panel, style.title_of(kind, stat), "", style.name_of(stat))
        axis.dress(panel)
        numbers = {name: found.get((kind, stat), {}) for name, found in captures.items()}
        used |= _draw_lines(panel, stat, numbers, places, axis, looks)
    style.draw_legend(figure, used, _capture_keys(list(captures)))
    _draw_role_legend(figure, looks, _find_equal(captures, shown, rows, places))
    hidden = [*left_out, *left_outside]
    lines = [f"Not shown: {_list_some(hidden)}. Choose with at=[...]."] if hidden else []
    lines += [note] if note else []
    if lines:
        figure.supxlabel("\n".join(lines), parse_math=False, **style.LABEL)
    return figure


def _choose_roles(
    rows: Sequence[str], places: Mapping[str, Place], most: int
) -> tuple[list[str], list[str]]:
    """Choose the roles that fit into a plot; return them and the others.

    Outer modules come first. The modules of one level are chosen together, if they fit.
    """
    streams = _find_streams(places)
    roles = list(dict.fromkeys(places[row].role for row in rows))
    levels: dict[int, list[str]] = {}
    for role in roles:
        if role not in streams:
            levels.setdefault(role.count("/"), []).append(role)
    chosen: list[str] = []
    for _, level in sorted(levels.items()):
        if len(chosen) + len(level) > most:
            chosen = chosen or level[:most]
            break
        chosen += level
    kept = streams.union(chosen)
    return [role for role in roles if role in kept], [role for role in roles if role not in kept]


def _find_streams(places: Mapping[str, Place]) -> set[str]:
    """Find the roles of whole layers that have parts."""
    parts = {place.stack for place in places.values() if place.is_part}
    return {place.role for place in places.values() if place.is_layer and place.stack in parts}


def _list_some(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _pick_looks(roles: Sequence[str], places: Mapping[str, Place]) -> dict[str, dict[str, Any]]:
    """Choose the style of the line of each role; whole layers are wide and grey, below parts."""
    streams = _find_streams(places)
    coloured = style.pick_role_colours([role for role in roles if role not in streams], places)
    looks: dict[str, dict[str, Any]] = {}
    for role in roles:
        if role in streams:
            looks[role] = {"color": style.STREAM, "linewidth": 5.0, "zorder": 2}
        else:
            colour, marker = coloured[role]
            looks[role] = {"color": colour, "marker": marker, "linewidth": 1.3, "zorder": 4}
    return looks


def _draw_lines(
    axes: Axes,
    stat: str,
    captures: Mapping[str, Mapping[str, Any]],
    places: Mapping[str, Place],
    axis: DepthAxis,
    looks: Mapping[str, Mapping[str, Any]],
) -> set[str]:
    """Draw the lines of one panel, with those of the last capture on top."""
    rows = {role: [r for r in axis.xs if _is_of(places[r], role)] for role in looks}
    every = [numbers[row] for numbers in captures.values() for row in axis.xs if row in numbers]
    log = is_on_log_axis(stat, np.array(every))
    style.set_limits(axes, "y", np.array(every), log)
    count = sum(len(stack.xs) for stack in axis.stacks)
    size, apart = (4.5, 1) if count <= DENSE else (3.5, math.ceil(count / DENSE))
    dots = {"color": style.MUTED, "marker": "o", "linewidth": 1.0, "zorder": 3}
    used: set[str] = set()
    for i, (name, numbers) in enumerate(captures.items()):
        dash = DASHES[len(captures)][i]
        lines = [(role, rows[role], {**look, "linestyle": dash}) for role, look in looks.items()]
        # Without layers, a line joins the sites in the order of the program.
        lines.append((APART, list(axis.outside), {**dots, "linestyle": "" if looks else dash}))
        for j, (role, mine, look) in enumerate(lines):
            here = [row for row in mine if row in numbers]
            if here:
                look |= {"markersize": size, "label": f"{role}, {name}" if name else role}
                # Shift the markers, so that lines that coincide can be told apart.
                look |= {"markevery": (j % apart, apart)} if role in rows else {}
                look |= {} if i == len(captures) - 1 else {"markerfacecolor": style.PAPER}
                stacks = [places[row].stack for row in here]
                xs, ys = (np.array([of[row] for row in here], float) for of in (axis.xs, numbers))
                used |= _draw_line(axes, xs, ys, stacks, log, look)
    return used


def _is_of(place: Place, role: str) -> bool:
    return bool(place.depth) and place.role == role


def _draw_line(
    axes: Axes,
    xs: np.ndarray,
    ys: np.ndarray,
    stacks: Sequence[str],
    log: bool,
    look: Mapping[str, Any],
) -> set[str]:
    """Draw one line, with breaks between stacks; for several rows in a layer, median and points."""
    seen = np.where([style.mark_of(y, log) is None for y in ys], ys, np.nan)
    order = sorted(range(len(xs)), key=lambda i: float(xs[i]))
    along: list[float] = []
    middle: list[float] = []
    last: str | None = None
    for x, at in itertools.groupby(order, lambda i: float(xs[i])):
        mine = list(at)
        if last not in (None, stacks[mine[0]]):
            along.append(x)
            middle.append(np.nan)
        last = stacks[mine[0]]
        finite = seen[mine][~np.isnan(seen[mine])]
        along.append(x)
        middle.append(float(np.median(finite)) if finite.size else np.nan)
    axes.plot(along, middle, **look)
    if len(np.unique(xs)) < len(xs):
        points = {"color": look["color"], "linestyle": "", "marker": ".", "markersize": 2.0}
        axes.plot(xs, seen, zorder=look["zorder"] - 0.5, label="_points", **points)
    return style.mark_beyond_axis(axes, "y", log, xs.tolist(), ys)


def _find_equal(
    captures: Mapping[str, Found],
    shown: Sequence[Statistic],
    rows: Sequence[str],
    places: Mapping[str, Place],
) -> dict[str, str]:
    """Find the roles whose numbers equal those of another role, which hides them in every panel."""
    numbers: dict[str, list[Any]] = {}
    for found, stat in itertools.product(captures.values(), shown):
        for row in rows:
            if places[row].is_part:
                at = *places[row].depth, found.get(stat, {}).get(row, np.nan)
                numbers.setdefault(places[row].role, []).append((places[row].stack, *at))
    equal: dict[str, str] = {}
    for role, other in itertools.permutations(numbers, 2):
        mine, others = numbers[role], numbers[other]
        if role.count("/") > other.count("/") and len(mine) == len(others) and role not in equal:
            same = all(a[:-1] == b[:-1] for a, b in zip(mine, others, strict=True))
            both = [np.array([n[-1] for n in each], float) for each in (mine, others)]
            if same and np.allclose(*both, rtol=1e-6, atol=0, equal_nan=True):
                equal[role] = other
    return equal


def _draw_role_legend(
    figure: style.Plot, looks: Mapping[str, Mapping[str, Any]], equal: Mapping[str, str]
) -> None:
    """Draw the legend of roles below the figure; roles that coincide share one key."""
    names = {role: role for role in looks if role not in equal}
    for role, other in equal.items():
        names[other] += f" = {role}"
    keys = [Line2D([], [], label=names[r], markersize=4.5, **looks[r]) for r in names]
    length = sum(CHARACTER * len(name) + 0.75 for name in names.values())
    lines = math.ceil(length / (figure.get_figwidth() - 0.4))
    if keys:
        figure.legend(
            handles=keys,
            loc="outside lower center",
            ncols=math.ceil(len(keys) / lines),
            frameon=False,
            fontsize=style.TEXT,
            labelcolor=style.INK,
            handlelength=2.6,
        )


def _capture_keys(names: Sequence[str]) -> list[Line2D]:
    """Make the keys of a legend that explains the line styles of several captures."""
    if len(names) < 2:
        return []
    keys = []
    for i, (name, dash) in enumerate(zip(names, DASHES[len(names)], strict=True)):
        face = style.INK if i == len(names) - 1 else style.PAPER
        look: dict[str, Any] = {"marker": "o", "markersize": 4.0, "markerfacecolor": face}
        keys.append(Line2D([], [], label=name, color=style.INK, linestyle=dash, lw=1.3, **look))
    return keys
