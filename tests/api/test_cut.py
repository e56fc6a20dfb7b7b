"""`prefix` and `suffix` cut a function at a site and run no operation of the other side."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapax
from tests.oracles.closeness import assert_close

X = jnp.array([0.3, -0.7, 1.2])
T = jnp.array([0.5, 1.1, -0.8, 0.9])

# A residual stream has operations before a cut, after it, and around it.
BEFORE, AFTER, AROUND = "sin", "cos", "tanh"


def close(a, b, tol=1e-6):
    assert_close(a, b, tol)


def operations(f, *args):
    """Count the operations of a program, with those in a loop once for each iteration."""

    def within(jaxpr, times):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            found[eqn.primitive.name] += times
            inner = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
            for leaf in jax.tree.leaves(list(eqn.params.values())):
                if hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr"):
                    within(leaf, inner)

    found = Counter()
    within(jax.make_jaxpr(f)(*args), 1)
    return found


def residual(x):
    h = tapax.sow(jnp.sin(x), "h")
    return jnp.cos(h) + jnp.tanh(x)


def with_body(wrap):
    """Wrap a body with operations on both sides of the cut."""
    return lambda x: wrap(residual)(x)


def custom_jvp(f):
    made = jax.custom_jvp(f)
    made.defjvps(lambda t, out, x: t)
    return made


def custom_vjp(f):
    made = jax.custom_vjp(f)
    made.defvjp(lambda x: (f(x), None), lambda _, ct: (ct,))
    return made


BODIES = {
    "plain": residual,
    "jit": with_body(jax.jit),
    "jitted twice": jax.jit(with_body(jax.jit)),
    "remat": with_body(jax.checkpoint),
    "vmap": with_body(jax.vmap),
    "custom_jvp": with_body(custom_jvp),
    "custom_vjp": with_body(custom_vjp),
}


@pytest.mark.parametrize("name", BODIES)
def test_operations_of_the_other_side(name):
    f = BODIES[name]
    prefix, suffix = tapax.prefix(f, "h"), tapax.suffix(f, "h")
    close(prefix(X), jnp.sin(X))
    close(suffix(X, 2 * X), jnp.cos(X) + jnp.tanh(2 * X))
    close(suffix(prefix(X), X), f(X))
    found = operations(prefix, X)
    assert found[BEFORE] == 1 and found[AFTER] == found[AROUND] == 0
    found = operations(suffix, X, X)
    assert found[BEFORE] == 0 and found[AFTER] == found[AROUND] == 1


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: f])
def test_cut_functions_compose_with_transformations(transform):
    close(transform(tapax.prefix(residual, "h"))(X), jnp.sin(X))
    close(transform(tapax.suffix(residual, "h"))(X, 2 * X), jnp.cos(X) + jnp.tanh(2 * X))
    close(jax.grad(lambda x: jnp.sum(tapax.prefix(residual, "h")(x)))(X), jnp.cos(X))
    by_value = jax.grad(lambda h: jnp.sum(tapax.suffix(residual, "h")(h, X)))
    close(by_value(X), -jnp.sin(X))
    close(
        jax.hessian(lambda h: jnp.sum(tapax.suffix(residual, "h")(h, X)))(X), jnp.diag(-jnp.cos(X))
    )


def test_one_operation_at_a_time():
    with jax.disable_jit():
        close(tapax.prefix(BODIES["jit"], "h")(X), jnp.sin(X))
        close(tapax.suffix(BODIES["jit"], "h")(X, X), jnp.cos(X) + jnp.tanh(X))
        close(tapax.prefix(layers, tapax.at("h", step=1))(X), by_hand(X)[1][1])


def layer(x, t):
    h = tapax.sow(jnp.sin(x * t), "h")
    return jnp.cos(h) + x, jnp.tanh(h)


def layers(x):
    return lax.scan(layer, x, T)


def by_hand(x, start=None):
    """Run `layers`, or start at one iteration; also return the site's value at each iteration."""
    values, ys = [], []
    for i, t in enumerate(T):
        h = jnp.sin(x * t)
        if start is not None and start[0] == i:
            h = start[1]
        values.append(h)
        x = jnp.cos(h) + x
        ys.append(jnp.tanh(h))
    return (x, jnp.stack(ys)), values


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("step", [0, 1, 3, -1])
def test_cut_at_one_iteration_of_a_scan(wrap, step):
    f, at = wrap(layers), tapax.at("h", step=step)
    prefix, suffix, i = tapax.prefix(f, at), tapax.suffix(f, at), step % 4
    close(prefix(X), by_hand(X)[1][i])
    close(suffix(prefix(X), X), by_hand(X)[0])
    close(suffix(X, X), by_hand(X, (i, X))[0])
    found = operations(prefix, X)
    assert (found["sin"], found["cos"], found["tanh"]) == (i + 1, i, 0)
    # The results of earlier iterations, the residual stream and `ys`, bypass the cut.
    found = operations(suffix, X, X)
    assert (found["sin"], found["cos"], found["tanh"]) == (3, 4, 4)


