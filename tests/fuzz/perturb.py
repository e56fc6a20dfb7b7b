"""Perturbations and gradients by inner values, against additions written into the source.

`check_perturbed` takes the loss of a program that is one `Grad`.

- `perturbations` has every site of floating-point numbers, and no other.
- `perturbed` agrees with the loss with the same numbers added by hand, and so do its gradients
  by them.
- `grad` agrees with the cotangents of the reference and with a capture of `jax.grad` of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tapax

from . import build
from .compare import Laid, Mismatch, arguments, close, expected, wrong
from .edits import axes, decide, pick, same
from .program import Grad, Program, is_explicit
from .reference import run
from .sites import Path, sites

Shapes = dict[str, tuple[int, ...]]


def check_perturbed(program: Program) -> None:
    """Perturb the loss with `tapax` and by hand, and compare."""
    (node,) = program.body
    assert isinstance(node, Grad)
    decide(program)
    inner, args = replace(program, body=node.body), arguments(program)
    loss = _loss(build.build(inner, tapax.sow))
    loss = jax.jit(loss) if program.how == "jit inside" else loss
    zeros = tapax.perturbations(loss)(*args)
    floats = {site.label for site in sites(inner) if site.dtype != "int"}
    if not set(zeros) <= floats:
        raise Mismatch(f"perturbations are for {sorted(zeros)}, expected {sorted(floats)}")
    _check_missing(inner, loss, args, floats - set(zeros))
    _compare_gradients(program, loss, {name: zero.shape for name, zero in zeros.items()})
    if zeros:
        hand = _loss(_by_hand(inner, {name: zero.shape for name, zero in zeros.items()}))
        some = {name: _some(i, zero) for i, (name, zero) in enumerate(zeros.items())}
        try:
            both = jax.jit(jax.value_and_grad(hand))(some, *args)
        except Exception as error:
            # jax 0.10 cannot transpose some scans in a shard_map, marked or not, nor all programs
            # that add a part of an array on an explicit mesh.
            if "Context mesh" in str(error) or is_explicit(program.body):
                return
            raise
        engine = jax.value_and_grad(tapax.perturbed(loss))
        engine = jax.jit(engine) if program.how == "jit outside" else engine
        try:
            got = engine(some, *args)
        except Exception:
            # JAX cannot name the residuals of a jitted function with two meshes, marked or not.
            if program.how == "jit inside" and _refuses(
                jax.value_and_grad(jax.jit(hand)), some, args
            ):
                return
            raise
        same(program, "the perturbed loss", got[0], both[0])
        for name, want in both[1].items():
            same(program, f"the gradient by the perturbation of {name!r}", got[1][name], want)


def _refuses(fn: Callable[..., Any], some: Any, args: Any) -> bool:
    """Return whether JAX itself cannot run a function."""
    try:
        fn(some, *args)
    except Exception:
        return True
    return False


def _check_missing(inner: Program, loss: Any, args: Any, missing: set[str]) -> None:
    """Check that the loss does not depend on a site without a perturbation."""
    if not missing:
        return
    shapes = {s.name: s.shape for s in tapax.sites(loss)(*args) if s.name in missing}
    zeros = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    grads = jax.jit(jax.grad(_loss(_by_hand(inner, shapes))))(zeros, *args)
    wrong = [name for name in missing if name not in grads or np.any(grads[name])]
    if wrong:
        raise Mismatch(f"there are no perturbations for {sorted(wrong)}")


def _loss(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: jnp.sum(jnp.sin(fn(*args)))


def _some(seed: int, zero: jax.Array) -> jax.Array:
    return zero + np.random.default_rng(seed).uniform(-0.3, 0.3, zero.shape).astype(zero.dtype)


def _by_hand(program: Program, shapes: Shapes) -> Callable[..., Any]:
    """Build the program with perturbations added in its source."""
    places = {site.path: site for site in sites(program) if site.label in shapes}
    held = {path: axes(site, shapes[site.label]) for path, site in places.items()}

    def mark(value: Any, path: Path, given: Any, at: tuple[Any, ...]) -> Any:
        if path not in places:
            return value
        return value + pick(given[places[path].label], [at[i] for i in held[path]])

    return build.by_hand(program, mark)


def _compare_gradients(program: Program, loss: Callable[..., Any], shapes: Shapes) -> None:
    args = arguments(program)
    way = jax.jit if program.how == "jit outside" else lambda fn: fn
    if not shapes:
        try:
            way(tapax.grad(loss))(*args)
        except tapax.SiteError:
            return
        raise Mismatch("there is a gradient by a site without a perturbation")
    grads = jax.device_get(way(tapax.grad(loss))(*args))
    _, taps = way(tapax.capture(jax.grad(loss), values=None))(*args)
    reference = run(program)
    for site in reference.sites:
        if site.label not in shapes:
            continue
        (laid, _), *_ = expected(site, reference.records.get(site.path, []), None).grads
        present = axes(site, shapes[site.label])
        # A perturbation broadcasts along an axis that it does not have.
        total = tuple(k for k, i in enumerate(site.lead) if i not in present)
        want = Laid(laid.array.sum(total), laid.coarse)
        got = grads.get(site.label, np.zeros(want.array.shape))
        if not close(got, want):
            raise wrong(f"the gradient by {site.label!r}", got, want)
        if site.label in taps.grads:
            seen = jax.device_get(taps.grads[site.label])
            if not close(seen, want):
                raise wrong(f"the captured gradient of {site.label!r}", seen, want)
