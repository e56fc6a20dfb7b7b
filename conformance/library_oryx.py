"""oryx: `sow` in the layer, `call_and_reap` around the program.

oryx has no gradients of sown values. Here, the layer adds a sown zero to its result, and `plant`
replaces that zero by an argument of the loss, whose gradient is the one to find.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from oryx.core.interpreters import harvest

from conformance import transforms
from conformance.library import Library
from conformance.problem import RATE, STACK, WEIGHTS, Case, Found, loss_of, straight

VALUE, ZERO = "value", "zero"


def _mark(h: Any, name: str, mode: str = "append") -> Any:
    zeros = jax.tree.map(lambda h: 0 * h, h)  # batched where `h` is
    zeros = harvest.sow(zeros, tag=ZERO, name=name, mode=mode)
    h = jax.tree.map(jnp.add, h, zeros)
    return harvest.sow(h, tag=VALUE, name=name, mode=mode)


def _dense(name: str, mode: str, w: Any, x: Any) -> Any:
    return _mark(x @ w, name, mode)


class Net:
    """A model with one layer, which is a function of its weights that JAX sees as a pytree."""

    def __init__(self, body: Any, w: Any, name: str = "lin", mode: str = "append"):
        self.body = body
        self.lin = Partial(functools.partial(_dense, name, mode), w)

    def __call__(self, x: Any) -> Any:
        return self.body(self, x)


def _pair(net: Any, x: Any) -> Any:
    h = x @ WEIGHTS["lin"]
    a, b = _mark((h, 2.0 * h), "pair")
    return a * b


def _nested(net: Any, x: Any) -> Any:
    h, inner = harvest.call_and_reap(net.lin, tag=VALUE)(x)
    return jnp.tanh(h) + inner["lin"].reshape(h.shape)


def _body(case: Case) -> Any:
    if case.form in ("closed", "argument"):
        return getattr(transforms, case.form)(case.kind)
    bodies = {"nested": _nested, "tuple": _pair}
    bodies |= dict.fromkeys(("twice", "broadcast", "shared"), case.reference)
    return bodies.get(case.kind, straight)


class _Broken(Exception):
    pass


def _program(case: Case) -> tuple[Callable[..., Any], Any, Callable[[], None] | None]:
    """Return a function of the weights that returns the loss first, the weights, and a change.

    The change is a function to call between a first call and the one that counts.
    """
    x, w = case.input(), WEIGHTS["lin"].astype(case.dtype)
    body, around, change = _body(case), transforms.around(case), None
    # oryx asks for this mode in while loops; it returns the value of the last iteration.
    mode = "clobber" if "while" in case.kind else "append"
    if case.name == "stack/raw":
        w = STACK
    if case.kind == "exception":
        broken = [True]
        change = broken.clear

        def body(net: Any, x: Any) -> Any:
            h = net.lin(x)
            if broken:
                raise _Broken
            return h

    def loss(w: Any) -> Any:
        if case.kind == "second":
            teacher = Net(straight, WEIGHTS["head"], "teacher")
            return loss_of(Net(straight, w)(x) - jnp.tanh(teacher(x)))
        if around:
            return loss_of(around(lambda m, x, p: (Net(body, m)(x), None), w, x)[0])
        return loss_of(Net(body, w, mode=mode)(x))

    if case.kind == "train" or case.kind in transforms.TRAIN:
        step = _training(case, loss)
    elif case.name in ("cached", "jit/around"):
        step = jax.jit(loss)
        step(w)
    elif case.name == "jit/ran":
        cached = jax.jit(lambda: Net(body, w)(x))
        cached()
        step = lambda w: loss_of(cached())  # noqa: E731
    elif case.kind == "mutated":
        closed = [w]
        step = lambda _: loss(closed[0])  # noqa: E731
        change = lambda: closed.__setitem__(0, 2.0 * w)  # noqa: E731
    elif case.kind == "keyword":
        step = lambda w: (lambda *, model: loss(model))(model=w)  # noqa: E731
    else:
        step = loss
    return step, w, change


def _training(case: Case, loss: Any) -> Callable[..., Any]:
    """Return a step that trains and returns the gradients of the zeros, next to the loss."""

    def once(w: Any) -> Any:
        zeros = {"lin": jnp.zeros_like(case.x)}
        both = jax.value_and_grad(harvest.plant(loss, tag=ZERO), argnums=(0, 1))
        value, (zeros, grads) = both(zeros, w)
        return value, grads, zeros

    def step(w: Any) -> Any:
        value, grads, zeros = once(w)
        return value, zeros, w - RATE * grads

    if case.kind == "train":
        return jax.jit(step)
    return lambda w: transforms.TRAIN[case.kind](once, w)


class Oryx(Library):
    name = "oryx"
    packages = ("oryx", "jax")
    modules = ("oryx",)

    def missing(self, case: Case, what: str) -> bool:
        # The JAX that oryx works with has no explicit axes, and Equinox needs a newer one.
        if case.kind in ("rnn", "sum", "unedited", "sharded", "while_grad"):
            return True
        return case.form in ("lifted", "undeclared", "init")

    def value(self, case: Case) -> Found:
        step, w, change = _program(case)
        if case.refused:
            harvest.call_and_reap(step, tag=VALUE, allowlist=["absent"])(w)
            return Found(None, {}, "no error")
        reaped = harvest.call_and_reap(step, tag=VALUE)
        if change:
            with contextlib.suppress(_Broken):
                reaped(w)
            change()
        out, found = reaped(w)
        return Found(out[0] if isinstance(out, tuple) else out, found)

    def gradient(self, case: Case) -> Found:
        step, w, change = _program(case)
        if case.kind == "train" or case.kind in transforms.TRAIN:
            loss, found, _ = step(w)
            return Found(loss, found)
        if change:
            with contextlib.suppress(_Broken):
                harvest.call_and_reap(step, tag=ZERO)(w)
            change()
        zeros = harvest.call_and_reap(step, tag=ZERO)(w)[1]
        if case.refused:
            zeros = {"absent": jnp.zeros(3)}

        def planted(zeros: Any) -> Any:
            out = harvest.plant(step, tag=ZERO)(zeros, w)
            return out[0] if isinstance(out, tuple) else out

        loss, found = jax.value_and_grad(planted)(zeros)
        return Found(loss, found, "no error" if case.refused else "")


LIBRARY = Oryx()