def test_the_iterations_before_are_not_computed():
    # No value bypasses the site, so the suffix starts in the loop.
    f = lambda x: lax.scan(lambda c, t: (tapax.sow(jnp.sin(c * t), "h"), None), x, T)[0]
    for step in range(4):
        at = tapax.at("h", step=step)
        assert operations(tapax.suffix(f, at), X, X)["sin"] == 3 - step
        assert operations(tapax.prefix(f, at), X)["sin"] == step + 1
        close(tapax.suffix(f, at)(tapax.prefix(f, at)(X), X), f(X))


def test_a_loop_that_goes_backward():
    f = lambda x: lax.scan(layer, x, T, reverse=True)
    _, taps = tapax.capture(f)(X)
    for step in range(4):
        at = tapax.at("h", step=step)
        close(tapax.prefix(f, at)(X), taps.values["h"][step])
        close(tapax.suffix(f, at)(taps.values["h"][step], X), f(X))
        assert operations(tapax.prefix(f, at), X)["sin"] == 4 - step


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_loop_under_vmap(wrap):
    xs, at = jnp.stack([X, 2 * X]), tapax.at("h", step=2)
    f = wrap(jax.vmap(layers))
    value = tapax.prefix(f, at)(xs)
    close(value, jnp.stack([by_hand(x)[1][2] for x in xs]))
    close(tapax.suffix(f, at)(value, xs), f(xs))
    close(jax.vmap(tapax.prefix(layers, at))(xs), value)
    assert operations(tapax.prefix(f, at), xs)["sin"] == 3


def test_one_call_of_a_shared_function():
    shared = jax.jit(lambda x: tapax.sow(jnp.sin(x), "h"))
    f = lambda x: shared(shared(shared(x)))
    close(tapax.prefix(f, "h@1")(X), jnp.sin(jnp.sin(X)))
    close(tapax.suffix(f, "h@1")(X, X), jnp.sin(X))
    assert operations(tapax.prefix(f, "h@1"), X)["sin"] == 2
    assert operations(tapax.suffix(f, "h@1"), X, X)["sin"] == 1
    assert operations(tapax.suffix(f, "h@0"), X, X)["sin"] == 2


def test_after_the_cut_means_after_in_the_data():
    # The prefix does not compute values that do not lead to the site.
    def f(x):
        y = jnp.cos(x)
        return tapax.sow(jnp.sin(x), "h") + y

    assert operations(tapax.prefix(f, "h"), X)["cos"] == 0
    assert operations(tapax.suffix(f, "h"), X, X)["cos"] == 1


def test_loops_on_the_kept_side_of_a_cut_stay():
    def f(x):
        x = lax.scan(lambda c, t: (jnp.sin(c * t), None), x, T)[0]
        x = tapax.sow(x, "h")
        x = lax.fori_loop(0, 5, lambda i, c: jnp.cos(c), x)
        return lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: jnp.exp(c), x)

    found = operations(tapax.prefix(f, "h"), X)
    assert (found["sin"], found["cos"], found["exp"]) == (4, 0, 0)
    found = operations(tapax.suffix(f, "h"), X, X)
    assert (found["sin"], found["cos"], found["exp"]) == (0, 5, 1)
    close(tapax.suffix(f, "h")(tapax.prefix(f, "h")(X), X), f(X))


def test_cuts_of_changed_functions_and_changes_of_cuts():
    edited = tapax.edit(residual, {"h": lambda h: h * 2})
    close(tapax.prefix(edited, "h")(X), 2 * jnp.sin(X))
    f = lambda x: residual(tapax.sow(jnp.exp(x), "first"))
    close(tapax.edit(tapax.prefix(f, "h"), {"first": lambda h: -h})(X), jnp.sin(-jnp.exp(X)))
    _, taps = tapax.capture(tapax.prefix(f, "h"))(X)
    close(taps.values["first"], jnp.exp(X))
    _, taps = tapax.capture(tapax.suffix(f, "first"))(X, X)
    close(taps.values["h"], jnp.sin(X))
    both = tapax.suffix(lambda x: tapax.prefix(f, "h")(x), "first")
    close(both(X, X), jnp.sin(X))


def test_a_cut_in_a_gradient():
    loss = lambda x: jnp.sum(residual(x))
    close(tapax.prefix(jax.grad(loss), "h")(X), jnp.sin(X))
    close(tapax.suffix(jax.value_and_grad(loss), "h")(jnp.sin(X), X), jax.value_and_grad(loss)(X))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_cut_in_the_gradient_of_a_loop(wrap):
    step = jax.value_and_grad(lambda x: sum(map(jnp.sum, lax.scan(wrap(layer), x, T))))
    for i in (0, 2):
        at = tapax.at("h", step=i)
        value = tapax.prefix(step, at)(X)
        close(value, by_hand(X)[1][i])
        close(tapax.suffix(step, at)(value, X), step(X))
    assert operations(tapax.prefix(step, at), X)["sin"] == 3


