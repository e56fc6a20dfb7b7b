"""The network: from `[T, rho, Z_1, ..., k]` to the static structure factors S_ab.

A multilayer perceptron with SiLU between its layers, as an ordinary Flax NNX module. Inputs are
physical (see `plasma.py`). The model divides each by its maximum in the training data, which it
stores. The output is the upper triangle of the symmetric matrix S_ab, by rows.

    >>> from flax import nnx
    >>> model = NNModel(species=2, maxima=[100.0, 10.0, 4.0, 1.0, 8.0], rngs=nnx.Rngs(0))
    >>> model([10.0, 1.05, 4.0, 1.0, 3.0]).shape
    (3,)
    >>> model.matrix([10.0, 1.05, 4.0, 1.0, 3.0]).shape
    (2, 2)
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

WIDTHS = (64, 128, 128, 64)


class Maxima(nnx.Variable):
    """The divisors of the inputs, which the model stores and never trains."""


class NNModel(nnx.Module):
    def __init__(
        self, species: int, maxima: Any, widths: Sequence[int] = WIDTHS, *, rngs: nnx.Rngs
    ):
        if species < 1:
            raise ValueError(f"species is {species}, and must be at least 1.")
        maxima = np.asarray(maxima, np.float32)
        if maxima.shape != (species + 3,) or not (np.isfinite(maxima) & (maxima > 0)).all():
            raise ValueError(
                f"maxima is {maxima.tolist()}, and must be {species + 3} numbers greater than "
                f"zero: of T, rho, {species} charges, and k."
            )
        self.species, self.widths = species, tuple(widths)
        self.maxima = Maxima(jnp.asarray(maxima))
        sizes = (species + 3, *self.widths, species * (species + 1) // 2)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(sizes)])

    @nnx.jit
    def __call__(self, x: Any) -> jax.Array:
        """Compute the upper triangle of S_ab, `[..., species * (species + 1) / 2]`."""
        x = jnp.asarray(x)
        if x.shape[-1:] != (self.species + 3,):
            raise ValueError(
                f"x has the shape {x.shape}; its last axis must be {self.species + 3}: "
                f"T, rho, {self.species} charges, and k."
            )
        x = x / self.maxima[...]
        for layer in self.layers[:-1]:
            x = nnx.silu(layer(x))
        return self.layers[-1](x)

    def matrix(self, x: Any) -> jax.Array:
        """Compute S_ab, `[..., species, species]`, which is symmetric."""
        rows, columns = np.triu_indices(self.species)
        place = np.zeros((self.species, self.species), int)
        place[rows, columns] = place[columns, rows] = np.arange(len(rows))
        return self(x)[..., place]

    def save(self, path: str | Path) -> None:
        """Write the architecture, the maxima and the weights to a new folder."""
        path = Path(path).absolute()
        if path.exists():
            raise FileExistsError(
                f"path is {path}, which exists; a model is saved to a new folder."
            )
        shape = {"species": self.species, "widths": list(self.widths)}
        parts = ocp.args.Composite(
            architecture=ocp.args.JsonSave(shape),
            weights=ocp.args.StandardSave(nnx.to_pure_dict(nnx.state(self))),
        )
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(path, parts)

    @classmethod
    def load(cls, path: str | Path) -> "NNModel":
        path = Path(path).absolute()
        if not (path / "architecture").is_dir() or not (path / "weights").is_dir():
            raise FileNotFoundError(
                f"path is {path}, which is not a folder that NNModel.save wrote."
            )
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            what = ocp.args.Composite(architecture=ocp.args.JsonRestore())
            shape = checkpointer.restore(path, what)["architecture"]
            ones = np.ones(shape["species"] + 3)
            model = nnx.eval_shape(lambda: cls(**shape, maxima=ones, rngs=nnx.Rngs(0)))
            structure, state = nnx.split(model)
            what = ocp.args.Composite(weights=ocp.args.StandardRestore(nnx.to_pure_dict(state)))
            weights = checkpointer.restore(path, what)["weights"]
        nnx.replace_by_pure_dict(state, weights)
        return nnx.merge(structure, state)
