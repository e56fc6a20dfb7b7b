"""Similar calls of `tapax.compat.linen.apply` that must differ: each matches Linen."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import tapax
from tapax.compat.linen import apply
from tests.oracles.closeness import assert_close
from tests.oracles.memory import assert_nothing_stays

X = jnp.arange(6.0).reshape(2, 3) / 7


class Scale(nn.Module):
    by: float = 2.0

    @nn.compact
    def __call__(self, x):
        return x * self.by


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "h", Scale(name="inner")(x) + 1)
        return Scale(3.0, name="outer")(Scale(name="inner2")(x))


def doubled(run, args, kwargs, context):
    out = run(*args, **kwargs)
    return 2 * out if context.method_name == "__call__" else out


def shifted(run, args, kwargs, context):
    return run(*(x + 1 for x in args), **kwargs)


def skipping(run, args, kwargs, context):
    return context.orig_method(*args, **kwargs) - 1


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b)


def compare(model, **options):
    same(apply(model, {}, X, **options), model.apply({}, X, **options))


INTERCEPTORS = [
    (),
    (doubled,),
    (shifted, doubled),
    (doubled, shifted),
    (skipping, doubled),
    (doubled, skipping),
    (functools.partial(doubled),),
]


def test_methods_are_intercepted_as_in_linen():
    for interceptors in (*INTERCEPTORS, *reversed(INTERCEPTORS)):
        intercepted = compare
        for interceptor in reversed(interceptors):
            intercepted = within(nn.intercept_methods, interceptor, intercepted)
        intercepted(Net(), capture_intermediates=True)
        intercepted(Net(), mutable=["intermediates"])
        intercepted(Net())


def within(make, argument, call):
    def run(*args, **kwargs):
        with make(argument):
            return call(*args, **kwargs)

    return run


def test_values_are_those_that_the_caller_receives():
    with nn.intercept_methods(doubled):
        _, taps = tapax.capture(lambda x: Net().apply({}, x))(X)
    assert_close(taps.values["Net/inner2"], 4 * X)
    assert_close(taps.values["Net/outer"], 24 * X)
    assert_close(taps.values["Net"], 48 * X)


def test_a_captured_function_is_retraced_under_an_interceptor():
    captured = tapax.capture(lambda x: Net().apply({}, x))
    for factor in (1, 8, 1):
        if factor == 1:
            out, taps = captured(X)
        else:
            with nn.intercept_methods(doubled):
                out, taps = captured(X)
        assert_close(out, factor * 6 * X)
        assert_close(taps.values["Net"], factor * 6 * X)


def test_an_interceptor_whose_behaviour_changes():
    factors = {"by": 2.0}

    def scaled(run, args, kwargs, context):
        return factors["by"] * run(*args, **kwargs)

    for factors["by"] in (2.0, 3.0, 2.0):
        within(nn.intercept_methods, scaled, compare)(Scale(), capture_intermediates=True)


def test_interceptors_are_left_as_they_were():
    with nn.intercept_methods(doubled):
        with pytest.raises(ZeroDivisionError):
            apply(Scale(), {}, X, method=lambda m, x: 1 / 0)
        with nn.intercept_methods(shifted):
            apply(Scale(), {}, X)
        assert_close(Scale().apply({}, X), 4 * X)
    assert_close(Scale().apply({}, X), 2 * X)


def test_attributes_that_are_equal_and_of_other_types():
    model = lambda by: Scale(by)
    numbers = jnp.arange(3)
    for by in (2, 2.0, True, 1, 1.0, 2):
        found, expected = apply(model(by), {}, numbers), model(by).apply({}, numbers)
        same(found, expected)


@dataclasses.dataclass
class Config:
    by: float
    names: list = dataclasses.field(default_factory=list)


class Plain:
    def __init__(self, by):
        self.by = by


class Configured(nn.Module):
    config: object

    @nn.compact
    def __call__(self, x):
        config = self.config
        by = config["by"] if isinstance(config, Mapping) else config.by
        self.sow("intermediates", "h", x * by)
        return x * by


@pytest.mark.parametrize(
    "make", [Config, Plain, lambda by: {"by": by}], ids=["data", "plain", "dict"]
)
def test_a_configuration_that_has_changed(make):
    config = make(2.0)
    for by in (2.0, 3.0, 2.0):
        if isinstance(config, dict):
            config["by"] = by
        else:
            config.by = by
        compare(Configured(config), mutable=True)
        compare(Configured(make(2.0)), mutable=True)
        compare(Configured(make(2.0)), mutable=["intermediates"])


def test_a_filter_that_has_changed():
    wanted = {"inner"}
    chosen = lambda module, method: module.name in wanted
    for names in (["inner"], ["outer"], ["inner", "outer"], [], ["inner"]):
        wanted.clear()
        wanted.update(names)
        compare(Net(), capture_intermediates=chosen)


def test_lambdas_that_do_the_same_are_traced_once():
    traced = []

    class Counted(nn.Module):
        config: Config

        @nn.compact
        def __call__(self, x):
            traced.append(1)
            return Scale(self.config.by)(x)

    for i in range(3):
        chosen = lambda module, method: isinstance(module, Scale)
        apply(Counted(Config(2.0)), {}, i * X, capture_intermediates=chosen)
    assert len(traced) == 1


class Traced(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = self.perturb("p", nn.relu(nn.Dense(3)(x)))
        self.sow("intermediates", "h", h)
        self.sow("losses", "total", h, reduce_fn=jnp.add, init_fn=lambda: 0.0)
        return jnp.sum(nn.remat(nn.Dense)(3)(h))


def calls_of_linen():
    variables = Traced().init(jax.random.key(0), X)
    params = {"params": variables["params"]}
    run = lambda v: apply(Traced(), v, X, capture_intermediates=True, mutable=["losses"])[0]
    return {
        "plain": lambda: run(params),
        "perturbed": lambda: run(variables),
        "jit": lambda: jax.jit(lambda v: run(v))(params),
        "grad": lambda: jax.grad(run)(variables),
        "capture": lambda: tapax.capture(jax.grad(lambda v: Traced().apply(v, X)))(params),
    }


@pytest.mark.many
@pytest.mark.parametrize("name", calls_of_linen())
def test_no_tracer_leaks_from_a_call(name):
    call = calls_of_linen()[name]
    with jax.check_tracer_leaks():
        call()
        call()


@pytest.mark.once
@pytest.mark.parametrize("name", calls_of_linen())
def test_nothing_stays_alive_from_call_to_call(name):
    assert_nothing_stays(calls_of_linen()[name], "Scope", "LinenRecordOptions")
