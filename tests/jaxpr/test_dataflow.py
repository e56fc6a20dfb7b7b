"""Analyses follow values through calls, branches and loops."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tapax import _jax
from tapax._jaxpr.dataflow import ForwardAnalysis, computed_from
from tests.models.foreign_primitives import foreign_primitive

X = jnp.ones(3)


class Inputs(ForwardAnalysis[frozenset]):
    """The set of inputs on which each value depends."""

    nothing = frozenset()

    def join(self, facts):
        return frozenset().union(*facts)

    def transfer(self, eqn, facts):
        return [self.join(facts)] * len(eqn.outvars)


def dependences(fn, *args):
    jaxpr = jax.make_jaxpr(fn)(*args)
    return [set(found) for found in Inputs().run(jaxpr, [frozenset({i}) for i in range(len(args))])]


@jax.custom_vjp
def first(x, y):
    return x


first.defvjp(lambda x, y: (x, None), lambda _, ct: (ct, ct))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_calls_are_followed_result_by_result(wrap):
    assert dependences(wrap(lambda x, y: (x + 1, x * y, 3.0)), X, X) == [{0}, {0, 1}, set()]
    assert dependences(wrap(first), X, X) == [{0}]


def test_results_of_a_branch_depend_on_the_predicate():
    def f(p, x, y):
        return lax.cond(p, lambda x, y: (x, 2 * y), lambda x, y: (y, y), x, y)

    assert dependences(f, True, X, X) == [{0, 1, 2}, {0, 2}]


def test_loops_are_followed_until_nothing_grows():
    def rotate(c, x):
        a, b, c, d = c
        return (b, c, d, d), a + x

    def f(a, b, c, d, xs):
        carry, ys = lax.scan(rotate, (a, b, c, d), xs)
        return *carry, ys

    # After at least one iteration nothing depends on the initial value of the first carry.
    assert dependences(f, 1.0, 2.0, 3.0, 4.0, X) == [
        {1, 2, 3}, {2, 3}, {3}, {3}, {0, 1, 2, 3, 4}
    ]  # fmt: skip
    assert dependences(f, 1.0, 2.0, 3.0, 4.0, X[:0])[0] == {0, 1, 2, 3}


def test_primitives_of_other_libraries_are_followed_into_their_implementation():
    their = foreign_primitive("their_pair", lambda x, y, by: (x * by, y), multiple_results=True)
    assert dependences(lambda x, y: their.bind(x, y, by=2.0), X, X) == [{0}, {1}]
    assert dependences(jax.jit(lambda x, y: their.bind(x, y, by=2.0)), X, X) == [{0}, {1}]


def test_kernels_of_other_libraries_mix_all_operands():
    kernel = foreign_primitive("their_kernel", lambda x, y: (x, y), multiple_results=True)
    kernel.def_impl(lambda *args: jax.jit(kernel.bind)(*args))
    assert dependences(kernel.bind, X, X) == [{0, 1}, {0, 1}]
    kernel.def_impl(lambda x, y: (float(x[0]) * x, y))  # rejects traced values
    assert dependences(kernel.bind, X, X) == [{0, 1}, {0, 1}]


def test_state_of_a_while_loop_depends_on_its_test():
    def f(x, y, limit):
        return lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + 1, 2 * c[1]), (x, y))

    assert dependences(f, 1.0, 2.0, 3.0) == [{0, 2}, {0, 1, 2}]


def test_computed_from_finds_all_dependent_variables():
    jaxpr = jax.make_jaxpr(lambda x, y: (jnp.sin(x) + 1, jnp.cos(y), x * y))(1.0, 2.0)
    found = computed_from(jaxpr.eqns, _jax.open_jaxpr(jaxpr).invars[:1])
    names = [eqn.primitive.name for eqn in jaxpr.eqns if set(eqn.outvars) & found]
    assert names == ["sin", "add", "mul"]
