"""A monitor records the weights, gradients and updates of a step written out by hand."""

import functools
import warnings

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
from tapax import reduce
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)
LR = 0.1


def rms(*arrays):
    flat = np.concatenate([np.asarray(a, np.float64).ravel() for a in arrays])
    return np.sqrt(np.mean(flat**2))


def by_hand(params, grads, new, prefix=""):
    """Compute the record of a flat dict of parameters in NumPy."""
    record = {}
    for name, w in params.items():
        record[f"{prefix}{name}/param_rms"] = rms(w)
        record[f"{prefix}{name}/param_grad_rms"] = rms(grads[name])
        record[f"{prefix}{name}/update_ratio"] = rms(np.asarray(new[name]) - w) / rms(w)
    return record


@pytest.fixture(params=[True, False], ids=["exact", "one program"])
def watch(request):
    """A function that returns the first record of a monitored step, and its result."""

    def run(step, *args, **options):
        log = tapax.Log()
        options = {"values": None, "grads": None, "exact": request.param, **options}
        with tapax.monitor(step, every=1, to=log, **options) as watched:
            out = watched(*args)
        ((_, record),) = list(log)
        return record, out

    return run


def loss(params, x):
    h = jnp.tanh(x @ params["in"]["w"] + params["in"]["b"])
    return jnp.mean((h @ params["out"]["w"]) ** 2)


def plain_params():
    keys = jax.random.split(KEY, 3)
    return {
        "in": {"w": jax.random.normal(keys[0], (4, 5)), "b": jax.random.normal(keys[1], (5,))},
        "out": {"w": jax.random.normal(keys[2], (5, 2))},
    }


def flat(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(str(k.key) for k in keys): x for keys, x in leaves}


def sgd(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda w, g: w - LR * g, params, grads), value


def expected_sgd(params, prefix="params/"):
    grads = jax.grad(loss)(params, X)
    new = jax.tree.map(lambda w, g: np.asarray(w) - LR * np.asarray(g), params, grads)
    return by_hand(flat(params), flat(grads), flat(new), prefix), grads, new


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_plain_parameters_have_weights_gradients_and_updates(watch, wrap):
    params = plain_params()
    record, _ = watch(wrap(sgd), params, X, params=True)
    expected, grads, new = expected_sgd(params)
    assert_close({k: np.float64(record[k]) for k in expected}, expected, 1e-5)
    both = [params["in"]["w"], params["in"]["b"]]
    assert_close(np.float64(record["params/in/param_rms"]), rms(*both), 1e-5)
    both_grads = [grads["in"]["w"], grads["in"]["b"]]
    assert_close(np.float64(record["params/in/param_grad_rms"]), rms(*both_grads), 1e-5)
    change = [np.asarray(new["in"][k]) - np.asarray(params["in"][k]) for k in ("w", "b")]
    assert_close(np.float64(record["params/in/update_ratio"]), rms(*change) / rms(*both), 1e-5)
    every = jax.tree.leaves(grads)
    assert_close(np.float64(record["params/param_grad_rms"]), rms(*every), 1e-5)


def test_selections_and_reducers_pick_parameters_and_modules(watch):
    params = plain_params()
    record, _ = watch(sgd, params, X, params="**/w")
    assert {name.rpartition("/")[0] for name in record} == {"params/in/w", "params/out/w"}
    record, _ = watch(sgd, params, X, params={"params/in": [reduce.norm, reduce.minmax]})
    grads = jax.grad(loss)(params, X)["in"]
    assert set(record) == {
        "params/in/param_norm",
        "params/in/param_min",
        "params/in/param_max",
        "params/in/param_grad_norm",
        "params/in/param_grad_min",
        "params/in/param_grad_max",
        "params/in/update_ratio",
    }
    norm = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in grads.values()))
    assert_close(np.float64(record["params/in/param_grad_norm"]), norm, 1e-5)
    assert record["params/in/param_max"] == max(float(w.max()) for w in params["in"].values())
    histogram = reduce.histogram([-np.inf, 0.0, np.inf])
    record, _ = watch(sgd, params, X, params={"params/in/w": histogram})
    assert record["params/in/w/param_histogram"].counts.sum() == 20


