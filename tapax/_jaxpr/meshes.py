"""Programs with several meshes.

When a program is compiled, JAX names the shardings of its results by one mesh: that of an argument,
or else the first that the program uses. A result that is sharded over another mesh may have no name
there, and compilation fails. One that every device has all of has a name in every mesh.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tapax import _jax
from tapax._jax import Equation, Jaxpr, Value, typed
from tapax._jaxpr.bodies import bodies


def first_mesh(jaxpr: Jaxpr) -> Mesh | None:
    """The first mesh of devices that a program uses, as JAX looks for it."""
    eqns = _jax.open_jaxpr(jaxpr).eqns
    own = (mesh for eqn in eqns for mesh in _meshes(eqn))
    inner = (first_mesh(body) for eqn in eqns for body in bodies(eqn))
    return next(own, None) or next(filter(None, inner), None)


def _meshes(eqn: Equation) -> Iterator[Mesh]:
    """The meshes of devices that the parameters of an equation name."""
    for value in eqn.params.values():
        parts: Sequence[Any] = value if isinstance(value, _jax.SEQUENCES) else (value,)
        for part in parts:
            mesh: Any = part.mesh if isinstance(part, NamedSharding) else part
            if isinstance(mesh, Mesh) and not mesh.empty:
                yield mesh


def replicate(arrays: Sequence[Value], mesh: Mesh) -> list[Value]:
    """The arrays, each on all devices of a mesh; so are their gradients."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return [typed.with_sharding_constraint(x, everywhere) for x in arrays]
