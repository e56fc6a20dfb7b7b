"""The bundle of the page, which `web/` builds into `tapax/viewer/assets/`."""

import functools
from importlib import resources

NAME = "page.js"


@functools.cache
def read_bundle() -> str:
    """Read the page as one script, which defines the global `tapaxPage`."""
    try:
        return (resources.files("tapax.viewer") / "assets" / NAME).read_text("utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(
            "The page was not built into this installation of tapax. In a checkout, run "
            "`python scripts/page.py`, which needs Node 20 or newer; a wheel has it."
        ) from None
