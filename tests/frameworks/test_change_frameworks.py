"""Models of every framework: changed, differentiated and cut as plain functions are."""

import brainstate as bs
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from brainstate import transform
from flax import linen, nnx

import tapax
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

X = jnp.sin(jnp.arange(12.0, dtype=jnp.float32)).reshape(4, 3)
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def of_32_bits():
    """Disable 64 bits, with which some of the layers fail by themselves."""
    with jax.enable_x64(False):
        yield


def close(a, b, tol=2e-5):
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert_close(np.asarray(x), np.asarray(y), tol)


# One model in six frameworks: two layers, a normalisation with statistics between them, and a
# `hook`, the identity, which the tests replace to make a change by hand.


def same(h):
    return h


class OfNNX(nnx.Module):
    def __init__(self, hook=same):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.second = nnx.Linear(5, 2, rngs=rngs)
        self.hook = hook

    def __call__(self, x):
        return self.second(jnp.tanh(self.norm(self.hook(self.first(x)))))


class OfLinen(linen.Module):
    hook: object = same

    @linen.compact
    def __call__(self, x):
        h = self.hook(linen.Dense(5, name="first")(x))
        h = linen.BatchNorm(use_running_average=False, name="norm")(h)
        return linen.Dense(2, name="second")(jnp.tanh(h))


