"""Faults that were found and mended, each under its name."""

import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tapax
from tests.oracles.closeness import assert_close

X = jnp.array([0.3, -0.7, 1.2])


def second_derivative(block):
    """d/dh of sum((dL/dx)^2), L = sum(block(x)^2), where h is what `block` marks."""

    def loss(x):
        return jnp.sum(block(x) ** 2)

    return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))


def test_second_derivatives_through_remat_add_the_copys_part():
    marked = lambda x: jnp.sin(tapax.sow(jnp.sin(x), "h"))
    _, plain = tapax.capture(second_derivative(marked))(X)
    _, remat = tapax.capture(second_derivative(jax.checkpoint(marked)))(X)
    # The oracle: a perturbation that both derivatives see.
    perturbed = lambda e: lambda x: jnp.sin(jnp.sin(x) + e)
    total = lambda e: jnp.sum(jax.grad(lambda x: jnp.sum(perturbed(e)(x) ** 2))(X) ** 2)
    expected = jax.grad(total)(jnp.zeros(3))
    assert_close(plain.grads["h~1"], expected)
    assert_close(remat.grads["h~1"], expected)
    assert_close(remat.grads["h"], plain.grads["h"])


def test_what_does_not_change_in_a_loop_is_there_at_every_iteration():
    w = jnp.array([2.0, 3.0, 4.0])

    def loss(w, x):
        def body(c, _):
            a = tapax.sow(c * 2, "h")
            return a * tapax.sow(jnp.sin(w), "h"), None

        return jnp.sum(lax.scan(body, x, None, length=2)[0])

    for step in (loss, jax.grad(loss), jax.jit(jax.grad(loss, argnums=1))):
        _, taps = tapax.capture(step)(w, X)
        s = jnp.sin(w)
        assert_close(taps.values["h"], [2 * X, 4 * X * s])
        assert_close(taps.values["h@1"], [s, s])
    _, taps = tapax.capture(jax.grad(loss))(w, X)
    assert_close(taps.grads["h@1"], [4 * X * s, 4 * X * s])


def test_a_vmap_in_a_mapped_while_loop_is_not_taken_for_the_loops():
    # As many inner examples as outer ones: sizes tell nothing.
    def f(n, x):
        def body(c):
            jax.vmap(lambda v: tapax.sow(v * 10, "h"))(jnp.arange(1.0, 4.0))
            return c[0] + 1, c[1] + 1

        return lax.while_loop(lambda c: c[0] < n, body, (0, x))[1]

    n = jnp.array([0, 1, 2])
    _, taps = tapax.capture(jax.vmap(f))(n, jnp.zeros(3))
    assert_close(taps.values["h"], [[0, 0, 0], [10, 20, 30], [10, 20, 30]])
    assert_close(taps.valid["h"], n)


def test_predicate_mapped_by_the_inner_vmap_value_by_the_outer():
    def f(n, x):
        body = lambda c: (c[0] + 1, tapax.sow(c[1] + x, "h"))
        return lax.while_loop(lambda c: c[0] < n, body, (0, 0.0))[1]

    n, x = jnp.array([0, 2]), jnp.array([10.0, 20.0])
    inner = jax.vmap(f, in_axes=(0, None))
    _, taps = tapax.capture(jax.vmap(inner, in_axes=(None, 0)))(n, x)
    assert_close(taps.values["h"], [[0, 20], [0, 40]])
    assert_close(taps.valid["h"], [[0, 2], [0, 2]])


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


