"""`Log`: the records of a monitored run, by step and by name, and how one is read from disk.

A *record* has the numbers of one watched step: a dict of numbers by names such as
`GPT/blocks/3/mlp/value_rms` and `GPT/blocks/3/mlp/grad_norm`. The name of a site comes first, then
`value` or `grad`, then the statistic. A site in a scan has a number for each iteration,
`GPT/blocks/mlp[3]/value_rms`. A number is a float, an array (one for each unit), or a `Histogram`.

>>> log = Log()
>>> for step in range(0, 300, 100):
...     log(step, {"Net/mlp/value_rms": 1.0 + step, "Net/mlp/grad_rms": 0.5})
>>> len(log), log.names
(3, ['Net/mlp/value_rms', 'Net/mlp/grad_rms'])
>>> log["Net/mlp/value_rms"].values.tolist()
[1.0, 101.0, 201.0]

A log is a sink: `tapax.monitor(step, to=log)`. `tapax.open` reads one that was written to disk;
`Log.to_pandas` makes a data frame of it.
"""

from __future__ import annotations

import bisect
import dataclasses
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tapax._results import Tabular
from tapax._sites import nearest
from tapax.monitoring._delivery import warn
from tapax.monitoring._json_lines import jsonl, read_lines
from tapax.monitoring._log_format import LogEntry, not_a_log, warn_left_out
from tapax.monitoring._part_folder import FORMATS, IncompletePart, PartFolder, find_parts
from tapax.monitoring._records import AlertEvent, Histogram, Number, Record

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table


@dataclasses.dataclass(frozen=True, eq=False)
class Series:
    """The numbers of one name, one for each step that has it.

    `values` has the steps as its first axis. Those of a histogram are its counts, [step, bin], and
    `edges` are where its bins begin and end.
    """

    steps: np.ndarray
    values: np.ndarray
    edges: np.ndarray | None = None

    @property
    def counts(self) -> np.ndarray | None:
        """The counts of a histogram; None if it is none."""
        return None if self.edges is None else self.values

    def __len__(self) -> int:
        return len(self.steps)


class Log(Tabular):
    """The records of a run, by step. `log(step, record)` adds one; `log[name]` is a `Series`.

    A record replaces those of its step and of later steps that have a name in common with it, as
    when a run is resumed from an earlier step; the log warns of it.
    """

    def __init__(self) -> None:
        self._records: list[tuple[int, dict[str, Number]]] = []
        self._warned = False
        self.alerts: list[AlertEvent] = []

    def __call__(self, step: int, record: Record) -> None:
        replaced = self._add(step, record)
        if replaced and not self._warned:
            self._warned = True
            warn(f"In a log, {replaced}")

    def _add(self, step: int, record: Record) -> str:
        """Add a record in the order of steps; return a sentence on those that it replaces."""
        at = bisect.bisect_left(self._records, step, key=_step)
        later = self._records[at:]
        kept = [(n, other) for n, other in later if other and other.keys().isdisjoint(record)]
        self._records[at:] = kept
        bisect.insort(self._records, (int(step), dict(record)), key=_step)
        if len(kept) == len(later):
            return ""
        return (
            f"step {step} came after step {later[-1][0]}, as if a run had been resumed from an "
            "earlier step, or two runs had been written to one log. The later records replace the "
            f"earlier ones from step {step} on."
        )

    def alert(self, event: AlertEvent) -> None:
        """Add an alert that went off."""
        self.alerts.append(event)

    @property
    def steps(self) -> np.ndarray:
        """The step of each record."""
        return np.array([step for step, _ in self._records], np.int64)

    @property
    def names(self) -> list[str]:
        """Every name that a record has, in the order in which they came."""
        return list(dict.fromkeys(name for _, record in self._records for name in record))

    def __getitem__(self, name: str) -> Series:
        found = [(step, record[name]) for step, record in self._records if name in record]
        if not found:
            names = self.names
            near = nearest(name, names) if names else "It holds no numbers yet."
            raise KeyError(f"The log has no {name!r}. {near}")
        steps = np.array([step for step, _ in found], np.int64)
        numbers = [number for _, number in found]
        edges = [n.edges for n in numbers if isinstance(n, Histogram)]
        values = [n.counts if isinstance(n, Histogram) else np.asarray(n) for n in numbers]
        if (
            len({v.shape for v in values}) > 1
            or len(edges) not in (0, len(found))
            or any(not np.array_equal(e, edges[0]) for e in edges)
        ):
            raise ValueError(
                f"{name!r} changed in the course of the log: its numbers have not the same shape, "
                "or not the same edges, at every step. Read them one by one: "
                "`for step, record in log`."
            )
        return Series(steps, np.stack(values), edges[0] if edges else None)

    def __contains__(self, name: object) -> bool:
        return any(name in record for _, record in self._records)

    def __iter__(self) -> Iterator[tuple[int, dict[str, Number]]]:
        return iter(list(self._records))

    def __len__(self) -> int:
        return len(self._records)

    def to_pandas(self) -> pd.DataFrame:
        """Convert the log to a pandas data frame: a row for each step, a column for each number.

        The index holds the steps, the columns have the names of the numbers, and a number that a
        step does not have is NaN. An array has a column for each of its elements, such as
        `Net/mlp/value_zeros[3]`, and a histogram one for each of its bins; `frame.attrs["edges"]`
        has the edges of histograms by name.

        Returns:
            A `pandas.DataFrame`.

        Raises:
            ModuleNotFoundError: if pandas is not installed.

        >>> log = Log()
        >>> for step in range(0, 300, 100):
        ...     log(step, {"Net/mlp/value_rms": 1.0 + step})
        >>> log.to_pandas()["Net/mlp/value_rms"].tolist()
        [1.0, 101.0, 201.0]
        """
        from tapax.monitoring._data_frame import to_data_frame

        return to_data_frame(self)

    def _table(self, rows: int = 60) -> Table:
        from tapax.monitoring._trend import log_table

        return log_table(list(self), self.names, len(self.alerts), rows)

    def _repr_html_(self) -> str:
        from tapax._results.html import ROWS, to_html

        return to_html(self._table(ROWS - 1))


