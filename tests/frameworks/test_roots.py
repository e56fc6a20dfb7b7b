"""A single root takes the name of its class, several of one class that of their holders.

The models differ only in their weights, so that the value of a site identifies its model.
"""

import collections
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import tapax
from tapax._frameworks.users_code import find_signature
from tests.oracles.closeness import assert_close

X = jnp.array([0.5, -1.0, 2.0], jnp.float32)
Agent = collections.namedtuple("Agent", "policy value")


class NnxNet(nnx.Module):
    def __init__(self, scale):
        self.up = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.up.kernel[...] = scale * jnp.eye(3, dtype=X.dtype)

    def __call__(self, x):
        return jnp.tanh(self.up(x))


class EqxNet(eqx.Module):
    up: eqx.nn.Linear

    def __init__(self, scale):
        linear = eqx.nn.Linear(3, 3, use_bias=False, key=jax.random.key(0))
        self.up = eqx.tree_at(lambda m: m.weight, linear, scale * jnp.eye(3, dtype=X.dtype))

    def __call__(self, x):
        return jnp.tanh(self.up(x))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(3, use_bias=False, name="up")(x))


class Trainer:
    def __init__(self, policy, value):
        self.policy, self.value = policy, value

    def step(self, x):
        return self.policy(x) * self.value(x)


FRAMEWORKS = {
    "nnx": (NnxNet, nnx.jit, nnx.grad),
    "equinox": (EqxNet, eqx.filter_jit, eqx.filter_grad),
}


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    return FRAMEWORKS[request.param]


def loss(policy, value, x):
    return jnp.sum(policy(x) * value(x))


def check(fn, *args, names=("policy", "value"), scales=(2.0, 3.0), **kwargs):
    """Check that each name has the values of the model with its scale, in any order of calls."""
    _, taps = tapax.capture(fn)(*args, **kwargs)
    assert set(taps.values) == {*names, *(f"{name}/up" for name in names)}
    for name, scale in zip(names, scales, strict=True):
        assert_close(taps.values[f"{name}/up"], scale * X)
        assert_close(taps.values[name], jnp.tanh(scale * X))
    return taps


def test_two_roots_are_named_by_the_arguments_that_hold_them(framework):
    net, jit, _ = framework
    policy, value = net(2.0), net(3.0)
    check(loss, policy, value, X)
    check(loss, x=X, value=value, policy=policy)
    check(lambda policy, value, x: value(x) * policy(x), policy, value, X)
    check(jit(loss), policy, value, X)
    mapped = lambda policy, value, xs: jax.vmap(functools.partial(loss, policy, value))(xs)
    _, taps = tapax.capture(mapped)(policy, value, X[None])
    assert_close(taps.values["value/up"], 3 * X[None])
    many = (policy, value, net(4.0))
    names = ["nets/0", "nets/1", "nets/2"]
    check(lambda *nets: [m(X) for m in nets], *many, names=names, scales=(2, 3, 4))


def test_gradients_of_two_roots_have_their_names(framework):
    """The gradient by one factor is the other factor, times the derivative of tanh."""
    net, jit, grad = framework

    @jit
    def step(policy, value, x):
        def inner(both):
            p, v = both
            return jnp.sum(p(x) * v(x))

        return grad(inner)((policy, value))

    captured = tapax.capture(step)
    for _ in range(2):  # the second call uses the cache
        _, taps = captured(net(2.0), net(3.0), X)
        p, v = jnp.tanh(2 * X), jnp.tanh(3 * X)
        assert_close(taps.grads["policy"], v)
        assert_close(taps.grads["value/up"], p * (1 - v**2))
    assert set(taps.grads) == {"policy", "policy/up", "value", "value/up"}


def test_two_models_in_one_traced_jitted_function_have_separate_names(framework):
    net, jit, grad = framework
    apply = jit(lambda model, x: jnp.sum(model(x)))
    check(lambda policy, value, x: apply(policy, x) + apply(value, x), net(2.0), net(3.0), X)
    step = lambda policy, value, x: [grad(apply)(model, x) for model in (policy, value)]
    taps = check(step, net(2.0), net(3.0), X)
    assert_close(taps.grads["policy/up"], 1 - jnp.tanh(2 * X) ** 2)
    assert_close(taps.grads["value/up"], 1 - jnp.tanh(3 * X) ** 2)


@pytest.mark.parametrize(
    "wrap",
    [
        nnx.grad,
        nnx.value_and_grad,
        lambda fn: nnx.jit(nnx.grad(fn)),
        lambda fn: nnx.grad(nnx.jit(fn)),
        lambda fn: nnx.jit(nnx.value_and_grad(fn, argnums=(0, 1))),
    ],
    ids=["grad", "value_and_grad", "jit of grad", "grad of jit", "two arguments"],
)
def test_derivatives_of_nnx_name_roots_by_the_arguments_of_the_function(wrap):
    check(wrap(loss), NnxNet(2.0), NnxNet(3.0), X)
    check(wrap(lambda p, v: loss(p, v, X)), NnxNet(2.0), NnxNet(3.0), names=["p", "v"])
    total = lambda *nets: sum(jnp.sum(net(X)) for net in nets)
    check(wrap(total), NnxNet(2.0), NnxNet(3.0), names=["nets/0", "nets/1"])


