"""Equinox modules as sites: unmodified models, under every transformation."""

import copy
import functools
import pickle
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tapax
from tapax import SiteError
from tests.frameworks.conftest import attributes
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.usefixtures("equinox_as_before")

B, D = 3, 4
X = jax.random.normal(jax.random.key(7), (B, D))


def linear(seed=0):
    return eqx.nn.Linear(D, D, key=jax.random.key(seed))


class Block(eqx.Module):
    linear: eqx.nn.Linear
    drop: eqx.nn.Dropout

    def __init__(self, seed):
        self.linear, self.drop = linear(seed), eqx.nn.Dropout(0.5, inference=True)

    def __call__(self, x):
        return jnp.tanh(self.drop(self.linear(x))) + x

    def encode(self, x):
        return self(x)


@eqx.filter_jit
def apply_jitted(block, x):
    return block(x)


HOW = {
    "plain": lambda block, x: block(x),
    "filter_checkpoint": lambda block, x: eqx.filter_checkpoint(block)(x),
    "filter_jit": lambda block, x: eqx.filter_jit(block)(x),
    "filter_vmap": lambda block, x: eqx.filter_vmap(block)(x[None])[0],
    "vmap": lambda block, x: jax.vmap(block)(x[None])[0],
    "Partial": lambda block, x: eqx.Partial(block)(x),
    "nested": lambda block, x: eqx.filter_jit(eqx.filter_checkpoint(eqx.Partial(block)))(x),
    "checkpointed function": lambda block, x: eqx.filter_checkpoint(lambda b, x: b(x))(block, x),
    "checkpointed twice": lambda block, x: eqx.filter_checkpoint(
        eqx.filter_checkpoint(lambda b, x: b(x))
    )(block, x),
    "jitted function": apply_jitted,
    "jax.checkpoint": lambda block, x: jax.checkpoint(
        lambda w, x: eqx.combine(w, eqx.filter(block, eqx.is_array, inverse=True))(x)
    )(eqx.filter(block, eqx.is_array), x),
    "mapped function": lambda block, x: eqx.filter_vmap(lambda b, x: b(x), in_axes=(None, 0))(
        block, x[None]
    )[0],
    "tree_at": lambda block, x: eqx.tree_at(lambda b: b.linear.bias, block, block.linear.bias)(x),
    "inference_mode": lambda block, x: eqx.nn.inference_mode(block)(x),
    "combine": lambda block, x: eqx.combine(*eqx.partition(block, eqx.is_array))(x),
}


class Net(eqx.Module):
    blocks: list
    ends: dict
    how: str

    def __init__(self, how="plain"):
        self.blocks = [Block(i) for i in range(3)]
        self.ends = {"head": linear(9)}
        self.how = how

    def __call__(self, x):
        for block in self.blocks:
            x = HOW[self.how](block, x)
        return self.ends["head"](x)

    def encode(self, x):
        return self.blocks[0](x)

    @eqx.filter_jit
    def jitted(self, x):
        return self.blocks[0](x)


def by_hand(net, x, eps):
    """Run the network in plain JAX, with `eps` added to every value; return result and values."""
    seen = {}

    def tap(name, value):
        seen[name] = value + eps.get(name, 0.0)
        return seen[name]

    for i, block in enumerate(net.blocks):
        h = x @ block.linear.weight.T + block.linear.bias
        h = tap(f"Net/blocks/{i}/drop", tap(f"Net/blocks/{i}/linear", h))
        x = tap(f"Net/blocks/{i}", jnp.tanh(h) + x)
    x = tap("Net/ends/head", x @ net.ends["head"].weight.T + net.ends["head"].bias)
    return tap("Net", x), seen


def expected(net, x):
    """Compute values, and the gradients of `mean_square`, in plain JAX."""
    _, values = by_hand(net, x, {})
    zeros = jax.tree.map(jnp.zeros_like, values)
    return values, jax.grad(lambda eps: jnp.mean(by_hand(net, x, eps)[0] ** 2))(zeros)


def mean_square(net, x):
    return jnp.mean(jax.vmap(net)(x) ** 2)


def close(found, wanted):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        # Some transformations map over an axis of length one.
        got = np.asarray(found[name])
        assert [n for n in got.shape if n > 1] == [n for n in value.shape if n > 1]
        got = got.reshape(value.shape)
        assert_close(got, value, err_msg=name)


optimizer = optax.adam(1e-2)


def step(model, state, x):
    loss, grads = eqx.filter_value_and_grad(mean_square)(model, x)
    updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss


EAGER = ["plain", "filter_checkpoint", "nested", "jitted function", "jax.checkpoint"]


