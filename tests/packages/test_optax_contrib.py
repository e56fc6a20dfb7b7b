"""Optimizers of optax.contrib: whole runs in a scan, and steps with several gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import tapax
from tests.oracles import by_hand
from tests.oracles.closeness import assert_close

STEPS, RATE, RHO = 4, 0.1, 0.05
OPTIMIZERS = {
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(RATE), learning_rate=RATE, b1=0.9),
    "schedule_free_adamw": lambda: contrib.schedule_free_adamw(RATE, warmup_steps=2),
    "prodigy": lambda: contrib.prodigy(0.5, estim_lr0=1e-2),
    "sam": lambda: contrib.sam(optax.sgd(RATE), ascent(), sync_period=2),
    "opaque_sam": lambda: contrib.sam(optax.sgd(RATE), ascent(), opaque_mode=True),
    "plateau": lambda: optax.chain(
        optax.adam(RATE), contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5)
    ),
    "mechanic": lambda: contrib.mechanize(optax.adam(RATE)),
    "muon": lambda: contrib.muon(RATE),
}


def ascent():
    return optax.chain(contrib.normalize(), optax.sgd(RHO))


@pytest.fixture(scope="module")
def start():
    k = jax.random.split(jax.random.key(0), 4)
    params = {"w": jax.random.normal(k[0], (3, 4)) / 2, "v": jax.random.normal(k[1], (4, 1))}
    x, y = jax.random.normal(k[2], (STEPS, 5, 3)), jax.random.normal(k[3], (STEPS, 5, 1))
    return params, (x, y, jnp.ones((STEPS, 5, 1)))


@pytest.fixture(scope="module")
def one(start):
    """Return the parameters and the first batch."""
    return start[0], jax.tree.map(lambda x: x[0], start[1])


def loss_of(params, batch, mark=by_hand.unmarked):
    x, y, weight = batch
    h = mark(jnp.tanh(x @ params["w"]), "h")
    return jnp.mean(jnp.sqrt(weight) * (h @ params["v"] - y) ** 2)


def make_step(name, mark=by_hand.unmarked):
    """Make a train step that passes loss and gradient function to the optimizers that take them."""
    optimizer = OPTIMIZERS[name]()

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch, mark)
        value = mark(loss, "loss")
        again = jax.grad(lambda params, _: loss_of(params, batch, mark))
        extra = {"plateau": {"value": value}, "opaque_sam": {"grad_fn": again}}.get(name, {})
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state, loss

    return step


def training(name, mark=by_hand.unmarked):
    """Make a run of `STEPS` steps in one scan, as users often compile it."""

    def run(params, batches):
        def body(carry, batch):
            *carry, loss = make_step(name, mark)(*carry, batch)
            return tuple(carry), loss

        return jax.lax.scan(body, (params, OPTIMIZERS[name]().init(params)), batches)

    return jax.jit(run)


def values_and_gradients(params, batch):
    """Compute the value and the gradient of the hidden layer for given parameters."""
    h = jnp.tanh(batch[0] @ params["w"])
    return h, by_hand.gradients(lambda mark: loss_of(params, batch, mark), {"h": h})["h"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_in_a_scan_has_the_values_and_gradients_of_each_step(name, start):
    params, batches = start
    out, taps = tapax.capture(training(name, tapax.sow))(*start)
    assert_close(out, training(name)(*start))
    state, step = OPTIMIZERS[name]().init(params), jax.jit(make_step(name))
    for i in range(STEPS):
        batch = jax.tree.map(lambda x, i=i: x[i], batches)
        h, grad = values_and_gradients(params, batch)
        assert_close(taps.values["h"][i], h, 1e-4)
        assert_close(taps.grads["h"][i], grad, 1e-4)
        params, state, _ = step(params, state, batch)


def test_both_gradients_of_a_sharpness_aware_step_are_told_apart(one):
    params, batch = one
    step = jax.jit(make_step("opaque_sam", tapax.sow))
    _, taps = tapax.capture(step)(params, OPTIMIZERS["opaque_sam"]().init(params), batch)
    assert list(taps.values) == ["h", "loss", "h@1"]
    grads = jax.grad(loss_of)(params, batch)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    climbed = jax.tree.map(lambda p, g: p + RHO * g / norm, params, grads)
    for name, at in {"h": params, "h@1": climbed}.items():
        h, grad = values_and_gradients(at, batch)
        assert_close(taps.values[name], h)
        assert_close(taps.grads[name], grad)
    assert np.abs(taps.values["h@1"] - taps.values["h"]).max() > 1e-3


def test_derivatives_through_both_gradients_agree_with_differences(one):
    """The derivative of the loss after a sharpness-aware step differentiates gradients."""
    with jax.enable_x64(True):
        params, batch = jax.tree.map(lambda x: x.astype(jnp.float64), one)
        state = OPTIMIZERS["opaque_sam"]().init(params)

        def after(mark):
            new = make_step("opaque_sam", mark)(params, state, batch)[0]
            return loss_of(new, batch)

        grads = tapax.grad(lambda: after(tapax.sow), at="h")()

        def shifted(delta, call):
            calls = iter(range(2))
            add = lambda x, name: x + delta if name == "h" and next(calls) == call else x
            return after(add)

        for call, name in enumerate(["h", "h@1"]):
            fn = jax.jit(lambda delta, call=call: shifted(delta, call))
            expected = by_hand.differences(fn, jnp.zeros((5, 4)))
            assert_close(grads[name], expected, 1e-6)
            assert np.abs(expected).max() > 1e-4


def test_edit_of_the_metric_makes_a_plateau(start):
    scale = lambda out: out[0][1][1].scale
    constant = {"loss": lambda x: jnp.full_like(x, 3.0)}
    edited = tapax.edit(training("plateau", tapax.sow), values=constant)(*start)
    assert_close(edited, training("plateau", by_hand.changed(constant))(*start))
    assert scale(edited) == 0.5 ** (STEPS - 1)  # after the first, no step improves the metric


def test_edit_of_a_gradient_reaches_the_update(one):
    params, batch = one
    state = OPTIMIZERS["schedule_free"]().init(params)
    step = jax.jit(make_step("schedule_free", tapax.sow))
    edited = tapax.edit(step, grads={"h": lambda g: 2 * g})(params, state, batch)

    @jax.custom_vjp
    def twice(x):
        return x

    twice.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))
    doubled = lambda x, name: twice(x) if name == "h" else x
    assert_close(edited, make_step("schedule_free", doubled)(params, state, batch))


@pytest.mark.parametrize("name", ["prodigy", "plateau", "opaque_sam"])
def test_search_finds_the_step_of_a_training_that_makes_a_nan(name, start):
    params, (x, y, weight) = start
    assert tapax.find_nonfinite(training(name))(*start) is None
    batches = x, y, weight.at[2, 3].set(-1.0)
    found = tapax.find_nonfinite(training(name, tapax.sow))(params, batches)
    assert (found.operation, found.kind, found.phase) == ("sqrt", "nan", "forward")
    assert (found.iterations, found.index, found.shape) == ((2,), (3, 0), (5, 1))


def test_line_search_of_lbfgs_is_seen_inside_of_its_loop(one):
    params, batch = one
    solver = optax.lbfgs()

    def step(mark):
        loss = lambda params: loss_of(params, batch, mark)

        def run(params, state):
            value, grad = optax.value_and_grad_from_state(loss)(params, state=state)
            extra = {"value": value, "grad": grad, "value_fn": loss}
            updates, state = solver.update(grad, state, params, **extra)
            return optax.apply_updates(params, updates), state

        return jax.jit(run)

    state = solver.init(params)
    out, taps = tapax.capture(step(tapax.sow))(params, state)
    assert_close(out, step(by_hand.unmarked)(params, state))
    assert list(taps.values) == list(taps.grads) == ["h", "h@1", "h@2"]
    assert [int(v) for v in taps.valid.values()] == [1, 0, 1]  # takes the first step length
    for name, at in {"h": params, "h@2": out[0]}.items():
        h, grad = values_and_gradients(at, batch)
        assert_close(taps.values[name], h)
        assert_close(taps.grads[name], grad)
