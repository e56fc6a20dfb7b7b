"""Random programs with a planted fault, whose location and time the generator knows."""

import dataclasses
import inspect
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from tapax.nonfinite._search import find_nonfinite

pytestmark = pytest.mark.once

WIDTH = 8


# Each fault is on the one line of its function, at the elements of `at`; `u` is positive.


def log_of_negative(u, at):
    return jnp.log(jnp.where(at, -u, u))


def division_by_zero(u, at):
    return u / jnp.where(at, 0.0, u)


def overflow(u, at):
    return jnp.exp(jnp.where(at, 1000.0, -u))


def root_of_negative(u, at):
    return jnp.sqrt(jnp.where(at, -u, u))


def narrow(u, at):
    return jnp.where(at, 1e6 * u, u).astype(jnp.float16).astype(jnp.float32)


def slope_of_root(u, at):
    return jnp.sqrt(u * jnp.where(at, 0.0, 1.0))


def slope_of_power(u, at):
    return (u * jnp.where(at, 0.0, 1.0)) ** 0.3


def slope_of_cube_root(u, at):
    return jnp.cbrt(u * jnp.where(at, 0.0, 1.0))


def slope_of_arcsine(u, at):
    return jnp.arcsin(jnp.where(at, 1.0, 0.5) + 0.0 * u)


FORWARD = [log_of_negative, division_by_zero, overflow, root_of_negative, narrow]
BACKWARD = [slope_of_root, slope_of_power, slope_of_cube_root, slope_of_arcsine]


def ordinary(rng):
    """Apply a layer that neither makes nor swallows bad values."""
    matrix = np.random.default_rng(rng.randrange(1000)).normal(0, 0.3, (4, 4)).astype(np.float32)
    return rng.choice(
        [
            jnp.sin,
            lambda x: 0.5 * x + 1,
            lambda x: (x.reshape(-1, 4) @ matrix).reshape(x.shape),
            lambda x: x / (1 + jnp.mean(x**2)),
            lambda x: jnp.cumsum(x) * 0.2,
            lambda x: jnp.roll(x, 1)[::-1],
            lambda x: jax.jit(lambda y: jnp.cos(y) - 0.1 * y)(x),
            lambda x: jax.nn.gelu(x) + jnp.concatenate([x[1:], x[:1]]),
        ]
    )


def decoy(rng):
    """Apply a layer whose values are not finite but do not reach the result."""
    return rng.choice(
        [
            lambda x: x + jnp.where(x > jnp.inf, jnp.log(-1 - x**2), 0.0),
            lambda x: x * lax.stop_gradient(1 + 1 / jnp.exp(1000 + x**2)),
            lambda x: x + 0.1 * jax.nn.softmax(jnp.where(jnp.arange(x.size) > 1, x, -jnp.inf)),
            lambda x: x + jnp.where(jnp.isnan(root_of_nothing(x)), 0.0, 1.0),
        ]
    )


def root_of_nothing(x):
    return jnp.sqrt(lax.stop_gradient(-1 - x**2))


@dataclasses.dataclass(frozen=True)
class Known:
    """The expected finding of a fault."""

    fault: object
    backward: bool
    iterations: tuple = ()
    mapped: tuple = ()
    device: tuple = ()
    element: int = 0

    @property
    def line(self):
        return inspect.getsourcelines(self.fault)[1] + 1


def make(seed):
    """Make a function of `(x, planted)` with a fault if `planted`, and the expected finding."""
    rng = random.Random(seed)
    backward = rng.random() < 0.5
    fault = rng.choice(BACKWARD if backward else FORWARD)
    element = rng.randrange(4)
    known = Known(fault, backward, element=element)

    def core(x, hit):
        at = hit & (jnp.arange(x.size) == element)
        return x + 0.1 * fault(1 + x**2, at)

    fn = core
    kinds = ["jit", "scan", "fori", "remat", "vmap", "cond", "shard_map"]
    kinds += [] if backward else ["while"]
    nest = [rng.choice(kinds) for _ in range(rng.choice([1, 2, 2, 3]))]
    while nest.count("shard_map") > 1:
        nest.remove("shard_map")
    for kind in nest:
        layers = [
            (decoy if rng.random() < 0.4 else ordinary)(rng) for _ in range(rng.randint(0, 2))
        ]
        fn, known = WRAP[kind](around(fn, layers, rng.randint(0, len(layers))), known, rng)
    if rng.random() < 0.5:
        fn = jax.jit(fn)
    if not backward:
        return lambda x, planted: fn(x, planted), known, nest
    return jax.value_and_grad(lambda x, planted: jnp.sum(fn(x, planted))), known, nest


