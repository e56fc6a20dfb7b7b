"""Handlers of the equations that have bodies: how each is re-staged so that its taps come out.

A handler takes the walk, the equation and its operands, and returns the equation's results. It
drops the operands that are tokens, has the body walked, binds the equation again with the new
body, and says what leaving that body does to the entries recorded inside.

Adding a primitive is adding a function here, under its name, and a test.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from jaxtap import _compat
from jaxtap._mark import unmarked
from jaxtap._sites import SiteError, _Slice
from jaxtap._walk import Entry, Staged, Token, Walk, handles, strip, where


def _eager() -> bool:
    return bool(jax.config.jax_disable_jit)


@handles("jit", "pjit")
def _jit(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    params = dict(eqn.params)
    body = params["jaxpr"]
    if _eager():
        return walk.run(body, args)
    keys = walk.load(body)
    staged = walk.stage(body, args, keys)
    folds = walk.folded(keys)
    own = [token is None for token in staged.outs]
    more = len(_compat.open_jaxpr(staged.jaxpr).outvars) - staged.count

    def inputs(name: str, fill: Any) -> tuple[Any, ...]:
        return (*(params[name][i] for i in staged.real), *(fill for _ in folds))

    def outputs(name: str, fill: Any) -> tuple[Any, ...]:
        kept = (p for p, keep in zip(params[name], own, strict=True) if keep)
        return (*kept, *(fill for _ in range(more)))

    params.update(
        jaxpr=staged.jaxpr,
        donated_invars=inputs("donated_invars", False),
        in_shardings=inputs("in_shardings", _compat.UNSPECIFIED),
        in_layouts=inputs("in_layouts", None),
        out_shardings=outputs("out_shardings", _compat.UNSPECIFIED),
        out_layouts=outputs("out_layouts", None),
    )
    results = eqn.primitive.bind(*(args[i] for i in staged.real), *folds, **params)
    return walk.unstage(staged, results)


@handles("closed_call", "core_call", "call", "eval_jaxpr", "core_closed_call")
def _call(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    body = eqn.params["call_jaxpr"] if "call_jaxpr" in eqn.params else eqn.params["jaxpr"]
    return walk.run(body, args)


@handles("remat2", "remat", "checkpoint")
def _remat(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    """Bound again as the remat that it is: else the backward half would keep what it should drop."""
    params = dict(eqn.params)
    body = params["jaxpr"]
    if _eager():
        return walk.run(body, args)
    keys = walk.load(body)
    staged = walk.stage(body, args, keys, recomputing=params["differentiated"])
    folds = walk.folded(keys)
    jaxpr, consts = _compat.closed(staged.jaxpr)
    if isinstance(params["prevent_cse"], tuple):
        kept = (params["prevent_cse"][i] for i in staged.real)
        params["prevent_cse"] = (*(False for _ in consts), *kept, *(False for _ in folds))
    params["jaxpr"] = jaxpr
    results = eqn.primitive.bind(*consts, *(args[i] for i in staged.real), *folds, **params)
    return walk.unstage(staged, results)


@handles("scan")
def _scan(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    params = eqn.params
    body, length = params["jaxpr"], params["length"]
    nconsts, ncarry = _compat.scan_split(params)
    consts, init, xs = args[:nconsts], args[nconsts : nconsts + ncarry], args[nconsts + ncarry :]
    init = walk.materialize(eqn.invars[nconsts : nconsts + ncarry], init)
    keys = walk.load(body)
    cell: dict[str, Any] = {}

    def step(carry: Any, x: Any) -> Any:
        state, folds = carry
        slices = iter(x)
        operands = [a if type(a) is Token else next(slices) for a in xs]
        with walk.inside():
            walk.refold(keys, folds)
            outs = walk.run(body, [*consts, *state, *operands])
            carried = walk.materialize(_compat.open_jaxpr(body).outvars[:ncarry], outs[:ncarry])
            ys = outs[ncarry:]
            cell["ys"] = [y if type(y) is Token else None for y in ys]
            cell["entries"] = tuple(walk.entries)
            real = [y for y in ys if type(y) is not Token]
            arrays = [a for e in walk.entries for a in e.arrays]
            return (carried, walk.folded(keys)), (real, arrays)

    (carried, folds), (ys, arrays) = jax.lax.scan(
        step,
        (list(init), walk.folded(keys)),
        [a for a in xs if type(a) is not Token],
        length=length,
        reverse=params["reverse"],
        unroll=params["unroll"],
        **({"_split_transpose": True} if params.get("_split_transpose") else {}),
    )
    walk.refold(keys, folds)
    flat = iter(arrays)
    for entry in cell["entries"]:
        walk.entries.append(_stacked(entry.with_arrays(flat), f"scan[{length}]"))
    stacked = iter(ys)
    return [*carried, *(next(stacked) if y is None else y for y in cell["ys"])]


def _stacked(entry: Entry, loop: str) -> Entry:
    """An entry that a loop has stacked; the iterations asked for of it, where some were."""
    if entry.step is not None and not entry.loops:
        index = entry.step.slice if isinstance(entry.step, _Slice) else entry.step
        length = entry.value.shape[0]
        if isinstance(index, int) and not -length <= index < length:
            raise SiteError(
                f"step={index} was asked for of the site {entry.site.name!r}, marked at "
                f"{entry.site.source}, but its loop has {length} iterations."
            )
        entry = dataclasses.replace(
            entry,
            value=entry.value[index],
            valid=None if entry.valid is None else entry.valid[index],
            lead=entry.lead + isinstance(index, slice),
            step=None,
        )
    else:
        entry = dataclasses.replace(entry, lead=entry.lead + 1)
    return dataclasses.replace(entry, loops=(loop, *entry.loops))


@handles("cond")
def _cond(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    index, *operands = args
    branches = eqn.params["branches"]
    keys = walk.load(*branches)
    parts = [walk.stage(b, operands, keys, branch=i) for i, b in enumerate(branches)]
    folds = walk.folded(keys)
    real = [a for a in operands if type(a) is not Token]
    # Residuals of one place may be a token in one branch and an empty filling in another.
    outs = list(zip(*(part.outs for part in parts), strict=True))
    tokens = [
        Token(frozenset().union(*(t.calls for t in out if t is not None)))
        if any(t is not None for t in out)
        else None
        for out in outs
    ]
    types = [
        [v.aval for v in _compat.open_jaxpr(p.jaxpr).outvars[p.count :]] for p in parts
    ]
    arrays = [t[: len(t) - len(folds)] for t in types]

    def padded(chosen: int) -> Any:
        part = parts[chosen]

        def branch(*flat: Any) -> list[Any]:
            results = jaxpr_as_fun(part.jaxpr)(*flat)
            own = iter(results[: part.count])
            kept = []
            for token, merged in zip(part.outs, tokens, strict=True):
                value = next(own) if token is None else None
                if merged is None:
                    kept.append(value)
            inner = results[part.count : len(results) - len(folds)]
            filled = [
                x
                for i, held in enumerate(arrays)
                for x in (inner if i == chosen else [_compat.zeros(t) for t in held])
            ]
            return [*kept, *filled, *results[len(results) - len(folds) :]]

        return branch

    functions = [padded(i) for i in range(len(parts))]
    if _eager() and not _compat.is_tracer(index):
        results = functions[int(index)](*real, *folds)
    else:
        made = tuple(jax.make_jaxpr(f)(*real, *folds) for f in functions)
        results = eqn.primitive.bind(index, *real, *folds, **dict(eqn.params, branches=made))
    flat = iter(results)
    own = [next(flat) if token is None else token for token in tokens]
    for i, part in enumerate(parts):
        ran = jnp.asarray(index) == i
        for entry in part.entries:
            entry = entry.with_arrays(flat)
            if entry.valid is None:
                entry = dataclasses.replace(entry, valid=ran)
            walk.entries.append(entry)
    walk.refold(keys, list(flat))
    return own


@handles("while")
def _while(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    """The buffers of what is recorded are carried.

    With a mapped predicate JAX itself keeps the carry of an example that is done, so that the
    buffers, whose leading axes are those of the predicate, stop with their example.
    """
    params = eqn.params
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    ntest, nbody = params["cond_nconsts"], params["body_nconsts"]
    args = walk.materialize(eqn.invars, args)
    tconsts, bconsts, init = args[:ntest], args[ntest : ntest + nbody], args[ntest + nbody :]
    predicate = _compat.open_jaxpr(test).outvars[0].aval
    shape = tuple(predicate.shape)
    plain_test = strip(test)
    with walk.predicated(shape):
        keys = walk.load(body)
        folds = walk.folded(keys)
        staged = walk.stage(body, [*bconsts, *init], keys)
    buffers = [_Buffer.of(walk, entry, var, shape) for entry, var in _typed(staged)]
    varying = _compat.varying_axes(predicate)
    start = [b.start() for b in buffers]
    count = _compat.with_varying(jnp.zeros(shape, jnp.int32), varying)

    def step(*flat: Any) -> list[Any]:
        consts, rest = flat[:nbody], flat[nbody:]
        state, rest = rest[: len(init)], rest[len(init) :]
        carried, rest = rest[: len(folds)], rest[len(folds) :]
        count, rest = rest[0], list(rest[1:])
        results = jaxpr_as_fun(staged.jaxpr)(*consts, *state, *carried)
        new = results[len(init) : len(results) - len(folds)]
        arrays = iter(new)
        entries = [e.with_arrays(arrays) for e in staged.entries]
        iteration = jnp.max(count) if shape else count
        updated = []
        for buffer, entry in zip(buffers, entries, strict=True):
            held = [rest.pop(0) for _ in range(2)]
            updated += buffer.update(held, entry, iteration)
        return [
            *results[: len(init)],
            *results[len(results) - len(folds) :],
            count + 1,
            *updated,
        ]

    def check(*flat: Any) -> Any:
        return jaxpr_as_fun(plain_test)(*flat[: ntest + len(init)])

    carry = [*init, *folds, count, *(x for pair in start for x in pair)]
    results = _loop(eqn, check, step, tconsts, bconsts, carry)
    flat = iter(results)
    own = [next(flat) for _ in init]
    walk.refold(keys, [next(flat) for _ in folds])
    count = next(flat)
    for buffer in buffers:
        walk.entries.append(buffer.finish(next(flat), next(flat)))
    if plain_test is not test:
        _last_test(walk, test, [*tconsts, *own], count + 1)
    return own


def _last_test(walk: Walk, test: Any, args: list[Any], count: Any) -> None:
    """Records what the predicate of a loop marks: it ran last on what the loop ended with."""
    with walk.inside():
        walk.run(test, args)
        entries = walk.entries
    for entry in entries:
        if walk.plan.steps is not None or entry.step is not None:
            raise SiteError(
                f"The site {entry.site.name!r}, marked at {entry.site.source}, is in the predicate "
                "of a while loop, where only its last value can be captured. Leave `steps` and "
                "`step` out, or mark the value in the body."
            )
        valid = count if entry.valid is None else entry.valid
        walk.entries.append(
            dataclasses.replace(entry, valid=valid, loops=("while", *entry.loops))
        )


def _loop(eqn: Any, check: Any, step: Any, tconsts: Any, bconsts: Any, carry: list[Any]) -> Any:
    if _eager() and not any(map(_compat.is_tracer, (*tconsts, *bconsts, *carry))):
        while check(*tconsts, *carry)[0]:
            carry = step(*bconsts, *carry)
        return carry
    carry = [jnp.asarray(c) for c in carry]
    params = dict(
        eqn.params,
        cond_jaxpr=jax.make_jaxpr(check)(*tconsts, *carry),
        body_jaxpr=jax.make_jaxpr(step)(*bconsts, *carry),
    )
    return eqn.primitive.bind(*tconsts, *bconsts, *carry, **params)


def _typed(staged: Staged) -> list[tuple[Entry, list[Any]]]:
    """The entries of a staged body, each with the types of its arrays."""
    types = iter(v.aval for v in _compat.open_jaxpr(staged.jaxpr).outvars[staged.count :])
    return [(e, [next(types) for _ in e.arrays]) for e in staged.entries]


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """What a while loop carries for an entry: its last value and their count, or the first few.

    The axes of the predicate come first, then (where several iterations are kept) that of the
    iterations, then those of the entry.
    """

    entry: Entry
    types: list[Any]
    shape: tuple[int, ...]
    window: tuple[int, int, int] | None
    single: bool

    @classmethod
    def of(cls, walk: Walk, entry: Entry, types: list[Any], shape: tuple[int, ...]) -> _Buffer:
        window, single = None, False
        if entry.step is not None and not entry.loops:
            window, single = _window(entry), not isinstance(entry.step, _Slice)
        elif walk.plan.steps is not None and not entry.grad:
            window = (0, walk.plan.steps, 1)
        return cls(entry, types, shape, window, single)

    def _inward(self, x: Any) -> Any:
        """The axes of the predicate, which an entry has behind those of its loops, brought first."""
        n, lead = len(self.shape), self.entry.lead
        if not n or not lead:
            return x
        return jnp.moveaxis(x, tuple(range(lead, lead + n)), tuple(range(n)))

    def _ran(self, valid: Any, like: Any) -> Any:
        """How often an entry was recorded in one iteration, with the axes of the predicate."""
        if valid is None:
            n, lead = len(self.shape), self.entry.lead
            extent = like.shape[: n + lead] if n else ()
            return jnp.ones(extent, jnp.int32)
        if valid.ndim < self.entry.lead + len(self.shape):
            valid = valid.reshape(valid.shape + (1,) * len(self.shape))
            extent = (*valid.shape[: self.entry.lead], *self.shape)
            valid = jnp.broadcast_to(valid, extent)
        return self._inward(valid).astype(jnp.int32)

    def start(self) -> list[Any]:
        value, *valid = (_compat.zeros(t) for t in self.types)
        value = self._inward(value)
        ran = self._ran(valid[0] if valid else None, value) * 0
        varying = _compat.varying_axes(self.types[-1])
        if self.window is not None:
            n, length = len(self.shape), self.window[1]
            value = jnp.zeros((*value.shape[:n], length, *value.shape[n:]), value.dtype)
            ran = jnp.zeros((*ran.shape[:n], length, *ran.shape[n:]), bool)
            value = _compat.with_varying(value, _compat.varying_axes(self.types[0]))
        return [value, _compat.with_varying(ran, varying)]

    def update(self, held: list[Any], entry: Entry, iteration: Any) -> list[Any]:
        value, counted = held
        new = self._inward(entry.value)
        ran = self._ran(entry.valid, new)
        if self.window is None:
            value = new if entry.valid is None else where(ran, new, value)
            return [value, counted + ran]
        start, length, stride = self.window
        offset = iteration - start
        place = jnp.where((offset >= 0) & (offset % stride == 0), offset // stride, length)
        at = (slice(None),) * len(self.shape) + (place,)
        if entry.valid is not None:
            new = where(ran, new, jnp.zeros_like(new))
        return [value.at[at].set(new, mode="drop"), counted.at[at].set(ran > 0, mode="drop")]

    def finish(self, value: Any, valid: Any) -> Entry:
        n, lead = len(self.shape), self.entry.lead
        grown = lead + (self.window is not None)
        if n and grown:
            value, valid = (
                jnp.moveaxis(x, tuple(range(n)), tuple(range(grown, grown + n)))
                if x.ndim >= n + grown
                else x
                for x in (value, valid)
            )
        if self.single:
            value, valid, grown = value[0], valid[0], grown - 1
        return dataclasses.replace(
            self.entry,
            value=value,
            valid=valid,
            lead=grown,
            step=None if not self.entry.loops else self.entry.step,
            loops=("while", *self.entry.loops),
        )


def _window(entry: Entry) -> tuple[int, int, int]:
    """The first iteration, how many, and how far apart, that were asked for of a while loop."""
    step = entry.step
    if isinstance(step, int):
        first, count, stride = step, 1, 1
    else:
        first, stride = step.start or 0, step.stride or 1
        count = 0 if step.stop is None else len(range(first, step.stop, stride))
    if first < 0 or stride < 1 or count < 1:
        raise SiteError(
            f"step={step} was asked for of the site {entry.site.name!r}, marked at "
            f"{entry.site.source}, which is in a while loop: how often that runs is not known "
            "beforehand, so `step` must count from the start and have an end."
        )
    return first, count, stride


@handles("custom_jvp_call")
def _custom_jvp(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    """The values come from the body; the derivative of its results is that of the custom rule."""
    body = eqn.params["call_jaxpr"]
    keys = walk.load(body)
    staged = walk.stage(body, args, keys)
    inner = jaxpr_as_fun(staged.jaxpr)
    count, n = staged.count, len(staged.real)

    @jax.custom_jvp
    def call(*flat: Any) -> list[Any]:
        return inner(*flat)

    @call.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        def plain(*flat: Any) -> Any:
            with unmarked():
                return _compat.bind_equation(eqn, flat)

        _, out = jax.jvp(plain, primals[:n], tangents[:n])
        results, inside = jax.jvp(inner, primals, tangents)
        return results, [*out, *inside[count:]]

    return walk.unstage(staged, call(*(args[i] for i in staged.real), *walk.folded(keys)))


@handles("custom_vjp_call", "custom_vjp_call_jaxpr")
def _custom_vjp(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    """As for `custom_jvp`: what is recorded has its own derivative, the results the custom one."""
    body = eqn.params["call_jaxpr"]
    keys = walk.load(body)
    staged = walk.stage(body, args, keys)
    inner = jaxpr_as_fun(staged.jaxpr)
    count, n = staged.count, len(staged.real)

    def plain(*flat: Any) -> Any:
        with unmarked():
            return _compat.bind_equation(eqn, flat)

    @jax.custom_vjp
    def call(*flat: Any) -> list[Any]:
        return inner(*flat)

    def forward(*flat: Any) -> Any:
        out, back = jax.vjp(plain, *flat[:n])
        inside, back_inside = jax.vjp(lambda *flat: inner(*flat)[count:], *flat)
        return [*out, *inside], (back, back_inside)

    def backward(residuals: Any, cts: Any) -> Any:
        back, back_inside = residuals
        through, inside = back(list(cts[:count])), back_inside(list(cts[count:]))
        return (*(_add(a, b) for a, b in zip(through, inside, strict=False)), *inside[n:])

    call.defvjp(forward, backward)
    return walk.unstage(staged, call(*(args[i] for i in staged.real), *walk.folded(keys)))


def _add(a: Any, b: Any) -> Any:
    return a if a.dtype == jax.dtypes.float0 else a + b


@handles("custom_linear_solve", "linear_solve")
def _linear_solve(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    """What the solver marks comes out as the auxiliary result that solvers may have."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    args = walk.materialize(eqn.invars, args)
    consts, at = {}, 0
    for name, length in zip(lengths._fields, lengths, strict=True):
        consts[name], at = args[at : at + length], at + length
    b = args[at:]
    staged = walk.stage(jaxprs.solve, [*consts["solve"], *b], walk.load(jaxprs.solve))
    nested = walk.folded(staged.keys)

    def apply(name: str) -> Any:
        jaxpr = getattr(jaxprs, name)
        return lambda x: jaxpr_as_fun(strip(jaxpr))(*consts[name], *x)

    def solve(_: Any, b: Any) -> Any:
        results = jaxpr_as_fun(staged.jaxpr)(*consts["solve"], *b, *nested)
        return results[: len(b)], results[len(b) :]

    def transposed(_: Any, b: Any) -> Any:
        results = apply("transpose_solve")(b)
        rest = _compat.open_jaxpr(staged.jaxpr).outvars[len(b) :]
        return results[: len(b)], [_compat.zeros(v.aval) for v in rest]

    x, aux = jax.lax.custom_linear_solve(
        apply("matvec"),
        list(b),
        solve,
        transposed if jaxprs.transpose_solve is not None else None,
        has_aux=True,
    )
    return walk.unstage(staged, [*x, *aux])


