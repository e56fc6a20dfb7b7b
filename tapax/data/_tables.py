"""The table of a dataset: its arrays, and the statistics of its sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from tapax._results.tables import number_column, show_bytes
from tapax.data._manifest import DatasetArray
from tapax.data._shard_format import dtype_of
from tapax.data._statistics import Statistics


def dataset_table(
    arrays: Sequence[DatasetArray], rows: int, statistics: Mapping[str, Statistics], units: str
) -> Table:
    """Make a table of every site and column of a dataset, with its dtype and its size.

    `units` is the number of units, in words.
    """
    sizes = [rows * math.prod(x.shape) * dtype_of(x.dtype).itemsize for x in arrays]
    table = Table(
        "array",
        "kind",
        "row",
        number_column("bytes"),
        number_column("mean norm", "blue"),
        number_column("std", "blue"),
        number_column("largest", "blue"),
        number_column("not finite"),
        number_column("overflowed"),
        title=f"{rows:,} rows, {show_bytes(sum(sizes))}, {units}",
    )
    for array, nbytes in zip(arrays, sizes, strict=True):
        row = f"{array.dtype}[{','.join(map(str, array.shape))}]"
        cells: list[str | Text] = [array.name, array.kind, row, show_bytes(nbytes)]
        found = statistics.get(array.name)
        if found is not None:
            std = float(np.sqrt(found.var.mean())) if found.var.size else 0.0
            cells += [f"{number:.3g}" for number in (found.norm, std, found.largest)]
            cells += [_fault(found.nonfinite), _fault(found.overflowed)]
        table.add_row(*cells)
    return table


def _fault(count: int) -> Text:
    return Text(str(count), "red") if count else Text("")
