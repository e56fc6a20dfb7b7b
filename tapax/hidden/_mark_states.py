"""`mark_states`: mark the hidden states of every step of a user's loop as sites."""

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
    """Make a step whose new hidden states are sites, by their names.

    The gradient of a state includes everything that depends on the state: the output of the step
    and every later step. Backpropagation through time computes it anyway, in the same pass.

    Args:
        step: A function `step(state, *inputs) -> (state, out)`. Integers and random keys in the
            state are not hidden states.

    Returns:
        A function like `step`. Outside a capture it only calls `step`. If the branches of a
        conditional define a state together with the output, the state is a site in every branch:
        `h`, `h@1`.

    Raises:
        TypeError: If `step` is not a function.
        HiddenError: When the returned function is called in a capture, if `step` does not return a
            pair: a state like the one it takes, and an output.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> def step(state, x):
        ...     h = 0.5 * state["h"] + x
        ...     return {"h": h}, h
        >>> @jax.jit
        ... def loss(xs):
        ...     last, outs = jax.lax.scan(tapax.hidden.mark_states(step), {"h": 0.0}, xs)
        ...     return jnp.sum(outs)
        >>> _, taps = tapax.capture(jax.grad(loss))(jnp.array([1.0, 0.0, 2.0]))
        >>> taps.values["h"].tolist(), taps.grads["h"].tolist()
        ([1.0, 0.5, 2.25], [1.75, 1.5, 1.0])
    """
    if not callable(step):
        raise TypeError(
            f"`mark_states` takes a function step(state, *inputs) -> (state, out), but `step` is "
            f"{step!r} of type {type(step).__name__}."
        )

    caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    source = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    code = getattr(step, "__code__", None)  # a module has none: its line is that of the call
    if code is not None:
        source = f"{code.co_filename}:{code.co_firstlineno}"

    @functools.wraps(step, updated=())
    def marked(state: PyTree, *inputs: PyTree, **keywords: PyTree) -> tuple[Any, Any]:
        here = active_policy()
        if here is None:
            return step(state, *inputs, **keywords)

        def write(name: str, value: PyTree) -> Any:
            with jax.named_scope(GroundedScope("")):
                return tap(value, Mark(name, "hidden", source, **here.on_marks))

        with jax.named_scope(GroundScope("")):
            joined = join_inputs(inputs, keywords)
            traced = trace_step(step, state, joined, counts=True)
            # Do not peel loops: the sites are inside them.
            found = traced.find_definitions(in_loops=False)
            flat = traced.flatten(state, joined)
            return traced.join(evaluate_defined(traced.jaxpr, flat, found, write))

    return marked
