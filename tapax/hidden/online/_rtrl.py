"""Exact real-time recurrent learning, for small models and as the oracle of the other rules."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tapax._jax import PyTree
from tapax.hidden.online import _learner
from tapax.hidden.online._flat_step import FlatStep


def rtrl(step: Callable[..., Any], loss: Callable[..., Any]) -> _learner.OnlineRule:
    """Learn by RTRL, which traces the influence of every parameter on every hidden state.

    The gradients are exact: with constant parameters, the gradients of the steps of a sequence sum
    to the gradient of backpropagation through time. The size of the memory is the size of the state
    times the size of the parameters; the work of a step is that product times the size of the
    state.

    Williams and Zipser, A Learning Algorithm for Continually Running Fully Recurrent Neural
    Networks, 1989.

    Args:
        step: A pure function `step(params, state, *inputs) -> (state, out)`.
        loss: A function `loss(out, target)` that returns one real number.

    Returns:
        An `OnlineRule`.

    Raises:
        HiddenError: If `step` or `loss` is not a function. `init` and `update` raise it if their
            arguments do not fit the step.

    Example:
        >>> import jax.numpy as jnp
        >>> from tapax.hidden import online
        >>> step = lambda w, h, x: (0.5 * h + w * x, h)
        >>> loss = lambda out, target: jnp.sum((out - target) ** 2)
        >>> rule, w, h = online.rtrl(step, loss), jnp.array([1.0, 2.0]), jnp.zeros(2)
        >>> memory = rule.init(w, h, jnp.zeros(2))
        >>> for x in jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]):
        ...     learned, memory = rule.update(memory, w, x, target=0.0)
        >>> learned.grads.tolist()  # the loss is h**2, with h = (w[0] / 2, w[1])
        [0.5, 4.0]
    """
    _learner.check_loss(loss)
    planned = _learner.cache_by_shape(step, lambda program: program)

    def init(params: PyTree, state: PyTree, *inputs: PyTree) -> _learner.OnlineMemory:
        traces = _make_zeros(planned(params, state, inputs))
        return _learner.OnlineMemory(_learner.settle_dtypes(state), traces)

    def update(
        memory: _learner.OnlineMemory, params: PyTree, *inputs: PyTree, target: PyTree = None
    ) -> tuple[_learner.OnlineGradients, _learner.OnlineMemory]:
        program = planned(params, _learner.get_state(memory), inputs)
        _learner.check_traces(memory, lambda: _make_zeros(program))
        leaves, tree = jax.tree.flatten(params)

        def run(trained: PyTree, olds: Any) -> Any:
            here = list(leaves)
            for i, x in zip(program.trained, trained, strict=True):
                here[i] = x
            new, out = step(tree.unflatten(here), program.state_tree.unflatten(olds), *inputs)
            return jax.tree.leaves(new), out

        def value(trained: PyTree, olds: Any) -> Any:
            _, out = run(trained, olds)
            return _learner.compute_loss(loss, out, target), out

        trained = [jnp.asarray(leaves[i]) for i in program.trained]
        olds = [jnp.asarray(x) for x in jax.tree.leaves(memory.state)]
        worth, back, out = jax.vjp(value, trained, olds, has_aux=True)
        now, by_state = back(jnp.ones_like(worth))
        news, back = jax.vjp(lambda *args: run(*args)[0], trained, olds)
        by_params, by_olds = jax.vmap(back)(_make_cotangents(program))
        influence, signal = _flatten(by_olds, 1), _flatten(by_state, 0)
        grads, traces = [], []
        for grad, old, new in zip(now, memory.traces, by_params, strict=True):
            grads.append(grad + jnp.tensordot(signal, old, 1))
            traces.append(jnp.tensordot(influence, old, 1) + new.astype(old.dtype))
        learned = _learner.OnlineGradients(
            _learner.make_grads(params, program.trained, grads), worth, out
        )
        return learned, _learner.OnlineMemory(program.state_tree.unflatten(news), traces)

    return _learner.OnlineRule(init, update)


def _count_units(program: FlatStep) -> int:
    return sum(math.prod(s.shape) for s in program.states)


def _make_zeros(program: FlatStep) -> list[Any]:
    avals, units = [program.params[i].aval for i in program.trained], _count_units(program)
    return [jnp.zeros((units, *a.shape), _learner.widen_dtype(a.dtype)) for a in avals]


def _make_cotangents(program: FlatStep) -> list[Any]:
    """Make a cotangent for every unit of every state, along a first axis."""
    whole, start, made = jnp.eye(_count_units(program)), 0, []
    for state in program.states:
        n = math.prod(state.shape)
        made.append(whole[:, start : start + n].reshape(-1, *state.shape).astype(state.dtype))
        start += n
    return made


def _flatten(parts: Any, batch: int) -> Any:
    flat = [x.reshape(*x.shape[:batch], -1) for x in parts]
    return jnp.concatenate([x.astype(_learner.widen_dtype(x.dtype)) for x in flat], -1)
