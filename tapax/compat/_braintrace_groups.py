"""Hidden groups in the form of braintrace: see `compat.braintrace`.

Two hidden states are in one group if the step computes one from the other without a product with a
matrix in between, their units have the same shape, and no item of a list separates their paths. The
transition of a group contains the equations that depend on its old states in that way; all other
values that they read are its inputs, `transition_jaxpr_constvars`.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import brainstate
import brainunit
import jax

from tapax import _jax
from tapax._frameworks.recurrent_cells import (
    HiddenError,
    StatefulProgram,
    StateObject,
    StatePath,
    find_written_name,
)
from tapax._jax import Atom, Equation, OpenJaxpr, Value, Var
from tapax._jaxpr.bodies import list_equations
from tapax._jaxpr.dataflow import computed_from
from tapax._jaxpr.evaluate import evaluate, evaluate_equations, inline
from tapax._jaxpr.kinds import Kind, kind_of
from tapax._jaxpr.rewrite import rewrite
from tapax.hidden._connections import Dependence, find_connections, is_mixing
from tapax.hidden._groups import find_blocks


class HiddenGroup(NamedTuple):
    """Hidden states of the same units, and the transition that updates them.

    `find_hidden_groups_from_module` returns it.

    Attributes:
        index: The number of the group.
        hidden_paths: The path of each state.
        hidden_states: The state objects of brainstate.
        hidden_invars: The variables of the old states in `transition_jaxpr`.
        hidden_outvars: The variables of the new states in `transition_jaxpr`.
        transition_jaxpr: The program from its inputs and the old states to the new states.
        transition_jaxpr_constvars: The variables of its inputs, which come first.
        is_diagonal_recurrence: Whether products with matrices are inputs of the transition, and not
            a part of it.

    Example:
        >>> import brainstate
        >>> from tapax.compat import braintrace
        >>> lstm = braintrace.nn.LSTMCell(3, 4)
        >>> _ = brainstate.nn.init_all_states(lstm)
        >>> inputs = brainstate.random.randn(3)
        >>> (group,), _ = braintrace.find_hidden_groups_from_module(lstm, inputs)
        >>> group.hidden_paths, group.varshape, group.num_state
        ([('h',), ('c',)], (4,), 2)
    """

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    hidden_paths: list[StatePath]
    hidden_states: list[Any]
    hidden_invars: list[Any]
    hidden_outvars: list[Any]
    transition_jaxpr: Any
    transition_jaxpr_constvars: list[Any]
    is_diagonal_recurrence: bool = True

    @property
    def varshape(self) -> tuple[int, ...]:
        """The shape of the array of units."""
        return self.hidden_states[0].varshape

    @property
    def num_state(self) -> int:
        """The number of states of a unit."""
        return sum(state.num_state for state in self.hidden_states)

    def check_consistent_varshape(self) -> None:
        """Check that the units of all hidden states have the same shape.

        Raises:
            HiddenError: If they have different shapes.

        Example:
            >>> import brainstate
            >>> from tapax.compat import braintrace
            >>> gru = braintrace.nn.GRUCell(3, 4)
            >>> _ = brainstate.nn.init_all_states(gru)
            >>> inputs = brainstate.random.randn(3)
            >>> (group,), _ = braintrace.find_hidden_groups_from_module(gru, inputs)
            >>> group.check_consistent_varshape()
        """
        shapes = {tuple(state.varshape): None for state in self.hidden_states}
        if len(shapes) > 1:
            raise HiddenError(
                f"The hidden states {self.hidden_paths} of a group have units of different shapes: "
                f"{', '.join(map(str, shapes))}."
            )

    def transition(self, hidden_vals: Sequence[Any], input_vals: Sequence[Any]) -> list[Any]:
        """Compute the new states from the old states and the inputs of the transition.

        Args:
            hidden_vals: An array for each of `hidden_invars`.
            input_vals: An array for each of `transition_jaxpr_constvars`.

        Returns:
            A list of arrays: the new value of each state.

        Raises:
            ValueError: If the number of arrays differs from the number of variables.

        Example:
            >>> import brainstate, jax.numpy as jnp
            >>> from tapax.compat import braintrace
            >>> gru = braintrace.nn.GRUCell(3, 4)
            >>> _ = brainstate.nn.init_all_states(gru)
            >>> inputs = brainstate.random.randn(3)
            >>> (group,), _ = braintrace.find_hidden_groups_from_module(gru, inputs)
            >>> given = [jnp.ones(v.aval.shape) for v in group.transition_jaxpr_constvars]
            >>> [x.shape for x in group.transition([jnp.ones(4)], given)]
            [(4,)]
        """
        return evaluate(self.transition_jaxpr, [*input_vals, *hidden_vals])

    def diagonal_jacobian(self, hidden_vals: Sequence[Any], input_vals: Sequence[Any]) -> jax.Array:
        """Differentiate the new states of every unit with respect to its old states.

        Args:
            hidden_vals: An array for each of `hidden_invars`.
            input_vals: An array for each of `transition_jaxpr_constvars`.

        Returns:
            An array `[*varshape, num_state, num_state]`, whose entry `[u, a, b]` is the derivative
            of the new state `a` of unit `u` with respect to its old state `b`.

        Raises:
            HiddenError: If the number of `hidden_vals` differs from the number of states.

        Example:
            >>> import brainstate, jax.numpy as jnp
            >>> from tapax.compat import braintrace
            >>> gru = braintrace.nn.GRUCell(3, 4)
            >>> _ = brainstate.nn.init_all_states(gru)
            >>> inputs = brainstate.random.randn(3)
            >>> (group,), _ = braintrace.find_hidden_groups_from_module(gru, inputs)
            >>> given = [jnp.ones(v.aval.shape) for v in group.transition_jaxpr_constvars]
            >>> group.diagonal_jacobian([jnp.ones(4)], given).shape
            (4, 1, 1)
        """

        def run(joined: jax.Array) -> Any:
            return self.concat_hidden(self.transition(self.split_hidden(joined), input_vals))

        positions = range(len(input_vals), len(input_vals) + len(hidden_vals))
        found = find_connections(self.transition_jaxpr, {i: i for i in positions})
        units_alone = all(how is Dependence.UNITS for facts in found for _, how in facts)
        equations = list_equations(self.transition_jaxpr)
        backward = any(kind_of(eqn) is Kind.CUSTOM_VJP for eqn in equations)
        return find_blocks(run, self.concat_hidden(hidden_vals), units_alone, backward)

    def concat_hidden(self, splitted_hid_vals: Iterable[Any]) -> Any:
        """Join the values of the states into one array.

        Args:
            splitted_hid_vals: An array for each state of the group.

        Returns:
            An array `[*varshape, num_state]`.

        Raises:
            HiddenError: If the number of arrays differs from the number of states.

        Example:
            >>> import brainstate, jax.numpy as jnp
            >>> from tapax.compat import braintrace
            >>> lstm = braintrace.nn.LSTMCell(3, 2)
            >>> _ = brainstate.nn.init_all_states(lstm)
            >>> inputs = brainstate.random.randn(3)
            >>> (group,), _ = braintrace.find_hidden_groups_from_module(lstm, inputs)
            >>> group.concat_hidden([jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])]).tolist()
            [[1.0, 3.0], [2.0, 4.0]]
        """
        values = list(splitted_hid_vals)
        if len(values) != len(self.hidden_states):
            raise HiddenError(
                f"Hidden group {self.index} has {len(self.hidden_states)} hidden states, "
                f"{self.hidden_paths}, but `concat_hidden` was given {len(values)} values. Pass "
                "one for each state."
            )
        pairs = zip(self.hidden_states, values, strict=True)
        parts = [x if _is_stacked(s) else brainunit.math.expand_dims(x, axis=-1) for s, x in pairs]
        return brainunit.math.concatenate(parts, axis=-1)

    def split_hidden(self, concat_hid_vals: Any) -> list[Any]:
        """Split an array into the values of the states; the inverse of `concat_hidden`.

        Args:
            concat_hid_vals: An array `[*varshape, num_state]`.

        Returns:
            A list with an array for each state of the group.

        Raises:
            HiddenError: If the last axis does not have the size `num_state`.

        Example:
            >>> import brainstate, jax.numpy as jnp
            >>> from tapax.compat import braintrace
            >>> lstm = braintrace.nn.LSTMCell(3, 2)
            >>> _ = brainstate.nn.init_all_states(lstm)
            >>> inputs = brainstate.random.randn(3)
            >>> (group,), _ = braintrace.find_hidden_groups_from_module(lstm, inputs)
            >>> [x.tolist() for x in group.split_hidden(jnp.array([[1.0, 3.0], [2.0, 4.0]]))]
            [[1.0, 2.0], [3.0, 4.0]]
        """
        shape = brainunit.math.shape(concat_hid_vals)
        if not shape or shape[-1] != self.num_state:
            raise HiddenError(
                f"Hidden group {self.index} has {self.num_state} states, of {self.hidden_paths}, "
                f"in the last axis, but `split_hidden` was given an array of shape {shape}."
            )
        parts, start = [], 0
        for state in self.hidden_states:
            part = concat_hid_vals[..., start : start + state.num_state]
            parts.append(part if _is_stacked(state) else part[..., 0])
            start += state.num_state
        return parts

    def dict(self) -> dict[str, Any]:
        """Return the attributes by name.

        Returns:
            A dict of all attributes.

        Example:
            >>> import brainstate
            >>> from tapax.compat import braintrace
            >>> gru = braintrace.nn.GRUCell(3, 4)
            >>> _ = brainstate.nn.init_all_states(gru)
            >>> inputs = brainstate.random.randn(3)
            >>> (group,), _ = braintrace.find_hidden_groups_from_module(gru, inputs)
            >>> group.dict()["hidden_paths"]
            [('h',)]
        """
        return self._asdict()

    def __repr__(self) -> str:
        paths = ", ".join(map(str, self.hidden_paths))
        return f"HiddenGroup({self.index}: {paths}, units of shape {tuple(self.varshape)})"


def _is_stacked(state: Any) -> bool:
    """Return whether the last axis of a state contains several states of every unit."""
    return isinstance(state, brainstate.HiddenGroupState)


@dataclasses.dataclass(frozen=True)
class _ProgramState:
    """A hidden state of a program: its variables before and after."""

    state: StateObject
    old: Var
    new: Atom

    def may_join(self, other: "_ProgramState") -> bool:
        """Return whether both have units of one shape, and no item of a list separates paths."""
        same = tuple(self.state.object.varshape) == tuple(other.state.object.varshape)
        parting = next(
            (p for p in zip(self.state.path, other.state.path, strict=False) if p[0] != p[1]), ()
        )
        return same and not any(isinstance(key, int) for key in parting)


def find_groups(program: StatefulProgram, include_recurrent_mixing: bool) -> list[HiddenGroup]:
    """Find the groups: those with a transition first, each in the order of the states."""
    jaxpr = rewrite(inline(program.jaxpr, Kind.JIT), _drop_name)
    inner = _jax.open_jaxpr(jaxpr)
    states = _list_states(program, inner)
    followed = _find_followed(inner, states, include_recurrent_mixing)
    reached = [computed_from(followed, [state.old]) for state in states]
    label = list(range(len(states)))
    dynamic: set[int] = set()
    for old, before in enumerate(states):
        for new, after in enumerate(states):
            copied = after.new is before.old and old != new
            computed = _is_in(after.new, reached[old]) and after.new is not before.old
            if (copied or computed) and before.may_join(after):
                dynamic |= {old, new}
                label = [label[old] if known == label[new] else known for known in label]
    members = [[i for i, known in enumerate(label) if known == one] for one in dict.fromkeys(label)]
    members.sort(key=dynamic.isdisjoint)
    return [
        _make_group(index, followed, [states[i] for i in group], not include_recurrent_mixing)
        for index, group in enumerate(members)
    ]


def _drop_name(eqn: Equation, names: dict[Var, Atom]) -> Iterable[Equation]:
    """Remove the equations that name writes."""
    if find_written_name(eqn) is None:
        return [eqn]
    names[eqn.outvars[0]] = eqn.invars[0]
    return []


def _list_states(program: StatefulProgram, inner: OpenJaxpr) -> list[_ProgramState]:
    count = sum(state.num_leaves for state in program.states)
    olds, news = inner.invars[len(inner.invars) - count :], inner.outvars[-count:]
    found, index = [], 0
    for state in program.states:
        if state.hidden_type is not None:
            found.append(_ProgramState(state, olds[index], news[index]))
        index += state.num_leaves
    return found


def _find_followed(
    inner: OpenJaxpr, states: Iterable[_ProgramState], through_mixing: bool
) -> list[Equation]:
    """Find the equations that depend on hidden states without mixing their units."""
    reached = {state.old for state in states}
    followed = []
    for eqn in inner.eqns:
        positions = [i for i, v in enumerate(eqn.invars) if _is_in(v, reached)]
        stops = eqn.primitive.name == "stop_gradient"
        if positions and not stops and (through_mixing or not is_mixing(eqn, positions)):
            followed.append(eqn)
            reached.update(eqn.outvars)
    return followed


def _is_in(atom: Atom, variables: set[Var]) -> bool:
    return not isinstance(atom, _jax.Literal) and atom in variables


def _make_group(
    index: int, followed: Sequence[Equation], states: Sequence[_ProgramState], diagonal: bool
) -> HiddenGroup:
    olds = [state.old for state in states]
    reached = computed_from(followed, olds)
    # Go backwards, and collect the equations that the new states need.
    needed = {s.new for s in states if not isinstance(s.new, _jax.Literal)}
    eqns: list[Equation] = []
    for eqn in reversed(followed):
        computes = any(_is_in(v, reached) for v in eqn.invars)
        if computes and not needed.isdisjoint(eqn.outvars):
            eqns.insert(0, eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, _jax.Literal))
    made = {v for eqn in eqns for v in eqn.outvars}
    read = [v for eqn in eqns for v in eqn.invars] + [state.new for state in states]
    known = {*made, *olds}
    given = list(
        dict.fromkeys(v for v in read if not isinstance(v, _jax.Literal) and v not in known)
    )

    def run(*values: Value) -> list[Value]:
        env = dict(zip((*given, *olds), values, strict=True))
        evaluate_equations(eqns, env)
        news = [state.new for state in states]
        return [_jax.literal_value(v) if isinstance(v, _jax.Literal) else env[v] for v in news]

    jaxpr = jax.make_jaxpr(run)(*(v.aval for v in (*given, *olds)))
    inner = _jax.open_jaxpr(jaxpr)
    return HiddenGroup(
        index,
        [tuple(state.state.path) for state in states],
        [state.state.object for state in states],
        list(inner.invars[len(given) :]),
        list(inner.outvars),
        inner,
        list(inner.invars[: len(given)]),
        diagonal,
    )
