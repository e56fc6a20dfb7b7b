"""Compare perturbations of hidden states by tapax and by braintrace, in one process.

python -m benchmarks.peers.recurrent ROUNDS

Before a time counts, the results of both libraries, and their gradients with respect to the
perturbations, must agree to 1e-6.
"""

from __future__ import annotations

import sys
from typing import Any

import brainstate
import braintrace
import jax
import jax.numpy as jnp
import numpy as np

import tapax
from benchmarks.jax_peers import tell
from benchmarks.measure import Result, race

CELLS = {"GRU": braintrace.nn.GRUCell, "LSTM": braintrace.nn.LSTMCell}
INPUTS, WIDTH = 64, 128


def _inputs(cell: Any, x: jax.Array) -> list[jax.Array]:
    """Make the inputs of both programs: the input of the cell, and the values of its states."""
    function = brainstate.transform.StatefulFunction(cell, return_only_write=False)
    function.make_jaxpr(x)
    return jax.tree.leaves((x, [state.value for state in function.get_states(x)]))


def _gradients(perturbation: Any, inputs: list[jax.Array]) -> dict[tuple[str, ...], jax.Array]:
    def loss(data: Any) -> jax.Array:
        results = perturbation.eval_jaxpr(inputs, data)
        return sum((jnp.sum(jnp.sin(r)) for r in results), jnp.zeros(()))

    grads = jax.grad(loss)(perturbation.init_perturb_data())
    return dict(zip(map(tuple, perturbation.perturb_hidden_paths), grads, strict=True))


def raced(name: str, rounds: int) -> list[Result]:
    cell = CELLS[name](INPUTS, WIDTH)
    brainstate.nn.init_all_states(cell)
    x = jnp.asarray(np.random.default_rng(0).normal(size=INPUTS), jnp.float32)
    makers = {
        "tapax": lambda: tapax.hidden.add_hidden_perturbation(cell, x),
        "braintrace": lambda: braintrace.add_hidden_perturbation_in_module(cell, x),
    }
    made: dict[str, Any] = {who: make() for who, make in makers.items()}
    inputs = _inputs(cell, x)
    mine, theirs = (_gradients(made[who], inputs) for who in makers)
    if mine.keys() != theirs.keys():
        raise AssertionError(f"tapax perturbs {list(mine)}, braintrace {list(theirs)}.")
    for path in mine:
        np.testing.assert_allclose(mine[path], theirs[path], atol=1e-6)
    results = [made[who].eval_jaxpr(inputs, made[who].init_perturb_data()) for who in makers]
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)

    zeros = made["tapax"].init_perturb_data()
    evaluating = {who: lambda p=p: p.eval_jaxpr(inputs, zeros) for who, p in made.items()}
    both = {who: lambda make=make: make().eval_jaxpr(inputs, zeros) for who, make in makers.items()}
    topic = f"perturbation of a {name}"
    return [
        Result.timed(topic, f"{what} over braintrace", times, "tapax", "braintrace", 1.0)
        for what, times in (
            ("building", race(makers, rounds, calls=5)),
            ("evaluating", race(evaluating, rounds, calls=20)),
            ("both", race(both, rounds, calls=5)),
        )
    ]


def main() -> None:
    rounds = int(sys.argv[1])
    tell([result for name in CELLS for result in raced(name, rounds)])


if __name__ == "__main__":
    main()
