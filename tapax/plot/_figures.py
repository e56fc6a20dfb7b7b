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
"""The largest number of panels, and of rows of panels, unless `stats` selects statistics."""
CAPTURES = 4
"""The largest number of captures that a plot compares."""


def taps(taps: Taps, at: Selection = "**", stats: str | Iterable[str] | None = None) -> Figure:
    """Draw the scale of values and gradients by depth: a row for each site, from the input down.

    A site in a scan has a row for each iteration. The plot shows the root mean square of a whole
    array, and the result of a reducer as it is: a panel for each statistic, ridgelines for
    histograms. It leaves out sites that did not run.

    Args:
        taps: The taps of a capture.
        at: Selects the sites to draw: a glob such as `"**/mlp"`, or any other selection.
        stats: The name of the statistic to draw, such as `"rms"`, or a list of names; by default
            all of them, up to six.

    Returns:
        A `matplotlib.figure.Figure` with a panel for each statistic.

    Raises:
        TypeError: If `taps` are not the taps of a capture, or are traced.
        SiteError: If `at` matches nothing.
        ValueError: If there are no numbers to draw, or `stats` contains an unknown name.
        ModuleNotFoundError: If matplotlib is not installed.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> def f(x):
        ...     for i in range(3):
        ...         x = tapax.sow(2 * x, f"net/layers/{i}")
        ...     return x
        >>> _, taps = tapax.capture(f)(jnp.array([0.5, -0.5]))
        >>> (panel,) = tapax.plot.taps(taps).axes
        >>> panel.lines[0].get_xdata().tolist()  # root mean squares
        [1.0, 2.0, 4.0]
    """
    if not isinstance(taps, Taps):
        raise wrong_type("tapax.plot.taps takes the taps of a capture, but was given", taps)
    with _explain_matplotlib():
        from tapax.plot._depth import draw
    found = numbers_of_taps(taps, at)
    shown, note = _limit_panels(pick_statistics(found, stats), stats, PANELS)
    return draw(found, shown, _place_all([taps], [found]), note)


def roles(
    taps: Taps | Mapping[str, Taps], at: Selection = "**", stats: str | Iterable[str] | None = None
) -> Figure:
    """Draw the scale of values and gradients over depth: a line for each kind of module.

    The role of a site is its path without the number of its layer: `GPT/blocks/3/mlp/up` is the
    `mlp/up` of layer 3, and so is `GPT/blocks/mlp/up` in the fourth iteration of a scan over
    layers. Each role has one colour in all panels. A wide grey line shows the layers themselves,
    and points show the sites outside of them. The plot draws outer modules first; a note names the
    roles that did not fit.

    Args:
        taps: The taps of a capture; or several captures by name, such as
            `{"before training": first, "after": last}`, with a line style for each.
        at: Selects the sites to draw: a glob such as `"**/mlp"`, or any other selection.
        stats: The name of the statistic to draw, such as `"rms"`, or a list of names; by default
            all of them, up to six. The plot shows the root mean square of a whole array, and the
            result of a reducer as it is.

    Returns:
        A `matplotlib.figure.Figure`: values on the left, gradients on the right.

    Raises:
        TypeError: If `taps` are not the taps of a capture, or are traced.
        SiteError: If `at` matches nothing.
        ValueError: If there are no numbers to draw, `stats` contains an unknown name, or there are
            more than four captures.
        ModuleNotFoundError: If matplotlib is not installed.

    Example:
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
            "There is nothing to plot by role, because the captures contain only histograms. "
            "tapax.plot.taps draws them."
        )
    shown, note = _limit_panels(lines, stats, PANELS)
    left = ", ".join(dict.fromkeys(stat for kind, stat in picked if (kind, stat) not in lines))
    if left:
        note = " ".join(filter(None, [note, f"Not shown: {left}, which tapax.plot.taps draws."]))
    return draw(found, shown, _place_all(captures.values(), found.values()), note)


def _place_all(
    captures: Iterable[Taps], found: Iterable[Mapping[Statistic, Mapping[str, Any]]]
) -> dict[str, Place]:
    """Find the places of all rows of some captures, drawn or not."""
    rows = dict.fromkeys(row for taps in captures for row in rows_of_taps(taps))
    rows |= dict.fromkeys(row for each in found for series in each.values() for row in series)
    return place_rows(rows)


def _name_captures(taps: Any) -> dict[str, Taps]:
    """Return captures by name; the name of a single capture is empty."""
    if isinstance(taps, Taps):
        return {"": taps}
    if not isinstance(taps, Mapping):
        raise wrong_type(
            "tapax.plot.roles takes the taps of a capture, or of several by name, but was given",
            taps,
        )
    for name, each in taps.items():
        if not isinstance(each, Taps):
            raise wrong_type(
                f"tapax.plot.roles takes taps by name, but for {name!r} was given", each
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
    """Draw the numbers of a log over training: a row for each statistic.

    Up to ten layers are lines, coloured by depth; more layers are a heat map. Histograms are
    ridgelines over training, for four layers from the first to the last. Numbered vertical lines
    mark alerts; the text below names their layers.

    Args:
        log: A `tapax.Log`, or the path of a log on disk.
        at: Selects the sites to draw: a glob such as `"**/mlp"`, or any other selection.
        stats: The name of the statistic to draw, such as `"rms"`, or a list of names; by default
            all of them, up to twelve.

    Returns:
        A `matplotlib.figure.Figure`: values on the left, gradients on the right.

    Raises:
        TypeError: If `log` is neither a log nor a path.
        SiteError: If `at` matches nothing.
        ValueError: If there are no numbers to draw, or `stats` contains an unknown name.
        ModuleNotFoundError: If matplotlib is not installed.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> loss = lambda w: jnp.sum(tapax.sow(w**2, "h"))
        >>> log = tapax.Log()
        >>> with tapax.monitor(jax.grad(loss), every=1, to=log) as step:
        ...     for w in (1.0, 2.0, 3.0):
        ...         gradient = step(w)
        >>> values, grads = tapax.plot.history(log).axes
        >>> values.lines[0].get_ydata().tolist()  # root mean squares of h
        [1.0, 4.0, 9.0]
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
    """Return the statistics that fit into a figure, and a note that names the others."""
    if stats is not None or len(shown) <= most:
        return shown, ""
    left = list(dict.fromkeys(stat for _, stat in shown[most:]))
    return shown[:most], f"Not shown: {', '.join(left)}. Choose with stats=[...]."


@contextlib.contextmanager
def _explain_matplotlib() -> Iterator[None]:
    """Explain how to install matplotlib if an import inside the block needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "Plots need matplotlib, which is not installed: pip install 'tapax[plot]'.",
            name=error.name,
        ) from error
