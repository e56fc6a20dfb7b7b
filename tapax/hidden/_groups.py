"""Hidden groups: states of the same units that the dynamics of a step connect.

The states `h` and `c` of an LSTM are one group: for every unit, `c` at one step decides on `c` and
`h` at the next. Two layers are two groups although one drives the other, because a matrix is
between them. A state without such dynamics is a group by itself.

>>> import jax.numpy as jnp, tapax
>>> def step(state, x):
...     v = 0.9 * state["v"] - state["a"] + x
...     return {"v": v, "a": 0.5 * state["a"] + 0.1 * v}, v
>>> state = {"v": jnp.zeros(2), "a": jnp.zeros(2)}
>>> (group,) = tapax.hidden.hidden_groups(step, state, jnp.ones(2))
>>> group
HiddenGroup(a, v: float32[2])
>>> print(group.diagonal_jacobian(state, jnp.ones(2))[0])
[[ 0.4   0.09]
 [-1.    0.9 ]]
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._frameworks.recurrent_cells import HiddenError, StatePath, join_inputs, name_state
from tapax._jax import PyTree
from tapax._jaxpr.bodies import list_equations
from tapax._jaxpr.kinds import Kind, kind_of
from tapax.hidden._connections import Dependence, find_connections
from tapax.hidden._pure_step import trace_step_or_module
from tapax.hidden._step import Step


@dataclasses.dataclass(frozen=True, repr=False)
class HiddenGroup:
    """Hidden states of the same units, and how a step takes them on.

    `diagonal` if units do not depend on each other's states within the group.
    """

    index: int
    hidden_states: tuple[Any, ...]
    hidden_paths: tuple[StatePath, ...]
    step: Step
    indices: tuple[int, ...]
    diagonal: bool

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(name_state, self.hidden_paths))

    @property
    def varshape(self) -> tuple[int, ...]:
        """The shape of the units."""
        return tuple(self.hidden_states[0].varshape)

    @property
    def num_state(self) -> int:
        """How many states a unit has."""
        return sum(state.num_state for state in self.hidden_states)

    def transition(self, state: PyTree, *inputs: PyTree, **keywords: PyTree) -> list[jax.Array]:
        """The new values of the group's states, by the whole step."""
        flat = self.step.flatten(state, join_inputs(inputs, keywords))
        results = _jax.as_function(self.step.jaxpr)(*flat)
        return [results[i] for i in self.indices]

    def diagonal_jacobian(self, state: PyTree, *inputs: PyTree, **keywords: PyTree) -> jax.Array:
        """How the states of every unit depend on its own states before: `[*varshape, n, n]`.

        The entry `[u, a, b]` is the derivative of the new state `a` of the unit `u` by its old
        state `b`. What goes through another unit and back takes more than a step, and so is not in
        it; what goes from a unit through a matrix to itself is.
        """
        flat = self.step.flatten(state, join_inputs(inputs, keywords))

        def transition(joined: jax.Array) -> jax.Array:
            given = list(flat)
            for i, value in zip(self.indices, self.split_hidden(joined), strict=True):
                given[i] = value.astype(given[i].dtype)
            results = _jax.as_function(self.step.jaxpr)(*given)
            return self.concat_hidden([results[i] for i in self.indices])

        old = self.concat_hidden([flat[i] for i in self.indices])
        # A derivative that is given for the way back alone cannot be taken forward; that of a while
        # loop cannot be taken back.
        equations = list_equations(self.step.jaxpr)
        backward = any(kind_of(eqn) is Kind.CUSTOM_VJP for eqn in equations)
        return find_blocks(transition, old, self.diagonal, backward)

    def concat_hidden(self, values: Sequence[Any]) -> jax.Array:
        """The values of the group's states as one array: `[*varshape, num_state]`."""
        if len(values) != len(self.hidden_states):
            raise HiddenError(
                f"`values` has {len(values)} arrays, but the group has {len(self.hidden_states)} "
                f"hidden states: {', '.join(self.names)}."
            )
        own = zip(self.hidden_states, values, strict=True)
        parts = [jnp.asarray(x) if s.num_state > 1 else jnp.asarray(x)[..., None] for s, x in own]
        return jnp.concatenate(parts, axis=-1)

    def split_hidden(self, joined: Any) -> list[jax.Array]:
        """The opposite of `concat_hidden`."""
        parts, start = [], 0
        for state in self.hidden_states:
            part = joined[..., start : start + state.num_state]
            parts.append(part if state.num_state > 1 else part[..., 0])
            start += state.num_state
        return parts

    def __deepcopy__(self, memo: Any) -> "HiddenGroup":
        return self  # Nothing in it changes.

    def __repr__(self) -> str:
        dtype = self.step.states[self.indices[0]].dtype
        shape = ",".join(map(str, self.varshape))
        return f"HiddenGroup({', '.join(self.names)}: {dtype}[{shape}])"


