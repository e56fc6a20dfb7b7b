"""Custom derivative rules, linear solves, and opaque calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

import tapax
from tests.oracles.closeness import assert_close

X = jnp.array([0.3, -0.7, 1.2])


@jax.custom_vjp
def tripled(x):
    return tapax.sow(2 * x, "primal")


tripled.defvjp(
    lambda x: (tapax.sow(2 * x, "forward"), x), lambda x, ct: (tapax.sow(3 * ct, "backward"),)
)


@jax.custom_jvp
def scaled(x):
    return tapax.sow(2 * x, "primal")


scaled.defjvp(lambda p, t: (tapax.sow(2 * p[0], "rule"), 3 * t[0]))


@pytest.mark.parametrize("fn", [tripled, scaled])
def test_captured_values_are_those_that_ran(fn):
    _, taps = tapax.capture(fn)(X)
    assert set(taps.values) == {"primal"}
    assert_close(taps.values["primal"], 2 * X)


def test_rules_run_under_a_gradient():
    _, taps = tapax.capture(jax.grad(lambda x: jnp.sum(tripled(x))))(X)
    assert set(taps.values) == {"forward", "backward"}
    assert_close(taps.values["forward"], 2 * X)
    assert_close(taps.values["backward"], 3 * jnp.ones(3))
    _, taps = tapax.capture(jax.grad(lambda x: jnp.sum(scaled(x))))(X)
    assert set(taps.values) == {"rule"}


@pytest.mark.parametrize("fn", [tripled, scaled])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_the_custom_rule_governs_the_derivative_of_the_captured_program(fn, wrap):
    inner = lambda x: jnp.sum(fn(x) ** 2)
    captured = wrap(lambda x: tapax.capture(inner)(x)[0])
    # d/dx (2x)^2 with the 3 of the rule instead of the inner derivative 2.
    assert_close(jax.grad(captured)(X), 2 * 2 * X * 3)
    # JAX differentiates the captured value without the custom rule.
    inside = wrap(lambda x: jnp.sum(tapax.capture(inner)(x)[1].values["primal"]))
    assert_close(jax.grad(inside)(X), jnp.full(3, 2.0))


def test_gradients_around_a_custom_rule_are_captured():
    def loss(x):
        h = tapax.sow(jnp.sin(x), "before")
        return jnp.sum(tapax.sow(tripled(h), "after") ** 2)

    _, taps = tapax.capture(jax.grad(loss))(X)
    assert_close(taps.grads["after"], 4 * jnp.sin(X))
    assert_close(taps.grads["before"], 12 * jnp.sin(X))


def test_custom_rules_are_captured_in_a_scan_with_remat():
    def loss(x):
        body = lambda c, _: (jax.checkpoint(tripled)(c), None)
        return jnp.sum(lax.scan(body, x, None, length=2)[0])

    out, taps = tapax.capture(jax.grad(loss))(X)
    assert_close(out, jnp.full(3, 9.0))
    assert_close(taps.values["backward"], [[9.0] * 3, [3.0] * 3])


def test_values_in_a_linear_solve_are_captured():
    matrix = jnp.diag(jnp.arange(1.0, 4.0))

    def solve(b):
        return lax.custom_linear_solve(
            lambda x: matrix @ x,
            b,
            lambda matvec, b: tapax.sow(b / jnp.arange(1.0, 4.0), "solution"),
            symmetric=True,
        )

    out, taps = tapax.capture(solve)(X)
    assert_close(out, X / jnp.arange(1.0, 4.0))
    assert_close(taps.values["solution"], out)
    step = jax.grad(lambda b: jnp.sum(solve(b) ** 2))
    out, taps = tapax.capture(step)(X)
    assert_close(out, step(X))
    # The backward pass solves a second time.
    assert set(taps.values) == {"solution", "solution@1"}
    captured = lambda b: jnp.sum(tapax.capture(solve)(b)[0] ** 2)
    assert_close(jax.grad(captured)(X), step(X))


def test_values_in_conjugate_gradients_are_captured():
    matrix = jnp.diag(jnp.arange(1.0, 4.0))

    def solve(b):
        return jax.scipy.sparse.linalg.cg(lambda v: tapax.sow(matrix @ v, "product"), b, maxiter=9)[
            0
        ]

    out, taps = tapax.capture(jax.jit(solve))(X)
    assert_close(out, X / jnp.arange(1.0, 4.0), 1e-4)
    assert int(taps.valid["product@1"]) == 3


def kernel(x_ref, o_ref):
    o_ref[...] = tapax.sow(2 * x_ref[...], "inside")


def doubled(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return tapax.sow(pl.pallas_call(kernel, out_shape=shape, interpret=True)(x), "outside")


def test_a_kernel_is_opaque():
    with pytest.warns(UserWarning, match="'inside' is not captured: it is marked at .*opaque"):
        out, taps = tapax.capture(doubled)(X)
    assert_close(out, 2 * X)
    assert set(taps.values) == {"outside"}
    with pytest.raises(tapax.SiteError, match="'inside' cannot be captured: it is marked at"):
        tapax.capture(doubled, values="inside")(X)


def test_callbacks_are_opaque():
    def f(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y = jax.pure_callback(lambda x: np.asarray(tapax.sow(2 * x, "inside")), shape, x)
        return tapax.sow(y, "outside")

    out, taps = tapax.capture(f)(X)
    assert_close(out, 2 * X)
    assert set(taps.values) == {"outside"}
    with pytest.raises(tapax.SiteError, match="values='inside' picks nothing"):
        tapax.capture(f, values="inside")(X)
    _, taps = tapax.capture(f, values=tapax.ops("pure_callback"))(X)
    assert_close(taps.values["pure_callback"], 2 * X)


def test_debug_callbacks_still_fire_once():
    seen = []

    def f(x):
        jax.debug.callback(lambda v: seen.append(float(v)), jnp.sum(x))
        return tapax.sow(x, "h")

    tapax.capture(f)(X)
    jax.effects_barrier()
    assert len(seen) == 1


@jax.custom_jvp
def cube(x):
    return tapax.sow(x**3, "h")


cube.defjvp(lambda p, t: (tapax.sow(p[0] ** 3, "rule"), 3 * p[0] ** 2 * t[0]))


@jax.custom_vjp
def square(x):
    return tapax.sow(x**2, "h")


square.defvjp(
    lambda x: (tapax.sow(x**2, "forward"), x), lambda x, ct: (tapax.sow(2 * x * ct, "backward"),)
)


@pytest.mark.parametrize(("fn", "power"), [(cube, 3), (square, 2)])
def test_custom_rules_in_a_mapped_branch_have_a_mask(fn, power):
    f = lambda p, x: lax.cond(p, fn, lambda x: x, x)
    p = jnp.array([True, False, True])
    _, taps = tapax.capture(jax.vmap(f))(p, X)
    assert_close(taps.valid["h"], p)
    assert_close(taps.values["h"], jnp.where(p, X**power, 0))
    step = jax.vmap(jax.grad(f, argnums=1))
    out, taps = tapax.capture(step)(p, X)
    assert_close(out, step(p, X))
    for name in taps.values:
        assert_close(taps.valid[name], p)
        assert_close(np.asarray(taps.values[name])[1], 0)
    total = jax.grad(lambda x: jnp.sum(jax.vmap(f)(p, x)))
    out, taps = tapax.capture(total)(X)
    assert_close(out, total(X))
    for name in taps.values:
        assert_close(taps.valid[name], p)


def test_a_site_in_a_root_finder_is_lost_with_a_warning():
    def f(x):
        solve = lambda fn, x0: tapax.sow(x0 + 0 * fn(x0), "inside")
        return lax.custom_root(
            lambda y: y - tapax.sow(x, "x"), x, solve, lambda g, y: y / g(jnp.ones_like(y))
        )

    if "inside" in _names_without_warning(f):
        return  # up to jax 0.10 the body is an ordinary jaxpr
    with pytest.raises(tapax.SiteError, match="'inside' cannot be captured"):
        tapax.capture(f, values="inside")(X)


def _names_without_warning(f):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return set(tapax.capture(f)(X)[1].values)


@pytest.mark.parametrize("flag", ["jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3"])
def test_custom_rules_under_the_flags_of_the_next_jax(flag):
    if not hasattr(jax.config, flag):
        return
    block = jax.checkpoint(lambda x: tapax.sow(jnp.sin(x), "h"))
    loss = lambda x: jnp.sum(square(cube(block(block(x)))))
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        out, taps = tapax.capture(jax.grad(loss))(X)
        _, forward = tapax.capture(block)(X)
    finally:
        jax.config.update(flag, before)
    assert_close(out, jax.grad(loss)(X))
    second = jnp.sin(jnp.sin(X))
    assert_close(taps.grads["h@1"], 6 * second**5)
    assert_close(taps.grads["h"], 6 * second**5 * jnp.cos(jnp.sin(X)))
    assert_close(forward.values["h"], jnp.sin(X))


def test_derivative_with_respect_to_an_array_that_a_custom_vjp_closes_over():
    w = np.array([1.0, 2.0, 3.0], np.float32)

    @jax.custom_vjp
    def scaled(x):
        return tapax.sow(jnp.sin(x * w), "h")

    scaled.defvjp(lambda x: (scaled(x), x), lambda x, ct: (0.75 * jnp.cos(x) * ct,))
    grad = jax.grad(lambda x: tapax.capture(lambda x: jnp.sum(scaled(x)))(x)[0])(X)
    assert_close(grad, 0.75 * jnp.cos(X))


@jax.custom_jvp
def squared_by_rule(x):
    return tapax.sow(x, "h") ** 2


squared_by_rule.defjvp(lambda p, t: (squared_by_rule(p[0]), 2 * p[0] * t[0]))


@jax.custom_vjp
def squared_by_pullback(x):
    return tapax.sow(x, "h") ** 2


def _forward(x):
    h = tapax.sow(x, "h")
    return h**2, h


squared_by_pullback.defvjp(_forward, lambda h, ct: (2 * h * ct,))

REFUSED = "The site 'h' is edited inside a function with a custom derivative rule"


@pytest.mark.parametrize("fn", [squared_by_rule, squared_by_pullback])
@pytest.mark.parametrize(
    "around", [lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda x: jax.vmap(f)(x[None])[0]]
)
def test_the_derivative_of_an_edit_inside_a_custom_rule_is_refused(fn, around):
    loss = lambda x: jnp.sum(around(fn)(x))
    tripled = tapax.edit(loss, values={"h": lambda h: 3 * h})
    assert_close(tripled(X), jnp.sum(9 * X**2))
    with pytest.raises(tapax.SiteError, match=REFUSED):
        jax.grad(tripled)(X)
    with pytest.raises(tapax.SiteError, match=REFUSED):
        jax.jit(jax.vmap(jax.grad(tripled)))(X[None])


def test_an_edit_around_a_gradient_reaches_what_a_custom_rule_saved():
    gradient = jax.grad(lambda x: jnp.sum(squared_by_pullback(x)))
    assert_close(tapax.edit(gradient, values={"h": lambda h: 3 * h})(X), 6 * X)


@pytest.mark.parametrize("fn", [squared_by_rule, squared_by_pullback])
def test_the_derivative_of_a_perturbed_custom_rule_is_refused(fn):
    loss = lambda x: jnp.sum(fn(x))
    perturbation = {"h": jnp.ones(3)}
    perturbed = lambda x: tapax.perturbed(loss)(perturbation, x)
    assert_close(perturbed(X), jnp.sum((X + 1) ** 2))
    with pytest.raises(tapax.SiteError, match=REFUSED):
        jax.grad(perturbed)(X)


def test_a_derivative_that_bypasses_an_edited_custom_rule_is_taken():
    loss = lambda x, y: jnp.sum(squared_by_pullback(x)) * y
    tripled = tapax.edit(loss, values={"h": lambda h: 3 * h})
    assert_close(jax.grad(tripled, argnums=1)(X, 2.0), jnp.sum(9 * X**2))


@jax.custom_jvp
def forward_rule(x):
    return checkpoint_name(jnp.sin(x), "kept")


@forward_rule.defjvp
def _(primals, tangents):
    return forward_rule(*primals), jnp.cos(primals[0]) * tangents[0]


def reverse_rule(x):
    return checkpoint_name(jnp.sin(x), "kept")


with_reverse_rule = jax.custom_vjp(reverse_rule)
with_reverse_rule.defvjp(lambda x: (reverse_rule(x), x), lambda x, ct: (jnp.cos(x) * ct,))

WRAPPERS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    "cond": lambda f: lambda x: jax.lax.cond(jnp.sum(x) > 0, f, jnp.cos, x),
    "vmap": jax.vmap,
    "remat of jit": lambda f: jax.checkpoint(jax.jit(f)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("rule", [forward_rule, with_reverse_rule], ids=["jvp", "vjp"])
def test_operations_in_custom_rules_are_found_however_jax_calls_the_rule(rule, wrapper):
    """JAX calls the rule while it binds the operation that is differentiated, such as a jit."""
    f = WRAPPERS[wrapper](rule)
    steps = {"no derivative": lambda f: f, "grad": lambda f: jax.grad(lambda x: jnp.sum(f(x)))}
    x = jnp.array([0.3, 0.5])
    for take in steps.values():
        step = lambda x, take=take: checkpoint_name(take(f)(x), "after")
        chosen = tapax.named("kept") | tapax.ops("sin")
        _, taps = tapax.capture(step, values=[chosen, tapax.named("after")])(x)
        expected = jnp.stack([jnp.sin(x), jnp.sin(jnp.sin(x))]) if wrapper == "scan" else jnp.sin(x)
        assert list(taps.values) == ["sin", "kept", "after"]
        for name in ("sin", "kept"):
            np.testing.assert_allclose(taps.values[name], expected, rtol=1e-6)


@pytest.mark.parametrize("wrapper", [lambda f: f, jax.jit, jax.checkpoint])
def test_operations_in_derivative_rules_of_jax_are_not_those_of_the_program(wrapper):
    """The derivative of the outer sin is a cos; the program itself calls cos in the custom rule."""
    outer = wrapper(lambda x: jnp.sum(jnp.sin(with_reverse_rule(x))))
    _, taps = tapax.capture(jax.grad(outer), values=tapax.ops("cos"))(X)
    assert list(taps.values) == ["cos"]
    np.testing.assert_allclose(taps.values["cos"], jnp.cos(X), rtol=1e-6)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_symmetric_solve_whose_product_cannot_be_transposed(mapped):
    """JAX has no transpose of a name, and needs none of a symmetric product."""

    def solve(b):
        return lax.custom_linear_solve(
            lambda x: checkpoint_name(2 * x, "product"),
            tapax.sow(jnp.sin(b), "b"),
            lambda _, b: tapax.sow(b / 2, "x"),
            symmetric=True,
        )

    loss = lambda b: jnp.sum((jax.vmap(solve)(b[None])[0] if mapped else solve(b)) ** 2)
    grads, taps = tapax.capture(jax.grad(loss))(X)
    np.testing.assert_allclose(grads, jnp.sin(X) * jnp.cos(X) / 2, rtol=1e-6)
    np.testing.assert_allclose(taps.values["x"].reshape(3), jnp.sin(X) / 2, rtol=1e-6)
    np.testing.assert_allclose(taps.grads["b"].reshape(3), jnp.sin(X) / 2, rtol=1e-6)


@pytest.mark.parametrize("mapped", [False, True])
def test_derivatives_by_a_closed_over_value_raise_as_in_jax(mapped):
    """JAX refuses them; with a mark inside, tapax returned zero."""

    def loss(a, x):
        a = tapax.sow(a * 1.0, "a")

        @jax.custom_vjp
        def f(x):
            return tapax.sow(a * x, "inside")

        f.defvjp(lambda x: (f(x), None), lambda _, ct: (a * ct,))
        if not mapped:
            return jnp.sum(tapax.sow(f(x), "w") ** 2)
        chosen = jax.vmap(lambda x: jax.lax.cond(x > 0, f, lambda x: x, x))(x)
        return jnp.sum(tapax.sow(chosen, "w") ** 2)

    a = jnp.array(3.0)
    for take in (
        lambda: jax.grad(jax.jit(loss))(a, X),
        lambda: tapax.grad(loss)(a, X),
        lambda: jax.grad(tapax.edit(loss, values={"w": lambda w: 2 * w}))(a, X),
        lambda: jax.grad(lambda a: tapax.capture(loss)(a, X)[0])(a),
        lambda: jax.grad(tapax.perturbed(loss), 1)(tapax.perturbations(loss, "w")(a, X), a, X),
    ):
        with pytest.raises(
            Exception, match="custom_vjp function with respect to a closed-over value"
        ):
            take()


def test_a_closed_over_value_without_a_derivative_is_a_constant_of_the_rule():
    def loss(a, x):
        a = tapax.sow(a * 1.0, "a")
        kept = jax.lax.stop_gradient(a)
        f = jax.custom_vjp(lambda x: tapax.sow(kept * x, "inside"))
        f.defvjp(lambda x: (f(x), None), lambda _, ct: (5 * ct,))
        return jnp.sum(tapax.sow(f(x), "w") * a)

    grads = tapax.grad(loss, at=["a", "w"])(jnp.array(3.0), X)
    np.testing.assert_allclose(grads["a"], jnp.sum(3 * X), rtol=1e-6)
    np.testing.assert_allclose(grads["w"], jnp.full(3, 3.0))


def shared_layer(kind):
    """Make a loss that calls one jitted layer, and calls it again where JAX cannot see an edit."""
    layer = jax.jit(lambda x: tapax.sow(jnp.cos(x), "h"))
    if kind == "custom_jvp":
        inner = jax.custom_jvp(lambda x: layer(x))
        inner.defjvp(lambda x, t: (inner(*x), 2 * t[0]))
    elif kind == "custom_vjp":
        inner = jax.custom_vjp(lambda x: layer(x))
        inner.defvjp(lambda x: (layer(x), x), lambda x, ct: (2 * ct,))
    elif kind == "linear_solve":

        def inner(x):
            solve = lambda _, b: b / 2 + 0 * layer(b)
            return lax.custom_linear_solve(lambda x: 2 * x, x, solve, symmetric=True)
    else:

        def inner(x):
            test = lambda c: (jnp.sum(layer(c[0])) > -9) & (c[1] < 2)
            start = lax.stop_gradient(x), 0
            return x * lax.while_loop(test, lambda c: (c[0] + 1, c[1] + 1), start)[1]

    return inner, lambda x: jnp.sum(inner(layer(x)) ** 2)


@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp", "linear_solve", "while_loop"])
def test_one_call_of_a_layer_is_edited_where_another_cannot_be(kind):
    """JAX traces the layer once, so both calls share their marks."""
    inner, loss = shared_layer(kind)
    from_h = lambda h: jnp.sum(inner(h) ** 2)
    with_first = {"h@0": lambda h: 3 * h}
    np.testing.assert_allclose(
        tapax.grad(loss, at="h@0")(X)["h"], jax.grad(from_h)(jnp.cos(X)), rtol=1e-6
    )
    edited = tapax.edit(loss, values=with_first)
    expected = jax.value_and_grad(lambda x: from_h(3 * jnp.cos(x)))(X)
    for got, want in zip(jax.value_and_grad(edited)(X), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    with pytest.raises(tapax.SiteError):
        jax.grad(tapax.edit(loss, values={"h": lambda h: 3 * h}))(X)
