"""Watching a training run: the monitor, what it warns of, where its numbers go, and logs."""

from jaxtap.watching import alert, sink
from jaxtap.watching._log import Alarm, Histogram, Log, open
from jaxtap.watching._monitor import Monitor, monitor

__all__ = ["Alarm", "Histogram", "Log", "Monitor", "alert", "monitor", "open", "sink"]
