"""Types of programs, for annotations; types of arrays, with functions of shapes and shardings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import ClosedJaxpr, mapped_aval, unmapped_aval
from jax.extend.core import Jaxpr as JaxprWithoutConstants
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike as ArrayLike

AbstractValue: TypeAlias = Any
"""The abstract type of a value in JAX: a `ShapedArray`, the type of a reference or of a token."""
PyTree: TypeAlias = Any
Function: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
"""The positional arguments of a call, or the operands that JAX passes to a rule."""
Kwargs: TypeAlias = dict[str, Any]
Value: TypeAlias = Any
"""A value of an interpreted program: an array, a tracer, or an interpreter's stand-in for one."""
SEQUENCES: tuple[type[Any], ...] = (list, tuple)
"""For `isinstance`; pyright complains about the unknown element type of a bare `list`."""

if TYPE_CHECKING:

    class Primitive(core.Primitive):
        """The class of JAX, with types."""

        def bind(self, *args: Value, **params: Any) -> Any: ...
        def def_impl(self, impl: Function) -> Any: ...
        def def_abstract_eval(self, abstract_eval: Function) -> Any: ...
        def def_effectful_abstract_eval(self, effectful_abstract_eval: Function) -> Any: ...
else:
    Primitive = core.Primitive


class Var(Protocol):
    """A variable of a program."""

    @property
    def aval(self) -> AbstractValue: ...


Atom: TypeAlias = Var
"""An operand or a result of a program: a variable or a literal."""


class Equation(Protocol):
    """An equation of a program."""

    @property
    def primitive(self) -> Primitive: ...
    @property
    def params(self) -> dict[str, Any]: ...
    @property
    def invars(self) -> list[Atom]: ...
    @property
    def outvars(self) -> list[Var]: ...
    @property
    def effects(self) -> Iterable[Any]: ...
    @property
    def source_info(self) -> Any: ...
    @property
    def ctx(self) -> Any: ...

    def replace(self, **changes: object) -> Equation: ...


class OpenJaxpr(Protocol):
    """The variables and equations of a program."""

    @property
    def constvars(self) -> list[Var]: ...
    @property
    def invars(self) -> list[Var]: ...
    @property
    def outvars(self) -> list[Atom]: ...
    @property
    def eqns(self) -> list[Equation]: ...
    @property
    def effects(self) -> Iterable[Any]: ...

    def replace(self, **changes: object) -> OpenJaxpr: ...


Jaxpr: TypeAlias = ClosedJaxpr | JaxprWithoutConstants | OpenJaxpr
"""A program, with or without its constants."""


def with_axes_first(aval: AbstractValue, axes: Sequence[int], sizes: Sequence[int]) -> Any:
    """Move `axes` of a type to the front; if there are none, add leading axes of `sizes`."""
    order = [*axes, *(i for i in range(len(aval.shape)) if i not in axes)]
    shape, spec = ([x[i] for i in order] for x in (aval.shape, aval.sharding.spec))
    if not axes:
        shape, spec = [*sizes, *shape], [*(None for _ in sizes), *spec]
    sharding = aval.sharding.update(spec=PartitionSpec(*spec))
    return aval.update(shape=tuple(shape), weak_type=False, sharding=sharding)


def stacked(aval: AbstractValue, length: int) -> Any:
    """Add a leading axis of size `length` to a type."""
    return unmapped_aval(length, 0, aval)


def unstacked(aval: AbstractValue) -> Any:
    """Remove the leading axis of a type."""
    return mapped_aval(aval.shape[0], 0, aval)


def device_nbytes(aval: AbstractValue) -> int:
    """Return the bytes of a value on one device; all of them if its type has no sharding."""
    aval = getattr(aval, "inner_aval", aval)
    nbytes = math.prod(aval.shape) * aval.dtype.itemsize
    sharding: Any = getattr(aval, "sharding", None)
    if sharding is None:
        return nbytes
    return nbytes // math.prod(shard_count(sharding, axis) for axis in range(len(sharding.spec)))