def test_gradients_taken_by_a_function_made_before_are_recorded(watch):
    grad = jax.grad(loss)

    def step(params, x):
        return jax.tree.map(lambda w, g: w - LR * g, params, grad(params, x))

    params = plain_params()
    expected, _, _ = expected_sgd(params)
    record, _ = watch(jax.jit(step), params, X, params="params/*/*")
    assert_close({k: np.float64(record[k]) for k in expected}, expected, 1e-5)


def test_state_of_an_optimizer_is_not_a_parameter(watch):
    tx = optax.adam(1e-2)

    @jax.jit
    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = plain_params()
    record, (new, _) = watch(step, params, tx.init(params), X, params=True)
    assert {name.partition("/")[0] for name in record} == {"params"}
    for name, w in flat(params).items():
        change = np.asarray(flat(new)[name], np.float64) - np.asarray(w, np.float64)
        assert_close(np.float64(record[f"params/{name}/update_ratio"]), rms(change) / rms(w), 1e-4)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(4, 5, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(5, 5, rngs=rngs)])
        self.norm = nnx.BatchNorm(5, rngs=rngs)

    def __call__(self, x):
        return self.blocks[0](self.norm(nnx.tanh(self.a(x))))


@nnx.jit
def nnx_step(model, optimizer, x):
    value, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, grads)
    return value


def test_nnx_modules_have_parameters_by_the_names_of_their_sites(watch):
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(LR), wrt=nnx.Param)
    before = np.asarray(model.a.kernel[...])
    grads = nnx.grad(lambda model: jnp.mean(model(X) ** 2))(nnx.clone(model))
    record, _ = watch(nnx_step, model, optimizer, X, params=True)
    assert {name.partition("/")[0] for name in record} == {"Net"}
    assert "Net/norm/mean/param_rms" not in record and "Net/norm/scale/param_rms" in record
    assert_close(np.float64(record["Net/a/kernel/param_rms"]), rms(before), 1e-5)
    gradient = grads["a"]["kernel"][...]
    assert_close(np.float64(record["Net/a/kernel/param_grad_rms"]), rms(gradient), 1e-5)
    ratio = rms(np.asarray(model.a.kernel[...]) - before) / rms(before)
    assert_close(np.float64(record["Net/a/kernel/update_ratio"]), ratio, 1e-4)
    assert "Net/blocks/0/update_ratio" in record


