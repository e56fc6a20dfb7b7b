"""Flax Linen: every module of an unmodified model is a site."""

import copy
import pickle
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import tapax
from tapax._frameworks.module_paths import running_modules
from tests.models import linen_models
from tests.models.linen_models import (
    KEY,
    LOOPS,
    MLP,
    MODELS,
    RNN,
    Methods,
    Scan,
    Setup,
    Shared,
    X,
    loss_of,
    root_of,
)
from tests.oracles import linen_oracle as oracle
from tests.oracles.closeness import assert_close

LIKE_OTHERS = ("setup", "scan of a function", "jit")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.many] * (name in LIKE_OTHERS)) for name in MODELS],
)
def test_every_module_of_an_unmodified_model_is_a_site(name):
    model = MODELS[name]
    variables = model.init(KEY, X)
    loss = loss_of(model)

    step = jax.jit(jax.grad(loss))
    before = step(variables, X)  # compiles the step before the capture
    out, taps = tapax.capture(step)(variables, X)
    assert_close(out, before)

    run, plain = lambda: loss(variables, X), name not in LOOPS
    expected = oracle.values(run, root_of(model), plain=plain)
    oracle.agree(taps.values, taps.sites, expected)
    # A result that the loss does not depend on has no gradient.
    grads = oracle.grads(run, root_of(model), expected, plain=plain)
    used = {k: v for k, v in grads.items() if any(np.any(g) for g in v)}
    oracle.agree(taps.grads, taps.sites, used)


def below(prefix, *names):
    return [prefix + name for name in names]


NAMES = [
    (MLP(), ["MLP/Dense_0", "MLP/Dense_1", "MLP"]),
    (
        Setup(),
        below("Setup/", "layers_0", "layers_1/Dense_0", "layers_1/Dense_1", "layers_1")
        + below("Setup", ".encode", "/heads_a", "/heads_b", ""),
    ),
    (
        Shared(),
        below("Shared/shared", "/Dense_0", "/Dense_1", "")
        + below("Shared/left", "/Dense_0", "")
        + below("Shared/shared", "/Dense_0@1", "/Dense_1@1", "@1")
        + below("Shared/right", "/Dense_0", "")
        + below("Shared", "/shared/Dense_0@2", "/shared/Dense_1@2", "/shared@2", ""),
    ),
    (
        Methods(),
        below("Methods/encoder", "/Dense_0", "/Dense_1", "")
        + below("Methods", ".encode", "/decoder", "")
        + below("Methods.decode:", "mean", "parts.0", "parts.1"),
    ),
    (
        RNN(),
        below("RNN/LSTMCell_0/", "ii", "if", "ig", "io", "hi", "hf", "hg", "ho")
        + below("RNN", "/LSTMCell_0:0.0", "/LSTMCell_0:0.1", "/LSTMCell_0:1", "/rnn", ""),
    ),
    (
        Scan(),
        below("Scan/layers/mlp", "/Dense_0", "/Dense_1", "")
        + below("Scan", "/layers:0", "/layers:1", ""),
    ),
]


@pytest.mark.parametrize(("model", "names"), NAMES, ids=lambda m: type(m).__name__)
def test_names_of_linen_modules(model, names):
    found = tapax.sites(model.apply)(model.init(KEY, X), X).names
    assert sorted(found) == sorted(names)
    # tapax.modules lists these names without calls, leaves and other methods.
    listed = {re.split("[.:@]", name)[0] for name in names}
    assert {path for path, _ in tapax.modules(model, X)} == listed


TAIL = ["Methods/encoder/Dense_0", "Methods/encoder/Dense_1", "Methods/encoder"]


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("encode", [*TAIL, "Methods.encode"]),
        (Methods.encode, [*TAIL, "Methods.encode"]),
        (lambda m, x: m.encoder(x) + 1, TAIL),
        (lambda m, x: m.encode(x) + m.encode(x), [*TAIL, "Methods.encode"] * 2),
    ],
    ids=["string", "function", "lambda", "twice"],
)
def test_apply_with_a_method_names_the_method(method, names):
    model = Methods()
    variables = model.init(KEY, X)
    apply = lambda v, x: model.apply(v, x, method=method)
    out, taps = tapax.capture(apply)(variables, X)
    assert_close(out, apply(variables, X))
    assert [name.split("@")[0] for name in taps.sites.names] == names