@pytest.mark.parametrize(
    ("how", "jit"),
    [
        *((how, eqx.filter_jit) for how in HOW),
        *(pytest.param(how, lambda f: f, marks=pytest.mark.many) for how in EAGER),
    ],
)
def test_train_step_of_an_equinox_model(how, jit):
    model = Net(how)
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    train = jit(step)
    plain = train(model, state, X)
    out, taps = tapax.capture(train)(model, state, X)
    values, grads = expected(model, X)
    close(taps.values, values)
    close(taps.grads, grads)
    assert jax.tree.structure(out) == jax.tree.structure(plain)
    for a, b in zip(*map(jax.tree.leaves, (out, plain)), strict=True):
        if eqx.is_array(a):
            assert_close(a, b)
        else:
            assert a == b


@pytest.mark.parametrize("how", HOW)
def test_a_closed_over_model_is_captured(how):
    model = Net(how)
    _, taps = tapax.capture(lambda x: jax.vmap(model)(x))(X)
    close(taps.values, expected(model, X)[0])


@pytest.mark.parametrize(
    "fn",
    [
        lambda net: net,
        lambda net: eqx.filter_jit(net),
        lambda net: lambda x: net(x),
        lambda net: eqx.Partial(lambda net, x: net(x), net),
        lambda net: functools.partial(lambda net, x: net(x), net),
        lambda net: jax.jit(lambda x: net(x)),
    ],
)
def test_a_module_may_be_the_captured_function(fn):
    model = Net()
    out, taps = tapax.capture(fn(model))(X[0])
    close(taps.values, expected(model, X[0])[0])
    assert_close(out, model(X[0]))


def test_arrays_of_the_captured_module_are_arguments():
    model = Net()
    traces = []
    HOW["counted"] = lambda block, x: traces.append(0) or block(x)
    model = eqx.tree_at(lambda m: m.how, model, "counted")
    captured = tapax.capture(lambda m, x: m(x))
    captured(model, X[0])
    changed = eqx.tree_at(lambda m: m.ends["head"].bias, model, jnp.ones(D))
    _, taps = captured(changed, X[0])
    close(taps.values, expected(changed, X[0])[0])
    assert len(traces) == 3  # one trace, with three blocks
    # A second module is a new function, which must not use the weights of the first.
    _, taps = tapax.capture(changed)(X[0])
    close(taps.values, expected(changed, X[0])[0])


@pytest.mark.parametrize(
    ("fn", "method"),
    [
        (lambda net: net.encode, "encode"),
        (lambda net: eqx.filter_jit(net.encode), "encode"),
        (lambda net: lambda x: net.encode(x), "encode"),
        (lambda net: net.jitted, "jitted"),
        (lambda net: lambda x: net.jitted(x), "jitted"),
    ],
)
def test_methods_of_a_module_are_sites(fn, method):
    net = Net()
    out, taps = tapax.capture(fn(net))(X[0])
    values = expected(net, X[0])[0]
    wanted = {f"Net.{method}": values["Net/blocks/0"]}
    wanted |= {name: v for name, v in values.items() if name.startswith("Net/blocks/0")}
    close(taps.values, wanted)
    (site,) = [site for site in taps.sites if site.method == method]
    assert site.module is Net


def test_a_bound_method_under_vmap_is_a_site():
    net = Net()
    bound = net.encode  # bound before the capture
    for fn in (jax.vmap(bound), eqx.filter_vmap(bound), lambda x: jax.vmap(net.encode)(x)):
        _, taps = tapax.capture(fn)(X)
        assert taps.values["Net.encode"].shape == (B, D)


def test_methods_of_blocks_are_sites():
    class Encoders(eqx.Module):
        blocks: tuple

        def __call__(self, x):
            for block in self.blocks:
                x = eqx.filter_jit(block.encode)(x)
            return x

    _, taps = tapax.capture(Encoders((Block(0), Block(1))))(X[0])
    names = ["", ".encode", "/drop", "/linear"]
    assert set(taps.values) == {"Encoders"} | {
        f"Encoders/blocks/{i}{name}" for i in range(2) for name in names
    }


def test_sow_in_a_module_has_its_path():
    class Sowing(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            return tapax.sow(self.linear(x), "h") * 2

    class Outer(eqx.Module):
        parts: list

        def __call__(self, x):
            for part in self.parts:
                x = eqx.filter_checkpoint(part)(x)
            return x

    _, taps = tapax.capture(Outer([Sowing(linear(0)), Sowing(linear(1))]))(X[0])
    first = linear(0)(X[0])
    assert_close(taps.values["Outer/parts/0/h"], first)
    assert_close(taps.values["Outer/parts/1/h"], linear(1)(2 * first))


def test_calls_and_roots_of_one_class_are_told_apart():
    _, taps = tapax.capture(lambda a, b, x: a(b(a(x))))(linear(0), linear(1), X[0])
    assert list(taps.values) == ["a", "b", "a@1"]
    first = linear(0)(X[0])
    assert_close(taps.values["b"], linear(1)(first))


def test_a_part_of_a_model_called_alone_keeps_its_path():
    net = Net()
    _, taps = tapax.capture(lambda net, x: net.blocks[1].linear(x))(net, X[0])
    close(taps.values, {"Net/blocks/1/linear": net.blocks[1].linear(X[0])})


def test_values_and_gradients_stay_in_bfloat16():
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, Net())
    x = X.astype(jnp.bfloat16)
    _, taps = tapax.capture(eqx.filter_grad(mean_square))(model, x)
    assert all(v.dtype == jnp.bfloat16 for v in [*taps.values.values(), *taps.grads.values()])
    assert len(taps.grads) == 11


