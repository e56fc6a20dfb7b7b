"""Layouts of the influence of one weight on the units of a group.

`ProductLayout` is for a weight times data. The result has axes of a batch, of the data alone and of
the weight alone, `[b, d, w]`, any number of each; the influence is `[b, d, c, w]`, where `c` are
the axes over which the product sums. `ElementwiseLayout` is for a weight used element by element:
the influence has the shape of the weight. `FullLayout` has the influence of each element of the
weight on each unit, `[unit, element]`.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from tapax._jax import Value
from tapax.hidden.online._flat_step import FlatStep
from tapax.hidden.online._unit_groups import DrivingWeight, UnitGroup


def _at(x: Value, units: np.ndarray) -> Any:
    """Take the values of the units that elements drive."""
    flat = x.reshape(-1)
    if units.size == flat.size and np.array_equal(units.reshape(-1), np.arange(units.size)):
        return flat.reshape(units.shape)
    return flat[units]


@dataclasses.dataclass(frozen=True, eq=False)
class ProductLayout:
    units: np.ndarray
    order: tuple[int, ...]  # axes of the result as [b, d, w]
    data: tuple[int, ...]  # axes of the data as [b, d, c]
    back: tuple[int, ...]  # from [b, c, w] to the axes of the weight
    sizes: tuple[int, int, int, int]  # of b, d, c, w
    weight: tuple[int, ...]  # the shape of [b, c, w], each axis for itself

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes

    def at(self, x: Value) -> Any:
        return _at(x, self.units)

    def lift(self, x: Value) -> Any:
        return self.at(x)[:, :, None, :]

    def result(self, y: Value) -> Any:
        b, d, _, w = self.sizes
        return y.transpose(self.order).reshape(b, d, w)

    def factor(self, x: Value) -> Any:
        b, d, c, _ = self.sizes
        return x.transpose(self.data).reshape(b, d, c)

    def fresh(self, y: Value, x: Value) -> Any:
        return self.result(y)[:, :, None, :] * self.factor(x)[..., None]

    def contract(self, signal: Value, trace: Any) -> Any:
        made = jnp.einsum("bdw,bdcw->bcw", _at(signal, self.units), trace)
        return made.reshape(self.weight).transpose(self.back)

    def outer(self, y: Value, x: Value) -> Any:
        """Compute the gradient of the weight from the gradient of the result and the data."""
        made = jnp.einsum("bdc,bdw->bcw", x, y)
        return made.reshape(self.weight).transpose(self.back)


@dataclasses.dataclass(frozen=True, eq=False)
class ElementwiseLayout:
    units: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.units.shape

    def lift(self, x: Value) -> Any:
        return _at(x, self.units)

    def fresh(self, y: Value, x: Value) -> Any:
        del x
        return y

    def contract(self, signal: Value, trace: Any) -> Any:
        return self.lift(signal) * trace


@dataclasses.dataclass(frozen=True, eq=False)
class FullLayout:
    shape: tuple[int, ...]
    weight: tuple[int, ...]

    def lift(self, x: Value) -> Any:
        return x.reshape(-1, 1)

    def contract(self, signal: Value, trace: Any) -> Any:
        return (signal.reshape(-1) @ trace).reshape(self.weight)


InfluenceLayout = ProductLayout | ElementwiseLayout | FullLayout


def choose_layout(program: FlatStep, group: UnitGroup, source: DrivingWeight) -> InfluenceLayout:
    shape = program.weights[source.weight].aval.shape
    if source.units is None:
        return FullLayout((group.units, math.prod(shape)), shape)
    if source.dot is None:
        return ElementwiseLayout(source.units)
    eqn, side = source.dot.eqn, source.dot.side
    contract, batch = eqn.params["dimension_numbers"]
    shapes = [v.aval.shape for v in eqn.invars]
    free = [
        tuple(d for d in range(len(s)) if d not in (*contract[i], *batch[i]))
        for i, s in enumerate(shapes)
    ]
    ours, theirs = side, 1 - side
    shared, left = len(batch[0]), len(free[0])
    rows = (
        tuple(range(shared, shared + left)),
        tuple(range(shared + left, eqn.outvars[0].aval.ndim)),
    )
    order = (*range(shared), *rows[theirs], *rows[ours])
    size = lambda i, axes: math.prod(shapes[i][d] for d in axes)  # noqa: E731
    sizes = (
        size(ours, batch[ours]),
        size(theirs, free[theirs]),
        size(ours, contract[ours]),
        size(ours, free[ours]),
    )
    axes = (*batch[ours], *contract[ours], *free[ours])
    units = source.units.transpose(order).reshape(sizes[0], sizes[1], sizes[3])
    return ProductLayout(
        units,
        order,
        (*batch[theirs], *free[theirs], *contract[theirs]),
        tuple(int(i) for i in np.argsort(axes)),
        sizes,
        tuple(shape[d] for d in axes),
    )
