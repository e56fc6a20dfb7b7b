"""A decorator around a method, or around the function in it, leaves the method a site."""

import functools

import brainstate
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import pytest
from flax import linen as nn
from flax import nnx
from jaxtyping import jaxtyped

import tapax
from tests.oracles.closeness import assert_close

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
KEY = jax.random.key(0)


def logged(f):
    @functools.wraps(f)
    def wrapper(*args, **kwargs):
        return f(*args, **kwargs)

    return wrapper


def unnamed(f):
    """Wrap a function without `functools.wraps`."""

    def wrapper(*args, **kwargs):
        return f(*args, **kwargs)

    return wrapper


class CallableObject:
    """A decorator that is an object, and binds itself to the instance."""

    def __init__(self, f):
        self.f = f

    def __call__(self, *args):
        return self.f(*args)

    def __get__(self, instance, owner=None):
        return self if instance is None else functools.partial(self, instance)


DECORATORS = {
    "none": lambda f: f,
    "wraps": logged,
    "no wraps": unnamed,
    "both": lambda f: logged(unnamed(logged(f))),
    "named_scope": jax.named_scope("part"),
    "named_call": jax.named_call,
}


LINEN = {
    "compact": nn.compact,
    "compact, wraps": lambda f: nn.compact(logged(f)),
    "wraps, compact": lambda f: logged(nn.compact(f)),
    "compact, no wraps": lambda f: nn.compact(unnamed(f)),
    "no wraps, jit, compact": lambda f: unnamed(nn.jit(nn.compact(f))),
    "compact, named_scope": lambda f: nn.compact(jax.named_scope("part")(f)),
    "named_scope, compact": lambda f: jax.named_scope("part")(nn.compact(f)),
    "compact, named_call": lambda f: nn.compact(jax.named_call(f)),
    "compact, jaxtyped": lambda f: nn.compact(jaxtyped(f, typechecker=None)),
    "jit, compact, wraps": lambda f: nn.jit(nn.compact(logged(f))),
    "remat, compact, wraps": lambda f: nn.remat(nn.compact(logged(f))),
    "wraps, jit, compact, wraps": lambda f: logged(nn.jit(nn.compact(logged(f)))),
    "object": lambda f: nn.compact(CallableObject(f)),
}


