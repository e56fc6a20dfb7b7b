"""The while loops and scans of Equinox, which diffrax and optimistix use."""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tests.oracles.closeness import assert_close

X = jnp.array([0.3, -0.7, 1.2])
STEPS = 3
KINDS = ["lax", "checkpointed", "bounded"]


def loop(kind, mark=lambda h, name: h):
    """Apply `x -> sin(2x)` three times in a loop of Equinox."""

    def run(x):
        body = lambda c: (c[0] + 1, jnp.sin(mark(2 * c[1], "h")))
        bound = {} if kind == "lax" else {"max_steps": 4}
        return eqxi.while_loop(lambda c: c[0] < STEPS, body, (0, x), kind=kind, **bound)[1]

    return lambda x: jnp.sum(run(x) ** 2)


@pytest.mark.parametrize("kind", KINDS)
def test_values_in_an_equinox_loop_agree_with_a_loop_by_hand(kind):
    _, taps = tapax.capture(loop(kind, tapax.sow), values="**")(X)
    last = 2 * jnp.sin(2 * jnp.sin(2 * X))
    name, value = next(iter(taps.values.items()))
    if taps.valid:
        value = value if value.ndim == 1 else value[jnp.flatnonzero(taps.valid[name])[-1]]
    assert_close(jnp.ravel(value)[-3:], last)


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_in_an_equinox_loop_changes_the_result(kind):
    edited = tapax.edit(loop(kind, tapax.sow), values={"h": lambda h: 3 * h})
    assert_close(edited(X), loop(kind, lambda h, name: 3 * h)(X))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_gradients_of_an_edited_equinox_loop_are_right_or_refused(kind):
    expected = jax.grad(loop(kind, lambda h, name: 3 * h))(X)
    inside = tapax.edit(jax.grad(loop(kind, tapax.sow)), values={"h": lambda h: 3 * h})
    assert_close(inside(X), expected)
    outside = jax.grad(tapax.edit(loop(kind, tapax.sow), values={"h": lambda h: 3 * h}))
    if kind == "checkpointed":
        with pytest.raises(
            tapax.SiteError, match="edited inside a function with a custom derivative"
        ):
            outside(X)
    else:
        assert_close(outside(X), expected)


COUNTS = [1, 3, 2]
BATCH = jnp.stack([X, X + 0.5, 2 * X])


def by_hand(x, steps=STEPS, edit=lambda i, h: h):
    """Compute the marked values of all iterations and their gradients without a loop."""

    def run(zeros):
        values = []
        for i in range(steps):
            values.append(edit(i, 2 * x_of[-1]) + zeros[i])
            x_of.append(jnp.sin(values[-1]))
        return jnp.sum(x_of[-1] ** 2), jnp.stack(values)

    x_of = [x]
    grads, values = jax.grad(run, has_aux=True)(jnp.zeros((steps, *x.shape)))
    return values, grads


def counted(x, steps=STEPS, checkpoints=None):
    """Run the loop with some checkpoints; the backward pass recomputes the other iterations."""
    body = lambda c: (c[0] + 1, jnp.sin(tapax.sow(2 * c[1], "h")))
    bound = {"max_steps": 6, "checkpoints": checkpoints}
    test = lambda c: c[0] < steps
    return jnp.sum(eqxi.while_loop(test, body, (0, x), kind="checkpointed", **bound)[1] ** 2)


@pytest.mark.parametrize("checkpoints", [1, 2, 6])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_gradients_of_a_checkpointed_loop_come_in_the_order_of_its_iterations(checkpoints, wrap):
    step = wrap(jax.grad(lambda x: counted(x, checkpoints=checkpoints)))
    grad, taps = tapax.capture(step, steps=5)(X)
    values, grads = by_hand(X)
    assert set(taps.values) == set(taps.grads) == {"h"}
    assert_close(taps.values["h"][:STEPS], values)
    assert_close(taps.grads["h"][:STEPS], grads)
    assert taps.valid["h"].tolist() == [True] * STEPS + [False] * 2
    assert not taps.grads["h"][STEPS:].any()
    assert_close(grad, 2 * grads[0])
    # Without `steps` a while loop returns the last iteration.
    _, taps = tapax.capture(step)(X)
    assert_close(taps.values["h"], values[-1])
    assert_close(taps.grads["h"], grads[-1])
    assert int(taps.valid["h"]) == STEPS


def test_gradients_are_captured_without_values_and_reduced():
    step = jax.grad(lambda x: counted(x, checkpoints=1))
    _, grads = by_hand(X)
    _, taps = tapax.capture(step, values=None, grads="h")(X)
    assert_close(taps.grads["h"], grads[-1])
    assert int(taps.valid["h"]) == STEPS
    several = {"h": [tapax.reduce.sum, tapax.reduce.last, tapax.reduce.norm]}
    _, taps = tapax.capture(step, values=None, grads=several)(X)
    assert_close(taps.grads["h:sum"], jnp.sum(grads))
    assert_close(taps.grads["h:norm"], jnp.sqrt(jnp.sum(grads**2)))
    assert_close(taps.grads["h:last"], grads[-1])
    _, taps = tapax.capture(step, values=None, grads=tapax.at("h", step=1))(X)
    assert_close(taps.grads["h"], grads[1])


