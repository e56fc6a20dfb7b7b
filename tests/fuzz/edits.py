"""Edits, against the same changes written into the source of the program by hand.

`by_hand(program, given)` is the program with its `edits` written at its marks: for
each call of a function, for each iteration by the counter of the loop, for each example. A changed
gradient is an identity with a custom derivative rule. It shares no code with the engine except the
applied functions.

- The edited function has the outputs and, from outside, the derivatives of the hand-edited one.
- An empty edit, and the identity everywhere, change nothing.
- An impossible edit raises `SiteError`, and then has no effect by hand. The derivative
  from outside of a custom function that contains an edit may also raise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import tapax

from . import build
from .compare import Laid, arguments, close, wrong
from .leaf import weights
from .parts import INDICES, part
from .program import Do, Edit, Of, Program, is_explicit, nodes
from .reference import Undecided, run
from .sites import Path, Site, picked, sites

NUMBER = 0.25

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "scale": lambda x: x * -0.5,
    "sin": jnp.sin,
    "square": lambda x: 0.3 * x * x + 0.1,
    "turn": lambda x: 0.9 * jnp.roll(x, 1),
    "clip": lambda x: jnp.clip(x, -0.2, 0.2),
    "stop": lambda x: x - 0.5 * lax.stop_gradient(x),
}

Given = tuple[dict[str, Any], ...]
"""The arguments of edits other than functions: a step, a strength, an array."""

Edited = Callable[[Given, jax.Array, jax.Array], jax.Array]


def _apply(what: str, x: Any, call: int, strength: Any) -> Any:
    """Apply the function of an edit, which stays near the value so that errors do not grow."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        more = jnp.asarray(strength > 0.55, x.dtype) if what == "closed" else 1
        return (2 * x + (call if what == "site" else more)) % 5
    if what == "site":
        return x * (0.5 + 0.25 * min(call, 2))
    return x * strength.astype(x.dtype) if what == "closed" else FUNCTIONS[what](x)


def given(program: Program, shapes: dict[str, tuple[int, ...]]) -> Given:
    """Return the inputs of the edits of a program; `shapes` are those of its captured sites."""
    found, out = sites(program), []
    for i, edit in enumerate(program.edits):
        one = {"strength": jnp.asarray(0.5 + 0.1 * i), "step": jnp.int32(edit.step or 0)}
        one["index"] = jnp.int32(_number_in(edit.index))
        if edit.what == "array":
            site = picked(edit, found)[0]
            shape = part(edit.index, np.zeros(site.shape)).shape
            if edit.axes:
                held = [site.axes[k].size for k in _held(edit, site, shapes[site.label])]
                shape = (*held, *shape)
            rng = np.random.default_rng(i)
            dtypes = {"float": jnp.result_type(float), "bfloat16": jnp.bfloat16}
            array = (
                rng.integers(0, 5, shape).astype(np.int32)
                if site.dtype == "int"
                else rng.uniform(-1, 1, shape).astype(dtypes[site.dtype])
            )
            one["array"] = jnp.asarray(array)
        out.append(one)
    return tuple(out)


def _number_in(index: str | None) -> int:
    """Return the integer in an index, which may be traced, or 0 without one."""
    numbers = {"first": 0, "last": -1, "middle": 1}
    return numbers.get(index or "", 0)


def _key(edit: Edit, number: Any) -> Any:
    """Return the index of an edit, with its integer traced if it has one."""
    if edit.index == "middle":
        return ..., number
    return number if edit.index in ("first", "last") else INDICES[edit.index or ""]


