"""Tools for jaxprs that know nothing of taps."""
