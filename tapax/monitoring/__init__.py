"""Monitoring of training runs: monitors, streams, alerts, sinks and logs."""

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
