"""The operands that equations return.

The oracle evaluates the equation on operands with different values: a result that is an operand has
the values of that operand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapax._frameworks.origins import PassedOperands

A, B = jnp.arange(3.0), jnp.arange(3.0) + 10


def swap_once(carry, _):
    a, b, c = carry
    return (b, a, c), None


def copy_first(carry, _):
    a, b = carry
    return (a + 1, a), None


CASES = {
    "jit": jax.jit(lambda a, b: (b, a + b, a)),
    "remat": jax.checkpoint(lambda a, b: (b, jnp.sin(a), a)),
    "call in a call": jax.jit(lambda a, b: jax.checkpoint(lambda b: (b, -b))(b)),
    "branches": lambda a, b: lax.cond(a[0] < 1, lambda: (a, b, -a), lambda: (a, a, b)),
    "scan": lambda a, b: lax.scan(swap_once, (a, b, a * 2), None, 3)[0],
    "carry that takes another": lambda a, b: lax.scan(copy_first, (a, a), None, 2)[0],
    "slices": lambda a, b: lax.scan(lambda c, x: (c + x[0], (x[1], x[0])), 0.0, (a, b)),
    "while": lambda a, b: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[2], c[1], c[3]), (0, a, b, a * 2)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_results_that_are_operands_have_their_values(name):
    program = jax.make_jaxpr(CASES[name])(A, B)
    known = dict(zip(program.jaxpr.invars, (A, B), strict=True))
    passed = PassedOperands()
    for eqn in program.jaxpr.eqns:
        given = [v.val if hasattr(v, "val") else known[v] for v in eqn.invars]
        found = eqn.primitive.bind(*given, **eqn.params)
        results = found if eqn.primitive.multiple_results else [found]
        known.update(zip(eqn.outvars, results, strict=True))
        for result, operand in passed.find(eqn).items():
            if jnp.shape(results[result]) == jnp.shape(given[operand]):
                np.testing.assert_array_equal(results[result], given[operand])


@pytest.mark.parametrize("name", ["jit", "remat"])
def test_a_call_returns_its_operands(name):
    (eqn,) = jax.make_jaxpr(CASES[name])(A, B).jaxpr.eqns
    assert PassedOperands().find(eqn) == {0: 1, 2: 0}


@pytest.mark.skipif(
    jax.config.jax_enable_checks, reason="JAX checks a body again at each of its 2**40 calls"
)
def test_a_body_is_examined_once():
    """Otherwise the time doubles at each level of these calls."""

    def call_twice(inner):
        return jax.jit(lambda a: inner(inner(a)))

    fn = jax.jit(lambda a: a)
    for _ in range(40):
        fn = call_twice(fn)
    (*_, eqn) = jax.make_jaxpr(fn)(A).jaxpr.eqns
    assert PassedOperands().find(eqn) == {0: 0}
