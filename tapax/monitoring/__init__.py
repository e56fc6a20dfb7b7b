"""Watching a training run: the monitor, what it warns of, where its numbers go, and logs."""

from tapax.monitoring import alert, sink
from tapax.monitoring._log import Alarm, Histogram, Log, open
from tapax.monitoring._monitor import Monitor, monitor

__all__ = ["Alarm", "Histogram", "Log", "Monitor", "alert", "monitor", "open", "sink"]
