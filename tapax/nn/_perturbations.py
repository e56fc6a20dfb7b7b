"""Random perturbations of the values of some sites, or of some weights.

A perturbation is a frozen value, which can be compared and hashed. It keeps shape and dtype.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from tapax._jax import Value
from tapax._sites import At, Selection, Site, SiteError, check, flatten
from tapax.nn._arguments import check_deviation, check_number


@dataclasses.dataclass(frozen=True)
class Perturbation:
    """A random change of the sites, or of the weights, that `at` selects."""

    at: Selection

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", check(self.at, "at"))
        for part in flatten(self.at):
            if isinstance(part, At):
                self.check_part(part)

    @property
    def sites(self) -> tuple[Selection, ...]:
        """The selections of the perturbed sites, without `tapax.at`."""
        return tuple(p.selection if isinstance(p, At) else p for p in flatten(self.at))

    def check_part(self, part: At) -> None:
        """Refuse a part of values that cannot be perturbed alone."""
        numbers = () if part.index is None else part.index.numbers
        if isinstance(part.step, Tracer) or numbers:
            raise SiteError(
                f"`at` is tapax.{part}, which contains a traced number, but a perturbation must be "
                "known when the function is traced. Use tapax.edit with a function that closes "
                "over a key."
            )

    def apply(self, key: Value, x: Value) -> Any:
        """Perturb an array."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Dropout(Perturbation):
    """Dropout: elements become zero with the probability `rate`.

    The other elements are multiplied by 1 / (1 - rate). Elements along the axes `broadcast_dims`
    are dropped together.
    """

    rate: float
    broadcast_dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        rate = check_number(self.rate, "rate")
        if not 0 <= rate < 1:
            raise ValueError(f"`rate` must be in [0, 1), but is {self.rate}.")
        object.__setattr__(self, "rate", rate)
        object.__setattr__(self, "broadcast_dims", tuple(self.broadcast_dims))

    def check(self, site: Site, shape: tuple[int, ...]) -> None:
        """Refuse a site that lacks an axis in `broadcast_dims`."""
        for axis in self.broadcast_dims:
            if not -len(shape) <= axis < len(shape):
                raise SiteError(
                    f"`broadcast_dims` contains {axis}, but the {site.described}, has values of "
                    f"the shape {list(shape)}, which have no such axis."
                )

    def apply(self, key: Value, x: Value) -> Any:
        shape = list(x.shape)
        for axis in self.broadcast_dims:
            shape[axis] = 1
        kept = jax.random.bernoulli(key, 1 - self.rate, shape)
        return jnp.where(kept, x / (1 - self.rate), jnp.zeros_like(x))


@dataclasses.dataclass(frozen=True)
class Noise(Perturbation):
    """Normal noise of the standard deviation `std`; if `relative`, relative to the rms."""

    std: float
    relative: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "std", check_deviation(self.std, "std"))

    def check(self, site: Site, shape: tuple[int, ...]) -> None:
        """Accept every shape."""

    def apply(self, key: Value, x: Value) -> Any:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        drawn = self.std * jax.random.normal(key, wide.shape, wide.dtype)
        if self.relative:
            drawn = drawn * jnp.sqrt(jnp.mean(jnp.abs(wide) ** 2))
        return (wide + drawn).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class WeightNoise(Noise):
    """Noise on the weights of the model, or of the argument number `params`."""

    params: int | None = None

    def check_part(self, part: At) -> None:
        raise SiteError(f"Weights are perturbed as whole arrays, but `at` is tapax.{part}.")