def axes(site: Site, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes that a captured site has, in order.

    An axis is missing if the value does not depend on it.
    """
    sizes = shape[: len(shape) - len(site.shape)]
    kept = [i for i in site.lead if site.axes[i].kind != "while"]
    fits = [
        c for c in combinations(kept, len(sizes)) if sizes == tuple(site.axes[i].size for i in c)
    ]
    if len(fits) != 1:
        raise Undecided(f"{site.label} has the shape {shape}: which axes are these?")
    return fits[0]


def _held(edit: Edit, site: Site, shape: tuple[int, ...]) -> list[int]:
    """Return the axes of a site that the array of an edit has."""
    return [i for i in axes(site, shape) if edit.step is None or i != site.loop]


def by_hand(program: Program, shapes: dict[str, tuple[int, ...]]) -> Edited:
    """Build the program with its edits in its source, as a function of their inputs too."""
    found = sites(program)
    todo: dict[Path, list[tuple[int, Edit, Site]]] = {}
    for i, edit in enumerate(program.edits):
        for site in picked(edit, found):
            todo.setdefault(site.path, []).append((i, edit, site))

    def changed(x: Any, edit: Edit, site: Site, at: tuple[Any, ...], given: dict[str, Any]) -> Any:
        if edit.index is not None:
            key = _key(edit, given["index"]) if edit.traced else INDICES[edit.index]
            key = jnp.asarray(key) if isinstance(key, list) else key
            new = changed(x[key], replace(edit, index=None), site, at, given)
            return x.at[key].set(new)
        if edit.what == "number":
            out = jnp.full_like(x, _number(site))
        elif edit.what == "array":
            places = _held(edit, site, shapes[site.label]) if edit.axes else ()
            out = pick(given["array"], [at[i] for i in places])
        else:
            out = _apply(edit.what, x, site.call, given["strength"])
        if edit.step is None:
            return out
        assert site.loop is not None
        now, first = at[site.loop], given["step"]
        if site.axes[site.loop].kind == "loop":
            first = first % site.axes[site.loop].size
        due = now == first if edit.stop is None else (edit.step <= now) & (now < edit.stop)
        return jnp.where(due, out, x)

    def mark(value: Any, path: Path, given: Given, at: tuple[Any, ...]) -> Any:
        edits = todo.get(path, [])
        for i, edit, site in edits:
            if edit.of == "value":
                value = changed(value, edit, site, at, given[i])
        backward = [(i, edit, site) for i, edit, site in edits if edit.of == "grad"]

        def pull(ct: Any, given: Given, at: Any) -> Any:
            for i, edit, site in backward:
                ct = changed(ct, edit, site, at, given[i])
            return ct

        return _with_gradient(pull)(value, given, at) if backward else value

    return build.by_hand(program, mark)


def pick(array: jax.Array, at: Sequence[Any]) -> jax.Array:
    """Index the first axes of an array."""
    if not jax.typeof(array).sharding.mesh.explicit_axes:
        return array[tuple(at)]
    array = jax.reshard(array, P(*[None] * array.ndim))
    for index in at:  # JAX does not take a sharded index there
        chosen = jnp.arange(array.shape[0]) == index
        array = jnp.tensordot(chosen.astype(array.dtype), array, 1)
    return array


def _with_gradient(pull: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Make the identity, whose backward pass maps `ct` to `pull(ct, given, at)`."""

    @jax.custom_vjp
    def identity(x: Any, given: Any, at: Any) -> Any:
        del given, at
        return x

    # As documented: of several gradients around it, the edit changes the innermost.
    identity.defvjp(
        lambda x, given, at: (x, (given, at)), lambda kept, ct: (pull(ct, *kept), None, None)
    )
    return identity


def _number(site: Site) -> Any:
    return 3 if site.dtype == "int" else NUMBER


def by_engine(program: Program, fn: Callable[..., Any], constant: Given) -> Edited:
    """Edit the program with `tapax.edit`; edits that are not traced get a constant."""
    found = sites(program)

    def pair(edit: Edit, given: dict[str, Any]) -> tuple[Any, Any]:
        name, parts = edit.name, dict[str, Any]()
        if edit.stop is not None:
            parts["step"] = slice(edit.step, edit.stop)
        elif edit.step is not None:
            parts["step"] = given["step"] if edit.traced else edit.step
        if edit.index is not None:
            parts["index"] = _key(edit, given["index"]) if edit.traced else INDICES[edit.index]
        name = tapax.at(name, **parts) if parts else name
        if edit.what == "array":
            return name, given["array"]
        if edit.what == "number":
            return name, _number(picked(edit, found)[0])
        if edit.what == "site":
            return name, lambda x, site: _apply("site", x, site.call, None)
        return name, lambda x: _apply(edit.what, x, 0, given["strength"])

    def run(given: Given, x: jax.Array, n: jax.Array) -> jax.Array:
        pairs: dict[str, list[Any]] = {"value": [], "grad": []}
        for edit, traced, known in zip(program.edits, given, constant, strict=True):
            pairs[edit.of].append(pair(edit, traced if edit.traced else known))
        return tapax.edit(fn, values=pairs["value"], grads=pairs["grad"])(x, n)

    return jax.jit(run) if program.how == "jit outside" else run


def check_edits(program: Program) -> None:
    """Edit the program with `tapax` and by hand, and compare."""
    decide(program)
    fn = marked(program)
    shapes: dict[str, tuple[int, ...]] = {}
    if any(edit.axes for edit in program.edits):
        shapes = {site.name: site.shape for site in tapax.sites(fn)(*arguments(program))}
    refused = False
    while program.edits:
        known = given(program, shapes)
        way, want = _expected(program, by_hand(program, shapes), known, plainly=refused)
        try:
            got = way(program, by_engine(program, fn, known), known)
        except tapax.SiteError as error:
            if "is the same on all devices" in str(error):
                # A while loop that ends at different times gives the captured value, but not the
                # edited one, an axis for the devices.
                raise Undecided(str(error)) from error
            refused = way in (gradient, tangent) and _is_refusal(program, error)
            if not refused:
                program = _without_idle(program, shapes, error)
            continue
        except ValueError as error:
            # An edit that makes a gradient zero keeps the program that computes it, and with it
            # the path to a while loop; by hand, JAX would have seen the zero and stopped.
            if way is gradient and "Reverse-mode differentiation does not work" in str(error):
                return
            raise
        except Exception as error:
            # On an explicit mesh, jax 0.10 cannot differentiate a conditional that closes over a
            # number, in a scan that it unrolls. An edit of one iteration is such a conditional.
            if jax.__version_info__ < (0, 11) and "dynamic_update_slice operand" in str(error):
                raise Undecided(str(error)) from error
            raise
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            same(program, f"the result of {way.__name__}", g, w)
        return


def check_no_edit(program: Program) -> None:
    """Apply an empty edit, and the identity everywhere."""
    fn, args = marked(program), arguments(program)
    decide(program)
    want = run(program).out
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "tapax.edit has no edit for")
        nothing = tapax.edit(fn)
    same(program, "an edit of nothing", nothing(*args), want)
    found = sites(program)
    for of in get_args(Of):
        edited = tapax.edit(fn, **{f"{of}s": {lambda site: True: lambda x: x}})
        edited = jax.jit(edited) if program.how == "jit outside" else edited
        every = (Edit(name, "number", of) for name in dict.fromkeys(s.name for s in found))
        numbers = replace(program, edits=tuple(e for e in every if picked(e, found)))
        try:
            same(program, f"an edit of every {of} by the identity", edited(*args), want)
        except tapax.SiteError:
            if not is_idle(numbers, {}, want):
                raise