class OfEquinox(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    second: eqx.nn.Linear
    hook: object = eqx.field(static=True)

    def __init__(self, hook=same):
        keys = jax.random.split(KEY)
        self.first = eqx.nn.Linear(3, 5, key=keys[0])
        self.norm = eqx.nn.BatchNorm(5, "batch", mode="batch")
        self.second = eqx.nn.Linear(5, 2, key=keys[1])
        self.hook = hook

    def __call__(self, x, state):
        h, state = self.norm(self.hook(self.first(x)), state)
        return self.second(jnp.tanh(h)), state


class OfHaiku(hk.Module):
    def __init__(self, hook=same, name=None):
        super().__init__(name=name)
        self.first, self.second = hk.Linear(5, name="first"), hk.Linear(2, name="second")
        self.norm = hk.BatchNorm(True, True, 0.9, name="norm")
        self.hook = hook

    def __call__(self, x):
        return self.second(jnp.tanh(self.norm(self.hook(self.first(x)), True)))


class OfBrainstate(bs.nn.Module):
    def __init__(self, hook=same):
        super().__init__()
        bs.random.seed(0)
        self.first, self.second = bs.nn.Linear(3, 5), bs.nn.Linear(5, 2)
        self.norm = bs.nn.BatchNorm0d((5,))
        self.hook = hook

    def update(self, x):
        return self.second(jnp.tanh(self.norm(self.hook(self.first(x)))))


class OfKeras(keras.Model):
    def __init__(self, hook=same):
        super().__init__(name="of_keras")
        self.first = keras.layers.Dense(5, name="first")
        self.norm = keras.layers.BatchNormalization(name="norm")
        self.second = keras.layers.Dense(2, name="second")
        self.hook = hook

    def build(self, shape):
        self.first.build(shape)
        self.norm.build((4, 5))
        self.second.build((4, 5))

    def call(self, x):
        h = self.norm(self.hook(self.first(x)), training=True)
        return self.second(jnp.tanh(h))


# In each class, `loss()` and `step()` return a function and its arguments. After a call, `held`
# returns all learned arrays, including statistics, and `value` the loss.


class NNX:
    site = "OfNNX/first"

    def loss(self, hook=same):
        return nnx.jit(lambda model, x: jnp.mean(model(x) ** 2)), (OfNNX(hook), X)

    def step(self, hook=same):
        model = OfNNX(hook)
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            value, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
            optimizer.update(model, grads)
            return value

        return step, (model, optimizer, X)

    def held(self, out, args):
        return [jnp.array(v) for v in jax.tree.leaves(nnx.state(args[:-1]))]

    def value(self, out):
        return out


class Linen:
    site = "OfLinen/first"

    def loss(self, hook=same):
        model = OfLinen(hook)
        variables = model.init(KEY, X)

        def loss(variables, x):
            out, new = model.apply(variables, x, mutable=["batch_stats"])
            return jnp.mean(out**2), new

        return jax.jit(loss), (variables, X)

    def step(self, hook=same):
        loss, (variables, x) = self.loss(hook)
        optimizer = optax.adam(0.1)
        params = variables["params"]

        @jax.jit
        def step(params, stats, state, x):
            full = lambda p: loss({"params": p, **stats}, x)
            (value, new), grads = jax.value_and_grad(full, has_aux=True)(params)
            updates, state = optimizer.update(grads, state)
            return value, optax.apply_updates(params, updates), new, state

        stats = {"batch_stats": variables["batch_stats"]}
        return step, (params, stats, optimizer.init(params), x)

    def held(self, out, args):
        return out[1:]

    def value(self, out):
        return out[0]


class Equinox:
    site = "OfEquinox/first"

    def loss(self, hook=same):
        model, state = eqx.nn.make_with_state(OfEquinox)(hook)

        @eqx.filter_jit
        def loss(model, state, x):
            run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            out, state = run(x, state)
            return jnp.mean(out**2), state

        return loss, (model, state, X)

    def step(self, hook=same):
        loss, (model, state, x) = self.loss(hook)
        optimizer = optax.adam(0.1)

        @eqx.filter_jit
        def step(model, state, opt, x):
            (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, state, x)
            updates, opt = optimizer.update(grads, opt)
            return value, eqx.apply_updates(model, updates), state, opt

        return step, (model, state, optimizer.init(eqx.filter(model, eqx.is_array)), x)

    def held(self, out, args):
        return [leaf for leaf in jax.tree.leaves(out[1:]) if eqx.is_array(leaf)]

    def value(self, out):
        return out[0]


class Haiku:
    site = "of_haiku/first"

    def loss(self, hook=same):
        net = hk.without_apply_rng(hk.transform_with_state(lambda x: OfHaiku(hook)(x)))
        params, state = net.init(KEY, X)

        def loss(params, state, x):
            out, state = net.apply(params, state, x)
            return jnp.mean(out**2), state

        return jax.jit(loss), (params, state, X)

    def step(self, hook=same):
        loss, (params, state, x) = self.loss(hook)
        optimizer = optax.adam(0.1)

        @jax.jit
        def step(params, state, opt, x):
            (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, x)
            updates, opt = optimizer.update(grads, opt)
            return value, optax.apply_updates(params, updates), state, opt

        return step, (params, state, optimizer.init(params), x)

    def held(self, out, args):
        return out[1:]

    def value(self, out):
        return out[0]


class Brainstate:
    site = "OfBrainstate/first"

    def loss(self, hook=same):
        model = OfBrainstate(hook)

        def loss(x):
            with bs.environ.context(fit=True):
                return jnp.mean(model(x) ** 2)

        self.model = model
        return transform.jit(loss), (X,)

    def step(self, hook=same):
        loss, args = self.loss(hook)
        params = self.model.states(bs.ParamState)

        @transform.jit
        def step(x):
            grads, value = transform.grad(loss, params, return_value=True)(x)
            for path, state in params.items():
                update = lambda p, g: p - 0.1 * g
                state.value = jax.tree.map(update, state.value, grads[path])
            return value

        return step, args

    def held(self, out, args):
        return {path: state.value for path, state in self.model.states().items()}

    def value(self, out):
        return out


class Keras:
    site = "of_keras/first"

    def loss(self, hook=same):
        keras.utils.set_random_seed(0)
        self.model = model = OfKeras(hook)
        model.build(X.shape)
        self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        return lambda x: jnp.mean(model(x) ** 2), (X,)

    def step(self, hook=same):
        self.loss(hook)
        model, optimizer = self.model, self.optimizer

        def loss(weights, fixed, x):
            out, fixed = model.stateless_call(weights, fixed, x)
            return jnp.mean(out**2), fixed

        def step(x):
            weights = [v.value for v in model.trainable_variables]
            fixed = [v.value for v in model.non_trainable_variables]
            (value, new), grads = jax.value_and_grad(loss, has_aux=True)(weights, fixed, x)
            optimizer.apply(grads, model.trainable_variables)
            for variable, array in zip(model.non_trainable_variables, new, strict=True):
                variable.assign(array)
            return value

        return step, (X,)

    def held(self, out, args):
        return [v.value for v in (*self.model.variables, *self.optimizer.variables)]

    def value(self, out):
        return out


FRAMEWORKS = [NNX, Linen, Equinox, Haiku, Brainstate, Keras]
every = pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda f: f.__name__.lower())
EDIT = lambda h: h**2 + 0.3 * h
CLIP = lambda g: jnp.clip(g, -0.01, 0.01)


