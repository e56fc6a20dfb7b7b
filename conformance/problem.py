"""The cases, and what is right in each: values, gradients, their number, the loss.

Every model has a layer `lin`, `h = x @ w`, that is called in some way; the loss is the sum of the
sine of what comes out. The reference of a case calls layers of a `Tape`, which records their values
and adds a zero to each: the gradient of the loss with respect to that zero is the gradient wanted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

WIDTH = 3
LENGTH = 4
KEYS = jax.random.split(jax.random.key(0), 4)
WEIGHTS = {"lin": jax.random.normal(KEYS[0], (WIDTH, WIDTH), "float32")}
WEIGHTS["head"] = jax.random.normal(KEYS[1], (WIDTH, WIDTH), "float32")
STACK = jax.random.normal(KEYS[2], (LENGTH, WIDTH, WIDTH), "float32")
ONE = jnp.array([0.3, -0.7, 1.1], jnp.float32)
MANY = jax.random.normal(KEYS[3], (LENGTH, WIDTH), "float32")
LONG = jnp.linspace(-1.0, 1.5, 2 * WIDTH, dtype=jnp.float32)


def loss_of(out: Any) -> Any:
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


class Tape:
    """Layers that record what they return, and add to it."""

    def __init__(self, dtype: Any = jnp.float32, zeros: Any = None):
        self.dtype = dtype
        self.zeros = zeros
        self.values: dict[str, list[Any]] = {}

    def mark(self, x: Any, name: str) -> Any:
        seen = self.values.setdefault(name, [])
        if self.zeros is not None:
            x = x + self.zeros[name][len(seen)]
        seen.append(x)
        return x

    def layer(self, x: Any, w: Any, name: str = "lin") -> Any:
        return self.mark(x @ w.astype(self.dtype), name)

    def lin(self, x: Any) -> Any:
        return self.layer(x, WEIGHTS["lin"])

    def head(self, x: Any) -> Any:
        return self.layer(x, WEIGHTS["head"], "head")


Reference = Callable[[Tape, Any], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: `name` finds the programs, `title` is what the table calls it.

    `stacked` if the calls are iterations of one site, and not calls of their own. `backward` if JAX
    can take the gradient. `last` if the value of the last iteration will do.
    """

    name: str
    title: str
    reference: Reference
    x: Any = dataclasses.field(default_factory=lambda: ONE)
    stacked: bool = False
    backward: bool = True
    last: bool = False
    dtype: Any = jnp.float32
    total: bool = False
    refused: bool = False

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]


@dataclasses.dataclass(frozen=True)
class Expected:
    loss: Any
    values: dict[str, list[Any]]
    grads: dict[str, list[Any]]


@functools.cache
def expected(reference: Reference, x: Any, dtype: Any = jnp.float32) -> Expected:
    x = jnp.asarray(x.array, dtype)
    tape = Tape(dtype)
    loss = loss_of(reference(tape, x))
    zeros = jax.tree.map(jnp.zeros_like, tape.values)
    grads = jax.grad(lambda zeros: loss_of(reference(Tape(dtype, zeros), x)))(zeros)
    return Expected(loss, tape.values, grads)


class Key:
    """An array as the key of a cache, by identity."""

    def __init__(self, array: Any):
        self.array = array

    def __hash__(self) -> int:
        return id(self.array)

    def __eq__(self, other: Any) -> bool:
        return self.array is other.array


def right(case: Case, reference: Reference | None = None) -> Expected:
    """What a case should give; a model of another kind may have a reference of its own."""
    return expected(reference or case.reference, Key(case.x), case.dtype)


def straight(net: Any, x: Any) -> Any:
    return net.lin(x)


def twice(net: Any, x: Any) -> Any:
    return net.lin(jnp.tanh(net.lin(x)))


def broadcast(net: Any, x: Any) -> Any:
    """Two calls, on batches of 4 and of 1."""
    first = net.lin(x)
    return jnp.concatenate([first, net.lin(jnp.tanh(x[:1] - first[:1]))])


def each(net: Any, x: Any) -> Any:
    return jnp.stack([net.lin(row) for row in x])


def over_time(net: Any, x: Any) -> Any:
    state, out = jnp.zeros(WIDTH), []
    for row in x:
        state = jnp.tanh(net.lin(state + row))
        out.append(state)
    return jnp.stack(out)


def again(net: Any, x: Any, times: int = 3) -> Any:
    for _ in range(times):
        x = jnp.tanh(net.lin(x))
    return x


def halves(net: Any, x: Any) -> Any:
    return jnp.concatenate([net.lin(x[:WIDTH]), net.lin(x[WIDTH:])])


def stack(tape: Tape, x: Any) -> Any:
    for w in STACK:
        x = jnp.tanh(tape.layer(x, w))
    return x


def two_layers(net: Any, x: Any) -> Any:
    return net.head(jnp.tanh(net.lin(x)))


def pair(tape: Tape, x: Any) -> Any:
    h = x @ WEIGHTS["lin"]
    return tape.mark(h, "pair") * tape.mark(2.0 * h, "pair")


def shared(net: Any, x: Any) -> Any:
    return jnp.tanh(net.lin(x)) + jnp.tanh(net.lin(2.0 * x))


def nested(net: Any, x: Any) -> Any:
    """What the inner capture caught is used: it is right only if the outer one is too."""
    h = net.lin(x)
    return jnp.tanh(h) + h


