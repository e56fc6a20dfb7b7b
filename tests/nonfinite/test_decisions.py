"""Bad values that reach a result through bools and integers: predicates, bit patterns, indices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from tapax.nonfinite._search import find_nonfinite

X = jnp.array([-1.0, 2.0])
Y = jnp.array([1.0, 2.0])


def flagged(flag):
    return jnp.where(flag, jnp.nan, 1.0)


def is_bad(x):
    return jnp.isnan(jnp.log(x))


def through_bits(x):
    bits = lax.bitcast_convert_type(jnp.log(x), jnp.uint32)
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFFFFF), jnp.float32)


def through_reference(x):
    flag = jax.new_ref(jnp.zeros(2, bool))
    flag[...] = is_bad(x)
    return flagged(flag[...])


def through_callback(x):
    result = jax.ShapeDtypeStruct((2,), np.float32)
    return jax.pure_callback(lambda b: np.where(b, np.nan, 0).astype(np.float32), result, is_bad(x))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.median(jnp.log(x)),
        lambda x: jnp.quantile(jnp.log(x), 0.3),
        lambda x: jnp.where(is_bad(x), jnp.nan, jnp.log(x)),
        lambda x: flagged(is_bad(x).any()),
        lambda x: flagged(jnp.sum(is_bad(x)) > 0),
        lambda x: flagged(jax.checkpoint(jax.jit(is_bad))(x)),
        lambda x: Y.at[jnp.log(x).astype(int) + 7].get(mode="fill"),
        lambda x: jax.nn.softmax(jnp.where(jnp.log(x).sum() > 0, x, -jnp.inf)),
        lambda x: jax.scipy.linalg.expm(jnp.diag(jnp.log(x))),
        through_bits,
        through_reference,
        through_callback,
        jax.grad(lambda x: jnp.sum(flagged(is_bad(x)) * x)),
        lambda x: lax.cond(is_bad(x).any(), lambda: jnp.nan, lambda: 0.0),
        lambda x: lax.switch(is_bad(x).sum(), [lambda: 0.0, lambda: jnp.inf]),
        jax.vmap(lambda x: lax.cond(is_bad(x), lambda: jnp.nan, lambda: 0.0)),
        lambda x: lax.scan(lambda c, b: (c + flagged(b), None), 0.0, is_bad(x))[0],
    ],
    ids=[
        "median",
        "quantile",
        "select",
        "any",
        "count",
        "calls",
        "index",
        "mask",
        "matrix exponential",
        "bits",
        "reference",
        "callback",
        "gradient",
        "cond",
        "switch",
        "mapped cond",
        "scan over flags",
    ],
)
def test_origin_is_the_bad_value_that_decided_the_result(fn):
    found = find_nonfinite(fn)(X)
    assert (found.operation, found.kind, found.position) == ("log", "nan", (0,))
    assert found.operands[0].min == -1.0


XS = jnp.array([1.0, 2.0, -1.0, 3.0])


def carried(xs):
    return lax.scan(lambda c, x: (c | is_bad(x), flagged(c)), False, xs)[1]


def stacked(xs):
    return flagged(lax.scan(lambda c, x: (c, is_bad(x)), 0.0, xs)[1])


def counted(xs):
    return flagged(lax.fori_loop(0, 4, lambda i, c: c | is_bad(xs[i]), False))


def mapped_while(xs):
    step = lambda c: (c[0] + 1, c[1] | is_bad(xs[c[0]]))
    one = lambda n: lax.while_loop(lambda c: c[0] < n, step, (0, False))[1]
    return flagged(jax.vmap(one)(jnp.array([2, 4])))


def nested(xs):
    inner = lambda k: lax.scan(lambda c, x: (c, is_bad(x + 2 - k)), 0.0, xs)[1].any()
    return flagged(lax.scan(lambda c, k: (c | inner(k), None), False, jnp.arange(3.0))[0])


@pytest.mark.parametrize(
    ("fn", "iterations"),
    [(carried, (2,)), (stacked, (2,)), (counted, (2,)), (mapped_while, (2,)), (nested, (1, 2))],
)
def test_flag_that_leaves_a_loop_tells_the_iteration(fn, iterations):
    found = find_nonfinite(fn)(XS.at[2].set(-1.5))
    assert (found.operation, found.iterations) == ("log", iterations)
    assert find_nonfinite(fn)(jnp.abs(XS)) is None


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("bad", [0, 1])
def test_flag_of_a_device_tells_the_device(mesh, check_vma, bad):
    spec = PartitionSpec("a")
    sharded = lambda fn: jax.shard_map(
        fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    x = jnp.ones(4).at[2 * bad].set(-1.0)
    shared = lambda x: flagged(lax.psum(is_bad(x).astype(int), "a") > 0)
    for fn in (sharded(shared), lambda x: flagged(sharded(is_bad)(x))):
        found = find_nonfinite(fn)(x)
        assert (found.operation, found.device["a"]) == ("log", bad)


def test_bad_argument_is_found_through_predicates_and_bits():
    loss = lambda w, approximate: jnp.sum(jax.nn.gelu(w * X, approximate=approximate))
    for fn in (
        # The derivative of the exact GELU may go through the bits of its operand.
        jax.grad(lambda w: loss(w, False)),
        jax.grad(lambda w: loss(w, True)),
        lambda w: flagged(jnp.isnan(w)),
        lambda w: lax.scan(lambda c, _: (c | jnp.isnan(w), flagged(c)), False, None, 3)[1],
    ):
        found = find_nonfinite(fn)(jnp.nan)
        assert (found.operation, found.path) == ("argument", "w")


def test_constant_that_no_bad_value_decides_is_the_origin():
    for fn in (
        lambda x: flagged(x < 0),
        lambda x: flagged(jnp.isinf(x) | (x < 0)),
        lambda x: flagged(jnp.where(is_bad(x), 0.0, x) >= 0),
    ):
        found = find_nonfinite(fn)(X)
        assert (found.operation, found.kind) == ("constant", "nan")


def root(x):
    return jnp.sqrt(-x)


def test_fault_is_not_hidden_by_a_masked_value_that_decides_something_else():
    fine = lambda x: jnp.isfinite(jnp.log(x))
    chosen_index = lambda x: jnp.argmax(jnp.log(x))
    for fn in (
        lambda x: jnp.where(fine(x), root(x), 0.0),
        lambda x: jnp.where(fine(x), root(x), -jnp.inf).max(),
        lambda x: jnp.where(fine(x), root(x), 0.0) + jnp.where(fine(x), 0.0, -jnp.inf),
        lambda x: root(1.0 + chosen_index(x)),
        lambda x: root(x + 2)[chosen_index(x)],
        lambda x: root(jax.random.uniform(jax.random.key(chosen_index(x))) + 1),
    ):
        assert find_nonfinite(fn)(X).operation == "sqrt"
    found = find_nonfinite(lambda x, z: jnp.where(fine(x), z, 0.0))(X, jnp.array([1.0, jnp.nan]))
    assert (found.operation, found.path) == ("argument", "z")


def test_decision_without_a_bad_result_is_not_a_finding():
    optimizer = optax.apply_if_finite(optax.sgd(0.1), 2)
    w = jnp.ones(2)

    def step(x):
        update, _ = optimizer.update(jnp.log(x), optimizer.init(w), w)
        return optax.apply_updates(w, update)

    for fn in (lambda x: jnp.where(is_bad(x), 0.0, 1.0), jnp.argsort, step):
        assert find_nonfinite(fn)(X) is None
    assert find_nonfinite(lambda x: root(step(x)))(X).operation == "sqrt"
