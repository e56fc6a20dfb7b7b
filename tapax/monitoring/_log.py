"""`Log`: the records of a monitored run by step and by name, and the reader of logs on disk."""

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
from tapax._results.flow import Flow
from tapax._sites import nearest, wrong_type
from tapax.monitoring._delivery import warn
from tapax.monitoring._json_lines import jsonl, read_lines
from tapax.monitoring._log_format import LogEntry, not_a_log, warn_left_out
from tapax.monitoring._part_folder import FORMATS, IncompletePart, PartFolder, find_parts
from tapax.monitoring._records import AlertEvent, Histogram, Number, Record, as_floats

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table


@dataclasses.dataclass(frozen=True, eq=False)
class Series:
    """The numbers of one name in a log, one for each step that has it.

    Attributes:
        steps: The steps.
        values: The numbers, with the steps along the first axis. For a histogram these are the
            counts, [step, bin].
        edges: The edges of the bins of a histogram; None for other numbers.
    """

    steps: np.ndarray
    values: np.ndarray
    edges: np.ndarray | None = None

    @property
    def counts(self) -> np.ndarray | None:
        """The counts of a histogram; None for other numbers."""
        return None if self.edges is None else self.values

    def __len__(self) -> int:
        return len(self.steps)


class Log(Tabular):
    """The records of a run, by step and by name.

    A record maps names to the numbers of one watched step. A name consists of the name of a site,
    `value` or `grad`, and the statistic: `GPT/blocks/3/mlp/value_rms`. A site in a scan has a
    number for each iteration: `GPT/blocks/mlp[3]/value_rms`. A number is a float, an array with an
    element for each unit, or a `Histogram`.

    A log is a sink: pass it to a monitor, `tapax.monitor(step, to=log)`, or add a record yourself,
    `log(step, record)`. `log[name]` is a series with the arrays `steps` and `values`. For a
    histogram, `values` contains the counts, and `edges` the edges of the bins. Iterating over a log
    yields pairs of a step and a record. A log prints as a table. `tapax.open` reads a log from
    disk.

    If a run resumes from an earlier step, its records replace the old ones: a new record removes
    the records of its step and of later steps that share a name with it, and the log warns.

    Attributes:
        alerts: The alerts that went off, a list of `tapax.alert.AlertEvent`.

    Example:
        >>> import tapax
        >>> log = tapax.Log()
        >>> for step in range(0, 300, 100):
        ...     log(step, {"Net/mlp/value_rms": 1.0 + step, "Net/mlp/grad_rms": 0.5})
        >>> log.steps.tolist(), log.names
        ([0, 100, 200], ['Net/mlp/value_rms', 'Net/mlp/grad_rms'])
        >>> log["Net/mlp/value_rms"].values.tolist()
        [1.0, 101.0, 201.0]
    """

    def __init__(self) -> None:
        self._records: list[tuple[int, dict[str, Number]]] = []
        self._warned = False
        self.alerts: list[AlertEvent] = []
        self._flow: Flow | None = None

    def __call__(self, step: int, record: Record) -> None:
        replaced = self._add(step, as_floats(record))
        if replaced and not self._warned:
            self._warned = True
            warn(f"In a log, {replaced}")

    def _add(self, step: int, record: Record) -> str:
        """Insert a record by its step; return a sentence if it replaces others, else ''."""
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
        """Add an alert that went off. A monitor calls this method for each alert.

        Args:
            event: The alert.

        Raises:
            Nothing: the log does not check `event`.

        Example:
            >>> import tapax
            >>> log = tapax.Log()
            >>> log.alert(tapax.alert.AlertEvent(7, "h", "value_rms", 9.0, "h has rms 9."))
            >>> log.alerts[0].step
            7
        """
        self.alerts.append(event)

    def _write_flow(self, flow: Flow) -> None:
        self._flow = flow

    @property
    def steps(self) -> np.ndarray:
        """The step of each record."""
        return np.array([step for step, _ in self._records], np.int64)

    @property
    def names(self) -> list[str]:
        """The names of all numbers, in the order in which they first appear."""
        return list(dict.fromkeys(name for _, record in self._records for name in record))

    def __getitem__(self, name: str) -> Series:
        if not isinstance(name, str):
            raise wrong_type(
                "A log takes the name of a number, as in log['h/value_rms'], not", name
            )
        found = [(step, record[name]) for step, record in self._records if name in record]
        if not found:
            names = self.names
            near = nearest(name, names) if names else "It contains no numbers yet."
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
                f"The shape or the edges of {name!r} change within the log, so its numbers do "
                "not fit into one array. Read the records one by one: `for step, record in "
                "log`."
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

        The index contains the steps, and the columns have the names of the numbers. A number that a
        step does not have is NaN. An array has a column for each of its elements, such as
        `Net/mlp/value_zeros[3]`, and a histogram has a column for each of its bins;
        `frame.attrs["edges"]` maps the names of histograms to their edges.

        Returns:
            A `pandas.DataFrame`.

        Raises:
            ModuleNotFoundError: If pandas is not installed.
            ValueError: If the edges of a histogram change within the log.

        Example:
            >>> import tapax
            >>> log = tapax.Log()
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
    """Read the log at `path`. Warnings point to the caller of the function that calls this."""
    log, replaced = Log(), ""
    for entry in _read(Path(path)):
        if isinstance(entry, AlertEvent):
            log.alert(entry)
        elif isinstance(entry, Flow):
            log._write_flow(entry)
        else:
            replaced = log._add(*entry) or replaced
    if replaced:
        warnings.warn(f"In the log {os.fspath(path)!r}, {replaced}", stacklevel=3)
    return log


