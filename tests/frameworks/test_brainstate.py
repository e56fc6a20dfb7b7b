"""Unmodified models of brainstate: every module is a site, under every transform."""

import functools
import threading

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
    Counter,
    Net,
    data,
    from_the_start,
    make,
    rollout,
    same,
    seen_by_hand,
    sgd,
    train_step,
    values_of,
)
from tests.oracles.closeness import assert_close


def test_every_module_is_a_site():
    model, twin, x = make(), make(), data()[0]
    out, taps = tapax.capture(model)(x)
    expected, seen = seen_by_hand(twin, lambda m: m(x))
    inner = {"Net/cell/Wrz", "Net/cell/Wh"}
    assert set(taps.values) == {"Net", *(f"Net/{name}" for name in seen)} | inner
    for name, value in seen.items():
        assert_close(taps.values[f"Net/{name}"], value[0])
    assert_close(out, expected)
    np.testing.assert_array_equal(taps.values["Net"], out)
    site = taps.sites["Net/layers/0"]
    assert site.module is nn.Linear and site.method == "__call__"
    assert "brainstate_models.py" in site.source


@pytest.mark.parametrize(
    "run",
    [
        lambda model, x: model(x),
        lambda model, x: model.update(x),
        lambda model, x: x >> model,
        lambda model, x: tf.jit(model)(x),
        lambda model, x: tf.jit(model.update)(x),
        lambda model, x: functools.partial(model.update)(x),
    ],
)
def test_update_and_call_are_one_site(run):
    model, x = make(), data()[0]
    _, taps = tapax.capture(functools.partial(run, model))(x)
    assert [n for n in taps.values if n.startswith("Net") and "/" not in n] == ["Net"]
    assert "Net/cell" in taps.values and "Net/cell.update" not in taps.values


def test_bound_and_other_methods_are_sites():
    model, x = make(), data()[0]
    assert set(tapax.capture(model.encode)(x)[1].values) == {"Net/layers/0", "Net.encode"}
    for fn in (model.update, functools.partial(model.update), tf.jit(model.update)):
        assert {"Net", "Net/head"} < set(tapax.capture(fn)(x)[1].values)
    assert "Linear" in tapax.capture(nn.Linear(3, 2))(x)[1].values
    assert "Net/layers/0" in tapax.capture(lambda x: model.layers[0](x))(x)[1].values


def test_a_class_that_overrides_call_and_uses_super():
    class Base(nn.Module):
        def update(self, x):
            return x + 1

    class Own(Base):
        def __init__(self):
            super().__init__()
            self.inner = Base()

        def __call__(self, x):
            return self.update(x) * 2

        def update(self, x):
            return self.inner(super().update(x))

        def twice(self, x):
            return self(self.update(x))

    model, x = Own(), jnp.float32(3)
    out, taps = tapax.capture(model)(x)
    assert {k: float(v) for k, v in taps.values.items()} == {"Own/inner": 5, "Own": 10}
    out, taps = tapax.capture(model.twice)(x)
    found = {k: float(v) for k, v in taps.values.items()}
    inner = {"Own/inner": 5.0, "Own/inner@1": 7.0}
    assert found == {**inner, "Own": 5, "Own@1": 14, "Own.twice": 14} and out == 14


def test_dynamics_with_updates_before_and_after_are_sites():
    class Cell(nn.Dynamics):
        def __init__(self):
            super().__init__(2)
            self.lin = nn.Linear(2, 2)

        def update(self, x):
            return self.lin(x)

    model = make(Cell)
    model.add_after_update("tanh", nn.Tanh())
    x = jnp.ones((1, 2))
    _, taps = tapax.capture(model)(x)
    assert {"Cell", "Cell/lin"} < set(taps.values)
    assert_close(taps.values["Cell"], model(x))


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (False, []),
        ("**/head", ["Net/head"]),
        (lambda m, method: isinstance(m, nn.Linear), ["layers/0", "layers/2", "cell", "head"]),
        (lambda m, method: isinstance(m, Net) and method == "__call__", ["Net"]),
    ],
)
def test_modules_argument_narrows_brainstate_sites(modules, names):
    model, x = make(), data()[0]
    _, taps = tapax.capture(model, modules=modules)(x)
    assert len(names) <= len(taps.values) <= len(names) + 1
    assert all(any(n in path for path in taps.values) for n in names)


def test_modules_are_selected_by_name():
    model, xs = make(), data()
    _, taps = tapax.capture(train_step, "Net/head", "**/cell")(model, xs)
    assert list(taps.values) == ["Net/head"] and list(taps.grads) == ["Net/cell"]
    with pytest.raises(tapax.SiteError, match="Net/tail"):
        tapax.capture(train_step, "Net/tail")(model, xs)


