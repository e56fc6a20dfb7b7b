"""Variables, losses and training of Keras models that are captured, edited and monitored."""

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import tapax
from tests.models.keras_models import Net, X, Y, make_sequential, make_twins, numbers
from tests.oracles.closeness import assert_close

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("keras_as_before")]

COMPILED = {"optimizer": "sgd", "loss": "mse", "metrics": ["mae"]}


def state_of(model):
    """Make the arguments of Keras' `train_step`."""
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    return tuple([v.value for v in group] for group in groups)


@pytest.mark.parametrize("make", [make_sequential, pytest.param(Net, marks=pytest.mark.many)])
def test_a_captured_call_changes_variables_like_the_plain_call(make):
    plain, model = make_twins(make)
    captured = tapax.capture(model)
    for _ in range(3):
        wanted = plain(X, training=True)
        out, _ = captured(X, training=True)
        assert_close(out, wanted)
        assert_close(numbers(model), numbers(plain))
    assert not all(map(np.array_equal, numbers(model), numbers(make_twins(make)[0])))


def test_a_captured_model_uses_its_current_weights():
    model = make_sequential()
    model(X)
    captured = tapax.capture(model)
    first, _ = captured(X)
    model.layers[0].kernel.assign(2 * model.layers[0].kernel)
    second, taps = captured(X)
    assert_close(second, model(X))
    assert not np.allclose(first, second)
    assert_close(taps.values["sequential/dense"], model.layers[0](X))


def test_a_captured_function_is_traced_once_more_for_its_variables():
    model = make_sequential()
    model(X)
    traces = []

    @tapax.capture
    def forward(x):
        traces.append(1)
        return model(x, training=True)

    for _ in range(3):
        forward(X)
    assert len(traces) == 2


def test_a_jitted_function_that_closes_over_a_model_reads_current_weights():
    model = layers.Dense(2)
    model(X)
    forward = jax.jit(lambda x: model(x))

    @tapax.capture
    def run(x, how):
        return model(x) if how == "once" else model(x) + forward(x)

    assert_close(run(X, "once")[0], model(X))
    for how in ("twice", "again"):
        out, taps = run(X, how)
        assert_close(out, 2 * model(X))
        assert_close(taps.values["dense@1"], model(X))
        model.kernel.assign(2 * model.kernel)


@pytest.mark.many
def test_an_unbuilt_model_is_built_as_the_plain_call_builds_it():
    plain = make_sequential()
    plain(X)
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    model = make_sequential()
    out, taps = tapax.capture(model)(X)
    assert_close(numbers(model), numbers(plain))
    assert_close(out, plain(X))
    assert model.built and "sequential/dense" in taps.values
    assert_close(tapax.capture(model)(2 * X)[0], plain(2 * X))


@pytest.mark.many
def test_layers_built_in_a_capture_draw_different_weights():
    def make():
        generator = keras.random.SeedGenerator(7)
        draw = keras.initializers.GlorotUniform(seed=generator)
        parts = [layers.Dense(4, kernel_initializer=draw) for _ in range(2)]
        return keras.Sequential(parts), generator

    plain, generator = make()
    plain(X)
    model, other = make()
    tapax.capture(model)(X)
    assert_close(numbers(model), numbers(plain))
    assert_close(other.state.value, generator.state.value)
    assert not np.array_equal(model.layers[0].kernel.value, model.layers[1].kernel.value)


@pytest.mark.many
def test_a_number_that_the_function_needs_is_static_beside_variables():
    plain, model = make_twins(make_sequential)

    @tapax.capture
    def run(x, times):
        x = model(x, training=True)
        return x * sum(range(times))

    out, _ = run(X, 3)
    assert_close(out, 3 * plain(X, training=True))
    assert_close(numbers(model), numbers(plain))


@pytest.mark.many
def test_recurrent_dropout_draws_as_in_the_plain_call():
    series = np.stack([X, 2 * X], 1)
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        layer = layers.LSTM(3, dropout=0.5, recurrent_dropout=0.5, seed=1)
        layer(series)
        models.append(layer)
    plain, model = models
    wanted = plain(series, training=True)
    assert_close(tapax.capture(model)(series, training=True)[0], wanted)
    for a, b in zip(model.variables, plain.variables, strict=True):
        assert_close(a.value, b.value)
    assert not np.allclose(wanted, plain(series))


