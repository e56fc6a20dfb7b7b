"""Paths: escaping and joining names."""

import re
from typing import NamedTuple

from tapax._jax import Value

_ROW = re.compile(
    r"(?P<path>.*?)(?:@(?P<call>\d+))?(?:~(?P<pullback>\d+))?(?:\[(?P<iteration>\d+(?:,\d+)*)\])?",
    re.DOTALL,
)


class RowName(NamedTuple):
    """The parts of the name of a row in a table or a log: `h@1~2[0,3]`."""

    path: str
    call: int
    pullback: int
    iteration: tuple[int, ...]


def split_row(name: str) -> RowName:
    """Split the name of a row into the path, call and pullback of its site, and its iteration."""
    found = _ROW.fullmatch(name)
    assert found is not None
    iteration = found["iteration"]
    return RowName(
        found["path"],
        int(found["call"] or 0),
        int(found["pullback"] or 0),
        tuple(map(int, iteration.split(","))) if iteration else (),
    )


def join(path: str, name: str) -> str:
    """Join two paths, either of which may be empty."""
    return f"{path}/{name}" if path and name else path or name


def segment(key: Value) -> str:
    """Convert a key to one segment of a path; escape characters that have a meaning in paths."""
    if type(key) is str and key.isidentifier():
        return key
    return re.sub(r"[*?@~:/%]", lambda found: f"%{ord(found.group()):02X}", str(key))
