"""`shard`: divide the members of a model over the devices of a mesh."""

from typing import TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tapax._sites import wrong_type
from tapax.nn._factors import EnsembleLayer
from tapax.nn._predict import count_members

M = TypeVar("M", bound=nnx.Module)


def shard(model: M, mesh: Mesh, axis: str) -> M:
    """Divide the members of a copy of a model over an axis of a mesh.

    Each device has the factors and biases of some of the members, and a copy of everything else.
    Rows with the sharding `NamedSharding(mesh, P(axis))` then pass through the model without any
    communication, as long as the operations between its layers treat rows one by one.

    Args:
        model: A model with BatchEnsemble layers. It stays as it is.
        mesh: The mesh of devices.
        axis: The name of an axis of the mesh, whose size divides the number of members.

    Returns:
        A model of the same class.

    Raises:
        TypeError: If `mesh` is not a `jax.sharding.Mesh`.
        ValueError: If the mesh has no such axis, or its devices do not divide the members.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> from tapax import nn
        >>> mesh = jax.make_mesh((1,), ("members",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> model = nn.batch_ensemble(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), 4, rngs=0)
        >>> model = nn.shard(model, mesh, "members")
        >>> model.r.sharding.spec, model.kernel.sharding.spec
        (P('members', None), P())
    """
    if not isinstance(mesh, Mesh):
        raise wrong_type("`mesh` must be a jax.sharding.Mesh, but is", mesh)
    if axis not in mesh.axis_names:
        raise ValueError(
            f"`axis` must be an axis of the mesh, one of {mesh.axis_names}, but is {axis!r}."
        )
    members = count_members(model)
    if members % mesh.shape[axis]:
        raise ValueError(
            f"`axis` {axis!r} of the mesh has {mesh.shape[axis]} devices, which do not divide the "
            f"{members} members of `model`."
        )
    new = nnx.clone(model)
    specs: dict[int, PartitionSpec] = {}
    for _, layer in nnx.iter_graph(new):
        if isinstance(layer, EnsembleLayer):
            ahead = layer.r.ndim - len(layer.base.shapes(layer).r) - 1
            for variable in (layer.r, layer.s, getattr(layer, "bias", None)):
                if variable is not None:
                    after = (None,) * (variable.ndim - ahead - 1)
                    specs[id(variable)] = PartitionSpec(*(None,) * ahead, axis, *after)
    for _, variable in nnx.iter_graph(new):
        if isinstance(variable, nnx.Variable):
            spec = specs.get(id(variable), PartitionSpec())
            value = variable.get_raw_value()
            variable.set_raw_value(jax.device_put(value, NamedSharding(mesh, spec)))
    return new