def test_run_with_parameters_watched_is_the_plain_run_bit_for_bit():
    def run(wrap):
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        step = wrap(nnx_step)
        for _ in range(4):
            step(model, optimizer, X)
        return nnx.state(model)

    watched = functools.partial(tapax.monitor, every=2, params=True, to=tapax.Log())
    for a, b in zip(jax.tree.leaves(run(watched)), jax.tree.leaves(run(lambda f: f)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_equinox_modules_are_named_by_their_class(watch):
    model = eqx.nn.MLP(4, 2, 5, 1, key=KEY)
    tx = optax.sgd(LR)

    def mlp_loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    @eqx.filter_jit
    def step(model, state, x):
        grads = eqx.filter_grad(mlp_loss)(model, x)
        updates, state = tx.update(grads, state)
        return eqx.apply_updates(model, updates), state

    state = tx.init(eqx.filter(model, eqx.is_array))
    record, (new, _) = watch(step, model, state, X, params=True)
    gradient = eqx.filter_grad(mlp_loss)(model, X).layers[0].weight
    w = model.layers[0].weight
    assert_close(np.float64(record["MLP/layers/0/weight/param_grad_rms"]), rms(gradient), 1e-5)
    ratio = rms(np.asarray(new.layers[0].weight) - np.asarray(w)) / rms(w)
    assert_close(np.float64(record["MLP/layers/0/weight/update_ratio"]), ratio, 1e-4)
    assert "MLP/layers/1/update_ratio" in record and "MLP/update_ratio" in record


def test_moments_of_an_optimizer_do_not_rename_the_model(watch):
    model = eqx.nn.MLP(4, 2, 5, 1, key=KEY)
    tx = optax.adam(LR)  # its state has two trees that are MLPs, too

    @eqx.filter_jit
    def step(model, state, x):
        grads = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        updates, state = tx.update(grads, state)
        return eqx.apply_updates(model, updates), state

    state = tx.init(eqx.filter(model, eqx.is_array))
    record, (new, _) = watch(step, model, state, X, params=True)
    assert {name.partition("/")[0] for name in record} == {"MLP"}
    for old, now, name in (
        (model.layers[0].weight, new.layers[0].weight, "MLP/layers/0/weight"),
        (model.layers[1].bias, new.layers[1].bias, "MLP/layers/1/bias"),
    ):
        assert_close(np.float64(record[f"{name}/param_rms"]), rms(old), 1e-5)
        ratio = rms(np.asarray(now) - np.asarray(old)) / rms(old)
        assert_close(np.float64(record[f"{name}/update_ratio"]), ratio, 1e-4)


@pytest.mark.parametrize(
    ("pair", "names"),
    [
        (lambda a, b: {"policy": a, "value": b}, ("policy", "value")),
        (lambda a, b: (a, b), ("agent/0", "agent/1")),
    ],
    ids=["dict", "tuple"],
)
def test_models_of_one_class_in_one_argument_have_the_names_of_their_sites(watch, pair, names):
    keys = jax.random.split(KEY)
    agent = pair(*(eqx.nn.MLP(4, 2, 5, 1, key=key) for key in keys))

    def step(agent, x):
        def agent_loss(agent):
            return sum(jnp.mean(jax.vmap(m)(x) ** 2) for m in models(agent))

        grads = eqx.filter_grad(agent_loss)(agent)
        return eqx.apply_updates(agent, jax.tree.map(lambda g: -LR * g, grads))

    def models(agent):
        return jax.tree.leaves(agent, is_leaf=lambda m: isinstance(m, eqx.nn.MLP))

    record, new = watch(step, agent, X, params=True)
    sites = {site.path for site in tapax.sites(step)(agent, X)}
    for name, model, trained in zip(names, models(agent), models(new), strict=True):
        assert f"{name}/layers/0" in sites
        w, now = (np.asarray(m.layers[0].weight) for m in (model, trained))
        assert_close(np.float64(record[f"{name}/layers/0/weight/param_rms"]), rms(w), 1e-5)
        ratio = record[f"{name}/layers/0/weight/update_ratio"]
        assert_close(np.float64(ratio), rms(now - w) / rms(w), 1e-4)


def test_train_states_and_linen_parameters_are_named_by_the_argument(watch):
    model = nn.Sequential([nn.Dense(5), nn.tanh, nn.Dense(2)])
    params = model.init(KEY, X)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(LR, momentum=0.9))

    @jax.jit
    def step(state, x):
        fn = lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2)
        value, grads = jax.value_and_grad(fn)(state.params)
        return state.apply_gradients(grads=grads), value

    record, _ = watch(step, state, X, params=True)
    grads = jax.grad(lambda p: jnp.mean(model.apply({"params": p}, X) ** 2))(params)
    name, w = "state/params/layers_0/kernel", params["layers_0"]["kernel"]
    g = grads["layers_0"]["kernel"]
    assert_close(np.float64(record[f"{name}/param_grad_rms"]), rms(g), 1e-5)
    assert_close(np.float64(record[f"{name}/update_ratio"]), LR * rms(g) / rms(w), 1e-3)


