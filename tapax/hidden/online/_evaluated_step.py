"""The derivatives within one step from which rules of online learning compute gradients.

The loss of a step depends on the parameters and on the old states through the new states, and in
ways that bypass them. Within a group, the new states count as independent: the influences on them
contain their effects on each other. The paths through the states of other groups count.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax._jax import Function, PyTree, Value
from tapax.hidden.online._flat_step import FlatStep
from tapax.hidden.online._learner import compute_loss, widen_dtype
from tapax.hidden.online._unit_groups import DrivingWeight, UnitGroup


@dataclasses.dataclass(frozen=True, eq=False)
class EvaluatedStep:
    """A step that ran on its arguments, and the derivatives of its loss for these arguments."""

    program: FlatStep
    env: Any
    weights: list[Any]
    olds: list[Any]
    inputs: list[Any]
    loss: Callable[[Any], Any]
    state: Any
    out: Any

    @functools.cached_property
    def data(self) -> dict[int, Any]:
        """The data that multiply the weights, by the index of the product."""
        return self.program.run(self.env, self.weights, self.olds, self.inputs)[2]

    def _compute_loss(self, write: Any, weights: Any, olds: Any) -> Any:
        _, outs, _ = self.program.run(self.env, weights, olds, self.inputs, write=write)
        return self.loss(outs)

    @functools.cached_property
    def whole_gradients(self) -> tuple[list[Any], list[Any]]:
        """The gradients with respect to the weights and the old states."""
        return self._differentiate(None)

    @functools.cached_property
    def beside_gradients(self) -> tuple[list[Any], list[Any]]:
        """The parts of the gradients that bypass the new states, by weights and by old states."""
        return self._differentiate(lambda k, x: jax.lax.stop_gradient(x))

    def _differentiate(self, write: Any) -> tuple[list[Any], list[Any]]:
        found = jax.grad(lambda w, o: self._compute_loss(write, w, o), (0, 1))
        weights, olds = found(self.weights, self.olds)
        return weights, [o.astype(widen_dtype(o.dtype)) for o in olds]

    def compute_signal(self, group: UnitGroup) -> dict[int, Any]:
        """Compute the gradient of the loss with respect to each new state of a group."""

        def lost(added: dict[int, Any]) -> Any:
            cut = jax.lax.stop_gradient
            write = lambda k, x: cut(x) + added[k] if k in added else x  # noqa: E731
            return self._compute_loss(write, self.weights, self.olds)

        zeros = {k: jnp.zeros_like(self.olds[k]) for k in group.states}
        return {k: g.astype(widen_dtype(g.dtype)) for k, g in jax.grad(lost)(zeros).items()}

    def differentiate_output(self) -> list[Any]:
        """Compute the gradient of the loss with respect to the output."""
        outs = jax.tree.leaves(self.out)
        floats = [i for i, x in enumerate(outs) if jnp.issubdtype(x.dtype, jnp.floating)]

        def lost(some: list[Any]) -> Any:
            here = list(outs)
            for i, x in zip(floats, some, strict=True):
                here[i] = x
            return self.loss(here)

        return jax.grad(lost)([outs[i] for i in floats])

    def differentiate_units(self, group: UnitGroup) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Differentiate units with respect to their old values, and to the inputs that drive them.

        The first derivatives are by pairs of states (new, old), the second by source and state.
        With a block of one unit, it takes one backward pass for each state.
        """
        single = [s for s in group.sources if s.units is not None]
        dots = [s for s in single if s.dot is not None]
        each = [s for s in single if s.dot is None]

        def news(olds: list[Any], added: list[Any], weights: list[Any]) -> list[Any]:
            here, given = list(self.olds), list(self.weights)
            for k, x in zip(group.states, olds, strict=True):
                here[k] = x
            for s, x in zip(each, weights, strict=True):
                given[s.weight] = x
            more = {s.dot.at: x for s, x in zip(dots, added, strict=True) if s.dot}
            return self._compute_news(group, given, here, added=more)

        _, back = jax.vjp(
            news,
            [self.olds[k] for k in group.states],
            [jnp.zeros(s.dot.result.aval.shape, s.dot.result.aval.dtype) for s in dots if s.dot],
            [self.weights[s.weight] for s in each],
        )
        own = np.arange(group.units).reshape(group.shape)
        places: Any = [own] * len(group.states), [s.units for s in dots], [s.units for s in each]
        carried: dict[Any, Any] = {}
        driven: dict[DrivingWeight, dict[int, Any]] = {s: {} for s in single}
        for n, k in enumerate(group.states):
            olds, *rest = _take_diagonal(back, group, n, self.olds[k].dtype, places)
            for old, x in zip(group.states, olds, strict=True):
                if (k, old) in group.carries:
                    carried[k, old] = x
            for s, x in zip((*dots, *each), [y for part in rest for y in part], strict=True):
                driven[s][k] = x
        return carried, driven

    def _compute_news(
        self, group: UnitGroup, weights: list[Any], olds: list[Any], **changes: Any
    ) -> list[Any]:
        """Run the step with other values; return a group's new states, cut off from others."""
        cut = lambda k, x: x if k in group.states else jax.lax.stop_gradient(x)  # noqa: E731
        made, _, _ = self.program.run(self.env, weights, olds, self.inputs, write=cut, **changes)
        return [made[k] for k in group.states]

    def pull_back(self, group: UnitGroup, source: DrivingWeight) -> Callable[[dict[int, Any]], Any]:
        """Make a function that pulls cotangents of a group's new states back to a weight."""
        at = [d.at for d in self.program.dots if d.weight is self.program.weights[source.weight]]
        now = self.weights[source.weight]

        def news(weight: Any) -> list[Any]:
            given = list(self.weights)
            if source.dot is None:
                given[source.weight] = weight
                operand = dict.fromkeys(at, now)
            else:
                operand = {source.dot.at: weight}
            return self._compute_news(group, given, self.olds, operand=operand)

        made, back = jax.vjp(news, now)
        dtypes = {k: x.dtype for k, x in zip(group.states, made, strict=True)}
        return lambda cots: back([cots[k].astype(dtypes[k]) for k in group.states])[0]

    def differentiate_weight(self, group: UnitGroup, source: DrivingWeight, k: int) -> Any:
        """Differentiate all units of a state with respect to all elements of a weight."""
        back = self.pull_back(group, source)
        shape = (group.units, *group.shape)
        zeros = {j: jnp.zeros(group.shape, self.olds[j].dtype) for j in group.states}
        unit = jnp.eye(group.units, dtype=self.olds[k].dtype).reshape(shape)
        rows = jax.vmap(lambda one: back({**zeros, k: one}))(unit)
        return rows.reshape(group.units, -1).astype(widen_dtype(rows.dtype))


