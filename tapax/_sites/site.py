"""`Site`: a named value in a program."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from tapax.reduce import Reducer


class ScannedLayers(NamedTuple):
    """A module that a loop runs once for each of `length` layers.

    `path` is that of the module, `loop` the number of the loop among those around the site, of
    which the innermost is 0.
    """

    path: str
    loop: int
    length: int

    @property
    def module(self) -> str:
        """The name of the module in the one that holds it."""
        return self.path.rpartition("/")[2]


@dataclasses.dataclass(frozen=True)
class Site:
    """A named value in a program.

    `shape` and `dtype` are those of the captured array, the axes of loops and maps included;
    `loops` says what it is repeated over, outermost first, such as `("scan[12]", "while")`, and
    `rank` how many axes the value itself has, behind those of loops, maps and meshes. `reducer` is
    what the value was reduced by, if it was, and `grad_reducer` the gradient. `kind` is how the
    site came about: `sow`, `perturb`, `module`, `input`, `weights`, `hidden`, `op` or `name`.
    `module` is the class whose `method` returned the value, or its name if the taps were read from
    a file; `members` is how many members of an ensemble share the batch of that module, see
    `tapax.nn`. `collection` is what a framework's own mark says: a Variable type of NNX, the name
    of a collection of Linen. `layers` are the scanned layers that it is in.
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
        """The words by which messages tell the user which site it is."""
        return f"site {self.name!r}, marked at {self.source}"

    @property
    def nbytes(self) -> int:
        """The size of the captured array."""
        if self.dtype is None:
            return 0
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