def test_a_model_made_in_the_captured_function_is_captured():
    @tapax.capture
    def forward(x):
        return layers.Dense(2, kernel_initializer="ones", name="inside")(x)

    for _ in range(2):
        out, taps = forward(X)
        assert_close(out, X @ np.ones((4, 2), "float32"))
        assert_close(taps.values["inside"], out)


def test_an_exception_leaves_variables_unchanged():
    class Failing(layers.Layer):
        def call(self, x):
            raise RuntimeError("halfway")

    norm, failing = layers.BatchNormalization(), Failing()
    norm(X)
    before = [np.asarray(v.value) for v in norm.variables]
    captured = tapax.capture(lambda x: failing(norm(x, training=True)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="halfway"):
            captured(X)
    assert_close([np.asarray(v.value) for v in norm.variables], before)
    norm(X, training=True)
    assert not np.allclose(norm.moving_mean.value, before[2])


@pytest.mark.many
def test_losses_of_layers_are_those_of_the_plain_call():
    class Penalty(layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.sum(x**2))
            return x

    model = keras.Sequential([Penalty(), layers.Dense(2, activity_regularizer="l2")])
    model(X)

    def loss_of(x):
        return keras.ops.mean(model(x)) + sum(model.losses)

    plain = loss_of(X), list(model.losses)
    captured = tapax.capture(loss_of)
    for _ in range(2):
        out, _ = captured(X)
        assert_close(out, plain[0])
        assert_close(list(model.losses), plain[1])
    tapax.sites(loss_of)(X)
    assert_close(list(model.losses), plain[1])


@pytest.mark.many
def test_captures_of_keras_models_nest():
    plain, model = make_twins(make_sequential)

    class Looking(layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = model

        def call(self, x):
            out, taps = tapax.capture(self.inner)(x, training=True)
            return out + jnp.sum(taps.values["sequential/dense"])

    looking = Looking()
    dense = plain.layers[0](X)
    wanted = plain(X, training=True) + jnp.sum(dense)
    assert_close(tapax.capture(looking)(X)[0], wanted)
    assert_close(numbers(model), numbers(plain))
    trainable = [v.value for v in looking.trainable_variables]
    fixed = [v.value for v in looking.non_trainable_variables]
    wanted = plain(X, training=True) + jnp.sum(dense)
    out, new = looking.stateless_call(trainable, fixed, X)
    assert_close(out, wanted)
    assert_close(new, [v.value for v in plain.non_trainable_variables])
    assert_close([v.value for v in looking.non_trainable_variables], fixed)


@pytest.mark.many
def test_threads_capture_keras_models_at_once():
    plain, model = make_twins(make_sequential)
    wanted = plain(X)
    seen, failed = [], []
    start = threading.Barrier(4)

    def work(i):
        try:
            start.wait()
            for _ in range(3):
                out = tapax.capture(lambda x: model(x))(X)[0] if i % 2 else model(X)
                seen.append(out)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(seen) == 12
    for out in seen:
        assert_close(out, wanted)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"run_eagerly": True}, marks=pytest.mark.many),
        pytest.param({"jit_compile": False}, marks=pytest.mark.many),
    ],
)
def test_train_on_batch_is_a_step_of_training(options):
    plain, model = make_twins(make_sequential, **COMPILED, **options)
    captured = tapax.capture(model.train_on_batch)
    for _ in range(2):
        wanted = plain.train_on_batch(X, Y)
        logs, taps = captured(X, Y)
        assert_close(np.array(logs), np.array(wanted))
        assert_close(numbers(model), numbers(plain))
        assert set(taps.grads) == set(taps.values) and len(taps.grads) == 5
        out = taps.values["sequential"]
        assert_close(taps.grads["sequential"], 2 * (out - Y) / Y.size)


@pytest.mark.parametrize("method", ["predict_on_batch", "test_on_batch"])
def test_other_steps_of_a_compiled_model_are_captured(method):
    plain, model = make_twins(make_sequential, **COMPILED)
    batch = (X,) if method == "predict_on_batch" else (X, Y)
    out, taps = tapax.capture(getattr(model, method))(*batch)
    assert_close(np.array(out), np.array(getattr(plain, method)(*batch)))
    assert len(taps.values) == 5


