"""Copies of captured arrays on the host, as NumPy arrays."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from tapax._jax import PyTree, Value, spans_processes


def fetch_arrays(taps: PyTree, action: str) -> Any:
    """Copy all arrays of `taps` to the host in one transfer.

    Random keys stay JAX arrays, because NumPy has no such type. `action` completes the sentence
    "It cannot be ..." of an error.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(taps)
    for path, x in leaves:
        check_readable(x, f"taps{jax.tree_util.keystr(path)}", action)
    arrays = iter(jax.device_get([x for _, x in leaves if not is_key(x)]))
    return treedef.unflatten(x if is_key(x) else np.asarray(next(arrays)) for _, x in leaves)


def check_readable(x: Value, name: str, action: str) -> None:
    """Raise if this process cannot read all elements of an array now."""
    if isinstance(x, Tracer):
        raise TypeError(
            f"{name} is traced, so it cannot be {action}. Return the taps from the function that "
            "is under jax.jit, grad, vmap or scan, and use them outside of it."
        )
    if spans_processes(x):
        raise ValueError(
            f"{name} cannot be {action}: it is divided over several processes, and process "
            f"{jax.process_index()} has only a part of it. Capture a statistic, which every "
            "process has in full, or gather the array on all processes with "
            "jax.experimental.multihost_utils.process_allgather(array, tiled=True)."
        )


def is_key(x: Value) -> bool:
    """Return whether an array contains random keys."""
    return isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