def _take_diagonal(
    back: Callable[..., Any], group: UnitGroup, n: int, dtype: Any, places: Any
) -> Any:
    """Differentiate the `n`th state, at the unit of each element, with respect to the element.

    An element influences the units of one block only, so that one pass computes the derivatives for
    one unit of every block.
    """
    own = np.arange(group.units).reshape(group.shape)
    zeros = jnp.zeros(group.shape, dtype)

    def rows(place: Any) -> Any:
        one = (own % group.block == place).astype(dtype)
        return back([one if i == n else zeros for i in range(len(group.states))])

    def picked(x: Value, units: np.ndarray) -> Any:
        at = jnp.asarray(units % group.block)[None]
        return jnp.take_along_axis(x, at, 0)[0]

    if group.block == 1:
        found = rows(0)
    else:
        every = jax.vmap(rows)(jnp.arange(group.block))
        found = jax.tree.map(picked, every, tuple(places))
    return jax.tree.map(lambda x: x.astype(widen_dtype(x.dtype)), found)


def evaluate_step(
    step: Any,
    program: FlatStep,
    params: PyTree,
    state: PyTree,
    inputs: PyTree,
    *,
    loss: Function,
    target: PyTree,
) -> tuple[EvaluatedStep, Any]:
    """Run a step; return it and the pullback from weights to parameters.

    It calls the step itself once, so that its side effects, such as printing or marking, happen
    once.
    """
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(params)]
    weights, env, back = program.prepare(leaves)

    def lost(outs: Any) -> Any:
        return compute_loss(loss, program.out_tree.unflatten(outs), target)

    olds = [jnp.asarray(x) for x in jax.tree.leaves(state)]
    given = [jnp.asarray(x) for x in jax.tree.leaves(inputs)]
    new, out = step(params, state, *inputs)
    return EvaluatedStep(program, env, weights, olds, given, lost, new, out), back
