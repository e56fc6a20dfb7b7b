"""Watching a training run: the monitor, what it warns of, where its numbers go, and logs."""

from tapax.watching import alert, sink
from tapax.watching._log import Alarm, Histogram, Log, open
from tapax.watching._monitor import Monitor, monitor

__all__ = ["Alarm", "Histogram", "Log", "Monitor", "alert", "monitor", "open", "sink"]
