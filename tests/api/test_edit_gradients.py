"""Edits of values and gradients in functions that take gradients themselves, in any order."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import tapax
from tests.oracles.closeness import assert_close

X = jnp.array([0.3, -0.7, 1.2])
T = jnp.array([0.5, 1.1, -0.8])


def close(a, b, tol=1e-4):
    assert_close(a, b, tol)


def by_hand(value=lambda h: h, grad=None):
    """Make a `sow` that edits the value, then the gradient that reaches the edited value.

    Its derivative is that of an edited function; no edit applies to it a second time.
    """

    @jax.custom_vjp
    def same(h):
        return h

    same.defvjp(lambda h: (h, None), lambda _, ct: (grad(ct),))
    return lambda x, name: value(x) if grad is None else same(value(x))


# Losses take the `sow` to use.


def straight(sow):
    return lambda x: jnp.sum(jnp.cos(sow(jnp.sin(x), "h")) * x)


def shared(sow):
    layer = jax.jit(lambda x: sow(jnp.sin(x), "h"))
    return lambda x: jnp.sum(layer(layer(x) * 2) * layer(x + 1))


def scanned(sow):
    def body(c, t):
        c = sow(jnp.sin(c * t), "h")
        return c, jnp.sum(c**2)

    def loss(x):
        c, y = lax.scan(body, x, T, reverse=True)
        return jnp.sum(c) + jnp.sum(y**2)

    return loss


def scanned_remat(sow):
    @jax.checkpoint
    def body(c, t):
        c = sow(jnp.sin(c * t), "h")
        return jnp.cos(c), jnp.sum(c**2)

    def loss(x):
        c, y = lax.scan(body, x, T)
        return jnp.sum(c) + jnp.sum(y**2)

    return loss


def nested(sow):
    inner = lambda c, t: (sow(jnp.sin(c * t) + c, "h"), None)
    body = lambda c, t: (lax.scan(inner, c, T * t)[0], jnp.sum(c))
    return lambda x: sum(jnp.sum(y**2) for y in lax.scan(body, x, T))


def recomputed(sow):
    layer = jax.checkpoint(lambda x: jnp.exp(sow(jnp.sin(x), "h")))
    return lambda x: jnp.sum(layer(layer(x)))


def branched(sow):
    yes, no = lambda x: sow(jnp.sin(x), "h") * 2, lambda x: sow(jnp.cos(x), "h") * x
    return lambda x: sum(jnp.sum(lax.cond(x[i] > 0, yes, no, x)) for i in range(2))


def mapped(sow):
    one = lambda x, y: sow(jnp.sin(x * y), "h") ** 2
    twice = jax.vmap(jax.vmap(one, (0, None)), (None, 0))
    return lambda x: jnp.sum(jax.vmap(one, (0, None))(x, x[1])) + jnp.sum(twice(x, x) ** 2)


def mapped_branch(sow):
    yes, no = lambda x: sow(jnp.sin(x), "h") * x, lambda x: x**2 * sow(jnp.cos(x), "h")
    return lambda x: jnp.sum(jax.vmap(lambda x: lax.cond(x > 0, yes, no, x))(x) ** 2)


def mapped_scan(sow):
    def one(x):
        return lax.scan(lambda c, t: (sow(jnp.sin(c * t) + c, "h"), c), x, T)

    return lambda x: sum(jnp.sum(y**2) for y in jax.vmap(one)(x))


def not_mapped(sow):
    one = lambda x: lambda y: jnp.sum(sow(jnp.sin(x), "h") * y)
    return lambda x: jnp.sum(jax.vmap(one(x))(jnp.arange(4.0)) ** 2)


def not_changing(sow):
    def loss(x):
        body = lambda c, t: (c * sow(jnp.sin(x), "h") + t, jnp.sum(c))
        return sum(jnp.sum(y**2) for y in lax.scan(body, x, T))

    return loss


def by_a_rule(sow):
    rule = jax.custom_jvp(jnp.sin)
    rule.defjvps(lambda t, out, x: 3 * t * jnp.cos(x))
    return lambda x: jnp.sum(rule(sow(rule(x), "h")) * x)


def by_a_pullback(sow):
    rule = jax.custom_vjp(jnp.sin)
    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (3 * ct * jnp.cos(x),))
    return lambda x: jnp.sum(rule(sow(rule(x), "h")) * x)


def with_a_gradient(sow):
    inner = lambda x: jnp.sum(jnp.cos(sow(jnp.sin(x), "h")) * x)
    return lambda x: jnp.sum(jax.grad(inner)(x) ** 2) + inner(x)


def learned(sow):
    inner = lambda w: jnp.sum(sow(w * X, "h") ** 2)
    return lambda x: inner(x[0] - 0.1 * jax.grad(inner)(x[0]))


LOSSES = [straight, shared, scanned, scanned_remat, nested, recomputed, branched, mapped]
LOSSES += [mapped_branch, mapped_scan, not_mapped, not_changing, by_a_rule, by_a_pullback]
LOSSES += [with_a_gradient, learned]

rows = lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 1.5 * x]))
second = lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))
STEPS = {
    "grad": jax.grad,
    "grad of jit": lambda f: jax.jit(jax.grad(jax.jit(f))),
    "rows": lambda f: rows(jax.value_and_grad(f)),
    "second": second,
}
FORWARD = {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (2 * x,)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "hessian": jax.hessian,
}
VALUE = lambda h: h**2 + 0.3 * h
GRAD = lambda g: 0.3 * g * g + g


def pairs(steps):
    """Pair every loss with every step; `make fuzz` runs every second pair, in a checkerboard."""
    return [
        pytest.param(loss, step, marks=[pytest.mark.many] if (i + j) % 2 else [])
        for i, loss in enumerate(LOSSES)
        for j, step in enumerate(steps)
    ]


@pytest.mark.parametrize(("loss", "step"), pairs([*STEPS, *FORWARD]))
def test_edited_values_in_functions_that_take_gradients(loss, step):
    if loss is by_a_pullback and step in FORWARD:
        return  # a custom_vjp has no forward derivative
    step = {**STEPS, **FORWARD}[step]
    expected = step(loss(by_hand(VALUE)))(X)
    close(tapax.edit(step(loss(tapax.sow)), {"h": VALUE})(X), expected)


@pytest.mark.parametrize(("loss", "step"), pairs(STEPS))
def test_edited_gradients_agree_with_edits_by_hand(loss, step):
    step = STEPS[step]
    got = tapax.edit(step(loss(tapax.sow)), grads={"h": GRAD})(X)
    close(got, step(loss(by_hand(grad=GRAD)))(X))


@pytest.mark.parametrize("loss", [straight, shared, scanned_remat, recomputed, mapped_scan])
def test_edited_values_and_gradients(loss):
    got = tapax.edit(jax.grad(loss(tapax.sow)), {"h": VALUE}, {"h": GRAD})(X)
    close(got, jax.grad(loss(by_hand(VALUE, GRAD)))(X))


@pytest.mark.parametrize("loss", [straight, scanned, recomputed])
def test_third_derivatives_of_edited_values(loss):
    third = lambda f: jax.grad(lambda x: jnp.sum(jax.hessian(f)(x) ** 2))
    close(tapax.edit(third(loss(tapax.sow)), {"h": VALUE})(X), third(loss(by_hand(VALUE)))(X), 1e-3)


@pytest.mark.parametrize(
    "edit", [jnp.zeros_like, lambda g: -g, lambda g: jnp.clip(g, -0.1, 0.1), lambda g: 2 * g]
)
def test_clip_zero_scale_reverse(edit):
    @jax.jit
    def step(w):
        return w - 0.1 * jax.grad(straight(tapax.sow))(w)

    expected = X - 0.1 * jax.grad(straight(by_hand(grad=edit)))(X)
    close(tapax.edit(step, grads={"h": edit})(X), expected)
    close(tapax.edit(step, grads={"h": lambda g, site: edit(g)})(X), expected)


def test_gradients_replaced_by_arrays():
    f = jax.grad(lambda x: jnp.sum(tapax.sow(jnp.sin(x), "h") ** 2))
    close(tapax.edit(f, grads={"h": 2.0})(X), 2 * jnp.cos(X))
    close(tapax.edit(f, grads={"h": X})(X), X * jnp.cos(X))
    close(jax.vmap(lambda g: tapax.edit(f, grads={"h": g})(X))(T), T[:, None] * jnp.cos(X))
    many = jax.vmap(f)
    close(tapax.edit(many, grads={"h": T[:, None]})(X[:, None])[:, 0], T * jnp.cos(X))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_one_call_of_a_shared_function(wrap):
    def program(first, second):
        layers = [wrap(lambda x, s=s: s(jnp.sin(x), "h")) for s in (first, second)]
        return jax.grad(lambda x: jnp.sum(layers[1](layers[0](x)) ** 2))

    layer = wrap(lambda x: tapax.sow(jnp.sin(x), "h"))
    f = jax.grad(lambda x: jnp.sum(layer(layer(x)) ** 2))
    plain = by_hand()
    close(tapax.edit(f, {"h@1": VALUE})(X), program(plain, by_hand(VALUE))(X))
    close(tapax.edit(f, {"h@0": VALUE})(X), program(by_hand(VALUE), plain)(X))
    close(tapax.edit(f, grads={"h@1": GRAD})(X), program(plain, by_hand(grad=GRAD))(X))
    close(tapax.edit(f, grads={"h@0": GRAD})(X), program(by_hand(grad=GRAD), plain)(X))
    both = tapax.edit(f, {"h@0": VALUE}, {"h@1": GRAD})(X)
    close(both, program(by_hand(VALUE), by_hand(grad=GRAD))(X))


def test_one_of_two_scans_that_share_a_body():
    def total(first, second):
        body = lambda sow: lambda c, t: (sow(jnp.sin(c * t), "h"), None)
        scan = lambda sow, x: lax.scan(body(sow), x, T)[0]
        return jax.grad(lambda x: jnp.sum(scan(second, scan(first, x))))

    body = lambda c, t: (tapax.sow(jnp.sin(c * t), "h"), None)
    scan = lambda x: lax.scan(body, x, T)[0]
    f = jax.grad(lambda x: jnp.sum(scan(scan(x))))
    close(tapax.edit(f, {"h@1": VALUE})(X), total(by_hand(), by_hand(VALUE))(X))
    close(tapax.edit(f, grads={"h@0": GRAD})(X), total(by_hand(grad=GRAD), by_hand())(X))


@pytest.mark.parametrize("step", [0, 2, -2])
@pytest.mark.parametrize("remat", [False, True])
def test_edited_gradient_of_one_iteration(step, remat):
    def loss(x, sow):
        body = lambda c, t: (sow(jnp.sin(c * t), t), None)
        return jnp.sum(lax.scan(jax.checkpoint(body) if remat else body, x, T)[0] ** 2)

    def only(edit):
        return lambda h, t: jnp.where(t == T[step], edit(h, ""), h)

    f = jax.grad(lambda x: loss(x, lambda h, t: tapax.sow(h, "h")))
    values = jax.grad(lambda x: loss(x, only(by_hand(VALUE))))(X)
    gradients = jax.grad(lambda x: loss(x, only(by_hand(grad=lambda g: -g))))(X)
    edit = lambda of, what: lambda i: tapax.edit(f, **{of: {tapax.at("h", step=i): what}})(X)
    close(edit("values", VALUE)(step), values)
    close(edit("grads", lambda g: -g)(step), gradients)
    close(jax.jit(edit("values", VALUE))(step), values)
    close(jax.vmap(edit("grads", lambda g: -g))(jnp.array([step, step]))[1], gradients)


def test_every_pullback_of_a_call():
    def step(x):
        _, pull = jax.vjp(lambda x: tapax.sow(jnp.sin(x), "h"), x)
        return *pull(jnp.ones(3)), *pull(jnp.full(3, 5.0))

    c = jnp.cos(X)
    close(tapax.edit(step, grads={"h": lambda g: g + 1})(X), (2 * c, 6 * c))
    two = jax.jacrev(lambda x: 3 * tapax.sow(jnp.sin(x), "h"))
    close(tapax.edit(two, grads={"h": lambda g: jnp.clip(g, 0, 1)})(X), jnp.diag(c))
    for name in ("h~0", "h~1"):
        with pytest.raises(
            tapax.SiteError, match=f"grads='{name}' selects one of several gradients of a"
        ):
            tapax.edit(step, grads={name: lambda g: g + 1})(X)


def test_derivatives_of_edited_steps():
    edited = lambda s: tapax.edit(jax.grad(straight(tapax.sow)), {"h": lambda h: h * s})(X)
    hand = lambda s: jax.grad(straight(by_hand(lambda h: h * s)))(X)
    close(jax.jacfwd(edited)(2.0), jax.jacfwd(hand)(2.0))
    close(jax.jacrev(edited)(2.0), jax.jacrev(hand)(2.0))
    edited = lambda s: tapax.edit(jax.grad(scanned(tapax.sow)), grads={"h": lambda g: g * s})(X)
    hand = lambda s: jax.grad(scanned(by_hand(grad=lambda g: g * s)))(X)
    close(jax.jit(edited)(2.0), hand(2.0))
    close(jax.vmap(edited)(T), jnp.stack([hand(s) for s in T]))


def test_an_edited_function_is_edited_again():
    f = jax.grad(jax.jit(tapax.edit(straight(tapax.sow), {"h": lambda h: h**2})))
    f = tapax.edit(f, {"h": jnp.sin}, {"h": lambda g: 3 * g})
    both = by_hand(lambda h: jnp.sin(h**2), lambda g: 3 * g)
    close(f(X), jax.grad(straight(both))(X))
    out, taps = tapax.capture(f)(X)
    close(out, f(X))
    close(taps.values["h"], jnp.sin(jnp.sin(X) ** 2))
    close(taps.grads["h"], -3 * jnp.sin(taps.values["h"]) * X)
    twice = tapax.edit(tapax.edit(jax.grad(scanned(tapax.sow)), grads={"h": GRAD}), {"h": VALUE})
    close(twice(X), jax.grad(scanned(by_hand(VALUE, GRAD)))(X))


def test_gradients_of_intermediates_of_an_edited_loss():
    # With respect to the edited value or, if the edit is outside, to the original value.
    slope = -jnp.sin(2 * jnp.sin(X)) * X
    edit = {"h": lambda h: 2 * h}
    close(tapax.grad(tapax.edit(straight(tapax.sow), edit))(X), {"h": slope})
    close(tapax.capture(tapax.edit(jax.grad(straight(tapax.sow)), edit))(X)[1].grads, {"h": slope})
    close(tapax.edit(tapax.grad(straight(tapax.sow)), edit)(X), {"h": 2 * slope})
    close(tapax.edit(tapax.grad(straight(tapax.sow)), {"h": 0.5})(X), {"h": jnp.zeros(3)})


def test_one_operation_at_a_time():
    with jax.disable_jit():
        for loss in (scanned, branched, recomputed):
            close(
                tapax.edit(jax.grad(loss(tapax.sow)), {"h": VALUE})(X),
                jax.grad(loss(by_hand(VALUE)))(X),
            )
            close(
                tapax.edit(jax.grad(loss(tapax.sow)), grads={"h": GRAD})(X),
                jax.grad(loss(by_hand(grad=GRAD)))(X),
            )


def test_low_precision_stays_low():
    x = X.astype(jnp.bfloat16)
    out = tapax.edit(jax.grad(straight(tapax.sow)), {"h": VALUE}, {"h": GRAD})(x)
    assert out.dtype == jnp.bfloat16
    expected = jax.grad(straight(by_hand(VALUE, GRAD)))(x)
    close(out.astype(float), expected.astype(float), 2e-2)


def test_integers_in_a_gradient():
    def loss(w, sow):
        i = sow(jnp.arange(3), "i")
        return jnp.sum(w[i] ** 2 * jnp.arange(1.0, 4.0))

    shift = lambda i: (i + 1) % 3
    expected = jax.grad(lambda w: loss(w, lambda i, _: shift(i)))(X)
    close(tapax.edit(jax.grad(lambda w: loss(w, tapax.sow)), {"i": shift})(X), expected)


def test_memory_of_a_recomputed_scan_stays_low():
    def loss(x, sow):
        body = jax.checkpoint(lambda c, _: (jnp.sin(sow(jnp.cos(c), "h")) * jnp.exp(-c), None))
        return jnp.sum(lax.scan(body, x, None, length=64)[0])

    x = jnp.ones(4096)
    few = 8 * x.nbytes  # of the 64 that residuals would take

    def temporary(f):
        return jax.jit(f).lower(x).compile().memory_analysis().temp_size_in_bytes

    hand = temporary(jax.grad(lambda x: loss(x, by_hand(VALUE))))
    edited = temporary(tapax.edit(jax.grad(lambda x: loss(x, tapax.sow)), {"h": VALUE}))
    assert edited <= hand + few
    hand = temporary(jax.grad(lambda x: loss(x, by_hand(grad=GRAD))))
    edited = temporary(tapax.edit(jax.grad(lambda x: loss(x, tapax.sow)), grads={"h": GRAD}))
    assert edited <= hand + few


@pytest.mark.parametrize("checked", [True, False])
def test_gradients_inside_a_shard_map_are_edited(mesh, checked):
    x = jnp.arange(16.0).reshape(4, 4) / 8

    def step(sow):
        def local(x):
            x = lax.scan(lambda c, t: (sow(jnp.sin(c * t), "h"), None), x, T)[0]
            return lax.psum(jnp.sum(x**2), ("a", "b"))

        return jax.jit(jax.grad(jax.shard_map(
            local, mesh=mesh, in_specs=P("a", "b"), out_specs=P(), check_vma=checked
        )))  # fmt: skip

    close(tapax.edit(step(tapax.sow), {"h": VALUE})(x), step(by_hand(VALUE))(x))
    close(tapax.edit(step(tapax.sow), grads={"h": GRAD})(x), step(by_hand(grad=GRAD))(x))


def test_edits_in_a_loop_pass_the_checks_of_jax():
    """With `jax_enable_checks`, JAX checks the programs it simplifies, those of a survey too."""

    def loss(x):
        step = lambda c, _: (jnp.sin(tapax.sow(2 * c, "h")), None)
        return jnp.sum(lax.scan(step, x, length=3)[0])

    def doubled(x):
        step = lambda c, _: (jnp.sin(4 * c), None)
        return jnp.sum(lax.scan(step, x, length=3)[0])

    x = jnp.array([0.3, -0.7])
    twice = lambda h: 2 * h
    with jax.enable_checks(True):
        edited = tapax.edit(jax.grad(loss), values={"h": twice})(x)
        reversed_grads = tapax.edit(jax.grad(loss), grads={"h": jnp.negative})(x)
    assert_close(edited, jax.grad(doubled)(x))
    assert_close(reversed_grads, -jax.grad(loss)(x))
