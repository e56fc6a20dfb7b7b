"""Steps in a user's own loop: every hidden state of every step of a sequence is a site.

>>> import jax, jax.numpy as jnp, tapax
>>> def step(state, x):
...     h = jnp.tanh(state["h"] + x)
...     return {"h": h}, h
>>> @jax.jit
... def loss(w, xs):
...     last, outs = jax.lax.scan(tapax.hidden.unrolled(step), {"h": jnp.zeros(2)}, w * xs)
...     return jnp.sum(outs**2)
>>> out, taps = tapax.capture(jax.grad(loss))(0.5, jnp.ones((7, 2)))
>>> taps.values["h"].shape, taps.grads["h"].shape
((7, 2), (7, 2))

The gradient is that of the loss by the state with all that follows from it: what the step puts out,
and every later step. It is what backpropagation through time computes anyway, in the same pass.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

from tapax._marks.context import active_policy
from tapax._marks.scopes import GroundedScope, GroundScope
from tapax._marks.tap import Mark, tap
from tapax.hidden._definitions import evaluate
from tapax.hidden._step import trace


def unrolled(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step like `step` whose new hidden states are sites, by their names.

    Outside of a capture it is `step` itself. Integers and keys in the state are no hidden states. A
    state that is defined in branches of a conditional together with what is put out is a site in
    every branch: `h`, `h@1`.
    """
    if not callable(step):
        raise TypeError(
            f"`unrolled` takes a function step(state, *inputs) -> (state, out), but `step` is "
            f"{step!r} of type {type(step).__name__}."
        )

    @functools.wraps(step, updated=())
    def marked(state: Any, *inputs: Any) -> tuple[Any, Any]:
        here = active_policy()
        if here is None:
            return step(state, *inputs)
        frame = getattr(step, "__code__", None) or sys._getframe(1).f_code
        source = f"{frame.co_filename}:{frame.co_firstlineno}"

        def write(name: str, value: Any) -> Any:
            with jax.named_scope(GroundedScope("")):
                return tap(value, Mark(name, "hidden", source, **here.on_marks))

        with jax.named_scope(GroundScope("")):
            traced = trace(step, state, inputs, counts=True)
            # A loop stays one, with the sites in it.
            found = traced.definitions(in_loops=False)
            flat = traced.flat(state, inputs)
            return traced.join(evaluate(traced.jaxpr, flat, found, write))

    return marked
