"""Real-time recurrent learning, exact: the oracle of the others, for small models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tapax.hidden.online._learner import (
    Learned,
    Memory,
    Online,
    Planned,
    as_grads,
    check_loss,
    check_traces,
    scalar_loss,
    settled,
    state_of,
    wide,
)
from tapax.hidden.online._program import Program, trace


def rtrl(step: Callable[..., Any], loss: Callable[..., Any]) -> Online:
    """Exact gradients: the influence of every parameter on every hidden state is kept.

    With parameters that stay the same, the gradients of the steps of a sequence sum to what
    backpropagation through time gives. The memory has the size of the state times that of the
    parameters, and a step costs that times the size of the state once more.

    Williams and Zipser, A Learning Algorithm for Continually Running Fully Recurrent Neural
    Networks, 1989.
    """
    check_loss(loss)
    planned = Planned(step, _planned)

    def init(params: Any, state: Any, *inputs: Any) -> Memory:
        traces = _zeros(planned(params, state, inputs))
        return Memory(settled(state), traces)

    def update(
        memory: Memory, params: Any, *inputs: Any, target: Any = None
    ) -> tuple[Learned, Memory]:
        program = planned(params, state_of(memory), inputs)
        check_traces(memory, jax.eval_shape(lambda: _zeros(program)))
        leaves, tree = jax.tree.flatten(params)

        def run(trained: Any, olds: Any) -> Any:
            here = list(leaves)
            for i, x in zip(program.trained, trained, strict=True):
                here[i] = x
            new, out = step(tree.unflatten(here), program.state_tree.unflatten(olds), *inputs)
            return jax.tree.leaves(new), out

        def value(trained: Any, olds: Any) -> Any:
            _, out = run(trained, olds)
            return scalar_loss(loss, out, target), out

        trained = [jnp.asarray(leaves[i]) for i in program.trained]
        olds = [jnp.asarray(x) for x in jax.tree.leaves(memory.state)]
        worth, back, out = jax.vjp(value, trained, olds, has_aux=True)
        now, by_state = back(jnp.ones_like(worth))
        news, back = jax.vjp(lambda *args: run(*args)[0], trained, olds)
        by_params, by_olds = jax.vmap(back)(_units(program))
        influence, signal = _flat(by_olds, 1), _flat(by_state, 0)
        grads, traces = [], []
        for grad, old, new in zip(now, memory.traces, by_params, strict=True):
            grads.append(grad + jnp.tensordot(signal, old, 1))
            traces.append(jnp.tensordot(influence, old, 1) + new.astype(old.dtype))
        learned = Learned(as_grads(params, program.trained, grads), worth, out)
        return learned, Memory(program.state_tree.unflatten(news), traces)

    return Online(init, update)


def _planned(*args: Any) -> tuple[Program, bool]:
    program = trace(*args)
    return program, program.lasting


def _size(program: Program) -> int:
    return sum(math.prod(s.shape) for s in program.states)


def _zeros(program: Program) -> list[Any]:
    kind = [wide(program.params[i].aval.dtype) for i in program.trained]
    shapes = [program.params[i].aval.shape for i in program.trained]
    return [jnp.zeros((_size(program), *s), d) for s, d in zip(shapes, kind, strict=True)]


def _units(program: Program) -> list[Any]:
    """A cotangent for every unit of every state, along a first axis."""
    whole, start, made = jnp.eye(_size(program)), 0, []
    for state in program.states:
        n = math.prod(state.shape)
        made.append(whole[:, start : start + n].reshape(-1, *state.shape).astype(state.dtype))
        start += n
    return made


def _flat(parts: Any, batch: int) -> Any:
    flat = [x.reshape(*x.shape[:batch], -1) for x in parts]
    return jnp.concatenate([x.astype(wide(x.dtype)) for x in flat], -1)
