"""The weights of a model of any framework: its arrays of real or complex numbers, by path.

>>> import jax.numpy as jnp
>>> list(find_weights({"mlp": {"w": jnp.ones((2, 3)), "steps": jnp.ones(2, int)}}))
['mlp/w']
"""

import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax._frameworks import registry
from tapax._frameworks.interface import Module
from tapax._jax import Function, PyTree


def find_weights(model: PyTree) -> dict[str, Any]:
    """Find the weights of a model, by path, in the order of the model.

    They are the `Param`s of an NNX module or state, the collection `params` of Linen variables, the
    trainable variables of a Keras layer, and all real or complex arrays of any other pytree, such
    as an Equinox module or the parameters of Haiku.
    """
    if isinstance(model, Mapping) and isinstance(model.get("params"), Mapping):
        model = {"params": model["params"]}
    return {path: x for path, x in _list_arrays(model) if _is_weight(x)}


def model_of(fn: Function) -> Module | None:
    """Return the model that `fn` is, or whose method it is; None if it contains no weights.

    A Linen module contains no weights: `model.apply(variables, x)` takes them as an argument.
    """
    owner = getattr(fn, "__self__", None) or fn
    is_module = any(adapter.is_module(owner) for adapter in registry.loaded_adapters())
    return owner if is_module and find_weights(owner) else None


def _list_arrays(model: PyTree) -> list[tuple[str, Any]]:
    keras, nnx = (sys.modules.get(name) for name in ("keras", "flax.nnx"))
    if keras is not None and isinstance(model, keras.Layer):
        return [(variable.path, variable.value) for variable in model.trainable_variables]
    if nnx is None:
        return [(_join(path), x) for path, x in jax.tree.leaves_with_path(model)]
    if isinstance(model, nnx.Module):
        model = nnx.state(model)
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    found = []
    for path, x in jax.tree.leaves_with_path(model, is_leaf=is_variable):
        if not is_variable(x):
            found.append((_join(path), x))
        elif isinstance(x, nnx.Param):
            found.append((_join(path), x.get_raw_value()))
    return found


def _join(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_weight(x: Any) -> bool:
    is_array = isinstance(x, (jax.Array, np.ndarray))
    return is_array and jnp.issubdtype(x.dtype, jnp.inexact)