def test_apply_with_the_name_of_a_submodule_as_method():
    class Holder(nn.Module):
        inner: nn.Module

        def __call__(self, x):
            return self.inner(x)

    model = Holder(nn.Dense(4))
    apply = lambda v, x: model.apply(v, x, method="inner")
    assert tapax.sites(apply)(model.init(KEY, X), X).names == ["Holder/inner"]


def test_a_site_knows_its_method_and_class():
    model = Methods()
    sites = tapax.sites(model.apply)(model.init(KEY, X), X)
    encode, decoder = sites["Methods.encode"], sites["Methods/decoder"]
    assert (encode.module, encode.method) == (Methods, "encode")
    assert (decoder.module, decoder.method) == (nn.Dense, "__call__")
    assert decoder.source.startswith(linen_models.__file__)


class Doubled(MLP):
    def __call__(self, x):
        return 2 * super().__call__(x)


class DoubledRemat(nn.remat(MLP)):
    def __call__(self, x):
        return 2 * super().__call__(x)


@pytest.mark.parametrize("cls", [Doubled, DoubledRemat])
def test_the_result_of_super_is_not_a_site(cls):
    model = cls()
    variables = model.init(KEY, X)
    out, taps = tapax.capture(model.apply)(variables, X)
    name = cls.__name__
    assert taps.sites.names == [f"{name}/Dense_0", f"{name}/Dense_1", name]
    np.testing.assert_array_equal(taps.values[name], out)


def test_bind_and_nn_apply_and_init_are_captured():
    model = Setup()
    variables = model.init(KEY, X)
    bound = lambda v, x: model.bind(v).heads["a"](model.bind(v).encode(x))
    assert tapax.sites(bound)(variables, X).names[-1] == "Setup/heads_a"
    held = model.bind(variables)
    out, taps = tapax.capture(lambda x: held(x))(X)
    assert_close(taps.values["Setup"], model.apply(variables, X))
    applied = nn.apply(lambda m, x: m.encode(x), model)
    assert tapax.sites(applied)(variables, X).names[-1] == "Setup.encode"
    made, taps = tapax.capture(model.init)(KEY, X)
    assert_close(made, variables)
    assert_close(taps.values["Setup"], model.apply(variables, X))


def test_two_models_and_a_model_in_a_model_have_separate_names():
    class Student(nn.Module):
        teacher: dict

        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(x) - MLP(parent=None).apply(self.teacher, x)

    teacher = MLP().init(KEY, X)
    model = Student(teacher)
    variables = model.init(KEY, X)
    both = lambda v, t, x: (MLP().apply(t, x), model.apply(v, x), MLP().apply(t, 2 * x))
    names = tapax.sites(both)(variables, teacher, X).names
    inner = ["MLP/Dense_0", "MLP/Dense_1", "MLP"]
    within = ["Student/Dense_0", *(f"Student/{n}" for n in inner), "Student"]
    assert names == [*inner, *within, *(f"{n}@1" for n in inner)]


class Lora(nn.Module):
    base: nn.Module

    def setup(self):
        nn.share_scope(self, self.base)

    @nn.compact
    def __call__(self, x):
        return self.base(x) + nn.Dense(4, name="low")(x)


class Scale(nn.Module):
    weight: str

    @nn.compact
    def __call__(self, x):
        return x * self.param(self.weight, nn.initializers.constant(2.0), x.shape[-1:])


class Gated(nn.Module):
    @nn.compact
    def __call__(self, x):
        for weight in ("gate", "out"):
            layer = Scale(weight)
            nn.share_scope(self, layer)
            x = jnp.tanh(layer(x))
        return x