def hidden_groups(
    step: Any, *inputs: PyTree, state: PyTree = None, **keywords: PyTree
) -> list[HiddenGroup]:
    """Groups the hidden states of a step that it connects and whose shapes agree.

    Two states are connected if the step computes the new value of one from the old value of the
    other without a product with a matrix or a convolution in between.

    The arguments are those of `add_hidden_perturbation`. The `transition` and the
    `diagonal_jacobian` of a group take a state like `state`, or like that of `functional`. Groups,
    and states in a group, are in the order of the leaves of the state; those of a module that
    writes its states in place, in the order in which the module reads them.
    """
    traced = trace_step_or_module(step, join_inputs(inputs, keywords), state)
    states = traced.objects or traced.states
    found = find_connections(traced.jaxpr, {i: i for i in range(len(states))})[: len(states)]
    units = [tuple(state.varshape) for state in states]
    group = list(range(len(states)))
    for new, depends in enumerate(found):
        for old, how in sorted(depends):
            if how < Dependence.MIXING and units[old] == units[new]:
                group = [group[new] if g == group[old] else g for g in group]
    made = []
    for label in dict.fromkeys(group[i] for i in traced.order):
        indices = tuple(i for i in traced.order if group[i] == label)
        hows = {how for i in indices for old, how in found[i] if old in indices}
        stacked = any(states[i].num_state > 1 for i in indices)
        paths = tuple(traced.states[i].path for i in indices)
        members = tuple(states[i] for i in indices)
        diagonal = hows <= {Dependence.UNITS} and not stacked
        made.append(HiddenGroup(len(made), members, paths, traced, indices, diagonal))
    return made


def find_blocks(
    transition: Callable[[Any], Any], old: jax.Array, diagonal: bool, backward: bool
) -> jax.Array:
    """The derivatives `[*varshape, n, n]` of a unit's new states by its old ones."""
    *shape, count = old.shape
    if backward:
        _, back = jax.vjp(transition, old)
        derivative = lambda seed: back(seed)[0]  # noqa: E731
    else:
        _, derivative = jax.linearize(transition, old)
    if diagonal:
        # Units do not meet, so one pass for all of them gives what one for each would.
        seeds = jnp.zeros((count, *old.shape), old.dtype)
        seeds = seeds.at[jnp.arange(count), ..., jnp.arange(count)].set(1)
        rows = jnp.moveaxis(jax.vmap(derivative)(seeds), 0, -1)
    else:
        units = math.prod(shape)

        def of(unit: jax.Array) -> jax.Array:
            seeds = jnp.zeros((count, units, count), old.dtype)
            seeds = seeds.at[jnp.arange(count), unit, jnp.arange(count)].set(1)
            found = jax.vmap(lambda seed: derivative(seed.reshape(old.shape)))(seeds)
            return found.reshape(count, units, count)[:, unit].T

        rows = jax.lax.map(of, jnp.arange(units), batch_size=min(64, units))
        rows = rows.reshape(*shape, count, count)
    # Forward, a pass has all new states by one old; backward, one new by all old.
    return jnp.swapaxes(rows, -1, -2) if backward else rows
