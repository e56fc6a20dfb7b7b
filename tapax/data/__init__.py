"""Datasets of activations: harvested into folders of safetensors shards, and read from them."""

from tapax.data._activations import Activations
from tapax.data._harvest import harvest
from tapax.data._lazy_array import LazyArray
from tapax.data._shard_format import ShardError
from tapax.data._statistics import Statistics

__all__ = ["Activations", "LazyArray", "ShardError", "Statistics", "harvest"]
