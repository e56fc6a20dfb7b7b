"""`HiddenPerturbation`: a step with a perturbation variable for every write of a hidden state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax.core import Tracer

from tapax import _jax
from tapax._frameworks.recurrent_cells import (
    HiddenError,
    StatefulProgram,
    StatePath,
    check_names,
    join_inputs,
    name_state,
)
from tapax._jax import PyTree
from tapax._jaxpr.evaluate import evaluate
from tapax._sites import as_array
from tapax.hidden._groups import HiddenGroup
from tapax.hidden._step import Step

interfaces: WeakKeyDictionary[Any, Step | StatefulProgram] = WeakKeyDictionary()
"""The traced step of every perturbed program, which flattens arguments and joins results."""


class _PerturbationFields(NamedTuple):
    perturb_vars: Sequence[Any]
    perturb_hidden_paths: Sequence[StatePath]
    perturb_hidden_states: Sequence[Any]
    perturb_jaxpr: Any


class HiddenPerturbation(_PerturbationFields):
    """A step with a perturbation variable for every write of a hidden state.

    `add_hidden_perturbation` returns it. `perturbation(perturbations, state, *inputs)` runs the
    step and returns `(state, out)`; `perturbations` is a dict of arrays by name, and a name that it
    lacks counts as zero. A state that a module writes several times has a variable for every write:
    the first is `h`, the second `h@1`.

    Calls, `zeros` and `by_group` use names. All other methods use lists, in the order of
    `perturb_vars`.

    Attributes:
        perturb_vars: The perturbation variables of `perturb_jaxpr`.
        perturb_hidden_paths: The path of the state to which each variable is added.
        perturb_hidden_states: The `HiddenState` to which each variable is added, or the object with
            which a framework represents it.
        perturb_jaxpr: The program. It takes the operands of the step, and then the `perturb_vars`.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> step = lambda state, x: ({"h": 0.5 * state["h"] + x}, x)
        >>> state, x = {"h": jnp.array([1.0, 2.0])}, jnp.array([0.0, 1.0])
        >>> perturbation = tapax.hidden.add_hidden_perturbation(step, state, x)
        >>> perturbation.names
        ('h',)
        >>> new, out = perturbation({"h": jnp.array([10.0, 0.0])}, state, x)
        >>> new["h"].tolist()
        [10.5, 2.0]
    """

    def eval_jaxpr(self, inputs: Sequence[Any], perturb_data: Sequence[Any]) -> list[jax.Array]:
        """Run the program on flat inputs, with one array for every perturbation variable.

        Args:
            inputs: The operands of the step: the leaves of its state and inputs.
            perturb_data: An array for each of `perturb_vars`.

        Returns:
            A list of arrays: the leaves of the new state, then those of the output.

        Raises:
            HiddenError: If the arrays differ in number, shape or dtype from those of the program.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> step = lambda h, x: (0.5 * h + x, 2 * h)
            >>> perturbation = tapax.hidden.add_hidden_perturbation(step, 1.0, 3.0)
            >>> [float(x) for x in perturbation.eval_jaxpr([1.0, 3.0], [10.0])]
            [13.5, 2.0]
        """
        inputs = list(inputs)
        perturb_data = self._checked(perturb_data)
        expected = _jax.open_jaxpr(self.perturb_jaxpr).invars[: -len(perturb_data)]
        if len(inputs) != len(expected):
            raise HiddenError(
                f"`inputs` has {len(inputs)} arrays, but the program of the step takes "
                f"{len(expected)}."
            )
        for i, (x, variable) in enumerate(zip(inputs, expected, strict=True)):
            if jnp.shape(x) != variable.aval.shape:
                raise HiddenError(
                    f"`inputs[{i}]` has shape {list(jnp.shape(x))}, but the program of the step "
                    f"takes one of shape {list(variable.aval.shape)}."
                )
        return self._run(*inputs, *perturb_data)

    def init_perturb_data(self) -> list[jax.Array]:
        """Make zeros, one array for every perturbation variable.

        Returns:
            A list of arrays, in the order of `perturb_vars`.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> step = lambda h, x: (0.5 * h + x, h)
            >>> perturbation = tapax.hidden.add_hidden_perturbation(step, jnp.ones(2), 3.0)
            >>> [x.tolist() for x in perturbation.init_perturb_data()]
            [[0.0, 0.0]]
        """
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in self.perturb_vars]

    def perturb_data_to_hidden_group_data(
        self, perturb_data: Sequence[Any], hidden_groups: Sequence[HiddenGroup]
    ) -> list[jax.Array]:
        """Join the arrays of the variables, or their gradients, by hidden group.

        For a state with several writes, the last write counts. For a quantity with a unit, the
        mantissa counts.

        Args:
            perturb_data: An array of any dtype for each of `perturb_vars`.
            hidden_groups: The list of groups that `hidden_groups`, or braintrace, returns.

        Returns:
            A list with an array `[*varshape, num_state]` for each group.

        Raises:
            HiddenError: If the arrays differ in number or shape from `perturb_vars`, or if a state
                of a group is not perturbed.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> def step(state, x):
            ...     v = 0.9 * state["v"] - state["a"] + x
            ...     return {"v": v, "a": 0.5 * state["a"] + 0.1 * v}, v
            >>> state, x = {"v": jnp.array([0.5, 1.0]), "a": jnp.array([0.0, 0.2])}, jnp.ones(2)
            >>> groups = tapax.hidden.hidden_groups(step, state, x)
            >>> perturbation = tapax.hidden.add_hidden_perturbation(step, state, x)
            >>> data = [jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])]
            >>> perturbation.perturb_data_to_hidden_group_data(data, groups)[0].tolist()
            [[1.0, 3.0], [2.0, 4.0]]
        """
        data = [_mantissa(x) for x in perturb_data]
        paths = map(tuple, self.perturb_hidden_paths)
        last = dict(zip(paths, self._checked(data, any_type=True), strict=True))
        for group in hidden_groups:
            for path in group.hidden_paths:
                if tuple(path) not in last:
                    known = ", ".join(repr(name_state(p)) for p in last)
                    raise HiddenError(
                        f"`hidden_groups` contains the hidden state {name_state(path)!r}, at the "
                        f"path {tuple(path)}, which has no perturbation: the perturbed states are "
                        f"{known}."
                    )
        return [g.concat_hidden([last[tuple(p)] for p in g.hidden_paths]) for g in hidden_groups]

    def dict(self) -> dict[str, Any]:
        """Return the attributes by name.

        Returns:
            A dict of the four attributes.

        Example:
            >>> import tapax
            >>> step = lambda h, x: (0.5 * h + x, h)
            >>> perturbation = tapax.hidden.add_hidden_perturbation(step, 1.0, 3.0)
            >>> perturbation.dict()["perturb_hidden_paths"]
            [('h',)]
        """
        return self._asdict()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the perturbation variables, in order."""
        counts: Counter[str] = Counter()
        names = []
        for name in map(name_state, self.perturb_hidden_paths):
            names.append(f"{name}@{counts[name]}" if counts[name] else name)
            counts[name] += 1
        return tuple(names)

    def zeros(self) -> dict[str, jax.Array]:
        """Make zeros for every perturbation variable, by name.

        Returns:
            A dict of arrays.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> step = lambda state, x: ({"h": 0.5 * state["h"] + x}, x)
            >>> state, x = {"h": jnp.array([1.0, 2.0])}, jnp.array([0.0, 1.0])
            >>> perturbation = tapax.hidden.add_hidden_perturbation(step, state, x)
            >>> {name: x.tolist() for name, x in perturbation.zeros().items()}
            {'h': [0.0, 0.0]}
        """
        return dict(zip(self.names, self.init_perturb_data(), strict=True))

    def __call__(
        self, perturbations: Mapping[str, Any], state: PyTree, *inputs: PyTree, **keywords: PyTree
    ) -> tuple[Any, Any]:
        """Run the step with perturbations by name; return `(state, out)`."""
        data = self._listed(perturbations)
        interface = interfaces.get(self.perturb_jaxpr)
        if interface is None:
            raise HiddenError(
                "The `perturb_jaxpr` of this HiddenPerturbation does not come from "
                "add_hidden_perturbation, so the structure of its state is not known. Use "
                "eval_jaxpr."
            )
        flat = interface.flatten(state, join_inputs(inputs, keywords))
        return interface.join(self._run(*flat, *data))

    def by_group(
        self, perturbations: Mapping[str, Any], hidden_groups: Sequence[HiddenGroup]
    ) -> list[jax.Array]:
        """Join perturbations by name, or their gradients, by hidden group.

        Args:
            perturbations: A dict of arrays by name; a name that it lacks counts as zero.
            hidden_groups: The list of groups that `hidden_groups` returns.

        Returns:
            A list with an array `[*varshape, num_state]` for each group.

        Raises:
            TypeError: If `perturbations` is not a mapping.
            HiddenError: If a name is not in `names`, if an array differs in shape or dtype from its
                hidden state, or if a state of a group is not perturbed.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> def step(state, x):
            ...     v = 0.9 * state["v"] - state["a"] + x
            ...     return {"v": v, "a": 0.5 * state["a"] + 0.1 * v}, v
            >>> state, x = {"v": jnp.array([0.5, 1.0]), "a": jnp.array([0.0, 0.2])}, jnp.ones(2)
            >>> groups = tapax.hidden.hidden_groups(step, state, x)
            >>> perturbation = tapax.hidden.add_hidden_perturbation(step, state, x)
            >>> perturbation.by_group({"v": jnp.array([3.0, 4.0])}, groups)[0].tolist()
            [[0.0, 3.0], [0.0, 4.0]]
        """
        return self.perturb_data_to_hidden_group_data(self._listed(perturbations), hidden_groups)

    def __deepcopy__(self, memo: Any) -> HiddenPerturbation:
        """Copy only the lists: the program, its variables and the states compare by identity."""
        del memo
        variables, paths, states, program = self
        return HiddenPerturbation(list(variables), list(paths), list(states), program)

    def __repr__(self) -> str:
        types = (f"{n}: {v.aval.str_short()}" for n, v in self._named())
        return f"HiddenPerturbation({', '.join(types)})"

    def _named(self) -> Any:
        return zip(self.names, self.perturb_vars, strict=True)

    def _run(self, *args: Any) -> list[Any]:
        if any(isinstance(x, Tracer) for x in args):
            return _jax.as_function(self.perturb_jaxpr)(*args)
        # Evaluate eagerly, as JAX does for plain functions: users jit a function that runs often.
        bind = lambda _, eqn, values: _jax.bind_equation(eqn, values)  # noqa: E731
        return evaluate(self.perturb_jaxpr, args, bind)

    def _listed(self, perturbations: Mapping[str, Any]) -> list[Any]:
        if not isinstance(perturbations, Mapping):
            raise TypeError(
                "`perturbations` must be a dict by the names of hidden states, but is of type "
                f"{type(perturbations).__name__}."
            )
        check_names(perturbations, self.names)
        zeros = {n: v for n, v in self.zeros().items() if n not in perturbations}
        return self._checked([{**zeros, **perturbations}[n] for n in self.names])

    def _checked(self, perturb_data: Sequence[Any], any_type: bool = False) -> list[Any]:
        data = list(perturb_data)
        if len(data) != len(self.perturb_vars):
            raise HiddenError(
                f"The length of the perturb data is not correct: `perturb_data` has {len(data)} "
                f"arrays, but there are {len(self.perturb_vars)} perturbation variables, one for "
                f"each of {', '.join(map(repr, self.names))}."
            )
        data = [
            as_array(x, f"The perturbation of {n!r}") for n, x in zip(self.names, data, strict=True)
        ]
        for (name, variable), x in zip(self._named(), data, strict=True):
            for what, given, wanted in (
                ("shape", list(x.shape), list(variable.aval.shape)),
                ("type", any_type or x.dtype, any_type or variable.aval.dtype),
            ):
                if given != wanted:
                    raise HiddenError(
                        f"The perturbation of {name!r} has {what} {given}, but the hidden state "
                        f"has {what} {wanted}."
                    )
        return data


def _mantissa(value: Any) -> Any:
    """Return the array in a quantity with a unit, which is a pytree of one array."""
    leaves = jax.tree.leaves(value)
    return leaves[0] if len(leaves) == 1 else value
