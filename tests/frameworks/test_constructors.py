"""Modules that run in the constructor of a model have the name of its class.

The models differ only in their scale, so that the value of a site identifies its model.
"""

import brainstate
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import tapax
from tests.oracles.closeness import assert_close

S, X = jnp.array(2.0), jnp.ones(2)


class Kernel(eqx.Module):
    scale: jax.Array

    def __call__(self, x):
        return x * self.scale


class EqxGP(eqx.Module):
    kernel: Kernel
    mean: jax.Array

    def __init__(self, scale, x):
        self.kernel = Kernel(scale)
        self.mean = self.kernel(x)

    def __call__(self, y):
        return jnp.sum(self.kernel(y) - self.mean)

    @classmethod
    def make(cls, scale, x):
        gp = cls(scale, x)
        gp(5 * x)
        return gp

    @property
    def variance(self):
        return self.kernel(7 * X)


class PostInitGP(eqx.Module):
    kernel: Kernel
    mean: jax.Array = None

    def __post_init__(self):
        self.mean = self.kernel(X)

    def __call__(self, y):
        return jnp.sum(self.kernel(y) - self.mean)


class SubclassGP(EqxGP):
    def __init__(self, scale, x):
        super().__init__(scale, x)


class NnxKernel(nnx.Module):
    def __init__(self, scale):
        self.scale = nnx.Param(scale)

    def __call__(self, x):
        return x * self.scale[...]


class NnxGP(nnx.Module):
    def __init__(self, scale, x):
        self.kernel = NnxKernel(scale)
        self.mean = nnx.Variable(self.kernel(x))

    def __call__(self, y):
        return jnp.sum(self.kernel(y) - self.mean[...])


class StateKernel(brainstate.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def update(self, x):
        return x * self.scale


class StateGP(brainstate.nn.Module):
    def __init__(self, scale, x):
        super().__init__()
        self.kernel = StateKernel(scale)
        self.mean = self.kernel(x)

    def update(self, y):
        return jnp.sum(self.kernel(y) - self.mean)


MAKERS = {
    "equinox": EqxGP,
    "subclass": SubclassGP,
    "__post_init__": lambda scale, x: PostInitGP(Kernel(scale)),
    "nnx": NnxGP,
    "brainstate": StateGP,
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def kernels(fn, *args):
    """Return the results of all kernels, by the names of their models."""
    _, taps = tapax.capture(fn)(*args)
    names = [name for name in taps.values if "/kernel" in name]
    return {name.replace("/kernel", ""): float(taps.values[name][0]) for name in names}


def class_name(make):
    return type(make(S, X)).__name__


def test_two_models_are_not_mixed_up_while_they_are_made(make):
    def loss(s, x):
        a = make(s, x)
        b = make(10 * s, x)
        return a(3 * x) + b(3 * x)

    name = class_name(make)
    expected = {name: 2.0, f"{name}@1": 20.0, "a": 6.0, "b": 60.0}
    for fn in (loss, jax.jit(loss), jax.value_and_grad(loss)):
        assert kernels(fn, S, X) == expected


def test_a_single_model_has_the_name_of_its_class_from_its_constructor_on(make):
    name = class_name(make)
    assert kernels(lambda s, x: make(s, x)(3 * x), S, X) == {name: 2.0, f"{name}@1": 6.0}


def test_an_edit_of_a_model_leaves_the_constructor_of_another_alone():
    def loss(a, s, x):
        b = EqxGP(10 * s, x)
        return a(3 * x) + b(3 * x)

    a = EqxGP(S, X)
    assert kernels(loss, a, S, X) == {"EqxGP": 20.0, "a": 6.0, "b": 60.0}
    edited = tapax.edit(loss, values={"a/kernel": 0.0})(a, S, X)
    assert_close(edited, (0 - 2) * 2 + (60 - 20) * 2)


def test_a_model_that_is_made_of_parts_of_another_has_a_separate_name():
    class Shifted(eqx.Module):
        kernel: Kernel
        mean: jax.Array

        def __init__(self, kernel, x):
            self.kernel, self.mean = kernel, 0 * x
            self.mean = self.kernel(x)

        def __call__(self, y):
            return jnp.sum(self.kernel(y) - self.mean)

    def loss(a, x):
        b = Shifted(a.kernel, 2 * x)
        return a(3 * x) + b(5 * x)

    found = kernels(loss, Shifted(Kernel(S), X), X)
    assert found == {"Shifted": 4.0, "a": 6.0, "b": 10.0}


def test_models_from_a_factory_are_named_by_the_variables_that_tell_them_apart():
    def loss(s, x):
        a = EqxGP.make(s, x)
        b = EqxGP.make(10 * s, x)
        return a(3 * x) + b(3 * x)

    made = {"EqxGP": 2.0, "EqxGP@1": 20.0}
    assert kernels(loss, S, X) == made | {"a": 10.0, "b": 100.0, "a@1": 6.0, "b@1": 60.0}


def test_a_model_without_a_variable_does_not_take_the_name_of_another():
    def loss(s, x):
        a = EqxGP(s, x)
        total = a(3 * x) + EqxGP(10 * s, x)(3 * x) + jnp.sum(EqxGP(100 * s, x).variance)
        b = EqxGP(1000 * s, x)
        return total + b(3 * x)

    found = kernels(loss, S, X)
    assert (found.pop("a"), found.pop("b")) == (6.0, 6000.0)
    assert [*found.values()] == [2.0, 20.0, 60.0, 200.0, 1400.0, 2000.0]
    assert {name.partition("@")[0] for name in found} == {"EqxGP"}


def test_a_model_that_another_makes_while_it_runs_is_not_taken_for_its_part():
    class Ensemble(eqx.Module):
        gp: EqxGP

        def __call__(self, x):
            return self.gp(3 * x) + EqxGP(10 * self.gp.kernel.scale, x)(3 * x)

    found = kernels(lambda model, x: model(x), Ensemble(EqxGP(S, X)), X)
    assert found == {"Ensemble/gp": 6.0, "Ensemble/EqxGP": 20.0, "Ensemble/EqxGP@1": 60.0}


def test_a_model_that_is_updated_keeps_the_name_of_its_class():
    def train(model, x):
        for _ in range(2):
            grads = eqx.filter_jit(eqx.filter_grad(lambda net, y: net(y)))(model, x)
            model = eqx.apply_updates(model, grads)
        return model(3 * x)

    found = kernels(train, EqxGP(S, X), X)
    assert list(found) == ["EqxGP", "EqxGP@1", "EqxGP@2"]