def test_sow_in_a_module_has_its_path():
    class Sower(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 2)

        def update(self, x):
            return tapax.sow(self.lin(x), "h") * 2

    model, xs = make(Sower), data()
    _, taps = tapax.capture(lambda xs: tf.for_loop(model, xs))(xs)
    assert set(taps.values) == {"Sower/lin", "Sower/h", "Sower"}
    assert_close(taps.values["Sower/h"] * 2, taps.values["Sower"])


def test_calls_of_shared_modules_are_numbered():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = self.a

        def update(self, x):
            return self.b(self.a(x))

    model, x = make(Tied), data()[0]
    _, taps = tapax.capture(model)(x)
    assert set(taps.values) == {"Tied/a", "Tied/a@1", "Tied"}
    assert_close(taps.values["Tied/a"], model.a(x))


def test_values_and_gradients_stay_in_bfloat16():
    model = make(nn.Sequential, nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for state in model.states().values():
        state.value = jax.tree.map(lambda v: v.astype(jnp.bfloat16), state.value)
    _, taps = tapax.capture(train_step)(model, data().astype(jnp.bfloat16))
    assert taps.values["Sequential/layers/0"].dtype == jnp.bfloat16
    assert taps.grads["Sequential/layers/0"].dtype == jnp.bfloat16
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(model.states().to_dict_values()))


def test_quantities_are_tapped_by_their_mantissa():
    class Volts(nn.Module):
        def update(self, x):
            return x * 2.0

    model, x = Volts(), jnp.ones(3) * u.mV
    out, taps = tapax.capture(lambda x: {"v": model(x), "n": model(x / u.mV)})(x)
    assert set(taps.values) == {"Volts", "Volts@1"}
    np.testing.assert_array_equal(taps.values["Volts"], 2 * np.ones(3))
    assert u.get_unit(out["v"]) == u.mV

    def loss(x):
        return u.get_mantissa(model(x * u.mV) ** 2).sum()

    assert_close(tapax.capture(jax.grad(loss))(jnp.ones(3))[1].grads["Volts"], 4.0)


def by_scan(model, x):
    def body(carry, x):
        carry = carry + model(x)
        return carry, carry

    return tf.scan(body, x[0], x)


def by_while(model, x):
    return tf.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, model(c[1])), (0, x))[1]


def by_vmap(model, x):
    return tf.vmap(lambda x: model.lin(x))(x)


def by_vmap_of_states(model, x):
    axes = {"in_states": {0: model.calls}, "out_states": {0: model.calls}}
    model.calls.value = jnp.zeros(x.shape[0])
    out = tf.vmap(model, **axes)(x)
    model.calls.value = model.calls.value.sum()
    return out


LOOPS = {
    "for_loop": (lambda m, x: tf.for_loop(m, x), (3, 2, 3)),
    "scan": (by_scan, (3, 2, 3)),
    "checkpointed_for_loop": (lambda m, x: tf.checkpointed_for_loop(m, x), None),
    "map": (lambda m, x: tf.map(m.lin, x), (3, 2, 3)),
    "checkpoint": (lambda m, x: tf.checkpoint(m)(x[0]), (2, 3)),
    "jit": (lambda m, x: tf.jit(m)(x[0]), (2, 3)),
    "cond": (lambda m, x: tf.cond(x[0, 0, 0] < 9, m, lambda x: x, x[0]), (2, 3)),
    "ifelse": (lambda m, x: tf.ifelse([x.sum() > 1e9, True], [lambda x: x, m], x[0]), (2, 3)),
    "switch": (lambda m, x: tf.switch(1, [lambda x: x, m], x[0]), (2, 3)),
    "while": (lambda m, x: by_while(m, x[0]), (2, 3)),
    "vmap": (by_vmap, (3, 2, 3)),
    "vmap of states": (lambda m, x: by_vmap_of_states(m, x[:, 0]), (3, 3)),
    "jax.jit": (lambda m, x: jax.jit(lambda x: m.lin(x))(x[0]), (2, 3)),
    "jax.vmap": (lambda m, x: jax.vmap(lambda x: m.lin(x))(x), (3, 2, 3)),
    "nn.Vmap": (lambda m, x: nn.Vmap(m.lin)(x), (3, 2, 3)),
}


