"""Warnings point at the line of the user's code that called tapax."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax


def warned(call):
    """Return the file and the text of the only warning of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    (one,) = found
    return one.filename, str(one.message)


def reads_global(x):
    return jax.experimental.io_callback(lambda x: np.asarray(x), x, tapax.sow(x, "h"))


def monitored():
    with tapax.monitor(jax.jit(reads_global), to=tapax.Log()) as step:
        step(jnp.ones(2))


def harvested(tmp_path):
    fn = lambda batch: tapax.sow(batch["x"], "h")
    batches = [{"x": jnp.ones((2, 3)), "name": name} for name in "ab"]
    tapax.harvest(fn, batches, tmp_path / "acts", "h", progress=False)


CALLS = {
    "capture": lambda _: tapax.capture(lambda x: x)(1.0),
    "capture of jit": lambda _: tapax.capture(jax.jit(lambda x: x))(1.0),
    "capture in jit": lambda _: jax.jit(lambda x: tapax.capture(lambda x: x)(x)[0])(1.0),
    "capture in vmap": lambda _: jax.vmap(lambda x: tapax.capture(lambda x: x)(x)[0])(jnp.ones(2)),
    "edit": lambda _: tapax.edit(lambda x: x)(1.0),
    "monitor": lambda _: monitored(),
    "harvest": harvested,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_warning_names_the_file_of_the_user(name, tmp_path):
    file, text = warned(lambda: CALLS[name](tmp_path))
    assert file == __file__, text