def _step(entry: tuple[int, dict[str, Number]]) -> int:
    return entry[0]


def open_log(path: str | os.PathLike[str]) -> Log:
    """Read a log. Warnings are for the caller of the function that calls this."""
    log, replaced = Log(), ""
    for entry in _read(Path(path)):
        if isinstance(entry, AlertEvent):
            log.alert(entry)
        else:
            replaced = log._add(*entry) or replaced
    if replaced:
        warnings.warn(f"In the log {os.fspath(path)!r}, {replaced}", stacklevel=3)
    return log


def next_step(sinks: Sequence[Any], every: int) -> int:
    """The first step to watch after those in the logs among some sinks, of which it warns; or 0.

    It is a multiple of `every`, so that all processes of a run watch the same calls, whether or not
    they find a log.
    """
    start = 0
    for sink in sinks:
        held = _held_steps(sink)
        if held is None or held[1] < start:
            continue
        name, last, steps = held
        start = last // every * every + every
        warnings.warn(
            f"{name} holds {steps}, so the steps of this run are numbered from {start}. "
            "Pass `start`, the number of its first step, if it is another.",
            stacklevel=4,
        )
    return start


def _held_steps(sink: Any) -> tuple[str, int, str] | None:
    """The name of a log, its last step, and in words which steps it holds; None if it has none."""
    if isinstance(sink, (Log, jsonl, PartFolder)):
        steps = (sink if isinstance(sink, Log) else open_log(sink.path)).steps
        if not len(steps):
            return None
        name = "The log" if isinstance(sink, Log) else f"The log {str(sink.path)!r}"
        return name, int(steps[-1]), f"steps {steps[0]} to {steps[-1]}"
    last = getattr(sink, "last_step", None)
    return None if last is None else (f"The run of {sink!r}", last, f"steps up to {last}")


def _read(path: Path) -> Iterator[LogEntry]:
    """Read every record of a log, and every alert."""
    for file in find_files(path):
        if file.suffix == ".jsonl":
            yield from read_lines(file)
            continue
        try:
            yield from FORMATS[file.suffix].read(file)
        except IncompletePart:
            if path.is_file():
                kind = file.suffix[1:]
                raise not_a_log(path, f"it is no {kind} file, or not a whole one") from None
            warn_left_out(path, f"the part {file.name!r}", 5)


def find_files(path: Path) -> list[Path]:
    """Find the files of a log: the file at `path`, or the parts in that folder.

    Raises `FileNotFoundError` or `ValueError` if there is no log at `path`.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no log {str(path)!r}, nor taps: nothing has that name.")
    if path.is_file():
        if path.suffix != ".jsonl" and path.suffix not in FORMATS:
            name = f"its name ends in {path.suffix!r}" if path.suffix else "it is a file"
            raise not_a_log(path, name)
        return [path]
    found = [part for suffix in FORMATS for part in find_parts(path, suffix)]
    if not found and (path.suffix not in FORMATS or any(path.iterdir())):
        raise not_a_log(path, "it holds no parts of one")
    return found
