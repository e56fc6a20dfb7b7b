"""Effects in cut functions: those after the cut do not run, and those before it do."""

import jax
import jax.numpy as jnp
import pytest

import tapax
from tests.oracles.closeness import assert_close

X = jnp.linspace(0.1, 1.0, 4)
WRAPS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "jit in jit": lambda f: jax.jit(lambda x: jax.jit(f)(x) + 1),
    "remat": jax.checkpoint,
    "jit in remat": lambda f: jax.checkpoint(jax.jit(f)),
}


def reporting(f):
    """Return a function with effects before and after a site, and the list of reported names."""
    reported = []

    def report(name, x):
        jax.debug.callback(lambda x: reported.append(name), x)

    def fn(x):
        report("before", jnp.cos(x))
        h = tapax.sow(jnp.sin(x), "h")
        report("after", jnp.tanh(h))
        return jnp.sum(h)

    return f(fn), reported


def run(f, reported, *args):
    out = f(*args)
    jax.effects_barrier()
    found = list(reported)
    reported.clear()
    return out, found


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["called", "jitted"])
@pytest.mark.parametrize("name", WRAPS)
def test_effects_after_the_site_do_not_run(name, jit):
    fn, reported = reporting(WRAPS[name])
    assert run(fn, reported, X)[1] == ["before", "after"]
    prefix = jit(tapax.prefix(fn, "h"))
    h, found = run(prefix, reported, X)
    assert_close(h, jnp.sin(X))
    assert found == ["before"]
    assert "tanh" not in str(jax.make_jaxpr(prefix)(X))
    assert run(fn, reported, X)[1] == ["before", "after"]


def test_effects_after_the_site_in_a_mapped_function_do_not_run():
    fn, reported = reporting(lambda f: jax.vmap(jax.jit(f)))
    h, found = run(tapax.prefix(fn, "h"), reported, X)
    assert_close(h, jnp.sin(X))
    assert set(found) == {"before"}


def test_effects_after_one_iteration_do_not_run():
    reported = []

    def step(x, _):
        h = tapax.sow(jnp.sin(x), "h")
        jax.debug.callback(lambda x: reported.append(float(x)), h)
        return h, None

    fn = lambda x: jax.lax.scan(step, x, length=4)[0]
    h, found = run(tapax.prefix(fn, tapax.at("h", step=2)), reported, 0.5)
    first = jnp.sin(0.5)
    assert_close(h, jnp.sin(jnp.sin(first)))
    assert_close(jnp.array(found), jnp.stack([first, jnp.sin(first)]))


def test_a_harvest_does_not_run_effects_after_its_sites(tmp_path):
    fn, reported = reporting(jax.jit)
    batch = jnp.ones((2, 3))
    acts = tapax.harvest(fn, [batch], to=tmp_path / "acts", values="h", progress=False)
    jax.effects_barrier()
    assert_close(acts["h"][:], jnp.sin(batch))
    assert "after" not in reported
    assert "before" in reported
