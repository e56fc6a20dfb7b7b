"""`Residual`: a value that the forward pass keeps for the backward pass."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Residual:
    """A value that the forward pass keeps for the backward pass.

    Attributes:
        site: The name of the site of the value, or else of the module or scope that computes it.
            For an argument, its name.
        operation: The name of the primitive that computes the value; empty for an argument or a
            constant.
        source: The line of the user's code that computes the value, `file:line`; empty for an
            argument or a constant.
        shape: The shape, with a leading axis for each scan in `loops`.
        dtype: The dtype.
        nbytes: The size in bytes; the size on one device, if the program says how it divides the
            value.
        loops: The scans around the value, outermost first, such as `("scan[12]",)`.
        name: The name that `checkpoint_name` gives the value; empty without one.
        on_host: Whether a policy offloads the value to the host.
        kind: `computed` for a value that the differentiated function computes, so that
            `jax.checkpoint` could recompute it. An `argument` of that function and a `constant` are
            in memory anyway.
        kept: Whether the function keeps the value without a policy.
        kept_by_policy: Whether the function keeps the value under the policy of `jax.checkpoint`
            given to `tapax.residuals`; None without a policy.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> loss = lambda w: jnp.sum(jnp.sin(w))
        >>> policy = jax.checkpoint_policies.nothing_saveable
        >>> (residual,) = tapax.residuals(loss, policy=policy)(jnp.ones((8, 2)))
        >>> residual.operation, residual.nbytes, residual.change
        ('cos', 64, 'recomputed')
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
        """The effect of the policy: `kept`, `recomputed`, `offloaded`, or `kept instead` of others.

        An argument or constant that the backward pass no longer reads is `not read`. Without a
        policy the effect is an empty string.
        """
        if self.kept_by_policy is None:
            return ""
        if not self.kept_by_policy:
            return "recomputed" if self.kind == "computed" else "not read"
        if self.kept:
            return "kept"
        return "offloaded" if self.on_host else "kept instead"


def kept_nbytes(residuals: Iterable[Residual]) -> int:
    """Sum the sizes of the values that a function keeps on a device without a policy."""
    return sum(r.nbytes for r in residuals if r.kept and not r.on_host)


def policy_nbytes(residuals: Iterable[Residual]) -> int:
    """Sum the sizes of the values that a function keeps on a device under the policy."""
    return sum(r.nbytes for r in residuals if r.kept_by_policy and not r.on_host)
