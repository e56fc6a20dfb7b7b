"""Short names of source lines: `model.py:12`, or `In [3]:12` for the cell of a notebook."""

from __future__ import annotations

import os
import re
import sys

_CELL_FILE = re.compile(r"ipykernel_\d+[/\\]\d+\.py$|^<ipython-input-\d+-")
"""The names that IPython gives cells. The number of a file is a hash of its text."""


def name_line(source: str) -> str:
    """Return the short name of a source line, `file:line`."""
    path, _, line = source.rpartition(":")
    cell = name_cell(path)
    return os.path.basename(source) if cell is None else f"{cell}:{line}"


def name_cell(path: str) -> str | None:
    """Return the name of the notebook cell that is compiled as `path`, or None for a real file.

    A cell of another session has no number: it is `<cell>`.
    """
    if not _CELL_FILE.search(path):
        return None
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    name = getattr(getattr(get_shell(), "compile", None), "format_code_name", lambda path: None)
    found = name(path)  # ("Cell", "In[3]")
    number = re.fullmatch(r"In\s*\[(\d+)\]", found[1]) if found else None
    return f"In [{number[1]}]" if number else "<cell>"
