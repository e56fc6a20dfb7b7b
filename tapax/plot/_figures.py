"""`taps`, `roles` and `history`: check their arguments, choose the numbers, and draw them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tapax._results import Taps
from tapax._sites import Selection, wrong_type
from tapax._sites.roles import Place, place_rows
from tapax.monitoring._log import Log, open_log
from tapax.plot._series import (
    Statistic,
    has_histograms,
    numbers_of_log,
    numbers_of_taps,
    pick_statistics,
    rows_of_taps,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS, ROWS = 6, 6
"""How many statistics are shown, unless some are asked for."""
CAPTURES = 4
"""How many captures a plot compares, at most."""


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
    return draw(found, shown, _place_all([taps], [found]), note)


def roles(
    taps: Taps | Mapping[str, Taps], at: Selection = "**", stats: str | Iterable[str] | None = None
) -> Figure:
    """The scale of values and of gradients over depth: a line for each kind of module.

    The role of a site is its path without the number of its layer: `GPT/blocks/3/mlp/up` is the
    `mlp/up` of layer 3, and so is `GPT/blocks/mlp/up` in the fourth iteration of a scan over
    layers. Each role has one colour in all panels. The layers themselves are a wide grey line, and
    sites outside of them points. Outer modules are drawn first; a note names what did not fit.

    Args:
        taps: what a capture returned; or several captures by name, such as
            `{"before training": first, "after": last}`, which differ in the style of their lines.
        at: selects sites: a glob such as `"**/mlp"`, or any other selection.
        stats: selects statistics, such as `"rms"`. Values that were captured whole count as their
            root mean square; those that were reduced are shown as what they were reduced to.

    Returns:
        A `matplotlib.figure.Figure`: values at the left, gradients at the right.

    Raises:
        SiteError: `at` matches nothing.
        ValueError: there is no number to draw, no such statistic, or more than four captures.

    >>> import jax, jax.numpy as jnp, tapax
    >>> def loss(x):
    ...     for i in range(3):
    ...         x = tapax.sow(x + tapax.sow(jnp.tanh(2 * x), f"blocks/{i}/mlp"), f"blocks/{i}")
    ...     return jnp.sum(x)
    >>> _, taps = tapax.capture(jax.grad(loss))(jnp.ones(5))
    >>> values, grads = tapax.plot.roles(taps).axes
    >>> [line.get_label() for line in values.lines], values.lines[0].get_xdata().tolist()
    (['mlp', 'blocks'], [0.0, 1.0, 2.0])
    """
    captures = _name_captures(taps)
    with _explain_matplotlib():
        from tapax.plot._by_role import draw
    found = {name: numbers_of_taps(each, at) for name, each in captures.items()}
    every: dict[Statistic, Any] = {s: n for numbers in found.values() for s, n in numbers.items()}
    picked = pick_statistics(every, stats)
    lines = [s for s in picked if not any(has_histograms(n.get(s, {})) for n in found.values())]
    if not lines:
        raise ValueError(
            "There is nothing to plot by role: histograms are no lines. tapax.plot.taps draws them."
        )
    shown, note = _limit_panels(lines, stats, PANELS)
    left = ", ".join(dict.fromkeys(stat for kind, stat in picked if (kind, stat) not in lines))
    if left:
        note = " ".join(filter(None, [note, f"Not shown: {left}, which tapax.plot.taps draws."]))
    return draw(found, shown, _place_all(captures.values(), found.values()), note)


def _place_all(
    captures: Iterable[Taps], found: Iterable[Mapping[Statistic, Mapping[str, Any]]]
) -> dict[str, Place]:
    """The places of all rows of some captures, those that are not drawn included."""
    rows = dict.fromkeys(row for taps in captures for row in rows_of_taps(taps))
    rows |= dict.fromkeys(row for each in found for series in each.values() for row in series)
    return place_rows(rows)


def _name_captures(taps: Any) -> dict[str, Taps]:
    """Captures by name; the name of a single one is empty."""
    if isinstance(taps, Taps):
        return {"": taps}
    if not isinstance(taps, Mapping):
        raise wrong_type(
            "tapax.plot.roles takes the taps that a capture returned, or several by name, but was "
            "given",
            taps,
        )
    for name, each in taps.items():
        if not isinstance(each, Taps):
            raise wrong_type(
                f"tapax.plot.roles takes taps by name, but under {name!r} it was given", each
            )
    if not 1 <= len(taps) <= CAPTURES:
        raise ValueError(
            f"tapax.plot.roles compares up to {CAPTURES} captures, but was given {len(taps)}."
        )
    return {str(name): each for name, each in taps.items()}


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
