"""`open`: read whatever tapax wrote to disk."""

from __future__ import annotations

import os
import warnings

from tapax._results import Taps, load_taps
from tapax._results.taps_file import holds_taps
from tapax.data._activations import Activations
from tapax.data._folder import is_dataset
from tapax.monitoring._log import Log, open_log


def open(path: str | os.PathLike[str]) -> Log | Taps | Activations:
    """Read what tapax wrote to disk: the log of a monitored run, taps, or a dataset of activations.

    Records of a log that were not written to their end, as when the run was killed or the disk was
    full, are left out, with a warning; so are those that a resumed run replaced: see `Log`. A
    dataset whose harvest has not come to its end has the rows that are there, with a warning.

    Args:
        path: a log that a sink wrote, which is a `.jsonl` file or a folder of `.parquet` or
            `.safetensors` parts; a file that `Taps.save` wrote; or the folder of a harvest.

    Returns:
        A `Log`; `Taps` with NumPy arrays; or `Activations`, whose arrays are read when used.

    Raises:
        FileNotFoundError: if there is nothing at `path`.
        ValueError: if `path` is none of these, or if the file of the taps is not whole.
        RuntimeError: if another version of the format was used.

    >>> import tempfile
    >>> from tapax import sink
    >>> path = f"{tempfile.mkdtemp()}/run.jsonl"
    >>> sink.jsonl(path)(0, {"Net/mlp/value_rms": 0.5})
    >>> open(path)["Net/mlp/value_rms"].values.tolist()
    [0.5]
    """
    if is_dataset(path):
        acts = Activations(path)
        if not acts.is_complete:
            warnings.warn(
                f"The dataset {os.fspath(path)!r} is not complete: {acts.progress}. Call `harvest` "
                "again as before to go on.",
                stacklevel=2,
            )
        return acts
    return load_taps(path) if holds_taps(path) else open_log(path)