def decide(program: Program) -> None:
    """Raise `Undecided` if rounding to bfloat16 may decide a branch."""
    tests = [getattr(n, "test", "") for n in nodes(program.body)]
    if coarse(program) and "value" in tests:
        raise Undecided("bfloat16 and branches")


def coarse(program: Program) -> bool:
    """Return whether the program uses bfloat16."""
    return any(isinstance(n, Do) and n.op == "half" for n in nodes(program.body))


def marked(program: Program) -> Callable[..., Any]:
    """Build the program under test."""
    fn = build.build(program, tapax.sow)
    return jax.jit(fn) if program.how == "jit inside" else fn


def same(program: Program, what: str, got: Any, want: Any) -> None:
    """Raise `Mismatch` unless arrays agree."""
    laid = Laid(np.asarray(want, np.float64), coarse(program))
    if not close(got, laid):
        raise wrong(what, got, laid)


Way = Callable[[Program, Edited, Given], Any]


def _expected(program: Program, hand: Edited, known: Given, *, plainly: bool) -> tuple[Way, Any]:
    """Return the first way of calling the program that JAX allows, and the result by hand.

    Edits of gradients change those that the function takes itself, not one from outside; so do
    edits of marks in the backward pass of a custom function.
    """
    found = sites(program)
    backward = any("bwd" in site.path for edit in program.edits for site in picked(edit, found))
    ways: list[Way] = [call]
    if program.how == "plain" and any(edit.traced for edit in program.edits):
        # JAX does not map a branch over values that are sharded over an explicit mesh.
        ways = [call] if is_explicit(program.body) else [sweep, call]
    elif program.how != "plain" and not backward and all(e.of == "value" for e in program.edits):
        ways = [gradient, tangent, call]
    # A while loop backward, a custom_vjp forward, or types that JAX does not map on a mesh.
    refuses = Exception if is_explicit(program.body) else (TypeError, ValueError)
    for way in () if plainly else ways[:-1]:
        try:
            return way, way(program, hand, known)
        except refuses:
            pass
    try:
        return call, jax.jit(hand)(known, *arguments(program))
    except refuses as error:
        raise Undecided("JAX refuses the program with its edits in the source") from error


