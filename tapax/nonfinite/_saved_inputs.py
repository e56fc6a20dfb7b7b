"""Files with the inputs of a bad call, for a later search."""

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tapax._jax import Function
from tapax._sites import name_of


class SavedInputs(NamedTuple):
    """The inputs of a call: the name of the function, and its arrays in order."""

    function: str
    arrays: list[Any]

    def is_for(self, fn: Function, arrays: Sequence[Any]) -> bool:
        """Return whether a call of `fn` on arrays of these types could take the saved inputs."""
        saved, given = (
            [(jnp.shape(x), jax.typeof(x).dtype) for x in each] for each in (self.arrays, arrays)
        )
        return name_of(fn) == self.function and saved == given


def save_inputs(directory: str, function: str, arrays: Sequence[Any]) -> None:
    """Save the arrays of a call as bytes, which support every dtype of JAX."""
    from safetensors.numpy import save_file

    os.makedirs(directory, exist_ok=True)
    stored, entries = {}, []
    for i, x in enumerate(arrays):
        entry: dict[str, Any] = {}
        if jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key):
            entry["key"] = str(jax.random.key_impl(x))
            x = jax.random.key_data(x)
        whole = np.ascontiguousarray(np.asarray(x))
        entry |= {"shape": list(np.shape(x)), "dtype": whole.dtype.name}
        stored[str(i)] = np.frombuffer(whole.tobytes(), np.uint8)
        entries.append(entry)
    save_file(stored, os.path.join(directory, "inputs.safetensors"))
    with open(os.path.join(directory, "inputs.json"), "w") as file:
        json.dump({"version": 1, "function": function, "arrays": entries}, file, indent=1)


def load_inputs(directory: str) -> SavedInputs:
    """Load the inputs that `save_inputs` saved in a directory."""
    from safetensors.numpy import load_file

    with open(os.path.join(directory, "inputs.json")) as file:
        about = json.load(file)
    if about["version"] != 1:
        raise ValueError(
            f"they have version {about['version']} of the format, but this tapax reads version 1."
        )
    stored = load_file(os.path.join(directory, "inputs.safetensors"))
    arrays = []
    for i, entry in enumerate(about["arrays"]):
        flat = np.frombuffer(stored[str(i)].tobytes(), jnp.dtype(entry["dtype"]))
        x: Any = jnp.asarray(flat.reshape(entry["shape"]))
        arrays.append(jax.random.wrap_key_data(x, impl=entry["key"]) if "key" in entry else x)
    return SavedInputs(about["function"], arrays)
