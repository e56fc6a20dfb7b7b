"""The page in the browser: its payload, the server that delivers it, and the file that stores it.

`_format` specifies the payload, and `web/` has the source of the page that reads it.
"""

from typing import TYPE_CHECKING

from tapax._lazy import load_lazily

if TYPE_CHECKING:
    from tapax.viewer._by_token import ByToken
    from tapax.viewer._page import Page, view

__all__ = ["ByToken", "Page", "view"]

__getattr__, __dir__ = load_lazily(
    __name__,
    __all__,
    {"tapax.viewer._by_token": ("ByToken",), "tapax.viewer._page": ("Page", "view")},
)
