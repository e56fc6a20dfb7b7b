"""The search for the first NaN or infinity: `find_nonfinite` and its `Finding`."""

from tapax.nonfinite._finding import Finding, Range
from tapax.nonfinite._search import find_nonfinite

__all__ = ["Finding", "Range", "find_nonfinite"]
