"""Equal bodies are replaced by one, and bodies that differ in anything are kept apart."""

import jax
import jax.numpy as jnp
import pytest

import tapax
from tapax._jaxpr.bodies import bodies
from tapax._jaxpr.evaluate import evaluate
from tapax._jaxpr.shared_bodies import SharedBodies

X = jnp.ones(3)


def traced(fn, *args):
    return jax.make_jaxpr(fn)(*(args or (X,)))


def again(jaxpr):
    """Trace a program anew from its equations."""
    return jax.make_jaxpr(lambda *args: evaluate(jaxpr, args))(*jaxpr.in_avals)


def test_body_that_was_evaluated_again_is_shared():
    body, shared = traced(lambda x: jnp.sin(x) * 2), SharedBodies()
    assert shared.share(body) is body
    assert shared.share(again(again(body))) is body


SAME_LINE = [lambda x, n=n: jnp.sin(x) * n for n in (2.0, 3.0, 0.0, -0.0, jnp.float16(2), 2)]


@pytest.mark.parametrize("first", range(len(SAME_LINE)))
def test_bodies_with_other_literals_are_kept_apart(first):
    shared = SharedBodies()
    traces = [traced(fn) for fn in SAME_LINE]
    assert shared.share(traces[first]) is traces[first]
    different = [body for i, body in enumerate(traces) if i != first]
    assert all(shared.share(body) is body for body in different)


def one_line(fn):
    return lambda *args: fn(*args)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x, y: x - y, lambda x, y: y - x),
        (lambda x, y: x + y, lambda x, y: x * y),
        (lambda x, y: (x, y), lambda x, y: (y, x)),
        (lambda x, y: jnp.cumsum(x, 0), lambda x, y: jnp.cumsum(x, 0, dtype=jnp.float16)),
        (lambda x, y: jnp.sort(x), lambda x, y: jnp.sort(x, stable=False)),
    ],
)
def test_bodies_that_compute_something_else_are_kept_apart(first, second):
    shared = SharedBodies()
    bodies_ = [traced(one_line(fn), X, X) for fn in (first, second)]
    assert [shared.share(body) for body in bodies_] == bodies_


def test_bodies_with_other_constants_and_types_are_kept_apart():
    shared = SharedBodies()
    constants = [jnp.arange(3.0), jnp.arange(3.0)]
    first, second = (traced(lambda x, c=c: x + c) for c in constants)
    assert (shared.share(first), shared.share(second)) == (first, second)
    wide, narrow = (traced(jnp.sin, jnp.ones(n)) for n in (4, 5))
    assert (shared.share(wide), shared.share(narrow)) == (wide, narrow)


def test_bodies_of_other_lines_are_kept_apart():
    shared = SharedBodies()
    first = traced(lambda x: jnp.sin(x))
    second = traced(lambda x: jnp.sin(x))
    assert (shared.share(first), shared.share(second)) == (first, second)


@pytest.mark.parametrize("asked", [None, tapax.reduce.rms])
def test_recomputed_blocks_have_one_body_in_a_capture_as_in_the_plain_program(asked):
    @jax.checkpoint
    def block(x, w):
        return tapax.sow(jnp.tanh(x @ w), "out")

    def loss(x, ws):
        for i, w in enumerate(ws):
            with tapax.scope(f"block{i}"):
                x = block(x, w)
        return x.sum()

    args = jnp.ones((2, 3)), [jnp.eye(3) * i for i in range(1, 5)]
    kept = {} if asked is None else {"values": asked, "grads": asked}
    found = []
    for step in (jax.grad(loss, (0, 1)), tapax.capture(jax.grad(loss, (0, 1)), **kept)):
        program = jax.make_jaxpr(step)(*args)
        remats = [eqn for eqn in program.eqns if "prevent_cse" in eqn.params]
        found.append((len(remats), len({id(b) for eqn in remats for b in bodies(eqn)})))
    assert found[0] == found[1] == (4, 1)
