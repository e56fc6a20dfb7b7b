"""Sinks: the destinations of the records of a monitor.

A sink is any function of a step and a record, which is a dict of numbers by name. A thread calls it
with one record after another. It may have a method `alert`, which the thread calls with each
`AlertEvent`, and a method `close`, which the thread calls at the end. If a sink raises, the monitor
drops it with a warning, and the training goes on.

The argument `to` of a monitor also takes a path, `"run.jsonl"`, `"run.parquet"` or
`"run.safetensors"`, which `tapax.open` reads; `"table"`, for the terminal; `"page"`, for a page in
the browser or the notebook that follows the run; or a list of sinks and paths. If there is already
a log at a path, the run continues it, from the step `start` of `tapax.monitor`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tapax.monitoring._bins import close_edges, count_equally
from tapax.monitoring._json_lines import jsonl
from tapax.monitoring._part_folder import FORMATS, parquet, safetensors
from tapax.monitoring._records import AlertEvent, Histogram, Number, Record, as_floats
from tapax.monitoring._tags import tag_numbers

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

__all__ = ["jsonl", "make", "mlflow", "parquet", "safetensors", "table", "tensorboard", "wandb"]

Sink: TypeAlias = Callable[[int, Record], Any]
To: TypeAlias = "Sink | str | os.PathLike[str] | Sequence[To] | None"


class table:
    """A sink that shows a table in the terminal, with a row for each site, and keeps it up to date.

    If the output is not a terminal, `close` prints the table once.

    Args:
        console: The `rich.console.Console` that shows the table; by default a new one.

    Example:
        >>> from rich.console import Console
        >>> import tapax
        >>> show = tapax.sink.table(Console(stderr=True))
        >>> show(0, {"Net/mlp/value_rms": 0.5})
    """

    def __init__(self, console: Console | None = None):
        from rich.console import Console

        self._console = console or Console()
        self._history: dict[str, list[float]] = {}
        self._live: Live | None = None
        self._step = 0

    def __repr__(self) -> str:
        return "table()"

    def __call__(self, step: int, record: Record) -> None:
        from rich.live import Live

        from tapax.monitoring._trend import sites_table, summary

        self._step = step
        for name, number in as_floats(record).items():
            numbers = self._history.setdefault(name, [])
            numbers.append(summary(number))
            if len(numbers) > 64:  # the trend shows the last 64 numbers
                del numbers[0]
        if not self._console.is_terminal:
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(sites_table(step, self._history), refresh=True)

    def alert(self, event: AlertEvent) -> None:
        """Print an alert.

        Args:
            event: The alert that went off.

        Raises:
            OSError: If the output cannot be written.

        Example:
            >>> event = AlertEvent(7, "h", "value_rms", 9.0, "step 7: h has rms 9.")
            >>> table().alert(event)
            step 7: h has rms 9.
        """
        if self._console.is_terminal:
            self._console.print(event.message, style="bold red", markup=False, highlight=False)
        else:  # in a notebook rich would display HTML, but the table is text
            print(event.message, file=self._console.file)

    def close(self) -> None:
        """Stop updating the table, or print it if the output is not a terminal.

        Example:
            >>> table().close()
        """
        from tapax._results.tables import render
        from tapax.monitoring._trend import sites_table

        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._history and not self._console.is_terminal:
            print(render(sites_table(self._step, self._history)), file=self._console.file)


_LARGEST_TENSORBOARD_BIN = 1e19
"""The magnitude below which tensorboardX has bins; it fails if all numbers are outside of them."""


class tensorboard:
    """A sink that writes scalars and histograms to event files of TensorBoard, with tensorboardX.

    An array with a number for each unit becomes the histogram of its numbers.

    Args:
        folder: The folder of the event files.

    Raises:
        ImportError: If tensorboardX is not installed.
        OSError: If the folder cannot be written.

    Example:
        >>> import tempfile, tapax
        >>> write = tapax.sink.tensorboard(tempfile.mkdtemp())
        >>> write(0, {"Net/mlp/value_rms": 0.5})
        >>> write.close()
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = str(folder)
        made = _import_package("tensorboardX", "tensorboard").SummaryWriter
        try:
            self._writer = made(self._folder)
        except OSError as error:
            raise OSError(
                f"TensorBoard's folder {self._folder!r} cannot be written: "
                f"{error.strerror or error}. Choose a writable path."
            ) from error

    def __repr__(self) -> str:
        return f"tensorboard({self._folder!r})"

    def __call__(self, step: int, record: Record) -> None:
        for name, number in tag_numbers(record).items():
            if isinstance(number, Histogram):
                self._histogram(name, number, step)
            elif isinstance(number, np.ndarray):
                finite = number[np.isfinite(number)]
                if finite.size and np.abs(finite).max() >= _LARGEST_TENSORBOARD_BIN:
                    self._histogram(name, count_equally(finite), step)
                elif finite.size:
                    self._writer.add_histogram(name, finite, step)
            else:
                self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def _histogram(self, name: str, found: Histogram, step: int) -> None:
        edges, counts = close_edges(found.edges), found.counts
        middle = np.where(counts > 0, (edges[:-1] + edges[1:]) / 2, 0.0)
        with np.errstate(over="ignore"):
            squares = middle**2
        self._writer.add_histogram_raw(
            name,
            min=float(edges[0]),
            max=float(edges[-1]),
            num=float(counts.sum()),
            sum=float(counts @ middle),
            sum_squares=float(counts @ squares),
            bucket_limits=edges[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )

    def alert(self, event: AlertEvent) -> None:
        """Write an alert as a text with the tag `alerts`.

        Args:
            event: The alert that went off.

        Raises:
            OSError: If the event file cannot be written.

        Example:
            >>> import tempfile
            >>> event = AlertEvent(7, "h", "value_rms", 9.0, "step 7: h has rms 9.")
            >>> tensorboard(tempfile.mkdtemp()).alert(event)
        """
        self._writer.add_text("alerts", event.message, event.step)

    def close(self) -> None:
        """Close the event file.

        Example:
            >>> import tempfile
            >>> tensorboard(tempfile.mkdtemp()).close()
        """
        self._writer.close()


class wandb:
    """A sink that logs to a run of Weights & Biases.

    Weights & Biases plots every number over `monitor/step`, the step of the monitor. The sink does
    not set the step that wandb itself counts, so your calls of `wandb.log` may set it.

    Args:
        run: The run, as `wandb.init` returns it; by default the current run.

    Raises:
        ImportError: If wandb is not installed.
        RuntimeError: If `run` is None and there is no current run.

    Example:
        >>> import tapax, wandb  # doctest: +SKIP
        >>> write = tapax.sink.wandb(wandb.init(resume="allow"))  # doctest: +SKIP
        >>> write(write.last_step or 0, {"Net/mlp/value_rms": 0.5})  # doctest: +SKIP
    """

    _STEP = "monitor/step"

    def __init__(self, run: Any = None):
        self._wandb = _import_package("wandb")
        self._run = run
        self._defined: tuple[Any, set[str]] = None, set()
        if run is None and self._wandb.run is None:
            raise RuntimeError(
                "There is no active run of Weights & Biases. Call wandb.init() first, or give a "
                "run: tapax.sink.wandb(run)."
            )

    def __repr__(self) -> str:
        return "wandb()"

    def __call__(self, step: int, record: Record) -> None:
        run = self._run or self._wandb.run
        self._define(run, record)
        # Without `step=`: calls in the user's code count steps too, and wandb drops earlier steps.
        run.log({self._STEP: step, **{n: self._shown(x) for n, x in as_floats(record).items()}})

    @property
    def last_step(self) -> int | None:
        """The last step of a resumed run; None for a new run."""
        run = self._run or self._wandb.run
        step = run.summary.get(self._STEP) if getattr(run, "resumed", False) else None
        return None if step is None else int(step)

    def _define(self, run: Any, record: Record) -> None:
        """Tell wandb, once for each name, to plot the number over the step of the monitor."""
        define = getattr(run, "define_metric", None)  # a stand-in for a run may lack it
        if define is None:
            return
        if self._defined[0] is not run:
            self._defined = run, set()
            define(self._STEP)
        known = self._defined[1]
        for name in record:
            if name not in known:
                known.add(name)
                define(name, step_metric=self._STEP)

    def _shown(self, number: Number) -> Any:
        if isinstance(number, Histogram):
            return self._wandb.Histogram(np_histogram=(number.counts, close_edges(number.edges)))
        if isinstance(number, np.ndarray):
            finite = number[np.isfinite(number)]
            found = count_equally(finite)
            if len(found.counts) == 1:
                return self._shown(found)
            return self._wandb.Histogram(finite)
        return number

    def alert(self, event: AlertEvent) -> None:
        """Send an alert as an alert of the run.

        Args:
            event: The alert that went off.

        Raises:
            Exception: If wandb cannot send the alert.

        Example:
            >>> tapax.sink.wandb().alert(event)  # doctest: +SKIP
        """
        (self._run or self._wandb.run).alert(title=event.site, text=event.message)


class mlflow:
    """A sink that logs to the active run of MLflow, or to a new run.

    It logs the mean of an array, and the mean of a histogram.

    Raises:
        ImportError: If mlflow is not installed.

    Example:
        >>> import tapax
        >>> tapax.sink.mlflow()(0, {"Net/mlp/value_rms": 0.5})  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._mlflow = _import_package("mlflow")
        # The active run belongs to this thread, but another thread writes the records.
        self._run = (self._mlflow.active_run() or self._mlflow.start_run()).info.run_id

    def __repr__(self) -> str:
        return "mlflow()"

    def __call__(self, step: int, record: Record) -> None:
        from tapax.monitoring._trend import summary

        numbers = {name: summary(x) for name, x in tag_numbers(record).items()}
        self._mlflow.log_metrics(numbers, step=step, run_id=self._run)

    def alert(self, event: AlertEvent) -> None:
        """Set a tag of the run, `alert.STEP`, to the message of an alert.

        Args:
            event: The alert that went off.

        Raises:
            Exception: If MLflow cannot set the tag.

        Example:
            >>> tapax.sink.mlflow().alert(event)  # doctest: +SKIP
        """
        self._mlflow.MlflowClient().set_tag(self._run, f"alert.{event.step}", event.message)


def _import_package(package: str, extra: str | None = None) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        install = f"tapax[{extra}]" if extra else package
        raise ImportError(f"This sink needs {package}: pip install '{install}'.") from error


def make(to: To) -> list[Sink]:
    """Make the sinks for the argument `to` of a monitor.

    Args:
        to: A sink, a path, `"table"`, `"page"`, a list of these, or None.

    Returns:
        A list of sinks.

    Raises:
        TypeError: If `to` is a class of sinks instead of a sink, or has another wrong type.
        ValueError: If the suffix of a path is unknown.
        OSError: If a path cannot be written.

    Example:
        >>> import tapax
        >>> tapax.sink.make(["table", None])
        [table()]
    """
    if to is None:
        return []
    if isinstance(to, (str, os.PathLike)):
        return [_make_sink(to)]
    if isinstance(to, type):
        raise TypeError(f"`to` is the class {to.__name__}. Call it to make a sink.")
    if callable(to):
        return [to]
    if isinstance(to, (list, tuple)):
        return [sink for part in to for sink in make(part)]
    raise TypeError(
        "`to` must be a function of a step and a record, a path such as 'run.jsonl', 'table', "
        f"'page', or a list of these, but is {to!r} of type {type(to).__name__}."
    )


def _make_sink(to: str | os.PathLike[str]) -> Sink:
    if to == "table":
        return table()
    if to == "page":
        # The page is in a layer above this one, so load it by name, as for the packages of sinks.
        return importlib.import_module("tapax.viewer._page_sink").PageSink()
    sinks = {".jsonl": jsonl, **FORMATS}
    suffix = Path(to).suffix
    if suffix not in sinks:
        raise ValueError(
            f"to={os.fspath(to)!r} does not say what to write. A path must end in .jsonl, "
            ".parquet or .safetensors. Or give 'table', 'page', or a sink of tapax.sink, such "
            "as tapax.sink.tensorboard(folder)."
        )
    return sinks[suffix](to)