@jax.custom_vjp
def clipped(h):
    return h


clipped.defvjp(lambda h: (h, None), lambda _, g: (CLIP(g),))


def ran(framework, change, hook=same, of="step"):
    """Call a changed function twice; return the last loss and the learned arrays."""
    one = framework()
    f, args = getattr(one, of)(hook)
    f, out = change(one, f), None
    for _ in range(2):
        out = f(*args)
    return one.value(out), one.held(out, args)


@every
@pytest.mark.parametrize("of", [pytest.param("loss", marks=pytest.mark.many), "step"])
def test_edited_values_in_models_of_frameworks(framework, of):
    got = ran(framework, lambda one, f: tapax.edit(f, {one.site: EDIT}), of=of)
    close(got, ran(framework, lambda one, f: f, EDIT, of))


@pytest.mark.many
@every
def test_an_edit_by_the_identity_changes_nothing(framework):
    got = ran(framework, lambda one, f: tapax.edit(f, {one.site: lambda h: h}))
    close(got, ran(framework, lambda one, f: f), 1e-6)


@every
def test_clipped_gradients_in_an_unmodified_train_step(framework):
    got = ran(framework, lambda one, f: tapax.edit(f, grads={one.site: CLIP}))
    close(got, ran(framework, lambda one, f: f, clipped))


@every
def test_edits_under_vmap_see_one_example(framework):
    # The Equinox model calls `first` under vmap, so the edit sees one example there.
    new = jnp.sin(jnp.arange(20.0) ** 2).reshape(4, 5)
    row = lambda h: new if h.shape == (4, 5) else new[0]
    if framework is Equinox:
        new = jnp.broadcast_to(new[0], (4, 5))
    got = ran(framework, lambda one, f: tapax.edit(f, {one.site: new}))
    close(got, ran(framework, lambda one, f: f, row))


def added(framework, eps):
    """Make a hook that adds `eps`; under a vmap, each example gets its row of `eps`."""
    if framework is Equinox:
        return lambda h: h + eps[jax.lax.axis_index("batch")]
    return lambda h: h + eps


@pytest.mark.many
@every
def test_gradients_and_perturbations_agree_with_hooks(framework):
    one = framework()
    f, args = one.loss()
    plain = one.held(f(*args), args)

    def hand(eps):
        other = framework()
        g, given = other.loss(added(framework, eps))
        return other.value(g(*given))

    expected = jax.grad(hand)(jnp.zeros((4, 5)))
    has_aux = framework in (Linen, Equinox, Haiku)
    one = framework()
    f, args = one.loss()
    (value, grads) = tapax.value_and_grad(f, one.site, has_aux)(*args)
    close(grads, {one.site: expected})
    close(one.value(value), hand(jnp.zeros((4, 5))))
    close(one.held(value, args), plain)
    one = framework()
    f, args = one.loss()
    zeros = tapax.perturbations(f, one.site)(*args)
    assert zeros[one.site].shape == (4, 5)
    out = tapax.perturbed(f)({one.site: jnp.full((4, 5), 0.3)}, *args)
    close(one.value(out), hand(jnp.full((4, 5), 0.3)))
    other = framework()
    g, given = other.loss(lambda h: h + 0.3)
    close(one.held(out, args), other.held(g(*given), given))


