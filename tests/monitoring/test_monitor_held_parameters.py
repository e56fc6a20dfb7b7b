"""Parameters of stateful models that the step takes as arguments or closes over."""

import functools

import brainstate as bs
import equinox as eqx
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from brainstate import transform as tf
from flax import nnx
from keras import layers

import tapax
from tapax import reduce
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)
LR = 0.1


class Net(bs.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = bs.nn.Linear(4, 5)
        self.rest = {"b/c": bs.nn.Linear(5, 2)}

    def update(self, x):
        return self.rest["b/c"](jnp.tanh(self.a(x)))


def make_brainstate():
    bs.random.seed(0)
    return Net()


def train_brainstate(model, x):
    params = model.states(bs.ParamState)
    grads = tf.grad(lambda: jnp.mean(model(x) ** 2), params)()
    for path, state in params.items():
        state.value = jax.tree.map(lambda w, g: w - LR * g, state.value, grads[path])


def weights_of_brainstate(model):
    layers = {"Net/a/weight": model.a, "Net/rest/b%2Fc/weight": model.rest["b/c"]}
    values = {path: layer.weight.value for path, layer in layers.items()}
    return {f"{path}/{name}": w for path, value in values.items() for name, w in value.items()}


def make_keras():
    keras.utils.set_random_seed(0)
    parts = [keras.Input((4,)), layers.Dense(5, "tanh", name="a"), layers.Dense(2, name="b")]
    return keras.Sequential(parts, name="net")


def train_keras(model, x):
    def loss(weights):
        fixed = [v.value for v in model.non_trainable_variables]
        out, _ = model.stateless_call(weights, fixed, x)
        return jnp.mean(out**2)

    weights = [v.value for v in model.trainable_variables]
    for variable, w, g in zip(
        model.trainable_variables, weights, jax.grad(loss)(weights), strict=True
    ):
        variable.assign(w - LR * g)


def weights_of_keras(model):
    return {
        f"net/{layer.name}/{v.name}": v.value for layer in model.layers for v in layer.variables
    }


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(4, 5, rngs=rngs)
        self.b = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


def train_nnx(model, x):
    grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
    new = jax.tree.map(lambda w, g: w - LR * g, nnx.state(model, nnx.Param), grads)
    nnx.update(model, new)


def weights_of_nnx(model):
    layers = {"NNXNet/a": model.a, "NNXNet/b": model.b}
    names = ("kernel", "bias")
    return {f"{path}/{n}": getattr(layer, n)[...] for path, layer in layers.items() for n in names}


class Trainer:
    """A user-defined object that holds a model."""

    def __init__(self, train, model):
        self.train, self.model = train, model

    def step(self, x):
        self.train(self.model, x)


def through_another(train, model):
    def inner(x):
        train(model, x)

    return lambda x: inner(x)


WAYS = {
    "argument": lambda train, model: (train, (model,)),
    "closure": lambda train, model: (lambda x: train(model, x), ()),
    "partial": lambda train, model: (functools.partial(train, model), ()),
    "method": lambda train, model: (Trainer(train, model).step, ()),
    "function in a function": lambda train, model: (through_another(train, model), ()),
}
FRAMEWORKS = {
    "brainstate": (make_brainstate, train_brainstate, weights_of_brainstate),
    "keras": (make_keras, train_keras, weights_of_keras),
    "nnx": (lambda: NNXNet(nnx.Rngs(0)), train_nnx, weights_of_nnx),
}


@pytest.fixture(params=[True, False], ids=["exact", "one program"])
def watch(request):
    """A function that returns the first record of a monitored step."""

    def run(step, *args, params=True):
        log, nothing = tapax.Log(), {"values": None, "grads": None}
        with tapax.monitor(
            step, every=1, **nothing, params=params, to=log, exact=request.param
        ) as watched:
            watched(*args)
        ((_, record),) = list(log)
        return record

    return run


def rms(*arrays):
    flat = np.concatenate([np.asarray(x, np.float64).ravel() for x in arrays])
    return np.sqrt(np.mean(flat**2))


def loss_by_hand(weights, x):
    """Compute the mean square of two layers, each with a matrix and a bias."""
    first, first_bias, second, second_bias = weights
    return jnp.mean((jnp.tanh(x @ first + first_bias) @ second + second_bias) ** 2)


def check(record, weights, new):
    """Compare a record with the old weights, their gradients by JAX, and the update rule."""
    # Each layer has a matrix, then a bias.
    names = sorted(weights, key=lambda name: (name.rpartition("/")[0], -weights[name].ndim))
    slopes = jax.grad(loss_by_hand)([weights[name] for name in names], X)
    grads = dict(zip(names, slopes, strict=True))
    for name, w in weights.items():
        assert_close(np.float64(record[f"{name}/param_rms"]), rms(w), 1e-5)
        assert_close(np.float64(record[f"{name}/param_grad_rms"]), rms(grads[name]), 1e-5)
        assert_close(np.asarray(new[name]), np.asarray(w - LR * grads[name]), 1e-5)
        if np.any(w):
            ratio = LR * rms(grads[name]) / rms(w)
            assert_close(np.float64(record[f"{name}/update_ratio"]), ratio, 1e-3)
    root = next(iter(weights)).partition("/")[0]
    assert {name.partition("/")[0] for name in record} == {root}
    assert_close(np.float64(record[f"{root}/param_grad_rms"]), rms(*grads.values()), 1e-5)
    assert_close(np.float64(record[f"{root}/param_rms"]), rms(*weights.values()), 1e-5)


@pytest.mark.many
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("way", WAYS)
def test_parameters_are_found_however_the_step_comes_by_its_model(watch, framework, way):
    make, train, weights_of = FRAMEWORKS[framework]
    model = make()
    step, args = WAYS[way](train, model)
    before = weights_of(model)
    record = watch(step, *args, X)
    check(record, before, weights_of(model))


def test_jitted_closures_of_brainstate_have_parameters(watch):
    model = make_brainstate()
    step = tf.jit(lambda x: train_brainstate(model, x))
    before = weights_of_brainstate(model)
    record = watch(step, X)
    check(record, before, weights_of_brainstate(model))


def test_a_jitted_gradient_of_a_keras_model_has_parameters(watch):
    model = make_keras()

    @jax.jit
    def gradient(weights, fixed, x):
        loss = lambda w: jnp.mean(model.stateless_call(w, fixed, x)[0] ** 2)
        return jax.grad(loss)(weights)

    def step(x):
        weights, fixed = model.trainable_variables, model.non_trainable_variables
        grads = gradient([v.value for v in weights], [v.value for v in fixed], x)
        for variable, g in zip(weights, grads, strict=True):
            variable.assign(variable.value - LR * g)

    before = weights_of_keras(model)
    record = watch(step, X)
    check(record, before, weights_of_keras(model))


def test_two_models_of_one_class_are_named_by_the_variables_that_hold_them(watch):
    student, teacher = make_brainstate(), make_brainstate()

    def step(x):
        train_brainstate(teacher, 2 * x)
        train_brainstate(student, x)

    before = student.a.weight.value["weight"]
    record = watch(step, X, params={"student/a": reduce.norm})
    norm = np.sqrt(np.sum(np.square(np.asarray(before, np.float64))))
    assert_close(np.float64(record["student/a/param_norm"]), norm, 1e-5)
    assert set(record) == {
        "student/a/param_norm",
        "student/a/param_grad_norm",
        "student/a/update_ratio",
    }


class EqxNet(eqx.Module):
    up: eqx.nn.Linear

    def __init__(self, seed):
        self.up = eqx.nn.Linear(3, 3, key=jax.random.key(seed))

    def __call__(self, x):
        return jax.vmap(self.up)(x)


class Up(nnx.Module):
    def __init__(self, seed):
        self.up = nnx.Linear(3, 3, rngs=nnx.Rngs(seed))

    def __call__(self, x):
        return self.up(x)


@nnx.jit
def step_of_nnx(policy, value, x):
    loss = lambda p, v: jnp.sum((p(x) * v(x)) ** 2)
    grads = nnx.grad(loss, argnums=(0, 1))(policy, value)
    for model, grad in zip((policy, value), grads, strict=True):
        nnx.update(model, jax.tree.map(lambda w, g: w - LR * g, nnx.state(model), grad))


@eqx.filter_jit
def step_of_equinox(policy, value, x):
    loss = lambda nets: jnp.sum((nets[0](x) * nets[1](x)) ** 2)
    grads = eqx.filter_grad(loss)((policy, value))
    return jax.tree.map(lambda w, g: w - LR * g, {"both": (policy, value)}, {"both": grads})


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("make", "step"), [(Up, step_of_nnx), (EqxNet, step_of_equinox)])
@pytest.mark.filterwarnings("ignore:The update of the parameters")
def test_sites_of_two_models_have_their_names_with_and_without_parameters(make, step, exact):
    x = jnp.ones((2, 3), jnp.float32)
    records = []
    for params in (None, True):
        log = tapax.Log()
        options = {"values": reduce.rms, "grads": reduce.rms, "params": params, "exact": exact}
        with tapax.monitor(step, every=1, to=log, **options) as watched:
            watched(make(0), make(1), x)
        ((_, record),) = list(log)
        records.append(record)
    without, with_parameters = records
    names = {f"{net}{part}" for net in ("policy", "value") for part in ("", "/up")}
    kinds = ("value_rms", "grad_rms")
    assert set(without) == {f"{name}/{kind}" for name in names for kind in kinds}
    assert set(without) == {name for name in with_parameters if name.endswith(kinds)} - {
        name for name in with_parameters if name.endswith("param_grad_rms")
    }
    for name, number in without.items():
        assert_close(np.float64(with_parameters[name]), np.float64(number), 1e-5)
    assert {f"{name}/param_grad_rms" for name in names} <= set(with_parameters)


