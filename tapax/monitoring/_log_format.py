"""The common parts of all logs on disk: the version, numbers and alerts as JSON, and errors.

Every file states the version of its format. A record is on disk as soon as a sink has written it,
and no later failure damages it.
"""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tapax._results.flow import Flow
from tapax.monitoring._records import AlertEvent, Histogram, Number

VERSION = 1

LogEntry = tuple[int, Mapping[str, Number]] | AlertEvent | Flow
"""A step and its record, an alert, or the flow of data between the sites of the program."""


def unwritable(path: Path, error: OSError) -> OSError:
    why = error.strerror or str(error)
    return OSError(f"The log {str(path)!r} cannot be written: {why}. Choose a writable path.")


def check_version(path: Path, version: Any) -> None:
    """Raise if the log at `path` has another version of the format."""
    if version != VERSION:
        raise RuntimeError(
            f"{str(path)!r} was written in version {version} of the format of logs, but this "
            f"tapax knows version {VERSION}. Use the version of tapax that wrote it."
        )


def not_a_log(path: Path, why: str) -> ValueError:
    """Make the error for a path that is not a log, with the reason `why`."""
    return ValueError(
        f"{str(path)!r} is not a log of tapax: {why}. A log is a .jsonl file, or a folder of "
        ".parquet or .safetensors parts; taps are a .safetensors file that `Taps.save` wrote; a "
        "dataset of activations is a folder with a manifest.json."
    )


def describe_left_out(path: Path, what: str) -> str:
    """Describe in a sentence that `what`, a part of a log, is not complete."""
    return (
        f"In the log {str(path)!r}, {what} was left out: it is not complete, perhaps because the "
        "run that wrote it was killed, or the disk was full."
    )


def warn_left_out(path: Path, what: str, stacklevel: int) -> None:
    """Warn that `what`, a part of a log, is not complete."""
    warnings.warn(describe_left_out(path, what), stacklevel=stacklevel)


def number_to_json(number: Number) -> Any:
    if isinstance(number, Histogram):
        return {"counts": number_to_json(number.counts), "edges": number_to_json(number.edges)}
    if isinstance(number, np.ndarray):
        return number.tolist() if np.isfinite(number).all() else [number_to_json(x) for x in number]
    number = float(number)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def alert_to_json(event: AlertEvent) -> dict[str, Any]:
    return {**dataclasses.asdict(event), "number": number_to_json(float(event.number))}


def alert_from_json(content: Mapping[str, Any]) -> AlertEvent:
    return AlertEvent(**{**content, "number": float(content["number"])})
