"""Make the data, train the network, measure its errors, and look inside it.

    python -m examples.structure_factor [--species C|CH] [--quick] [--to FOLDER]

It writes the trained model to FOLDER/model, and the pictures to FOLDER, which must be new. By
default FOLDER is structure_factor, structure_factor-2 and so on.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from .explain import (
    in_training,
    layers_table,
    names_of,
    network_sensitivity,
    plot,
    rows_of,
    sensitivity_tables,
    solver_sensitivity,
    under_jax_grad,
    under_nnx_grad,
)
from .plasma import CARBON, POLYSTYRENE
from .train import RANGE, errors, make_data, split, train

MIXTURES = {"C": CARBON, "CH": POLYSTYRENE}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m examples.structure_factor",
        description="Learns structure factors of plasmas from a hypernetted-chain solver.",
    )
    parser.add_argument("--species", choices=MIXTURES, default="C", help="carbon, or C and H")
    parser.add_argument("--states", type=int, default=4096, help="states that are solved")
    parser.add_argument("--steps", type=int, default=20000, help="steps of the training")
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes, for tests"
    )
    parser.add_argument("--to", type=Path, default=None, help="a new folder to write to")
    asked = parser.parse_args(arguments)
    if asked.to is not None and asked.to.exists():
        parser.error(f"--to is {asked.to}, which exists; name a new folder.")
    folder = asked.to or _find_new_folder()
    states, steps = (256, 200) if asked.quick else (asked.states, asked.steps)
    if states < 20 or steps < 20:
        parser.error(f"--states is {states} and --steps {steps}; both must be at least 20.")

    console, mixture = Console(), MIXTURES[asked.species]
    data, held_out = split(make_data(mixture, states))
    model, optimizer = train(data, steps)
    root, worst = errors(model, held_out)
    console.print(
        f"On {len(held_out.x)} points of {len(held_out.x) // held_out.points} states that it has "
        f"not seen, S is off by {root:.1e} (root mean square), {worst:.1e} at most."
    )
    model.save(folder / "model")

    state = [10.0, 3.5, 4.0, 1.0][: 2 + len(mixture.names)]
    k = np.linspace(*RANGE.k, 161)[10:]
    x = rows_of(state, k).astype(np.float32)
    network = np.asarray(network_sensitivity(model, x))
    solver = solver_sensitivity(mixture, state, k)
    off = np.sqrt(np.mean(((network - solver) * x[:, None]) ** 2, (0, 1)))
    console.print(*sensitivity_tables(mixture, state, k, network, solver))
    told = ", ".join(f"{name} {o:.1e}" for name, o in zip(names_of(mixture)[0], off, strict=True))
    console.print(f"Root mean square difference of x dS/dx over all k: {told}.")
    looks = {
        "jax.grad": under_jax_grad(model, x)[1],
        "nnx.grad": under_nnx_grad(model, x)[1],
        "training": in_training(model, optimizer, data)[1],
    }
    console.print(layers_table(looks))
    looks["training"].plot().savefig(folder / "layers.png", dpi=100)
    shown = [[T, *state[1:]] for T in (2.0, 5.0, 10.0, 30.0, 100.0)]
    figure = plot(mixture, model, shown, state, k, network, solver)
    figure.savefig(folder / "structure_factor.png", dpi=90)
    console.print(f"The model and the pictures are in {folder.resolve()}.", soft_wrap=True)


def _find_new_folder() -> Path:
    """Return the first of structure_factor, structure_factor-2, ... that does not exist."""
    later = (f"structure_factor-{i}" for i in itertools.count(2))
    names = itertools.chain(["structure_factor"], later)
    return next(path for path in map(Path, names) if not path.exists())


if __name__ == "__main__":
    main()
