"""A captured call leaves every `State` of brainstate with the value of the plain call."""

import functools

import brainstate as bs
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brainstate import nn
from brainstate import transform as tf

import tapax
from tests.models.brainstate_models import (
    Net,
    data,
    from_the_start,
    grads_by_hand,
    loss,
    make,
    rollout,
    same,
    seen_by_hand,
    sgd,
    train_step,
    values_of,
)
from tests.oracles.closeness import assert_close

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore:The function has no sites")]

CELLS = [nn.ValinaRNNCell, nn.GRUCell, nn.MGUCell, nn.LSTMCell, nn.URLSTMCell]


hidden = {}


def indirectly(xs):
    return train_step(hidden["model"], xs)


def ways(model):
    """Make a train step in each way that users write it."""
    hidden["model"] = model
    step = functools.partial(train_step, model)
    jitted = tf.jit(step)

    def through_another(xs):
        return indirectly(xs)

    return {
        "argument": lambda: (train_step, (model,)),
        "partial": lambda: (step, ()),
        "closure": lambda: (lambda xs: train_step(model, xs), ()),
        "hidden": lambda: (through_another, ()),
        "jit": lambda: (jitted, ()),
        "jit in a function": lambda: (lambda xs: jitted(xs), ()),
        "static argument": lambda: (tf.jit(train_step, static_argnums=0), (model,)),
    }


@functools.cache
def trajectory():
    """Run a few steps without capture; return results, gradients by hand, and states."""
    model = make()
    plain = tf.jit(functools.partial(train_step, model))
    steps = []
    for step in range(2):
        xs = data(seed=step)
        grads = grads_by_hand(model, xs, loss)
        steps.append((xs, plain(xs), grads, values_of(model)))
    return steps


JITTED = ["jit", "jit in a function", "static argument"]


@pytest.mark.many
@pytest.mark.parametrize(
    ("way", "cached"), [(w, False) for w in ways(None)] + [(w, True) for w in JITTED]
)
def test_training_under_capture_equals_the_plain_training(way, cached):
    steps = trajectory()
    model = make()
    fn, args = ways(model)[way]()
    captured = tapax.capture(fn)
    for i, (xs, expected, grads, left) in enumerate(steps):
        if cached and i == 0:
            fn(*args, xs)
            continue
        out, taps = captured(*args, xs)
        assert_close(out, expected)
        for name, g in grads.items():
            assert taps.values[f"Net/{name}"].shape == g.shape
            assert_close(taps.grads[f"Net/{name}"], g, 1e-4)
        same(values_of(model), left, 1e-5)


def test_training_is_equal_bit_for_bit_op_by_op():
    model, twin = make(), make()

    def step(model, xs):
        out = rollout(model, xs) + bs.random.normal(size=(2,))
        for state in model.states(bs.ParamState).values():
            state.value = jax.tree.map(lambda p: p - 0.1 * out.sum() * p, state.value)
        return out

    captured = tapax.capture(step)
    with jax.disable_jit():
        for i in range(3):
            bs.random.seed(i)
            out, _ = captured(model, data(seed=i))
            left = values_of(model)
            bs.random.seed(i)
            same(np.asarray(out), np.asarray(step(twin, data(seed=i))))
            same(left, values_of(twin))


@pytest.mark.parametrize("cell", CELLS)
def test_states_of_recurrent_cells_after_capture(cell):
    model, twin, xs = make(Net, cell), make(Net, cell), data()
    out, taps = tapax.capture(rollout)(model, xs)
    expected, seen = seen_by_hand(twin, lambda m: rollout(m, xs))
    assert_close(out, expected)
    for name, value in seen.items():
        assert_close(taps.values[f"Net/{name}"], value)
    same(values_of(model), values_of(twin), 1e-5)


def test_states_are_read_at_every_call_and_traced_once():
    traces = []
    scale, count = bs.State(jnp.float32(1)), bs.ShortTermState(jnp.int32(0))

    def f(x):
        traces.append(1)
        count.value += 1
        return x * scale.value

    captured = tapax.capture(f)
    assert captured(2.0)[0] == 2
    first = len(traces)
    for i in range(3):
        scale.value = jnp.float32(i)
        assert captured(2.0)[0] == 2 * i
    assert len(traces) == first == 1 and count.value == 4


def test_states_in_nested_containers_cost_one_more_trace():
    traces = []
    box = [[bs.State(jnp.float32(1))]]

    def f(x):
        traces.append(1)
        box[0][0].value += x
        return box[0][0].value

    captured = tapax.capture(f)
    assert [float(captured(1.0)[0]) for _ in range(3)] == [2, 3, 4]
    assert len(traces) == 2 and box[0][0].value == 4


