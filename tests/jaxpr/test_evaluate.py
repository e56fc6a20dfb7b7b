"""An evaluated program is the program itself, equation by equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive

from tapax import _jax
from tapax._jax import emission
from tapax._jaxpr.bodies import list_equations
from tapax._jaxpr.evaluate import bind_in_context, evaluate
from tests.oracles.closeness import assert_close

X = jnp.linspace(-1, 1, 6, dtype=jnp.float32).reshape(2, 3)


def literals(x):
    return 2 * x + np.float32(3) - jnp.where(x > 0, x, -0.0), jnp.zeros(3) + 1


def scopes(x):
    with jax.named_scope("outer"):
        y = jnp.sin(x)
        with jax.named_scope("inner"):
            return jnp.cos(y) @ y.T


def loops(x):
    carry, ys = lax.scan(lambda c, row: (c + row.sum(), jnp.exp(c)), 0.0, x)
    return lax.while_loop(lambda c: c < 3, lambda c: c + 1, carry), ys


def calls(x):
    y = jax.nn.gelu(jax.jit(lambda x: x[::-1])(x))
    return jax.checkpoint(jnp.tanh)(y), jax.nn.relu(y), lax.cond(y[0, 0] > 0, jnp.sin, jnp.cos, y)


def gradients(x):
    return jax.value_and_grad(lambda x: jax.checkpoint(jnp.sin)(x).sum() * x[0, 0])(x)


def layouts(x):
    y = lax.dynamic_slice(x, (0, 1), (2, 2))
    return jnp.broadcast_to(y[None], (4, 2, 2)).reshape(8, 2) + lax.iota(np.float32, 2)


def constants(x):
    return x + jnp.arange(6.0, dtype=x.dtype).reshape(2, 3) + np.ones(3, x.dtype)


PROGRAMS = (literals, scopes, loops, calls, gradients, layouts, constants)


def described(jaxpr):
    """Return the text of a program, and the scopes, the line and the settings of each equation."""
    places = [
        (tuple(_jax.names_of(eqn)), next(iter(_jax.lines_of(eqn)), None), eqn.ctx)
        for eqn in list_equations(jaxpr)
    ]
    types = [v.aval for eqn in list_equations(jaxpr) for v in (*eqn.invars, *eqn.outvars)]
    return str(jaxpr), places, list(map(repr, types))


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_evaluated_in_a_trace_is_unchanged(program):
    jaxpr = jax.make_jaxpr(program)(X)
    again = jax.make_jaxpr(lambda x: evaluate(jaxpr, [x]))(X)
    assert described(again) == described(jaxpr)


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_is_bound_if_jax_traces_in_another_way(program, monkeypatch):
    monkeypatch.setattr(emission, "_CAN_EMIT", False)
    jaxpr = jax.make_jaxpr(program)(X)
    again = jax.make_jaxpr(lambda x: evaluate(jaxpr, [x]))(X)
    names = [[eqn.primitive.name for eqn in list_equations(each)] for each in (jaxpr, again)]
    assert names[0] == names[1]
    assert_close(jax.jit(lambda x: evaluate(jaxpr, [x]))(X), jax.tree.leaves(program(X)))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("transformed", [jax.jit, jax.vmap, lambda f: f])
def test_evaluated_program_computes_its_results(program, transformed):
    jaxpr = jax.make_jaxpr(program)(X)
    arguments = jnp.stack([X, 2 * X]) if transformed is jax.vmap else X
    found = transformed(lambda x: evaluate(jaxpr, [x]))(arguments)
    assert_close(found, jax.tree.leaves(transformed(program)(arguments)))


def test_evaluated_program_has_the_derivative_of_the_program():
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x).sum())(X)
    found = jax.jit(jax.grad(lambda x: evaluate(jaxpr, [x])[0]))(X)
    assert_close(found, np.cos(X))


def test_operand_of_another_type_gives_a_result_of_another_type():
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) * x)(X)
    wider = jax.make_jaxpr(lambda x: evaluate(jaxpr, [x]))(jnp.ones((5, 7), jnp.float16))
    assert [(a.shape, a.dtype) for a in wider.out_avals] == [((5, 7), jnp.float16)]


def test_scope_and_metadata_around_an_evaluation_reach_the_equations():
    jaxpr = jax.make_jaxpr(scopes)(X)

    def inside(x):
        with jax.named_scope("around"):
            return evaluate(jaxpr, [x])

    found = [tuple(_jax.names_of(eqn)) for eqn in jax.make_jaxpr(inside)(X).eqns]
    assert found == [("around", *_jax.names_of(eqn)) for eqn in jaxpr.eqns]
    with set_xla_metadata(key="value"):
        marked = jax.make_jaxpr(lambda x: evaluate(jaxpr, [x]))(X)
    assert all(eqn.ctx.xla_metadata == {"key": "value"} for eqn in marked.eqns)


def test_hook_of_bind_sees_every_equation():
    jaxpr, seen = jax.make_jaxpr(scopes)(X), []

    def hook(bind, primitive, args, params):
        seen.append(primitive.name)
        return bind(primitive, *args, **params)

    with _jax.intercept_bind(hook):
        jax.make_jaxpr(lambda x: evaluate(jaxpr, [x]))(X)
    assert seen == [eqn.primitive.name for eqn in jaxpr.eqns]


def test_types_of_an_unchanged_equation_are_computed_once():
    counted, calls = Primitive("counted"), []

    @counted.def_abstract_eval
    def _(x):
        calls.append(x)
        return jax.core.ShapedArray(x.shape, x.dtype)

    jaxpr = jax.make_jaxpr(lambda x: counted.bind(counted.bind(x)))(X)
    jax.clear_caches()
    before = len(calls)
    with jax.enable_checks(False):  # they compute all types again
        again = jax.make_jaxpr(lambda x: evaluate(jaxpr, [x]))(X)
    assert len(calls) == before
    assert str(again) == str(jaxpr)


def test_equation_with_an_effect_is_bound():
    def program(x):
        jax.debug.print("{}", x)
        return x + 1

    jaxpr = jax.make_jaxpr(program)(X)
    again = jax.make_jaxpr(lambda x: evaluate(jaxpr, [x]))(X)
    assert [e.primitive.name for e in again.eqns] == [e.primitive.name for e in jaxpr.eqns]
    assert again.effects == jaxpr.effects


def test_equation_of_another_trace_is_bound():
    jaxpr = jax.make_jaxpr(lambda x, y: x * y)(X, X)

    def outer(x):
        return jax.jit(lambda y: evaluate(jaxpr, [x, y]))(x + 1)

    assert_close(jax.jit(outer)(X), [X * (X + 1)])


def test_function_traced_once_gives_each_call_its_line_and_scope():
    doubled = _jax.jit_once(lambda x: (2 * x, x.sum()))

    def program(x):
        first = doubled(x)
        with jax.named_scope("second"):
            second = doubled(x + 1)
        return first, second, doubled(x[0])

    jaxpr = jax.make_jaxpr(program)(X)
    found = [eqn for eqn in jaxpr.eqns if "jaxpr" in eqn.params]
    assert found[0].params["jaxpr"] is found[1].params["jaxpr"]
    assert [tuple(_jax.names_of(eqn)) for eqn in found] == [(), ("second",), ()]
    lines = [next(line for file, line in _jax.lines_of(eqn) if file == __file__) for eqn in found]
    assert np.diff(lines).tolist() == [2, 1]
    assert_close(jax.jit(program)(X), program(X))
    assert_close(jax.vmap(doubled)(X), jax.vmap(lambda x: (2 * x, x.sum()))(X))


def test_bind_in_context_keeps_the_equation_under_disabled_jit():
    jaxpr = jax.make_jaxpr(scopes)(X)
    with jax.disable_jit():
        assert_close(evaluate(jaxpr, [X], bind_in_context), [scopes(X)])
