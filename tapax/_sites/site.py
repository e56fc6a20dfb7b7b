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

    `tapax.sites` and `Taps.sites` list sites; predicates in selections and functions in edits
    receive one.

    Attributes:
        path: The name of the value, after the scopes and modules around it: `GPT/blocks/0/h`.
        kind: The origin of the site: `sow`, `perturb`, `module`, `input`, `weights`, `hidden`, `op`
            or `name`.
        shape: The shape of the captured array, including the axes of loops and maps.
        dtype: The dtype of the captured array.
        source: The source line that marks the value, `file:line`.
        loops: The loops around the site, outermost first, such as `("scan[12]", "while")`.
        rank: The number of axes of the value itself, which come after the axes of loops, maps and
            meshes in `shape`.
        call: The number of the call of `path`; the first is 0.
        pullback: The number of the gradient, if a call has several; the innermost is 0.
        op: The name of the operation that computes the value, if a rule such as `tapax.ops` marks
            it; otherwise empty.
        module: The class of the module whose `method` returned the value; its name, if the taps
            were read from a file; None for a site that is not of a module.
        method: The name of the method of `module` that returned the value.
        members: How many members of an ensemble share the batch of that module; see `tapax.nn`.
        collection: The data of a framework's mark: a Variable type of NNX, the name of a collection
            of Linen.
        reducer: The reducer whose result a capture returned instead of the value; None without one.
        grad_reducer: The reducer whose result a capture returned instead of the gradient; None
            without one.
        layers: The scanned layers that contain the site.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> (site,) = tapax.sites(lambda x: tapax.sow(x**2, "h"))(jnp.ones((4, 3)))
        >>> site.name, site.kind, site.shape, site.nbytes
        ('h', 'sow', (4, 3), 48)
        >>> site.described == f"site 'h', marked at {site.source}"
        True
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
        """The name of the site in results: `path`, `path@call`, `path~pullback`."""
        call = f"@{self.call}" if self.call else ""
        return f"{self.path}{call}" + (f"~{self.pullback}" if self.pullback else "")

    @property
    def described(self) -> str:
        """The description of the site in error messages."""
        return f"site {self.name!r}, marked at {self.source}"

    @property
    def nbytes(self) -> int:
        """The size of the captured array, in bytes."""
        if self.dtype is None:
            return 0
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
