"""`open`: the reader of everything that tapax writes to disk."""

from __future__ import annotations

import os
import warnings

from tapax._results import Taps, load_taps
from tapax._results.taps_file import holds_taps
from tapax.data._activations import Activations
from tapax.data._folder import is_dataset
from tapax.monitoring._log import Log, open_log


def open(path: str | os.PathLike[str]) -> Log | Taps | Activations:
    """Read a log of a monitored run, taps, or a dataset of activations from disk.

    A log leaves out incomplete records, as when the run was killed or the disk was full, and
    records that a resumed run replaced (see `Log`); it warns of both. A dataset whose harvest has
    not finished has the rows written so far, with a warning.

    Args:
        path: A log that a sink wrote, which is a `.jsonl` file or a folder of `.parquet` or
            `.safetensors` parts; a file that `Taps.save` wrote; or the folder of a harvest.

    Returns:
        A `Log`; `Taps` with NumPy arrays; or `Activations`, which reads its arrays on use.

    Raises:
        FileNotFoundError: If there is nothing at `path`.
        ValueError: If tapax did not write `path`, or a file of taps is incomplete.
        RuntimeError: If `path` has a version of the format that this tapax does not know.

    Example:
        >>> import tempfile, tapax
        >>> path = f"{tempfile.mkdtemp()}/run.jsonl"
        >>> tapax.sink.jsonl(path)(0, {"Net/mlp/value_rms": 0.5})
        >>> log = tapax.open(path)
        >>> log["Net/mlp/value_rms"].values.tolist()
        [0.5]
    """
    if is_dataset(path):
        acts = Activations(path)
        if not acts.is_complete:
            warnings.warn(
                f"The dataset {os.fspath(path)!r} is not complete: {acts.progress}. "
                f"{acts.manifest.continuation}",
                stacklevel=2,
            )
        return acts
    return load_taps(path) if holds_taps(path) else open_log(path)
