"""Hidden groups: states of the same units that the dynamics of a step connect.

The states `h` and `c` of an LSTM are one group: for every unit, `c` at one step determines `c` and
`h` at the next. Two layers are two groups although one drives the other, because a matrix connects
them. A state without such dynamics is a group by itself.
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
    """Hidden states of the same units, and the step that updates them; see `hidden_groups`.

    Attributes:
        index: The number of the group.
        hidden_states: The `HiddenState`s, or the objects with which a framework represents them.
        hidden_paths: The path of each state: its keys in the pytree of all states.
        step: The traced step.
        indices: The number of each state among the states of the step.
        diagonal: Whether no unit depends on the states of other units within the group.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> def step(state, x):
        ...     v = 0.9 * state["v"] - state["a"] + x
        ...     return {"v": v, "a": 0.5 * state["a"] + 0.1 * v}, v
        >>> state, x = {"v": jnp.array([0.5, 1.0]), "a": jnp.array([0.0, 0.2])}, jnp.ones(2)
        >>> (group,) = tapax.hidden.hidden_groups(step, state, x)
        >>> group.names, group.varshape, group.num_state
        (('a', 'v'), (2,), 2)
    """

    index: int
    hidden_states: tuple[Any, ...]
    hidden_paths: tuple[StatePath, ...]
    step: Step
    indices: tuple[int, ...]
    diagonal: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the states: their paths, joined by slashes."""
        return tuple(map(name_state, self.hidden_paths))

    @property
    def varshape(self) -> tuple[int, ...]:
        """The shape of the array of units."""
        return tuple(self.hidden_states[0].varshape)

    @property
    def num_state(self) -> int:
        """The number of states of a unit."""
        return sum(state.num_state for state in self.hidden_states)

    def transition(self, state: PyTree, *inputs: PyTree, **keywords: PyTree) -> list[jax.Array]:
        """Run the whole step, and return the new values of the states of the group.

        Args:
            state: A state of the step, with all of its hidden states.
            *inputs: The inputs of the step.
            **keywords: The keyword inputs of the step.

        Returns:
            A list of arrays: the new value of each state of the group.

        Raises:
            HiddenError: If the state or the inputs differ in structure or shape from the example.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> step = lambda h, x: (0.5 * h + x, h)
            >>> (group,) = tapax.hidden.hidden_groups(step, jnp.array([1.0, 2.0]), jnp.ones(2))
            >>> group.transition(jnp.array([1.0, 2.0]), jnp.array([0.0, 4.0]))[0].tolist()
            [0.5, 5.0]
        """
        flat = self.step.flatten(state, join_inputs(inputs, keywords))
        results = _jax.as_function(self.step.jaxpr)(*flat)
        return [results[i] for i in self.indices]

    def diagonal_jacobian(self, state: PyTree, *inputs: PyTree, **keywords: PyTree) -> jax.Array:
        """Differentiate the new states of every unit with respect to its old states.

        A path through another unit and back takes more than one step, so the derivative does not
        contain it. It contains a path from a unit through a matrix to itself.

        Args:
            state: A state of the step, with all of its hidden states.
            *inputs: The inputs of the step.
            **keywords: The keyword inputs of the step.

        Returns:
            An array `[*varshape, num_state, num_state]`. The entry `[u, a, b]` is the derivative of
            the new state `a` of unit `u` with respect to its old state `b`.

        Raises:
            HiddenError: If the state or the inputs differ in structure or shape from the example.

        Example:
            >>> import jax.numpy as jnp, numpy as np, tapax
            >>> def step(state, x):
            ...     v = 0.9 * state["v"] - state["a"] + x
            ...     return {"v": v, "a": 0.5 * state["a"] + 0.1 * v}, v
            >>> state, x = {"v": jnp.array([0.5, 1.0]), "a": jnp.array([0.0, 0.2])}, jnp.ones(2)
            >>> (group,) = tapax.hidden.hidden_groups(step, state, x)
            >>> print(np.asarray(group.diagonal_jacobian(state, x)[0]).round(2))
            [[ 0.4   0.09]
             [-1.    0.9 ]]
        """
        flat = self.step.flatten(state, join_inputs(inputs, keywords))

        def transition(joined: jax.Array) -> jax.Array:
            given = list(flat)
            for i, value in zip(self.indices, self.split_hidden(joined), strict=True):
                given[i] = value.astype(given[i].dtype)
            results = _jax.as_function(self.step.jaxpr)(*given)
            return self.concat_hidden([results[i] for i in self.indices])

        old = self.concat_hidden([flat[i] for i in self.indices])
        # A custom_vjp cannot be differentiated forward, and a while loop cannot be differentiated
        # backward.
        equations = list_equations(self.step.jaxpr)
        backward = any(kind_of(eqn) is Kind.CUSTOM_VJP for eqn in equations)
        return find_blocks(transition, old, self.diagonal, backward)

    def concat_hidden(self, values: Sequence[Any]) -> jax.Array:
        """Join the values of the states into one array.

        Args:
            values: An array for each state of the group.

        Returns:
            An array `[*varshape, num_state]`.

        Raises:
            HiddenError: If the number of arrays differs from the number of states.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> def step(state, x):
            ...     v = 0.9 * state["v"] - state["a"] + x
            ...     return {"v": v, "a": 0.5 * state["a"] + 0.1 * v}, v
            >>> state, x = {"v": jnp.array([0.5, 1.0]), "a": jnp.array([0.0, 0.2])}, jnp.ones(2)
            >>> (group,) = tapax.hidden.hidden_groups(step, state, x)
            >>> group.concat_hidden([jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])]).tolist()
            [[1.0, 3.0], [2.0, 4.0]]
        """
        if len(values) != len(self.hidden_states):
            raise HiddenError(
                f"`values` has {len(values)} arrays, but the group has {len(self.hidden_states)} "
                f"hidden states: {', '.join(self.names)}."
            )
        pairs = zip(self.hidden_states, values, strict=True)
        parts = [jnp.asarray(x) if s.num_state > 1 else jnp.asarray(x)[..., None] for s, x in pairs]
        return jnp.concatenate(parts, axis=-1)

    def split_hidden(self, joined: Any) -> list[jax.Array]:
        """Split an array into the values of the states; the inverse of `concat_hidden`.

        Args:
            joined: An array `[*varshape, num_state]`.

        Returns:
            A list with an array for each state of the group.

        Raises:
            HiddenError: If the last axis does not have the size `num_state`.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> def step(state, x):
            ...     v = 0.9 * state["v"] - state["a"] + x
            ...     return {"v": v, "a": 0.5 * state["a"] + 0.1 * v}, v
            >>> state, x = {"v": jnp.array([0.5, 1.0]), "a": jnp.array([0.0, 0.2])}, jnp.ones(2)
            >>> (group,) = tapax.hidden.hidden_groups(step, state, x)
            >>> [x.tolist() for x in group.split_hidden(jnp.array([[1.0, 3.0], [2.0, 4.0]]))]
            [[1.0, 2.0], [3.0, 4.0]]
        """
        shape = tuple(joined.shape)
        if not shape or shape[-1] != self.num_state:
            raise HiddenError(
                f"`joined` has the shape {list(shape)}, but its last axis must have the size "
                f"{self.num_state}, the number of states of a unit: {', '.join(self.names)}."
            )
        parts, start = [], 0
        for state in self.hidden_states:
            part = joined[..., start : start + state.num_state]
            parts.append(part if state.num_state > 1 else part[..., 0])
            start += state.num_state
        return parts

    def __deepcopy__(self, memo: Any) -> "HiddenGroup":
        return self  # it is immutable

    def __repr__(self) -> str:
        dtype = self.step.states[self.indices[0]].dtype
        shape = ",".join(map(str, self.varshape))
        return f"HiddenGroup({', '.join(self.names)}: {dtype}[{shape}])"


