"""The walk: one interpreter that applies a plan to the taps of a traced program."""
