"""New captures and edits read the variables of their functions anew, also of a jitted function.

JAX compiles the program once as long as the values of these variables stay the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tapax

strength = 2.0
chosen = "a"
activation, names = jnp.tanh, ("a",)
traces = []


@jax.jit
def net(x):
    traces.append(1)
    return 10 * tapax.sow(x, "a") + tapax.sow(x, "b")


def scale(h):
    return strength * h


def power(h):
    return activation(h)


def is_chosen_among(site):
    return site.path in names


def is_chosen(site):
    return site.path == chosen


class Probe:
    def __init__(self):
        self.strength = 2.0

    def read(self, h):
        return self.strength * h


probe = Probe()
table = {"strength": 2.0}


def replace(value, name):
    globals().update(strength=value, chosen=name)
    probe.strength = table["strength"] = value


def captured(**options):
    return lambda: tapax.capture(net, grads=None, **options)(1.0)[1].values


OF_STRENGTH = {
    "edit": lambda: {"a": (tapax.edit(net, values={"a": scale})(1.0) - 1) / 10},
    "capture": captured(values={"a": scale}),
    "method": captured(values={"a": probe.read}),
    "object": captured(values={"a": lambda h: probe.strength * h}),
    "dict": captured(values={"a": (lambda fn: fn)(lambda h: table["strength"] * h)}),
    "reducer": captured(
        values={
            "a": tapax.reduce.Reducer(
                lambda: 0.0, lambda s, x: s + strength * x, lambda a, b: a + b, name="scaled"
            )
        }
    ),
}


@pytest.mark.parametrize("make", OF_STRENGTH.values(), ids=OF_STRENGTH)
def test_a_new_capture_or_edit_reads_the_values_of_now(make):
    for value in (2.0, 4.0, 2.0):
        replace(value, "a")
        (found,) = make().values()
        assert float(found) == value


OF_NAMES = {
    "capture": captured(values=is_chosen),
    "grad": lambda: tapax.grad(net, at=is_chosen)(1.0),
    "prefix": lambda: {chosen: tapax.prefix(net, is_chosen)(1.0)},
}


@pytest.mark.parametrize("make", OF_NAMES.values(), ids=OF_NAMES)
def test_a_predicate_picks_by_the_variables_of_now(make):
    for name in "aba":
        replace(2.0, name)
        assert list(make()) == [name]


def test_a_replaced_function_or_tuple_is_read():
    for function, name in ((jnp.tanh, "a"), (jnp.exp, "b"), (jnp.tanh, "a")):
        globals().update(activation=function, names=(name,))
        expected = float(function(1.0))
        (found,) = captured(values={"a": power})().values()
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        edited = tapax.edit(net, values={"a": power})(1.0)
        np.testing.assert_allclose(edited, 10 * expected + 1, rtol=1e-6)
        assert list(captured(values=is_chosen_among)()) == [name]


def test_a_suffix_starts_at_the_site_that_a_predicate_picks_now():
    found = []
    for name in "ab":
        replace(2.0, name)
        found.append(float(tapax.suffix(net, is_chosen)(0.0, 1.0)))
    assert found == [1, 10]


def test_a_variable_replaced_before_the_first_call_is_not_remembered_for_another_capture():
    replace(2.0, "a")
    first = tapax.capture(net, values={"a": scale}, grads=None)
    replace(4.0, "a")
    (found,) = first(1.0)[1].values.values()
    assert float(found) == 4
    replace(2.0, "a")
    (found,) = captured(values={"a": scale})().values()
    assert float(found) == 2


def double(h):
    return 2 * h


def test_equal_calls_are_compiled_once_while_variables_stay_the_same():
    replace(2.0, "a")

    def call():
        captured(values={"a": double})()
        captured(values={"**": tapax.reduce.rms})()
        tapax.edit(net, values={"a": scale})(1.0)

    call()
    before = len(traces)
    for _ in range(3):
        call()
    assert len(traces) == before


def test_layers_of_a_module_are_swept_by_a_variable():
    model = nnx.Sequential(*(nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(2)))
    pick = lambda site: site.path.endswith(f"layers/{layer}")
    for layer in range(2):
        _, taps = tapax.capture(model, values=pick, grads=None)(jnp.ones((1, 3)))
        assert list(taps.values) == [f"Sequential/layers/{layer}"]


def test_a_module_of_arrays_stands_where_a_function_does():
    equinox = pytest.importorskip("equinox")
    linear = equinox.nn.Linear(2, 3, key=jax.random.key(0))
    fn = lambda x: tapax.sow(x, "h").sum()
    _, taps = tapax.capture(fn, values={"h": linear})(jnp.ones(2))
    (found,) = taps.values.values()
    np.testing.assert_allclose(found, linear(jnp.ones(2)), rtol=1e-6)


class Chooses:
    def __init__(self):
        self.cls = nnx.Linear

    def __call__(self, module, method):
        return isinstance(module, self.cls)


chooses, kinds, of_names = Chooses(), {"chosen": nnx.Linear}, nnx.Linear


def is_of_names(module):
    return isinstance(module, of_names)


def choose(cls):
    globals().update(of_names=cls)
    chooses.cls = kinds["chosen"] = cls


FILTERS = {
    "variable": lambda module, method: isinstance(module, of_names),
    "object": chooses,
    "dict": lambda module, method: isinstance(module, kinds["chosen"]),
    "function": lambda module, method: is_of_names(module),
}


# A capture that was called before notices replaced variables, but not attributes and items.
KEPT = [*((name, False) for name in FILTERS), ("variable", True), ("function", True)]


@pytest.mark.parametrize(("which", "is_kept"), KEPT)
def test_a_filter_of_modules_reads_the_variables_of_now(which, is_kept):
    modules = FILTERS[which]

    @nnx.jit
    def run(model, x):
        return model(x)

    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(3, 3, rngs=rngs), nnx.LayerNorm(3, rngs=rngs))
    kept = tapax.capture(run, modules=modules, grads=None)
    expected = {nnx.Linear: ["Sequential/layers/0"], nnx.LayerNorm: ["Sequential/layers/1"]}
    for cls in (nnx.Linear, nnx.LayerNorm, nnx.Linear):
        choose(cls)
        captured = kept if is_kept else tapax.capture(run, modules=modules, grads=None)
        assert list(captured(model, jnp.ones((1, 3)))[1].values) == expected[cls]
