"""`Reducer`: how a value is made small inside the program.

A reducer is four functions and nothing else:

- `init()` or `init(x)`: the state that has seen nothing, which changes no other that it is combined
  with; `x` has the shape and dtype of a value.
- `update(state, x)`: the state that has seen the value `x` too. One that is `paired` compares a
  gradient with the value that it is the gradient of: `update(state, gradient, value)`.
- `combine(a, b)`: the state that has seen what `a` and then what `b` has seen.
- `finish(state)`: the result, an array or a pytree of arrays.

A state is a pytree of arrays, of the same shapes and dtypes whatever it has seen. The value is one
call, one iteration, one example of a vmap, one device's part of it, as it was marked.

>>> import jax, jax.numpy as jnp, tapax
>>> largest = tapax.reduce.Reducer(
...     init=lambda x: jnp.array(-jnp.inf, x.dtype),
...     update=lambda state, x: jnp.maximum(state, x.max()),
...     combine=jnp.maximum,
...     name="largest",
... )
>>> f = jax.vmap(lambda x: tapax.sow(x * 2, "h").sum())
>>> float(tapax.capture(f, values={"h": largest})(jnp.arange(6.0).reshape(3, 2))[1].values["h"])
10.0
"""

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
    """Makes the state of one value in fewer operations than `init` and `update` take.

    It is for reducers with these two functions: one of them may be replaced.
    """

    init: Callable[..., Any]
    update: Callable[..., Any]
    see: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Reducer:
    """How a value is reduced: see the module. Reducers of the same functions are equal.

    `merge` combines many states at once, which lie along the first axis; it may be left out.
    `needs` says what numbers the reducer is for. If it is not `over_maps`, the examples of a vmap
    and the devices of a mesh are not combined. `edges` are those of a histogram; `labels` name the
    entries of the last axis of its result. It sees one in so many elements, `one_in`.
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
    """Makes the same reducer with one result for each place along an axis."""
    direct: DirectState | None = dataclasses.field(default=None, repr=False)
    """Another way to the state of one value."""
    quantity: str | None = dataclasses.field(default=None, repr=False)
    """What the state is of, for reducers that can see a value together with others."""
    is_builtin: bool = dataclasses.field(default=False, repr=False)
    """Whether the functions are those of this package.

    Then they close over no traced array, and are traced once for all values of a type. Without an
    axis, they take the elements of a value in any shape."""

    def __post_init__(self) -> None:
        for field in ("init", "update", "combine", "finish"):
            if not callable(getattr(self, field)):
                raise TypeError(
                    f"Reducer takes a function as `{field}`, but was given "
                    f"{getattr(self, field)!r} of type {type(getattr(self, field)).__name__}."
                )

    @property
    def total(self) -> Reducer:
        """The same reducer, merged over all the loops that a site is in."""
        return dataclasses.replace(self, over_loops=True)

    def __call__(self, *, axis: int | tuple[int, ...]) -> Reducer:
        """The same reducer with a result for each unit: each place along `axis` of the value."""
        if self.make is None:
            raise TypeError(f"tapax.reduce.{self.name} cannot be had along an axis.")
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
        """The same reducer by another name, where a site has two of one name."""
        return dataclasses.replace(self, name=name)

    @property
    def label(self) -> str:
        """What it is called where a site has several: `mlp:rms`."""
        sample = "" if self.one_in == 1 else f".sample{self.one_in}"
        return self.name + sample + (".total" if self.over_loops else "")

    def takes(self, dtype: Any) -> bool:
        """Whether it is for values of this type."""
        return any(jnp.issubdtype(dtype, kind) for kind in _NEEDS[self.needs])

    def see(self, *xs: Value) -> Any:
        """The state that has seen one value, or a gradient and its value."""
        if self.sees_directly and self.direct is not None:
            return self.direct.see(*xs)
        return self.update(self.start(xs[0]), *xs)

    @property
    def sees_directly(self) -> bool:
        """Whether `see` takes fewer operations than `init` and `update`."""
        direct = self.direct
        return direct is not None and direct.init is self.init and direct.update is self.update

    def start(self, x: Value) -> Any:
        """The state that has seen nothing, for values of the type of `x`."""
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
