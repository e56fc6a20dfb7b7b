"""The feature of every extra works after installing it alone into an empty environment."""

import tomllib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.many, pytest.mark.once]

SETUP = """
import jax, jax.numpy as jnp
import tapax
x = jax.random.normal(jax.random.key(0), (4, 3))
f = lambda x: jnp.sum(tapax.sow(jnp.sin(x), "h"))
"""

FEATURES = {
    "flax": """
from flax import linen, nnx
_, taps = tapax.capture(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))(x)
assert taps.values["Linear"].shape == (4, 2)
dense = linen.Dense(2)
variables = dense.init(jax.random.key(0), x)
_, taps = tapax.capture(dense.apply)(variables, x)
assert taps.values["Dense"].shape == (4, 2)
tapax.nn.batch_ensemble, tapax.compat.nnx, tapax.compat.linen
""",
    "equinox": """
import equinox
linear = equinox.nn.Linear(3, 2, key=jax.random.key(0))
_, taps = tapax.capture(jax.vmap(linear))(x)
assert taps.values["Linear"].shape == (4, 2)
""",
    "haiku": """
import haiku
linear = haiku.without_apply_rng(haiku.transform(lambda x: haiku.Linear(2)(x)))
_, taps = tapax.capture(linear.apply)(linear.init(jax.random.key(0), x), x)
assert taps.values["linear"].shape == (4, 2)
""",
    "brainstate": """
import brainstate
_, taps = tapax.capture(brainstate.nn.Linear(3, 2))(x)
assert taps.values["Linear"].shape == (4, 2)
tapax.compat.braintrace
""",
    "keras": """
import keras
_, taps = tapax.capture(keras.layers.Dense(2))(x)
assert [value.shape for value in taps.values.values()] == [(4, 2)]
""",
    "plot": """
import matplotlib
matplotlib.use("Agg")
tapax.plot.taps(tapax.capture(jax.grad(f))(x)[1]).savefig("taps.png")
""",
    "tensorboard": """
import pathlib
sink = tapax.sink.tensorboard("log")
sink(0, {"h/value_rms": 1.0})
sink.close()
assert list(pathlib.Path("log").glob("events*"))
""",
    "parquet": """
with tapax.monitor(jax.jit(f), every=1, to="run.parquet") as step:
    step(x)
assert len(tapax.open("run.parquet").steps) == 1
acts = tapax.harvest(f, [x], to="acts", values="h")
acts.export("acts.arrow")
""",
    "lance": """
import lance
tapax.harvest(f, [x], to="acts", values="h").export("acts.lance")
assert lance.dataset("acts.lance").count_rows() == 4
""",
    "view": """
import anywidget
from tapax.viewer._notebook import make_widget
from tapax.viewer._page import make_page
page = make_page(tapax.capture(f)(x)[1])
assert isinstance(make_widget(page._payload), anywidget.AnyWidget)
""",
    "ray": """
def make():
    import jax.numpy as jnp, tapax
    return lambda x: tapax.sow(jnp.sin(x), "h")

acts = tapax.data.ray.harvest(make, [x], "acts", num_workers=1)
assert len(acts) == 4
""",
}


def test_every_extra_has_a_test():
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extras = declared["project"]["optional-dependencies"]
    assert {*FEATURES, "all"} == extras.keys()


@pytest.mark.parametrize("extra", FEATURES)
def test_an_extra_alone_installs_what_its_feature_needs(extra, distributions, environment):
    environment.install(f"{distributions.wheel}[{extra}]")
    program = environment.folder / "program.py"
    program.write_text(SETUP + FEATURES[extra])
    environment.run("python", program.name)