@pytest.mark.parametrize("lift", [lambda cls: cls, nn.jit, nn.remat])
def test_a_module_that_shares_a_scope_has_a_separate_name(lift):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = lift(Lora)(lift(nn.Dense)(4, name="dense"))(x)
            return lift(Gated)(name="mlp")(x)

    model = Net()
    variables = model.init(KEY, X)
    out, taps = tapax.capture(model.apply)(variables, X)
    names = ["Net/dense/base", "Net/dense/low", "Net/dense"]
    names += ["Net/mlp/Scale_0", "Net/mlp/Scale_1", "Net/mlp", "Net"]
    assert taps.sites.names == names
    assert_close(taps.values["Net/mlp/Scale_0"], 2 * taps.values["Net/dense"])
    assert_close(jnp.tanh(taps.values["Net/mlp/Scale_1"]), out)
    dense = variables["params"]["dense"]
    base = X @ dense["kernel"] + dense["bias"]
    assert_close(taps.values["Net/dense/base"], base)
    assert_close(taps.values["Net/dense"], base + taps.values["Net/dense/low"])

    edited = tapax.edit(model.apply, values={"Net/dense": 0.0})
    _, after = tapax.capture(edited)(variables, X)
    assert_close(after.values["Net/dense/base"], base)
    assert {path for path, _ in tapax.modules(model, X)} == set(names)


def test_compact_name_scope_adds_a_segment():
    class Net(nn.Module):
        @nn.compact_name_scope
        def up(self, x):
            return nn.Dense(3)(x)

        def __call__(self, x):
            return self.up(x)

    model = Net()
    names = tapax.sites(model.apply)(model.init(KEY, X), X).names
    assert "Net/up/Dense_0" in names and "Net" in names


def test_an_unbound_module_is_named_by_its_class():
    class Twice(nn.Module):
        def __call__(self, x):
            return 2 * x

    out, taps = tapax.capture(lambda x: Twice()(x))(X)
    np.testing.assert_array_equal(taps.values["Twice"], 2 * X)


class Stateful(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


def test_a_train_step_with_optax_is_captured():
    model = Stateful()
    variables = model.init(KEY, X, train=False)
    tx = optax.adam(1e-2)

    @jax.jit
    def step(variables, opt_state, x, key):
        def loss(params):
            out, state = model.apply(
                {**variables, "params": params},
                x,
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": key},
            )
            return jnp.mean(out**2), state

        grads, state = jax.grad(loss, has_aux=True)(variables["params"])
        updates, opt_state = tx.update(grads, opt_state)
        return {"params": optax.apply_updates(variables["params"], updates), **state}, opt_state

    opt_state = tx.init(variables["params"])
    plain = step(variables, opt_state, X, KEY)
    for _ in range(2):
        out, taps = tapax.capture(step)(variables, opt_state, X, KEY)
        assert_close(out, plain)
    dropped = taps.values["Stateful/Dropout_0"]
    expected = jnp.where(dropped != 0, 2 * taps.grads["Stateful/Dropout_0"], 0)
    assert_close(taps.grads["Stateful/BatchNorm_0"], expected)
    assert_close(taps.grads["Stateful"], 2 * dropped / dropped.size)


def test_a_step_of_a_train_state_is_captured():
    model = MLP()
    params = model.init(KEY, X)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    @jax.jit
    def step(state, x):
        grads = jax.grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    plain = step(state, X)
    out, taps = tapax.capture(step)(state, X)
    assert_close(out, plain)
    assert set(taps.grads) == {"MLP", "MLP/Dense_0", "MLP/Dense_1"}


@pytest.mark.parametrize(
    "made",
    [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: m.clone()],
    ids=["argument", "deepcopy", "pickle", "clone"],
)
def test_a_model_may_be_an_argument_or_made_inside(made):
    variables = MLP().init(KEY, X)
    apply = lambda model, v, x: made(model).apply(v, x)
    for fn in (apply, jax.jit(apply, static_argnums=0)):
        names = tapax.capture(fn)(MLP(), variables, X)[1].sites.names
        assert names == ["MLP/Dense_0", "MLP/Dense_1", "MLP"]


def test_values_and_gradients_stay_in_bfloat16():
    model = nn.Dense(4, dtype=jnp.bfloat16)
    variables = model.init(KEY, X)
    loss = lambda v, x: model.apply(v, x).astype(jnp.float32).sum()
    _, taps = tapax.capture(jax.grad(loss))(variables, X)
    assert taps.values["Dense"].dtype == taps.grads["Dense"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (False, []),
        ("**/Dense_0", ["MLP/Dense_0"]),
        (["MLP", "**/Dense_1"], ["MLP/Dense_1", "MLP"]),
        (lambda m, method: isinstance(m, nn.Dense), ["MLP/Dense_0", "MLP/Dense_1"]),
        (lambda m, method: m.name == "Dense_1", ["MLP/Dense_1"]),
        (lambda m, method: method == "encode", []),
    ],
)
def test_modules_argument_narrows_linen_sites(modules, names):
    variables = MLP().init(KEY, X)
    _, taps = tapax.capture(MLP().apply, modules=modules)(variables, X)
    assert taps.sites.names == names


