"""Dropout and noise at sites, against the same draws applied by hand, in many programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tapax import nn
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

KEY = jax.random.key(3)
X = jnp.linspace(-1.0, 2.0, 12).reshape(4, 3)
W = {"up": jnp.sin(jnp.arange(15.0)).reshape(3, 5), "out": jnp.cos(jnp.arange(10.0)).reshape(5, 2)}


def net(w, x):
    h = tapax.sow(jnp.tanh(x @ w["up"]), "h")
    return tapax.sow(h @ w["out"], "out")


def drop(key, x, rate, shape=None):
    """Apply dropout by its definition."""
    kept = np.asarray(jax.random.bernoulli(key, 1 - rate, x.shape if shape is None else shape))
    return jnp.where(kept, x / (1 - rate), 0.0)


def gauss(key, x, std):
    return x + std * jax.random.normal(key, x.shape, x.dtype)


def nth(key, n):
    return jax.random.fold_in(key, n)


def test_dropout_is_the_mask_drawn_by_hand():
    got = nn.dropout(net, at="h", rate=0.4)(KEY, W, X)
    assert_close(got, drop(nth(KEY, 0), jnp.tanh(X @ W["up"]), 0.4) @ W["out"])


def test_noise_equals_draws_by_hand():
    got = nn.noise(net, at="h", std=0.3)(KEY, W, X)
    assert_close(got, gauss(nth(KEY, 0), jnp.tanh(X @ W["up"]), 0.3) @ W["out"])


def test_relative_noise_is_in_units_of_the_value():
    h = jnp.tanh(X @ W["up"])
    std = 0.3 * np.sqrt(np.mean(np.square(np.asarray(h, np.float64))))
    got = nn.noise(net, at="h", std=0.3, relative=True)(KEY, W, X)
    assert_close(got, gauss(nth(KEY, 0), h, std) @ W["out"])


def test_each_site_and_each_member_has_different_draws():
    """Sites are numbered in program order, and members get the keys of a split."""
    noisy = nn.noise(net, at="**", std=0.3)
    got = noisy.sample(KEY, 3, W, X)
    for key, out in zip(jax.random.split(KEY, 3), got, strict=True):
        h = gauss(nth(key, 0), jnp.tanh(X @ W["up"]), 0.3)
        assert_close(out, gauss(nth(key, 1), h @ W["out"], 0.3))
        assert_close(noisy(key, W, X), out)
    np.testing.assert_array_equal(noisy.sample(KEY, 3, W, X), got)
    assert not np.allclose(noisy.sample(nth(KEY, 9), 3, W, X), got)


def test_perturbations_of_one_function_go_on_counting():
    both = nn.noise(nn.dropout(net, at="h", rate=0.4), at=["h", "out"], std=0.3)
    h = gauss(nth(KEY, 1), drop(nth(KEY, 0), jnp.tanh(X @ W["up"]), 0.4), 0.3)
    assert_close(both(KEY, W, X), gauss(nth(KEY, 2), h @ W["out"], 0.3))


def test_elements_along_broadcast_axes_are_dropped_together():
    got = nn.dropout(net, at="h", rate=0.4, broadcast_dims=(0,))(KEY, W, X)
    kept = drop(nth(KEY, 0), jnp.tanh(X @ W["up"]), 0.4, (1, 5))
    assert_close(got, kept @ W["out"])


def test_rates_of_zero_change_nothing():
    for f in (nn.dropout(net, at="h", rate=0.0), nn.noise(net, at="h", std=0)):
        assert_close(f(KEY, W, X), net(W, X))


@pytest.mark.many
@pytest.mark.parametrize("make", [jax.jit, jax.checkpoint, lambda f: f], ids=["jit", "remat", ""])
def test_perturbed_functions_compose_with_transformations(make):
    """Gradients equal those of the function with a fixed mask, under jit, vmap and remat."""
    layer = make(lambda w, x: tapax.sow(jnp.tanh(x @ w["up"]), "h"))
    fn = lambda w, x: jnp.sum((layer(w, x) @ w["out"]) ** 2)
    dropped = nn.dropout(fn, at="h", rate=0.4)

    def by_hand(key, w, x):
        return jnp.sum((drop(nth(key, 0), jnp.tanh(x @ w["up"]), 0.4) @ w["out"]) ** 2)

    for _ in range(2):
        assert_close(dropped(KEY, W, X), by_hand(KEY, W, X))
        assert_close(jax.jit(jax.grad(dropped, 1))(KEY, W, X), jax.grad(by_hand, 1)(KEY, W, X))
    keys = jax.random.split(KEY, 3)
    got = jax.vmap(lambda key: dropped(key, W, X))(keys)
    assert_close(got, jnp.stack([by_hand(key, W, X) for key in keys]))
    inner = nn.dropout(jax.grad(fn), at="h", rate=0.4)  # the gradient is taken inside
    assert_close(inner(KEY, W, X), jax.grad(by_hand, 1)(KEY, W, X))


@pytest.mark.parametrize("index", [np.s_[:, 1:3], np.s_[0], np.s_[..., -1], np.s_[:, [4, 0]]])
def test_a_part_of_a_value_is_perturbed_alone(index):
    h = jnp.tanh(X @ W["up"])
    part = tapax.at("h", index=index)
    dropped = h.at[index].set(drop(nth(KEY, 0), h[index], 0.4))
    assert_close(nn.dropout(net, at=part, rate=0.4)(KEY, W, X), dropped @ W["out"])
    noisy = nn.noise(net, at=[part, "out"], std=0.3, relative=True)
    got = noisy.sample(KEY, 2, W, X)
    scale = lambda x: 0.3 * np.sqrt(np.mean(np.square(np.asarray(x, np.float64))))
    for key, out in zip(jax.random.split(KEY, 2), got, strict=True):
        some = h.at[index].set(gauss(nth(key, 0), h[index], scale(h[index])))
        want = some @ W["out"]
        assert_close(out, gauss(nth(key, 1), want, scale(want)))


def test_elements_of_a_part_are_dropped_together_along_its_axes():
    got = nn.dropout(net, at=tapax.at("h", index=0), rate=0.4, broadcast_dims=(0,))(KEY, W, X)
    h = jnp.tanh(X @ W["up"])
    want = h.at[0].set(drop(nth(KEY, 0), h[0], 0.4, (1,)))
    assert_close(got, want @ W["out"])


def scanned(x, mark=tapax.sow):
    def layer(x, w):
        with tapax.scope("layers"):
            return mark(jnp.sin(x * w), "h"), None

    return jax.lax.scan(layer, x, jnp.array([0.5, 2.0, 3.0, 1.5]))[0]


@pytest.mark.parametrize(
    ("at", "steps"),
    [
        (tapax.at("**", step=2), [2]),
        (tapax.at("**", step=-1), [3]),
        (tapax.at("**", step=slice(1, 3)), [1, 2]),
        (tapax.at("**", step=slice(None, None, -2)), [1, 3]),
        ("layers/2/h", [2]),
        ("layers/h", [0, 1, 2, 3]),
    ],
)
def test_some_iterations_are_perturbed_with_the_keys_that_they_have_among_all(at, steps):
    got = jax.jit(nn.noise(scanned, at=at, std=0.3))(KEY, X)
    want = X
    for i, key in enumerate(jax.random.split(nth(KEY, 0), 4)):
        want = jnp.sin(want * jnp.array([0.5, 2.0, 3.0, 1.5])[i])
        want = gauss(key, want, 0.3) if i in steps else want
    assert_close(got, want)


def test_two_layers_and_a_part_of_one_iteration_are_perturbed_one_after_the_other():
    at = ["layers/0/h", "layers/2/h", "layers/0/*", tapax.at("layers/h", step=3, index=np.s_[0])]
    got = nn.noise(scanned, at=at, std=0.3)(KEY, X)
    keys = [jax.random.split(nth(KEY, n), 4) for n in range(3)]
    want = X
    for i, w in enumerate([0.5, 2.0, 3.0, 1.5]):
        want = jnp.sin(want * w)
        if i in (0, 2):
            want = gauss(keys[i // 2][i], want, 0.3)
        if i == 3:
            want = want.at[0].set(gauss(keys[2][3], want[0], 0.3))
    assert_close(got, want)


def test_one_iteration_of_a_while_loop_is_perturbed():
    def loop(x, mark):
        step = lambda s: (s[0] + 1, mark(jnp.sin(2 * s[1]), s[0]))
        return jax.lax.while_loop(lambda s: s[0] < 3, step, (0, x))[1]

    at = tapax.at("h", step=1, index=np.s_[:, 0])
    got = nn.noise(lambda x: loop(x, lambda h, i: tapax.sow(h, "h")), at=at, std=0.3)(KEY, X)
    key = jax.random.fold_in(nth(KEY, 0), 1)
    noisy = lambda h: h.at[:, 0].set(gauss(key, h[:, 0], 0.3))
    assert_close(got, loop(X, lambda h, i: jnp.where(i == 1, noisy(h), h)))


def test_iterations_of_a_scan_have_different_keys():
    ws = jnp.array([0.5, 2.0, 3.0])
    fn = lambda x: jax.lax.scan(lambda x, w: (tapax.sow(x * w, "h"), None), x, ws)[0]
    got = nn.dropout(fn, at="h", rate=0.3)(KEY, X)
    want = X
    for key, w in zip(jax.random.split(nth(KEY, 0), 3), ws, strict=True):
        want = drop(key, want * w, 0.3)
    assert_close(got, want)
    nested = lambda x: jax.lax.scan(lambda x, _: (fn(x), None), x, length=2)[0]
    got = nn.noise(nested, at="h", std=0.3).sample(KEY, 2, X)
    for member, out in zip(jax.random.split(KEY, 2), got, strict=True):
        want, keys = X, jax.random.split(nth(member, 0), 6).reshape(2, 3)
        for i in range(2):
            for key, w in zip(keys[i], ws, strict=True):
                want = gauss(key, want * w, 0.3)
        assert_close(out, want)


def test_iterations_of_a_while_loop_have_different_keys():
    def fn(x):
        run = lambda c: (c[0] + 1, tapax.sow(c[1] * 1.5, "h"))
        return jax.lax.while_loop(lambda c: c[0] < 4, run, (0, x))[1]

    got, want = nn.noise(fn, at="h", std=0.3)(KEY, X), X
    for i in range(4):
        want = gauss(nth(nth(KEY, 0), i), want * 1.5, 0.3)
    assert_close(got, want)


def test_loops_inside_of_while_loops_have_different_keys():
    step = lambda x, _: (x + tapax.sow(jnp.zeros(()), "h"), None)
    body = lambda c: (c[0] + 1, jax.lax.scan(step, c[1], length=2)[0], c[2].at[c[0]].set(c[1]))
    start = lambda: (0, jnp.zeros(()), jnp.zeros(3))
    run = lambda: jax.lax.while_loop(lambda c: c[0] < 3, body, start())
    _, end, sums = nn.noise(run, at="h", std=1.0)(KEY)
    pairs = np.diff(np.append(sums, end))  # the noise of each iteration of the outer loop
    assert len(np.unique(pairs)) == 3 and np.all(pairs != 0)


def test_examples_of_a_map_have_different_keys():
    fn = jax.vmap(lambda x: tapax.sow(jnp.sin(x), "h"))
    got = nn.dropout(fn, at="h", rate=0.3)(KEY, X)
    keys = jax.random.split(nth(KEY, 0), len(X))
    assert_close(got, jnp.stack([drop(k, jnp.sin(x), 0.3) for k, x in zip(keys, X, strict=True)]))


def test_branches_and_calls_are_perturbed_each():
    def fn(x, i):
        x = tapax.sow(x * 2, "h")
        return jax.lax.switch(i, [lambda x: tapax.sow(x + 1, "h"), lambda x: x], x)

    noisy = nn.noise(fn, at="h", std=0.3)
    first = gauss(nth(KEY, 0), X * 2, 0.3)
    assert_close(noisy(KEY, X, jnp.int32(0)), gauss(nth(KEY, 1), first + 1, 0.3))
    assert_close(noisy(KEY, X, jnp.int32(1)), first)


def test_devices_of_a_mesh_have_different_keys(mesh):
    spec = jax.sharding.PartitionSpec("a", "b")
    body = lambda x: tapax.sow(jnp.sin(x), "h")
    fn = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    x = jnp.arange(16.0).reshape(4, 4)
    shape = tuple(mesh.shape.values())
    got = nn.dropout(fn, at="h", rate=0.3)(KEY, x)
    keys = jax.random.split(nth(KEY, 0), np.prod(shape)).reshape(shape)
    rows, columns = 4 // shape[0], 4 // shape[1]
    want = np.zeros((4, 4))
    for i, j in np.ndindex(shape):
        part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        want[part] = drop(keys[i, j], jnp.sin(x[part]), 0.3)
    assert_close(got, want)


def test_sharded_arrays_are_perturbed_as_whole_ones(mesh):
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    x = jax.device_put(jnp.tile(X, (2, 1)), sharding)
    got = nn.dropout(jax.jit(net), at="h", rate=0.4).sample(KEY, 2, W, x)
    assert_close(got, nn.dropout(net, at="h", rate=0.4).sample(KEY, 2, W, np.asarray(x)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
def test_perturbed_values_keep_their_dtype(dtype):
    x = jnp.ones((64, 64), dtype)
    fn = lambda x: tapax.sow(x, "h")
    dropped = nn.dropout(fn, at="h", rate=0.25)(KEY, x)
    assert dropped.dtype == dtype
    assert_close(np.unique(np.abs(np.asarray(dropped, np.complex64))), [0.0, 4 / 3], 1e-2)
    noisy = nn.noise(fn, at="h", std=0.5)(KEY, x)
    assert noisy.dtype == dtype
    assert abs(np.asarray(noisy - x, np.complex64).std() - 0.5) < 0.02


def test_moments_of_a_linear_model_are_those_of_the_closed_forms():
    """Dropout of h in h @ w has the variance r / (1 - r) * h**2 @ w**2, noise std**2 * w @ w."""
    h, w = jnp.linspace(0.5, 2.0, 6), jnp.linspace(-1.0, 1.0, 6)
    fn = lambda h: tapax.sow(h, "h") @ w
    count = 20_000
    dropped = np.asarray(nn.dropout(fn, at="h", rate=0.3).sample(KEY, count, h), np.float64)
    variance = 0.3 / 0.7 * float(h**2 @ w**2)
    assert abs(dropped.mean() - float(h @ w)) < 5 * np.sqrt(variance / count)
    assert abs(dropped.var() / variance - 1) < 0.05
    noisy = np.asarray(nn.noise(fn, at="h", std=0.2).sample(KEY, count, h), np.float64)
    variance = 0.2**2 * float(w @ w)
    assert abs(noisy.mean() - float(h @ w)) < 5 * np.sqrt(variance / count)
    assert abs(noisy.var() / variance - 1) < 0.05


def test_members_and_sites_are_independent():
    fn = lambda x: (tapax.sow(x, "a"), tapax.sow(x, "b"))
    a, b = nn.noise(fn, at="*", std=1.0).sample(KEY, 2, jnp.zeros(5000))
    draws = np.stack([a[0], a[1], b[0], b[1]])
    assert np.abs(np.corrcoef(draws) - np.eye(4)).max() < 0.06


def test_functions_are_traced_once_for_all_keys():
    traces = []

    def fn(x):
        traces.append(1)
        return tapax.sow(x, "h")

    noisy = nn.noise(fn, at="h", std=1.0)
    outs = [noisy.sample(nth(KEY, i), 3, X + i) for i in range(3)]
    assert len(traces) == 1 and not np.allclose(outs[0], outs[1])


def test_a_capture_of_a_perturbed_function_shows_perturbed_values():
    dropped = nn.dropout(net, at="h", rate=0.4)
    out, taps = tapax.capture(dropped)(KEY, W, X)
    assert_close(taps.values["h"], drop(nth(KEY, 0), jnp.tanh(X @ W["up"]), 0.4))
    assert_close(taps.values["out"], out)


def test_integer_sites_are_left_out_of_globs():
    fn = lambda x: (tapax.sow(jnp.argmax(x, -1), "index"), tapax.sow(x, "h"))
    index, h = nn.noise(fn, at="*", std=1.0)(KEY, X)
    np.testing.assert_array_equal(index, np.argmax(np.asarray(X), -1))
    assert_close(h, gauss(nth(KEY, 0), X, 1.0))


dead = lambda x: (tapax.sow(x, "h"), x)[1]
index = lambda x: tapax.sow(jnp.argmax(x, -1), "index")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nn.dropout(net, at="h", rate=1.0), ValueError,
         "`rate` must be in [0, 1), but is 1.0."),
        (lambda: nn.dropout(net, at="h", rate=-0.1), ValueError,
         "`rate` must be in [0, 1), but is -0.1."),
        (lambda: nn.dropout(net, at="h", rate=np.nan), ValueError,
         "`rate` must be finite, but is nan."),
        (lambda: nn.dropout(net, at="h", rate="a"), TypeError, "`rate` must be a number, but is"),
        (lambda: nn.noise(net, at="h", std=-1), ValueError,
         "`std` is a standard deviation and cannot be negative, but is -1."),
        (lambda: nn.dropout(3, at="h", rate=0.1), TypeError, "`nn.dropout` takes a function, but"),
        (lambda: nn.dropout(net, at="", rate=0.1), tapax.SiteError, "`at` is an empty string"),
        (lambda: nn.dropout(net, at=tapax.at("h", step=1), rate=0.1)(KEY, W, X), tapax.SiteError,
         "`step` was given for the site 'h', marked at "),
        (lambda: nn.noise(net, at=tapax.at("h", index=9), std=0.1)(KEY, W, X), tapax.SiteError,
         "index=np.s_[9] does not fit the site 'h', marked at "),
        (lambda: jax.jit(lambda i: nn.noise(net, at=tapax.at("h", index=i), std=0.1)(KEY, W, X))(0),
         tapax.SiteError,
         "`at` is tapax.at('h', index=np.s_[a traced integer]), which contains a traced number"),
        (lambda: nn.weight_noise(net, 0.1, at=tapax.at("up", index=0)), tapax.SiteError,
         "Weights are perturbed as whole arrays, but `at` is tapax.at('up', index=np.s_[0])."),
        (lambda: nn.dropout(net, at="hh", rate=0.1)(KEY, W, X), tapax.SiteError,
         "at='hh' picks nothing: tracing the function reached no site with that name"),
        (lambda: nn.dropout(net, at=lambda site: False, rate=0.1)(KEY, W, X), tapax.SiteError,
         "at=<lambda>.<locals>.<lambda> picks none of the 2 sites"),
        (lambda: nn.dropout(index, at="index", rate=0.1)(KEY, X), tapax.SiteError,
         "The site 'index', marked at "),
        (lambda: nn.dropout(index, at="**", rate=0.1)(KEY, X), tapax.SiteError,
         "The site 'index', marked at "),
        (lambda: nn.noise(dead, at="h", std=1.0)(KEY, X), tapax.SiteError,
         "The perturbation of the site 'h', marked at "),
        (lambda: nn.dropout(net, at="h", rate=0.1, broadcast_dims=(2,))(KEY, W, X), tapax.SiteError,
         "`broadcast_dims` contains 2, but the site 'h', marked at "),
        (lambda: nn.dropout(net, at="h", rate=0.1)(None, W, X), TypeError,
         "`key` must be given, to draw the members: key=jax.random.key(0)."),
        (lambda: nn.dropout(net, at="h", rate=0.1)(7, W, X), TypeError,
         "`key` must be one random key, such as jax.random.key(0), but is 7"),
        (lambda: nn.dropout(net, at="h", rate=0.1).sample(KEY, 0, W, X), ValueError,
         "`num_members` must be 1 or more, but is 0."),
    ],
)  # fmt: skip
def test_bad_input_of_perturbations(call, error, message):
    with pytest.raises(error) as found:
        call()
    assert str(found.value).startswith(message)
    assert str(found.value).count("\n") == 0


def test_old_keys_are_keys_too():
    old = jax.random.PRNGKey(3)
    dropped = nn.dropout(net, at="h", rate=0.4)
    np.testing.assert_array_equal(dropped(old, W, X), dropped(jax.random.key(3), W, X))


def test_a_function_that_raises_leaves_nothing_behind():
    def fails(x):
        tapax.sow(x, "h")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        nn.noise(fails, at="h", std=1.0)(KEY, X)
    assert_close(nn.noise(net, at="h", std=0.0)(KEY, W, X), net(W, X))
