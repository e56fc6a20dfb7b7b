"""Tags: the names of numbers for packages that reject brackets and other characters."""

import re

from tapax.monitoring._records import Number, Record, as_floats

_SIGNS = str.maketrans({"[": ".", "]": None, ",": ".", ":": ".", "@": "-", "~": "--"})
"""Calls have another sign than iterations, so that `h@1` and `h[1]` are two tags."""


def tag_numbers(record: Record) -> dict[str, Number]:
    """Rename the numbers of a record: `mlp[3,0]` becomes `mlp.3.0`, and `mlp@1` `mlp-1`.

    A tag that another number has already gets underscores at its end, so that no number is lost.

    >>> tag_numbers({"h/value_rms": 1.0, "h[1]/value_rms": 2.0, "h.1/value_rms": 3.0})
    {'h/value_rms': 1.0, 'h.1/value_rms': 2.0, 'h.1/value_rms_': 3.0}
    """
    found: dict[str, Number] = {}
    for name, number in as_floats(record).items():
        tag = re.sub(r"[^-/\w.]", "_", name.translate(_SIGNS))
        while tag in found:
            tag += "_"
        found[tag] = number
    return found