def shard_count(sharding: Any, axis: int) -> int:
    """Return the number of pieces into which the sharding of a type cuts an axis."""
    sizes: Mapping[str, int] = sharding.mesh.shape
    part = sharding.spec[axis]
    names = part if type(part) is tuple else () if part is None else (part,)
    return math.prod(sizes[name] for name in names)


def is_on_host(aval: AbstractValue) -> bool:
    """Return whether a value is in host memory, where a policy of remat may offload it."""
    space = getattr(aval, "memory_space", None)
    return space is not None and space == jax.memory.Space.Host


def varying_axes(aval: AbstractValue) -> frozenset[str]:
    """Return the manual mesh axes over which a value differs from device to device."""
    kind = getattr(aval, "manual_axis_type", None)
    if kind is not None:
        return frozenset(kind.varying)
    return frozenset(getattr(aval, "vma", ()))


def with_varying(x: Value, axes: frozenset[str]) -> Any:
    """Declare that `x` varies over `axes` too, so that its type matches another carry or branch."""
    missing = tuple(sorted(axes - varying_axes(jax.typeof(x))))
    if not missing:
        return x
    return jax.lax.pcast(x, missing, to="varying")


def with_spec(x: Value, spec: Iterable[Any]) -> Any:
    """Shard `x` as `spec` says, over the explicit axes of its mesh only."""
    now = jax.typeof(x).sharding
    explicit = set(now.mesh.explicit_axes)

    def named(part: Any) -> bool:
        return part is not None and explicit.issuperset(part if type(part) is tuple else [part])

    wanted = PartitionSpec(*(part if named(part) else None for part in spec))
    return x if not explicit or now.spec == wanted else jax.reshard(x, wanted)


def spread(x: Value, over: Value) -> Any:
    """Broadcast `x` to `over` and shard it alike, for an operation on both.

    On an explicit mesh JAX requires equal shardings. Elsewhere return `x` unchanged.
    """
    # A constant knows no mesh.
    meshes = (jax.typeof(each).sharding.mesh for each in (x, over))
    if not x.ndim or not any(mesh.explicit_axes for mesh in meshes):
        return x
    return like(jnp.broadcast_to(x, over.shape), jax.typeof(over))


def on_mesh(x: Value) -> Any:
    """Give a constant, which knows no mesh, the type of an array on the current explicit mesh.

    An unrolled scan of JAX 0.10 stacks no other arrays there.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.explicit_axes or not jax.typeof(x).sharding.mesh.empty:
        return x
    return jax.reshard(x, PartitionSpec())


def whole(x: Value) -> Any:
    """Replicate `x` over the explicit axes of its mesh."""
    return with_spec(x, [None] * x.ndim)


def like(x: Value, aval: AbstractValue) -> Any:
    """Shard `x` like `aval`, and let it vary over the same axes, as carries and branches must."""
    return with_spec(with_varying(x, varying_axes(aval)), aval.sharding.spec)


def key_generator(dtype: Any) -> str:
    """Return the name of a key type's generator, for the argument `impl` of `jax.random.key`."""
    return dtype._impl.name


def zeros(aval: AbstractValue) -> Any:
    """Make zeros of the type `aval`, which may be a random key or vary over a mesh."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        out = jax.random.wrap_key_data(
            jnp.zeros(data.shape, data.dtype), impl=key_generator(aval.dtype)
        )
    else:
        out = jnp.zeros(aval.shape, aval.dtype)
    return like(out, aval)


def literal_value(literal: Any) -> Any:
    """Return the value of a literal with its dtype: a bare Python number would be weakly typed."""
    value, aval = literal.val, literal.aval
    if isinstance(value, (bool, int, float, complex)) and not getattr(aval, "weak_type", False):
        return np.asarray(value, aval.dtype)
    return value