def test_structure_types_and_arguments():
    def f(a, *, b, flag):
        h = tapax.sow((a["x"] * 2, jnp.arange(3)), "h")
        return {"out": h[0] + b, "i": h[1] * 2, "flag": flag}

    cut = {"b": 1.0, "flag": True}
    close(tapax.prefix(f, "h:0")({"x": X}, **cut), 2 * X)
    close(tapax.prefix(f, "h:1")({"x": X}, **cut), jnp.arange(3))
    out = tapax.suffix(f, "h:1")(jnp.full(3, 5), {"x": X}, **cut)
    close(out, {"out": 2 * X + 1, "i": jnp.full(3, 10), "flag": True})
    low = lambda x: jnp.cos(tapax.sow(jnp.sin(x), "h"))
    x = X.astype(jnp.bfloat16)
    assert tapax.prefix(low, "h")(x).dtype == tapax.suffix(low, "h")(x, x).dtype == jnp.bfloat16
    key = jax.random.key(1)
    draw = lambda k: jax.random.normal(tapax.sow(jax.random.fold_in(k, 3), "k"), (3,))
    close(tapax.suffix(draw, "k")(tapax.prefix(draw, "k")(key), key), draw(key))
    assert tapax.prefix(lambda x: tapax.sow(x * 2, "h"), "h")(jnp.zeros((0, 2))).shape == (0, 2)


def test_by_operation_and_predicate():
    close(tapax.prefix(residual, tapax.ops("cos"))(X), jnp.cos(jnp.sin(X)))
    close(tapax.prefix(residual, lambda site: site.path == "h")(X), jnp.sin(X))
    close(tapax.suffix(residual, tapax.ops("cos"))(X, X), X + jnp.tanh(X))


def test_arguments_given_for_good_are_left():
    f = jax.jit(residual, donate_argnums=0)
    x = X + 0
    close(tapax.suffix(f, "h")(tapax.prefix(f, "h")(x), x), residual(X))


def test_a_cut_function_compiles_once():
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return residual(x)

    prefix, suffix = tapax.prefix(f, "h"), tapax.suffix(f, "h")
    for i in range(3):
        suffix(prefix(X * i), X * i)
        tapax.prefix(f, "h")(X * i)
    assert len(traces) == 1


def test_a_function_is_cut_inside_a_shard_map(mesh):
    spec = jax.sharding.PartitionSpec("a", "b")
    f = jax.jit(jax.shard_map(residual, mesh=mesh, in_specs=spec, out_specs=spec))
    x = jnp.arange(16.0).reshape(4, 4)
    parts = tapax.prefix(f, "h")(x)
    close(parts, jnp.sin(x).reshape(2, 2, 2, 2).transpose(0, 2, 1, 3))
    close(tapax.suffix(f, "h")(parts, x), f(x))
    found = operations(tapax.prefix(f, "h"), x)
    assert found["sin"] == 1 and found["cos"] == found["tanh"] == 0
    assert operations(tapax.suffix(f, "h"), parts, x)["sin"] == 0


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_cut_at_an_iteration_of_a_recomputed_layer(wrap):
    def layer(x):
        return 0.6 * x + jnp.tanh(tapax.sow(jnp.sum(x), "s"))

    def loss(x):
        step = lambda c, _: (jax.checkpoint(wrap(layer))(c), None)
        return jnp.sum(jnp.sin(lax.scan(step, x, length=3)[0]))

    fn = jax.grad(loss)
    for step in range(3):
        at = tapax.at("s", step=step)
        close(tapax.suffix(fn, at)(tapax.prefix(fn, at)(X), X), fn(X))


def test_values_that_are_replaced_where_they_are_the_same_in_every_iteration():
    # JAX computes such a value once, before the loop of a derivative.
    def loss(x, w, mark=lambda k, i: tapax.sow(k, "k")):
        step = lambda c, i: (c * mark(jnp.sin(w), i), None)
        return jnp.sum(jnp.sin(lax.scan(step, x, jnp.arange(3))[0]))

    w, other = jnp.float32(0.4), jnp.float32(1.3)
    fn, at = jax.grad(loss), tapax.at("k", step=1)
    close(tapax.suffix(fn, at)(tapax.prefix(fn, at)(X, w), X, w), fn(X, w))
    replaced = lambda k, i: jnp.where(i == 1, other, k)
    close(tapax.suffix(fn, at)(other, X, w), fn(X, w, replaced))
    added = tapax.perturbations(fn)(X, w)["k"].at[1].set(other)
    moved = lambda k, i: jnp.where(i == 1, k + other, k)
    close(tapax.perturbed(fn)({"k": added}, X, w), fn(X, w, moved))
    by_hand = jax.jacobian(lambda p: fn(X, w, lambda k, i: k + p[i]))(jnp.zeros(3))
    close(tapax.jacobian(fn, of=None, wrt="k")(X, w), by_hand)