def test_what_cannot_be_masked_is_refused(mesh):
    local = lambda x: tapax.sow(2 * x, "h")
    inner = jax.shard_map(local, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    f = jax.vmap(lambda p, x: lax.cond(p, inner, lambda x: x, x))
    with pytest.raises(tapax.SiteError, match="for which examples it ran cannot be told"):
        tapax.capture(f)(jnp.array([True, False]), jnp.ones((2, 4)))


def test_iterations_with_a_mesh_in_the_loop(mesh):
    layer = jax.shard_map(
        lambda x: tapax.sow(x + 1, "h"), mesh=mesh, in_specs=P("a"), out_specs=P("a")
    )
    f = lambda x: lax.scan(lambda c, _: (layer(c), None), x, None, length=3)[0]
    _, taps = tapax.capture(f, values=tapax.at("h", step=1))(jnp.zeros(4))
    assert_close(taps.values["h"], [[2, 2], [2, 2]])
    with pytest.raises(tapax.SiteError, match="is in no loop"):
        tapax.capture(layer, values=tapax.at("h", step=1))(jnp.zeros(4))


def test_a_gradient_inside_a_nested_capture_reaches_the_outer_one():
    def inner(x):
        step = lambda x: jax.grad(lambda x: jnp.sum(tapax.sow(jnp.sin(x), "h") ** 2))(x)
        body = lambda c, _: (jax.jit(step)(c), None)
        out, taps = tapax.capture(lambda x: lax.scan(body, x, None, length=2)[0])(x)
        return out, taps.grads["h"]

    (_, own), taps = tapax.capture(inner)(X)
    assert_close(taps.grads["h"], own)
    assert own.shape == (2, 3)


def test_operations_in_a_nested_capture_are_marked_once():
    f = lambda x: tapax.capture(lambda x: jnp.sin(x) + 1)(x)[0]
    _, taps = tapax.capture(f, values=tapax.ops("sin"))(X)
    assert set(taps.values) == {"sin"}


def test_operations_in_a_mesh_are_marked(mesh):
    f = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    _, taps = tapax.capture(jax.jit(f), values=tapax.ops("sin"))(jnp.arange(4.0))
    assert_close(taps.values["sin"], jnp.sin(jnp.arange(4.0)).reshape(2, 2))


def test_loops_that_are_evaluated_have_one_body():
    f = lambda x: jnp.sum(
        lax.scan(lambda c, _: (tapax.sow(2 * c, "h"), None), x, None, length=3)[0]
    )
    step = jax.grad(f)
    with jax.disable_jit():
        _, eager = tapax.capture(step, values="h@0")(X)
    _, traced = tapax.capture(step)(X)
    assert set(eager.values) == set(eager.grads) == {"h"}
    assert_close(eager.values["h"], traced.values["h"])
    assert_close(eager.grads["h"], traced.grads["h"])


def test_a_gradient_that_was_not_computed_makes_no_value_invalid():
    def loss(p, x):
        h = tapax.sow(2 * x, "h")
        return lax.cond(p, lambda h: jnp.sum(h), lambda h: 0.0, h)

    _, taps = tapax.capture(jax.grad(loss, argnums=1))(False, X)
    assert_close(taps.values["h"], 2 * X)
    assert taps.valid == {}


def test_exactly_named_calls_of_gradients():
    f = lambda x: jnp.sum(tapax.sow(x, "h")) * 0 + jnp.sum(tapax.sow(tapax.sow(x, "k"), "k") ** 2)
    dropped = lambda x: (tapax.sow(x, "h"), jnp.sum(tapax.sow(x, "h") ** 2))[1]
    with pytest.raises(tapax.SiteError, match=r"'h', marked at .* has no gradient: no cotangent"):
        tapax.capture(jax.grad(dropped), grads="h@0")(X)
    assert set(tapax.capture(jax.grad(dropped), grads="h")(X)[1].grads) == {"h@1"}

    def twice(x):
        _, pull = jax.vjp(f, x)
        return pull(1.0), pull(2.0)

    assert set(tapax.capture(twice, grads="k@0~1")(X)[1].grads) == {"k~1"}
    assert set(tapax.capture(twice, grads="k~1")(X)[1].grads) == {"k~1", "k@1~1"}


class Kind(enum.IntEnum):
    A = 1
    B = 2


def test_enumerations_are_static():
    f = lambda x, k: tapax.sow(x, "a") if k is Kind.A else tapax.sow(2 * x, "b")
    captured = tapax.capture(f)
    assert set(captured(X, Kind.A)[1].values) == {"a"}
    assert set(captured(X, Kind.B)[1].values) == {"b"}


def test_dicts_keep_their_order():
    def f(params, **options):
        for name, x in {**params, **options}.items():
            tapax.sow(x, name)
        return {"z": X, "a": X}

    out, taps = tapax.capture(f)({"z": X, "b": X}, y=X, c=X)
    assert taps.sites.names == ["z", "b", "y", "c"]
    assert list(out) == ["z", "a"]


def test_objects_that_change_are_looked_at_again():
    class Settings:
        scale = 2.0

    settings = Settings()
    captured = tapax.capture(lambda x, s: tapax.sow(x * s.scale, "h"))
    assert_close(captured(X, settings)[0], 2 * X)
    settings.scale = 5.0
    assert_close(captured(X, settings)[0], 5 * X)


def test_negative_zero_is_not_zero():
    f = lambda x, z: tapax.sow(x * (1.0 if str(float(z)) == "0.0" else -1.0), "h")
    captured = tapax.capture(f)
    assert_close(captured(X, 0.0)[0], X)
    assert_close(captured(X, -0.0)[0], -X)


def test_results_that_are_no_arrays_come_back_as_they_are():
    f = lambda x: {"n": 2**40, "s": "text", "np": np.arange(2) / 7, "t": jnp.float32, "x": x}
    out, _ = tapax.capture(f)(X)
    assert out["n"] == 2**40
    assert out["np"].dtype == np.float64
    assert out["t"] is jnp.float32


def test_results_that_could_hide_tracers_are_refused():
    class Result:
        def __init__(self, x):
            self.x = x

    with pytest.raises(TypeError, match="returns Result, which is neither an array nor"):
        tapax.capture(lambda x: Result(tapax.sow(x, "h")))(X)


def test_a_pullback_can_be_returned():
    f = lambda x: jnp.sum(tapax.sow(jnp.sin(x), "h") ** 2)
    (_, pull), taps = tapax.capture(lambda x: jax.vjp(f, x))(X)
    assert_close(pull(jnp.ones(()))[0], 2 * jnp.sin(X) * jnp.cos(X))
    assert_close(taps.values["h"], jnp.sin(X))


def test_folds_in_a_mesh(mesh):
    fold = {"reduce": lambda a, b: a + jnp.sum(b), "init": lambda: 0.0}
    layer = jax.shard_map(
        lambda x: tapax.sow(x, "s", **fold), mesh=mesh, in_specs=P("a"), out_specs=P("a")
    )
    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        _, taps = tapax.capture(wrap(layer))(jnp.arange(4.0))
        assert_close(taps.values["s"], [1.0, 5.0])
    looped = lambda x: lax.scan(lambda c, _: (layer(c), None), x, None, length=2)[0]
    with pytest.raises(tapax.SiteError, match="folded inside a shard_map that is in a loop"):
        tapax.capture(looped)(jnp.arange(4.0))
    with pytest.raises(tapax.SiteError, match="has more than one fold"):
        tapax.capture(lambda x: layer(layer(x)))(jnp.arange(4.0))


def test_sites_in_branches_keep_their_sharding_in_explicit_mode():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("x", "y")))
        f = lambda p, x: lax.cond(p, lambda x: tapax.sow(2 * x, "h"), lambda x: x, x)
        _, taps = tapax.capture(jax.jit(f))(True, x)
        assert taps.values["h"].sharding.spec == P("x", "y")
        loop = lambda x: lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, tapax.sow(c[1] + 1, "h")), (0, x)
        )[1]
        _, taps = tapax.capture(jax.jit(loop), steps=3)(x)
        assert taps.values["h"].sharding.spec == P(None, "x", "y")


