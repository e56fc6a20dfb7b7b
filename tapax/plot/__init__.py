"""Plots of what was captured, by depth, and of what a monitor wrote down, over training.

>>> import jax, jax.numpy as jnp, tapax
>>> def loss(x):
...     layer = lambda x, _: (tapax.sow(jnp.tanh(2 * x), "h"), None)
...     return jnp.sum(jax.lax.scan(layer, x, length=3)[0])
>>> _, taps = tapax.capture(jax.grad(loss))(jnp.ones(5))
>>> figure = tapax.plot.taps(taps)  # also taps.plot()
>>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
['h[0]', 'h[1]', 'h[2]']

Both return a `matplotlib.figure.Figure`, which a notebook shows and `figure.savefig` saves. It is
none of pyplot's: it need not be closed, and `plt.show` does not show it. They need matplotlib:
`pip install tapax[plot]`.

Where numbers have an order of magnitude, they are on a log axis. What has no place on it is marked
at its edge: NaN and Inf in red, zero by a circle.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tapax._results.taps import Taps
from tapax._sites.selections import Selection
from tapax.monitoring._log import Log
from tapax.monitoring._log import open as open_log
from tapax.plot._numbers import Statistic, chosen, of_log, of_taps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["history", "taps"]

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
        raise TypeError(
            f"tapax.plot.taps takes the taps that a capture returned, but was given {taps!r} of "
            f"type {type(taps).__name__}."
        )
    draw = _drawing("_depth")
    found = of_taps(taps, at)
    shown, note = _some(chosen(found, stats), stats, PANELS)
    return draw(found, shown, note)


def history(
    log: Log | str | os.PathLike[str],
    at: Selection = "**",
    stats: str | Iterable[str] | None = None,
) -> Figure:
    """The numbers of a log over training: values beside gradients, a row for each statistic.

    A few layers are lines, coloured by depth; many are a heat map. Histograms are ridgelines over
    training, of four layers from the first to the last. Alarms are vertical lines with a number,
    which says below which layer it was.

    `log` is a `tapax.Log`, or the path of one. `at` and `stats` are as in `taps`.
    """
    if isinstance(log, (str, os.PathLike)):
        log = open_log(log)
    if not isinstance(log, Log):
        raise TypeError(
            f"tapax.plot.history takes a tapax.Log, or the path of one, but was given {log!r} of "
            f"type {type(log).__name__}."
        )
    draw = _drawing("_training")
    found = of_log(log, at)
    shown, note = _some(chosen(found, stats), stats, 2 * ROWS)
    return draw(found, shown, log.alerts, note)


def _some(shown: Sequence[Statistic], stats: Any, most: int) -> tuple[Sequence[Statistic], str]:
    """No more statistics than there is room for, and a note on the others."""
    if stats is not None or len(shown) <= most:
        return shown, ""
    left = list(dict.fromkeys(stat for _, stat in shown[most:]))
    return shown[:most], f"Not shown: {', '.join(left)}. Choose with stats=[...]."


def _drawing(module: str) -> Any:
    """What draws, which needs matplotlib."""
    import importlib

    try:
        return importlib.import_module(f"tapax.plot.{module}").draw
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "Plots need matplotlib, which is not installed: pip install tapax[plot].",
            name=error.name,
        ) from error
