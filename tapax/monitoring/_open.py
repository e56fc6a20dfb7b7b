"""`open`: reads a log that a sink wrote, whatever its format."""

import os
from collections.abc import Iterator
from pathlib import Path

from tapax.monitoring._json_lines import read_lines
from tapax.monitoring._log import Log
from tapax.monitoring._log_format import LogEntry, not_a_log, warn_left_out
from tapax.monitoring._part_folder import FORMATS, IncompletePart, find_parts


def open(path: str | os.PathLike[str]) -> Log:
    """Reads a log that a sink wrote: a `.jsonl` file, a `.parquet` or `.safetensors` folder.

    Records that were not written to their end, as when the run was killed or the disk was full, are
    left out, with a warning.
    """
    log = Log()
    for step, record, alerts in _read(path):
        if record is not None:
            log(step, record)
        log.alerts += alerts
    return log


def _read(path: str | os.PathLike[str]) -> Iterator[LogEntry]:
    """Read every record of a log, and every alert."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no log {str(path)!r}: nothing has that name.")
    if path.is_file() and path.suffix == ".jsonl":
        yield from read_lines(path)
        return
    if path.is_file() and path.suffix not in FORMATS:
        raise not_a_log(
            path, f"its name ends in {path.suffix!r}" if path.suffix else "it is a file"
        )
    if path.is_file():
        found = [path]
    else:
        found = [part for suffix in FORMATS for part in find_parts(path, suffix)]
        if not found and (path.suffix not in FORMATS or any(path.iterdir())):
            raise not_a_log(path, "it holds no parts of one")
    for part in found:
        reader = FORMATS[part.suffix]
        try:
            entries = list(reader.read(part))
        except IncompletePart:
            if path.is_file():
                raise not_a_log(
                    path, f"it is no {part.suffix[1:]} file, or not a whole one"
                ) from None
            warn_left_out(path, f"the part {part.name!r}", 4)
            continue
        yield from entries