def test_a_closed_over_and_a_passed_model_have_the_names_of_their_sites(watch):
    other = make_brainstate()

    def step(model, x):
        train_brainstate(model, x)
        train_brainstate(other, x)

    roots = {name.partition("/")[0] for name in watch(step, make_brainstate(), X)}
    sites = {site.path.partition("/")[0] for site in tapax.sites(step)(make_brainstate(), X)}
    assert roots == sites == {"model", "other"}


def test_a_part_of_a_model_that_is_also_closed_over_keeps_its_name_in_the_model(watch):
    model = make_brainstate()
    head = model.a  # before `model` in the order of the variables

    def step(x):
        train_brainstate(model, x)
        return jnp.sum(head(x))

    assert {name.partition("/")[0] for name in watch(step, X)} == {"Net"}


def test_a_closed_over_model_without_a_gradient_is_not_recorded(watch):
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    def step(params, x):
        return jax.grad(lambda w: jnp.mean((model(x) @ w) ** 2))(params)

    record = watch(step, jnp.ones((2, 2)), X)
    assert {name.partition("/")[0] for name in record} == {"params"}


def test_states_that_the_step_makes_are_not_parameters():
    cell = bs.nn.GRUCell(4, 3)
    weights = cell.states(bs.ParamState)

    @tf.jit
    def step(x):
        def loss():
            bs.nn.init_all_states(cell, len(x))
            return jnp.mean(cell(x) ** 2)

        grads = tf.grad(loss, weights)()
        for path, state in weights.items():
            state.value = jax.tree.map(lambda w, g: w - LR * g, state.value, grads[path])

    log = tapax.Log()
    with tapax.monitor(step, every=1, params=True, to=log) as watched:
        for _ in range(2):
            watched(X)
    names = [name for name in log.names if name.endswith("/update_ratio")]
    assert names and not any("/h/" in name for name in names)
