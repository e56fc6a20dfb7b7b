"""Programs with several meshes.

When it compiles a program, JAX expresses the shardings of the results by the axes of one mesh: that
of an argument, or else the first mesh that the program uses. If a result is sharded over another
mesh, JAX may be unable to express its sharding, and compilation fails. A replicated result can be
expressed in every mesh.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tapax import _jax
from tapax._jax import Equation, Jaxpr, Value, typed
from tapax._jaxpr.bodies import bodies


def first_mesh(jaxpr: Jaxpr) -> Mesh | None:
    """Find the first mesh of devices that a program uses, in the order in which JAX searches."""
    eqns = _jax.open_jaxpr(jaxpr).eqns
    outer = (mesh for eqn in eqns for mesh in _meshes(eqn))
    inner = (first_mesh(body) for eqn in eqns for body in bodies(eqn))
    return next(outer, None) or next(filter(None, inner), None)


def _meshes(eqn: Equation) -> Iterator[Mesh]:
    """Yield the meshes of devices in the parameters of an equation."""
    for value in eqn.params.values():
        parts: Sequence[Any] = value if isinstance(value, _jax.SEQUENCES) else (value,)
        for part in parts:
            mesh: Any = part.mesh if isinstance(part, NamedSharding) else part
            if isinstance(mesh, Mesh) and not mesh.empty:
                yield mesh


def replicate(arrays: Sequence[Value], mesh: Mesh) -> list[Value]:
    """Replicate arrays, and hence their gradients, over all devices of a mesh."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return [typed.with_sharding_constraint(x, everywhere) for x in arrays]
