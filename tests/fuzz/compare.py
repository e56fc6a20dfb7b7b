"""Comparison of a capture with the reference, by the contract of the engine.

- `values` has exactly the reference's sites. Axes in order: devices, loops (outermost first),
  mapped axes (outermost first), axes of the value. An axis may be missing only if the value is
  constant along it.
- `valid` has exactly the sites in branches and while loops: a bool, or in while loops the number
  of executions. With `steps=n` a while loop is a loop axis of length n and `valid` is a bool
  everywhere. Entries are zero where the site did not run.
- `grads` has the axes of `values`; along an axis that is missing there, the perturbations of all
  its indices are one, so their gradients add. A nonzero gradient must be present, and a present
  gradient must be right. Under two gradients a site has two: `name` for the inner one,
  `name~1` for the outer one.
- `out` is the function's result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tapax

from .build import build, plain
from .program import Grad, Program
from .reference import Record, Reference, run
from .sites import Site


class Mismatch(AssertionError):
    """The capture and the reference disagree."""


@dataclass(frozen=True)
class Laid:
    """An array with every axis present, and a flag for coarse comparison."""

    array: np.ndarray
    coarse: bool = False


@dataclass(frozen=True)
class Expected:
    """The expected arrays of a site.

    `lead`: the number of axes before those of the value. `grads`: one for each gradient around
    it, innermost first, with a flag if a capture must have it.
    """

    value: Laid
    valid: Laid
    grads: list[tuple[Laid, bool]]
    lead: int


def expected(site: Site, records: list[Record], steps: int | None) -> Expected:
    """Arrange the executions of a site along its axes."""
    kept = [i for i in site.lead if site.axes[i].kind != "while" or steps is not None]
    sizes = tuple(steps or 0 if site.axes[i].kind == "while" else site.axes[i].size for i in kept)
    placed = [(tuple(r.index[i] for i in kept), r) for r in records]
    placed = [(at, r) for at, r in placed if all(i < s for i, s in zip(at, sizes, strict=True))]
    ran = np.zeros(sizes, np.int64)
    for at, _ in placed:
        ran[at] += 1

    def lay(parts: list[tuple[tuple[int, ...], np.ndarray, bool]]) -> Laid:
        # In the order of execution: a while loop keeps the last one.
        array = np.zeros(sizes + site.shape)
        for at, value, _ in parts:
            array[at] = value
        return Laid(array, any(coarse for *_, coarse in parts))

    grads = []
    for k in range(site.grads if site.dtype != "int" else 0):
        cotangents = [(at, r.cotangents[k]) for at, r in placed]
        laid = lay([(at, c.value, c.coarse) for at, c in cotangents])
        # A perturbation of a value that does not depend on the differentiated variable has a
        # gradient, but no cotangent reaches it in the user's backward pass.
        active = any(c.active for _, c in cotangents)
        grads.append((laid, active and not close(np.zeros_like(laid.array), laid)))
    value = lay([(at, r.value, r.coarse) for at, r in placed])
    counts = site.counted and steps is None
    return Expected(value, Laid(ran if counts else ran > 0), grads, len(kept))


def close(got: Any, want: Laid) -> bool:
    """Return whether arrays agree relative to the largest entry; small ones may cancel."""
    got = np.asarray(got).astype(np.float64)
    if got.shape != want.array.shape or not np.isfinite(got).all():
        return False
    narrow = (1e-9, 1e-11) if jax.config.read("jax_enable_x64") else (2e-5, 2e-6)
    relative, absolute = (3e-2, 1e-2) if want.coarse else narrow
    bound = relative * np.max(np.abs(want.array), initial=0) + absolute
    return bool(np.all(np.abs(got - want.array) <= bound))


def missing_axes(got: Any, want: Laid, lead: int) -> list[tuple[int, ...]]:
    """Return the sets of constant leading axes without which `want` equals `got`."""
    return [
        axes
        for axes in constant_axes(want, lead)
        if close(got, Laid(_first(want, axes, lead).squeeze(axes), want.coarse))
    ]


def constant_axes(want: Laid, lead: int) -> list[tuple[int, ...]]:
    """Return the sets of leading axes along which `want` is constant."""
    every = (axes for k in range(lead + 1) for axes in combinations(range(lead), k))
    return [
        axes
        for axes in every
        if close(np.broadcast_to(_first(want, axes, lead), want.array.shape), want)
    ]


def _first(want: Laid, axes: tuple[int, ...], lead: int) -> np.ndarray:
    return want.array[tuple(slice(0, 1) if i in axes else slice(None) for i in range(lead))]


def wrong(what: str, got: Any, want: Laid) -> Mismatch:
    """Make the error for two arrays that differ."""
    expected = f"expected, shape {want.array.shape}:\n{want.array}"
    return Mismatch(f"{what} is wrong.\n{expected}\ngot, shape {np.shape(got)}:\n{got}")


def _same(what: str, got: set[str], want: set[str]) -> None:
    if got != want:
        missing, extra = sorted(want - got), sorted(got - want)
        raise Mismatch(f"{what}: missing {missing}, not expected {extra}, of {sorted(want)}")


def compare(reference: Reference, taps: Any, steps: int | None = None) -> None:
    """Raise `Mismatch` unless the dicts `values`, `grads`, `valid` of `taps` are right."""
    labels = {s.label for s in reference.sites}
    _same("values", set(taps.values), labels)
    _same("sites with gradients", {k.split("~")[0] for k in taps.grads} | labels, labels)
    # The further gradients of a site have the mask of the site.
    conditional = {s.label for s in reference.sites if s.conditional}
    conditional |= {k for k in taps.grads if k.split("~")[0] in conditional}
    _same("valid", set(taps.valid), conditional)
    for site in reference.sites:
        _compare_site(site, expected(site, reference.records.get(site.path, []), steps), taps)


def _compare_site(site: Site, want: Expected, taps: Any) -> None:
    label = site.label
    valid = taps.valid[label] if site.conditional else None
    missing = compare_value(label, site, want, taps.values[label], valid)
    for key in _gradient_keys(label, taps.grads):
        _compare_dtype(f"grads[{key!r}]", site, taps.grads[key])
        if site.conditional:
            _compare_mask(key, want, taps.valid[key])
    compare_gradients(label, taps.grads, want.grads, missing)


def compare_value(
    key: str, site: Site, want: Expected, got: Any, valid: Any
) -> list[tuple[int, ...]]:
    """Raise `Mismatch` unless a captured value and its mask are right.

    Return the sets of axes that the value may lack.
    """
    missing = missing_axes(got, want.value, want.lead)
    if not missing:
        raise wrong(f"values[{key!r}]", got, want.value)
    _compare_dtype(f"values[{key!r}]", site, got)
    if valid is not None:
        _compare_mask(key, want, valid)
    return missing


def _compare_dtype(what: str, site: Site, got: Any) -> None:
    dtypes = {"float": jnp.result_type(float), "bfloat16": jnp.bfloat16, "int": np.int32}
    dtype = jnp.dtype(dtypes[site.dtype])
    if got.dtype != dtype:
        raise Mismatch(f"{what} is {got.dtype}, expected {dtype}")


def _compare_mask(key: str, want: Expected, valid: Any) -> None:
    kind = np.bool_ if want.valid.array.dtype == bool else np.integer
    if not np.issubdtype(valid.dtype, kind) or not missing_axes(valid, want.valid, want.lead):
        raise wrong(f"valid[{key!r}], of type {valid.dtype},", valid, want.valid)


def _gradient_keys(label: str, grads: Iterable[str]) -> list[str]:
    """Return the names of the gradients of a site, innermost first."""
    keys = (key for key in grads if key.split("~")[0] == label)
    return sorted(keys, key=lambda key: int(key.partition("~")[2] or 0))


def compare_gradients(
    label: str, grads: Any, want: list[tuple[Laid, bool]], missing: list[tuple[int, ...]]
) -> None:
    """Raise `Mismatch` unless the gradients of a site are right.

    They come in order, and may leave out one that no cotangent reached. `missing` has the sets of
    axes that the value may lack.
    """
    pending = list(want)
    for grad in (grads[key] for key in _gradient_keys(label, grads)):
        while pending:
            laid, needed = pending.pop(0)
            sums = (Laid(laid.array.sum(axes), laid.coarse) for axes in missing)
            if any(close(grad, s) for s in sums):
                break
            if needed:
                raise wrong(f"a gradient of {label!r}", grad, laid)
        else:
            if want:
                raise wrong(f"a gradient of {label!r}", grad, want[-1][0])
            raise Mismatch(f"{label!r} has a gradient, but none was taken there:\n{grad}")
    for laid, needed in pending:
        if needed:
            raise Mismatch(f"a gradient of {label!r} is missing, expected\n{laid.array}")


def arguments(program: Program) -> tuple[jax.Array, jax.Array]:
    """Return the arguments of the program as JAX arrays."""
    x, n = program.arguments()
    return jnp.asarray(x, jnp.result_type(float)), jnp.asarray(n)


def compare_result(reference: Reference, out: Any) -> None:
    """Raise `Mismatch` unless the result of the program is right."""
    want = Laid(reference.out, reference.coarse)
    if not close(out, want):
        raise wrong("the result", out, want)


def captured(program: Program, **asked: Any) -> tuple[Any, Any]:
    """Capture the program, with the `jit` that it requests."""
    fn, args = build(program, tapax.sow), arguments(program)
    match program.how:
        case "plain":
            return tapax.capture(fn, **asked)(*args)
        case "jit outside":
            return jax.jit(tapax.capture(fn, **asked))(*args)
        case "jit inside":
            return tapax.capture(jax.jit(fn), **asked)(*args)


def check(program: Program) -> None:
    """Capture the program with `tapax` and compare.

    Raises `Mismatch` if they differ, and `Undecided` if the reference cannot decide.
    """
    reference = run(program)
    out, taps = captured(program, steps=program.steps)
    compare_result(reference, out)
    compare(reference, jax.device_get(taps), program.steps)


def check_reference(program: Program) -> None:
    """Compare the results of the reference and of JAX, without a capture."""
    compare_result(run(program), jax.jit(build(program, plain))(*arguments(program)))


def check_perturbations(program: Program) -> None:
    """Compare the gradients of the reference with JAX's gradients by explicit zeros.

    The program must be one `Grad`. Every execution of a name shares its perturbation, so
    the gradient is their total.
    """
    (node,) = program.body
    assert isinstance(node, Grad)
    reference = run(program)
    total: dict[str, Laid] = {}
    for site in reference.sites:
        for record in reference.records.get(site.path, []) if site.dtype != "int" else ():
            (ct,) = record.cotangents
            before = total.get(site.name, Laid(np.zeros(site.shape)))
            total[site.name] = Laid(before.array + ct.value, before.coarse or ct.coarse)

    def loss(zeros: dict[str, jax.Array], x: jax.Array, n: jax.Array) -> jax.Array:
        def add(value: jax.Array, name: str) -> jax.Array:
            return value + zeros[name].astype(value.dtype) if name in zeros else value

        # The `outer` of the gradient is its x, so the body is the program of the loss.
        return jnp.sum(jnp.sin(build(replace(program, body=node.body), add)(x, n)))

    x, n = arguments(program)
    zeros = {name: jnp.zeros(t.array.shape, x.dtype) for name, t in total.items()}
    got = jax.jit(jax.grad(loss))(zeros, x, n)
    for name, want in total.items():
        if not close(got[name], want):
            raise wrong(f"the total gradient of {name!r}", got[name], want)