@every
def test_cuts_leave_state_unchanged(framework):
    one = framework()
    f, args = one.loss()
    before = held(one, args)
    fresh, given = framework().loss()
    _, taps = tapax.capture(fresh, one.site)(*given)
    value = tapax.prefix(f, one.site)(*args)
    close(value, taps.values[one.site])
    out = tapax.suffix(f, one.site)(value + 0.3, *args)
    close(held(one, args), before)
    other = framework()
    g, given = other.loss(lambda h: h + 0.3)
    close(one.value(out), other.value(g(*given)))


def held(one, args):
    """Return copies of the arrays in the objects among the arguments."""
    if isinstance(one, (Brainstate, Keras)):
        return one.held(None, args)
    arrays = nnx.state(args[0]) if isinstance(one, NNX) else args
    return [jnp.array(x) for x in jax.tree.leaves(arrays) if eqx.is_array(x)]


@every
def test_jacobians_with_respect_to_intermediates_of_models(framework):
    one = framework()
    f, args = one.loss()
    before = held(one, args)
    wrt, of = one.site, one.site.replace("first", "second")
    made = tapax.jacobian(f, of=of, wrt=wrt)(*args)
    assert made.shape == (4, 2, 4, 5)
    close(held(one, args), before)
    direction = jnp.cos(jnp.arange(20.0)).reshape(4, 5)

    def shifted(s):
        other = framework()
        g, given = other.loss(added(framework, s * direction))
        return tapax.capture(g, of)(*given)[1].values[of]

    slope = jax.jvp(shifted, (0.0,), (1.0,))[1]
    close(jnp.einsum("abcd,cd->ab", made, direction), slope)


def test_one_layer_of_a_scanned_model_is_changed():
    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return x + jnp.tanh(linen.Dense(3, name="dense")(x)), None

    class Deep(linen.Module):
        @linen.compact
        def __call__(self, x):
            lift = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 4}
            return linen.scan(Layer, **lift)(name="layers")(x, None)[0]

    model = Deep()
    variables = model.init(KEY, X)
    dense = variables["params"]["layers"]["dense"]

    def hand(layer, x):
        for i in range(4):
            h = x @ dense["kernel"][i] + dense["bias"][i]
            x = x + jnp.tanh(0 * h if i == layer else h)
        return x

    f = jax.jit(model.apply)
    site = "Deep/layers/dense"
    ablate = lambda i: tapax.edit(f, {tapax.at(site, step=i): 0.0})(variables, X)
    close(jax.vmap(ablate)(jnp.arange(4)), jnp.stack([hand(i, X) for i in range(4)]))
    at = tapax.at(site, step=2)
    close(tapax.suffix(f, at)(tapax.prefix(f, at)(variables, X), variables, X), f(variables, X))
    close(tapax.suffix(f, at)(jnp.zeros((4, 3)), variables, X), hand(2, X))


def test_single_calls_of_one_nnx_layer_are_changed():
    class Tied(nnx.Module):
        def __init__(self):
            self.lin = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.lin(self.lin(x))

    model = Tied()
    expected = model.lin(model.lin(X) * 0 + 1)
    close(tapax.edit(nnx.jit(model), {"Tied/lin@0": 1.0})(X), expected)
    close(tapax.edit(model, {"Tied/lin@1": 1.0})(X), jnp.ones((4, 3)))
    close(tapax.prefix(lambda m, x: m(x), "Tied/lin@0")(model, X), model.lin(X))


def test_dropout_under_an_edit_draws_the_plain_mask():
    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.lin = nnx.Linear(3, 3, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.lin(x))

    plain, edited, other = Net(), Net(), Net()
    f = tapax.edit(lambda m, x: m(x), {"Net/lin": lambda h: 2 * h})
    for _ in range(2):
        close(f(edited, X), 2 * plain(X))
        tapax.prefix(lambda m, x: m(x), "Net/drop")(other, X)
    close(tapax.prefix(lambda m, x: m(x), "Net/drop")(other, X), Net()(X))
