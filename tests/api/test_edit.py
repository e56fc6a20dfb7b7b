"""Each edit of a value agrees with the same change written into the source by hand."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import tapax
from tests.oracles.closeness import assert_close

X = jnp.array([0.3, -0.7, 1.2])
T = jnp.array([0.5, 1.1, -0.8])


def close(a, b, tol=2e-5):
    assert_close(a, b, tol)


def loss(x):
    return jnp.sum(tapax.sow(jnp.sin(x), "h") * 2)


def chain(x):
    return lax.scan(lambda c, t: (tapax.sow(jnp.sin(c * t), "h"), None), x, T)[0]


def by_hand(x, edits):
    """Run `chain` with some iterations edited."""
    for i, t in enumerate(T):
        x = edits.get(i, lambda h: h)(jnp.sin(x * t))
    return x


# Programs take the `sow` to use: the oracle passes one that edits by hand.


def straight(sow):
    return lambda x: jnp.cos(sow(jnp.sin(x), "h")) * x


def shared(sow):
    layer = jax.jit(lambda x: sow(jnp.sin(x), "h"))
    return lambda x: layer(layer(x) * 2) * layer(x + 1)


def scanned(sow):
    def body(c, t):
        c = sow(jnp.sin(c * t) + c, "h")
        return c, jnp.sum(c)

    return lambda x: lax.scan(body, x, T, reverse=True)


def nested(sow):
    inner = lambda c, t: (sow(jnp.sin(c * t) + c, "h"), None)
    return lambda x: lax.scan(lambda c, t: (lax.scan(inner, c, T * t)[0], c), x, T)


def looped(sow):
    body = lambda c: sow(jnp.exp(c * 0.3) + jnp.abs(c), "h")
    return lambda x: lax.while_loop(lambda c: jnp.sum(c) < 20, body, x)


def counted(sow):
    return lambda x: lax.fori_loop(0, 3, lambda i, c: sow(jnp.sin(c) + i, "h"), x)


def branched(sow):
    yes, no = lambda x: sow(jnp.sin(x), "h") * 2, lambda x: sow(jnp.cos(x), "h") * x
    return lambda x: [lax.cond(x[i] > 0, yes, no, x) for i in range(2)]


def switched(sow):
    cases = [lambda x: x, lambda x: sow(x * 2, "h") + 1, lambda x: x - sow(jnp.sin(x), "h")]
    return lambda x: [lax.switch(i, cases, x) for i in (0, 1, 2)]


def recomputed(sow):
    layer = jax.checkpoint(lambda x: jnp.exp(sow(jnp.sin(x), "h")))
    return lambda x: layer(layer(x))


def mapped(sow):
    one = lambda x, y: sow(jnp.sin(x * y), "h") ** 2
    twice = jax.vmap(jax.vmap(one, (0, None)), (None, 0), out_axes=1)
    return lambda x: (jax.vmap(one, (0, None))(x, x[1]), twice(x, x))


def mapped_branch(sow):
    yes, no = lambda x: sow(jnp.sin(x), "h") * x, lambda x: x**2 * sow(jnp.cos(x), "h")
    return jax.vmap(lambda x: lax.cond(x > 0, yes, no, x))


def mapped_loop(sow):
    body = lambda c: sow(jnp.exp(c * 0.3) + 1.1 * jnp.abs(c), "h")
    return jax.vmap(lambda x: lax.while_loop(lambda c: c < 5, body, x))


def mapped_scan(sow):
    return jax.vmap(lambda x: lax.scan(lambda c, t: (sow(jnp.sin(c * t), "h"), c), x, T))


def not_mapped(sow):
    return lambda x: jax.vmap(lambda y: sow(jnp.sin(x), "h") * y)(jnp.arange(4.0))


def custom(sow):
    @jax.custom_jvp
    def inside(x):
        return sow(jnp.sin(x), "h") * 2

    inside.defjvps(lambda t, out, x: 3 * t)
    other = jax.custom_vjp(lambda x: sow(jnp.cos(x), "h") * 2)
    other.defvjp(lambda x: (other(x), None), lambda _, ct: (ct,))
    return lambda x: inside(x) + other(x)


PROGRAMS = [straight, shared, scanned, nested, looped, counted, branched, switched, recomputed]
PROGRAMS += [mapped, mapped_branch, mapped_loop, mapped_scan, not_mapped, custom]


@pytest.mark.parametrize("program", PROGRAMS)
def test_agrees_with_the_edited_source(program):
    f, edit = program(tapax.sow), lambda h: h**2 + 0.3 * h
    expected = program(lambda x, name: edit(x))(X)
    close(tapax.edit(f, {"h": edit})(X), expected)
    close(jax.jit(tapax.edit(jax.jit(f), {"h": edit}))(X), expected)
    close(tapax.edit(f, {"h": 9.0})(X), program(lambda x, name: jnp.full_like(x, 9.0))(X))
    rows = jnp.stack([X, 2 * X])
    close(jax.vmap(tapax.edit(f, {"h": edit}))(rows), jax.vmap(program(lambda x, _: edit(x)))(rows))


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_edit_of_nothing_changes_nothing(program):
    f = program(tapax.sow)
    cost = lambda f: jax.jit(f).lower(X).compile().cost_analysis().get("flops")
    with pytest.warns(UserWarning, match="tapax.edit has no edit for"):
        nothing = tapax.edit(f), tapax.edit(f, {}, {})
    for edited in nothing:
        close(edited(X), f(X), 1e-6)
        assert cost(edited) == cost(f)
    same = tapax.edit(f, {"h": lambda h: h})
    close(same(X), f(X), 1e-6)
    assert cost(same) == cost(f)


@pytest.mark.parametrize("program", [scanned, looped, branched, recomputed, mapped_scan, custom])
def test_one_operation_at_a_time(program):
    edit = lambda h: h**2 + 0.3 * h
    with jax.disable_jit():
        got = tapax.edit(program(tapax.sow), {"h": edit})(X)
        close(got, program(lambda x, name: edit(x))(X))


def test_functions_without_a_hash_edit_values():
    @dataclasses.dataclass(frozen=True)
    class Scale:
        by: jax.Array

        def __call__(self, h, site):
            return h * self.by if site.path == "h" else h

    def f(x):
        return tapax.sow(x + 1, "h").sum()

    x, by = jnp.arange(3.0), jnp.array([2.0, 3.0, 5.0])
    for fn, expected in ((f, jnp.sum((x + 1) * by)), (jax.grad(f), by)):
        assert_close(tapax.edit(fn, values={"h": Scale(by)})(x), expected)
        assert_close(tapax.edit(jax.jit(fn), values={"h": Scale(by)})(x), expected)


def test_functions_compiled_before_an_edit():
    f = jax.jit(loss)
    before = f(X)
    assert_close(tapax.edit(f, {"h": 0.0})(X), 0)
    assert_close(f(X), before)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_one_call_of_a_shared_function(wrap):
    layer = wrap(lambda x: tapax.sow(jnp.sin(x), "h"))
    twice = lambda x: layer(layer(x))
    close(tapax.edit(twice, {"h@1": lambda h: h + 1})(X), jnp.sin(jnp.sin(X)) + 1)
    close(tapax.edit(twice, {"h@0": lambda h: h + 1})(X), jnp.sin(jnp.sin(X) + 1))
    both = {"h@0": lambda h: h + 1, "h@1": lambda h: h * 2}
    close(tapax.edit(jax.jit(twice), both)(X), 2 * jnp.sin(jnp.sin(X) + 1))


def test_calls_of_a_shared_function_in_loops_of_several_lengths():
    layer = jax.jit(lambda c, t: tapax.sow(c * t, "h"))
    body = lambda c, t: (layer(c, t), None)
    f = lambda x: lax.scan(body, lax.scan(body, layer(x, 2.0), T)[0], jnp.arange(1.0, 6.0))[0]
    new = jnp.arange(15.0).reshape(5, 3)
    close(tapax.edit(f, {"h@0": X})(X), X * jnp.prod(T) * 120)
    close(tapax.edit(f, {"h@1": new[:3]})(X), new[2] * 120)
    close(tapax.edit(f, {"h@2": new})(X), new[4])
    close(tapax.edit(f, {tapax.at("h@2", step=-2): 0.5})(X), jnp.full(3, 2.5))
    point = {"h": X, "h@1": new[:3], "h@2": new}
    c = 2 * X + X
    for t, p in zip([*T, *range(1, 6)], [*new[:3], *new], strict=True):
        c = c * t + p
    close(tapax.perturbed(f)(point, X), c)


def test_selections_pick_the_sites_that_an_edit_changes():
    f = lambda x: tapax.sow(jnp.sin(tapax.sow(x * 2, "ab")), "abc")
    seen = {}

    def edit(x, site):
        seen[site.name] = site.shape, site.dtype
        return x + len(site.name)

    close(tapax.edit(f, {"*": edit})(X), jnp.sin(2 * X + 2) + 3)
    assert seen == {"ab": ((3,), X.dtype), "abc": ((3,), X.dtype)}
    close(tapax.edit(f, {lambda site: site.path == "ab": 0.0})(X), jnp.zeros(3))
    close(tapax.edit(f, {("ab", "abc"): lambda h: h + 1})(X), jnp.sin(2 * X + 1) + 1)
    close(tapax.edit(f, {tapax.ops("sin"): lambda h: 2 * h})(X), 2 * jnp.sin(2 * X))


def test_several_edits_of_one_site_are_done_in_order():
    expected = 20 * jnp.sum(jnp.sin(X) + 1)
    close(tapax.edit(loss, [("h", lambda h: h + 1), ("*", lambda h: h * 10)])(X), expected)
    inner = tapax.edit(loss, {"h": lambda h: h + 1})
    close(tapax.edit(inner, {"h": lambda h: h * 10})(X), expected)
    close(tapax.edit(jax.jit(inner), {"h": lambda h: h * 10})(X), expected)


@pytest.mark.parametrize("axes", [(), (3,), (2, 3), (3, 2, 3)])
def test_an_array_may_have_the_axes_of_loops_and_maps(axes):
    # The site has a scan of three around a map of two, and three elements.
    def f(x):
        body = lambda c, t: jax.vmap(lambda c: (tapax.sow(c * t, "h"),) * 2)(c)
        return lax.scan(body, jnp.stack([x, x]), T)[1]

    new = np.random.default_rng(0).normal(size=axes).astype(X.dtype)
    close(tapax.edit(f, {"h": new})(X), jnp.broadcast_to(new, (3, 2, 3)))
    close(jax.jit(lambda new: tapax.edit(f, {"h": new})(X))(new), jnp.broadcast_to(new, (3, 2, 3)))


STEPS = [0, 1, 2, -1, -3]


@pytest.mark.parametrize("edit", [0.5, X, lambda h: h**2])
def test_edit_of_one_iteration_of_a_scan(edit):
    new = edit if callable(edit) else lambda h: jnp.broadcast_to(edit, h.shape)
    sweep = lambda i: tapax.edit(chain, {tapax.at("h", step=i): edit})(X)
    expected = jnp.stack([by_hand(X, {i % 3: new}) for i in STEPS])
    close(jnp.stack([sweep(i) for i in STEPS]), expected)
    close(jax.vmap(sweep)(jnp.array(STEPS)), expected)
    close(lax.map(sweep, jnp.array(STEPS)), expected)
    close(jax.jit(sweep)(np.uint8(1)), expected[1])
    with jax.disable_jit():
        close(sweep(1), expected[1])
        close(sweep(jnp.array(-1)), expected[3])


@pytest.mark.parametrize("step", [slice(1, 3), slice(None, None, 2), slice(-1, None), slice(2)])
def test_edit_of_a_slice_of_iterations(step):
    new = lambda h: h + 1
    got = tapax.edit(chain, {tapax.at("h", step=step): new})(X)
    close(got, by_hand(X, dict.fromkeys(range(3)[step], new)))


@pytest.mark.parametrize("reverse", [False, True])
def test_an_edit_of_one_iteration_changes_the_value_that_a_capture_has_there(reverse):
    f = lambda x: lax.scan(lambda c, t: (tapax.sow(c * t, "h"),) * 2, x, T, reverse=reverse)[1]
    edited = tapax.edit(f, {tapax.at("h", step=0): 7.0})(X)
    assert_close(edited[0], 7.0)
    _, taps = tapax.capture(tapax.edit(f, {tapax.at("h", step=0): 7.0}))(X)
    close(taps.values["h"], edited)


def test_an_iteration_of_the_innermost_loop():
    def f(x, sow):
        inner = lambda c, t: (sow(c + t, t), None)
        return lax.scan(lambda c, _: (lax.scan(inner, c, jnp.arange(4.0))[0], c), x, None, 2)

    new = lambda h: h * 10
    expected = f(X, lambda h, t: jnp.where(t == 2, new(h), h))
    close(
        tapax.edit(lambda x: f(x, lambda h, t: tapax.sow(h, "h")), {tapax.at("h", step=2): new})(X),
        expected,
    )


def test_iterations_of_a_while_loop():
    def f(x, sow):
        body = lambda c: (c[0] + 1, sow(c[1] * 2, c[0]))
        return lax.while_loop(lambda c: jnp.sum(c[1]) < 100, body, (0, x))

    marked = lambda x: f(x, lambda h, i: tapax.sow(h, "h"))
    more = lambda step: tapax.edit(marked, {tapax.at("h", step=step): lambda h: h + 30})(X)
    for step in (0, 2):
        expected = f(X, lambda h, i, step=step: jnp.where(i == step, h + 30, h))
        close(more(step), expected)
        close(jax.jit(more)(step), expected)
    expected = f(X, lambda h, i: jnp.where(i >= 1, h + 30, h))
    close(more(slice(1, None)), expected)


def test_iterations_of_a_while_loop_that_differ_by_example():
    def hand(x, step):
        i = 0
        while x < 5:
            x = np.exp(0.3 * x) + 1.1 * abs(x) + (1.5 if i == step else 0.0)
            i += 1
        return x

    body = lambda c: tapax.sow(jnp.exp(0.3 * c) + 1.1 * jnp.abs(c), "h")
    f = lambda x: lax.while_loop(lambda c: c < 5, body, x)
    more = lambda f, step: tapax.edit(f, {tapax.at("h", step=step): lambda h: h + 1.5})
    expected = jnp.array([[hand(float(x), i) for x in X] for i in range(3)])
    close(more(jax.vmap(f), 1)(X), expected[1], 1e-4)
    close(jax.vmap(lambda i: more(jax.vmap(f), i)(X))(jnp.arange(3)), expected, 1e-4)
    close(jax.vmap(lambda x, i: more(f, i)(x))(X, jnp.arange(3)), jnp.diag(expected), 1e-4)


def test_layers_positions_and_strengths_in_one_program():
    traces = []

    def one(layer, position, strength):
        traces.append(1)
        edit = lambda h: h.at[position].multiply(strength)
        return tapax.edit(chain, {tapax.at("h", step=layer): edit})(X)

    sweep = one
    for axis in (2, 1, 0):
        sweep = jax.vmap(sweep, tuple(0 if i == axis else None for i in range(3)))
    strengths = jnp.array([0.0, 0.5, 2.0, -1.0])
    got = jax.jit(sweep)(jnp.arange(3), jnp.arange(3), strengths)
    assert got.shape == (3, 3, 4, 3) and len(traces) == 1
    for i, p, s in np.ndindex(3, 3, 4):
        hand = lambda h, p=p, s=s: h.at[p].multiply(strengths[s])
        close(got[i, p, s], by_hand(X, {i: hand}))


def test_other_arrays_and_steps_compile_nothing():
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return chain(x)

    for step in range(3):
        for value in (1.0, 2.0):
            edits = {tapax.at("h", step=step): jnp.full(3, value)}
            close(
                tapax.edit(f, edits)(X),
                by_hand(X, {step: lambda h, value=value: jnp.full(3, value)}),
            )
    assert len(traces) == 1
    seen = []
    edited = tapax.edit(f, {"h": lambda h: seen.append(1) or h + 1})
    edited(X)
    first = len(seen)
    for scale in range(4):
        edited(X * scale)
    assert len(seen) == first and len(traces) == 1


def test_an_edit_may_close_over_traced_values():
    f = lambda s: tapax.edit(chain, {"h": lambda h: h * s})(X)
    hand = lambda s: by_hand(X, dict.fromkeys(range(3), lambda h: h * s))
    close(jax.jit(f)(2.0), hand(2.0))
    close(jax.grad(lambda s: jnp.sum(f(s)))(2.0), jax.grad(lambda s: jnp.sum(hand(s)))(2.0))
    close(jax.vmap(f)(X), jax.vmap(hand)(X))
    close(jax.jacfwd(f)(2.0), jax.jacfwd(hand)(2.0))
    close(lax.map(f, X), jax.vmap(hand)(X))
    close(jax.hessian(lambda s: jnp.sum(f(s)))(2.0), jax.hessian(lambda s: jnp.sum(hand(s)))(2.0))


@pytest.mark.parametrize("program", [straight, scanned, nested, recomputed, branched, mapped_scan])
def test_derivatives_of_an_edited_function(program):
    edit, scalar = (
        lambda h: jnp.sin(2 * h),
        lambda f: lambda x: sum(map(jnp.sum, jax.tree.leaves(f(x)))),
    )
    hand, edited = (
        scalar(program(lambda x, _: edit(x))),
        scalar(tapax.edit(program(tapax.sow), {"h": edit})),
    )
    close(jax.grad(edited)(X), jax.grad(hand)(X))
    close(jax.jvp(edited, (X,), (X,)), jax.jvp(hand, (X,), (X,)))
    close(jax.linearize(edited, X)[1](X), jax.linearize(hand, X)[1](X))
    close(jax.hessian(edited)(X), jax.hessian(hand)(X), 1e-4)


def test_an_edit_in_a_loop_by_its_carry():
    inner = lambda x: tapax.sow(jnp.sin(x), "h") * 2
    body = lambda c, _: (tapax.edit(inner, {"h": lambda h: h * jnp.sum(c)})(c), None)
    scan = lambda x: jnp.sum(lax.scan(body, x, None, length=3)[0])

    def hand(x):
        for _ in range(3):
            x = 2 * jnp.sin(x) * jnp.sum(x)
        return jnp.sum(x)

    close(scan(X), hand(X))
    close(jax.grad(scan)(X), jax.grad(hand)(X))
    close(tapax.capture(jax.grad(scan))(X)[0], jax.grad(hand)(X))


def test_derivatives_with_respect_to_an_edit():
    replaced = lambda new: jnp.sum(tapax.edit(chain, {tapax.at("h", step=1): new})(X) ** 2)
    hand = lambda new: jnp.sum(by_hand(X, {1: lambda h: new}) ** 2)
    close(jax.grad(replaced)(X), jax.grad(hand)(X))
    close(jax.hessian(replaced)(X), jax.hessian(hand)(X))
    whole = lambda new: jnp.sum(tapax.edit(chain, {"h": new})(X) ** 2)
    close(jax.grad(whole)(jnp.ones((3, 3))), jnp.zeros((3, 3)).at[2].set(2.0))


def test_captures_show_edited_values():
    out, taps = tapax.capture(tapax.edit(chain, {"h": lambda h: h + 1}))(X)
    h, x = [], X
    for t in T:
        x = jnp.sin(x * t) + 1
        h.append(x)
    close(out, x)
    close(taps.values["h"], jnp.stack(h))
    inside = tapax.edit(lambda x: tapax.capture(chain)(x)[1].values["h"], {"h": lambda h: h + 1})
    close(inside(X), jnp.stack(h))
    _, taps = tapax.capture(tapax.edit(loss, {"h": lambda h: tapax.sow(h * 3, "new") * 2}))(X)
    close(taps.values, {"new": 3 * jnp.sin(X), "h": 6 * jnp.sin(X)})


def test_an_edit_that_edits_and_captures():
    program = lambda y: tapax.sow(y * 3, "h")
    close(tapax.edit(program, {"h": tapax.edit(program, {"h": lambda h: h + 1})})(X), 9 * X + 1)
    close(tapax.edit(program, {"h": lambda h: tapax.capture(program)(h)[1].values["h"]})(X), 9 * X)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool", "complex64"])
def test_an_edit_keeps_the_dtype_of_the_value(dtype):
    x = jnp.ones(3, dtype)
    f = lambda x: tapax.sow(x, "h")
    flip = jnp.logical_not if dtype == "bool" else lambda h: -h
    for edit in (flip, x, 1 if dtype != "bool" else True, [True] * 3 if dtype == "bool" else x):
        out = tapax.edit(f, {"h": edit})(x)
        assert out.dtype == x.dtype
        close(out, flip(x) if callable(edit) else x)


def test_weak_types_stay_weak():
    f = lambda x: tapax.sow(x * 2, "h") + jnp.ones((), jnp.bfloat16)
    for edit in (lambda h: h + 1, 3.0, jnp.array(3.0)):
        assert tapax.edit(f, {"h": edit})(1.0).dtype == f(1.0).dtype == jnp.bfloat16


def test_edits_keep_64_bit_precision():
    with jax.enable_x64(True):
        x = jnp.array([1.0, 2.0])
        out = tapax.edit(lambda x: tapax.sow(x, "h"), {"h": lambda h: h + 1e-12})(x)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, x + 1e-12, rtol=0, atol=1e-15)
        scan = lambda x: lax.scan(lambda c, t: (tapax.sow(c + t, "h"), None), x, jnp.arange(3))[0]
        assert tapax.edit(scan, {tapax.at("h", step=1): 10})(jnp.int64(0)) == 12


def test_random_keys_are_edited_like_arrays():
    key, other = jax.random.key(0), jax.random.key(5)
    f = lambda k: jax.random.normal(tapax.sow(k, "k"), (3,))
    fold = lambda k: jax.random.fold_in(k, 1)
    close(tapax.edit(f, {"k": fold})(key), f(fold(key)))
    close(tapax.edit(f, {"k": other})(key), f(other))
    scan = lambda ks: lax.scan(lambda c, k: (c, f(k)), 0, ks)[1]
    keys = jax.random.split(key, 3)
    for i in (1, jnp.array(1)):
        got = jax.jit(tapax.edit(scan, {tapax.at("k", step=i): other}))(keys)
        close(got, jnp.stack([f(keys[0]), f(other), f(keys[2])]))
    weighted = lambda w, k: w * jnp.sum(f(k))
    close(tapax.edit(jax.grad(weighted), {"k": other})(1.0, key), jnp.sum(f(other)))


def test_edits_of_arrays_without_elements():
    x = jnp.zeros((0, 3))
    f = lambda x: tapax.sow(x * 2, "h")
    for edit in (lambda h: h + 1, 5.0, x):
        assert tapax.edit(f, {"h": edit})(x).shape == (0, 3)
    empty = lambda x: lax.scan(lambda c, t: (tapax.sow(c * t, "h"), None), x, jnp.zeros(0))[0]
    close(tapax.edit(empty, {"h": 0.0})(X), X)


def test_arguments_keep_their_meaning():
    f = jax.jit(lambda x, n, *, how: tapax.sow(x * n, how), static_argnums=1, static_argnames="how")
    close(tapax.edit(f, {"h": lambda h: h + 1})(X, 3, how="h"), 3 * X + 1)
    given = jax.jit(lambda x: tapax.sow(x * 2, "h"), donate_argnums=0)
    x = jnp.ones(1000)
    assert_close(tapax.edit(given, {"h": lambda h: h + 1})(x), 3.0)
    assert x.is_deleted()
    tree = lambda a, *, b: {"out": tapax.sow(a["x"] + b, "h")}
    close(tapax.edit(tree, {"h": lambda h: -h})({"x": X}, b=1.0), {"out": -(X + 1)})


def test_threads_edit_independently():
    edited, got = tapax.edit(loss, {"h": lambda h: h * 2}), {}

    def work(i):
        got[i] = edited(X * i), tapax.edit(loss, {"h": float(i)})(X)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        close(got[i], (4 * jnp.sum(jnp.sin(X * i)), jnp.float32(6 * i)))


def test_an_edit_with_state():
    # The cache keeps the compiled program of a jitted function, but not the contents of an object.
    class Scale:
        by = 1.0

        def __call__(self, h):
            return h * self.by

    f, scale = jax.jit(loss), Scale()
    close(tapax.edit(f, {"h": scale})(X), 2 * jnp.sum(jnp.sin(X)))
    scale.by = 5.0
    close(tapax.edit(f, {"h": scale})(X), 10 * jnp.sum(jnp.sin(X)))
    close(tapax.edit(f, {"h": scale.__call__})(X), 10 * jnp.sum(jnp.sin(X)))


def test_an_edit_that_fails_leaves_nothing_behind():
    f = jax.jit(loss)

    def fails(h):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        tapax.edit(f, {"h": fails})(X)
    close(f(X), 2 * jnp.sum(jnp.sin(X)))
    assert_close(tapax.edit(f, {"h": 0.0})(X), 0)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_values_inside_a_shard_map_are_edited(mesh, checked, wrap):
    x = jnp.arange(16.0).reshape(4, 4)

    def program(sow):
        def local(x):
            x = lax.scan(lambda c, t: (sow(jnp.sin(c * t), "h"), None), x, T)[0]
            return lax.psum(jnp.sum(x), ("a", "b")), x

        specs = {"in_specs": P("a", "b"), "out_specs": (P(), P("a", "b"))}
        return wrap(jax.shard_map(local, mesh=mesh, check_vma=checked, **specs))

    edit = lambda h: h**2 + 0.1
    close(tapax.edit(program(tapax.sow), {"h": edit})(x), program(lambda h, _: edit(h))(x))
    for new in (0.5, jnp.full((2, 2), 0.5)):
        _, out = tapax.edit(program(tapax.sow), {tapax.at("h", step=2): new})(x)
        assert_close(out, 0.5)
    parts = jnp.arange(2 * 2 * 3 * 2 * 2.0).reshape(2, 2, 3, 2, 2)
    _, out = tapax.edit(program(tapax.sow), {"h": parts})(x)
    assert_close(out, parts[:, :, 2].transpose(0, 2, 1, 3).reshape(4, 4))
    traced = jax.vmap(lambda i: tapax.edit(program(tapax.sow), {tapax.at("h", step=i): 0.5})(x)[1])
    assert_close(traced(jnp.array([2, 2])), 0.5)
