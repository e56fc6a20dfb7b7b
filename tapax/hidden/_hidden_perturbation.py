"""Perturbations of hidden states: a variable for each, added where the step defines the state.

`h = f(x)` becomes `h = f(x) + p`, and everything that the step computes from `h` sees the sum. At
zero nothing changes, and the derivative of a loss by `p` is the derivative by the hidden state,
including what goes through the output of the step.

>>> import jax, jax.numpy as jnp, tapax
>>> def step(state, x):
...     h = jnp.tanh(state["h"] + x)
...     return {"h": h}, 3 * h
>>> state, x = {"h": jnp.zeros(2)}, jnp.ones(2)
>>> perturbation = tapax.hidden.add_hidden_perturbation(step, state, x)
>>> perturbation
HiddenPerturbation(h: float32[2])
>>> def loss(p):
...     new, out = perturbation(p, state, x)
...     return jnp.sum(new["h"]) + jnp.sum(out)
>>> jax.grad(loss)(perturbation.zeros())["h"].tolist()
[4.0, 4.0]

Fields and methods with lists are in the order of `perturb_vars`; `zeros`, the call and `by_group`
go by name. A state that a module writes several times has a variable for every write:
`h` the first, `h@1` the second.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core.primitives import convert_element_type_p

from tapax import _jax
from tapax._frameworks.recurrent_cells import (
    HiddenError,
    StatefulProgram,
    StatePath,
    check_names,
    find_written_name,
    join_inputs,
    name_state,
)
from tapax._frameworks.registry import stateful_program
from tapax._jax import Atom, Equation, PyTree, Var
from tapax._jaxpr.evaluate import evaluate
from tapax._jaxpr.rewrite import rewrite
from tapax._sites import as_array
from tapax.hidden._definitions import Definition
from tapax.hidden._groups import HiddenGroup
from tapax.hidden._pure_step import trace_step_or_module
from tapax.hidden._state_writes import WrittenProgram, find_named_writes, find_step_writes, retrace
from tapax.hidden._step import Step

_interfaces: WeakKeyDictionary[Any, Step | StatefulProgram] = WeakKeyDictionary()
"""The traced step of every perturbed program: it flattens arguments and joins results."""


class _PerturbationFields(NamedTuple):
    perturb_vars: Sequence[Any]
    perturb_hidden_paths: Sequence[StatePath]
    perturb_hidden_states: Sequence[Any]
    perturb_jaxpr: Any


class HiddenPerturbation(_PerturbationFields):
    """A step with a perturbation variable for every write of a hidden state.

    `perturb_jaxpr` takes what the program of the step takes, and then the `perturb_vars`. The state
    `perturb_hidden_states[i]`, at `perturb_hidden_paths[i]`, is what `perturb_vars[i]` is added to.
    """

    def eval_jaxpr(self, inputs: Sequence[Any], perturb_data: Sequence[Any]) -> list[jax.Array]:
        """The results of the program, given its inputs and one array for every variable."""
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
        """Zeros, one array for every variable."""
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in self.perturb_vars]

    def perturb_data_to_hidden_group_data(
        self, perturb_data: Sequence[Any], hidden_groups: Sequence[HiddenGroup]
    ) -> list[jax.Array]:
        """The arrays of the variables, or their gradients, as one `[*varshape, n]` for each group.

        Of a state that is written several times, the last write counts. Arrays may be of any type;
        of a quantity with a unit the mantissa is taken.
        """
        data = [_mantissa(x) for x in perturb_data]
        paths = map(tuple, self.perturb_hidden_paths)
        last = dict(zip(paths, self._checked(data, any_type=True), strict=True))
        for group in hidden_groups:
            for path in group.hidden_paths:
                if tuple(path) not in last:
                    known = ", ".join(repr(name_state(p)) for p in last)
                    raise HiddenError(
                        f"`hidden_groups` has a group with the hidden state {name_state(path)!r}, "
                        f"at the path {tuple(path)}, which is not perturbed: {known} are."
                    )
        return [g.concat_hidden([last[tuple(p)] for p in g.hidden_paths]) for g in hidden_groups]

    def dict(self) -> dict[str, Any]:
        """The fields by name."""
        return self._asdict()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the variables, in order."""
        counts: Counter[str] = Counter()
        names = []
        for name in map(name_state, self.perturb_hidden_paths):
            names.append(f"{name}@{counts[name]}" if counts[name] else name)
            counts[name] += 1
        return tuple(names)

    def zeros(self) -> dict[str, jax.Array]:
        """Zeros by name."""
        return dict(zip(self.names, self.init_perturb_data(), strict=True))

    def __call__(
        self, perturbations: Mapping[str, Any], state: PyTree, *inputs: PyTree, **keywords: PyTree
    ) -> tuple[Any, Any]:
        """The step, `(state, out)`, with perturbations by name; those not given are zero."""
        data = self._listed(perturbations)
        interface = _interfaces.get(self.perturb_jaxpr)
        if interface is None:
            raise HiddenError(
                "The `perturb_jaxpr` of this HiddenPerturbation is not from "
                "add_hidden_perturbation, so nothing tells how its results make a state. Use "
                "eval_jaxpr."
            )
        flat = interface.flatten(state, join_inputs(inputs, keywords))
        return interface.join(self._run(*flat, *data))

    def by_group(
        self, perturbations: Mapping[str, Any], hidden_groups: Sequence[HiddenGroup]
    ) -> list[jax.Array]:
        """What is given by name, as one array for each group; what is not given is zero."""
        return self.perturb_data_to_hidden_group_data(self._listed(perturbations), hidden_groups)

    def __deepcopy__(self, memo: Any) -> HiddenPerturbation:
        """Copies the lists. A program, its variables and the states are known by identity."""
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
        # Evaluated, and not compiled, as other functions are: whoever runs it often jits the whole.
        bind = lambda _, eqn, values: _jax.bind_equation(eqn, values)  # noqa: E731
        return evaluate(self.perturb_jaxpr, args, bind)

    def _listed(self, perturbations: Mapping[str, Any]) -> list[Any]:
        if not isinstance(perturbations, Mapping):
            raise TypeError(
                "Perturbations are given as a dict by the names of hidden states, but "
                f"`perturbations` is of type {type(perturbations).__name__}."
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
    """The array in a quantity with a unit, which is a pytree of one array."""
    leaves = jax.tree.leaves(value)
    return leaves[0] if len(leaves) == 1 else value


def add_hidden_perturbation(
    step: Any, *inputs: PyTree, state: PyTree = None, **keywords: PyTree
) -> HiddenPerturbation:
    """Adds a perturbation to every hidden state of a step.

    `step` is a function, given with an example of its arguments: `add_hidden_perturbation(step,
    state, *inputs)` for `step(state, *inputs) -> (state, out)`, where the state is any pytree of
    floating-point arrays. Or it is a recurrent module with an example of its inputs; a cell of a
    framework starts from its own state unless `state` is given. `keywords` are inputs by keyword.

    The program, `perturb_jaxpr`, takes the leaves of `(state, *inputs)`, those of inputs by keyword
    in the order of their names, and then the perturbations, and returns the leaves of
    `(state, out)`. For a module that writes its hidden states in place, it takes the inputs and
    then the values of all states of the module, in the order in which the module reads them, and
    returns the output and then those values.
    """
    inputs = join_inputs(inputs, keywords)
    program = stateful_program(step, inputs, state)
    if program is not None:
        return perturb_writes(find_named_writes(program), program)
    traced = trace_step_or_module(step, inputs, state)
    return perturb_writes(find_step_writes(traced), traced)


def perturb_writes(
    program: WrittenProgram, interface: Step | StatefulProgram
) -> HiddenPerturbation:
    """Adds a variable to each definition of a program."""
    writes = program.writes
    made = _edit(program) or retrace(program.jaxpr, program.definitions, writes)
    perturbation = HiddenPerturbation(
        _jax.open_jaxpr(made).invars[-len(writes) :],
        [w.path for w in writes],
        [w.state for w in writes],
        made,
    )
    _interfaces[made] = interface
    return perturbation


def _edit(program: WrittenProgram) -> Any | None:
    """The same by putting equations into the program: several times faster, if it is as simple."""
    jaxpr, found = program.jaxpr, program.definitions
    definitions = [*found.at.values(), *found.results.values()]
    if found.within or any(d.path for d in definitions):
        return None
    sums = {w.name: _sum(i, w.shape, w.dtype) for i, w in enumerate(program.writes)}
    variables = [equation.invars[1] for equation in sums.values()]

    def add(definition: Definition, value: Atom) -> Equation:
        equation = sums[definition.key]
        value = definition.root if definition.shared else value
        return equation.replace(invars=[value, equation.invars[1]])

    def visit(eqn: Equation, names: dict[Var, Atom]) -> Iterator[Equation]:
        if _does_nothing(eqn):
            names[eqn.outvars[0]] = eqn.invars[0]
        else:
            yield eqn
        for variable in eqn.outvars:
            if variable in found.at:
                added = add(found.at[variable], names.get(variable, variable))
                names[variable] = added.outvars[0]
                yield added

    edited = rewrite(jaxpr, visit, more_inputs=variables)
    inner = _jax.open_jaxpr(edited)
    eqns, outvars = list(inner.eqns), list(inner.outvars)
    for index, definition in found.results.items():
        if definition.root is None or definition.shared:
            eqns.append(add(definition, outvars[index]))
            outvars[index] = eqns[-1].outvars[0]
    return _jax.with_open_jaxpr(edited, inner.replace(eqns=eqns, outvars=outvars))


def _does_nothing(eqn: Equation) -> bool:
    if eqn.primitive is convert_element_type_p:
        return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    return find_written_name(eqn) is not None


@functools.lru_cache(maxsize=256)
def _sum(number: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """An equation that adds two values of a type, with variables that no other number has."""
    del number
    like = jax.ShapeDtypeStruct(shape, dtype)
    # A function of its own: what JAX traced for another would have the other's variables.
    made = jax.make_jaxpr(lambda x, y: x + y)(like, like)
    (eqn,) = _jax.open_jaxpr(made).eqns
    return eqn