def test_attributes_and_keys_name_the_models_in_them(framework):
    net, _, _ = framework
    policy, value = net(2.0), net(3.0)
    nets = {"policy": policy, "value": value}
    check(lambda nets, x: nets["policy"](x) + nets["value"](x), nets, X)
    check(lambda agent, x: agent.policy(x) + agent.value(x), Agent(policy, value), X)
    check(lambda trainer, x: trainer.step(x), Trainer(policy, value), X)
    check(Trainer(policy, value).step, X)
    check(lambda nets, x: nets[0](x) + nets[1](x), (policy, value), X, names=["nets/0", "nets/1"])
    both = {"a": Trainer(policy, None), "b": Trainer(value, None)}
    names = ["a/policy", "b/policy"]
    check(lambda both, x: [both[k].policy(x) for k in "ab"], both, X, names=names)


def test_closed_over_models_are_named_by_their_variables(framework):
    net, jit, _ = framework
    policy, value = net(2.0), net(3.0)
    check(lambda x: policy(x) + value(x), X)
    check(lambda value, x: policy(x) + value(x), value, X)
    apply = jit(lambda model, x: model(x))
    check(lambda x: apply(policy, x) + apply(value, x), X)
    taps = check(jax.grad(lambda x: jnp.sum(policy(x) + value(x))), X)
    assert_close(taps.grads["value/up"], 1 - jnp.tanh(3 * X) ** 2)


def test_a_single_root_has_the_name_of_its_class(framework):
    net, _, grad = framework
    name = net.__name__
    _, taps = tapax.capture(lambda m, x: m(m(x)))(net(2.0), X)
    assert set(taps.values) == {name, f"{name}/up", f"{name}@1", f"{name}/up@1"}

    def step(model, x):
        return model(x), grad(lambda m: jnp.sum(m(x)))(model)

    _, taps = tapax.capture(step)(net(2.0), X)
    assert {path.partition("@")[0] for path in taps.values} == {name, f"{name}/up"}


def test_roots_of_different_classes_have_the_names_of_their_classes():
    linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    nets = EqxNet(2.0), EqxNet(3.0), linear
    _, taps = tapax.capture(lambda a, b, c, x: a(x) + b(x) + c(x))(*nets, X)
    assert set(taps.values) == {"a", "a/up", "b", "b/up", "Linear"}


def test_a_model_that_is_made_from_another_is_a_separate_root():
    def step(policy, x):
        target = jax.tree.map(lambda w: 1.5 * w, policy)
        return policy(x) + target(x)

    check(step, EqxNet(2.0), X, names=["policy", "target"])


def test_parts_of_two_models_passed_through_a_jit_have_separate_names():
    apply = eqx.filter_jit(lambda layer, x: layer(x))
    fn = lambda policy, value, x: apply(policy.up, x) + apply(value.up, x)
    _, taps = tapax.capture(fn)(EqxNet(2.0), EqxNet(3.0), X)
    assert set(taps.values) == {"policy/up", "value/up"}
    assert_close(taps.values["value/up"], 3 * X)


def linen_variables(scale):
    return {"params": {"up": {"kernel": scale * jnp.eye(3, dtype=X.dtype)}}}


def test_modules_of_linen_are_named_by_their_variables_or_their_parameters():
    policy, value, net = LinenNet(), LinenNet(), LinenNet()
    two, three = linen_variables(2.0), linen_variables(3.0)

    def by_modules(a, b, x):
        return jnp.sum(policy.apply(a, x) * value.apply(b, x))

    check(by_modules, two, three, X)
    taps = check(jax.jit(jax.grad(by_modules)), two, three, X)
    assert_close(taps.grads["policy"], jnp.tanh(3 * X))
    names = ["params", "target"]
    by_parameters = lambda params, target, x: net.apply(params, x) + net.apply(target, x)
    check(by_parameters, two, three, X, names=names)
    inner = lambda params, target, x: [net.apply({"params": p}, x) for p in (params, target)]
    check(inner, two["params"], three["params"], X, names=names)
    _, taps = tapax.capture(lambda params, x: net.apply(params, net.apply(params, x)))(two, X)
    assert set(taps.values) == {"LinenNet", "LinenNet/up", "LinenNet@1", "LinenNet/up@1"}


def test_edits_take_the_names_of_roots():
    edited = tapax.edit(loss, values={"value": jnp.zeros_like})
    assert_close(edited(EqxNet(2.0), EqxNet(3.0), X), 0.0)
    with pytest.raises(tapax.SiteError, match="no site with that name"):
        tapax.edit(loss, values={"EqxNet": jnp.zeros_like})(EqxNet(2.0), EqxNet(3.0), X)


def test_objects_that_are_still_being_made_are_left_alone():
    class Forwarding:
        """An object whose attributes come from another one, which it does not have at first."""

        __slots__ = ("inner",)

        def __init__(self, module, x):
            module(x)
            self.inner = module

        def __getattr__(self, name):
            return getattr(self.inner, name)

    def fn(module, x):
        return Forwarding(module, x).inner(x)

    module, x = eqx.nn.Linear(3, 2, key=jax.random.key(0)), jnp.ones(3)
    out, taps = tapax.capture(fn)(module, x)
    assert_close(out, module(x), 1e-6)
    assert list(taps.values) == ["Linear", "Linear@1"]


def test_a_wrapper_that_closes_over_itself_has_the_signature_of_its_function():
    space = {"__name__": "flax.example"}
    exec(
        "def wrap(fn):\n"
        "    def wrapper(*args, **kwargs):\n"
        "        return fn(*args, **kwargs) if args else wrapper\n"
        "    return wrapper\n",
        space,
    )
    signature = find_signature(space["wrap"](lambda policy, value: policy))
    assert list(signature.parameters) == ["policy", "value"]