def test_no_tracer_leaks():
    inner = jax.jit(lambda c: lax.cond(c[0] > 0, lambda c: tapax.sow(c, "h"), lambda c: c, c))

    def f(x):
        x = lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0]
        return lax.while_loop(lambda c: c[0] < 5, lambda c: tapax.sow(c + 1, "w"), x)

    with jax.check_tracer_leaks():
        _, taps = tapax.capture(f)(X)
    assert set(taps.values) == {"h", "w"}


def test_objects_with_names_of_ours():
    class Model:
        def __init__(self):
            self._compiled = self._plan = self._fn = None

        def __call__(self, x):
            return tapax.sow(2 * x, "h")

        @tapax.capture
        def method(self, x):
            return tapax.sow(3 * x, "m")

    assert_close(tapax.capture(Model())(X)[0], 2 * X)
    assert_close(Model().method(X)[1].values["m"], 3 * X)
    assert tapax.capture(lambda **kw: tapax.sow(kw["self"], "h"))(self=X)[1].sites.names == ["h"]


def test_sites_of_shapes_alone():
    table = tapax.sites(lambda x: tapax.sow(2 * x, "h"))(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert table["h"].shape == (3,)


def test_keys_with_a_meaning_are_escaped():
    tree = {"a": X, "a@1": 2 * X, "mlp/~/w": 3 * X}
    _, taps = tapax.capture(lambda x: tapax.sow(tree, "p")["a"] + x)(X)
    assert set(taps.values) == {"p:a", "p:a%401", "p:mlp/%7E/w"}
    assert set(
        tapax.capture(lambda x: tapax.sow(tree, "p")["a"], values="p:a%401")(X)[1].values
    ) == {"p:a%401"}


def test_gradients_in_mapped_branches_that_share_a_function():
    shared = jax.jit(lambda x, c: tapax.sow(jnp.sin(c * x), "h"))
    f = lambda p, x: lax.cond(p, lambda x: shared(x, 2.0), lambda x: shared(x, 3.0) ** 2, x)
    p, x = jnp.array([True, False]), jnp.array([0.2, 0.4])
    _, taps = tapax.capture(jax.vmap(jax.grad(f, argnums=1)))(p, x)
    # One trace for both branches: which was written first cannot be told, which ran can.
    yes, no = sorted(taps.values, key=lambda name: not bool(taps.valid[name][0]))
    assert_close(taps.valid[yes], p)
    assert_close(taps.grads[yes], [1, 0])
    assert_close(taps.grads[no], [0, 2 * jnp.sin(1.2)])


def test_calls_in_mapped_branches_are_numbered_as_written():
    f = lambda p, x: lax.cond(
        p, lambda x: tapax.sow(tapax.sow(2 * x, "h") + 1, "h"), lambda x: tapax.sow(3 * x, "h"), x
    )
    p, x = jnp.array([True, False]), jnp.array([1.0, 2.0])
    _, taps = tapax.capture(jax.vmap(f))(p, x)
    assert_close(taps.values["h"], [2, 0])
    assert_close(taps.values["h@1"], [3, 0])
    assert_close(taps.values["h@2"], [0, 6])


def test_predicates_see_the_loops():
    seen = []

    def small(site):
        seen.append(site)
        return site.nbytes < 10**6

    f = lambda x: lax.scan(lambda c, _: (tapax.sow(c, "h"), None), x, None, length=4)[0]
    _, taps = tapax.capture(f, values=small)(X)
    assert taps.values["h"].shape == seen[0].shape == (4, 3)
    assert seen[0].loops == ("scan[4]",)


def test_python_numbers_stay_python_numbers():
    f = lambda x: sum(x for _ in range(tapax.sow(3, "n")))
    out, taps = tapax.capture(f)(X)
    assert_close(out, 3 * X)
    assert int(taps.values["n"]) == 3


def test_a_site_in_a_root_finder_is_lost_in_words():
    def f(x):
        solve = lambda fn, x0: tapax.sow(x0 + 0 * fn(x0), "inside")
        return lax.custom_root(
            lambda y: y - tapax.sow(x, "x"), x, solve, lambda g, y: y / g(jnp.ones_like(y))
        )

    if "inside" in _names_without_warning(f):
        return  # an ordinary body, up to jax 0.10
    with pytest.raises(tapax.SiteError, match="'inside' cannot be captured"):
        tapax.capture(f, values="inside")(X)


def _names_without_warning(f):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return set(tapax.capture(f)(X)[1].values)


@pytest.mark.parametrize("flag", ["jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3"])
def test_flags_of_the_next_jax(flag):
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


def test_named_values_under_the_next_remat():
    if not hasattr(jax.config, "jax_remat3"):
        return
    from jax.ad_checkpoint import checkpoint_name

    jax.config.update("jax_remat3", True)
    try:
        f = jax.checkpoint(lambda x: checkpoint_name(jnp.sin(x), "n") * 2)
        _, taps = tapax.capture(f, values=tapax.named("n"))(X)
    finally:
        jax.config.update("jax_remat3", False)
    assert_close(taps.values["n"], jnp.sin(X))


def test_a_while_loop_in_remat_keeps_no_residuals():
    def loop(x):
        body = lambda c: (c[0] + 1, tapax.sow(jnp.sin(c[1]), "w"))
        return lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1]

    step = jax.grad(jax.checkpoint(lambda x: jnp.sum(x * lax.stop_gradient(loop(x)))))
    out, taps = tapax.capture(step)(X)
    expected = jnp.sin(jnp.sin(jnp.sin(X)))
    assert_close(out, expected)
    assert_close(taps.values["w"], expected)
    assert set(taps.values) == {"w"}
    assert int(taps.valid["w"]) == 3


