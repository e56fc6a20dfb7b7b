"""Monitoring of training runs: monitors, streams, alerts, sinks and logs."""

from typing import TYPE_CHECKING

from tapax._lazy import load_lazily

if TYPE_CHECKING:
    from tapax.monitoring import alert, sink
    from tapax.monitoring._log import Log
    from tapax.monitoring._monitor import Monitor, monitor
    from tapax.monitoring._records import AlertEvent, Histogram
    from tapax.monitoring._stream import Stream, stream

__all__ = [
    "AlertEvent",
    "Histogram",
    "Log",
    "Monitor",
    "Stream",
    "alert",
    "monitor",
    "sink",
    "stream",
]

# Readers of logs, such as the page, do not import the tracing of programs.
__getattr__, __dir__ = load_lazily(
    __name__,
    __all__,
    {
        __name__: ("alert", "sink"),
        "tapax.monitoring._log": ("Log",),
        "tapax.monitoring._monitor": ("Monitor", "monitor"),
        "tapax.monitoring._records": ("AlertEvent", "Histogram"),
        "tapax.monitoring._stream": ("Stream", "stream"),
    },
)
