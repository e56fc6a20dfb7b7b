"""Ensembles in one model: perturbed copies of any model, and BatchEnsemble for Flax NNX.

Perturbations turn a function or a model of any framework into an ensemble: `dropout` and `noise` at
some sites, `weight_noise`, and a `subensemble` of these with a shared trunk.

>>> import jax, jax.numpy as jnp, tapax
>>> model = lambda w, x: tapax.sow(jnp.tanh(x @ w["up"]), "h") @ w["out"]
>>> up, out, data = jax.random.split(jax.random.key(0), 3)
>>> w = {"up": jax.random.normal(up, (3, 8)), "out": jax.random.normal(out, (8, 2))}
>>> x = jax.random.normal(data, (5, 3))
>>> noisy = tapax.nn.dropout(model, at="h", rate=0.1)
>>> p = tapax.nn.predict(noisy, w, x, num_members=4, key=jax.random.key(1))
>>> p.mean.shape, p.epistemic.shape
((5, 2), (5,))

BatchEnsemble is an ensemble to train, which costs little more than one model. All members share the
weights `W` of a layer; each member has two vectors, `r` on the inputs and `s` on the outputs, and a
bias: its weight is `W * outer(r, s)`. A batch contains the rows of all members, `[E * B, ...]`, one
member after the other, and one call computes them all (Wen, Tran and Ba, "BatchEnsemble", 2020).

>>> from flax import nnx
>>> from tapax import nn
>>> rngs = nnx.Rngs(0)
>>> model = nnx.Sequential(nnx.Linear(3, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 10, rngs=rngs))
>>> ensemble = nn.batch_ensemble(model, 4, rngs=rngs)
>>> ensemble(nn.tile(x, 4)).shape  # in training, members see the same rows, or different ones
(20, 10)
>>> prediction = nn.predict(ensemble, x)
>>> prediction.mean.shape, prediction.epistemic.shape
((5, 10), (5,))
>>> _, taps = tapax.capture(ensemble)(nn.tile(x, 4))
>>> nn.members(taps).values["Sequential/layers/0"].shape
(4, 5, 64)

- Layers: `BatchEnsembleLinear`, `BatchEnsembleLinearGeneral` (the projections of attention),
  `BatchEnsembleConv`, `BatchEnsembleEinsum`, `BatchEnsembleEmbed`. Each converts a layer of Flax,
  is an instance of its class, and keeps its dtype and precision.
- `batch_ensemble` converts a whole model.
- `tile`, `fold` and `unfold` convert between plain batches and batches of members.
- `predict` returns a mean, and total, aleatoric and epistemic uncertainty.
- `shard` divides the members over the devices of a mesh.
- `members` splits captured arrays by member, with statistics for each.

Calls have no side effects: they work under `jax.jit`, `grad`, `vmap` and the transformations of
NNX, in any thread.
"""

from typing import TYPE_CHECKING

from tapax._lazy import load_lazily

if TYPE_CHECKING:
    from tapax.nn._batches import fold, tile, unfold
    from tapax.nn._conv import BatchEnsembleConv
    from tapax.nn._convert import batch_ensemble
    from tapax.nn._einsum import BatchEnsembleEinsum
    from tapax.nn._embed import BatchEnsembleEmbed
    from tapax.nn._ensembles import Subensemble, dropout, noise, subensemble, weight_noise
    from tapax.nn._linear import BatchEnsembleLinear, BatchEnsembleLinearGeneral
    from tapax.nn._members import Members, Statistics, members
    from tapax.nn._predict import Prediction, predict
    from tapax.nn._random import RandomFunction
    from tapax.nn._shard import shard

__all__ = [
    "BatchEnsembleConv",
    "BatchEnsembleEinsum",
    "BatchEnsembleEmbed",
    "BatchEnsembleLinear",
    "BatchEnsembleLinearGeneral",
    "Members",
    "Prediction",
    "RandomFunction",
    "Statistics",
    "Subensemble",
    "batch_ensemble",
    "dropout",
    "fold",
    "members",
    "noise",
    "predict",
    "shard",
    "subensemble",
    "tile",
    "unfold",
    "weight_noise",
]

# The layers are subclasses of layers of Flax, which is imported with the first of them.
__getattr__, __dir__ = load_lazily(
    __name__,
    __all__,
    {
        "tapax.nn._batches": ("fold", "tile", "unfold"),
        "tapax.nn._conv": ("BatchEnsembleConv",),
        "tapax.nn._convert": ("batch_ensemble",),
        "tapax.nn._einsum": ("BatchEnsembleEinsum",),
        "tapax.nn._embed": ("BatchEnsembleEmbed",),
        "tapax.nn._ensembles": ("Subensemble", "dropout", "noise", "subensemble", "weight_noise"),
        "tapax.nn._linear": ("BatchEnsembleLinear", "BatchEnsembleLinearGeneral"),
        "tapax.nn._members": ("Members", "Statistics", "members"),
        "tapax.nn._predict": ("Prediction", "predict"),
        "tapax.nn._random": ("RandomFunction",),
        "tapax.nn._shard": ("shard",),
    },
)