def test_states_of_another_branch_are_found():
    a, b = [bs.State(jnp.float32(0))], [bs.State(jnp.float32(0))]
    box = {"a": [a], "b": [b]}

    def f(n, x):
        for _ in range(n):
            which = box["a" if n < 2 else "b"][0][0]
            which.value += x
        return x

    captured = tapax.capture(f)
    for n in (1, 2, 1, 3):
        captured(n, 1.0)
    assert a[0].value == 2 and b[0].value == 5


@pytest.mark.parametrize("start", [0, 1.5, None, {"a": 1.0}])
def test_a_state_may_have_any_value(start):
    state = bs.State(start)

    def f(x):
        state.value = (
            (x, state.value) if state.value is None else jax.tree.map(lambda v: v + x, state.value)
        )
        return x

    captured = tapax.capture(f)
    captured(jnp.float32(2))
    got = state.value
    state.value = start
    f(jnp.float32(2))
    same(jax.tree.map(jnp.asarray, got), jax.tree.map(jnp.asarray, state.value))


def test_a_number_in_a_state_may_decide_the_control_flow():
    state = bs.State(3)
    f = lambda x: sum(x for _ in range(state.value))
    captured = tapax.capture(f)
    assert captured(2.0)[0] == 6
    state.value = 4
    assert captured(2.0)[0] == 8


def test_a_string_in_a_state_may_change():
    state, x = bs.State("sin"), jnp.float32(1)
    captured = tapax.capture(lambda x: getattr(jnp, state.value)(x))
    assert np.isclose(captured(x)[0], np.sin(1))
    state.value = "cos"
    assert np.isclose(captured(x)[0], np.cos(1))


def test_states_and_modules_may_be_results():
    model, state = make(), bs.State(jnp.float32(1))
    out, _ = tapax.capture(lambda x: (x, {"m": model, "s": state}))(1.0)
    assert out[1]["m"] is model and out[1]["s"] is state


def test_states_may_be_arguments():
    def f(state, x):
        state.value = state.value + x
        return state.value * 2

    captured = tapax.capture(f)
    for state in (bs.State(jnp.float32(1)), bs.State(jnp.float32(5))):
        start = float(state.value)
        for i in range(1, 3):
            assert captured(state, 1.0)[0] == 2 * (start + i) and state.value == start + i


def test_hooks_of_states_see_the_value():
    state, seen = bs.State(jnp.float32(1)), []
    state.register_hook("write_after", lambda ctx: seen.append(ctx.value))
    captured = tapax.capture(lambda x: setattr(state, "value", state.value + x))
    captured(1.0)
    captured(1.0)
    assert [float(v) for v in seen if not isinstance(v, jax.core.Tracer)] == [2, 3]


def test_sites_leaves_all_states_unchanged():
    model, xs = make(), data()
    before = values_of(model)
    names = tapax.sites(train_step)(model, xs).names
    assert "Net/cell" in names
    same(values_of(model), before)


@pytest.mark.parametrize("jit", [False, True])
def test_states_made_by_the_function_get_their_values(jit):
    model, twin = make(), make()
    captured = tapax.capture(from_the_start)
    for batch in (2, 3, 2, 3, 2):
        xs = data(batch=batch, seed=batch)
        before = model.cell.h
        out, taps = captured(model, xs)
        assert model.cell.h is not before
        assert_close(out, from_the_start(twin, xs))
        assert_close(taps.values["Net/cell"][-1], model.cell.h.value)
        same(values_of(model), values_of(twin), 1e-5)
        if jit:  # the new state behaves like any other
            step = tf.jit(functools.partial(rollout, model))
            expected = rollout(twin, xs)
            assert_close(step(xs), expected)
            same(values_of(model), values_of(twin), 1e-5)


def test_states_made_in_a_jit_that_takes_gradients_get_their_values():
    model, twin = make(), make()

    def step(model, xs):
        return sgd(model, lambda xs: (from_the_start(model, xs) ** 2).mean(), xs)

    captured, plain = tapax.capture(tf.jit(step, static_argnums=0)), tf.jit(step, static_argnums=0)
    for i in range(3):
        xs = data(seed=i)
        out, taps = captured(model, xs)
        assert_close(out, plain(twin, xs))
        assert taps.grads["Net/cell"].shape == (3, 2, 5)
    a, b = model.states(bs.ParamState), twin.states(bs.ParamState)
    same({k: s.value for k, s in a.items()}, {k: s.value for k, s in b.items()}, 1e-5)


def test_states_made_between_calls_replace_the_old_ones():
    model, twin, traces = make(), make(), []

    def run(model, xs):
        traces.append(1)
        return rollout(model, xs)

    captured = tapax.capture(run)
    for i in range(3):
        xs = data(seed=i)
        for m in (model, twin):
            nn.init_all_states(m, 2)
        assert_close(captured(model, xs)[0], rollout(twin, xs))
        same(values_of(model), values_of(twin), 1e-5)
    assert len(traces) == 1


