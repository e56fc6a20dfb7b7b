"""Emission: the primitive with which a running loop sends a record to the host.

`emit` takes the number of an iteration and the states of reducers, and has no results. It compiles
to a callback, which receives the finished statistics. The rules of the primitive ensure that the
program sends each record once:

- under `vmap` the states of the examples are merged first, as for a `vmap` inside the loop; an
  example whose loop has ended no longer counts;
- under a derivative nothing is differentiated: the states are those of the primal values;
- under `remat` the copy in the backward pass sends nothing.

The callback is not ordered, because an ordered callback passes a token through the whole program.
The loop calls it after each chunk of iterations, so records arrive in order anyway.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.interpreters import batching

from tapax import _jax
from tapax._calling.collect import make_taps
from tapax._jax import Args, Equation, PyTree, Value, typed
from tapax._jaxpr.leading_axes import align
from tapax._results import Taps
from tapax._sites import Site
from tapax._walk.entries import Entry
from tapax.monitoring._packed_arrays import PackedArrays

Receiver = Callable[[int, Callable[[], Taps] | None], None]
"""A function on the host, for which the running program waits.

Its arguments are the number of an iteration and a function that makes its statistics; or, at the
end of a loop, the number of all iterations and None."""


@dataclasses.dataclass(frozen=True, eq=False)
class Emission:
    """The entries that a loop emits, without their arrays, and the function that receives them.

    `sites` lists the sites of the program in order. `conditional` is True if the loop is in a
    branch.
    """

    receive: Receiver
    entries: tuple[Entry, ...] = ()
    sites: tuple[Site, ...] = ()
    conditional: bool = False


@dataclasses.dataclass(frozen=True)
class CountedIteration:
    """The number of an iteration, and whether it counts.

    `active` says so for the example, and `on_device` for the device.
    """

    number: Value
    active: Value
    on_device: Value

    @property
    def arrays(self) -> tuple[Value, ...]:
        return self.number, self.active, self.on_device


class EmitEffect(_jax.Effect):
    """The effect that keeps dead-code elimination from removing emissions."""

    def __repr__(self) -> str:
        return "Emit"


emit_effect = EmitEffect()
emit_p = _jax.Primitive("emit")
emit_p.multiple_results = True


def emit(emission: Emission, iteration: CountedIteration, arrays: Sequence[Value]) -> None:
    """Send the arrays of the entries of `emission` to the host."""
    emit_p.bind(*iteration.arrays, *arrays, emission=emission)


def merge_examples(entry: Entry, size: int, active: Value) -> Entry:
    """Merge the examples, or the devices, along a new first axis of the arrays of an entry.

    `active` masks the examples that count; it is None if all of them count.
    """
    reduction, state, valid = entry.reduction, entry.state, entry.valid
    assert reduction is not None
    if active is not None:
        valid = active if valid is None else valid * align(active, valid.ndim).astype(valid.dtype)
    if reduction.reducer.over_maps:
        merged = reduction.merge(reduction.masked(state, valid), entry.lead)
        # Without a mask every entry is valid: nothing is emitted unless some example counts.
        ran = None if entry.valid is None else valid.max(0)
        return entry._replace(value=tuple(merged), valid=ran)
    state = [jnp.moveaxis(x, 0, entry.lead) for x in state]
    if valid is not None:
        valid = valid.reshape(valid.shape + (1,) * (1 + entry.lead - valid.ndim))
        loops = state[0].shape[: entry.lead]
        valid = jnp.broadcast_to(valid, (size, *loops, *valid.shape[1 + entry.lead :]))
        valid = jnp.moveaxis(valid, 0, entry.lead)
    mapped = (size, *reduction.mapped)
    return entry._replace(
        value=tuple(state), valid=valid, reduction=reduction._replace(mapped=mapped)
    )


def _send(
    number: Value, active: Value, on_device: Value, *arrays: Value, emission: Emission
) -> list[Any]:
    """Call the host, with one operand for all numbers of a dtype."""
    given = iter(arrays)
    entries = [entry.with_arrays(given) for entry in emission.entries]
    statistics = PackedArrays.of(make_taps(entries, emission.sites) if entries else None)
    layout = statistics.layout  # the host must not keep the traced arrays

    def receive(iteration: np.ndarray, *packed: np.ndarray) -> None:
        number, counts = iteration.tolist()
        if counts:
            # Copy the operands, because the program reuses their memory.
            copies = [x.copy() for x in packed]
            unpack = functools.partial(layout.unpack, copies)
            emission.receive(number, unpack if copies else None)

    # Each operand of a callback costs time, so pass as few as possible.
    iteration = jnp.stack([number, jnp.asarray(active & on_device, number.dtype)])
    _jax.call_host(receive, iteration, *statistics.packed)
    return []


def _abstract_eval(*avals: Any, emission: Emission) -> Any:
    del avals
    return [], {emit_effect, *(_io_effects() if emission.conditional else ())}


def _io_effects() -> frozenset[Any]:
    """Return the effects of a callback, with which JAX refuses to run a branch not taken."""
    return frozenset(jax.make_jaxpr(lambda: io_callback(lambda: None, None))().effects)


def _batch(axis_data: Any, args: Args, dims: Any, *, emission: Emission) -> Any:
    size = axis_data.size
    if all(d is None for d in dims):
        return emit_p.bind(*args, emission=emission), []
    iteration, dim = CountedIteration(*args[:3]), CountedIteration(*dims[:3])
    mask = None if dim.active is None else jnp.moveaxis(iteration.active, dim.active, 0)
    iteration = CountedIteration(
        # If the examples end their loops one by one, the running examples have the largest.
        iteration.number if dim.number is None else jnp.max(iteration.number),
        iteration.active if mask is None else jnp.any(mask),
        iteration.on_device if dim.on_device is None else jnp.all(iteration.on_device),
    )
    given = zip(args[3:], dims[3:], strict=True)
    entries: list[Entry] = []
    for entry in emission.entries:
        mapped = [next(given) for _ in entry.arrays]
        if all(d is None for _, d in mapped):
            entries.append(entry.with_arrays(x for x, _ in mapped))
            continue
        spread = [batching.bdim_at_front(x, d, size) for x, d in mapped]
        entries.append(merge_examples(entry.with_arrays(iter(spread)), size, mask))
    arrays = [a for e in entries for a in e.arrays]
    merged = dataclasses.replace(emission, entries=tuple(e.bare for e in entries))
    return emit_p.bind(*iteration.arrays, *arrays, emission=merged), []


def _jvp(primals: PyTree, tangents: PyTree, *, emission: Emission) -> Any:
    del tangents
    return emit_p.bind(*primals, emission=emission), []


def _transpose(cts: PyTree, *args: Any, emission: Emission) -> Any:
    del cts, emission
    return [None for _ in args]


def _partial_eval_custom(saveable: Any, unknown: Any, known: Any, eqn: Equation) -> Any:
    """Send in the forward pass of a remat, but not where the backward pass recomputes."""
    del saveable
    if not any(unknown):
        return eqn, None, [], [], []
    inputs = [v for v, inst in zip(eqn.invars, known, strict=True) if not inst]
    return None, eqn, [], [], [v for v in inputs if not isinstance(v, _jax.Literal)]


def _remat(*args: Any, emission: Emission) -> Any:
    return emit_p.bind(*args, emission=emission), None, lambda residuals, *args: []


_jax.allow_effect(EmitEffect)
_jax.cache_weakly(Emission)
emit_p.def_impl(_send)
emit_p.def_effectful_abstract_eval(_abstract_eval)
_jax.register_rules(emit_p, typed.lower_fun(_send, multiple_results=True), _batch, _jvp, _transpose)
_jax.register_partial_eval_custom(emit_p, _partial_eval_custom)
_jax.register_remat(emit_p, _remat)