def test_the_train_step_of_a_compiled_model_is_captured():
    plain, model = make_twins(make_sequential, **COMPILED)
    plain.train_on_batch(X, Y)
    model.evaluate(X, Y, verbose=0)  # creates the variables of the metrics
    model.optimizer.build(model.trainable_variables)
    state = state_of(model)
    (logs, state), taps = tapax.capture(jax.jit(model.train_step))(state, (X, Y))
    assert_close(state[0], [v.value for v in plain.trainable_variables])
    assert_close(state[1], [v.value for v in plain.non_trainable_variables])
    assert_close(taps.grads["sequential"], 2 * (taps.values["sequential"] - Y) / Y.size)


@pytest.mark.many
def test_fit_with_a_monitored_train_step():
    data = np.tile(X, (4, 1)), np.tile(Y, (4, 1))
    options = {"batch_size": 3, "epochs": 2, "verbose": 0, "shuffle": False}
    plain, model = make_twins(make_sequential, **COMPILED)
    wanted = plain.fit(*data, **options)
    log = tapax.Log()
    with tapax.monitor(jax.jit(model.train_step), every=2, to=log) as step:
        model.train_function = lambda state, batches: step(state, next(batches))
        found = model.fit(*data, **options)
    assert found.history == wanted.history
    for a, b in zip(numbers(model), numbers(plain), strict=True):
        np.testing.assert_array_equal(a, b)
    assert log.steps.tolist() == [0, 2, 4, 6]
    assert {"sequential/dense/value_rms", "sequential/dense/grad_rms"} <= set(log.names)


@pytest.mark.many
def test_fit_with_an_edited_train_step():
    plain, model = make_twins(make_sequential, **COMPILED)
    model.train_step = tapax.edit(model.train_step, grads={"sequential/dropout": 0.0})
    before = [np.asarray(v.value) for v in model.trainable_variables]
    model.fit(X, Y, verbose=0)
    plain.fit(X, Y, verbose=0)
    after = [np.asarray(v.value) for v in model.trainable_variables]
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        assert np.array_equal(a, b) == (i < 4)  # only the last layer learns
    assert_close(after[4:], [np.asarray(v.value) for v in plain.trainable_variables[4:]])


@pytest.mark.many
def test_a_monitor_watches_train_on_batch():
    plain, model = make_twins(make_sequential, **COMPILED)
    log = tapax.Log()
    with tapax.monitor(model.train_on_batch, every=2, to=log) as step:
        for _ in range(3):
            assert step(X, Y) == plain.train_on_batch(X, Y)
    assert log.steps.tolist() == [0, 2]
    assert "sequential/dense/grad_rms" in log.names


def test_values_inside_of_a_model_are_edited():
    model = make_sequential()
    model(X)
    h = model.layers[0](X)
    out = tapax.edit(model, values={"sequential/dense": lambda h: 2 * h})(X)
    wanted = 2 * h
    for layer in model.layers[1:]:
        wanted = layer(wanted)
    assert_close(out, wanted)
    assert_close(tapax.prefix(model, "sequential/dense")(X), h)
    assert_close(tapax.suffix(model, "sequential/dense")(2 * h, X), wanted)


def test_find_nonfinite_names_the_layer():
    class Log(layers.Layer):
        def call(self, x):
            return keras.ops.log(x - 1e9)

    model = keras.Sequential([layers.Dense(4), Log(name="logarithm"), layers.Dense(2)])
    model(X)
    finding = tapax.find_nonfinite(model)(X)
    assert finding is not None and finding.path.startswith("sequential/logarithm")
    assert tapax.find_nonfinite(make_sequential())(X) is None


@pytest.mark.many
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_quantized_layers_are_sites_too():
    model = keras.Sequential([layers.Dense(4), layers.Dense(2)])
    model(X)
    for layer in model.layers:
        layer.quantize("int8")
    out, taps = tapax.capture(model)(X)
    assert_close(out, model(X))
    assert_close(taps.values["sequential/dense"], model.layers[0](X))


OTHER_BACKEND = """
import os, sys
os.environ["KERAS_BACKEND"] = "numpy"
import jax, keras, tapax
assert keras.backend.backend() == "numpy"
out, taps = tapax.capture(lambda x: tapax.sow(2 * x, "h"))(1.0)
assert float(out) == float(taps.values["h"]) == 2
assert float(keras.layers.Dense(1, kernel_initializer="ones")(keras.ops.ones((1, 3)))[0, 0]) == 3
assert "tapax._frameworks.keras.adapter" not in sys.modules
"""


@pytest.mark.many
def test_keras_on_another_backend_is_not_patched():
    subprocess.run([sys.executable, "-c", OTHER_BACKEND], check=True, capture_output=True)