def test_a_while_loop_that_is_linearized_is_there_once():
    def loop(x):
        body = lambda c: (c[0] + 1, tapax.sow(jnp.sin(c[1]), "w"))
        return lax.while_loop(lambda c: c[0] < 2, body, (0, x))[1]

    step = lambda x: jax.linearize(loop, x)[1](jnp.ones(3))
    out, taps = tapax.capture(step)(X)
    assert_close(out, jnp.cos(X) * jnp.cos(jnp.sin(X)))
    assert set(taps.values) == {"w"}
    assert_close(taps.values["w"], jnp.sin(jnp.sin(X)))


def test_a_while_loop_in_a_map_that_is_linearized_is_there():
    def loop(x):
        body = lambda c: (c[0] + 1, tapax.sow(jnp.sin(c[1]), "w"))
        return lax.while_loop(lambda c: c[0] < 2, body, (0, x))[1]

    step = lambda x: jax.linearize(lambda x: lax.map(loop, x), x)[1](jnp.ones(3))
    _, taps = tapax.capture(step)(X)
    assert set(taps.values) == {"w"}
    assert_close(taps.values["w"], jnp.sin(jnp.sin(X)))


def test_partial_of_a_jitted_function_keeps_its_options():
    fn = jax.jit(lambda x, n: [tapax.sow(x, f"h{i}") for i in range(n)], static_argnums=1)
    _, taps = tapax.capture(functools.partial(fn, n=2))(X)
    assert set(taps.values) == {"h0", "h1"}


