"""Values are traced to the equations that compute them, through calls, branches and loops."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tapax._jaxpr.backward_reads import backward_reads, takes_gradient
from tapax._jaxpr.producers import Body, find_initial, find_source, find_value


def value_of(fn, *args, result=0):
    root = Body(jax.make_jaxpr(fn)(*args))
    return find_value(root, root.jaxpr.outvars[result])


def sharded(fn):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=P("d"), out_specs=P("d"))


def with_rule(fn):
    made = jax.custom_jvp(fn)
    made.defjvp(lambda primals, tangents: (fn(*primals), tangents[0]))
    return made


X = jnp.ones(4)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        with_rule,
        lambda f: jax.jit(jax.checkpoint(jax.jit(f))),
        sharded,
        lambda f: lambda x: lax.cond(x[0] > 0, jnp.zeros_like, f, x),
        lambda f: lambda x: lax.scan(lambda _, x: (None, f(x)), None, x)[1],
        lambda f: lambda x: lax.while_loop(lambda x: x[0] < 3, f, x),
    ],
    ids=["plain", "jit", "remat", "custom", "nested", "shard_map", "cond", "scan", "while"],
)
def test_the_equation_is_found_in_any_body(wrap):
    value = value_of(wrap(jnp.sin), X)
    assert value.equation.primitive.name == "sin"


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.jit(f))])
def test_an_argument_is_found_through_calls(wrap):
    value = value_of(wrap(lambda x, y: (y, x)), 1.0, 2.0)
    assert (value.input, value.equation, value.body.outer) == (1, None, None)


def test_stacked_results_know_their_loops():
    def outer(carry, x):
        return carry, lax.scan(lambda c, y: (c, jnp.sin(y)), 0.0, x)[1]

    value = value_of(lambda x: lax.scan(outer, 0.0, x)[1], jnp.ones((3, 5)))
    assert value.loops == (3, 5)
    assert value_of(lambda x: lax.scan(outer, 0.0, x)[0], jnp.ones((3, 5))).loops == ()


def test_restacked_slices_of_a_scan_are_its_operand():
    value = value_of(lambda x: lax.scan(lambda c, y: (c, y), 0.0, x)[1], X)
    assert (value.input, value.loops) == (0, ())


def test_source_of_a_carry_is_the_previous_iteration():
    def program(x):
        return lax.scan(lambda c, _: (jnp.sin(c), c), jnp.exp(x), None, length=3)[1]

    value = value_of(program, 1.0)
    assert value.equation is None and value.body.entered
    assert find_source(value).equation.primitive.name == "sin"
    assert find_initial(value).equation.primitive.name == "exp"


def test_source_of_swapped_carries_is_before_the_loop():
    def program(x, y):
        return lax.scan(lambda c, _: ((c[1], c[0]), c[0]), (jnp.exp(x), y), None, length=3)[1]

    source = find_source(value_of(program, 1.0, 2.0))
    assert source.input == 1 or source.equation.primitive.name == "exp"


def test_a_branch_that_returns_a_constant_is_skipped():
    def grown(x):
        return lax.cond(x > 0, jnp.sin, lambda x: jnp.full_like(x, 2.0), x)

    assert value_of(grown, 1.0).equation.primitive.name == "sin"


def test_one_variable_is_one_value():
    root = Body(jax.make_jaxpr(jax.jit(lambda x: (jnp.sin(x),) * 2))(1.0))
    first, second = (find_value(root, v) for v in root.jaxpr.outvars)
    assert first == second and len({first, second}) == 1


def test_only_backward_passes_are_gradients():
    def linear(x):
        return jax.linear_transpose(lambda x: 2 * x, x)(x)

    for fn in (jnp.sin, lambda x: jax.jvp(jnp.sin, (x,), (x,)), linear):
        assert not takes_gradient(jax.make_jaxpr(fn)(1.0))
    assert takes_gradient(jax.make_jaxpr(jax.jit(jax.grad(jnp.sin)))(1.0))


def test_bodies_that_are_called_often_are_searched_once():
    @jax.jit
    def doubled(x):
        return jnp.sin(x)

    for _ in range(24):
        doubled = jax.jit(lambda x, inner=doubled: inner(inner(x)))
    with jax.enable_checks(False):  # JAX checks such a body at every call
        jaxpr = jax.make_jaxpr(doubled)(1.0)
    assert not takes_gradient(jaxpr)
    assert list(backward_reads(Body(jaxpr))) == []


def test_backward_passes_read_inputs_and_computed_values():
    def step(w, x):
        scaled = jnp.exp(x)
        return jax.grad(lambda w: jnp.sin(w * scaled))(w)

    reads = list(backward_reads(Body(jax.make_jaxpr(step)(1.0, 2.0))))
    names = {find_value(r.body, r.atom).equation.primitive.name: r.given for r in reads}
    assert names == {"cos": False, "exp": True}
