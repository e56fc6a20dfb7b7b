"""Equinox models of many kinds: wrapped, stacked, stateful, shared, recurrent modules."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tests.frameworks.test_equinox import B, Block, D, Net, X, close, expected, linear, mean_square
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.usefixtures("equinox_as_before")


class Wrapped(eqx.Module):
    """A model whose parts are wrapped, each in another way."""

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
def test_modules_wrapped_by_filter_functions_are_sites(wrapped, outer):
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


def test_scan_over_stacked_layers_stacks_values():
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


def test_state_is_not_part_of_the_result():
    model, state = eqx.nn.make_with_state(Normed)()
    out, new = over_batch(model, state, X)
    _, state = eqx.nn.make_with_state(Normed)()
    (found, found_state), taps = tapax.capture(eqx.filter_jit(over_batch))(model, state, X)
    assert set(taps.values) == {"Normed:0", "Normed/norm:0", "Normed/linear"}
    assert_close(taps.values["Normed/norm:0"], out)
    for a, b in zip(*map(jax.tree.leaves, (new, found_state)), strict=True):
        assert_close(a, b)


def test_stateful_sequential_of_batch_norm_and_dropout_is_captured():
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


def test_layers_in_a_shared_node_have_paths():
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


def test_layers_in_a_shared_node_outside_of_a_model_have_paths():
    layers = [eqx.nn.Linear(D, D, key=jax.random.key(i)) for i in range(2)]
    shared = eqx.nn.Shared(tuple(layers), lambda pair: pair[1].weight, lambda pair: pair[0].weight)

    def loss(shared, x):
        first, second = shared()
        return jnp.sum(second(first(x)) ** 2)

    first = layers[0](X[0])
    second = layers[0].weight @ first + layers[1].bias
    values = {"Shared/pytree/0": first, "Shared/pytree/1": second}
    _, taps = tapax.capture(eqx.filter_jit(eqx.filter_grad(loss)))(shared, X[0])
    close(taps.values, values)
    assert_close(taps.grads["Shared/pytree/1"], 2 * second)
    edited = tapax.edit(loss, values={"Shared/pytree/0": 0.0})(shared, X[0])
    assert_close(edited, jnp.sum(layers[1].bias ** 2))


def test_projections_of_attention_are_sites():
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


def test_recurrent_cell_in_a_scan_is_captured():
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
def test_modules_are_captured_under_other_transformations(fn):
    net = Net()
    _, taps = tapax.capture(fn)(net, X[0])
    close(taps.values, expected(net, X[0])[0])


def test_ensemble_of_blocks_is_captured_under_filter_vmap():
    models = eqx.filter_vmap(Block)(jnp.arange(3))
    run = eqx.filter_vmap(lambda m, x: m(x), in_axes=(eqx.if_array(0), None))
    _, taps = tapax.capture(run)(models, X[0])
    each = jnp.stack([Block(i).linear(X[0]) for i in range(3)])
    assert_close(taps.values["Block/linear"], each)


def test_a_module_may_be_a_record_of_results():
    class Output(eqx.Module):
        logits: jax.Array
        count: int

    class Head(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            return Output(self.linear(x), 3)

    out, taps = tapax.capture(Head(linear()))(X[0])
    assert set(taps.values) == {"Head:logits", "Head/linear"} and out.count == 3


def test_a_module_may_call_an_ancestor_and_its_parts():
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


def test_super_is_part_of_the_method():
    class Twice(Block):
        def __call__(self, x):
            return 2 * super().__call__(x)

    _, taps = tapax.capture(Twice(0))(X[0])
    close({"Twice": taps.values["Twice"]}, {"Twice": 2 * (jnp.tanh(linear()(X[0])) + X[0])})
    assert set(taps.values) == {"Twice", "Twice/linear", "Twice/drop"}


ROWS = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


class Small(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        return jnp.tanh(self.linear(x))

    @eqx.filter_checkpoint
    def checkpointed(self, x):
        return self(x)

    @eqx.filter_vmap(in_axes=(None, 0))
    def mapped(self, x):
        return self(x)


def small():
    return Small(eqx.nn.Linear(4, 3, key=jax.random.key(0)))


@pytest.mark.parametrize("jit", [lambda fn: fn, jax.jit])
def test_the_call_as_a_bound_method_is_a_site(jit):
    model = small()
    expected = np.asarray(model(ROWS[0]))
    out, taps = tapax.capture(jit(model.__call__))(ROWS[0])
    assert_close(out, expected)
    assert_close(taps.values["Small"], expected)
    _, taps = tapax.capture(jit(model.linear.__call__))(ROWS[0])
    assert_close(taps.values["Linear"], model.linear(ROWS[0]))


@pytest.mark.parametrize("method", ["checkpointed", "mapped"])
def test_methods_whose_wrapper_has_numbers_do_not_warn(method):
    # Warnings are errors in the tests.
    x = ROWS if method == "mapped" else ROWS[0]
    run = lambda model, x: getattr(model, method)(x)
    expected = np.asarray(run(small(), x))
    out, taps = tapax.capture(run)(small(), x)
    assert_close(out, expected)
    assert set(taps.values) == {"Small", f"Small.{method}", "Small/linear"}


@pytest.mark.parametrize("modules", ["nope", "**/nope", ["Small", "Small/nope"]])
def test_modules_that_match_nothing_raise(modules):
    with pytest.raises(tapax.SiteError, match=r"modules='.*nope' .* no module .* tapax\.sites"):
        tapax.capture(small(), modules=modules)(ROWS[0])
