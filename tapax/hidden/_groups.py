"""Hidden groups: the states of the same units, which a step's own dynamics connect.

The states `h` and `c` of an LSTM are one group: of every unit, `c` at one step decides on `c` and
`h` at the next. Two layers are two groups, though one drives the other, for what is between them is
a matrix; and a state without such dynamics is a group of its own.

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

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from tapax.hidden._connections import CUSTOM_VJP, How, connections, primitives
from tapax.hidden._step import HiddenError, HiddenState, Path, Step, trace


@dataclasses.dataclass(frozen=True, repr=False)
class HiddenGroup:
    """Hidden states of the same units, and how a step takes them on.

    `diagonal` if units do not depend on each other's states within the group.
    """

    index: int
    hidden_states: tuple[Any, ...]
    hidden_paths: tuple[Path, ...]
    step: Step
    places: tuple[int, ...]
    diagonal: bool

    @property
    def names(self) -> tuple[str, ...]:
        return tuple("/".join(path) for path in self.hidden_paths)

    @property
    def varshape(self) -> tuple[int, ...]:
        """The shape of the units."""
        return tuple(self.hidden_states[0].varshape)

    @property
    def num_state(self) -> int:
        """How many states a unit has."""
        return sum(state.num_state for state in self.hidden_states)

    def transition(self, state: Any, *inputs: Any) -> list[jax.Array]:
        """The new values of the group's states, by the whole step."""
        results = jaxpr_as_fun(self.step.jaxpr)(*self.step.flat(state, inputs))
        return [results[i] for i in self.places]

    def diagonal_jacobian(self, state: Any, *inputs: Any) -> jax.Array:
        """How the states of every unit depend on its own states before: `[*varshape, n, n]`.

        The entry `[u, a, b]` is the derivative of the new state `a` of the unit `u` by its old
        state `b`. What goes through another unit and back takes more than a step, and so is not in
        it; what goes from a unit through a matrix to itself is.
        """
        flat = self.step.flat(state, inputs)

        def transition(joined: jax.Array) -> jax.Array:
            given = list(flat)
            for i, value in zip(self.places, self.split_hidden(joined), strict=True):
                given[i] = value.astype(given[i].dtype)
            results = jaxpr_as_fun(self.step.jaxpr)(*given)
            return self.concat_hidden([results[i] for i in self.places])

        old = self.concat_hidden([flat[i] for i in self.places])
        # A derivative that is given for the way back alone cannot be taken forward; that of a while
        # loop cannot be taken back.
        backward = not CUSTOM_VJP.isdisjoint(primitives(self.step.jaxpr))
        return _blocks(transition, old, self.diagonal, backward)

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

    def __repr__(self) -> str:
        dtype = self.step.states[self.places[0]].dtype
        shape = ",".join(map(str, self.varshape))
        return f"HiddenGroup({', '.join(self.names)}: {dtype}[{shape}])"


def hidden_groups(step: Callable[..., Any], state: Any, *inputs: Any) -> list[HiddenGroup]:
    """The hidden states of a step in groups: those that it connects and whose shapes agree.

    Two states are connected if the new value of one is computed from the old value of the other
    without a product with a matrix or a convolution in between.
    """
    return groups_of(trace(step, state, inputs))


def groups_of(step: Step, states: Sequence[Any] | None = None) -> list[HiddenGroup]:
    """The groups of a traced step; `states` are the objects that a framework has for its own."""
    own = step.states if states is None else tuple(states)
    found = connections(step.jaxpr, {i: i for i in range(len(own))})[: len(own)]
    group = list(range(len(own)))
    for new, depends in enumerate(found):
        for old, how in sorted(depends):
            if how < How.MIXING and _agree(own[old], own[new]):
                group = [group[new] if g == group[old] else g for g in group]
    made = []
    for label in dict.fromkeys(group):
        places = tuple(i for i, g in enumerate(group) if g == label)
        hows = {how for i in places for old, how in found[i] if old in places}
        grouped = any(own[i].num_state > 1 for i in places)
        paths = tuple(step.states[i].path for i in places)
        members = tuple(own[i] for i in places)
        diagonal = hows <= {How.UNITS} and not grouped
        made.append(HiddenGroup(len(made), members, paths, step, places, diagonal))
    return made


def _agree(a: HiddenState, b: HiddenState) -> bool:
    return tuple(a.varshape) == tuple(b.varshape)


def _blocks(
    transition: Callable[[Any], Any], old: jax.Array, diagonal: bool, backward: bool
) -> jax.Array:
    """The derivatives `[*varshape, n, n]` of a unit's new states by its old ones."""
    *shape, count = old.shape
    if backward:
        derivative = jax.vjp(transition, old)[1]
    else:
        derivative = jax.linearize(transition, old)[1]

    def pushed(seed: jax.Array) -> jax.Array:
        return derivative(seed)[0] if backward else derivative(seed)

    if diagonal:
        # Units do not meet, so one pass for all of them gives what one for each would.
        seeds = jnp.zeros((count, *old.shape), old.dtype)
        seeds = seeds.at[jnp.arange(count), ..., jnp.arange(count)].set(1)
        rows = jnp.moveaxis(jax.vmap(pushed)(seeds), 0, -1)
    else:
        units = math.prod(shape)

        def of(unit: jax.Array) -> jax.Array:
            seeds = jnp.zeros((count, units, count), old.dtype)
            seeds = seeds.at[jnp.arange(count), unit, jnp.arange(count)].set(1)
            found = jax.vmap(lambda seed: pushed(seed.reshape(old.shape)))(seeds)
            return found.reshape(count, units, count)[:, unit].T

        rows = jax.lax.map(of, jnp.arange(units), batch_size=min(64, units))
        rows = rows.reshape(*shape, count, count)
    # Forward, a pass has all new states by one old; backward, one new by all old.
    return jnp.swapaxes(rows, -1, -2) if backward else rows
