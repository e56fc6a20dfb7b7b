"""The search for the first NaN or infinity: `find_nonfinite` and its `Finding`."""

from typing import TYPE_CHECKING

from tapax._lazy import load_lazily

if TYPE_CHECKING:
    from tapax.nonfinite._finding import Finding, Range
    from tapax.nonfinite._search import find_nonfinite

__all__ = ["Finding", "Range", "find_nonfinite"]

__getattr__, __dir__ = load_lazily(
    __name__,
    __all__,
    {
        "tapax.nonfinite._finding": ("Finding", "Range"),
        "tapax.nonfinite._search": ("find_nonfinite",),
    },
)