def _is_refusal(program: Program, error: tapax.SiteError) -> bool:
    """Return whether an error rejects the derivative of a custom function with an edited site."""
    found = sites(program)
    inside = any(_in_custom(site) for edit in program.edits for site in picked(edit, found))
    return inside and "a custom derivative rule" in str(error)


def call(program: Program, fn: Edited, known: Given) -> Any:
    """Call the function."""
    return fn(known, *arguments(program))


def sweep(program: Program, fn: Edited, known: Given) -> Any:
    """Call the function for two strengths and steps, under vmap."""
    other = jax.tree.map(lambda v: v // 2 if v.dtype == jnp.int32 else v / 2, known)
    both = tuple(
        jax.tree.map(lambda a, b, e=edit: jnp.stack([a, b if e.traced else a]), one, more)
        for edit, one, more in zip(program.edits, known, other, strict=True)
    )
    return jax.jit(jax.vmap(fn, (0, None, None)))(both, *arguments(program))


def _numbers(program: Program, known: Given) -> Any:
    """Return the inputs of edits to differentiate by, except in custom functions, which raise."""
    found, out = sites(program), []
    for edit, one in zip(program.edits, known, strict=True):
        shielded = any(_in_custom(site) for site in picked(edit, found))
        floats = {k: v for k, v in one.items() if jnp.issubdtype(v.dtype, jnp.inexact)}
        out.append(floats if edit.traced and not shielded else {})
    return out


def _in_custom(site: Site) -> bool:
    return bool({"body", "own", "bwd"} & set(site.path))


def _outside(program: Program, fn: Edited, known: Given) -> Callable[..., Any]:
    def run(x: jax.Array, numbers: Any) -> Any:
        given = tuple({**one, **more} for one, more in zip(known, numbers, strict=True))
        out = fn(given, x, arguments(program)[1])
        return jnp.vdot(weights(1, 3)[0].astype(x.dtype), out), out

    return run


def gradient(program: Program, fn: Edited, known: Given) -> Any:
    """Return the result and its gradient from outside, by its argument and the traced inputs."""
    run = jax.value_and_grad(_outside(program, fn, known), argnums=(0, 1), has_aux=True)
    return jax.jit(run)(arguments(program)[0], _numbers(program, known))


def tangent(program: Program, fn: Edited, known: Given) -> Any:
    """Return the result and its forward derivative from outside."""
    primals = arguments(program)[0], _numbers(program, known)
    ones = jax.tree.map(jnp.ones_like, primals)
    run = lambda *primals: jax.jvp(_outside(program, fn, known), primals, ones)
    return jax.jit(run)(*primals)


def _without_idle(
    program: Program, shapes: dict[str, tuple[int, ...]], error: tapax.SiteError
) -> Program:
    """Remove the edit that an error names, if it has no effect by hand."""
    found = sites(program)
    plainly = jax.jit(build.build(program))(*arguments(program))
    for i, edit in enumerate(program.edits):
        names = {edit.name, *(site.label for site in picked(edit, found))}
        if any(repr(name) in str(error) for name in names) and is_idle(
            replace(program, edits=(edit,)), shapes, plainly
        ):
            return replace(program, edits=program.edits[:i] + program.edits[i + 1 :])
    raise error


def is_idle(program: Program, shapes: dict[str, tuple[int, ...]], plainly: Any) -> bool:
    """Return whether the edits of a program have no effect by hand."""
    hand = jax.jit(by_hand(program, shapes))
    out = hand(given(program, shapes), *arguments(program))
    return close(out, Laid(np.asarray(plainly, np.float64), coarse(program)))
