"""Recurrent cells of NNX, and other modules of NNX that are called as a step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tapax._frameworks.recurrent_cells import RecurrentCell, check_inputs, pair_paths, refuse_loop


def recurrent_cell(module: Any, inputs: Sequence[Any], state: Any) -> RecurrentCell | None:
    """Describes a module of NNX; a cell starts from its own initial carry."""
    if not isinstance(module, nnx.Module):
        return None
    check_inputs(module, inputs)
    if isinstance(module, nnx.RNN):
        refuse_loop(module, "model.cell")
    graph, params = nnx.split(module)

    def step(params: Any, state: Any, *inputs: Any) -> tuple[Any, Any]:
        # Variables of this trace: those that were split off may not be updated in it.
        return nnx.merge(graph, jax.tree.map(lambda x: x, params))(state, *inputs)

    if state is not None or not isinstance(module, nnx.RNNCellBase):
        return RecurrentCell(step, params, state)
    carry = module.initialize_carry(jnp.shape(inputs[0]), nnx.Rngs(0))
    return RecurrentCell(step, params, carry, pair_paths(carry, "c", "h"))