def flow_of_log(log: Log) -> Flow | None:
    """Return the flow of data between the sites of a log; None if the log has none."""
    return log._flow


def next_step(sinks: Sequence[Any], every: int) -> int:
    """Return the first step to watch after the logs among `sinks`, with a warning; 0 without logs.

    The step is a multiple of `every`, so that all processes of a run watch the same calls, whether
    or not they find a log.
    """
    start = 0
    for sink in sinks:
        stored = _stored_steps(sink)
        if stored is None or stored[1] < start:
            continue
        name, last, steps = stored
        start = last // every * every + every
        warnings.warn(
            f"{name} contains {steps}, so the steps of this run are numbered from {start}. Pass "
            "`start` if the first step has another number.",
            stacklevel=4,
        )
    return start


def _stored_steps(sink: Any) -> tuple[str, int, str] | None:
    """Return the name of a log, its last step, and its steps in words; None if it is empty."""
    if isinstance(sink, (Log, jsonl, PartFolder)):
        steps = (sink if isinstance(sink, Log) else open_log(sink.path)).steps
        if not len(steps):
            return None
        name = "The log" if isinstance(sink, Log) else f"The log {str(sink.path)!r}"
        return name, int(steps[-1]), f"steps {steps[0]} to {steps[-1]}"
    last = getattr(sink, "last_step", None)
    return None if last is None else (f"The run of {sink!r}", last, f"steps up to {last}")


def _read(path: Path) -> Iterator[LogEntry]:
    """Read every record and every alert of a log."""
    for file in find_files(path):
        if file.suffix == ".jsonl":
            yield from read_lines(file)
            continue
        try:
            yield from FORMATS[file.suffix].read(file)
        except IncompletePart:
            if path.is_file():
                kind = file.suffix[1:]
                raise not_a_log(path, f"it is not a complete {kind} file") from None
            warn_left_out(path, f"the part {file.name!r}", 5)


def find_files(path: Path) -> list[Path]:
    """Find the files of a log: the file at `path`, or the parts in the folder at `path`.

    Raises `FileNotFoundError` or `ValueError` if there is no log at `path`.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no file or folder {str(path)!r}.")
    if path.is_file():
        if path.suffix != ".jsonl" and path.suffix not in FORMATS:
            name = f"its name ends in {path.suffix!r}" if path.suffix else "it is a file"
            raise not_a_log(path, name)
        return [path]
    found = [part for suffix in FORMATS for part in find_parts(path, suffix)]
    if not found and (path.suffix not in FORMATS or any(path.iterdir())):
        raise not_a_log(path, "it contains no parts of a log")
    return found
