"""The walk: what a plan asks for, read out of a traced program by one interpreter."""