def test_states_made_between_calls_of_a_model_in_a_global_dict():
    model, twin = make(), make()
    hidden["model"] = model
    run = lambda xs: (lambda xs: rollout(hidden["model"], xs))(xs)
    captured = tapax.capture(run)
    for i in range(3):
        xs = data(seed=i)
        for m in (model, twin):
            nn.init_all_states(m, 2)
        assert_close(captured(xs)[0], rollout(twin, xs))
        same(values_of(model), values_of(twin), 1e-5)


def test_states_made_under_vmap_get_their_values():
    def run(model, x):
        nn.vmap_init_all_states(model, axis_size=x.shape[0])
        states = {0: model.states(bs.HiddenState)}
        return tf.vmap(model, in_states=states, out_states=states)(x)

    model, twin, x = make(), make(), data()[0]
    captured = tapax.capture(run)
    for _ in range(2):
        out, taps = captured(model, x)
        assert_close(out, run(twin, x))
        assert_close(taps.values["Net/cell"], twin.cell.h.value)
    same(values_of(model)["cell", "h"], values_of(twin)["cell", "h"], 1e-5)


def test_a_model_made_by_the_function_is_captured():
    def f(x):
        bs.random.seed(3)
        return nn.Linear(3, 2)(x)

    x = data()[0]
    out, taps = tapax.capture(f)(x)
    assert_close(out, f(x))
    assert list(taps.values) == ["Linear"]


def test_dropout_advances_the_random_state():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.lin = nn.Linear(3, 3)

        def update(self, x):
            return self.drop(self.lin(x)) + bs.random.normal(size=x.shape)

    model = make(Noisy)
    x = data()[0]

    def steps(f):
        bs.random.seed(7)
        with bs.environ.context(fit=True):
            outs = [f(x), f(x)]
        with bs.environ.context(fit=False):
            outs.append(f(x))
        return outs, jax.random.key_data(bs.random.DEFAULT.value)

    captured = tapax.capture(model)
    expected, key = steps(model)
    got, found = steps(lambda x: captured(x)[0])
    same(got, expected, 1e-6)
    np.testing.assert_array_equal(key, found)
    assert not np.allclose(got[0], got[1])


def test_the_random_state_advances_in_a_for_loop():
    def noise(x):
        return tf.for_loop(lambda x: x + bs.random.normal(), x)

    captured = tapax.capture(noise)
    for seed in (1, 2):
        bs.random.seed(seed)
        expected, key = noise(jnp.ones(3)), bs.random.DEFAULT.value
        bs.random.seed(seed)
        assert_close(captured(jnp.ones(3))[0], expected)
        assert bs.random.DEFAULT.value == key


def test_statistics_of_batch_norm_after_capture():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm0d((3,))

        def update(self, x):
            return self.norm(x)

    model, twin, captured = make(Normed), make(Normed), tapax.capture(lambda m, x: m(x))
    for fit in (True, True, False):
        x = data()[:, 0] + fit
        with bs.environ.context(fit=fit):
            out, taps = captured(model, x)
            assert_close(out, twin(x))
        same(values_of(model), values_of(twin), 1e-6)
        np.testing.assert_array_equal(taps.values["Normed/norm"], out)


def test_the_clock_is_an_argument_and_other_settings_are_not():
    traces = []

    def f(x):
        traces.append(1)
        return x + bs.environ.get("t") * bs.environ.get("dt") + bs.environ.get("i")

    captured = tapax.capture(f)
    for i in range(3):
        with bs.environ.context(i=i, t=i * 0.5, dt=0.1):
            assert_close(captured(1.0)[0], 1 + i * 0.05 + i)
    assert len(traces) == 1
    with bs.environ.context(i=1, t=0.5, dt=0.2):
        assert_close(captured(1.0)[0], 2.1)
    for _ in range(2):
        with bs.environ.context(i=1, t=0.5 * u.ms, dt=0.2 / u.ms):
            assert_close(captured(1.0)[0], 2.1)
    assert len(traces) == 3


def test_attributes_may_change_between_calls():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.sub, self.traces = 2.0, [nn.Identity()], []

        def update(self, x):
            self.traces = [*self.traces, 1][:1]
            return self.sub[0](x) * self.scale

    model = Scaled()
    captured = tapax.capture(lambda x: model(x))
    assert captured(1.0)[0] == 2
    model.scale = 3.0
    assert captured(1.0)[0] == 3
    model.sub[0] = nn.ReLU()
    assert captured(-1.0)[0] == 0
