"""The names, imports and version of the package."""

import importlib.metadata
import json
import subprocess
import sys

import pytest

import tapax

NAMESPACES = ("alert", "attribute", "compat", "data", "hidden", "nn", "plot", "reduce", "sink")
FRAMEWORKS = ("brainstate", "equinox", "flax", "haiku", "keras", "matplotlib", "ray", "torch")


def in_a_new_process(code):
    """Run `code` in a new process and return the JSON that it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_every_public_name_is_an_attribute():
    assert set(NAMESPACES) < set(tapax.__all__)
    assert all(hasattr(tapax, name) for name in tapax.__all__)


def test_dir_lists_public_names_alone():
    assert dir(tapax) == sorted(tapax.__all__)
    assert dir(tapax.compat) == ["braintrace", "linen", "nnx", "oryx"]


def test_submodules_are_attributes_before_they_are_imported():
    code = "import json, tapax; print(json.dumps([m.__name__ for m in ({},)]))"
    names = ["tapax.hidden.online", "tapax.data.ray", "tapax.viewer"]
    assert in_a_new_process(code.format(", ".join(names))) == names


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'tapax' has no attribute 'captured'"):
        tapax.captured


def test_no_name_imports_a_framework():
    code = f"""
import json, sys, tapax
for name in tapax.__all__:
    getattr(tapax, name)
print(json.dumps([name for name in {FRAMEWORKS!r} if name in sys.modules]))
"""
    assert in_a_new_process(code) == []


def test_namespaces_are_there_without_their_frameworks():
    code = f"""
import json, sys
sys.modules.update(dict.fromkeys({FRAMEWORKS!r}))
import tapax
try:
    tapax.nn.BatchEnsembleLinear
except ImportError as error:
    missing = error.name
print(json.dumps([missing, *(hasattr(tapax, name) for name in {NAMESPACES!r})]))
"""
    assert in_a_new_process(code) == ["flax", *(True for _ in NAMESPACES)]


@pytest.mark.parametrize(
    ("wanted", "extra"),
    [
        ("nn.batch_ensemble", "flax"),
        ("nn.shard", "flax"),
        ("compat.nnx", "flax"),
        ("compat.linen", "flax"),
        ("compat.braintrace", "brainstate"),
        ("data.ray", "ray"),
    ],
)
def test_names_that_need_a_framework_name_its_extra(wanted, extra):
    code = f"""
import json, sys
sys.modules.update(dict.fromkeys({FRAMEWORKS!r}))
import tapax
try:
    tapax.{wanted}
except ImportError as error:
    print(json.dumps(str(error)))
"""
    needs = f"tapax.{wanted} needs {extra}, which is not installed: pip install 'tapax[{extra}]'."
    assert in_a_new_process(code) == needs


def test_importing_the_package_imports_the_marks_alone():
    code = """
import json, sys, tapax
later = (
    "_api", "_calling", "_frameworks", "_results", "_walk", "hidden", "monitoring", "nonfinite",
    "plot", "reduce._statistics",
)
print(json.dumps([name for name in later if f"tapax.{name}" in sys.modules]))
"""
    assert in_a_new_process(code) == []


def test_the_version_has_one_place():
    assert importlib.metadata.version("tapax") == tapax.__version__


EVERYTHING = """
import json, os
os.environ["KERAS_BACKEND"] = "jax"
import keras  # whose import adds settings to JAX
import jax, jax.numpy as jnp, tapax
traces = []
other = jax.jit(lambda x: traces.append(1) or x + 1)
x = jnp.ones(3)
other(x)
f = lambda x: jnp.sum(tapax.sow(jnp.sin(x), "h"))
step = lambda s, x: (jnp.tanh(s + x), s)
tapax.capture(f)(x)
tapax.edit(f, values={"h": 0.0})(x)
tapax.grad(f)(x)
tapax.find_nonfinite(f)(x)
tapax.capture(f, values=tapax.ops("sin"))(x)
tapax.hidden.add_hidden_perturbation(step, x, x)
with tapax.monitor(jax.jit(jax.grad(f)), every=1, to=lambda step, record: None) as watched:
    watched(x)
import brainstate, equinox, haiku
from flax import linen, nnx
from tapax.compat import linen as linen_compat, nnx as nnx_compat, oryx
other(x)
tapax.capture(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))(x)
tapax.capture(equinox.nn.Linear(3, 2, key=jax.random.key(0)))(x)
dense = linen.Dense(2)
variables = dense.init(jax.random.key(0), x)
linen_compat.apply(dense, variables, x, capture_intermediates=True)
linear = haiku.without_apply_rng(haiku.transform(lambda x: haiku.Linear(2)(x)))
tapax.capture(linear.apply)(linear.init(jax.random.key(0), x), x)
tapax.capture(brainstate.nn.Linear(3, 2))(x)
tapax.capture(keras.layers.Dense(2))(x[None])
oryx.reap(lambda x: oryx.sow(x, tag="t", name="a"), tag="t")(x)
other(x)
print(json.dumps(len(traces)))
"""


@pytest.mark.once
def test_nothing_makes_an_unrelated_function_trace_again():
    assert in_a_new_process(EVERYTHING) == 1
