"""Recurrent cells of Linen, and other modules of Linen that are called as a step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from tapax._frameworks.recurrent_cells import (
    HiddenError,
    RecurrentCell,
    check_inputs,
    pair_paths,
    refuse_loop,
)


def recurrent_cell(module: Any, inputs: Sequence[Any], state: Any) -> RecurrentCell | None:
    """Describes a bound module of Linen; a cell starts from its own initial carry."""
    if not isinstance(module, linen.Module):
        return None
    check_inputs(module, inputs)
    if isinstance(module, linen.RNN):
        refuse_loop(module, "model.cell, bound to its variables")
    if module.scope is None:
        raise HiddenError(
            f"`model` is a {type(module).__name__} without parameters, for modules of Linen have "
            "none until they are bound. Give model.bind(variables)."
        )
    unbound, variables = module.unbind()

    def step(variables: Any, state: Any, *inputs: Any) -> tuple[Any, Any]:
        return unbound.apply(variables, state, *inputs)  # pyright: ignore[reportReturnType]

    if state is not None or not isinstance(module, linen.RNNCellBase):
        return RecurrentCell(step, variables, state)
    carry = unbound.initialize_carry(jax.random.key(0), jnp.shape(inputs[0]))
    return RecurrentCell(step, variables, carry, pair_paths(carry, "c", "h"))