@pytest.mark.parametrize("name", list(LOOPS))
@pytest.mark.parametrize("grad", [pytest.param(False, marks=pytest.mark.many), True])
def test_capture_through_brainstate_transforms(name, grad):
    run, shape = LOOPS[name]
    model, twin = make(Counter), make(Counter)

    def step(model, x):
        if not grad or name == "while":
            return run(model, x)
        return sgd(model, lambda x: sum(v.sum() for v in jax.tree.leaves(run(model, x))), x)

    captured = tapax.capture(step)
    for i in range(2):
        x = data(seed=i)
        out, taps = captured(model, x)
        expected = step(twin, x)
        same(jax.tree.map(np.asarray, out), jax.tree.map(np.asarray, expected), 2e-5)
        same(values_of(model), values_of(twin), 2e-5)
        site = "Vmap/module" if name == "nn.Vmap" else "Counter/lin"
        if shape is not None:
            assert taps.values[site].shape == shape
        if grad and name != "while":
            assert taps.grads[site].shape == taps.values[site].shape
            assert np.abs(taps.grads[site]).sum() > 0


def classes():
    found = [nn.Module, *nn.Module.__subclasses__(), Net, tf.StatefulFunction]
    return {(cls, k): v for cls in found for k, v in vars(cls).items() if callable(v)}


@pytest.mark.parametrize("wrap", [lambda f: f, tf.jit])
def test_an_exception_on_the_way_leaves_states_unchanged(wrap):
    model, xs = make(), data()
    before, methods = values_of(model), classes()

    def broken(xs):
        rollout(model, xs)
        bs.random.normal()
        model.cell.h.value = model.cell.h.value + 1
        raise RuntimeError("halfway")

    captured = tapax.capture(wrap(broken))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="halfway"):
            captured(xs)
        same(values_of(model), before)
        assert classes() == methods
    model.cell.init_state(2)
    tapax.capture(rollout)(model, xs)
    assert classes() == methods


def test_an_exception_after_states_are_made_leaves_no_tracer():
    model, xs = make(), data()

    def broken(xs):
        from_the_start(model, xs)
        raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        tapax.capture(broken)(xs)
    with pytest.raises(bs.TraceContextError):  # brainstate's error for a state without a value
        _ = model.cell.h.value
    nn.init_all_states(model, 2)
    assert "Net/cell" in tapax.capture(rollout)(model, xs)[1].values


def test_the_trace_of_a_capture_does_not_run_without_it():
    model, xs = make(), data()
    step = tf.jit(functools.partial(train_step, model))
    tapax.capture(step)(xs)
    jaxpr, _ = tf.make_jaxpr(step)(xs)
    assert "tap[" not in str(jaxpr)
    assert "tap[" not in str(step.stateful_fun.get_jaxpr(xs))
    assert "Net/cell" in tapax.capture(step)(xs)[1].grads


@pytest.mark.many
def test_capture_inside_a_transform_of_brainstate():
    model, twin, xs = make(), make(), data()

    @tf.jit
    def step(xs):
        return tapax.capture(lambda xs: train_step(model, xs))(xs)

    for i in range(2):
        out, taps = step(data(seed=i))
        assert_close(out, train_step(twin, data(seed=i)))
        assert taps.grads["Net/cell"].shape == (3, 2, 5)
        same(values_of(model), values_of(twin), 1e-5)

    def body(x):
        return tapax.capture(model)(x)[1].values["Net/head"]

    expected = rollout(twin, xs)
    assert_close(tf.for_loop(body, xs), expected)
    same(values_of(model), values_of(twin), 1e-5)


def test_captures_of_brainstate_models_nest():
    model, twin, xs = make(), make(), data()

    def outer(xs):
        out, taps = tapax.capture(lambda xs: rollout(model, xs), "Net/cell")(xs)
        return out, taps.values["Net/cell"]

    (out, inner), taps = tapax.capture(outer)(xs)
    assert_close(out, rollout(twin, xs))
    np.testing.assert_array_equal(inner, taps.values["Net/cell"])
    same(values_of(model), values_of(twin), 1e-5)


def test_threads_capture_brainstate_models_at_once():
    xs, failed, methods = data(), [], classes()
    expected, shared = rollout(make(), xs), make()
    captured, another = tapax.capture(rollout), tapax.capture(lambda xs: rollout(shared, xs))
    models = [make() for _ in range(3)]

    def work(model):
        try:
            _, taps = captured(model, xs)
            assert_close(taps.values["Net/head"], expected)
            for _ in range(3):
                assert not isinstance(another(xs)[0], jax.core.Tracer)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert classes() == methods
    values_of(shared)  # fails if a tracer leaks
    for model in models:
        same(values_of(model), values_of(models[0]))