def linen_net(decorate, lift=lambda cls: cls):
    """Make a model around a module whose `__call__` is decorated."""

    class Part(nn.Module):
        @decorate
        def __call__(self, x):
            return nn.tanh(nn.Dense(4, name="dense")(x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return 2 * lift(Part)(name="part")(x)

    return Net()


def intermediates(model, variables, x):
    """Return the results of all `__call__`s that Linen itself captures, by the names of tapax."""
    _, state = model.apply(variables, x, capture_intermediates=True, mutable=["intermediates"])
    flat = jax.tree_util.tree_leaves_with_path(state["intermediates"])
    paths = [[str(getattr(key, "key", "")) for key in keys] for keys, _ in flat]
    return {
        "/".join([type(model).__name__, *path[: path.index("__call__")]]): value
        for path, (_, value) in zip(paths, flat, strict=True)
    }


@pytest.mark.parametrize("decorate", LINEN.values(), ids=LINEN)
@pytest.mark.parametrize("lift", [lambda cls: cls, nn.jit, nn.remat], ids=["", "jit", "remat"])
def test_a_decorated_linen_module_has_the_results_that_linen_captures(decorate, lift):
    model = linen_net(decorate, lift)
    variables = linen_net(nn.compact).init(KEY, X)
    out, taps = tapax.capture(model.apply)(variables, X)
    assert_close(out, model.apply(variables, X))
    expected = intermediates(linen_net(nn.compact), variables, X)
    assert taps.values.keys() == expected.keys() == {"Net", "Net/part", "Net/part/dense"}
    for name, value in expected.items():
        assert_close(taps.values[name], value)
    edited = tapax.edit(model.apply, values={"Net/part": 1.0})(variables, X)
    assert_close(edited, jnp.full((2, 4), 2.0))


@pytest.mark.parametrize(
    "decorate", [*DECORATORS.values(), CallableObject], ids=[*DECORATORS, "object"]
)
def test_decorated_linen_methods_with_setup_have_results_and_inputs(decorate):
    class Part(nn.Module):
        def setup(self):
            self.dense = nn.Dense(4)

        @decorate
        def __call__(self, x):
            return self.encode(x) + 1

        @decorate
        def encode(self, x):
            return self.dense(x)

    class Net(nn.Module):
        def setup(self):
            self.part = Part()

        def __call__(self, x):
            return self.part(2 * x)

    model = Net()
    variables = model.init(KEY, X)
    names = ["Net/part", "Net/part.encode", "Net/part.input", "Net/part.encode.input"]
    out, taps = tapax.capture(model.apply, values=names)(variables, X)
    assert_close(taps.values["Net/part"], out)
    assert_close(taps.values["Net/part.encode"], out - 1)
    assert_close(taps.values["Net/part.input"], 2 * X)
    assert_close(taps.values["Net/part.encode.input"], 2 * X)


def test_attention_whose_call_is_decorated_has_weights():
    class Attention(nn.MultiHeadDotProductAttention):
        @nn.compact
        @unnamed
        def __call__(self, x):
            return super().__call__(x)

    layer, plain = Attention(num_heads=2), nn.MultiHeadDotProductAttention(num_heads=2)
    variables = plain.init(KEY, X)
    name = "Attention:weights"
    _, taps = tapax.capture(layer.apply, values=name)(variables, X)
    _, expected = tapax.capture(plain.apply, values="**:weights")(variables, X)
    assert_close(taps.values[name], expected.values["MultiHeadDotProductAttention:weights"])


class Base(nn.Module):
    @nn.compact
    @logged
    def __call__(self, x):
        return nn.Dense(4, name="dense")(x)


class Sub(Base):
    @nn.compact
    @logged
    def __call__(self, x):
        return 2 * super().__call__(x)


class Inherits(Base):
    pass


@pytest.mark.parametrize("cls", [Sub, Inherits])
def test_a_decorated_linen_method_is_inherited_and_called_by_super(cls):
    variables = cls().init(KEY, X)
    out, taps = tapax.capture(cls().apply)(variables, X)
    assert taps.sites.names == [f"{cls.__name__}/dense", cls.__name__]
    assert_close(taps.values[cls.__name__], out)


@pytest.mark.parametrize("decorate", [logged, unnamed, lambda f: lambda self, x: 3 * f(self, x)])
def test_a_linen_method_that_is_replaced_later_is_a_site(decorate, monkeypatch):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Base(name="part")(x)

    variables = Net().init(KEY, X)
    expected = intermediates(Net(), variables, X)
    monkeypatch.setattr(Base, "__call__", decorate(Base.__call__))
    _, taps = tapax.capture(Net().apply)(variables, X)
    assert list(taps.values) == ["Net/part/dense", "Net/part", "Net"]
    assert_close(taps.values["Net/part"], expected["Net/part"])


@pytest.mark.parametrize("lift", [nn.jit, nn.remat])
def test_a_lifted_function_with_the_name_of_a_method_is_not_a_site(lift):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            @lift
            def encode(module, x):
                return module.encode(x) + 1

            return encode(self, x)

        @logged
        def encode(self, x):
            return 2 * x

    _, taps = tapax.capture(Net().apply)({}, X)
    assert taps.sites.names == ["Net.encode", "Net"]
    assert_close(taps.values["Net.encode"], 2 * X)


@pytest.mark.parametrize("decorate", [nn.compact, *list(LINEN.values())[1:5]])
def test_compat_linen_captures_the_intermediates_of_decorated_methods(decorate):
    model = linen_net(decorate)
    variables = model.init(KEY, X)
    given = {"capture_intermediates": True, "mutable": ["intermediates"]}
    _, expected = model.apply(variables, X, **given)
    _, state = tapax.compat.linen.apply(model, variables, X, **given)
    jax.tree.map(assert_close, state, expected)


def nnx_net(decorate):
    class Part(nnx.Module):
        @decorate
        def __call__(self, x):
            return jnp.tanh(x)

        @decorate
        def encode(self, x):
            return self.scale(x, by=2.0)

        def _scale(self, x, by):
            return by * x

        scale = functools.partialmethod(_scale)

    class Net(nnx.Module):
        def __init__(self):
            self.part = Part()

        def __call__(self, x):
            return self.part(x) + self.part.encode(x)

    return Net()


def equinox_net(decorate):
    class Part(eqx.Module):
        @decorate
        def __call__(self, x):
            return jnp.tanh(x)

        @decorate
        def encode(self, x):
            return self.scale(x, by=2.0)

        def _scale(self, x, by):
            return by * x

        scale = functools.partialmethod(_scale)

    class Net(eqx.Module):
        part: Part

        def __call__(self, x):
            return self.part(x) + self.part.encode(x)

    return Net(Part())


def brainstate_net(decorate):
    class Part(brainstate.nn.Module):
        @decorate
        def update(self, x):
            return jnp.tanh(x)

        @decorate
        def encode(self, x):
            return self.scale(x, by=2.0)

        def _scale(self, x, by):
            return by * x

        scale = functools.partialmethod(_scale)

    class Net(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Part()

        def update(self, x):
            return self.part(x) + self.part.encode(x)

    return Net()


def keras_net(decorate):
    class Part(keras.layers.Layer):
        @decorate
        def call(self, x):
            return jnp.tanh(x)

        @decorate
        def encode(self, x):
            return self.scale(x, by=2.0)

        def _scale(self, x, by):
            return by * x

        scale = functools.partialmethod(_scale)

    class Net(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.part = Part(name="part")

        def call(self, x):
            return self.part(x) + self.part.encode(x)

    net = Net(name="Net")
    net(X)  # builds the layers, which gives them their paths
    return net


def haiku_net(decorate):
    class Part(hk.Module):
        @decorate
        def __call__(self, x):
            return jnp.tanh(x)

        @decorate
        def encode(self, x):
            return self.scale(x, by=2.0)

        def scale(self, x, by):
            return by * x

    class Net(hk.Module):
        def __call__(self, x):
            part = Part(name="part")
            return part(x) + part.encode(x)

    run = hk.transform(lambda x: Net(name="Net")(x))
    return lambda x: run.apply({}, None, x)


NETS = {
    "nnx": nnx_net,
    "equinox": equinox_net,
    "brainstate": brainstate_net,
    "keras": keras_net,
    "haiku": haiku_net,
}


@pytest.mark.parametrize("decorate", DECORATORS.values(), ids=DECORATORS)
@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_decorated_and_partial_methods_are_sites_with_inputs(make, decorate):
    net = make(decorate)
    _, taps = tapax.capture(net, values=["**", "**.input"])(X)
    expected = {
        "part": jnp.tanh(X),
        "part.encode": 2 * X,
        "part.scale": 2 * X,
        "part.input": X,
        "part.encode.input": X,
    }
    for name, value in expected.items():
        assert_close(taps.values[f"Net/{name}"], value)
    assert_close(taps.values["Net"], jnp.tanh(X) + 2 * X)
