"""`mark_states`: makes the hidden states of every step of a user's loop sites.

>>> import jax, jax.numpy as jnp, tapax
>>> def step(state, x):
...     h = jnp.tanh(state["h"] + x)
...     return {"h": h}, h
>>> @jax.jit
... def loss(w, xs):
...     last, outs = jax.lax.scan(tapax.hidden.mark_states(step), {"h": jnp.zeros(2)}, w * xs)
...     return jnp.sum(outs**2)
>>> out, taps = tapax.capture(jax.grad(loss))(0.5, jnp.ones((7, 2)))
>>> taps.values["h"].shape, taps.grads["h"].shape
((7, 2), (7, 2))

The gradient of a state includes all that follows from the state: the output of the step and every
later step. Backpropagation through time computes it anyway, in the same pass.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

from tapax._frameworks.recurrent_cells import join_inputs
from tapax._jax import PyTree
from tapax._marks.context import active_policy
from tapax._marks.scopes import GroundedScope, GroundScope
from tapax._marks.tap import Mark, tap
from tapax.hidden._definitions import evaluate_defined
from tapax.hidden._step import trace_step


def mark_states(step: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the new hidden states of `step(state, *inputs) -> (state, out)` sites, by their names.

    Outside of a capture the returned function does what `step` does. Integers and random keys in
    the state are not hidden states. A state that branches of a conditional define together with
    the output is a site in every branch: `h`, `h@1`.
    """
    if not callable(step):
        raise TypeError(
            f"`mark_states` takes a function step(state, *inputs) -> (state, out), but `step` is "
            f"{step!r} of type {type(step).__name__}."
        )

    @functools.wraps(step, updated=())
    def marked(state: PyTree, *inputs: PyTree, **keywords: PyTree) -> tuple[Any, Any]:
        here = active_policy()
        if here is None:
            return step(state, *inputs, **keywords)
        frame = getattr(step, "__code__", None) or sys._getframe(1).f_code
        source = f"{frame.co_filename}:{frame.co_firstlineno}"

        def write(name: str, value: PyTree) -> Any:
            with jax.named_scope(GroundedScope("")):
                return tap(value, Mark(name, "hidden", source, **here.on_marks))

        with jax.named_scope(GroundScope("")):
            joined = join_inputs(inputs, keywords)
            traced = trace_step(step, state, joined, counts=True)
            # A loop stays one, with the sites in it.
            found = traced.find_definitions(in_loops=False)
            flat = traced.flatten(state, joined)
            return traced.join(evaluate_defined(traced.jaxpr, flat, found, write))

    return marked
