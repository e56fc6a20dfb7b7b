"""The cases as unedited programs of a framework, and the values that tapax captures in them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tapax
from conformance import problem, transforms
from conformance.problem import STACK, WEIGHTS, Case, Found, Reference, loss_of

Body = Callable[[Any, Any], Any]


class Broken(Exception):
    """The exception that a layer raises."""


@dataclasses.dataclass
class Program:
    """A step that returns the loss first, its arguments, and the names of its sites.

    - `ran`: the step is called once before it is captured.
    - `between`: called between a first captured call and the one that counts.
    - `fails`: the first call raises `Broken`.
    - `alone`: the framework can run the step without a capture.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    sites: dict[str, str | tuple[str, ...]] = dataclasses.field(
        default_factory=lambda: {"lin": "Net/lin"}
    )
    reference: Reference | None = None
    ran: bool = False
    between: Callable[[], None] | None = None
    fails: bool = False
    alone: bool = True


class Framework:
    """The models of one framework: `net` makes one from a body, a function of the model and `x`.

    - `lifted`: bodies that use the framework's versions of JAX's transformations.
    - `special`: programs that are not made from a body.
    - `none`: cases for which the framework has no program.
    - `arguments`: whether a module can be an argument of a transformed function.
    """

    name = ""
    lin = "Net/lin"
    lifted: dict[str, Body]
    special: dict[str, Callable[[Case], Program]]
    none: frozenset[str] = frozenset()
    arguments = True

    def net(self, body: Body, w: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
        """Make a model with this body and these weights; return it, and a function to call it."""
        raise NotImplementedError

    def value_and_grad(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(loss)

    def jit(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(step)

    def state(self, model: Any) -> Any:
        """Return the arrays of a model."""
        return model

    def has(self, case: Case) -> bool:
        kind, _, form = case.name.partition("/")
        if form in ("lifted", "undeclared"):
            return kind in self.lifted or case.name in self.special
        return case.name not in self.none and (form != "argument" or self.arguments)

    def build(self, case: Case) -> Program:
        if case.name in self.special:
            return self.special[case.name](case)
        kind, _, form = case.name.partition("/")
        x = case.input()
        w = WEIGHTS["lin"].astype(case.dtype)
        mend = None
        body: Body = problem.straight
        if form in ("lifted", "undeclared") and kind in self.lifted:
            body = self.lifted[kind]
        elif form == "closed":
            body = transforms.closed(kind)
        elif form == "argument":
            body = transforms.argument(kind)
        elif kind == "stack":
            w = STACK
        elif kind == "nested":
            body = _nested(self.lin.split("/")[-1])
        elif kind == "exception":
            body, mend = failing()
        elif kind in ("twice", "broadcast"):
            body = case.reference
        arg, call = self.net(body, w)
        sites: Any = {"lin": self.lin}
        if case.name == "jit/ran":
            cached = jax.jit(lambda x: call(arg, x))
            step = jax.value_and_grad(lambda x: loss_of(cached(x)))
            return Program(step, (x,), sites=sites, ran=True)
        if kind == "mutated":
            return self.mutated(arg, call, x, sites)
        loss = self.loss(case, call)
        if kind in transforms.TRAIN:
            return Program(self.training(kind, loss), (arg, x), sites=sites)
        step = self.value_and_grad(loss) if case.backward else loss
        if case.name in ("cached", "jit/around", "sharded"):
            step = self.jit(step)
        program = Program(step, (arg, x), sites=sites, between=mend, fails=mend is not None)
        program.ran = case.name == "cached"
        if kind == "keyword":
            program = dataclasses.replace(
                program, step=lambda x, *, model: step(model, x), args=(x,), kwargs={"model": arg}
            )
        return program

    def mutated(self, arg: Any, call: Any, x: Any, sites: Any) -> Program:
        """Make a step that closes over weights, which are doubled between two calls."""
        closed = [arg]
        step = jax.value_and_grad(lambda x: loss_of(call(closed[0], x)))

        def between() -> None:
            closed[0] = jax.tree.map(lambda w: 2.0 * w, arg)

        return Program(step, (x,), sites=sites, between=between)

    def training(self, kind: str, loss: Any) -> Callable[..., Any]:
        """Make a step that trains in a loop."""

        def step(arg: Any, x: Any) -> Any:
            one = lambda arg: (*jax.value_and_grad(loss)(arg, x), None)  # noqa: E731
            return transforms.TRAIN[kind](one, arg)

        return step

    def loss(self, case: Case, call: Any) -> Callable[..., Any]:
        kind, _, form = case.name.partition("/")
        around = None
        if form == "around" and kind != "jit":
            around = transforms.RAW[kind]
        elif case.name == "stack/raw":
            around = transforms.stack

        def loss(arg: Any, x: Any) -> Any:
            if around is None:
                return loss_of(call(arg, x))
            return loss_of(around(lambda m, x, p: (call(m, x), None), arg, x)[0])

        return loss


def _nested(layer: str) -> Body:
    def body(net: Any, x: Any) -> Any:
        h, inner = tapax.capture(lambda x: net.lin(x))(x)  # noqa: PLW0108
        (caught,) = (v for name, v in inner.values.items() if name.split("/")[-1] == layer)
        return jnp.tanh(h) + caught

    return body


def failing() -> tuple[Body, Callable[[], None]]:
    """Return a body that raises, and a function that repairs it."""
    broken = [True]

    def body(net: Any, x: Any) -> Any:
        h = net.lin(x)
        if broken:
            raise Broken
        return h

    return body, broken.clear


def measure(framework: Framework, case: Case) -> tuple[Found, Found]:
    """Return the values and the gradients that tapax captures."""
    plain = framework.build(case)
    if plain.between:
        plain.between()
    wanted = plain.step(*plain.args, **plain.kwargs) if plain.alone else None
    program = framework.build(case)
    if program.ran:
        program.step(*program.args, **program.kwargs)
    if case.refused:
        return _refused(program)
    loops = case.last and not case.implicit
    options: Any = {"values": program.sites["lin"], "steps": 8} if loops else {}
    captured = tapax.capture(program.step, **options)
    if program.between:
        with contextlib.suppress(Broken) if program.fails else contextlib.nullcontext():
            captured(*program.args, **program.kwargs)
        program.between()
    out, taps = captured(*program.args, **program.kwargs)
    before = framework.state((plain.args, plain.kwargs)), wanted
    after = framework.state((program.args, program.kwargs)), out
    near = 3e-2 if case.dtype == jnp.bfloat16 else 1e-4
    alike = not plain.alone or case.kind == "mutated" or _same(before, after, near)
    changed = "" if alike else "the state changed"
    loss = out[0] if isinstance(out, tuple) else out
    found = []
    for arrays in (taps.values, taps.grads):
        names = {layer: _calls(arrays, site) for layer, site in program.sites.items()}
        values = {layer: [arrays[n][_ran(taps, n)] for n in ns] for layer, ns in names.items()}
        changed = changed or _shapes(case, names, values)
        found.append(Found(loss, values, changed, program.reference))
    return found[0], found[1]


def _refused(program: Program) -> tuple[Found, Found]:
    found = []
    for options in ({"values": "Net/absent"}, {"grads": "Net/absent"}):
        try:
            tapax.capture(program.step, **options)(*program.args)
            found.append(Found(None, {}, "no error"))
        except tapax.SiteError:
            found.append(Found(None, {}))
    return found[0], found[1]


def _ran(taps: Any, name: str) -> Any:
    """Return the index of the iterations and examples that ran."""
    mask = taps.valid.get(name)
    return ... if mask is None or mask.ndim == 0 else np.asarray(mask)


def _calls(arrays: Any, site: str | tuple[str, ...]) -> list[str]:
    """Return the names of the calls of a site, in order; after a colon, those of all its leaves."""
    if isinstance(site, tuple):
        return [name for part in site for name in _calls(arrays, part)]
    if site.endswith(":"):
        return [name for name in arrays if name.startswith(site)]
    found = [name for name in arrays if name.partition("@")[0] == site]
    return sorted(found, key=lambda name: int(name.partition("@")[2] or 0))


def _shapes(case: Case, names: Any, values: Any) -> str:
    """Describe names and shapes that break tapax's rule: a name for each call, stacked in loops."""
    for layer, calls in names.items():
        if case.stacked and len(calls) > 1:
            return f"{layer} has {len(calls)} names for one site"
        for name, value in zip(calls, values[layer], strict=True):
            if case.stacked and value.ndim < 2:
                return f"{name} has the shape {value.shape}"
    return ""


def _same(a: Any, b: Any, near: float) -> bool:
    """Return whether two structures have equal arrays."""
    pairs = [[x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)] for tree in (a, b)]
    if len(pairs[0]) != len(pairs[1]):
        return False

    def close(x: Any, y: Any) -> bool:
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        return np.allclose(x, y, rtol=near, atol=near)

    return all(map(close, *pairs))
