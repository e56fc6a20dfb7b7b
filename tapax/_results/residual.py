"""`Residual`: a value that is kept from the forward pass for the backward pass."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Residual:
    """A value that is kept from the forward pass for the backward pass.

    `site` is the site that the value is, or else the module or scope that computes it; of an
    argument it is the name. `operation` is the primitive that computes the value, and `source` the
    line of the user's code. `shape` has a leading axis for each scan in `loops`. `nbytes` is the
    size on one device, where the program says how it divides the value. `name` is the one that
    `checkpoint_name` gives the value. A policy that offloads values puts them `on_host`.

    `kind` is `computed` if the differentiated function computes the value, so that `jax.checkpoint`
    can compute it again instead of keeping it. An `argument` of that function, and a `constant`,
    are in memory anyway.

    The function keeps the value as it is, if it is `kept`, and under the policy of `jax.checkpoint`
    that `residuals` was given, if it is `kept_by_policy`, which is None without a policy.
    """

    site: str
    operation: str
    source: str
    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    loops: tuple[str, ...] = ()
    name: str = ""
    on_host: bool = False
    kind: Literal["computed", "argument", "constant"] = "computed"
    kept: bool = True
    kept_by_policy: bool | None = None

    @property
    def change(self) -> str:
        """What the policy does: `kept`, `recomputed`, `offloaded`, or `kept instead` of others.

        An argument or constant that the backward pass no longer reads is `not read`.
        """
        if self.kept_by_policy is None:
            return ""
        if not self.kept_by_policy:
            return "recomputed" if self.kind == "computed" else "not read"
        if self.kept:
            return "kept"
        return "offloaded" if self.on_host else "kept instead"


def kept_nbytes(residuals: Iterable[Residual]) -> int:
    """The size of all that the function keeps as it is, on a device."""
    return sum(r.nbytes for r in residuals if r.kept and not r.on_host)


def policy_nbytes(residuals: Iterable[Residual]) -> int:
    """The size of all that the function keeps under the policy, on a device."""
    return sum(r.nbytes for r in residuals if r.kept_by_policy and not r.on_host)
