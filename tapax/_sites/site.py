"""`Site`: a named value in a program."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from tapax.reduce import Reducer


class ScannedLayers(NamedTuple):
    """A module that a loop runs once for each of `length` layers.

    `path` is the module path. `loop` numbers the loop among those around the site; the innermost is
    0.
    """

    path: str
    loop: int
    length: int

    @property
    def module(self) -> str:
        """The name of the module in its parent."""
        return self.path.rpartition("/")[2]


@dataclasses.dataclass(frozen=True)
class Site:
    """A named value in a program.

    - `shape` and `dtype` describe the captured array, including the axes of loops and maps.
    - `loops` lists the loops around the site, outermost first, such as `("scan[12]", "while")`.
    - `rank` is the number of axes of the value itself, after the axes of loops, maps and meshes.
    - `kind` says what made the site: `sow`, `perturb`, `module`, `input`, `weights`, `hidden`, `op`
      or `name`.
    - `source` is the file and line of the mark, and `op` the name of a marked operation.
    - `call` numbers the calls of the path, and `pullback` the gradients of one call.
    - `module` is the class whose `method` returned the value, or the name of that class if the taps
      were read from a file.
    - `members` is the number of ensemble members that share the batch of the module: see
      `tapax.nn`.
    - `collection` comes from the mark of a framework: a Variable type of NNX, or the name of a
      collection of Linen.
    - `reducer` and `grad_reducer` are the reducers of the value and of the gradient, if any.
    - `layers` are the scanned layers around the site.
    """

    path: str
    kind: str = "sow"
    shape: tuple[int, ...] = ()
    dtype: Any = None
    source: str = ""
    loops: tuple[str, ...] = ()
    rank: int = 0
    call: int = 0
    pullback: int = 0
    op: str = ""
    module: type | str | None = None
    method: str = ""
    members: int | None = None
    collection: Any = None
    reducer: Reducer | None = None
    grad_reducer: Reducer | None = None
    layers: tuple[ScannedLayers, ...] = ()

    @property
    def name(self) -> str:
        """The key of this site in the results: `path`, `path@call`, `path~pullback`."""
        call = f"@{self.call}" if self.call else ""
        return f"{self.path}{call}" + (f"~{self.pullback}" if self.pullback else "")

    @property
    def described(self) -> str:
        """The site and its source line, as messages name it."""
        return f"site {self.name!r}, marked at {self.source}"

    @property
    def nbytes(self) -> int:
        """The size of the captured array in bytes."""
        if self.dtype is None:
            return 0
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
