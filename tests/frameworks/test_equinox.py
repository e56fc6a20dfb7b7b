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
from tapax._patch import subclasses
from tests.oracles.closeness import assert_close

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
    """The network in plain JAX: what it returns, and every value, to each of which eps is added."""
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
    """Values, and the gradients of `mean_square`, by plain JAX."""
    _, values = by_hand(net, x, {})
    zeros = jax.tree.map(jnp.zeros_like, values)
    return values, jax.grad(lambda eps: jnp.mean(by_hand(net, x, eps)[0] ** 2))(zeros)


def mean_square(net, x):
    return jnp.mean(jax.vmap(net)(x) ** 2)


def close(found, wanted):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        # Some map over an axis of one.
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
    [*((how, eqx.filter_jit) for how in HOW), *((how, lambda f: f) for how in EAGER)],
)
def test_train_step(how, jit):
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
def test_model_closed_over(how):
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
def test_module_as_function(fn):
    model = Net()
    out, taps = tapax.capture(fn(model))(X[0])
    close(taps.values, expected(model, X[0])[0])
    assert_close(out, model(X[0]))


def test_arrays_of_the_captured_module_are_no_constants():
    model = Net()
    traces = []
    HOW["counted"] = lambda block, x: traces.append(0) or block(x)
    model = eqx.tree_at(lambda m: m.how, model, "counted")
    captured = tapax.capture(lambda m, x: m(x))
    captured(model, X[0])
    changed = eqx.tree_at(lambda m: m.ends["head"].bias, model, jnp.ones(D))
    _, taps = captured(changed, X[0])
    close(taps.values, expected(changed, X[0])[0])
    assert len(traces) == 3  # blocks, in one trace
    # Another module is another function, and never that of the first one's weights.
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
def test_methods(fn, method):
    net = Net()
    out, taps = tapax.capture(fn(net))(X[0])
    values = expected(net, X[0])[0]
    wanted = {f"Net.{method}": values["Net/blocks/0"]}
    wanted |= {name: v for name, v in values.items() if name.startswith("Net/blocks/0")}
    close(taps.values, wanted)
    (site,) = [site for site in taps.sites if site.method == method]
    assert site.module is Net


def test_method_under_vmap():
    net = Net()
    bound = net.encode  # before anything is captured
    for fn in (jax.vmap(bound), eqx.filter_vmap(bound), lambda x: jax.vmap(net.encode)(x)):
        _, taps = tapax.capture(fn)(X)
        assert taps.values["Net.encode"].shape == (B, D)


def test_method_of_blocks():
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


class Wrapped(eqx.Module):
    """Its parts are wrapped, each in another way."""

    parts: list
    fixed: object = eqx.field(static=True)
    activation: object = jax.nn.relu

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return self.activation(self.fixed(x))

    @eqx.filter_jit
    def jitted(self, x):
        return self.parts[0](x)


@pytest.fixture
def wrapped():
    wrappers = [eqx.filter_jit, eqx.filter_checkpoint, eqx.filter_checkpoint, eqx.Partial]
    parts = [wrap(linear(i)) for i, wrap in enumerate(wrappers)]
    return Wrapped([*parts, linear(4), eqx.nn.Lambda(jnp.sin)], eqx.nn.Identity())


@pytest.mark.parametrize("outer", [lambda f: f, eqx.filter_jit])
def test_wrapped_attributes(wrapped, outer):
    fn = outer(eqx.filter_value_and_grad(lambda m, x: jnp.sum(m(x))))
    _, taps = tapax.capture(fn)(wrapped, X[0])
    x, values = X[0], {}
    for i in range(5):
        x = values[f"Wrapped/parts/{i}"] = linear(i)(x)
    x = values["Wrapped/parts/5"] = values["Wrapped/fixed"] = jnp.sin(x)
    values["Wrapped"] = jax.nn.relu(x)
    close(taps.values, values)
    assert set(taps.grads) == set(values)
    _, taps = tapax.capture(wrapped.jitted)(X[0])
    close(taps.values, {name: linear()(X[0]) for name in ("Wrapped.jitted", "Wrapped/parts/0")})


class Stacked(eqx.Module):
    layers: Block
    head: eqx.nn.Linear

    def __init__(self):
        self.layers = eqx.filter_vmap(Block)(jnp.arange(3))
        self.head = linear(9)

    def __call__(self, x):
        arrays, rest = eqx.partition(self.layers, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, layer: (eqx.combine(layer, rest)(x), None), x, arrays)
        return self.head(x)