def with_teacher(tape: Tape, x: Any) -> Any:
    return tape.lin(x) - jnp.tanh(tape.layer(x, WEIGHTS["head"], "teacher"))


def recurrent(tape: Tape, x: Any, activation: Any = jnp.tanh) -> Any:
    """A plain recurrent network, whose cell returns its state twice: for the next step, and out."""
    state, out = jnp.zeros(WIDTH), []
    for row in x:
        h = activation(row @ WEIGHTS["lin"] + state @ WEIGHTS["head"])
        state = tape.mark(h, "cell")
        out.append(tape.mark(h, "out"))
    return jnp.stack(out)


FORMS = {
    "around": "{}, around the model",
    "own": "{}, the framework's own",
    "plain": "{}, the framework's own, nothing declared",
    "closed": "{}, layer closed over",
    "argument": "{}, layer as an argument",
}
ALL = ("around", "own", "closed", "argument")
_TRANSFORMS = [
    ("jit", "jit", straight, {}, ALL),
    ("vmap", "vmap", each, {"x": MANY, "stacked": True}, FORMS),
    ("scan", "scan over time", over_time, {"x": MANY, "stacked": True}, FORMS),
    ("remat", "remat", straight, {}, ALL),
    ("shard_map", "shard_map", halves, {"x": LONG, "stacked": True}, ALL),
    ("cond", "cond, one branch has a layer", straight, {}, ("own", "closed", "argument")),
    ("fori_loop", "fori_loop", again, {"stacked": True}, ("own", "closed", "argument")),
    (
        "while_loop",
        "while_loop",
        again,
        {"stacked": True, "backward": False, "last": True},
        ("own", "closed", "argument"),
    ),
]

CASES = [
    Case("straight", "straight code", straight),
    Case("train", "train step: gradient inside, state updated", straight),
    Case("cached", "jit around the step, which ran before", straight),
    *(
        Case(f"{name}/{form}", FORMS[form].format(title), reference, **options)
        for name, title, reference, options, forms in _TRANSFORMS
        for form in forms
    ),
    Case("jit/ran", "jit, model closed over, which ran before", straight),
    Case("stack/own", "stacked layers, the framework's own scan", stack, stacked=True),
    Case(
        "stack/plain",
        "stacked layers, the framework's own scan, nothing declared",
        stack,
        stacked=True,
    ),
    Case("stack/raw", "stacked layers, lax.scan", stack, stacked=True),
    Case("rnn", "the framework's RNN", recurrent, MANY, stacked=True),
    Case("twice", "one layer called twice", twice),
    Case("broadcast", "called twice, on batches of 4 and of 1", broadcast, MANY),
    Case("shared", "one layer in two modules", shared),
    Case("unedited", "two layers of a Sequential nobody edited", two_layers),
    Case("keyword", "model as a keyword", straight),
    Case("second", "a second model among the arguments", with_teacher),
    Case("nested", "a capture in a capture", nested),
    Case("exception", "after an exception in a layer", straight),
    Case("bf16", "bfloat16", straight, dtype=jnp.bfloat16),
    Case("bf16/init", "bfloat16, set up in float32", straight, dtype=jnp.bfloat16),
    Case("batch/init", "batch of 4, set up with batch of 1", straight, MANY),
    Case("sum", "sow with a sum, in a scan", over_time, MANY, backward=False, total=True),
    Case("tuple", "perturb of a tuple", pair),
    Case("unknown", "a name that does not exist is refused", straight, refused=True),
]


@dataclasses.dataclass(frozen=True)
class Found:
    """What a library gave: the loss, values or gradients by layer, and whether it left a trace."""

    loss: Any
    arrays: dict[str, Any]
    changed: str = ""


def rows(arrays: Any) -> Any:
    """One row for every call and iteration, whatever the structure they came in."""
    leaves = jax.tree.leaves(arrays)
    if not leaves:
        return np.zeros((0, WIDTH), np.float32)
    return np.concatenate([np.asarray(leaf).reshape(-1, WIDTH) for leaf in leaves])


def fault(case: Case, found: Found, answer: Expected, what: str) -> str:
    """What is wrong with a result; empty if nothing is."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((found.loss, found.arrays))):
        return "a tracer leaks"
    low = case.dtype == jnp.bfloat16
    near: Any = {"rtol": 3e-2, "atol": 3e-2} if low else {"rtol": 1e-4, "atol": 1e-5}
    if found.changed:
        return found.changed
    if not np.allclose(found.loss, answer.loss, **near):
        return "the loss changed"
    wanted = answer.values if what == "value" else answer.grads
    for layer, calls in wanted.items():
        got, want = rows(found.arrays.get(layer, ())), rows(calls)
        if case.total:
            want = want.sum(0, keepdims=True)
        if got.dtype != want.dtype and len(got):
            return f"{got.dtype} instead of {want.dtype}"
        if case.last and len(got) == 1:
            want = want[-1:]
        if len(got) != len(want):
            summed = len(got) == 1 and np.allclose(got, want.sum(0), **near)
            things = what if len(got) == 1 else f"{what}s"
            return f"{len(got)} {things} instead of {len(want)}" + (", summed" if summed else "")
        if not np.allclose(got.astype(np.float32), want.astype(np.float32), **near):
            return f"the {what} is another"
    return ""
