"""A step as one flat program, cut where parameters meet data, and evaluated with changes.

The equations that depend on parameters alone (a transpose, a concatenation of kernels, the `exp` of
a decay) compute the *weights*: `FlatStep.first`. All others are the *body*. A weight is a result of
the first part that the body uses; rules keep traces of weights, and pull their gradients back to
the parameters through the first part.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core.primitives import dot_general_p
from jax.tree_util import keystr, tree_leaves_with_path

from tapax import _jax
from tapax._frameworks.recurrent_cells import HiddenError
from tapax._jax import AbstractValue, Atom, Equation, Jaxpr, PyTree, Value
from tapax._jaxpr.evaluate import bind_in_context, evaluate_equations, inline, read
from tapax._jaxpr.kinds import CALLS, Kind, kind_of
from tapax._marks.context import without_marks
from tapax._sites import name_of
from tapax.hidden._definitions import is_copy
from tapax.hidden._step import HiddenState, list_hidden_states, trace_leaves

INLINED = CALLS | Kind.REMAT
"""The kinds of equations whose results are the results of their body."""


def is_variable(atom: Atom) -> bool:
    return not isinstance(atom, _jax.Literal)


def is_float(aval: AbstractValue) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating)


@dataclasses.dataclass(frozen=True)
class WeightProduct:
    """A product of a weight with data: its place in the body, and the operand of the weight."""

    at: int
    side: int
    eqn: Any

    @property
    def weight(self) -> Any:
        return self.eqn.invars[self.side]

    @property
    def data(self) -> Any:
        return self.eqn.invars[1 - self.side]

    @property
    def result(self) -> Any:
        return self.eqn.outvars[0]


@dataclasses.dataclass(frozen=True)
class FlatStep:
    """A traced step without calls, divided into the equations of its weights and the others.

    `values` contains the constants. `first` contains the equations of the weights, `body` the
    others; `weights` are the differentiable variables that lead from one to the other. `writes`
    maps a variable of the body to the new state that it defines.
    """

    name: str
    states: tuple[HiddenState, ...]
    state_tree: Any
    out_tree: Any
    params: tuple[Any, ...]
    trained: tuple[int, ...]
    olds: tuple[Any, ...]
    inputs: tuple[Any, ...]
    news: tuple[Any, ...]
    outs: tuple[Any, ...]
    values: dict[Any, Any]
    first: tuple[Any, ...]
    body: tuple[Any, ...]
    weights: tuple[Any, ...]
    known: dict[Any, Any]
    dots: tuple[WeightProduct, ...]
    writes: dict[Any, int]
    names: dict[Any, str]

    @property
    def is_reusable(self) -> bool:
        """Return whether another call may use the step: it must not close over traced values."""
        return not any(isinstance(x, Tracer) for x in self.values.values())

    def prepare(
        self, leaves: Sequence[Any]
    ) -> tuple[list[Any], dict[Any, Any], Callable[..., Any]]:
        """Make the weights, the other values of the body, and the pullback to the parameters."""
        env = {**self.values, **dict(zip(self.params, leaves, strict=True))}

        def weights(trained: Sequence[Any]) -> Any:
            here = dict(env)
            here.update((self.params[i], x) for i, x in zip(self.trained, trained, strict=True))
            evaluate_equations(self.first, here)
            return [here[v] for v in self.weights], [here[v] for v in given]

        given = [*env, *(v for eqn in self.first for v in eqn.outvars)]
        made, back, values = jax.vjp(weights, [leaves[i] for i in self.trained], has_aux=True)
        return made, dict(zip(given, values, strict=True)), lambda grads: back(grads)[0]

    def run(
        self,
        env: Mapping[Any, Any],
        weights: Sequence[Any],
        olds: Sequence[Any],
        inputs: Sequence[Any],
        *,
        write: Callable[[int, Any], Any] | None = None,
        operand: Mapping[int, Any] | None = None,
        added: Mapping[int, Any] | None = None,
    ) -> tuple[list[Any], list[Any], dict[int, Any]]:
        """Run the step; return the new states, the output, and the data of each product.

        `write` replaces the value of each defined state. `operand` has other weights for some
        products. With `added`, every product counts as a constant, to which the values in `added`
        are added.
        """
        env = dict(env)
        env.update(zip(self.weights, weights, strict=True))
        env.update(zip(self.olds, olds, strict=True))
        env.update(zip(self.inputs, inputs, strict=True))
        dots = {dot.at: dot for dot in self.dots}
        seen: dict[int, Any] = {}

        def apply(i: int, eqn: Equation, args: list[Any]) -> list[Any]:
            dot = dots.get(i)
            if dot is not None:
                seen[i] = args[1 - dot.side]
                args[dot.side] = (operand or {}).get(i, args[dot.side])
            outs = bind_in_context(i, eqn, args)
            if dot is not None and added is not None:
                y = jax.lax.stop_gradient(outs[0])
                outs = [y + added[i] if i in added else y]
            if write is None:
                return outs
            made = zip(eqn.outvars, outs, strict=True)
            return [write(self.writes[v], x) if v in self.writes else x for v, x in made]

        evaluate_equations(self.body, env, apply)
        news, outs = ([read(env, v) for v in atoms] for atoms in (self.news, self.outs))
        return news, outs, seen


def flatten_calls(jaxpr: Jaxpr) -> Jaxpr:
    """Inline calls, and broadcast parameters that several units share."""

    def apply(number: int, eqn: Equation, values: list[Value]) -> list[Value]:
        if kind_of(eqn) & Kind.ELEMENTWISE:
            values = [_broadcast(x, eqn.outvars[0].aval.shape) for x in values]
        return bind_in_context(number, eqn, values)

    return _jax.dce(inline(jaxpr, INLINED, apply, implementations=True))


def _broadcast(x: Value, shape: tuple[int, ...]) -> Any:
    """Broadcast a parameter that several units share, such as a bias or a gain."""
    if jnp.shape(x) == shape or not isinstance(x, Tracer) or not is_float(x.aval):
        return x
    start = len(shape) - jnp.ndim(x)
    return jax.lax.broadcast_in_dim(x, shape, tuple(range(start, len(shape))))


def trace_flat_step(
    step: Callable[..., Any], params: PyTree, state: PyTree, inputs: Sequence[Any]
) -> FlatStep:
    """Trace a step for arguments like these; raise if there is nothing to learn."""
    keyed = tree_leaves_with_path(params)
    states = check_state(state)
    describe = lambda result: type(result).__name__  # noqa: E731
    with without_marks():
        jaxpr, out_tree = trace_leaves(step, (params, state, *inputs), state, states, describe)
        jaxpr = flatten_calls(jaxpr)
    inner = _jax.open_jaxpr(jaxpr)
    n, m = len(keyed), len(states)
    return _divide(
        inner,
        dict(zip(inner.constvars, _jax.jaxpr_consts(jaxpr), strict=True)),
        name=name_of(step),
        states=states,
        state_tree=jax.tree.structure(state),
        out_tree=out_tree,
        params=tuple(inner.invars[:n]),
        trained=tuple(i for i in range(n) if is_float(inner.invars[i].aval)),
        olds=tuple(inner.invars[n : n + m]),
        inputs=tuple(inner.invars[n + m :]),
        news=tuple(inner.outvars[:m]),
        outs=tuple(inner.outvars[m:]),
        names={v: keystr(k) for v, (k, _) in zip(inner.invars, keyed, strict=False)},
    )


def _divide(inner: Any, values: dict[Any, Any], **parts: Any) -> FlatStep:
    """Divide the equations into those of the weights and the others."""
    trained = {parts["params"][i] for i in parts["trained"]}
    data = {*parts["olds"], *parts["inputs"]}
    learned: dict[Any, frozenset[Any]] = {v: frozenset((v,)) for v in trained}
    first, body = [], []
    for eqn in inner.eqns:
        if not eqn.outvars:
            continue  # the step itself runs equations for their effects
        used = [v for v in eqn.invars if is_variable(v)]
        if any(v in data for v in used) or eqn.effects:
            body.append(eqn)
            data.update(eqn.outvars)
            continue
        first.append(eqn)
        of = frozenset[Any]().union(*(learned.get(v, ()) for v in used))
        if of:
            learned.update((v, of) for v in eqn.outvars if is_float(v.aval))
    used = [v for eqn in body for v in eqn.invars] + [*parts["news"], *parts["outs"]]
    weights = tuple(dict.fromkeys(v for v in used if is_variable(v) and v in learned))
    dots = tuple(
        WeightProduct(i, side, eqn)
        for i, eqn in enumerate(body)
        if eqn.primitive is dot_general_p
        for side in (0, 1)
        if eqn.invars[side] in learned and eqn.invars[1 - side] not in learned
    )
    names = parts["names"]
    names |= {
        v: " and ".join(names[p] for p in parts["params"] if p in learned[v]) for v in weights
    }
    made = {v: eqn for eqn in body for v in eqn.outvars}
    writes: dict[Any, int] = {}
    for k, atom in enumerate(parts["news"]):
        while is_variable(atom) and atom in made and is_copy(made[atom]):
            atom = made[atom].invars[0]
        if is_variable(atom) and atom in made:
            # If several states have one value, later equations read the first.
            writes.setdefault(atom, k)
    return FlatStep(
        values=values,
        first=tuple(first),
        body=tuple(body),
        weights=weights,
        known=_find_constants(first, values, learned),
        dots=dots,
        writes=writes,
        **parts,
    )


def _find_constants(first: Any, values: Any, learned: Any) -> dict[Any, Any]:
    """Find the values that do not depend on the arguments of the step, mostly indices."""
    known = {v: x for v, x in values.items() if not isinstance(x, Tracer)}
    with jax.ensure_compile_time_eval():
        for eqn in first:
            used = [v for v in eqn.invars if is_variable(v)]
            if all(v in known for v in used) and not any(v in learned for v in eqn.outvars):
                evaluate_equations([eqn], known)
    return known


def check_state(state: PyTree) -> tuple[HiddenState, ...]:
    states = list_hidden_states(state)
    for one in states:
        if not jnp.issubdtype(one.dtype, jnp.floating):
            raise HiddenError(
                f"The hidden state {one.name!r} is of type {one.dtype}, but online learning needs "
                "states of a real floating-point type: split it into real and imaginary parts."
            )
    return states


def check_params(params: PyTree) -> None:
    """Refuse parameters that contain nothing to learn, or random keys."""
    dtypes = {jax.dtypes.result_type(leaf) for leaf in jax.tree.leaves(params)}
    found = ", ".join(sorted(map(str, dtypes)))
    if any(jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes):
        raise HiddenError(
            f"`params` has leaves of the types {found}, but random keys cannot be learned. Pass "
            "them to the step as an input."
        )
    if not any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise HiddenError(
            "`params` must contain arrays of a real floating-point type, which can be learned, but "
            f"the types of its leaves are {found or 'none'}."
        )
