"""`shard`: the members of a model over the devices of a mesh."""

from typing import TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tapax._sites import wrong_type
from tapax.nn._factors import EnsembleLayer
from tapax.nn._predict import count_members

M = TypeVar("M", bound=nnx.Module)


def shard(model: M, mesh: Mesh, axis: str) -> M:
    """A new model whose members are divided over an axis of a mesh; the given one stays as it is.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from tapax import nn
    >>> mesh = jax.make_mesh((1,), ("members",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> model = nn.batch_ensemble(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), 4, rngs=0)
    >>> model = nn.shard(model, mesh, "members")
    >>> model.r.sharding.spec, model.kernel.sharding.spec
    (P('members', None), P())

    The factors and biases of a member are on its own devices, all else is on every device. Rows
    that are sharded alike, `NamedSharding(mesh, P(axis))`, then go through the model without any
    communication, as long as what lies between its layers treats rows one by one.
    """
    if not isinstance(mesh, Mesh):
        raise wrong_type("`mesh` must be a jax.sharding.Mesh, but is", mesh)
    if axis not in mesh.axis_names:
        raise ValueError(f"`axis` must be one of the mesh's, {mesh.axis_names}, but is {axis!r}.")
    members = count_members(model)
    if members % mesh.shape[axis]:
        raise ValueError(
            f"`axis` {axis!r} of the mesh has {mesh.shape[axis]} devices, which do not divide the "
            f"{members} members of `model`."
        )
    new = nnx.clone(model)
    own: dict[int, PartitionSpec] = {}
    for _, layer in nnx.iter_graph(new):
        if isinstance(layer, EnsembleLayer):
            ahead = layer.r.ndim - len(layer.base.shapes(layer).r) - 1
            for variable in (layer.r, layer.s, getattr(layer, "bias", None)):
                if variable is not None:
                    after = (None,) * (variable.ndim - ahead - 1)
                    own[id(variable)] = PartitionSpec(*(None,) * ahead, axis, *after)
    for _, variable in nnx.iter_graph(new):
        if isinstance(variable, nnx.Variable):
            spec = own.get(id(variable), PartitionSpec())
            value = variable.get_raw_value()
            variable.set_raw_value(jax.device_put(value, NamedSharding(mesh, spec)))
    return new
