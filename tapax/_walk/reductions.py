"""Reductions: the states of reducers in a walk, from the value at a tap to the result.

At a tap a reducer turns the value into a state, also over the examples of a vmap. A scan stacks the
states of its iterations, or carries one state for a reducer over loops; a while loop always carries
one state. Where a `shard_map` ends, the walk combines the states of its devices. So the walk keeps
only the state of a value, and computes the result from it at the end.

Where nothing ran, as in a branch not taken, zeros fill the state and a mask hides it: such a state
is never combined with another.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._jax import PyTree, Value, map_leaves, pytrees, typed
from tapax._jaxpr.leading_axes import vmapped, where
from tapax._sites import Site, SiteError
from tapax.reduce import Reducer
from tapax.reduce._reducer import measure_of


class Reduction(NamedTuple):
    """The reduction of the value of a site, without the arrays of its state.

    `own` is the type of the value as it was marked; `mapped` has the sizes of the batch axes of the
    state, which come after the axes of loops. `label` follows the name of the site. If the
    reduction `is_finished`, the arrays are those of the result instead of a state.
    """

    reducer: Reducer
    label: str
    own: Any
    mapped: tuple[int, ...]
    treedef: Any
    is_finished: bool = False

    @property
    def arrays(self) -> int:
        """The number of arrays of the state."""
        return self.treedef.num_leaves

    def empty(self, like: Sequence[Any]) -> list[Any]:
        """Make a state that has seen nothing, with the types and all axes of `like`."""
        start = jax.tree.leaves(_started(self.reducer, self.own))
        both = zip(start, like, strict=True)
        return [_jax.like(jnp.broadcast_to(x, t.shape), t) for x, t in both]

    def combine(self, a: Sequence[Any], b: Sequence[Any], lead: int) -> list[Any]:
        """Combine two states whose first `lead` axes are those of loops."""
        fn = vmapped(self.reducer.combine, lead + len(self.mapped))
        return jax.tree.leaves(fn(self.treedef.unflatten(a), self.treedef.unflatten(b)))

    def merge(self, state: Sequence[Any], lead: int) -> list[Any]:
        """Combine the states along the first axis; the next `lead` axes are those of loops."""

        def merged(*leaves: Any) -> Any:
            if not leaves[0].shape[0]:
                return _started(self.reducer, self.own)
            return _merged(self.reducer, self.treedef.unflatten(leaves))

        # The states to combine are along the first axis, so map over the axis after it each time.
        for _ in range(lead + len(self.mapped)):
            merged = jax.vmap(merged, in_axes=1, out_axes=0)
        return jax.tree.leaves(merged(*state))

    def masked(self, state: Sequence[Any], valid: Value) -> list[Any]:
        """Return the state where it is valid, and elsewhere a state that has seen nothing."""
        if valid is None:
            return list(state)
        empty = self.empty([jax.typeof(x) for x in state])
        return [where(valid, x, y) for x, y in zip(state, empty, strict=True)]

    def finish(self, state: Sequence[Any], valid: Value, lead: int) -> Any:
        """Compute the result: zeros where nothing ran."""
        fn = _finishing(self.reducer, lead + len(self.mapped))
        result = fn(self.treedef.unflatten(self.masked(state, valid)))
        if valid is None:
            return map_leaves(typed.asarray, result)
        return map_leaves(lambda x: where(valid, x, _jax.zeros(jax.typeof(x))), result)

    def finish_all(self, states: Sequence[Sequence[Any]], lead: int) -> list[Any]:
        """Compute the results of several states of equal types, which are all valid."""
        if len(states) == 1:
            return [self.finish(states[0], None, lead)]
        options = {"treedef": self.treedef, "lead": lead + len(self.mapped)}
        finish = _bind_finish if self.reducer.is_builtin else _finish_stacked
        leaves = finish(*itertools.chain.from_iterable(states), reducer=self.reducer, **options)
        one = [jax.typeof(x) for x in states[0]]
        made = _finishing(self.reducer, options["lead"])
        structure = pytrees.structure(typed.eval_shape(made, self.treedef.unflatten(one)))
        return [map_leaves(typed.asarray, result) for result in _unflatten_all(structure, leaves)]


def reduce(
    site: Site,
    reducer: Reducer,
    label: str,
    operands: Sequence[Any],
    mapped: int,
    live: Value,
    seen: PyTree = None,
    once: bool = False,
) -> tuple[Reduction, list[Any], Any]:
    """Make the state of a reducer that has seen a value; return its reduction and its mask too.

    `operands` are the value, or a gradient and its value; their first `mapped` axes are batch axes.
    `live` is the mask of the examples that count, over the outermost batch axes. `seen` is the
    state, if it is known already. `once` means that the reducer sees no other value.
    """
    x = operands[0]
    own = jax.ShapeDtypeStruct(x.shape[mapped:], x.dtype)
    treedef = _checked(site, reducer, own)

    reduction = Reduction(reducer, label, own, x.shape[:mapped], treedef)
    if live is None and reducer.is_builtin and reducer.over_maps and reducer.axis is None:
        # The reducer treats the examples like all other elements.
        mapped, reduction = 0, reduction._replace(mapped=())
    if once and seen is None and live is None and not mapped and _measures(reducer):
        result, structure = pytrees.flatten(_measuring_once(reducer)(*operands))
        return reduction._replace(treedef=structure, is_finished=True), result, None
    state = _seeing(reducer, own, mapped)(*operands) if seen is None else seen
    state = jax.tree.leaves(state)
    if not mapped or not reducer.over_maps:
        return reduction, state, live
    if live is not None:
        state, live = reduction.masked(state, live), jnp.any(live)
    reduction = reduction._replace(mapped=())
    return reduction, reduction.merge(along_one_axis(state, mapped), 0), live


def _seeing(reducer: Reducer, own: PyTree, mapped: int) -> Callable[..., Any]:
    """Return the function from a value to a state."""
    return _seeing_once(reducer, own, mapped) if reducer.is_builtin else _see(reducer, own, mapped)


def _see(reducer: Reducer, own: PyTree, mapped: int) -> Callable[..., Any]:
    if reducer.sees_directly:
        return vmapped(reducer.see, mapped)
    return vmapped(lambda *xs: reducer.update(_started(reducer, own), *xs), mapped)


@functools.lru_cache(maxsize=1024)
def _seeing_once(reducer: Reducer, own: PyTree, mapped: int) -> Callable[..., Any]:
    # JAX traces and lowers this function once for all sites with values of one type.
    return _jax.jit_once(_see(reducer, own, mapped))


def _measures(reducer: Reducer) -> bool:
    """Return whether to compute the result of a single value without a state.

    On a CPU, XLA then compiles a program with many sites in less time. A GPU starts fewer kernels
    if it finishes many states together.
    """
    return measure_of(reducer) is not None and jax.default_backend() == "cpu"


@functools.lru_cache(maxsize=1024)
def _measuring_once(reducer: Reducer) -> Callable[..., Any]:
    measure = measure_of(reducer)
    assert measure is not None and reducer.is_builtin
    return _jax.jit_once(measure)


def _finishing(reducer: Reducer, lead: int) -> Callable[..., Any]:
    """Return the function from states with `lead` leading axes to results."""
    made = vmapped(reducer.finish, lead)
    return _finishing_once(reducer, lead) if reducer.is_builtin else made


@functools.lru_cache(maxsize=1024)
def _finishing_once(reducer: Reducer, lead: int) -> Callable[..., Any]:
    return _jax.jit_once(vmapped(reducer.finish, lead))


def _unflatten_all(structure: Any, leaves: Sequence[Value]) -> list[Any]:
    """Divide leaves into pytrees of one structure."""
    count = structure.num_leaves
    return [structure.unflatten(leaves[i : i + count]) for i in range(0, len(leaves), count)]


def _finish_each(*arrays: Value, reducer: Reducer, treedef: Any, lead: int) -> list[Value]:
    # For a CPU, XLA compiles equal operations once, but each slice of an array separately.
    finish = _finishing(reducer, lead)
    return jax.tree.leaves([finish(state) for state in _unflatten_all(treedef, arrays)])


def _finish_stacked(*arrays: Value, reducer: Reducer, treedef: Any, lead: int) -> list[Value]:
    # A GPU starts a kernel for every operation.
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *_unflatten_all(treedef, arrays))
    finished = jax.tree.leaves(_finishing(reducer, lead + 1)(stacked))
    return [x[i] for i in range(len(arrays) // treedef.num_leaves) for x in finished]


_bind_finish = _jax.for_gpu("finish", _finish_each, _finish_stacked)


def along_one_axis(arrays: Sequence[Any], axes: int) -> list[Any]:
    """Reshape the first `axes` axes to one axis, unsharded in an explicit mesh."""
    return [_jax.whole(x).reshape(-1, *x.shape[axes:]) for x in arrays]


def _started(reducer: Reducer, own: PyTree) -> Any:
    """Make the state that has seen nothing, with the dtypes of a state that has seen a value."""
    like = _types_of(reducer, own)
    return map_leaves(lambda x, t: typed.asarray(x, t.dtype), reducer.start(own), like)


def _types_of(reducer: Reducer, own: PyTree) -> Any:
    """Return the types of a state that has seen a value: a Python number has a dtype only then."""
    return _known_types(reducer, own, _jax.trace_context())


@functools.lru_cache(maxsize=1024)
def _known_types(reducer: Reducer, own: PyTree, context: Any) -> Any:
    del context  # types depend on the settings of JAX
    start = typed.eval_shape(lambda: reducer.start(own))
    if not any(leaf.weak_type for leaf in jax.tree.leaves(start)):
        return start
    return typed.eval_shape(
        lambda *xs: reducer.update(reducer.start(own), *xs), *_given(reducer, own)
    )


def _given(reducer: Reducer, own: PyTree) -> list[Any]:
    return [own] * (2 if reducer.paired else 1)


def refusal(site: Site, reducer: Reducer, own: PyTree) -> str | None:
    """Say in a sentence why a reducer rejects values of a type; None if it accepts them."""
    if not reducer.takes(own.dtype):
        return (
            f"tapax.reduce.{reducer} needs {reducer.needs}, but the {site.described}, has values "
            f"of the type {own.dtype}. Choose a reducer that takes them, or leave the site out."
        )
    axes = () if reducer.axis is None else reducer.axis
    rank = len(own.shape)
    if all(-rank <= axis < rank for axis in (axes if isinstance(axes, tuple) else (axes,))):
        return None
    return (
        f"The {site.described}, is reduced by tapax.reduce.{reducer}, but its values have {rank} "
        f"axes: {list(own.shape)}."
    )


def _checked(site: Site, reducer: Reducer, own: PyTree) -> Any:
    """Return the structure of the state of a reducer; raise if its types are not stable."""
    wrong = _instability(reducer, own, _jax.trace_context())
    if wrong is not None:
        raise SiteError(
            f"The {site.described}, is reduced by {reducer.name!r}, whose state must keep its "
            f"structure, shapes and dtypes, but {wrong}."
        )
    return pytrees.structure(_types_of(reducer, own))


@functools.lru_cache(maxsize=1024)
def _instability(reducer: Reducer, own: PyTree, context: Any) -> str | None:
    """Say how the state of a reducer changes its types; None if it keeps them."""
    del context
    given = _given(reducer, own)
    start = typed.eval_shape(lambda: _started(reducer, own))
    once = typed.eval_shape(lambda *xs: reducer.update(_started(reducer, own), *xs), *given)
    if _shown(start) != _shown(once):
        return f"`init` gives {_shown(start)} and `update` gives {_shown(once)}"
    both = typed.eval_shape(reducer.combine, once, once)
    if _shown(both) != _shown(once):
        return f"`update` gives {_shown(once)} and `combine` gives {_shown(both)}"
    return None


def _shown(state: PyTree) -> str:
    return str(map_leaves(lambda s: f"{s.dtype}{list(s.shape)}", state)).replace("'", "")


def _merged(reducer: Reducer, states: Any) -> Any:
    """Combine many states along the first axis, in order, two by two."""
    count = jax.tree.leaves(states)[0].shape[0]
    if reducer.merge is not None and count != 1:
        return reducer.merge(states)
    while count > 1:
        even = count - count % 2
        first, second = (
            map_leaves(lambda x: x[start:even:2], states)  # noqa: B023
            for start in (0, 1)
        )
        combined = jax.vmap(reducer.combine)(first, second)
        if count % 2:
            combined = map_leaves(lambda x, y: jnp.concatenate([x, y[-1:]]), combined, states)
        states, count = combined, even // 2 + count % 2
    return map_leaves(lambda x: x[0], states)
