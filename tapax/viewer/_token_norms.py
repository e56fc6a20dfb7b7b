"""The norm of every token at every site: numbers by site, example and position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from tapax.viewer._blobs import Blobs
from tapax.viewer._format import Of, TokenGrid

EXAMPLES = 16
POSITIONS = 1024
"""The largest numbers of examples and positions that the page shows."""


def add_token_norms(
    of: Of,
    arrays: Mapping[str, np.ndarray],
    numbers: Mapping[str, int],
    blobs: Blobs,
    tokens: Sequence[Sequence[str]] | None,
) -> tuple[TokenGrid, str] | None:
    """Add the norms of the arrays [examples, positions, width] of the most common shape.

    If `tokens` is given, its shape decides instead. An array [positions, width] counts as one
    example. Return the grid, and a sentence on what it leaves out or an empty string; or None if no
    array has such a shape.
    """
    shapes = {row: array.shape[:2] for row, array in arrays.items() if array.ndim == 3}
    shapes |= {row: (1, len(array)) for row, array in arrays.items() if array.ndim == 2}
    if tokens is not None:
        shape = len(tokens), len(tokens[0])
    elif any(array.ndim == 3 for array in arrays.values()):
        shape = Counter(s for row, s in shapes.items() if arrays[row].ndim == 3).most_common(1)[0][
            0
        ]
    else:
        return None
    chosen = sorted((row for row, s in shapes.items() if s == shape), key=numbers.__getitem__)
    if not chosen:
        return None
    examples, positions = min(shape[0], EXAMPLES), min(shape[1], POSITIONS)
    norms = np.empty((len(chosen), examples, positions), np.float32)
    for i, row in enumerate(chosen):
        array = arrays[row].reshape(*shape, -1)[:examples, :positions]
        with np.errstate(over="ignore", invalid="ignore"):
            norms[i] = np.sqrt(np.sum(np.abs(array.astype(np.complex128)) ** 2, -1))
    grid: TokenGrid = {
        "label": f"norm of the {'gradient' if of == 'grad' else 'value'}",
        "unit": "",
        "scale": "log",
        "sites": [numbers[row] for row in chosen],
        "rowLabels": chosen,
        "examples": examples,
        "positions": positions,
        "data": blobs.add_array(norms, "f32"),
    }
    if tokens is not None:
        grid["tokens"] = [list(map(str, line[:positions])) for line in tokens[:examples]]
    return grid, _describe_rest(shape)


def _describe_rest(shape: tuple[int, int]) -> str:
    """Say how many examples and positions are beyond the limits of the page."""
    parts = [
        f"{most:,} of {count:,} {what}"
        for count, most, what in zip(
            shape, (EXAMPLES, POSITIONS), ("examples", "positions"), strict=True
        )
        if count > most
    ]
    return f"The view of tokens shows the first {' and the first '.join(parts)}." if parts else ""