def test_numbers_in_modules_are_static():
    traces = []

    class Numbers(eqx.Module):
        times: int
        scale: float
        drop: eqx.nn.Dropout

        def __call__(self, x, add=0):
            traces.append((type(self.scale), type(add)))
            for _ in range(self.times):
                x = x * self.scale
            return self.drop(x, inference=True) + add

    make = lambda times, scale=0.5: Numbers(times, scale, eqx.nn.Dropout(0.1))
    captured = tapax.capture(lambda m, x, add: m(x, add))
    for add in (1, 2):
        captured(make(2), X[0], add)
    assert len(traces) == 1 and traces[0][0] is float and traces[0][1] is not int
    assert_close(captured(make(3), X[0], 1)[0], X[0] / 8 + 1)
    assert_close(captured(make(2, jnp.array(0.5)), X[0], 1)[0], X[0] / 4 + 1)
    traces.clear()
    captured = tapax.capture(eqx.filter_jit(lambda m, x, add: m(x, add)))
    captured(make(2), X[0], 1)
    captured(make(2), X[0], 1)
    assert traces == [(float, int)]


def test_a_capture_leaves_cached_traces_alone():
    train = eqx.filter_jit(eqx.filter_value_and_grad(mean_square))
    model = Net("jitted function")
    before = train(model, X)
    _, taps = tapax.capture(train)(model, X)
    close(taps.values, expected(model, X)[0])
    after = train(model, X)
    for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        if eqx.is_array(a):
            np.testing.assert_array_equal(a, b)


def test_selections_of_equinox_modules():
    net = Net()
    assert not tapax.capture(net, modules=False)(X[0])[1].values
    _, taps = tapax.capture(net, "Net/blocks/*/linear", modules=lambda m, method: True)(X[0])
    assert list(taps.values) == [f"Net/blocks/{i}/linear" for i in range(3)]
    only = lambda module, method: isinstance(module, Block) and method == "__call__"
    _, taps = tapax.capture(net, modules=only)(X[0])
    assert list(taps.values) == [f"Net/blocks/{i}" for i in range(3)]
    _, taps = tapax.capture(net, modules="**/head")(X[0])
    assert list(taps.values) == ["Net/ends/head"]
    with pytest.raises(SiteError, match="Net/blocks/7"):
        tapax.capture(net, "Net/blocks/7")(X[0])


class Failing(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        self.linear(x)
        raise RuntimeError("halfway")


def test_an_exception_restores_equinox():
    before = attributes()[eqx.nn.Linear]
    model = Failing(linear())
    for fn in (model, eqx.filter_jit(model), eqx.filter_checkpoint(model), jax.grad(model)):
        with pytest.raises(RuntimeError, match="halfway"):
            tapax.capture(fn)(X[0])
        assert attributes()[eqx.nn.Linear] == before
    _, taps = tapax.capture(Net())(X[0])
    close(taps.values, expected(Net(), X[0])[0])


def test_captures_of_equinox_models_nest():
    net = Net()

    def outer(x):
        y, inner = tapax.capture(net.blocks[0])(x)
        return net(y), inner.values

    (out, inner), taps = tapax.capture(outer)(X[0])
    assert set(inner) == {"Block", "Block/linear", "Block/drop"}
    y = net.blocks[0](X[0])
    assert_close(taps.values["Net/blocks/0"], net.blocks[0](y))
    assert_close(out, net(y))


def test_threads_capture_equinox_models_at_once():
    net, seen, failed = Net("filter_checkpoint"), [], []
    start = threading.Barrier(4)

    def work(i):
        try:
            start.wait()
            for _ in range(2):
                if i % 2:
                    seen.append(tapax.capture(lambda m, x: m(x))(net, X[0])[1].values)
                else:
                    net(X[0])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(seen) == 4
    for values in seen:
        close(values, expected(net, X[0])[0])


def test_modules_are_copied_under_capture():
    net = Net()

    def run(x):
        return copy.deepcopy(net)(x) + pickle.loads(pickle.dumps(net))(x)

    out, taps = tapax.capture(run)(X[0])
    assert_close(out, 2 * net(X[0]))
    values = expected(net, X[0])[0]
    close(taps.values, values | {f"{name}@1": value for name, value in values.items()})
