"""Datasets of activations, which `harvest` writes as safetensors shards and `Activations` reads."""

from typing import TYPE_CHECKING

from tapax._lazy import load_lazily

if TYPE_CHECKING:
    from tapax.data import ray
    from tapax.data._activations import Activations
    from tapax.data._batch_reader import Batches
    from tapax.data._harvest import harvest
    from tapax.data._lazy_array import LazyArray
    from tapax.data._row_source import RowSource
    from tapax.data._shard_format import ShardError
    from tapax.data._statistics import Statistics
    from tapax.data._verify import Verification

__all__ = [
    "Activations",
    "Batches",
    "LazyArray",
    "RowSource",
    "ShardError",
    "Statistics",
    "Verification",
    "harvest",
    "ray",
]

__getattr__, __dir__ = load_lazily(
    __name__,
    __all__,
    {
        __name__: ("ray",),
        "tapax.data._activations": ("Activations",),
        "tapax.data._batch_reader": ("Batches",),
        "tapax.data._harvest": ("harvest",),
        "tapax.data._lazy_array": ("LazyArray",),
        "tapax.data._row_source": ("RowSource",),
        "tapax.data._shard_format": ("ShardError",),
        "tapax.data._statistics": ("Statistics",),
        "tapax.data._verify": ("Verification",),
    },
)