def test_scan_over_stacked_layers():
    _, taps = tapax.capture(eqx.filter_jit(eqx.filter_value_and_grad(mean_square)))(Stacked(), X)
    values, grads = expected(Net(), X)
    assert set(taps.values) == {"Stacked", "Stacked/head"} | {
        f"Stacked/layers{name}" for name in ("", "/linear", "/drop")
    }
    for found, wanted in ((taps.values, values), (taps.grads, grads)):
        for name in ("", "/linear", "/drop"):
            each = jnp.stack([wanted[f"Net/blocks/{i}{name}"] for i in range(3)])
            got = found[f"Stacked/layers{name}"]
            got = got if got.shape == each.shape else jnp.swapaxes(got, 0, 1)
            assert_close(got, each)


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self):
        self.linear, self.norm = linear(), eqx.nn.BatchNorm(D, "batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


def over_batch(model, state, x):
    mapped = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return mapped(x, state)


def test_state_is_no_result():
    model, state = eqx.nn.make_with_state(Normed)()
    out, new = over_batch(model, state, X)
    _, state = eqx.nn.make_with_state(Normed)()
    (found, found_state), taps = tapax.capture(eqx.filter_jit(over_batch))(model, state, X)
    assert set(taps.values) == {"Normed:0", "Normed/norm:0", "Normed/linear"}
    assert_close(taps.values["Normed/norm:0"], out)
    for a, b in zip(*map(jax.tree.leaves, (new, found_state)), strict=True):
        assert_close(a, b)


def test_stateful_sequential():
    layers = lambda: [
        linear(),
        eqx.nn.BatchNorm(D, "batch", mode="batch"),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Dropout(0.5),
    ]
    model, state = eqx.nn.make_with_state(lambda: eqx.nn.Sequential(layers()))()
    keys = jax.random.split(jax.random.key(0), B)

    def run(model, state, x, keys):
        one = lambda x, state, key: model(x, state, key=key)
        axes = {"axis_name": "batch", "in_axes": (0, None, 0), "out_axes": (0, None)}
        return jax.vmap(one, **axes)(x, state, keys)

    (out, _), taps = tapax.capture(run)(model, state, X, keys)
    names = ["0", "1:0", "2", "3"]
    assert set(taps.values) == {"Sequential:0", *(f"Sequential/layers/{name}" for name in names)}
    hidden = taps.values["Sequential/layers/2"]
    assert_close(hidden, jax.nn.relu(taps.values["Sequential/layers/1:0"]))
    dropped = [
        eqx.nn.Dropout(0.5)(h, key=jax.random.split(key, 4)[3])
        for h, key in zip(hidden, keys, strict=True)
    ]
    assert_close(out, jnp.stack(dropped))


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self):
        embed = eqx.nn.Embedding(D, D, key=jax.random.key(3))
        out = eqx.nn.Linear(D, D, use_bias=False, key=jax.random.key(4))
        pair = embed, out, eqx.nn.Linear(D, D, use_bias=False, key=jax.random.key(5))
        self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

    def __call__(self, token):
        embed, out, last = self.shared()
        return last(out(embed(token)))


def test_shared():
    model = Tied()
    loss = lambda model, token: jnp.sum(model(token) ** 2)
    _, taps = tapax.capture(eqx.filter_jit(eqx.filter_value_and_grad(loss)))(model, jnp.array(2))
    embed, _, last = model.shared.pytree
    values = {"Tied/shared/pytree/0": embed.weight[2]}
    values["Tied/shared/pytree/1"] = embed.weight @ embed.weight[2]
    values["Tied/shared/pytree/2"] = last.weight @ values["Tied/shared/pytree/1"]
    values["Tied"] = values["Tied/shared/pytree/2"]
    close(taps.values, values)
    out = 2 * values["Tied"]
    grads = {"Tied": out, "Tied/shared/pytree/2": out}
    grads["Tied/shared/pytree/1"] = last.weight.T @ out
    grads["Tied/shared/pytree/0"] = embed.weight.T @ grads["Tied/shared/pytree/1"]
    close(taps.grads, grads)


def test_attention():
    attention = eqx.nn.MultiheadAttention(2, D, key=jax.random.key(0))
    out, taps = tapax.capture(attention)(X, X, X)
    parts = ["query_proj", "key_proj", "value_proj", "output_proj", "dropout"]
    assert set(taps.values) == {"MultiheadAttention"} | {f"MultiheadAttention/{p}" for p in parts}
    query = X @ attention.query_proj.weight.T
    assert_close(taps.values["MultiheadAttention/query_proj"], query)
    assert_close(taps.values["MultiheadAttention"], attention(X, X, X))


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell

    def __call__(self, xs):
        return jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(D), xs)[0]


def test_recurrent_cell_in_a_scan():
    model = Recurrent(eqx.nn.GRUCell(D, D, key=jax.random.key(0)))
    loss = eqx.filter_jit(eqx.filter_grad(lambda m, x: jnp.sum(m(x) ** 2)))
    _, taps = tapax.capture(loss)(model, X)

    def run(eps):
        h, seen = jnp.zeros(D), []
        for x, e in zip(X, eps, strict=True):
            h = model.cell(x, h) + e
            seen.append(h)
        return jnp.sum(h**2), jnp.stack(seen)

    grads, values = jax.grad(run, has_aux=True)(jnp.zeros((B, D)))
    assert_close(taps.values["Recurrent/cell"], values)
    assert_close(taps.grads["Recurrent/cell"], grads)


@pytest.mark.parametrize(
    "fn",
    [
        lambda m, x: eqx.filter_closure_convert(m, x)(x),
        lambda m, x: eqx.filter_jvp(m, (x,), (x,))[0],
        lambda m, x: eqx.filter_vjp(m, x)[0],
        lambda m, x: eqx.filter_eval_shape(m, x) and m(x),
    ],
)
def test_other_transformations(fn):
    net = Net()
    _, taps = tapax.capture(fn)(net, X[0])
    close(taps.values, expected(net, X[0])[0])


