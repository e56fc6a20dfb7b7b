"""`Reducer`: four functions that compute a statistic inside the program, and their options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tapax._jax import PyTree, Value


def _same(state: PyTree) -> Any:
    return state


class DirectState(NamedTuple):
    """Functions that need fewer operations for one value than the functions of a reducer.

    `see` makes the state of one value, and replaces `init` and `update`. `measure`, if there is
    one, makes its result, and replaces `finish` too. A reducer uses them only if it still has the
    functions that they replace: `dataclasses.replace` may have changed one.
    """

    init: Callable[..., Any]
    update: Callable[..., Any]
    see: Callable[..., Any]
    finish: Callable[..., Any] | None = None
    measure: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class Reducer:
    """Four functions that compute a statistic of a value inside the program, and their options.

    A state is a pytree of arrays, whose shapes and dtypes do not depend on the values that it has
    seen. `update` takes the value as it was marked: the value of one call, one iteration, one
    example of a vmap, or the part of it on one device. Reducers with equal functions and options
    are equal.

    The reducers of this package, such as `tapax.reduce.rms`, are instances. A call,
    `rms(axis=-1)`, makes a reducer with one result for each index along an axis.

    Attributes:
        init: `init()` or `init(x)` returns the state that has seen nothing. Combined with another
            state, it changes nothing. `x` has the shape and the dtype of a value.
        update: `update(state, x)` returns the state that has also seen the value `x`. A `paired`
            reducer has `update(state, gradient, value)`.
        combine: `combine(a, b)` returns the state that has seen the values of `a`, then those of
            `b`.
        finish: `finish(state)` returns the result: an array or a pytree of arrays. By default the
            result is the state.
        name: The name of the reducer in results, tables and errors.
        merge: `merge(states)` combines many states at once, which are stacked along the first axis.
            If it is None, the program calls `combine` instead.
        needs: The dtypes that the reducer accepts: `"numbers"`, `"real numbers"` or
            `"floating-point numbers"`.
        paired: Whether the reducer compares a gradient with the value of its site.
        over_maps: Whether to combine the examples of a vmap and the devices of a mesh.
        over_loops: Whether to combine the iterations of the loops around a site; see `total`.
        axis: The axes along which the reducer has one result for each index; None if it reduces all
            axes.
        edges: The edges of the bins, for a histogram.
        labels: The names of the entries along the last axis of the result.
        one_in: The number n, for a reducer that sees only one in n elements.
        make: `make(axis)` returns this reducer with one result for each index along `axis`; None if
            the reducer takes no axis.
        direct: A function that computes the state of one value faster than `init` and `update`,
            with the `init` and `update` that it replaces.
        quantity: The quantity that the state measures. The program can compute reducers of some
            quantities together, in one read of the value.
        doc: The docstring of this reducer, which `help` prints. By default `help` prints that of
            this class.
        is_builtin: Whether this package defines the functions. They then close over no traced
            array, and JAX traces them once for all values of a type. Without an axis, they take the
            elements of a value in any shape.

    Args:
        axis: In a call of a reducer: the axis of the units, or a tuple of axes. They are axes of
            the value as it was marked.

    Returns:
        The constructor returns the reducer; a call returns this reducer with one result for each
        unit, that is, each index along `axis`.

    Raises:
        TypeError: If `init`, `update`, `combine` or `finish` is not a function. In a call: if the
            reducer has no `make`, or `axis` is neither an integer nor a tuple of integers.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> largest = tapax.reduce.Reducer(
        ...     init=lambda x: jnp.array(-jnp.inf, x.dtype),
        ...     update=lambda state, x: jnp.maximum(state, x.max()),
        ...     combine=jnp.maximum,
        ...     name="largest",
        ... )
        >>> f = jax.vmap(lambda x: tapax.sow(x * 2, "h").sum())
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> float(tapax.capture(f, values={"h": largest})(x)[1].values["h"])
        10.0
        >>> largest.label, largest.total.label, largest.sees_directly
        ('largest', 'largest.total', False)
        >>> sum_of_units = tapax.reduce.sum(axis=-1)
        >>> tapax.capture(f, values={"h": sum_of_units})(x)[1].values["h"].tolist()
        [12.0, 18.0]
    """

    init: Callable[..., Any]
    update: Callable[..., Any]
    combine: Callable[[Any, Any], Any]
    finish: Callable[[Any], Any] = _same
    name: str = "reduced"
    _: dataclasses.KW_ONLY
    merge: Callable[[Any], Any] | None = None
    needs: str = "numbers"
    paired: bool = False
    over_maps: bool = True
    over_loops: bool = False
    axis: int | tuple[int, ...] | None = None
    edges: tuple[float, ...] | None = None
    labels: tuple[str, ...] | None = None
    one_in: int = 1
    make: Callable[[Any], Reducer] | None = dataclasses.field(default=None, repr=False)
    direct: DirectState | None = dataclasses.field(default=None, repr=False)
    quantity: str | None = dataclasses.field(default=None, repr=False)
    doc: str | None = dataclasses.field(default=None, repr=False, compare=False)
    is_builtin: bool = dataclasses.field(default=False, repr=False)

    def __post_init__(self) -> None:
        if self.doc is not None:
            object.__setattr__(self, "__doc__", inspect.cleandoc(self.doc))
        for field in ("init", "update", "combine", "finish"):
            if not callable(getattr(self, field)):
                raise TypeError(
                    f"Reducer takes a function as `{field}`, but was given "
                    f"{getattr(self, field)!r} of type {type(getattr(self, field)).__name__}."
                )

    @property
    def total(self) -> Reducer:
        """This reducer, with one result for all iterations of the loops around a site."""
        return dataclasses.replace(self, over_loops=True)

    def __call__(self, *, axis: int | tuple[int, ...]) -> Reducer:
        """Return this reducer with one result for each unit, that is, each index along `axis`."""
        if self.make is None:
            raise TypeError(f"tapax.reduce.{self.name} cannot be computed along an axis.")
        given: Any = axis
        try:
            kept = tuple(map(operator.index, given)) if np.ndim(given) else operator.index(given)
        except TypeError:
            raise TypeError(
                f"tapax.reduce.{self.name} takes an integer or several as `axis`, the axis of the "
                f"units, but was given {axis!r} of type {type(axis).__name__}."
            ) from None
        made = self.make(kept)
        return made.total if self.over_loops else made

    def __str__(self) -> str:
        options = [] if self.axis is None else [f"axis={self.axis}"]
        options += [] if self.one_in == 1 else [f"sample=1/{self.one_in}"]
        shown = f"({', '.join(options)})" if options else ""
        return f"{self.name}{shown}" + (".total" if self.over_loops else "")

    def __repr__(self) -> str:
        return f"<reducer {self}>"

    def named(self, name: str) -> Reducer:
        """Return this reducer under another name, for a site with two reducers of one name.

        Args:
            name: The new name.

        Returns:
            A reducer that differs from this one only in its name.

        Raises:
            Nothing: `name` is not checked.

        Example:
            >>> import tapax
            >>> tapax.reduce.rms.named("size")
            <reducer size>
        """
        return dataclasses.replace(self, name=name)

    @property
    def label(self) -> str:
        """The name of the result at a site with several reducers: the `rms` of `mlp:rms`."""
        sample = "" if self.one_in == 1 else f".sample{self.one_in}"
        return self.name + sample + (".total" if self.over_loops else "")

    def takes(self, dtype: Any) -> bool:
        """Return whether the reducer accepts values of a dtype.

        Args:
            dtype: The dtype, as an object or by name.

        Returns:
            True if `needs` includes `dtype`.

        Raises:
            TypeError: If `dtype` is not a dtype.
            KeyError: If `needs` is not one of its three words.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> tapax.reduce.rms.takes(jnp.bfloat16), tapax.reduce.rms.takes(jnp.int32)
            (True, False)
        """
        return any(jnp.issubdtype(dtype, kind) for kind in _NEEDS[self.needs])

    def see(self, *xs: Value) -> Any:
        """Compute the state that has seen one value, or a gradient and the value of its site.

        Args:
            *xs: The value, or, for a `paired` reducer, the gradient and the value.

        Returns:
            The state, a pytree of arrays. `finish(state)` returns the result.

        Raises:
            TypeError: If `update` takes another number of values.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> state = tapax.reduce.mean.see(jnp.array([1.0, 2.0, 6.0]))
            >>> float(tapax.reduce.mean.finish(state))
            3.0
        """
        if self.sees_directly and self.direct is not None:
            return self.direct.see(*xs)
        return self.update(self.start(xs[0]), *xs)

    @property
    def sees_directly(self) -> bool:
        """True if `see` takes fewer operations than `init` and `update`."""
        direct = self.direct
        return direct is not None and direct.init is self.init and direct.update is self.update

    def start(self, x: Value) -> Any:
        """Compute the state that has seen nothing.

        Args:
            x: A value, or anything with the shape and the dtype of the values to reduce.

        Returns:
            The result of `init`, a pytree, with its numbers converted to arrays.

        Raises:
            TypeError: If `init` returns something that is not a pytree of arrays or numbers.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> state = tapax.reduce.minmax.start(jnp.ones(3))
            >>> [float(end) for end in state]
            [inf, -inf]
        """
        state = self.init(x) if _takes_value(self.init) else self.init()
        return jax.tree.map(jnp.asarray, state)


_NEEDS: dict[str, tuple[Any, ...]] = {
    "numbers": (jnp.number, jnp.bool_),
    "real numbers": (jnp.integer, jnp.floating, jnp.bool_),
    "floating-point numbers": (jnp.inexact,),
}


@functools.lru_cache(maxsize=256)
def _takes_value(init: Callable[..., Any]) -> bool:
    try:
        inspect.signature(init).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def measure_of(reducer: Reducer) -> Callable[..., Any] | None:
    """Return a function from one value to its result; None if `see` and `finish` are as fast."""
    direct = reducer.direct
    if direct is None or not reducer.sees_directly or direct.finish is not reducer.finish:
        return None
    return direct.measure
