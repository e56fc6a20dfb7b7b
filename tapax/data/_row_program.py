"""The programs of a harvest, which compute the rows of every site of a batch on the device.

The first program is the user's function, cut down to what the selected values and gradients need.
It returns the captured arrays as rows. The second program converts the rows to the dtype in which
they are stored, and measures them. The two are separate because the compiler could otherwise fuse
them, and change the last bits of the values.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapax import _jax
from tapax._api.cut import evaluate_before_end
from tapax._calling.program import TracedCall
from tapax._calling.transform import Transform, TransformedFunction
from tapax._jax import PyTree, Value
from tapax._jaxpr.digest import digest
from tapax._marks.marked_jaxprs import strip
from tapax._results import SiteDict, Taps
from tapax._sites import Site, SiteError, nearest, show
from tapax._walk.plan import Plan
from tapax.data._columns import spread_mask
from tapax.data._row_layout import RowLayout, check_same_rows, leave_out_step
from tapax.data._shard_format import check_storable, dtype_of
from tapax.data._statistics import measure_rows

GRADIENT = ".grad"
"""The ending of the name under which the gradient of a site is stored."""


@dataclasses.dataclass(frozen=True)
class RowSite:
    """A site of a dataset: the dtype and shape of a row, and the source line of the value."""

    name: str
    kind: str
    dtype: str
    computed_dtype: str
    shape: tuple[int, ...]
    source: str


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "ran"],
    meta_fields=["sites", "row_sizes"],
)
@dataclasses.dataclass(frozen=True)
class ComputedRows:
    """The rows of one batch: an array for each site, with the rows as its first axis.

    For a site in a branch or a while loop, `ran` says whether the program computed the value.
    `row_sizes` are the sizes of the axes that became rows.
    """

    arrays: SiteDict
    ran: SiteDict
    sites: tuple[RowSite, ...]
    row_sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RowBatch:
    """The rows of one batch in the dtypes in which they are stored, and their statistics."""

    arrays: Mapping[str, Value]
    statistics: Mapping[str, Mapping[str, Value]]
    ran: Mapping[str, Value]
    sites: tuple[RowSite, ...]
    row_sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _RowTransform(Transform):
    """A transform that returns the rows of the sites that the plan selects."""

    plan: Plan
    layout: RowLayout
    dtype: str | None
    stateless = True

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        def captured(*arrays: Value) -> Taps:
            return call.program.walk(self.plan, arrays, warn=True)[1]

        return None, self._rows_of(evaluate_before_end(captured, call.arrays))

    def finish(self, out: PyTree, extra: PyTree) -> Any:
        return extra

    def _rows_of(self, taps: Taps) -> ComputedRows:
        by_name = {site.name: site for site in taps.sites}
        arrays, ran, sizes = SiteDict(), SiteDict(), {}
        sites: list[RowSite] = []
        values, grads = self.plan.values, self.plan.grads
        for kind, end, selection, found in (
            ("value", "", values, taps.values),
            ("grad", GRADIENT, grads, taps.grads),
        ):
            for name, x in found.items():
                captured = leave_out_step(by_name[name], selection)
                for site, row_sizes, rows in self.layout.split(captured, x):
                    stored_name = site.name + end
                    if stored_name in arrays:
                        raise SiteError(
                            f"Two arrays would both be stored as {stored_name!r}. Select only one "
                            "of them, or rename the site of one."
                        )
                    sizes[stored_name], arrays[stored_name] = row_sizes, rows
                    if name in taps.valid:
                        ran[stored_name] = jnp.all(taps.valid[name].astype(bool))
                    sites.append(self._describe(site, stored_name, kind, rows))
        if not sites:
            raise _nothing_selected(self.plan, taps)
        if not taps.grads and self.plan.grads not in (None, ()):
            raise SiteError(
                f"grads={show(self.plan.grads)} selects no gradient: the function takes none "
                "itself, or none reaches a site. Give a loss under jax.grad, or a train step."
            )
        return ComputedRows(arrays, ran, tuple(sites), check_same_rows(sizes))

    def _describe(self, site: Site, name: str, kind: str, rows: Value) -> RowSite:
        if jnp.issubdtype(rows.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"The {site.described}, contains random keys, which a dataset cannot store. "
                "Leave it out of the selection."
            )
        computed = np.dtype(rows.dtype).name
        is_float = jnp.issubdtype(rows.dtype, jnp.floating)
        stored = self.dtype if self.dtype is not None and is_float else computed
        check_storable(dtype_of(stored), f"The {site.described},")
        return RowSite(name, kind, stored, computed, rows.shape[1:], site.source)


def _nothing_selected(plan: Plan, taps: Taps) -> SiteError:
    asked = f"values={plan.values!r}" + (f", grads={plan.grads!r}" if plan.grads else "")
    names = [site.name for site in taps.sites]
    return SiteError(f"The harvest has no sites: {asked} selects none. {nearest('', names)}")


@dataclasses.dataclass(frozen=True)
class Description:
    """The types of the rows of a batch, checksums of the weights and program, and all inputs."""

    rows: ComputedRows
    weights: str
    program: str
    inputs: Sequence[Value]


class RowProgram:
    """A function from a batch to its `RowBatch`, compiled once for each shape."""

    def __init__(self, fn: Callable[..., Any], plan: Plan, layout: RowLayout, dtype: str | None):
        # Trace the arguments of a partial function too: weights would otherwise become constants
        # of the compiled program.
        self._given: tuple[Any, ...] = ()
        self._keywords: dict[str, Any] = {}
        while isinstance(fn, functools.partial):
            self._given = (*fn.args, *self._given)
            self._keywords = {**fn.keywords, **self._keywords}
            fn = fn.func
        self.layout = layout
        self._transform = _RowTransform(plan, layout, dtype)
        self._function = TransformedFunction(fn, self._transform)

    def __call__(self, batch: PyTree, mask: Value | None) -> RowBatch:
        """Dispatch the programs on a batch; `mask` selects the rows to measure."""
        rows: ComputedRows = self._function((), (*self._given, batch), self._keywords)
        types = tuple(site.dtype for site in rows.sites)
        converted, statistics = _store(rows.arrays, mask, types, rows.row_sizes)
        arrays = {**rows.arrays, **converted}
        return RowBatch(arrays, statistics, rows.ran, rows.sites, rows.row_sizes)

    def describe(self, batch: PyTree) -> Description:
        """Describe the rows of a batch, the weights and the program, without computing rows."""
        traced = self._function.traced_call((*self._given, batch), self._keywords)

        def rows(*arrays: Value) -> Any:
            return self._transform.run(TracedCall(traced.program, arrays), None)[1]

        described = jax.eval_shape(rows, *traced.arrays)
        given = {id(leaf) for leaf in jax.tree.leaves(batch)}
        constants = list(_jax.jaxpr_consts(traced.program.jaxpr))
        weights = [x for x in traced.arrays if id(x) not in given]
        inputs = [*traced.arrays, *constants]
        program = digest(strip(traced.program.jaxpr))
        return Description(described, fingerprint([*weights, *constants]), program, inputs)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _store(
    arrays: SiteDict, mask: Value | None, types: tuple[str, ...], row_sizes: tuple[int, ...]
) -> tuple[SiteDict, SiteDict]:
    """Convert the arrays that are stored in another dtype, and measure all arrays."""
    kept = None if mask is None else spread_mask(mask, row_sizes, jnp)
    converted, statistics = SiteDict(), SiteDict()
    for (name, x), dtype in zip(arrays.items(), types, strict=True):
        statistics[name] = measure_rows(x, dtype, kept)
        if x.dtype != dtype_of(dtype):
            converted[name] = x.astype(dtype)
    return converted, statistics


def fingerprint(arrays: Sequence[Any]) -> str:
    """Return a checksum of the weights in `arrays`, equal on every device.

    It ignores integers of 32 bits or more, and numbers without axes: counters, flags and random
    keys change while the model stays as it is.
    """
    found = [x for x in arrays if _is_weight(x)]
    if not found:
        return ""
    sums = [_sum_bits(x) for x in found]
    words = "".join(
        f"{jnp.result_type(x)}{list(jnp.shape(x))}:{int(total)};"
        for x, total in zip(found, sums, strict=True)
    )
    return f"{zlib.crc32(words.encode()):08x}"


def _is_weight(x: Any) -> bool:
    """Return whether an array is a weight, a quantised weight or a mask, as far as one can tell."""
    dtype = jnp.result_type(x)
    if jnp.issubdtype(dtype, jnp.inexact):
        return True
    is_narrow = jnp.issubdtype(dtype, np.bool_) or (
        jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 32
    )
    return is_narrow and bool(jnp.ndim(x))


@jax.jit
def _sum_bits(x: Value) -> Value:
    """Sum the bits of an array as integers modulo 2**32, weighted by their places."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        # A number of fewer than eight bits has no bits of its own in memory.
        is_narrow = not jnp.iscomplexobj(x) and jnp.finfo(x.dtype).bits < 8
        return _weighted_sum(x.astype(jnp.float32) if is_narrow else x)
    return _weighted_sum(
        x.astype(jnp.int16 if jnp.issubdtype(x.dtype, jnp.signedinteger) else jnp.uint16)
    )


def _weighted_sum(x: Value) -> Value:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _weighted_sum(x.real) * 3 + _weighted_sum(x.imag)
    word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
    weight = jnp.ones(bits.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(bits.ndim)):
        places = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        weight = weight + places * jnp.uint32(2 * stride % 2**32)
        stride *= bits.shape[axis]
    return (bits * weight).sum(dtype=jnp.uint32)