def test_ensemble():
    models = eqx.filter_vmap(Block)(jnp.arange(3))
    run = eqx.filter_vmap(lambda m, x: m(x), in_axes=(eqx.if_array(0), None))
    _, taps = tapax.capture(run)(models, X[0])
    each = jnp.stack([Block(i).linear(X[0]) for i in range(3)])
    assert_close(taps.values["Block/linear"], each)


def test_a_module_that_is_a_record_of_results():
    class Output(eqx.Module):
        logits: jax.Array
        count: int

    class Head(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            return Output(self.linear(x), 3)

    out, taps = tapax.capture(Head(linear()))(X[0])
    assert set(taps.values) == {"Head:logits", "Head/linear"} and out.count == 3


def test_an_ancestor_and_a_part_of_it_called_from_within():
    class Inner(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x, outer):
            return outer.helped(x)

    class Outer(eqx.Module):
        inner: Inner
        last: eqx.nn.Linear

        def __call__(self, x):
            return self.inner(x, self)

        def helped(self, x):
            return self.inner.linear(self.last(x))

    _, taps = tapax.capture(Outer(Inner(linear()), linear(1)))(X[0])
    last = linear(1)(X[0])
    out = linear()(last)
    names = ["Outer", "Outer.helped", "Outer/inner", "Outer/inner/linear"]
    close(taps.values, {"Outer/last": last, **dict.fromkeys(names, out)})


def test_super_is_a_part_of_the_method():
    class Twice(Block):
        def __call__(self, x):
            return 2 * super().__call__(x)

    _, taps = tapax.capture(Twice(0))(X[0])
    close({"Twice": taps.values["Twice"]}, {"Twice": 2 * (jnp.tanh(linear()(X[0])) + X[0])})
    assert set(taps.values) == {"Twice", "Twice/linear", "Twice/drop"}


def test_sow_in_a_module():
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


def test_calls_and_roots_of_one_class():
    _, taps = tapax.capture(lambda a, b, x: a(b(a(x))))(linear(0), linear(1), X[0])
    assert list(taps.values) == ["Linear", "Linear@1", "Linear@2"]
    first = linear(0)(X[0])
    assert_close(taps.values["Linear@1"], linear(1)(first))


def test_a_part_of_a_model_called_alone():
    net = Net()
    _, taps = tapax.capture(lambda net, x: net.blocks[1].linear(x))(net, X[0])
    close(taps.values, {"Net/blocks/1/linear": net.blocks[1].linear(X[0])})


def test_bfloat16_stays():
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


def test_cached_before_and_after():
    train = eqx.filter_jit(eqx.filter_value_and_grad(mean_square))
    model = Net("jitted function")
    before = train(model, X)
    _, taps = tapax.capture(train)(model, X)
    close(taps.values, expected(model, X)[0])
    after = train(model, X)
    for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        if eqx.is_array(a):
            np.testing.assert_array_equal(a, b)


def test_selections():
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


# --- Equinox is left as it was found -----------------------------------------------------------


def attributes():
    """The attributes of all classes, but for what `pickle` keeps in them."""
    return {
        cls: {k: v for k, v in cls.__dict__.items() if k != "__slotnames__"}
        for cls in subclasses(eqx.Module)
    }


@pytest.fixture(autouse=True)
def equinox_as_before():
    before = attributes()
    yield
    after = attributes()
    for cls, names in before.items():
        assert {k: id(v) for k, v in names.items()} == {k: id(v) for k, v in after[cls].items()}


class Failing(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        self.linear(x)
        raise RuntimeError("halfway")


def test_exception_halfway():
    before = attributes()[eqx.nn.Linear]
    model = Failing(linear())
    for fn in (model, eqx.filter_jit(model), eqx.filter_checkpoint(model), jax.grad(model)):
        with pytest.raises(RuntimeError, match="halfway"):
            tapax.capture(fn)(X[0])
        assert attributes()[eqx.nn.Linear] == before
    _, taps = tapax.capture(Net())(X[0])
    close(taps.values, expected(Net(), X[0])[0])


def test_nested_captures():
    net = Net()

    def outer(x):
        y, inner = tapax.capture(net.blocks[0])(x)
        return net(y), inner.values

    (out, inner), taps = tapax.capture(outer)(X[0])
    assert set(inner) == {"Block", "Block/linear", "Block/drop"}
    y = net.blocks[0](X[0])
    assert_close(taps.values["Net/blocks/0"], net.blocks[0](y))
    assert_close(out, net(y))


def test_threads():
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


def test_copies_under_capture():
    net = Net()

    def run(x):
        return copy.deepcopy(net)(x) + pickle.loads(pickle.dumps(net))(x)

    out, taps = tapax.capture(run)(X[0])
    assert_close(out, 2 * net(X[0]))
    values = expected(net, X[0])[0]
    close(taps.values, values | {f"{name}@1": value for name, value in values.items()})
