"""The parts of a BatchEnsemble layer: a base layer, and for each member `r`, `s` and a bias.

A layer has the attributes of its base layer, its weight or a new one, and for each member a row of
`r`, of `s` and of the bias. If the base layer is a stack of layers, which `nnx.vmap` makes for
`nnx.scan`, the axes of the stack come before that of the members.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from tapax._frameworks.interface import Module
from tapax._sites import wrong_type
from tapax.nn._arguments import check_members
from tapax.nn._keys import make_keys

INITS = ("normal", "random_sign")
LECUN = jax.nn.initializers.lecun_normal()

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class FactorOptions:
    """The checked arguments that every layer takes."""

    num_members: int = 1
    use_base_weights: bool = False
    init: str = "normal"
    r_mean: float = 1.0
    r_std: float = 0.5
    s_mean: float = 1.0
    s_std: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_members", check_members(self.num_members))
        if self.init not in INITS:
            raise ValueError(f"`init` must be 'normal' or 'random_sign', but is {self.init!r}.")
        for name in ("r_mean", "s_mean", "r_std", "s_std"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise wrong_type(f"`{name}` must be a finite number, but is", value)
            if name.endswith("std") and value < 0:
                raise ValueError(
                    f"`{name}` is a standard deviation and cannot be negative, but is {value}."
                )


@dataclasses.dataclass(frozen=True)
class LayerShapes:
    """The shapes of a base layer's weight and bias, and of one member's factors.

    `flat` is the shape in which to draw a new weight, if it differs from the shape of the weight.
    """

    weight: tuple[int, ...]
    r: tuple[int, ...]
    s: tuple[int, ...]
    bias: tuple[int, ...] | None = None
    flat: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class BaseLayer:
    """The class of Flax that a BatchEnsemble layer extends, and how to draw a new weight."""

    kind: type
    shapes: Callable[[Any], LayerShapes]
    initializer: Initializer = LECUN
    weight: str = "kernel"

    def check(self, layer: Module, name: str) -> None:
        """Refuse a layer of another class, and a subclass that overrides `__call__`."""
        plain = f"`base_layer` of {name} must be a plain nnx.{self.kind.__name__}"
        if isinstance(layer, EnsembleLayer):
            kind = type(layer).__name__
            raise TypeError(f"{plain}, but is a {kind}, which has members already.")
        of = f"of type {type(layer).__module__.partition('.')[0]}.{type(layer).__qualname__}"
        if not isinstance(layer, self.kind):
            raise TypeError(f"{plain}, but is {of}.")
        if getattr(type(layer), "__call__") is not getattr(self.kind, "__call__"):  # noqa: B004, B009
            raise TypeError(f"{plain}, but is {of}, which overrides __call__.")

    def stack(self, layer: Module) -> tuple[int, ...]:
        """Return the leading axes of a layer's weight along which several layers are stacked."""
        weight, bias = getattr(layer, self.weight), getattr(layer, "bias", None)
        shapes = self.shapes(layer)
        stack = tuple(weight.shape[: max(weight.ndim - len(shapes.weight), 0)])
        fits = tuple(weight.shape) == (*stack, *shapes.weight)
        if bias is not None and shapes.bias is not None:
            fits = fits and tuple(bias.shape) == (*stack, *shapes.bias)
        if not fits:
            also = "" if bias is None else f" and a bias of shape {list(bias.shape)}"
            raise ValueError(
                f"`base_layer`, an nnx.{self.kind.__name__} with a weight of shape "
                f"{list(shapes.weight)}, has one of shape {list(weight.shape)}{also}. Stack layers "
                "along the first axes."
            )
        return stack

    def fresh(self, layer: Module, key: jax.Array) -> jax.Array:
        """Draw a new weight for a layer; each layer of a stack has the scale of a single one."""
        stack, shapes = self.stack(layer), self.shapes(layer)
        drawn = shapes.flat or shapes.weight
        if not stack:
            return self.initializer(key, drawn, layer.param_dtype).reshape(shapes.weight)
        split = jax.random.split(key, math.prod(stack))
        made = jax.vmap(lambda key: self.initializer(key, drawn, layer.param_dtype))(split)
        return made.reshape((*stack, *shapes.weight))


class EnsembleLayer:
    """The base class of all BatchEnsemble layers; `base` describes the layer of Flax."""

    base: ClassVar[BaseLayer]
    num_members: int
    r: Any
    s: Any
    bias: Any

    def __init__(
        self,
        base_layer: Module,
        rngs: Any = 1,
        num_members: int = 1,
        use_base_weights: bool = False,
        init: str = "normal",
        r_mean: float = 1.0,
        r_std: float = 0.5,
        s_mean: float = 1.0,
        s_std: float = 0.5,
    ):
        options = FactorOptions(num_members, use_base_weights, init, r_mean, r_std, s_mean, s_std)
        base, members = self.base, options.num_members
        base.check(base_layer, type(self).__name__)
        shapes, stack = base.shapes(base_layer), base.stack(base_layer)
        key = make_keys(rngs, base_layer)
        for name, value in vars(base_layer).items():
            # NNX keeps its bookkeeping under this prefix, and the new layer has its bookkeeping.
            if not name.startswith("_pytree__") and name not in (base.weight, "bias"):
                setattr(self, name, value)
        self.num_members = members
        weight = getattr(base_layer, base.weight)
        if not use_base_weights:
            weight = _make_like(weight, base.fresh(base_layer, key()))
        setattr(self, base.weight, weight)

        def factor(size: tuple[int, ...], mean: float, std: float) -> nnx.Param:
            shape, dtype = (*stack, members, *size), base_layer.param_dtype
            if init == "random_sign":
                drawn = jax.random.rademacher(key(), shape, jnp.int32)
            else:
                drawn = mean + std * jax.random.normal(key(), shape, dtype)
            return nnx.Param(drawn.astype(dtype))

        self.r = factor(shapes.r, r_mean, r_std)
        self.s = factor(shapes.s, s_mean, s_std)
        bias = getattr(base_layer, "bias", None)
        if bias is not None:
            each = jnp.expand_dims(bias[...], len(stack))
            each = jnp.broadcast_to(each, (*stack, members, *bias.shape[len(stack) :]))
            self.bias = _make_like(bias, each, members_at=len(stack))
        elif shapes.bias is not None:
            self.bias = nnx.data(None)

    @property
    def __tap_members__(self) -> int:
        """The number of members in the rows of a batch, which captures read."""
        return self.num_members


def _make_like(variable: Any, value: jax.Array, members_at: int | None = None) -> Any:
    """Make a variable with the type and metadata of another, perhaps with an axis of members."""
    metadata = dict(variable.get_metadata())
    names = metadata.get("out_sharding")
    if names and members_at is not None:
        metadata["out_sharding"] = (*names[:members_at], None, *names[members_at:])
    return type(variable)(value, **metadata)
