"""Unmodified models of Flax NNX: every module is a site, under every transformation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import tapax
from tests.models.nnx_models import (
    Block,
    Net,
    X,
    affine,
    arrays,
    by_hand,
    check,
    close,
    grads,
    loss,
    values,
)
from tests.oracles.closeness import assert_close


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.lin = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(jnp.tanh(self.norm(self.lin(x))))


class Full(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Layer(rngs), Layer(rngs)])
        self.head = nnx.Linear(3, 1, rngs=rngs)
        self.steps = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.steps[...] += 1
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@nnx.jit
def train_step(model, optimizer, x, y):
    value, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, gradients)
    return value


def training():
    model = Full()
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@pytest.mark.parametrize("eager", [False, True], ids=["jit", "eager"])
def test_train_step_leaves_the_state_of_the_plain_one(eager):
    """Momenta, batch statistics, random streams and counts agree after every step."""
    step = train_step.__wrapped__ if eager else train_step
    plain, ours = training(), training()
    train_step(*training(), X, X[:, :1])  # the plain step ran before
    captured = tapax.capture(step)
    for i in range(4):
        x = X + i
        expected = step(*plain, x, x[:, :1])
        out, taps = captured(*ours, x, x[:, :1])
        close(out, expected)
        for a, b in zip(arrays(plain), arrays(ours), strict=True):
            assert_close(a, b)
    assert int(ours[0].steps[...]) == 4 == int(ours[1].step[...])
    layers = {f"Full/layers/{i}{part}" for i in (0, 1) for part in ("", "/lin", "/norm", "/drop")}
    assert set(taps.values) == set(taps.grads) == {*layers, "Full/head", "Full"}


def test_train_step_is_the_plain_one_bit_for_bit_op_by_op():
    plain, ours = training(), training()
    with jax.disable_jit():
        for _ in range(2):
            expected = train_step(*plain, X, X[:, :1])
            out, _ = tapax.capture(train_step)(*ours, X, X[:, :1])
            assert np.array_equal(out, expected)
    for a, b in zip(arrays(plain), arrays(ours), strict=True):
        assert np.array_equal(a, b)


def test_train_step_values_and_gradients():
    (model, optimizer), (twin, _) = training(), training()
    _, taps = tapax.capture(train_step)(model, optimizer, X, X[:, :1])

    def forward(shift):
        """Run the layers by hand, on a second model with the same state."""
        model, seen, x = nnx.clone(twin), {}, X

        def at(name, value):
            seen[f"Full/{name}"] = value + (shift.get(f"Full/{name}", 0))
            return seen[f"Full/{name}"]

        for i, layer in enumerate(model.layers):
            x = at(f"layers/{i}/lin", layer.lin(x))
            x = jnp.tanh(at(f"layers/{i}/norm", layer.norm(x)))
            x = at(f"layers/{i}", at(f"layers/{i}/drop", layer.drop(x)))
        x = at("head", model.head(x))
        return jnp.mean((x - X[:, :1]) ** 2), seen

    zeros = jax.tree.map(jnp.zeros_like, forward({})[1])
    expected, seen = jax.grad(forward, has_aux=True)(zeros)
    for name, value in seen.items():
        close(taps.values[name], value)
        close(taps.grads[name], expected[name])


@nnx.custom_vjp
def custom(m, x):
    return m(x)


def _forward(m, x):
    return custom(m, x), (m, x)


def _backward(residuals, g):
    m, x = residuals
    return nnx.grad(lambda m, x: jnp.sum(m(x) * g[1]), argnums=(0, 1))(m, x)


custom.defvjp(_forward, _backward)


def merged(f):
    def run(m, x):
        graphdef, params, rest = nnx.split(m, nnx.Param, ...)
        return f(nnx.merge(graphdef, params, rest), x)

    return run


WRAPS = {
    "nothing": lambda f: f,
    "nnx.jit": nnx.jit,
    "nnx.remat": nnx.remat,
    "nnx.vmap": lambda f: nnx.vmap(f, in_axes=(None, 0)),
    "nnx.jit, tree": lambda f: nnx.jit(f, graph=False),
    "nnx.jit, no updates": lambda f: nnx.jit(f, graph=True, graph_updates=False),
    "nnx.jit of nnx.remat": lambda f: nnx.jit(nnx.remat(f)),
    "split and merge": merged,
    "jax.jit": jax.jit,
    "jax.checkpoint": jax.checkpoint,
    "jax.vmap": lambda f: jax.vmap(f, in_axes=(None, 0)),
    "jax.jit of split and merge": lambda f: jax.jit(merged(f)),
    "cached_partial": lambda f: lambda m, x: nnx.cached_partial(nnx.jit(f), m)(x),
}

CLOSED = [name for name in WRAPS if "split" not in name and "cached" not in name]


@pytest.mark.parametrize(
    ("name", "closed"),
    [
        *((name, False) for name in WRAPS),
        *(pytest.param(name, True, marks=pytest.mark.many) for name in CLOSED),
    ],
)
def test_values_under_every_transformation(name, closed):
    wrap = WRAPS[name]
    model = Net()

    def run(m, x):
        if closed:
            return wrap(lambda _, x: m(x))(jnp.zeros(()), x)
        return wrap(lambda m, x: m(x))(m, x)

    for _ in range(2):  # the second call uses the caches of the inner jitted functions
        out, taps = tapax.capture(run)(model, X)
        check(taps.values, values(model, X))
        close(out, by_hand(model, X)[0])


TAKES = {
    "nnx.grad": nnx.grad,
    "nnx.value_and_grad": nnx.value_and_grad,
    "jax.grad": jax.grad,
    "jax.value_and_grad": jax.value_and_grad,
}


@pytest.mark.parametrize(
    ("name", "take"), [(name, "nnx.grad") for name in WRAPS] + [("nothing", name) for name in TAKES]
)
def test_gradients_under_every_transformation(name, take):
    model, wrap, take = Net(), WRAPS[name], TAKES[take]
    step = take(lambda m, x: jnp.sum(wrap(lambda m, x: m(x))(m, x) ** 2))
    _, taps = tapax.capture(nnx.jit(step))(model, X)
    check(taps.values, values(model, X))
    check(taps.grads, grads(model, X))


def test_gradient_of_an_input_with_the_model_closed_over():
    model = Net()
    f = jax.grad(lambda x: loss(model, x))
    out, taps = tapax.capture(f)(X)
    close(out, jax.grad(lambda x: jnp.sum(by_hand(model, x)[0] ** 2))(X))
    check(taps.grads, grads(model, X))


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "tree"])
@pytest.mark.parametrize("updates", [True, False], ids=["updates", "no updates"])
def test_graph_and_update_modes_of_nnx(graph, updates):
    class Stats(Net):
        def __init__(self):
            super().__init__()
            self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return super().__call__(self.norm(x))

    @nnx.jit
    def step(m, x):
        m(x)
        return nnx.grad(loss)(m, x)

    with nnx.set_graph_mode(graph), nnx.set_graph_updates(updates):
        plain, ours = Stats(), Stats()
        expected = step(plain, X)
        out, taps = tapax.capture(step)(ours, X)
        for a, b in zip(arrays((plain, expected)), arrays((ours, out)), strict=True):
            close(a, b)
    assert {"Stats/norm", "Stats/norm@1", "Stats/blocks/1/lin@1"} <= set(taps.values)
    assert set(taps.grads) == {name for name in taps.values if name.endswith("@1")}


def test_custom_vjp_of_nnx_modules():
    model = Net()
    step = nnx.jit(nnx.grad(lambda m, x: jnp.sum(custom(m, x) ** 2)))
    _, taps = tapax.capture(step)(model, X)
    first = {k: v for k, v in taps.values.items() if "@" not in k}
    check(first, values(model, X))
    second = {k.replace("@1", ""): v for k, v in taps.grads.items()}
    check(second, grads(model, X))  # from the recomputation in the backward pass


def test_branches_of_nnx_cond_and_switch():
    model = Net()

    def run(m, x, on):
        f, g = lambda m, x: m.encode(x), lambda m, x: m.blocks[1](x)
        return nnx.cond(on, f, g, m, x), nnx.switch(jnp.int32(on), [g, f], m, x)

    for on in (True, False):
        out, taps = tapax.capture(run)(model, X, jnp.array(on))
        x = values(model, X)["blocks/1"] if on else X + jnp.tanh(affine(X, model.blocks[1].lin))
        close(out[0], x)
        close(out[1], x)
        assert bool(taps.valid["Net.encode"]) == on == bool(taps.valid["Net.encode@1"])
        assert bool(taps.valid["Net/blocks/0/lin"]) == on


def test_loops_over_one_nnx_block():
    model, block = Net(), Net().blocks[0]
    xs, x = [], X
    for _ in range(3):
        x = x + jnp.tanh(affine(x, block.lin))
        xs.append(x)
    stacked = jnp.stack(xs)
    scan = nnx.scan(
        lambda m, c, _: (m.blocks[0](c), None),
        in_axes=(None, nnx.Carry, 0),
        out_axes=(nnx.Carry, 0),
    )
    runs = [
        (lambda m, x: scan(m, x, jnp.zeros(3))[0], stacked),
        (lambda m, x: lax.scan(lambda c, _: (m.blocks[0](c), None), x, length=3)[0], stacked),
        (
            lambda m, x: nnx.fori_loop(0, 3, lambda i, c: (c[0], c[0].blocks[0](c[1])), (m, x))[1],
            stacked,
        ),
        (
            lambda m, x: nnx.while_loop(
                lambda c: c[2] < 3, lambda c: (c[0], c[0].blocks[0](c[1]), c[2] + 1), (m, x, 0)
            )[1],
            xs[-1],
        ),
    ]
    for run, expected in runs:
        out, taps = tapax.capture(run)(model, X)
        close(out, xs[-1])
        assert set(taps.values) == {"Net/blocks/0", "Net/blocks/0/lin"}
        close(taps.values["Net/blocks/0"], expected)


@pytest.mark.parametrize("api", ["nnx", "jax", "jax, closed over"])
def test_shard_map_of_nnx_models(api):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"mesh": mesh, "out_specs": jax.P("a")}
    both = (jax.P(), jax.P("a"))

    def run(m, x):
        if api == "nnx":
            return nnx.shard_map(lambda m, x: m(x), in_specs=both, **specs)(m, x)
        if api == "jax":
            return jax.shard_map(lambda m, x: m(x), in_specs=both, **specs)(m, x)
        return jax.shard_map(lambda x: m(x), in_specs=(jax.P("a"),), **specs)(x)

    model = Net()
    out, taps = tapax.capture(run)(model, X)
    close(out, by_hand(model, X)[0])
    expected = {k: v.reshape(2, 2, -1) for k, v in values(model, X).items()}
    check(taps.values, expected)


class Stacked(nnx.Module):
    def __init__(self, remat=False):
        make = nnx.vmap(lambda rngs: Block(rngs), in_axes=0, out_axes=0)
        self.blocks = nnx.split_rngs(splits=3)(make)(nnx.Rngs(0))
        self.remat = remat

    def __call__(self, x):
        step = lambda x, block: block(x)
        step = nnx.remat(step) if self.remat else step
        return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_stacked_blocks(remat):
    model = Stacked(remat)
    _, taps = tapax.capture(nnx.jit(nnx.grad(loss)))(model, X)
    w, b = model.blocks.lin.kernel[...], model.blocks.lin.bias[...]

    def run(shift):
        x, seen = X, []
        for i in range(3):
            seen.append(x @ w[i] + b[i] + shift[i])
            x = x + jnp.tanh(seen[-1])
        return jnp.sum(x**2), jnp.stack(seen)

    expected, seen = jax.grad(run, has_aux=True)(jnp.zeros((3, 4, 3)))
    assert set(taps.values) == {"Stacked", "Stacked/blocks", "Stacked/blocks/lin"}
    close(taps.values["Stacked/blocks/lin"], seen)
    close(taps.grads["Stacked/blocks/lin"], expected)
    assert taps.sites["Stacked/blocks/lin"].loops == ("scan[3]",)


DECORATORS = {
    "nnx.jit": nnx.jit,
    "nnx.remat": nnx.remat,
    "jax.jit": jax.jit,
    "jax.checkpoint": jax.checkpoint,
}


@pytest.mark.parametrize("decorate", DECORATORS.values(), ids=DECORATORS)
@pytest.mark.parametrize("where", ["method", "call"])
def test_equal_blocks_keep_their_names(decorate, where):
    """Equal blocks keep their names although they share one trace."""

    class Inner(Block):
        __call__ = decorate(Block.__call__) if where == "method" else Block.__call__

    class Outer(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nnx.List([Inner(nnx.Rngs(i)) for i in range(2)])

        def __call__(self, x):
            for block in self.blocks:
                apply = decorate(lambda b, x: b(x)) if where == "call" else Inner.__call__
                x = apply(block, x)
            return self.head(x)

    model = Outer()
    _, taps = tapax.capture(nnx.jit(nnx.grad(loss)))(model, X)
    check(taps.values, values(model, X), "Outer")
    check(taps.grads, grads(model, X), "Outer")


WIDE = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


class NNXNet(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jnp.tanh(self.encode(x))

    def encode(self, x):
        return self.linear(x)


def test_a_bound_method_under_jit_is_a_site():
    model = NNXNet()
    expected = np.asarray(model(WIDE))
    _, taps = tapax.capture(jax.jit(model.__call__))(WIDE)
    assert set(taps.values) == {"NNXNet", "NNXNet.encode", "NNXNet/linear"}
    assert_close(taps.values["NNXNet"], expected)
    _, taps = tapax.capture(jax.jit(model.encode))(WIDE)
    assert_close(taps.values["NNXNet.encode"], model.encode(WIDE))


@pytest.mark.parametrize("jit", [lambda fn: fn, nnx.jit])
def test_a_variable_that_replaces_another_is_kept(jit):
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.BatchStat(jnp.zeros(2))
            self.nested = nnx.data({"count": nnx.BatchStat(jnp.zeros(2))})

        def __call__(self, x):
            self.count = nnx.BatchStat(self.count[...] + 1)
            self.nested = nnx.data({"count": nnx.BatchStat(self.nested["count"][...] + 2)})
            return x * self.count[...].sum()

    run, plain, seen = jit(lambda model, x: model(x)), Counter(), Counter()
    captured = tapax.capture(run)
    for _ in range(3):
        expected = run(plain, WIDE)
        out, taps = captured(seen, WIDE)
        assert_close(out, expected)
        assert_close(taps.values["Counter"], expected)
        assert_close(seen.count[...], plain.count[...])
        assert_close(seen.nested["count"][...], plain.nested["count"][...])


@pytest.mark.parametrize("jit", [lambda fn: fn, nnx.jit])
def test_the_running_average_of_a_bridged_linen_module_is_kept(jit):
    def make():
        norm = nn.BatchNorm(use_running_average=False)
        return nnx.bridge.lazy_init(nnx.bridge.ToNNX(norm, rngs=nnx.Rngs(0)), WIDE)

    run, plain, seen = jit(lambda model, x: model(x, mutable=["batch_stats"])), make(), make()
    expected = run(plain, WIDE)
    out, _ = tapax.capture(run)(seen, WIDE)
    assert_close(out, expected)
    assert np.any(plain.mean[...])
    assert_close(seen.mean[...], plain.mean[...])


def test_jit_of_a_module_keeps_its_identity():
    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    out, taps = tapax.capture(nnx.jit(linear))(WIDE)
    close(out, linear(WIDE))
    close(taps.values["Linear"], out)


def test_vmap_of_a_closure_sees_new_parameters():
    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    mapped = nnx.vmap(lambda x: linear(x))
    look = tapax.capture(mapped)
    for _ in range(2):
        close(look(WIDE)[0], mapped(WIDE))
        linear.kernel[...] *= 2


class Jitted(nnx.Module):
    """A model whose `__call__` is jitted by NNX."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.one, self.two = nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

    @nnx.jit
    def __call__(self, x):
        return self.two(jnp.tanh(self.one(x)))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(lambda x: f(x).sum()),
        lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
        lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())),
        lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
    ],
)
def test_a_model_jitted_by_nnx_in_a_transformation_of_jax(transform):
    """NNX itself raises TraceContextError, and leaves the model broken."""
    model, x = Jitted(), jnp.array([[0.3, -0.4], [1.0, 0.5]])
    grad, taps = tapax.capture(transform(lambda x: model(x)))(x)
    pre = x @ model.one.kernel[...] + model.one.bias[...]
    by_pre = (1 - jnp.tanh(pre) ** 2) * model.two.kernel[...][:, 0]
    assert_close(taps.values["Jitted/one"], pre)
    assert_close(taps.grads["Jitted/one"], by_pre)
    assert_close(grad, by_pre @ model.one.kernel[...].T)
    assert_close(model(x), jnp.tanh(pre) @ model.two.kernel[...] + model.two.bias[...])