def hidden_groups(
    step: Any, *inputs: PyTree, state: PyTree = None, **keywords: PyTree
) -> list[HiddenGroup]:
    """Group the hidden states that the dynamics of a step connect.

    A step connects two states of one shape if it computes the new value of one from the old value
    of the other without a product with a matrix or a convolution in between.

    Args:
        step: A function `step(state, *inputs) -> (state, out)`, or a recurrent module.
        *inputs: Example arguments: the state and then the inputs if `step` is a function, the
            inputs alone if `step` is a module.
        state: An example state, if `step` is a module. A cell of a framework has a default, its
            initial state.
        **keywords: Example keyword inputs.

    Returns:
        A list of `HiddenGroup`s. The groups, and the states in a group, are in the order of the
        leaves of the state; if a module writes its states in place, they are in the order in which
        it reads them. The methods `transition` and `diagonal_jacobian` of a group take a state like
        the example, or like the state that `functional` returns.

    Raises:
        HiddenError: If `step` is neither a step nor a recurrent module, or if a hidden state is not
            a floating-point array.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> def step(state, x):
        ...     v = 0.9 * state["v"] - state["a"] + x
        ...     return {"v": v, "a": 0.5 * state["a"] + 0.1 * v, "u": jnp.outer(x, x) @ v}, v
        >>> state = {"v": jnp.zeros(2), "a": jnp.zeros(2), "u": jnp.zeros(2)}
        >>> tapax.hidden.hidden_groups(step, state, jnp.array([1.0, 0.5]))
        [HiddenGroup(a, v: float32[2]), HiddenGroup(u: float32[2])]
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
    """Differentiate the new states of units with respect to their old ones: `[*varshape, n, n]`."""
    *shape, count = old.shape
    if backward:
        _, back = jax.vjp(transition, old)
        derivative = lambda seed: back(seed)[0]  # noqa: E731
    else:
        _, derivative = jax.linearize(transition, old)
    if diagonal:
        # Units do not interact, so that one pass computes the derivatives of all units.
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
    # A forward pass differentiates all new states with respect to one old state; a backward pass
    # differentiates one new state with respect to all old states.
    return jnp.swapaxes(rows, -1, -2) if backward else rows