def around(fn, layers, place):
    def run(x, hit):
        for layer in layers[:place]:
            x = layer(x)
        x = fn(x, hit)
        for layer in layers[place:]:
            x = layer(x)
        return x

    return run


def loop(known, iteration):
    return dataclasses.replace(known, iterations=(iteration, *known.iterations))


def scan(fn, known, rng):
    length = rng.randint(1, 4)
    when = rng.randrange(length)

    def run(x, hit):
        return lax.scan(lambda c, i: (fn(c, hit & (i == when)), c[0]), x, jnp.arange(length))[0]

    return run, loop(known, when)


def fori(fn, known, rng):
    length = rng.randint(1, 4)
    when = rng.randrange(length)
    run = lambda x, hit: lax.fori_loop(0, length, lambda i, c: fn(c, hit & (i == when)), x)
    return run, loop(known, when)


def whiled(fn, known, rng):
    length = rng.randint(1, 4)
    when = rng.randrange(length)

    def run(x, hit):
        step = lambda c: (c[0] + 1, fn(c[1], hit & (c[0] == when)))
        return lax.while_loop(lambda c: c[0] < length, step, (0, x))[1]

    return run, loop(known, when)


def vmapped(fn, known, rng):
    size = rng.randint(2, 3)
    which = rng.randrange(size)

    def run(x, hit):
        xs = x * (1 + 0.01 * jnp.arange(size))[:, None]
        return jax.vmap(fn)(xs, hit & (jnp.arange(size) == which)).mean(0)

    return run, dataclasses.replace(known, mapped=(which, *known.mapped))


def conditional(fn, known, rng):
    number = rng.randint(0, 1)
    other = rng.choice([lambda x, hit: x * 2, lambda x, hit: jnp.log(-1 - x**2)])
    branches = [other, fn] if number else [fn, other]

    def run(x, hit):
        return lax.switch(jnp.where(x.sum() > jnp.inf, 7, number), branches, x, hit)

    return run, known


def sharded(fn, known, rng):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    which = rng.randrange(2)
    spec = PartitionSpec("a")

    def local(x, hit):
        out = fn(x, hit & (lax.axis_index("a") == which))
        return out + 0.1 * lax.psum(out, "a") if which else out

    def run(x, hit):
        specs = {"in_specs": (spec, PartitionSpec()), "out_specs": spec}
        return jax.shard_map(local, mesh=mesh, **specs)(x, hit)

    return run, dataclasses.replace(known, device=(which,))


WRAP = {
    "jit": lambda fn, known, rng: (jax.jit(fn), known),
    "remat": lambda fn, known, rng: (jax.checkpoint(fn), known),
    "scan": scan,
    "fori": fori,
    "while": whiled,
    "vmap": vmapped,
    "cond": conditional,
    "shard_map": sharded,
}


def check(seed):
    fn, known, nest = make(seed)
    x = jnp.linspace(0.1, 0.9, WIDTH)
    plain = jax.jit(fn)
    for planted in (False, True):
        leaves = jax.tree.leaves(plain(x, planted))
        assert planted != all(np.isfinite(leaf).all() for leaf in leaves)
    find = find_nonfinite(fn)
    assert find(x, jnp.asarray(False)) is None
    found = find(x, jnp.asarray(True))
    context = f"{seed}: {known} in {nest}: {found}"
    assert found.source == f"{__file__}:{known.line}", context
    assert found.iterations == known.iterations, context
    assert found.mapped == known.mapped, context
    assert tuple(found.device.values()) == known.device, context
    assert found.index == (known.element,), context
    assert found.phase == ("backward" if known.backward else "forward"), context
    assert found.count == 1, context
    assert all(r.nonfinite == 0 for r in found.operands), context


@pytest.mark.parametrize("seed", range(10))
def test_planted_fault_is_found(seed):
    check(seed)


@pytest.mark.many
@pytest.mark.parametrize("seed", range(10, 200))
def test_each_of_many_planted_faults_is_found(seed):
    check(seed)
