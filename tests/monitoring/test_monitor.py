"""A monitored run equals the plain run bit for bit, never stops, and loses no record."""

import functools
import gc
import subprocess
import sys
import textwrap
import threading

import brainstate
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import tapax
from tapax import alert
from tapax import open as open_log
from tapax.monitoring._log import Log
from tapax.monitoring._monitor import Monitor, monitor
from tests.models.monitored import KEY, W, X, batch, scanned
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once


def plain(wrap, steps):
    step = wrap(scanned)
    w, momentum = W.copy(), jnp.zeros_like(W)
    for i in range(steps):
        w, momentum = step(w, momentum, batch(i))
    return w, momentum


def python_step(wrap, steps):
    def outer(state, i, *, x):
        w, momentum = scanned(state["w"], state["m"], x)
        return {"w": w, "m": momentum, "i": i}

    step, state = wrap(outer), {"w": W.copy(), "m": jnp.zeros_like(W)}
    for i in range(steps):
        new = step(state, i, x=batch(i))
        state = {"w": new["w"], "m": new["m"]}
    return state


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a, self.b = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.b(self.drop(nnx.relu(self.norm(self.a(x)))))


@nnx.jit
def nnx_update(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def of_nnx(wrap, steps):
    model, step = Net(), wrap(nnx_update)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for i in range(steps):
        step(model, optimizer, x=batch(i))
    return [
        nnx.state(model, nnx.Not(nnx.RngState)),
        nnx.state(optimizer),
        model.drop.rngs.count[...],
    ]


class Trainer:
    """A plain object, neither a module nor jitted, with a model and a counter."""

    def __init__(self):
        self.model, self.steps = Net(), 0
        self.optimizer = nnx.Optimizer(self.model, optax.adam(1e-2), wrt=nnx.Param)

    def step(self, x):
        self.steps += 1
        return nnx_update(self.model, self.optimizer, x)


def of_trainer(wrap, steps):
    trainer = Trainer()
    step = wrap(trainer.step)
    for i in range(steps):
        step(batch(i))
    return [trainer.steps, nnx.state(trainer.model, nnx.Not(nnx.RngState))]


def of_equinox(wrap, steps):
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit(donate="all")
    def update(model, state, x):
        grads = eqx.filter_grad(lambda m: jnp.mean((jax.vmap(m)(x) - 1) ** 2))(model)
        changes, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, changes), state

    model = eqx.nn.MLP(4, 4, 8, 2, key=KEY)
    state, step = optimizer.init(eqx.filter(model, eqx.is_array)), wrap(update)
    for i in range(steps):
        model, state = step(model, state, batch(i) + 0)
    return eqx.filter((model, state), eqx.is_array)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.Dropout(0.3, deterministic=False)(nn.tanh(nn.Dense(8)(x))))


def of_linen(wrap, steps):
    @functools.partial(jax.jit, donate_argnums=0, static_argnames="scale")
    def update(state, x, key, *, scale):
        def loss(params):
            out = state.apply_fn({"params": params}, x, rngs={"dropout": key})
            return jnp.mean((scale * out - 1) ** 2)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    params = Dense().init({"params": KEY, "dropout": KEY}, X)["params"]
    state = TrainState.create(apply_fn=Dense().apply, params=params, tx=optax.adam(1e-2))
    step = wrap(update)
    for i in range(steps):
        state = step(state, batch(i), jax.random.fold_in(KEY, i), scale=2)
    return state.params, state.opt_state, state.step


def of_haiku(wrap, steps):
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 4])(x)))

    @jax.jit
    def update(params, x, rate):
        grads = jax.grad(lambda p: jnp.mean((net.apply(p, x) - 1) ** 2))(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads)

    params, step = net.init(KEY, X), wrap(update)
    for i in range(steps):
        params = step(params, batch(i), 0.01 / (1 + i))
    return params


def of_brainstate(wrap, steps):
    with brainstate.random.seed_context(0):
        model = brainstate.nn.Linear(4, 4)
    weights = model.states(brainstate.ParamState)

    @brainstate.transform.jit
    def update(x):
        loss = lambda: jnp.mean((model(x) - 1) ** 2)
        grads = brainstate.transform.grad(loss, weights)()
        for name, weight in weights.items():
            weight.value = jax.tree.map(lambda w, g: w - 0.01 * g, weight.value, grads[name])

    step = wrap(update)
    for i in range(steps):
        step(batch(i))
    return {name: weight.value for name, weight in weights.items()}


RUNS = {
    plain: ["h[0]/value_rms", "h[2]/grad_rms", "out/grad_rms"],
    python_step: ["h[1]/value_rms"],
    of_nnx: ["Net/a/value_rms", "Net/drop/grad_rms", "Net/value_rms"],
    of_trainer: ["Net/a/value_rms", "Net/b/grad_rms"],
    of_equinox: ["MLP/layers/0/value_rms", "MLP/layers/2/grad_rms"],
    of_linen: ["Dense/Dense_0/value_rms", "Dense/Dense_1/grad_rms"],
    of_haiku: ["mlp/linear_0/value_rms"],
    of_brainstate: ["Linear/value_rms"],
}