def test_checkpointed_scan_has_a_gradient_for_every_iteration():
    def loss(x, scan):
        body = lambda c, t: (jnp.sin(tapax.sow(t * c, "h")), c)
        carry, ys = scan(body, x, jnp.arange(1.0, 5.0))
        return jnp.sum(carry**2) + jnp.sum(ys[2] ** 3)

    checkpointed = lambda *args: eqxi.scan(*args, kind="checkpointed", checkpoints=2)
    grad, taps = tapax.capture(jax.grad(loss), steps=4)(X, checkpointed)
    expected, plain = tapax.capture(jax.grad(loss))(X, jax.lax.scan)
    assert_close(grad, expected)
    assert_close(taps.values["h"], plain.values["h"])
    assert_close(taps.grads["h"], plain.grads["h"])


def test_examples_that_are_done_keep_their_last_value_and_gradient():
    counts = jnp.array(COUNTS)
    loss = lambda xs: jnp.sum(jax.vmap(lambda x, n: counted(x, n, 2))(xs, counts))
    _, last = tapax.capture(jax.grad(loss))(BATCH)
    _, first = tapax.capture(jax.grad(loss), steps=3)(BATCH)
    assert last.valid["h"].tolist() == COUNTS
    for i, count in enumerate(COUNTS):
        values, grads = by_hand(BATCH[i], count)
        assert_close(last.values["h"][i], values[-1])
        assert_close(last.grads["h"][i], grads[-1])
        assert_close(first.values["h"][:count, i], values)
        assert_close(first.grads["h"][:count, i], grads)
        assert first.valid["h"][:, i].tolist() == [True] * count + [False] * (3 - count)
        assert not first.grads["h"][count:, i].any()


@pytest.mark.parametrize("kind", ["lax", "bounded"])
def test_examples_that_are_done_keep_their_last_value_in_other_loops(kind):
    def run(x, steps):
        body = lambda c: (c[0] + 1, jnp.sin(tapax.sow(2 * c[1], "h")))
        bound = {} if kind == "lax" else {"max_steps": 4}
        return eqxi.while_loop(lambda c: c[0] < steps, body, (0, x), kind=kind, **bound)[1]

    _, taps = tapax.capture(jax.vmap(run))(BATCH, jnp.array(COUNTS))
    for i, count in enumerate(COUNTS):
        values, _ = by_hand(BATCH[i], count)
        if kind == "lax":
            assert_close(taps.values["h"][i], values[-1])
            assert int(taps.valid["h"][i]) == count
        else:
            assert_close(taps.values["h"][:count, i], values)
            assert np.flatnonzero(taps.valid["h"][:, i]).tolist() == [*range(count)]


def test_two_runs_of_one_traced_loop_keep_their_gradients_apart():
    run = jax.jit(lambda x: counted(x, checkpoints=1))
    step = jax.grad(lambda x: run(x) + 3 * run(x + 1))
    _, taps = tapax.capture(step, steps=STEPS)(X)
    first, second = by_hand(X), by_hand(X + 1)
    assert set(taps.grads) == {"h", "h@1"}
    assert_close(taps.values["h@1"], second[0])
    assert_close(taps.grads["h"], first[1])
    assert_close(taps.grads["h@1"], 3 * second[1])


def test_nested_loops_are_captured_within_a_scan():
    def once(x):
        body = lambda c: (c[0] + 1, jnp.sin(tapax.sow(2 * c[1], "h")))
        bound = {"kind": "checkpointed", "max_steps": 2, "checkpoints": 1}
        return eqxi.while_loop(lambda c: c[0] < 2, body, (0, x), **bound)[1]

    def twice(x):
        bound = {"kind": "checkpointed", "max_steps": 4, "checkpoints": 1}
        body = lambda c: (c[0] + 1, once(c[1]))
        return eqxi.while_loop(lambda c: c[0] < 2, body, (0, x), **bound)[1]

    values, grads = by_hand(X, 4)
    _, taps = tapax.capture(jax.grad(lambda x: jnp.sum(twice(x) ** 2)), steps=2)(X)
    assert_close(taps.values["h"], values.reshape(2, 2, 3))
    assert_close(taps.grads["h"], grads.reshape(2, 2, 3))
    scanned = lambda x: jnp.sum(jax.lax.scan(lambda c, _: (once(c), None), x, length=2)[0] ** 2)
    _, taps = tapax.capture(jax.grad(scanned), steps=2)(X)
    assert_close(taps.grads["h"], grads.reshape(2, 2, 3))


def test_the_derivative_of_an_edited_iteration_is_changed_there_alone():
    edit = lambda i, h: 3 * h if i == 1 else h
    where = tapax.at("h", step=1)
    step = tapax.edit(
        jax.grad(lambda x: counted(x, checkpoints=1)), values={where: lambda h: 3 * h}
    )
    grads = jax.grad(lambda x: jnp.sum(jnp.sin(by_hand(x, edit=edit)[0][-1]) ** 2))(X)
    assert_close(step(X), grads)
    zeroed = tapax.edit(
        jax.grad(lambda x: counted(x, checkpoints=1)), grads={where: jnp.zeros_like}
    )
    assert not zeroed(X).any()
