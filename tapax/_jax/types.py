"""Types: those of programs for annotations, and those of arrays, with their zeros and literals."""

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
"""The type that JAX gives a value: a `ShapedArray`, the type of a reference or of a token."""
PyTree: TypeAlias = Any
Function: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
"""The positional arguments of a call, or the operands that a rule of JAX is given."""
Kwargs: TypeAlias = dict[str, Any]
Value: TypeAlias = Any
"""A value inside a program that is interpreted: an array, a tracer, or what stands for one."""
SEQUENCES: tuple[type[Any], ...] = (list, tuple)
"""For `isinstance`: of a bare `list` pyright says that it does not know what it holds."""

if TYPE_CHECKING:

    class Primitive(core.Primitive):
        """JAX's own class, with types."""

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
"""An operand or a result of a program: a variable, or else a literal."""


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
"""A program, with its constants or without."""


def with_axes_first(aval: AbstractValue, axes: Sequence[int], sizes: Sequence[int]) -> Any:
    """A type with some of its axes in front, or with new ones of these sizes if it has none."""
    order = [*axes, *(i for i in range(len(aval.shape)) if i not in axes)]
    shape, spec = ([x[i] for i in order] for x in (aval.shape, aval.sharding.spec))
    if not axes:
        shape, spec = [*sizes, *shape], [*(None for _ in sizes), *spec]
    sharding = aval.sharding.update(spec=PartitionSpec(*spec))
    return aval.update(shape=tuple(shape), weak_type=False, sharding=sharding)


def stacked(aval: AbstractValue, length: int) -> Any:
    """The type of several values along a new leading axis."""
    return unmapped_aval(length, 0, aval)


def unstacked(aval: AbstractValue) -> Any:
    """The type of what lies along the first axis."""
    return mapped_aval(aval.shape[0], 0, aval)


def device_nbytes(aval: AbstractValue) -> int:
    """The size of a value on one device, if its type says how it is divided; else all of it."""
    aval = getattr(aval, "inner_aval", aval)
    nbytes = math.prod(aval.shape) * aval.dtype.itemsize
    sharding: Any = getattr(aval, "sharding", None)
    if sharding is None:
        return nbytes
    sizes: Mapping[str, int] = sharding.mesh.shape
    axes = (axis for part in sharding.spec for axis in (part if type(part) is tuple else (part,)))
    return nbytes // math.prod(sizes[axis] for axis in axes if axis is not None)


def is_on_host(aval: AbstractValue) -> bool:
    """Whether a value is in the memory of the host, where a policy of remat may have moved it."""
    space = getattr(aval, "memory_space", None)
    return space is not None and space == jax.memory.Space.Host


def varying_axes(aval: AbstractValue) -> frozenset[str]:
    """The manual mesh axes over which a value differs from device to device."""
    kind = getattr(aval, "manual_axis_type", None)
    if kind is not None:
        return frozenset(kind.varying)
    return frozenset(getattr(aval, "vma", ()))


def with_varying(x: Value, axes: frozenset[str]) -> Any:
    """`x`, declared to vary over `axes` too, as a carry or a branch must be to match another."""
    missing = tuple(sorted(axes - varying_axes(jax.typeof(x))))
    if not missing:
        return x
    return jax.lax.pcast(x, missing, to="varying")


def with_spec(x: Value, spec: Iterable[Any]) -> Any:
    """`x`, divided over the explicit axes of a mesh that a spec names for each of its axes."""
    now = jax.typeof(x).sharding
    explicit = set(now.mesh.explicit_axes)

    def named(part: Any) -> bool:
        return part is not None and explicit.issuperset(part if type(part) is tuple else [part])

    wanted = PartitionSpec(*(part if named(part) else None for part in spec))
    return x if not explicit or now.spec == wanted else jax.reshard(x, wanted)


def spread(x: Value, over: Value) -> Any:
    """`x`, for an operation with an array that it broadcasts with.

    On an explicit mesh JAX wants both to be divided in the same way.
    """
    # A constant knows no mesh.
    meshes = (jax.typeof(each).sharding.mesh for each in (x, over))
    if not x.ndim or not any(mesh.explicit_axes for mesh in meshes):
        return x
    return like(jnp.broadcast_to(x, over.shape), jax.typeof(over))


def whole(x: Value) -> Any:
    """`x`, all of it on every device of an explicit mesh."""
    return with_spec(x, [None] * x.ndim)


def like(x: Value, aval: AbstractValue) -> Any:
    """`x`, on the devices of a mesh in the way that a type says, as a carry or a branch must be."""
    return with_spec(with_varying(x, varying_axes(aval)), aval.sharding.spec)


def key_generator(dtype: Any) -> str:
    """The name of the generator whose keys have this type, as `jax.random.key` takes it."""
    return dtype._impl.name


def zeros(aval: AbstractValue) -> Any:
    """An array of zeros of the type `aval`, random keys and device-varying types included."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        out = jax.random.wrap_key_data(
            jnp.zeros(data.shape, data.dtype), impl=key_generator(aval.dtype)
        )
    else:
        out = jnp.zeros(aval.shape, aval.dtype)
    return like(out, aval)


def literal_value(literal: Any) -> Any:
    """A literal as an array of its own type: a bare Python number would be weakly typed."""
    value, aval = literal.val, literal.aval
    if isinstance(value, (bool, int, float, complex)) and not getattr(aval, "weak_type", False):
        return np.asarray(value, aval.dtype)
    return value
