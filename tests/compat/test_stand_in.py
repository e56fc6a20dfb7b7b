"""`tapax.compat.nnx` and `tapax.compat.linen` replace the whole namespaces of Flax."""

import subprocess
import sys

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import pytest

import tapax
from tapax.compat import linen as nn
from tapax.compat import nnx
from tests.oracles.closeness import assert_close

X = jnp.ones((4, 3))
PAIRS = [(nnx, flax.nnx, {"capture"}), (nn, flax.linen, {"apply"})]


@pytest.mark.parametrize(("ours", "theirs", "own"), PAIRS, ids=["nnx", "linen"])
def test_every_other_name_is_that_of_flax(ours, theirs, own):
    names = {name for name in dir(theirs) if not name.startswith("_")}
    assert names <= set(dir(ours))
    assert set(dir(ours)) == names | own
    assert {name for name in names if getattr(ours, name) is not getattr(theirs, name)} == own


@pytest.mark.parametrize(("ours", "theirs", "own"), PAIRS, ids=["nnx", "linen"])
def test_a_name_that_flax_has_not_is_an_attribute_error(ours, theirs, own):
    words = f"module '{ours.__name__}' has no attribute 'Lineer', nor has '{theirs.__name__}'"
    with pytest.raises(AttributeError) as error:
        ours.Lineer
    assert str(error.value) == words
    assert not hasattr(ours, "__path__")


def test_all_names_can_be_imported_at_once():
    code = "from tapax.compat.nnx import *; from tapax.compat.linen import *; Rngs, Dense, apply"
    subprocess.run([sys.executable, "-c", f"{code}, capture"], check=True)


def test_a_program_of_nnx_with_one_import_changed():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear1 = nnx.Linear(3, 2, rngs=rngs)
            self.linear2 = nnx.Linear(2, 4, rngs=rngs)

        def __call__(self, x):
            x = self.perturb("grad_of_x", self.linear1(x))
            self.sow(nnx.Intermediate, "features", x)
            return self.linear2(x)

    model = Model(rngs=nnx.Rngs(0))
    _, perturbations = nnx.capture(model, nnx.Perturbation)(X)

    @nnx.jit
    def train_step(model, perturbations, x):
        def loss(model, perturbations, x):
            out, sown = nnx.capture(model, nnx.Intermediate, init=perturbations)(x)
            return jnp.sum(out**2), sown

        grads, sown = nnx.grad(loss, argnums=1, has_aux=True)(model, perturbations, x)
        return nnx.merge_state(grads, sown)

    metrics = train_step(model, perturbations, X)
    h = model.linear1(X)
    expected = jax.grad(lambda h: jnp.sum(model.linear2(h) ** 2))(h)
    assert_close(metrics["features"][0], h)
    assert_close(metrics["grad_of_x"][...], expected, 1e-5)


def test_a_program_of_linen_with_one_import_changed():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(4)(x)
            self.sow("intermediates", "h", h)
            return nn.Dense(2)(nn.relu(h))

        def twice(self, x):
            return 2 * self(x)

    model = Net()
    variables = model.init(jax.random.key(0), X)
    _, state = nn.apply(model, variables, X, capture_intermediates=True)
    _, expected = model.apply(variables, X, capture_intermediates=True)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for options in ((), ("intermediates",), (["intermediates"], True)):
        for fn in (Net.twice, lambda module, x: module(x) + 1):
            found = nn.apply(fn, model, *options)(variables, X)
            expected = flax.linen.apply(fn, model, *options)(variables, X)
            assert jax.tree.structure(found) == jax.tree.structure(expected)
            assert_close(found, expected)
    _, taps = tapax.capture(model.apply)(variables, X)
    assert "Net/Dense_0" in taps.values
