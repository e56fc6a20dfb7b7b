"""Gradients by intermediates, perturbations and Jacobians, against zeros added by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import tapax
from tests.oracles import eager as oracle
from tests.oracles.closeness import assert_close

X = jnp.array([0.3, -0.7, 1.2])
T = jnp.array([0.5, 1.1, -0.8])
W = jnp.arange(9.0).reshape(3, 3) * 0.1
ZEROS = {"h": jnp.zeros(3), "y": jnp.zeros(3)}


def close(a, b, tol=2e-5):
    assert_close(a, b, tol)


def loss(w, x):
    h = tapax.sow(jnp.tanh(w @ x), "h")
    y = tapax.sow(h**2, "y")
    return jnp.sum(y * h)


def by_hand(eps, w, x):
    h = jnp.tanh(w @ x) + eps["h"]
    return jnp.sum((h**2 + eps["y"]) * h)


EXPECTED = jax.grad(by_hand)(ZEROS, W, X)


@pytest.mark.parametrize("inner", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit])
def test_every_way_to_take_them(inner, outer):
    f = inner(loss)
    close(outer(tapax.grad(f))(W, X), EXPECTED)
    value, grads = outer(tapax.value_and_grad(f))(W, X)
    close((value, grads), (loss(W, X), EXPECTED))
    zeros = tapax.perturbations(f)(W, X)
    close(zeros, ZEROS)
    close(outer(jax.grad(tapax.perturbed(f)))(zeros, W, X), EXPECTED)
    close(outer(tapax.jacobian(f, of=None, wrt="h"))(W, X), EXPECTED["h"])


def test_only_selected_sites_have_gradients():
    assert set(tapax.grad(loss, "y")(W, X)) == {"y"}
    close(tapax.grad(loss, "h")(W, X)["h"], EXPECTED["h"])
    close(tapax.grad(loss, tapax.ops("tanh"))(W, X)["tanh"], EXPECTED["h"])
    close(tapax.grad(loss, lambda site: site.path == "y")(W, X), {"y": EXPECTED["y"]})
    named = lambda x: jnp.sum(checkpoint_name(jnp.sin(x), "s") ** 2)
    close(tapax.grad(named, tapax.named("s"))(X), {"s": 2 * jnp.sin(X)})
    line = loss.__code__.co_firstlineno + 2
    close(
        list(tapax.grad(loss, tapax.lines(f"test_gradients.py:{line}"))(W, X).values()),
        [EXPECTED["y"]],
    )


def test_no_gradient_before_the_sites():
    # A product with the transposed weights would be a gradient before the site.
    found = str(jax.make_jaxpr(tapax.grad(loss))(W, X))
    assert found.count("dot_general") == 1


def test_auxiliary_results_are_returned_with_gradients():
    aux = lambda w, x: (loss(w, x), {"w": w, "n": 3})
    grads, more = tapax.grad(aux, has_aux=True)(W, X)
    close((grads, more["w"]), (EXPECTED, W))
    assert more["n"] == 3
    (value, more), grads = tapax.value_and_grad(aux, has_aux=True)(W, X)
    close((value, grads, more["w"]), (loss(W, X), EXPECTED, W))
    # A site that only the second result depends on has no gradient of the loss.
    two = lambda x: (jnp.sum(tapax.sow(x, "h")), tapax.sow(2 * x, "aside"))
    assert set(tapax.grad(two, has_aux=True)(X)[0]) == {"h"}


def shared(sow):
    layer = jax.jit(lambda x: sow(jnp.sin(x), "h"))
    return lambda x: jnp.sum(layer(layer(x) * 2) * layer(x + 1))


def scanned(sow):
    def total(x):
        c, y = lax.scan(lambda c, t: (sow(jnp.sin(c * t), "h"), jnp.sum(c)), x, T)
        return jnp.sum(c**2) + jnp.sum(y)

    return total


def scanned_remat(sow):
    layer = lambda c, t: (jnp.exp(sow(jnp.sin(c * t), "h")), None)
    step = layer if getattr(sow, "eager", False) else jax.checkpoint(layer)
    return lambda x: jnp.sum(lax.scan(step, x, T)[0])


def nested(sow):
    inner = lambda c, t: (sow(jnp.sin(c * t) + c, "h"), None)
    body = lambda c, t: (lax.scan(inner, c, T * t)[0], jnp.sum(c))
    return lambda x: sum(jnp.sum(y**2) for y in lax.scan(body, x, T))


def counted(sow):
    return lambda x: jnp.sum(lax.fori_loop(0, 3, lambda i, c: sow(jnp.sin(c) + i, "h"), x))


def not_changing(sow):
    def total(x):
        return jnp.sum(lax.scan(lambda c, t: (c * sow(jnp.sin(x), "h") + t, None), x, T)[0])

    return total


def branched(sow):
    yes, no = lambda x: sow(jnp.sin(x), "h") * 2, lambda x: jnp.cos(x) * x
    return lambda x: jnp.sum(lax.cond(x[0] > 0, yes, no, x))


def by_a_rule(sow):
    rule = jax.custom_vjp(jnp.sin)
    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (3 * ct * jnp.cos(x),))
    return lambda x: jnp.sum(rule(sow(rule(x), "h")) * x)


PROGRAMS = [shared, scanned, scanned_remat, nested, counted, not_changing, branched, by_a_rule]


@pytest.mark.parametrize("program", PROGRAMS)
def test_one_for_every_call_and_iteration(program):
    expected = oracle.grads(program, X)["h"]
    f = program(tapax.sow)
    found = tapax.grad(f)(X)
    oracle.close([g for v in found.values() for g in np.asarray(v).reshape(-1, 3)], expected, 2e-5)
    zeros = tapax.perturbations(f)(X)
    close(jax.jit(jax.grad(tapax.perturbed(f)))(zeros, X), found)
    # At another point: perturbations added by hand in order of execution, and finite differences.
    rng = np.random.default_rng(0)
    random = lambda z: jnp.asarray(rng.normal(size=z.shape) * 0.1, z.dtype)
    point, direction = jax.tree.map(random, zeros), jax.tree.map(random, zeros)
    left = [p for v in point.values() for p in v.reshape(-1, 3)]

    def add(x, name):
        return x + left.pop(0)

    add.eager = True
    with jax.disable_jit():
        expected = program(add)(X)
    close(tapax.perturbed(f)(point, X), expected)
    assert not left
    if program is not by_a_rule:
        along = lambda s: tapax.perturbed(f)(
            jax.tree.map(lambda p, d: p + s * d, point, direction), X
        )
        slope = jax.jvp(along, (0.0,), (1.0,))[1]
        assert_close((along(0.02) - along(-0.02)) / 0.04, slope, 2e-2)


def test_gradients_of_intermediates_under_vmap():
    xs = jnp.stack([X, 2 * X])
    close(
        jax.vmap(tapax.grad(loss), (None, 0))(W, xs),
        jax.vmap(lambda x: jax.grad(by_hand)(ZEROS, W, x))(xs),
    )
    # A map inside the loss gives one gradient for every example.
    many = lambda w, xs: jnp.sum(jax.vmap(loss, (None, 0))(w, xs))
    close(tapax.grad(many)(W, xs), jax.vmap(lambda x: jax.grad(by_hand)(ZEROS, W, x))(xs))
    zeros = tapax.perturbations(many)(W, xs)
    assert zeros["h"].shape == (2, 3)
    two = jax.vmap(
        jax.vmap(lambda x, y: tapax.sow(x * y, "h") ** 2, (0, None)), (None, 0), out_axes=1
    )
    grads = tapax.grad(lambda x, y: jnp.sum(two(x, y)))(X, T)
    close(grads, {"h": 2 * T[:, None] * X[None]})
    fixed = lambda x: jnp.sum(jax.vmap(lambda y: tapax.sow(jnp.sin(x), "h") * y)(T))
    close(tapax.grad(fixed)(X), {"h": jnp.full(3, jnp.sum(T))})
    yes, no = lambda x: tapax.sow(jnp.sin(x), "h") ** 2, lambda x: x
    mapped = lambda x: jnp.sum(jax.vmap(lambda x: lax.cond(x > 0, yes, no, x))(x))
    close(tapax.grad(mapped)(X), {"h": jnp.where(X > 0, 2 * jnp.sin(X), 0)})


def test_hessians_jacobians_and_tangents():
    perturbed = tapax.perturbed(loss)
    close(jax.hessian(perturbed)(ZEROS, W, X), jax.hessian(by_hand)(ZEROS, W, X))
    close(jax.jit(jax.jacrev(jax.grad(perturbed)))(ZEROS, W, X), jax.hessian(by_hand)(ZEROS, W, X))
    along = {"h": X, "y": T}
    expected = jax.jvp(lambda e: by_hand(e, W, X), (ZEROS,), (along,))
    close(jax.jvp(lambda e: perturbed(e, W, X), (ZEROS,), (along,)), expected)
    close(jax.linearize(lambda e: perturbed(e, W, X), ZEROS)[1](along), expected[1])
    close(jax.grad(perturbed, argnums=1)(along, W, X), jax.grad(by_hand, argnums=1)(along, W, X))
    # Derivatives of the gradients with respect to an argument.
    hand = lambda w: jax.grad(by_hand)(ZEROS, w, X)
    for mode in (jax.jacfwd, jax.jacrev):
        close(mode(lambda w: tapax.grad(loss)(w, X))(W), mode(hand)(W))


def test_second_derivatives_by_every_iteration():
    f, zeros = scanned(tapax.sow), {"h": jnp.zeros((3, 3))}

    def hand(eps, x):
        total = 0.0
        for t, e in zip(T, eps["h"], strict=True):
            total, x = total + jnp.sum(x), jnp.sin(x * t) + e
        return jnp.sum(x**2) + total

    close(jax.hessian(tapax.perturbed(f))(zeros, X), jax.hessian(hand)(zeros, X))


def test_composed_with_captures_and_edits():
    grads, taps = tapax.capture(tapax.grad(loss))(W, X)
    close((grads, taps.grads, taps.values["y"]), (EXPECTED, EXPECTED, jnp.tanh(W @ X) ** 2))
    edited = tapax.grad(tapax.edit(loss, {"h": jnp.sin}))(W, X)
    h = jnp.sin(jnp.tanh(W @ X))
    close(edited, {"h": 3 * h**2, "y": h})
    point = {"h": X, "y": T}
    _, taps = tapax.capture(tapax.perturbed(loss))(point, W, X)
    h = jnp.tanh(W @ X) + X
    close(taps.values, {"h": h, "y": h**2 + T})
    inner = tapax.perturbed(tapax.perturbed(loss))
    close(inner(point, point, W, X), by_hand(jax.tree.map(lambda p: 2 * p, point), W, X))
    scaled = tapax.edit(tapax.grad(loss), grads={"y": lambda g: 10 * g})(W, X)
    h = jnp.tanh(W @ X)
    close(scaled, {"h": 21 * h**2, "y": 10 * h})


def test_jacobians_between_sites_agree_with_formulas():
    h = jnp.tanh(W @ X)
    for f in (loss, jax.jit(loss)):
        close(tapax.jacobian(f, of="y", wrt="h")(W, X), jnp.diag(2 * h))
        close(tapax.jacobian(f, of="h", wrt="y")(W, X), jnp.zeros((3, 3)))
        close(tapax.jacobian(f, of="h", wrt="h")(W, X), jnp.eye(3))
    xs = jnp.stack([X, 2 * X])
    many = jax.vmap(tapax.jacobian(loss, of="y", wrt="h"), (None, 0))(W, xs)
    close(many, jax.vmap(lambda x: jnp.diag(2 * jnp.tanh(W @ x)))(xs))
    layer = jax.jit(lambda x: tapax.sow(jnp.sin(x), "h"))
    twice = tapax.jacobian(lambda x: layer(layer(x)), of="h@1", wrt="h@0")
    close(twice(X), jnp.diag(jnp.cos(jnp.sin(X))))

    def body(c, t):
        return tapax.sow(jnp.cos(tapax.sow(jnp.sin(c * t), "h")), "o"), None

    def hand(eps, c=0.7):
        outs = []
        for t, e in zip(T, eps, strict=True):
            c = jnp.cos(jnp.sin(c * t) + e)
            outs.append(c)
        return jnp.stack(outs)

    scan = tapax.jacobian(lambda x: lax.scan(body, x, T)[0], of="o", wrt="h")
    close(scan(0.7), jax.jacfwd(hand)(jnp.zeros(3)))
    results = tapax.jacobian(lambda x: {"a": tapax.sow(x, "h") * 2, "b": x}, of=None, wrt="h")
    close(results(X), {"a": 2 * jnp.eye(3), "b": jnp.zeros((3, 3))})
    # tapax differentiates few results backward and many forward; both agree.
    wide = lambda x: tapax.sow(jnp.outer(tapax.sow(jnp.sin(x), "h"), X), "o")
    close(tapax.jacobian(wide, of="o", wrt="h")(X), jnp.einsum("ik,j->ijk", jnp.eye(3), X))


def test_structured_sites_and_types():
    f = lambda x: jnp.sum(tapax.sow({"a": 2 * x, "b": x}, "p")["a"])
    close(tapax.grad(f)(X), {"p:a": jnp.ones(3)})
    low = lambda x: jnp.sum(tapax.sow(jnp.sin(x), "h")).astype(jnp.float32)
    x = X.astype(jnp.bfloat16)
    assert tapax.grad(low)(x)["h"].dtype == tapax.perturbations(low)(x)["h"].dtype == jnp.bfloat16
    mixed = lambda x: jnp.sum(tapax.sow(x, "h")) * tapax.sow(jnp.arange(3), "i")[1]
    assert set(tapax.grad(mixed)(X)) == set(tapax.perturbations(mixed)(X)) == {"h"}
    spectrum = lambda x: jnp.sum(jnp.abs(tapax.sow(jnp.fft.fft(x), "f")) ** 2)
    shifted = lambda z: jnp.sum(jnp.abs(jnp.fft.fft(X) + z) ** 2)
    close(tapax.grad(spectrum)(X), {"f": jax.grad(shifted)(jnp.zeros(3, jnp.complex64))})
    empty = lambda x: jnp.sum(tapax.sow(x * 2, "h"))
    assert tapax.grad(empty)(jnp.zeros((0, 2)))["h"].shape == (0, 2)


def test_one_operation_at_a_time():
    with jax.disable_jit():
        close(tapax.grad(loss)(W, X), EXPECTED)
        oracle.close(
            list(tapax.grad(scanned(tapax.sow))(X)["h"]), oracle.grads(scanned, X)["h"], 2e-5
        )


def test_other_perturbations_compile_nothing():
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return jnp.sum(tapax.sow(jnp.sin(x), "h") ** 2)

    perturbed, grads = tapax.perturbed(f), tapax.grad(f)
    for i in range(3):
        close(perturbed({"h": X * i}, X), jnp.sum((jnp.sin(X) + X * i) ** 2))
        close(grads(X * i), {"h": 2 * jnp.sin(X * i)})
    assert len(traces) == 1


def peak(f, *args):
    memory = jax.jit(f).lower(*args).compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes


@pytest.mark.parametrize("remat", [False, True])
def test_memory_is_that_of_code_by_hand(remat):
    def program(x, sow):
        layer = lambda c, e: (jnp.sin(sow(jnp.cos(c), e)) * jnp.exp(-c), None)
        layer = jax.checkpoint(layer) if remat else layer
        return lambda xs, n: jnp.sum(lax.scan(layer, x, xs, length=n)[0])

    x, n = jnp.ones(4096), 32
    f = lambda x: program(x, lambda h, _: tapax.sow(h, "h"))(None, n)
    hand = lambda eps, x: program(x, lambda h, e: h + e)(eps["h"], n)
    zeros = {"h": jnp.zeros((n, 4096))}
    # The program keeps n values; a few more or less depend on the processor.
    least, few = peak(jax.grad(hand), zeros, x), 4 * x.nbytes
    assert peak(jax.grad(tapax.perturbed(f)), zeros, x) <= least + few
    # Zeros that are not an argument need no memory; written by hand, they would be a constant.
    assert peak(tapax.grad(f), x) <= least + few
    plain = peak(jax.grad(f), x)
    assert peak(tapax.grad(f), x) <= plain + zeros["h"].nbytes + few


def test_a_hand_split_loss_has_the_same_operations():
    def after(h):
        return jnp.sum(jnp.exp(h @ W) ** 2)

    f = lambda x: after(tapax.sow(jnp.tanh(W @ x), "h"))
    split = lambda x: jax.grad(after)(jnp.tanh(W @ x))
    cost = lambda f: jax.jit(f).lower(X).compile().cost_analysis()["flops"]
    assert cost(tapax.grad(f)) <= 1.1 * cost(split)


@pytest.mark.parametrize("checked", [True, False])
def test_gradients_of_sites_inside_a_shard_map_are_divided(mesh, checked):
    x = jnp.arange(16.0).reshape(4, 4) / 8

    def local(x):
        return lax.psum(jnp.sum(tapax.sow(jnp.sin(x), "h") ** 2), ("a", "b"))

    f = jax.shard_map(local, mesh=mesh, in_specs=P("a", "b"), out_specs=P(), check_vma=checked)
    blocks = lambda x: x.reshape(2, 2, 2, 2).transpose(0, 2, 1, 3)
    expected = {"h": blocks(2 * jnp.sin(x))}
    for g in (f, jax.jit(f)):
        close(tapax.grad(g)(x), expected)
        zeros = tapax.perturbations(g)(x)
        assert {s.data.shape for s in zeros["h"].addressable_shards} == {(1, 1, 2, 2)}
        close(jax.grad(tapax.perturbed(g))(zeros, x), expected)
        close(tapax.perturbed(g)({"h": blocks(x)}, x), jnp.sum((jnp.sin(x) + x) ** 2))


def layers(x):
    """Run three scanned layers, each with two sites."""

    def layer(c, t):
        with tapax.scope("L"):
            c = tapax.sow(jnp.sin(c), "a")
            c = tapax.sow(c * t, "b")
        return c, None

    return jax.lax.scan(layer, x, jnp.arange(1.0, 4.0))[0].sum()


@pytest.mark.parametrize(
    "make",
    [
        lambda at: tapax.grad(layers, at=at),
        lambda at: lambda x: tapax.value_and_grad(layers, at=at)(x)[1],
        lambda at: tapax.perturbations(layers, at=at),
        lambda at: lambda x: tapax.capture(layers, values=at)(x)[1].values,
    ],
    ids=["grad", "value_and_grad", "perturbations", "capture"],
)
def test_single_layers_come_in_the_order_of_the_program(make):
    expected = [f"L/{i}/{name}" for i in range(3) for name in "ab"]
    for selection in (expected, expected[::-1], [*expected[::2], *expected[1::2]]):
        assert list(make(selection)(jnp.array([0.5, -1.0]))) == expected