LONG = (plain, of_nnx, of_equinox, of_linen)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_the_run_is_the_plain_one_bit_for_bit(run):
    if run is of_brainstate and jax.config.jax_enable_x64:
        pytest.skip("brainstate's Linear fails with 64 bits")
    log, monitors = Log(), []
    steps, every = (300, 70) if run in LONG else (30, 7)

    def wrap(step):
        monitors.append(monitor(step, every=every, to=log, alerts=alert.nonfinite()))
        return monitors[-1]

    expected = jax.tree.map(np.asarray, run(lambda step: step, steps))
    found = jax.tree.map(np.asarray, run(wrap, steps))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    monitors[0].close()
    assert log.steps.tolist() == [every * i for i in range(5)]
    assert monitors[0].step_number == steps
    assert set(RUNS[run]) <= set(log.names), log.names
    for name in RUNS[run]:
        series = log[name].values
        assert len(series) == 5 and np.isfinite(series).all() and len(set(series.tolist())) == 5


# `eqx.filter_jit(donate="all")` hides this warning of JAX about the batch.
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_one_program_trains_as_the_plain_step_does(run):
    if run is of_brainstate and jax.config.jax_enable_x64:
        pytest.skip("brainstate's Linear fails with 64 bits")
    log, monitors = Log(), []

    def wrap(step):
        monitors.append(monitor(step, every=2, to=log, exact=False))
        return monitors[-1]

    expected = jax.tree.map(np.asarray, run(lambda step: step, 9))
    found = jax.tree.map(np.asarray, run(wrap, 9))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    # Counts are equal, so each call changed the state once.
    jax.tree.map(assert_close, found, expected)
    monitors[0].close()
    assert log.steps.tolist() == [0, 2, 4, 6, 8] and monitors[0].step_number == 9
    assert set(RUNS[run]) <= set(log.names), log.names


def test_a_failing_sink_does_not_touch_the_run():
    def bad(step, record):
        raise ValueError("no")

    log = Log()
    with (
        pytest.warns(UserWarning, match=r"The sink .*bad failed, .*: ValueError: no"),
        monitor(scanned, every=1, to=[bad, log]) as m,
    ):
        found = plain(lambda step: m, 5)
    for x, y in zip(found, plain(lambda step: step, 5), strict=True):
        np.testing.assert_array_equal(x, y)
    assert len(log) == 5


def test_an_io_callback_warns():
    from jax.experimental import io_callback

    @jax.jit
    def step(x):
        return tapax.sow(x + io_callback(lambda: np.float32(1), jnp.float32(0)), "h")

    m = monitor(step)
    with pytest.warns(UserWarning, match="contains an io_callback, which runs twice") as caught:
        m(jnp.float32(1))
    assert caught[0].filename == __file__
    m.close()


def test_a_monitor_may_be_a_decorator_of_a_method():
    log = Log()

    class Trainer:
        @functools.partial(monitor, every=1, to=log)
        def step(self, x):
            """Doubles."""
            return tapax.sow(2 * x, "h")

    assert Trainer().step(1.0) == 2.0 and Trainer.step.__doc__ == "Doubles."
    assert isinstance(Trainer.step, Monitor) and repr(Trainer.step).startswith("monitor(test_a_mon")
    Trainer.step.close()
    assert len(log) == 1
    Trainer().step(1.0)
    assert len(log) == 1


def test_the_number_of_a_step_may_be_set_when_a_run_is_continued():
    log = Log()
    with monitor(lambda x: tapax.sow(x, "h"), every=100, to=log) as m:
        m.step_number = 950
        for _ in range(200):
            m(1.0)
    assert log.steps.tolist() == [1000, 1100]


def test_a_monitor_that_is_dropped_delivers_what_it_has(tmp_path):
    path = tmp_path / "run.jsonl"
    done = threading.Event()

    class Last:
        def __call__(self, step, record):
            pass

        def close(self):
            done.set()

    plain(lambda step: monitor(step, every=1, to=[path, Last()]), 20)
    gc.collect()
    assert done.wait(30) and open_log(path).steps.tolist() == list(range(20))


def test_waiting_records_are_fetched_and_written_at_the_end_of_the_interpreter(tmp_path):
    code = """
        import sys, time
        import jax, jax.numpy as jnp
        import tapax
        from tapax.monitoring._monitor import monitor

        m = monitor(
            jax.jit(lambda x: tapax.sow(x @ x, "h")), every=1,
            to=[lambda *a: time.sleep(0.02), sys.argv[1], "table"],
        )
        for _ in range(30):
            m(jnp.ones((50, 50)))
        """
    path = tmp_path / "run.safetensors"
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stderr == ""
    assert "step 29" in done.stdout
    assert open_log(path)["h/value_rms"].values.tolist() == [50.0] * 30