def test_haiku_parameters_returned_alone_are_found(watch):
    def forward(x):
        return hk.nets.MLP([5, 2])(x)

    net = hk.without_apply_rng(hk.transform(forward))
    params = net.init(KEY, X)

    @jax.jit
    def step(bundle, x):
        grads = jax.grad(lambda p: jnp.mean(net.apply(p, x) ** 2))(bundle["params"])
        return jax.tree.map(lambda w, g: w - LR * g, bundle["params"], grads)

    record, _ = watch(step, {"params": params, "count": jnp.zeros(())}, X, params="**/w")
    grads = jax.grad(lambda p: jnp.mean(net.apply(p, X) ** 2))(params)
    assert record.keys() >= {"bundle/params/mlp/linear_0/w/update_ratio"}, record
    for name, part in params.items():
        found = record[f"bundle/params/{name.replace('~/', '')}/w/update_ratio"]
        assert_close(np.float64(found), LR * rms(grads[name]["w"]) / rms(part["w"]), 1e-4)


def test_keras_variables_given_as_arrays_are_recorded(watch):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras has another backend")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5), keras.layers.Dense(2)])

    def keras_loss(trainable, fixed, x):
        out, _ = model.stateless_call(trainable, fixed, x)
        return jnp.mean(out**2)

    @jax.jit
    def step(trainable, fixed, x):
        grads = jax.grad(keras_loss)(trainable, fixed, x)
        return [w - LR * g for w, g in zip(trainable, grads, strict=True)]

    trainable = [v.value for v in model.trainable_variables]
    fixed = [v.value for v in model.non_trainable_variables]
    record, _ = watch(step, trainable, fixed, X, params=True)
    grads = jax.grad(keras_loss)(trainable, fixed, X)
    for i in (0, 2):
        expected = LR * rms(grads[i]) / rms(trainable[i])
        assert_close(np.float64(record[f"trainable/{i}/update_ratio"]), expected, 1e-4)


def test_donated_parameters_are_measured_before_they_are_gone(watch):
    params = plain_params()
    expected, _, _ = expected_sgd(params)
    given = jax.tree.map(jnp.copy, params)
    record, _ = watch(jax.jit(sgd, donate_argnums=0), given, X, params="params/*/*")
    assert_close({k: np.float64(record[k]) for k in expected}, expected, 1e-5)
    assert jax.tree.leaves(given)[0].is_deleted()


def test_accumulated_gradients_have_a_number_for_each_microbatch(watch):
    def step(params, xs):
        def micro(total, x):
            grads = jax.checkpoint(jax.grad(loss))(params, x)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, _ = jax.lax.scan(micro, zeros, xs)
        return jax.tree.map(lambda w, g: w - LR * g, params, grads)

    params, xs = plain_params(), X.reshape(3, 2, 4)
    record, _ = watch(jax.jit(step), params, xs, params="**/w")
    for i, x in enumerate(xs):
        gradient = jax.grad(loss)(params, x)["in"]["w"]
        found = np.float64(record[f"params/in/w[{i}]/param_grad_rms"])
        assert_close(found, rms(gradient), 1e-5)


def test_gradients_of_examples_and_devices_are_merged(watch):
    params = plain_params()

    def step(params, xs):
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, xs[:, None])
        return jax.tree.map(lambda w, g: w - LR * g.mean(0), params, grads)

    record, _ = watch(step, params, X, params="params/in/w")
    each = [jax.grad(loss)(params, x[None])["in"]["w"] for x in X]
    assert_close(np.float64(record["params/in/w/param_grad_rms"]), rms(*each), 1e-5)


def test_cast_parameters_and_two_gradients_are_told_apart(watch):
    def step(params, x):
        half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        grads = jax.grad(lambda p: loss(p, x.astype(jnp.bfloat16)).astype(jnp.float32))(half)
        second = jax.grad(lambda p: 2 * loss(p, x))(params)
        return jax.tree.map(lambda w, g, s: w - LR * (g + s).astype(w.dtype), params, grads, second)

    params = plain_params()
    record, _ = watch(jax.jit(step), params, X, params="params/in/w")
    gradient = rms(jax.grad(loss)(params, X)["in"]["w"])
    assert_close(np.float64(record["params/in/w/param_grad_rms"]), gradient, 0.05)
    assert_close(np.float64(record["params/in/w@1/param_grad_rms"]), 2 * gradient, 1e-5)


