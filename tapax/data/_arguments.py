"""Checks of integer arguments."""

import operator
from typing import Any

from tapax._sites import wrong_type


def as_integer(name: str, value: Any, least: int | None = None) -> int:
    """Convert the argument `name` to an int of at least `least`, or raise an error that names it.

    >>> as_integer("size", 5, 1)
    5
    """
    wanted = "an integer" if least is None else f"an integer, {least} at least"
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise wrong_type(f"`{name}` takes {wanted}, but is", value)
    return number
