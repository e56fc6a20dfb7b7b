"""Restaged loops and branches compute the results of the original ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapax import _jax
from tapax._jaxpr.restage import Scan, bind_cond
from tests.oracles.closeness import assert_close

START, XS = jnp.float32(0.5), jnp.arange(1, 6, dtype=jnp.float32)


def equation_of(fn, *args):
    (eqn,) = jax.make_jaxpr(fn)(*args).eqns
    return eqn


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("index", range(5))
def test_peeled_iteration_runs_alone_and_in_order(index, reverse):
    def body(c, x):
        return jnp.sin(c) + x, c * x

    eqn = equation_of(lambda c, xs: lax.scan(body, c, xs, reverse=reverse), START, XS)
    loop = Scan.of(eqn, [START, XS])
    run = _jax.as_function(loop.body)

    def once(values):
        carry, y = run(*values)
        return [carry, y + 100], values[0]

    (carry, ys), before = jax.jit(lambda: loop.peel(index, run, once))()
    c, expected, seen = np.asarray(START), np.zeros(5, np.float32), None
    for i in reversed(range(5)) if reverse else range(5):
        seen = c if i == index else seen
        expected[i] = c * XS[i] + 100 * (i == index)
        c = np.sin(c) + XS[i]
    assert_close(carry, c)
    assert_close(ys, expected)
    assert_close(before, seen)


def test_peeling_leaves_no_loop_without_iterations():
    eqn = equation_of(lambda c, xs: lax.scan(lambda c, x: (c + x, c), c, xs), START, XS[:1])
    loop = Scan.of(eqn, [START, XS[:1]])
    run = _jax.as_function(loop.body)
    program = jax.make_jaxpr(lambda: loop.peel(0, run, lambda values: (run(*values), None))[0])()
    assert "scan" not in str(program)


@pytest.mark.parametrize("chosen", range(3))
def test_results_of_branches_that_did_not_run_are_zeros(chosen):
    branches = [lambda x: x, lambda x: 2 * x, lambda x: 3 * x]
    (*_, eqn) = jax.make_jaxpr(lambda i, x: lax.switch(i, branches, x))(0, XS).eqns
    functions = [lambda x, f=f: ([f(x)], [f(x) + 1]) for f in branches]
    types = [[jax.typeof(XS)]] * 3

    def run(i, x):
        return bind_cond(eqn, i, [x], functions, types)

    (out,), private = jax.jit(run)(jnp.int32(chosen), XS)
    assert_close(out, (chosen + 1) * XS)
    for i, (result,) in enumerate(private):
        assert_close(result, (chosen + 1) * XS + 1 if i == chosen else jnp.zeros(5))
