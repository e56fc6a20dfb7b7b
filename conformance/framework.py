"""The cases as programs of a framework, unedited, and what tapax captures of them."""

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
    """What a layer raises."""


@dataclasses.dataclass
class Program:
    """A step that returns the loss first, and what to expect of it.

    `ran` if it is called before it is captured; `mend` repairs what makes it fail at first; `alone`
    if the framework can run it without any capture.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    sites: dict[str, str | tuple[str, ...]] = dataclasses.field(
        default_factory=lambda: {"lin": "Net/lin"}
    )
    reference: Reference | None = None
    ran: bool = False
    mend: Callable[[], None] | None = None
    alone: bool = True


class Framework:
    """Models of one framework: `net` makes one, and a function that calls it.

    `own` holds the bodies that use the framework's own transformations, `special` the programs that
    are not made from a body, and `none` the cases that have no meaning in it; `arguments` if a
    module can be an argument of a transformed function.
    """

    name = ""
    lin = "Net/lin"
    own: dict[str, Body]
    special: dict[str, Callable[[Case], Program]]
    none: frozenset[str] = frozenset()
    arguments = True

    def net(self, body: Body, w: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
        """A model with this body and the weights of its layer, and a function that calls it."""
        raise NotImplementedError

    def value_and_grad(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(loss)

    def jit(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(step)

    def state(self, model: Any) -> Any:
        """The arrays of a model."""
        return model

    def has(self, case: Case) -> bool:
        kind, _, form = case.name.partition("/")
        if form in ("own", "plain"):
            return kind in self.own or case.name in self.special
        return case.name not in self.none and (form != "argument" or self.arguments)

    def build(self, case: Case) -> Program:
        if case.name in self.special:
            return self.special[case.name](case)
        kind, _, form = case.name.partition("/")
        x = case.x.astype(case.dtype)
        w = WEIGHTS["lin"].astype(case.dtype)
        mend = None
        body: Body = problem.straight
        if form in ("own", "plain") and kind in self.own:
            body = self.own[kind]
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
        if case.name == "jit/ran":
            cached = jax.jit(lambda x: call(arg, x))
            return Program(
                jax.value_and_grad(lambda x: loss_of(cached(x))),
                (x,),
                sites={"lin": self.lin},
                ran=True,
            )
        loss = self.loss(case, call)
        step = self.value_and_grad(loss) if case.backward else loss
        if case.name in ("cached", "jit/around"):
            step = self.jit(step)
        program = Program(step, (arg, x), sites={"lin": self.lin}, mend=mend)
        program.ran = case.name == "cached"
        if kind == "keyword":
            program = dataclasses.replace(
                program, step=lambda x, *, model: step(model, x), args=(x,), kwargs={"model": arg}
            )
        return program

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
    broken = [True]

    def body(net: Any, x: Any) -> Any:
        h = net.lin(x)
        if broken:
            raise Broken
        return h

    return body, broken.clear


def measure(framework: Framework, case: Case) -> tuple[Found, Found]:
    """The values and the gradients that tapax captures."""
    plain = framework.build(case)
    if plain.mend:
        plain.mend()
    wanted = plain.step(*plain.args, **plain.kwargs) if plain.alone else None
    program = framework.build(case)
    if program.ran:
        program.step(*program.args, **program.kwargs)
    if case.refused:
        return _refused(program)
    options = {"values": program.sites["lin"], "steps": 8} if case.last else {}
    captured = tapax.capture(program.step, **options)
    if program.mend:
        with contextlib.suppress(Broken):
            captured(*program.args, **program.kwargs)
        program.mend()
    out, taps = captured(*program.args, **program.kwargs)
    before = framework.state((plain.args, plain.kwargs)), wanted
    after = framework.state((program.args, program.kwargs)), out
    near = 3e-2 if case.dtype == jnp.bfloat16 else 1e-4
    changed = "" if not plain.alone or _same(before, after, near) else "the state changed"
    loss = out[0] if isinstance(out, tuple) else out
    found = []
    for arrays in (taps.values, taps.grads):
        names = {layer: _calls(arrays, site) for layer, site in program.sites.items()}
        values = {layer: [arrays[n][_ran(taps, n)] for n in ns] for layer, ns in names.items()}
        found.append(Found(loss, values, changed or _shapes(case, names, values)))
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
    """The iterations of a while loop that there were."""
    mask = taps.valid.get(name)
    return ... if mask is None or mask.ndim == 0 else np.asarray(mask)


def _calls(arrays: Any, site: str | tuple[str, ...]) -> list[str]:
    """The names of the calls of a site, in order; if it ends in a colon, of all its leaves."""
    if isinstance(site, tuple):
        return [name for part in site for name in _calls(arrays, part)]
    if site.endswith(":"):
        return [name for name in arrays if name.startswith(site)]
    found = [name for name in arrays if name.partition("@")[0] == site]
    return sorted(found, key=lambda name: int(name.partition("@")[2] or 0))


def _shapes(case: Case, names: Any, values: Any) -> str:
    """Iterations are stacked under one name; calls have one each."""
    for layer, calls in names.items():
        if case.stacked and len(calls) > 1:
            return f"{layer} has {len(calls)} names for one site"
        for name, value in zip(calls, values[layer], strict=True):
            if case.stacked and value.ndim < 2:
                return f"{name} has the shape {value.shape}"
    return ""


def _same(a: Any, b: Any, near: float) -> bool:
    """Whether the arrays in two structures are the same."""
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