@handles("shard_map")
def _shard_map(walk: Walk, eqn: Any, args: list[Any]) -> list[Any]:
    """Each device's part comes along a new leading axis for each mesh axis that it varies over."""
    params = eqn.params
    body, mesh = params["jaxpr"], params["mesh"]
    order = [a for a in mesh.axis_names if a in params["newly_manual_axes"]]
    real = [i for i, a in enumerate(args) if type(a) is not Token]
    held = walk.holds(body)
    for path in held:
        if path in walk.accumulators:
            raise SiteError(
                f"The site {path!r}, marked at {held[path][0].source}, is folded inside a "
                "shard_map and outside of it. Give the two another name each: inside, every "
                "device has a fold of its own."
            )
    cell: dict[str, Any] = {}

    def local(*flat: Any) -> list[Any]:
        operands = list(args)
        for i, x in zip(real, flat, strict=True):
            operands[i] = x
        with walk.inside():
            keys = walk.load(body)
            outs = walk.run(body, operands)
            arrays = [*(a for e in walk.entries for a in e.arrays), *walk.folded(keys)]
            cell.update(
                outs=[o if type(o) is Token else None for o in outs],
                entries=tuple(walk.entries),
                folds={k: walk.accumulators[k] for k in keys},
            )
            return [*(o for o in outs if type(o) is not Token), *arrays]

    def trace(*flat: Any) -> tuple[()]:
        cell["jaxpr"] = jax.make_jaxpr(local)(*flat)
        return ()

    # What leaves the body, and over which axes it varies, is known once the body was walked; and
    # that can be done only where its axes have a meaning.
    options: dict[str, Any] = dict(
        mesh=mesh,
        in_specs=tuple(params["in_specs"][i] for i in real),
        axis_names=frozenset(order),
        check_vma=params["check_vma"],
    )
    operands = [args[i] for i in real]
    jax.eval_shape(jax.shard_map(trace, out_specs=(), **options), *operands)
    outs, entries = cell["outs"], cell["entries"]
    own = sum(token is None for token in outs)
    avals = [v.aval for v in _compat.open_jaxpr(cell["jaxpr"]).outvars[own:]]

    def axes_of(aval: Any) -> tuple[str, ...]:
        varying = _compat.varying_axes(aval) if params["check_vma"] else frozenset(order)
        return tuple(a for a in order if a in varying)

    over = [axes_of(aval) for aval in avals]

    def spread(*flat: Any) -> list[Any]:
        results = jaxpr_as_fun(cell["jaxpr"])(*flat)
        extra = [
            x.reshape((1,) * len(axes) + x.shape)
            for x, axes in zip(results[own:], over, strict=True)
        ]
        return [*results[:own], *extra]

    specs = [s for s, token in zip(params["out_specs"], outs, strict=True) if token is None]
    out_specs = [*specs, *(PartitionSpec(*axes) for axes in over)]
    flat = iter(jax.shard_map(spread, out_specs=out_specs, **options)(*operands))
    results = [next(flat) if token is None else token for token in outs]
    axes = iter(over)
    for entry in entries:
        first, *_ = [next(axes) for _ in entry.arrays]
        walk.entries.append(
            dataclasses.replace(
                entry.with_arrays(flat),
                lead=entry.lead + len(first),
                loops=(*(f"{a}[{mesh.shape[a]}]" for a in first), *entry.loops),
            )
        )
    for path, acc in cell["folds"].items():
        state = jax.tree.map(lambda _: next(flat), acc.state)
        walk.accumulators[path] = dataclasses.replace(acc, state=state, seen=next(flat))
    return results
