"""The page in the browser: makes its payload, serves it and saves it.

`_format` specifies the payload, and `web/` has the source of the page that reads it.
"""

from tapax.viewer._by_token import ByToken
from tapax.viewer._page import Page, view

__all__ = ["ByToken", "Page", "view"]