def patched():
    from flax.core import axes_scan
    from flax.linen import module, transforms

    return (
        nn.Module.sow,
        nn.Module.perturb,
        vars(transforms._HashableProxy)["from_module"],
        axes_scan.scan,
        len(module._global_interceptor_stack),
        len(running_modules()),
    )


@pytest.fixture(autouse=True)
def linen_is_left_as_it_was():
    before = patched()
    yield
    assert patched() == before


def test_an_exception_in_a_layer_restores_linen():
    class Broken(nn.Module):
        @nn.compact
        def __call__(self, x):
            nn.Dense(4)(x)
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        tapax.capture(Broken().init)(KEY, X)
    test_names_of_linen_modules(MLP(), ["MLP/Dense_0", "MLP/Dense_1", "MLP"])


def test_captures_of_linen_models_nest():
    variables = MLP().init(KEY, X)

    def outer(v, x):
        out, inner = tapax.capture(MLP().apply, modules="MLP/Dense_0")(v, x)
        return nn.Dense(4).apply({"params": v["params"]["Dense_1"]}, out), inner.values

    (out, inner), taps = tapax.capture(outer)(variables, X)
    assert list(inner) == ["MLP/Dense_0"]
    assert taps.sites.names == ["MLP/Dense_0", "MLP/Dense_1", "MLP", "Dense"]


def test_threads_see_only_the_modules_that_they_run():
    variables = MLP().init(KEY, X)
    found, failed = {}, []
    inside, done = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        @nn.compact
        def __call__(self, x):
            inside.set()
            assert done.wait(60)
            return nn.Dense(4)(x)

    def work():
        try:
            found["taps"] = tapax.capture(Waiting().init)(KEY, X)[1]
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    jaxpr = jax.make_jaxpr(MLP().apply)(variables, X)  # no capture on this thread
    assert "tap" not in str(jaxpr)
    _, taps = tapax.capture(MLP().apply)(variables, X)
    done.set()
    thread.join()
    assert not failed
    assert taps.sites.names == ["MLP/Dense_0", "MLP/Dense_1", "MLP"]
    assert found["taps"].sites.names == ["Waiting/Dense_0", "Waiting"]


def test_outside_of_a_capture_nothing_is_marked():
    variables = Setup().init(KEY, X)
    tapax.capture(Setup().apply)(variables, X)
    assert "tap" not in str(jax.make_jaxpr(Setup().apply)(variables, X))


def test_without_its_taps_the_captured_program_is_the_plain_one():
    model, variables = Scan("remat"), Scan("remat").init(KEY, X)
    step = jax.grad(loss_of(model))
    with jax.disable_jit():
        out, _ = tapax.capture(step)(variables, X)
        plain = step(variables, X)
    jax.tree.map(np.testing.assert_array_equal, out, plain)
