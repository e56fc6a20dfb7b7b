"""Tables of a log: the first number, the last number, and the trend of every name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from tapax._results.tables import number_column
from tapax.monitoring._records import Number, Record, split_name

BARS = "▁▂▃▄▅▆▇█"


def summary(number: Number) -> float:
    """Summarize a number as a float: the mean over units, or the mean of a histogram."""
    if isinstance(number, (int, float)):
        return float(number)
    if isinstance(number, np.ndarray):
        return float(np.mean(number)) if number.size else math.nan
    with np.errstate(all="ignore"):
        edges = np.asarray(number.edges, np.float64)
        total = np.sum(number.counts)
        inside = np.isfinite(edges[:-1]) & np.isfinite(edges[1:])
        middle = np.where(inside, (edges[:-1] + edges[1:]) / 2, 0.0)
        return float(np.sum(np.asarray(number.counts) @ middle) / total) if total else math.nan


def sparkline(numbers: Sequence[float], width: int = 16) -> str:
    """Draw numbers as at most `width` bars; if there are more, a bar is the mean of several."""
    if not width:
        return ""
    if len(numbers) > width:
        cuts = np.linspace(0, len(numbers), width + 1).astype(int)
        parts = (numbers[a:b] for a, b in itertools.pairwise(cuts))
        numbers = [_mean(part) for part in parts]
    finite = [x for x in numbers if math.isfinite(x)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if low > 0 and high / low > 100:  # several orders of magnitude need a log scale
        numbers = [math.log(x) if math.isfinite(x) else x for x in numbers]
        low, high = math.log(low), math.log(high)
    return "".join(_bar(x, low, high) for x in numbers)


def _mean(part: Sequence[float]) -> float:
    # A single NaN or infinity must stay visible.
    bad = [x for x in part if not math.isfinite(x)]
    return bad[0] if bad else sum(part) / len(part)


def _bar(x: float, low: float, high: float) -> str:
    if not math.isfinite(x):
        return "!"
    if high <= low:
        return BARS[3]
    # Halves, because the difference of two large numbers may be infinite.
    return BARS[min(7, int(8 * ((x / 2 - low / 2) / (high / 2 - low / 2))))]


def log_table(
    records: Sequence[tuple[int, Record]], names: Sequence[str], alerts: int, rows: int
) -> Table:
    """Make a table with the first number, the last number, and the trend of every name."""
    what = f"{len(records)} records" if len(records) != 1 else "1 record"
    if records:
        what += f", steps {records[0][0]} to {records[-1][0]}"
    if alerts:
        what += f", {alerts} alerts" if alerts != 1 else ", 1 alert"
    left = len(names) - rows if len(names) > rows else 0
    shown = names if not left else [*names[: rows // 2], *names[-(rows // 2) :]]
    table = Table("name", number_column("first"), number_column("last"), "trend", title=what)
    numbers: dict[str, list[float]] = {name: [] for name in shown}
    for _, record in records:
        for name in shown:
            if name in record:
                numbers[name].append(summary(record[name]))
    for i, name in enumerate(shown):
        if left and i == rows // 2:
            table.add_row(f"... {left} more ...", "", "", "")
        row = numbers[name]
        table.add_row(name, f"{row[0]:.3g}", f"{row[-1]:.3g}", sparkline(row))
    return table


def sites_table(step: int, history: Mapping[str, Sequence[float]]) -> Table:
    """Make a table of sites by statistics; a cell has the last number and the trend."""
    rows: dict[str, dict[str, Sequence[float]]] = {}
    for name, numbers in history.items():
        site, kind, stat = split_name(name)
        rows.setdefault(site, {})[f"{kind} {stat}" if kind else ""] = numbers
    stats = list(dict.fromkeys(stat for row in rows.values() for stat in row))
    stats.sort(key=lambda stat: stat.startswith("grad"))
    width = 8 if len(stats) < 5 else 0  # many columns leave no room for trends
    table = Table("site", title=f"step {step}")
    for stat in stats:
        table.add_column(stat, no_wrap=True)
    for site, row in rows.items():
        cells = (f"{row[s][-1]:.3g} {sparkline(row[s], width)}" if s in row else "" for s in stats)
        # As text, because rich would read the brackets in a name as markup.
        table.add_row(Text(site), *cells)
    return table
