"""Makers of built-in reducers: those that take an `axis`, and those whose state is sums."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tapax._jax import PyTree, Value
from tapax.reduce import _sums
from tapax.reduce._reducer import DirectState, Reducer


def along(
    name: str,
    see: Callable[..., Any],
    combine: Callable[[Any, Any], Any],
    finish: Callable[[Any], Any],
    needs: str = "numbers",
    start: Callable[[Any, Any], Any] | None = None,
    measure: Callable[..., Any] | None = None,
    **options: Any,
) -> Reducer:
    """Make a reducer that takes an `axis`; equal axes make equal reducers.

    `see(axis, *xs)` returns the state of one value, and `start(axis, x)` the state that has seen
    nothing. Without `start`, the state that has seen nothing consists of zeros. `measure(axis, x)`
    returns the result of one value.
    """

    @functools.cache
    def made(axis: Any) -> Reducer:
        def init(x: Value) -> Any:
            if start is not None:
                return start(axis, x)
            xs = [x, x] if options.get("paired") else [x]
            like = jax.eval_shape(functools.partial(see, axis), *xs)
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)

        def update(state: PyTree, *xs: Value) -> Any:
            return combine(state, see(axis, *xs))

        kept = {"needs": needs, "axis": axis, "make": made, "is_builtin": True, **options}
        if axis is not None:
            kept["quantity"] = None
        measured = None if measure is None else functools.partial(measure, axis)
        direct = DirectState(init, update, functools.partial(see, axis), finish, measured)
        return Reducer(init, update, combine, finish, name, direct=direct, **kept)

    return made(None)


def summing(
    name: str,
    add_up: Callable[..., Any],
    finish: Callable[[Any], Any],
    needs: str = "numbers",
    measure: Callable[..., Any] | None = None,
    **options: Any,
) -> Reducer:
    """Make a reducer whose state is sums over the elements, and the number of elements.

    `add_up(axes, *xs)` returns the sums over some axes, and `measure(axes, x)` the result.
    """

    def measured(axis: Any, x: Value) -> Any:
        assert measure is not None
        return measure(_sums.all_but(x, axis), _sums.wide(x))

    def see(axis: Any, *xs: Value) -> Any:
        axes = _sums.all_but(xs[0], axis)
        found = add_up(axes, *map(_sums.wide, xs))
        return (*found, jnp.broadcast_to(_sums.size(xs[0], axes), found[0].shape))

    options |= {"merge": _sums.add_all, "measure": None if measure is None else measured}
    return along(name, see, _sums.add, finish, needs, **options)
