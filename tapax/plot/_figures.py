"""`taps` and `history`: check their arguments, choose the numbers, and draw them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tapax._results import Taps
from tapax._sites import Selection, wrong_type
from tapax.monitoring._log import Log, open_log
from tapax.plot._series import Statistic, numbers_of_log, numbers_of_taps, pick_statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS, ROWS = 6, 6
"""How many statistics are shown, unless some are asked for."""


def taps(taps: Taps, at: Selection = "**", stats: str | Iterable[str] | None = None) -> Figure:
    """The scale of values and of gradients by depth: a row for each site, from the input down.

    A site in a scan has a row for each iteration. Values that were captured whole count as their
    root mean square; those that were reduced are shown as what they were reduced to, a panel for
    each statistic, histograms as ridgelines. What did not run is left out.

    `at` selects sites: a glob such as `"**/mlp"`. `stats` selects statistics, such as `"rms"`.
    """
    if not isinstance(taps, Taps):
        raise wrong_type(
            "tapax.plot.taps takes the taps that a capture returned, but was given", taps
        )
    with _explain_matplotlib():
        from tapax.plot._depth import draw
    found = numbers_of_taps(taps, at)
    shown, note = _limit_panels(pick_statistics(found, stats), stats, PANELS)
    return draw(found, shown, note)


def history(
    log: Log | str | os.PathLike[str],
    at: Selection = "**",
    stats: str | Iterable[str] | None = None,
) -> Figure:
    """The numbers of a log over training: values beside gradients, a row for each statistic.

    A few layers are lines, coloured by depth; many are a heat map. Histograms are ridgelines over
    training, of four layers from the first to the last. Alerts are vertical lines with a number,
    which says below in which layer they went off.

    `log` is a `tapax.Log`, or the path of one. `at` and `stats` are as in `taps`.
    """
    if isinstance(log, (str, os.PathLike)):
        log = open_log(log)
    if not isinstance(log, Log):
        raise wrong_type(
            "tapax.plot.history takes a tapax.Log, or the path of one, but was given", log
        )
    with _explain_matplotlib():
        from tapax.plot._training import draw
    found = numbers_of_log(log, at)
    shown, note = _limit_panels(pick_statistics(found, stats), stats, 2 * ROWS)
    return draw(found, shown, log.alerts, note)


def _limit_panels(
    shown: Sequence[Statistic], stats: Any, most: int
) -> tuple[Sequence[Statistic], str]:
    """No more statistics than there is room for, and a note on the others."""
    if stats is not None or len(shown) <= most:
        return shown, ""
    left = list(dict.fromkeys(stat for _, stat in shown[most:]))
    return shown[:most], f"Not shown: {', '.join(left)}. Choose with stats=[...]."


@contextlib.contextmanager
def _explain_matplotlib() -> Iterator[None]:
    """Say how to install matplotlib if an import within needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "Plots need matplotlib, which is not installed: pip install tapax[plot].",
            name=error.name,
        ) from error
