"""Ensembles in one model: perturbed copies of any model, and BatchEnsemble for Flax NNX.

A function or a model of any framework becomes an ensemble by perturbations: `dropout` and `noise`
at some sites, `weight_noise`, and a `subensemble` of these that shares a trunk. See `_ensembles`.

>>> import jax, jax.numpy as jnp, tapax
>>> model = lambda w, x: tapax.sow(jnp.tanh(x @ w["up"]), "h") @ w["out"]
>>> w = {"up": jnp.ones((3, 8)), "out": jnp.ones((8, 2))}
>>> noisy = tapax.nn.dropout(model, at="h", rate=0.1)
>>> p = tapax.nn.predict(noisy, w, jnp.ones((5, 3)), num_members=4, key=jax.random.key(0))
>>> p.mean.shape, p.epistemic.shape
((5, 2), (5,))

BatchEnsemble is an ensemble to train, for little more than the price of one model. All members
share the weights `W` of a layer; each has two vectors of its own, `r` on the inputs and `s` on the
outputs, and a bias: its weight is `W * outer(r, s)`. A batch holds the rows of all members,
`[E * B, ...]`, those of one after those of the other, and all are computed at once (Wen, Tran and
Ba, "BatchEnsemble", 2020).

>>> from flax import nnx
>>> from tapax import nn
>>> rngs = nnx.Rngs(0)
>>> model = nnx.Sequential(nnx.Linear(3, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 10, rngs=rngs))
>>> ensemble = nn.batch_ensemble(model, 4, rngs=rngs)
>>> x = jnp.ones((5, 3))  # a plain batch
>>> ensemble(nn.tile(x, 4)).shape  # in training: every member sees the batch, or rows of its own
(20, 10)
>>> prediction = nn.predict(ensemble, x)
>>> prediction.mean.shape, prediction.epistemic.shape
((5, 10), (5,))
>>> _, taps = tapax.capture(ensemble)(nn.tile(x, 4))
>>> nn.members(taps).values["Sequential/layers/0"].shape
(4, 5, 64)

- Layers: `BatchEnsembleLinear`, `BatchEnsembleLinearGeneral` (the projections of attention),
  `BatchEnsembleConv`, `BatchEnsembleEinsum`, `BatchEnsembleEmbed`; each is made from a layer of
  Flax, is an instance of its class, and keeps its dtype and precision.
- `batch_ensemble` makes a whole model an ensemble.
- `tile`, `fold` and `unfold` go between plain batches and those of members.
- `predict` gives a mean, and total, aleatoric and epistemic uncertainty.
- `shard` divides the members over the devices of a mesh.
- `members` gives what was captured an axis of members, with statistics for each.

Calls change nothing: they work under `jax.jit`, `grad`, `vmap` and those of NNX, in any thread.
"""

from typing import TYPE_CHECKING

from tapax._lazy import load_lazily

if TYPE_CHECKING:
    from tapax.nn._conv import BatchEnsembleConv
    from tapax.nn._convert import batch_ensemble
    from tapax.nn._einsum import BatchEnsembleEinsum
    from tapax.nn._embed import BatchEnsembleEmbed
    from tapax.nn._ensembles import Subensemble, dropout, noise, subensemble, weight_noise
    from tapax.nn._linear import BatchEnsembleLinear, BatchEnsembleLinearGeneral
    from tapax.nn._members import Members, Statistics, members
    from tapax.nn._predict import Prediction, fold, predict, tile, unfold
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

# The layers are subclasses of Flax's, which is imported with the first of them.
__getattr__, __dir__ = load_lazily(
    __name__,
    __all__,
    {
        "tapax.nn._conv": ("BatchEnsembleConv",),
        "tapax.nn._convert": ("batch_ensemble",),
        "tapax.nn._einsum": ("BatchEnsembleEinsum",),
        "tapax.nn._embed": ("BatchEnsembleEmbed",),
        "tapax.nn._ensembles": ("Subensemble", "dropout", "noise", "subensemble", "weight_noise"),
        "tapax.nn._linear": ("BatchEnsembleLinear", "BatchEnsembleLinearGeneral"),
        "tapax.nn._members": ("Members", "Statistics", "members"),
        "tapax.nn._predict": ("Prediction", "fold", "predict", "tile", "unfold"),
        "tapax.nn._random": ("RandomFunction",),
        "tapax.nn._shard": ("shard",),
    },
)
