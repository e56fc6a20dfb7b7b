"""The conversion of a log to a pandas data frame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from tapax.monitoring._records import Histogram, Number

if TYPE_CHECKING:
    import pandas as pd


def to_data_frame(records: Iterable[tuple[int, dict[str, Number]]]) -> pd.DataFrame:
    """Make a data frame with a row for each step and a column for each number.

    A number that a step does not have is NaN.
    """
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "A data frame needs pandas, which is not installed: pip install pandas.",
            name=error.name,
        ) from error
    records = list(records)
    rows = {step: row for row, step in enumerate(dict.fromkeys(step for step, _ in records))}
    columns: dict[str, np.ndarray] = {}
    edges: dict[str, tuple[float, ...]] = {}
    for step, record in records:
        for name, number in record.items():
            if isinstance(number, Histogram):
                found = tuple(np.asarray(number.edges, np.float64).tolist())
                if edges.setdefault(name, found) != found:
                    raise ValueError(
                        f"The edges of {name!r} change at step {step}, so its bins have no columns "
                        "in common. Read the records one by one: `for step, record in log`."
                    )
            for column, value in _elements(name, number):
                if column not in columns:
                    columns[column] = np.full(len(rows), np.nan)
                columns[column][rows[step]] = value
    frame = pd.DataFrame(columns, index=pd.Index(list(rows), name="step", dtype="int64"))
    if edges:
        frame.attrs["edges"] = edges
    return frame


def _elements(name: str, number: Number) -> Iterator[tuple[str, float]]:
    """Yield the name of the column and the value of each element of a number."""
    array = np.asarray(number.counts if isinstance(number, Histogram) else number, np.float64)
    for index, value in np.ndenumerate(array):
        yield f"{name}[{','.join(map(str, index))}]" if index else name, value
