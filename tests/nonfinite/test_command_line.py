"""The command line, run as a separate process on small training scripts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tapax.nonfinite._saved_inputs import load_inputs, save_inputs
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

ROOT = str(Path(__file__).parents[2])

PLAIN = """
import functools, sys
import jax, jax.numpy as jnp

@functools.partial(jax.jit, donate_argnums=0)
def step(w, x):
    loss = lambda w: jnp.sum(jnp.sqrt(w) * x)
    return w - float(sys.argv[1]) * jax.grad(loss)(w), {"mask": jnp.where(x > 1, 0.0, -jnp.inf)}

w, best = jnp.ones(3), jnp.inf
for i in range(6):
    try:
        w, _ = step(w, jnp.arange(3.0))
    except Exception:
        print("never printed")
print("ended at", w.shape)
"""

NNX = """
import sys
import jax.numpy as jnp, optax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return jnp.sqrt(self.inner(x) + 3.0)

net = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(net, optax.sgd(float(sys.argv[1])), wrt=nnx.Param)

@nnx.jit
def step(net, optimizer, x):
    grads = nnx.grad(lambda net: jnp.mean(net(x)))(net)
    optimizer.update(net, grads)

for i in range(8):
    step(net, optimizer, jnp.ones((2, 3)))
print("ended")
"""

EQUINOX = """
import sys
import equinox as eqx, jax, jax.numpy as jnp

class Net(eqx.Module):
    inner: eqx.nn.Linear

    def __call__(self, x):
        return jnp.sqrt(self.inner(x) + 3.0)

    @eqx.filter_jit
    def step(self, x):
        grads = eqx.filter_grad(lambda net: jnp.mean(net(x)))(self)
        return eqx.apply_updates(self, jax.tree.map(lambda g: -float(sys.argv[1]) * g, grads))

net = Net(eqx.nn.Linear(3, 3, key=jax.random.key(0)))
for i in range(8):
    net = net.step(jnp.ones(3))
print("ended")
"""


def run(tmp_path, text, *arguments, options=()):
    script = tmp_path / "train.py"
    script.write_text(text)
    command = [sys.executable, "-m", "tapax", "nonfinite", *options, "train.py", *arguments]
    env = {**os.environ, "PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )


def test_first_bad_step_of_a_script_is_reported_and_replayed(tmp_path):
    # By hand, the slope of the root is 1 / (2 sqrt(w)): w[2] is 1, 0.5, then negative.
    done = run(tmp_path, PLAIN, "0.5", options=["--save", "bad"])
    assert done.returncode == 1
    assert "a NaN made by `sqrt`, at train.py:7, in the forward pass" in done.stderr
    assert "It was call 3 of step." in done.stderr
    assert "ended" not in done.stdout and "never printed" not in done.stdout
    w, x = load_inputs(str(tmp_path / "bad")).arrays
    slope = lambda w: np.arange(3) / 2 / np.sqrt(w)
    after = np.ones(3) - 0.5 * slope(np.ones(3))
    assert_close(w, after - 0.5 * slope(after))
    np.testing.assert_array_equal(x, np.arange(3.0))
    again = run(tmp_path, PLAIN, "0.5", options=["--replay", "bad"])
    assert again.returncode == 1
    assert again.stderr.splitlines()[:3] == done.stderr.splitlines()[:3]


@pytest.mark.many
@pytest.mark.parametrize(
    ("text", "place"), [(NNX, "Net, at train.py:11"), (EQUINOX, "Net, at train.py:9")]
)
def test_script_of_a_framework(tmp_path, text, place):
    done = run(tmp_path, text, "1.0")
    assert done.returncode == 1
    assert f"made by `sqrt` in {place}" in done.stderr
    assert (tmp_path / "nonfinite" / "inputs.safetensors").exists()
    again = run(tmp_path, text, "1.0", options=["--replay", "nonfinite"])
    assert again.returncode == 1
    assert again.stderr.splitlines()[0] == done.stderr.splitlines()[0]


@pytest.mark.many
def test_a_clean_script_runs_to_its_end(tmp_path):
    done = run(tmp_path, PLAIN, "0.001")
    assert (done.returncode, done.stdout) == (0, "ended at (3,)\n")
    assert done.stderr == ("No non-finite value was seen in 6 checked calls of jitted functions.\n")
    done = run(tmp_path, PLAIN, "0.001", options=["--every", "3"])
    assert "in 2 checked calls" in done.stderr


@pytest.mark.many
def test_script_that_fails_or_exits_by_itself(tmp_path):
    failing = "import jax\njax.jit(lambda x: x + 1)(1.0)\nraise KeyError('mine')\n"
    done = run(tmp_path, failing)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "train.py" in lines[1] and "KeyError: 'mine'" in done.stderr
    assert "tapax/nonfinite/" not in done.stderr
    assert lines[-1] == (
        "The script failed. No non-finite value was seen in 1 checked calls of jitted functions."
    )
    done = run(tmp_path, "import sys\nprint(sys.argv[1:], __name__)\nsys.exit(7)\n", "--a", "b")
    assert (done.returncode, done.stdout) == (7, "['--a', 'b'] __main__\n")
    assert "No call of a jitted function was seen" in done.stderr


def test_bad_input_of_the_command(tmp_path):
    done = run(tmp_path, "", options=["--every", "0"])
    assert done.returncode == 2 and "--every must be at least 1, but is 0." in done.stderr
    done = run(tmp_path, "", options=["--replay", "nowhere"])
    assert done.returncode == 2 and "'nowhere' has no saved inputs" in done.stderr
    command = [sys.executable, "-m", "tapax", "nonfinite", "none.py"]
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "There is no script 'none.py'." in done.stderr


def test_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = run(tmp_path, PLAIN, "0.5", options=["--save", "file"])
    assert done.returncode == 1
    assert "made by `sqrt`" in done.stderr and "could not be saved in 'file'" in done.stderr


def test_inputs_of_every_type_are_saved(tmp_path):
    arrays = [
        jnp.arange(6.0).reshape(2, 3).T,
        jnp.ones(2, jnp.bfloat16),
        jnp.zeros((0, 2), jnp.int8),
        jax.random.key(3),
        np.float32(2.5),
        jnp.array(True),
    ]
    save_inputs(str(tmp_path), "step", arrays)
    loaded = load_inputs(str(tmp_path))
    assert loaded.function == "step"
    for x, y in zip(arrays, loaded.arrays, strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    about = json.loads((tmp_path / "inputs.json").read_text())
    (tmp_path / "inputs.json").write_text(json.dumps(about | {"version": 9}))
    with pytest.raises(ValueError, match="version 9 of the format"):
        load_inputs(str(tmp_path))
