"""Perturbations of hidden states by jaxtap and by braintrace, in one process, on the same cells.

python -m benchmarks.peers.recurrent ROUNDS

Prints, as JSON, the seconds of each round. Before a time counts, the results of both and the
gradients by their perturbations must agree to 1e-6.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import brainstate
import braintrace
import jax
import jax.numpy as jnp
import numpy as np

import jaxtap as jt
from benchmarks.measure import race

CELLS = {"GRU": braintrace.nn.GRUCell, "LSTM": braintrace.nn.LSTMCell}
INPUTS, WIDTH = 64, 128


def _inputs(cell: Any, x: jax.Array) -> list[jax.Array]:
    """What the programs of both take: the input, and the values of the cell's states."""
    function = brainstate.transform.StatefulFunction(cell, return_only_write=False)
    function.make_jaxpr(x)
    return jax.tree.leaves((x, [state.value for state in function.get_states(x)]))


def _gradients(perturbation: Any, inputs: list[jax.Array]) -> dict[tuple[str, ...], jax.Array]:
    def loss(data: Any) -> jax.Array:
        results = perturbation.eval_jaxpr(inputs, data)
        return sum((jnp.sum(jnp.sin(r)) for r in results), jnp.zeros(()))

    grads = jax.grad(loss)(perturbation.init_perturb_data())
    return dict(zip(map(tuple, perturbation.perturb_hidden_paths), grads, strict=True))


def main() -> None:
    rounds = int(sys.argv[1])
    found: dict[str, Any] = {}
    for name, cls in CELLS.items():
        cell = cls(INPUTS, WIDTH)
        brainstate.nn.init_all_states(cell)
        x = jnp.asarray(np.random.default_rng(0).normal(size=INPUTS), jnp.float32)
        makers = {
            "jaxtap": lambda cell=cell, x=x: jt.add_hidden_perturbation_in_module(cell, x),
            "braintrace": lambda cell=cell, x=x: braintrace.add_hidden_perturbation_in_module(
                cell, x
            ),
        }
        made: dict[str, Any] = {who: make() for who, make in makers.items()}
        inputs = _inputs(cell, x)
        mine, theirs = (_gradients(made[who], inputs) for who in makers)
        assert mine.keys() == theirs.keys()
        for path in mine:
            np.testing.assert_allclose(mine[path], theirs[path], atol=1e-6)
        run = {
            who: lambda p=p, inputs=inputs: p.eval_jaxpr(inputs, p.init_perturb_data())
            for who, p in made.items()
        }
        a, b = (run[who]() for who in makers)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), list(a), list(b))

        def both(who: str, inputs: list[jax.Array], makers: Any) -> Any:
            p = makers[who]()
            return p.eval_jaxpr(inputs, p.init_perturb_data())

        found[name] = {
            "building": race(makers, rounds),
            "evaluating": race(run, rounds, calls=20),
            "building and evaluating once": race(
                {who: lambda who=who, m=makers, i=inputs: both(who, i, m) for who in makers}, rounds
            ),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