def test_parameters_that_one_traced_function_shares_have_no_wrong_gradient(watch):
    grad = jax.jit(jax.grad(loss))

    @jax.jit
    def step(a, b, x):
        new_a = jax.tree.map(lambda w, g: w - LR * g, a, grad(a, x))
        new_b = jax.tree.map(lambda w, g: w - LR * g, b, grad(b, 2 * x))
        return {"a": new_a}, {"b": {"inner": new_b}}

    a = plain_params()
    b = jax.tree.map(lambda w: 2 * w, a)
    with (
        pytest.warns(UserWarning, match="one jitted function computes all of them"),
        pytest.raises(tapax.SiteError, match="takes no gradient by an array among"),
    ):
        watch(step, a, b, X, params=True)


def test_update_that_cannot_be_told_is_left_out_with_a_warning(watch):
    @jax.jit
    def step(params, average, x):
        new, _ = sgd(params, x)
        return new, jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, average, new)

    params = plain_params()
    with pytest.warns(UserWarning, match="update of the parameters in 'params' is not recorded"):
        record, _ = watch(step, params, params, X, params=True)
    assert "params/in/w/param_grad_rms" in record
    assert not any("update_ratio" in name for name in record)


def test_sites_and_parameters_share_a_record_and_selections_do_not_mix():
    def step(params, x):
        def inner(params):
            return jnp.mean(tapax.sow(x @ params["in"]["w"], "h") ** 2)

        grads = jax.grad(inner)(params)
        return jax.tree.map(lambda w, g: w - LR * g, params, grads)

    log = tapax.Log()
    with tapax.monitor(step, every=1, to=log, params="**/w") as watched:
        watched(plain_params(), X)
    sites = [name for name in log.names if "param" not in name]
    assert sites == ["h/value_rms", "h/grad_rms"]
    _, taps = tapax.capture(step)(plain_params(), X)
    assert list(taps.values) == list(taps.grads) == ["h"]


def test_bad_params_get_one_clear_error(watch):
    params = plain_params()
    with pytest.raises(tapax.SiteError, match=r"params='params/inn/w'.*no parameter has"):
        watch(sgd, params, X, params="params/inn/w")
    with pytest.raises(tapax.SiteError, match="takes no gradient by an array among its arguments"):
        watch(lambda params, x: params, params, X, params=True)
    with pytest.raises(TypeError, match="compares a gradient with its value"):
        watch(sgd, params, X, params={"**": reduce.cosine})
    with pytest.raises(TypeError, match="`params`"):
        watch(sgd, params, X, params=3)


def test_nothing_is_marked_where_no_monitor_watches_parameters():
    tapax.monitor(sgd, params=True).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxpr = jax.make_jaxpr(sgd)(plain_params(), X)
    assert "tap" not in {eqn.primitive.name for eqn in jaxpr.eqns}


def test_a_step_that_was_executed_as_text_has_parameters():
    space = {"jax": jax, "jnp": jnp}
    source = """
def loss(w, x):
    return jnp.sum((x @ w["up"]) ** 2)

def step(w, x):
    grads = jax.grad(loss)(w, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)
"""
    exec(source, space)
    assert space["loss"].__module__ is None
    log, w = tapax.Log(), {"up": jnp.ones((4, 3))}
    nothing = {"values": None, "grads": None}
    with tapax.monitor(space["step"], **nothing, every=1, params="**", to=log) as step:
        step(w, X)
    grad = 2 * np.asarray(X).T @ np.asarray(X) @ np.ones((4, 3))
    assert_close(log["w/up/param_grad_rms"].values[0], rms(grad), 1e-5)