def test_differentiating_by_an_array_that_a_custom_vjp_closes_over():
    w = np.array([1.0, 2.0, 3.0], np.float32)

    @jax.custom_vjp
    def scaled(x):
        return tapax.sow(jnp.sin(x * w), "h")

    scaled.defvjp(lambda x: (scaled(x), x), lambda x, ct: (0.75 * jnp.cos(x) * ct,))
    grad = jax.grad(lambda x: tapax.capture(lambda x: jnp.sum(scaled(x)))(x)[0])(X)
    assert_close(grad, 0.75 * jnp.cos(X))


LAST = {"reduce": lambda a, b: b, "init": lambda: 0.0}


def test_fold_in_a_predicate_was_lost():
    f = lambda x: lax.while_loop(lambda c: tapax.sow(c, "p", **LAST) < 5, lambda c: c + 1, x)
    with pytest.raises(tapax.SiteError, match="'p' folds its values, but is in the predicate"):
        tapax.capture(f)(0.0)


def test_fold_that_has_another_type_before_a_loop():
    def f(x):
        tapax.sow(jnp.ones(3) * x, "c", **LAST)
        body = lambda c, t: (tapax.sow(c + t, "c", **LAST), None)
        return lax.scan(body, x, jnp.arange(3.0))[0]

    with pytest.raises(tapax.SiteError, match=r"'c', marked at .* has another type before"):
        tapax.capture(f)(1.0)
