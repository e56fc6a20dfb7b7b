"""Every public function on an explicit mesh, where the type of an array includes its sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tapax
from tests.oracles.closeness import assert_close

SITES = ["h", "s", "y", "l", "v"]
SPECS = {
    "h": P("x", "y"),
    "s": P(None, "x", "y"),
    "y": P("x", None),
    "l": P("x", None),
    "v": P("x", None),
}
X = np.arange(1.0, 33.0, dtype=np.float32).reshape(8, 4) / 32
W = np.full((4, 4), 1 / 3, np.float32)


@pytest.fixture(autouse=True)
def explicit_mesh():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield


def arguments():
    return jax.device_put(W, P("y", None)), jax.device_put(X, P("x", "y"))


def loss(w, x, mark=tapax.sow):
    h = mark(jnp.tanh(x * 2), "h")
    times = jnp.arange(1, 4, dtype=x.dtype)
    h, _ = lax.scan(lambda c, t: (mark(jnp.sin(c) * t, "s"), None), h, times)
    y = mark(jnp.einsum("bi,ij->bj", h, w, out_sharding=P("x", None)), "y")
    local = lambda y: mark(jnp.sum(y, axis=-1), "l")
    z = jax.shard_map(local, in_specs=P("x", None), out_specs=P("x"))(y)
    return jnp.sum(z**2) + jnp.sum(jax.vmap(lambda r: mark(r**2, "v"))(y))


def by_hand(edits=None, taps=None):
    """Compute the program in NumPy, with some values replaced, and put its sites into `taps`."""

    def mark(value, name, number=None):
        edit = (edits or {}).get(name)
        value = value if edit is None else edit(value, number).astype(np.float32)
        if taps is not None:
            taps.setdefault(name, []).append(value)
        return value

    h = mark(np.tanh(X * 2), "h")
    for i, t in enumerate((1.0, 2.0, 3.0)):
        h = mark(np.sin(h) * t, "s", i)
    y = mark(h @ W, "y")
    z = mark(np.sum(y, axis=-1).reshape(4, 2), "l")
    return np.sum(z**2) + np.sum(mark(y**2, "v"))


def captured_by_hand():
    taps = {}
    by_hand(taps=taps)
    return {name: np.stack(v) if name == "s" else v[0] for name, v in taps.items()}


WRAPS = [lambda f: f, jax.jit]


@pytest.mark.parametrize("wrap", WRAPS)
def test_captured_values_keep_their_shardings(wrap):
    out, taps = wrap(tapax.capture(loss))(*arguments())
    assert_close(out, by_hand(), 1e-5)
    for name, value in captured_by_hand().items():
        assert_close(taps.values[name], value, 1e-5)
        assert jax.typeof(taps.values[name]).sharding.spec == SPECS[name]
    assert tapax.sites(loss)(*arguments()).names == SITES


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("site", SITES)
def test_edits_with_numbers_arrays_and_functions(wrap, site):
    edited = lambda what: wrap(tapax.edit(loss, values={site: what}))(*arguments())
    constant = lambda x, _: np.full_like(x, 0.5)
    assert_close(edited(0.5), by_hand({site: constant}), 1e-5)
    assert_close(edited(lambda h: 2 * h), by_hand({site: lambda x, _: 2 * x}), 1e-5)
    new = captured_by_hand()[site] + 0.25
    shifted = lambda x, number: new if number is None else new[number]
    expected = by_hand({site: shifted})
    assert_close(edited(new), expected, 1e-5)
    assert_close(edited(jax.device_put(new, SPECS[site])), expected, 1e-5)


@pytest.mark.parametrize("wrap", WRAPS)
def test_edits_of_one_iteration_keep_the_others(wrap):
    edited = wrap(tapax.edit(loss, values={tapax.at("s", step=1): 0.5}))
    second = lambda x, number: np.full_like(x, 0.5) if number == 1 else x
    assert_close(edited(*arguments()), by_hand({"s": second}), 1e-5)


def finite_difference(site, place, eps=1e-2):
    def shifted(sign):
        def edit(x, number):
            where = place if number is None else place[1:]
            shift = np.zeros_like(x)
            if number is None or number == place[0]:
                shift[where] = sign * eps
            return x + shift

        return by_hand({site: edit})

    return (shifted(1.0) - shifted(-1.0)) / (2 * eps)


@pytest.mark.parametrize("wrap", WRAPS)
def test_gradients_of_sites_keep_their_shardings(wrap):
    args = arguments()
    found = wrap(tapax.grad(loss))(*args)
    zeros = tapax.perturbations(loss)(*args)
    perturbed = jax.grad(wrap(tapax.perturbed(loss)))(zeros, *args)
    for name in SITES:
        place = (1,) * found[name].ndim
        assert_close(np.asarray(found[name])[place], finite_difference(name, place), 2e-2)
        for grads in (found, perturbed, zeros):
            assert jax.typeof(grads[name]).sharding.spec == SPECS[name]
        assert_close(perturbed[name], found[name], 1e-5)


@pytest.mark.parametrize("wrap", WRAPS)
def test_gradients_that_the_function_takes_are_captured_and_edited(wrap):
    step = jax.grad(loss)
    grads, taps = wrap(tapax.capture(step))(*arguments())
    assert_close(taps.grads["l"], 2 * captured_by_hand()["l"], 1e-5)
    doubled = wrap(tapax.edit(step, grads={"y": lambda g: 2 * g}))(*arguments())
    assert_close(doubled, 2 * grads, 1e-5)
    halves = wrap(tapax.edit(step, grads={"y": 0.5}))(*arguments())
    last = captured_by_hand()["s"][-1]
    assert_close(halves, np.einsum("bi,bj->ij", last, np.full((8, 4), 0.5)), 1e-5)


def test_cuts_jacobians_and_the_nan_search_accept_explicit_meshes():
    w, x = arguments()
    y = tapax.prefix(loss, "y")(w, x)
    assert_close(y, captured_by_hand()["y"], 1e-5)
    assert_close(tapax.suffix(loss, "y")(y, w, x), by_hand(), 1e-5)
    slope = tapax.grad(loss, "y")(w, x)["y"]
    assert_close(tapax.jacobian(loss, of=None, wrt="y")(w, x), slope, 1e-5)
    assert tapax.find_nonfinite(loss)(w, x) is None
    found = tapax.find_nonfinite(lambda w, x: loss(w, jnp.log(x - 0.5)))(w, x)
    assert (found.operation, found.index) == ("log", (0, 0))
    deep = jax.device_put(np.ones((2, 8, 2), np.float32), P(None, "x"))
    found = tapax.find_nonfinite(lambda x: jnp.log(x - 2 * (jnp.arange(2) == 1)))(deep)
    assert (found.index, found.count) == ((0, 0, 1), 16)


REDUCERS = ["histogram", "minmax", "moments", "quantiles", "rms", "topk"]
OTHERS = ["last", "mean", "nonfinite", "norm", "sum", "var", "zeros"]


@pytest.mark.once
@pytest.mark.parametrize(
    "reducer", [*REDUCERS, *(pytest.param(name, marks=pytest.mark.many) for name in OTHERS)]
)
def test_statistics_agree_with_those_of_unsharded_arrays(reducer):
    made = {
        "topk": tapax.reduce.topk(3),
        "histogram": tapax.reduce.histogram(np.linspace(-3, 3, 7)),
        "quantiles": tapax.reduce.quantiles([0.1, 0.5]),
    }
    reducer = made.get(reducer) or getattr(tapax.reduce, reducer)
    _, taps = tapax.capture(loss, values={"**": reducer}, grads=None)(*arguments())
    plain = {name: jnp.asarray(value) for name, value in captured_by_hand().items()}
    alone = lambda x: tapax.sow(x, "h")
    del plain["s"]  # the loop stacks one value for each iteration
    for name, value in plain.items():
        _, one = tapax.capture(alone, values={"**": reducer}, grads=None)(value)
        for key, expected in one.values.items():
            assert_close(taps.values[key.replace("h", name, 1)], expected, 1e-5)


def total(previous, new):
    return previous + new


FOLDS = {
    "scan": lambda x: lax.scan(
        lambda c, t: (tapax.sow(jnp.sin(c) * t, "h", reduce=total, init=float), None),
        x,
        jnp.arange(1, 3, dtype=x.dtype),
    )[0],
    "while": lambda x: lax.while_loop(
        lambda c: c[0] < 3,
        lambda c: (c[0] + 1, tapax.sow(jnp.sin(c[1]) * c[0], "h", reduce=total, init=float)),
        (jnp.float32(1), x),
    )[1],
    "cond": lambda x: lax.cond(
        x.sum() > 0,
        lambda x: tapax.sow(jnp.sin(jnp.sin(x)) * 2, "h", reduce=total, init=float) + jnp.sin(x),
        lambda x: x,
        x,
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("over", [lambda f: f, jax.vmap])
@pytest.mark.parametrize("name", FOLDS)
def test_calls_in_loops_and_branches_are_folded(name, over, wrap):
    x = jax.device_put(X, P("x", None) if over is jax.vmap else P("x", "y"))
    _, taps = wrap(tapax.capture(over(FOLDS[name])))(x)
    first, second = np.sin(X), np.sin(np.sin(X)) * 2
    assert_close(taps.values["h"], second if name == "cond" else first + second, 1e-5)
    assert jax.typeof(taps.values["h"]).sharding.spec == jax.typeof(x).sharding.spec


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_gradients_in_branches_that_some_examples_take(in_a_loop):
    def one(x):
        loss = lambda x: jnp.sum(
            lax.cond(x[0] > 0.4, lambda x: tapax.sow(jnp.sin(x), "h"), lambda x: x**2, x) ** 2
        )
        return lax.map(jax.grad(loss), x[None])[0] if in_a_loop else jax.grad(loss)(x)

    x = jax.device_put(X, P("x", None))
    for form in (jax.vmap(one), jax.jit(jax.vmap(one))):
        out, taps = tapax.capture(form)(x)
        taken = X[:, :1] > 0.4
        h = np.sin(X)
        assert_close(out, np.where(taken, 2 * h * np.cos(X), 4 * X**3), 1e-5)
        shape = (1, *X.shape) if in_a_loop else X.shape
        assert_close(taps.values["h"], np.where(taken, h, 0).reshape(shape), 1e-5)
        assert_close(taps.grads["h"], np.where(taken, 2 * h, 0).reshape(shape), 1e-5)
        edited = tapax.edit(form, values={"h": lambda h: 3 * h})(x)
        assert_close(edited, np.where(taken, 18 * h * np.cos(X), 4 * X**3), 1e-5)


def test_statistics_of_an_unrolled_scan():
    def run(x):
        step = lambda c, _: (tapax.sow(jnp.sin(c), "h"), None)
        return lax.scan(step, x, None, length=3, unroll=2)[0]

    statistics = [tapax.reduce.rms, tapax.reduce.nonfinite]
    taps = tapax.capture(run, values={"h": statistics}, grads=None)(arguments()[1])[1]
    h = [np.sin(X), np.sin(np.sin(X)), np.sin(np.sin(np.sin(X)))]
    assert_close(taps.values["h:rms"], [np.sqrt(np.mean(x**2)) for x in h])
    assert taps.values["h:nonfinite"].tolist() == [0, 0, 0]


INDICES = [np.array([0, 2]), np.array([2, -1]), slice(None, 2), X[0] > X[0].mean()]


@pytest.mark.parametrize("index", INDICES)
def test_derivatives_of_an_edited_part_of_mapped_gradients(index):
    """The examples are sharded, so the engine sees sharded values; by hand, each is whole."""
    chosen = np.zeros(4, bool)
    chosen[index] = True

    def program(x, strength, edited):
        def loss(v):
            h = jnp.sin(v)
            h = h * jnp.where(chosen, strength, 1) if edited else tapax.sow(h, "h")
            return jnp.sum(h**2)

        return jnp.sum(jax.vmap(jax.grad(loss))(x) * jnp.arange(4, dtype=x.dtype))

    def engine(x, strength):
        part = tapax.at("h", index=index)
        change = {part: lambda h: h * strength}
        return tapax.edit(lambda x: program(x, strength, edited=False), values=change)(x)

    x = jax.device_put(X, P("x", None))
    got = jax.jit(jax.value_and_grad(engine, argnums=(0, 1)))(x, 3.0)
    by_hand = lambda x, strength: program(x, strength, edited=True)
    with jax.set_mesh(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])):
        want = jax.value_and_grad(by_hand, argnums=(0, 1))(jnp.asarray(X), 3.0)
    assert_close(got, want, 1e-5)


PARTS = [
    np.s_[0],
    np.s_[:, -1],
    np.s_[..., 1:3],
    np.s_[2:5],
    np.s_[:4],
    np.s_[::-1],
    np.s_[1, 2],
    np.s_[None, 3],
    np.array([0, 5]),
    (np.array([0, 5]), np.array([1, 3])),
    X.mean() < X,
]


@pytest.mark.parametrize("index", PARTS, ids=str)
def test_parts_of_sharded_axes(index):
    def run(x):
        return jnp.sum(tapax.sow(jnp.sin(x), "h") ** 2)

    x, h = jax.device_put(X, P("x", "y")), np.sin(X)
    part = tapax.at("h", index=index)
    taps = tapax.capture(jax.grad(run), values=part, grads=part)(x)[1]
    assert_close(taps.values["h"], h[index], 1e-6)
    assert_close(taps.grads["h"], 2 * h[index], 1e-6)
    assert_close(tapax.grad(run, at=part)(x)["h"], 2 * h[index], 1e-6)

    factor = np.ones_like(X)
    factor[index] = 3
    numbers = np.arange(1.0, 1 + h[index].size, dtype=np.float32).reshape(h[index].shape)
    replaced = h.copy()
    replaced[index] = numbers
    outside = np.where(factor == 3, 0, 2 * h * np.cos(X))
    for form in (run, jax.jit(run)):
        tripled = tapax.edit(form, values={part: lambda h: 3 * h})
        assert_close(tripled(x), np.sum((factor * h) ** 2), 1e-5)
        derivative = jax.grad(tripled)(x)
        assert jax.typeof(derivative) == jax.typeof(x)
        assert_close(derivative, 2 * factor**2 * h * np.cos(X), 1e-5)
        by_array = tapax.edit(form, values={part: jnp.asarray(numbers)})
        assert_close(by_array(x), np.sum(replaced**2), 1e-5)
        assert_close(jax.grad(by_array)(x), outside, 1e-5)


def test_traced_index_of_a_sharded_axis():
    def run(i, x):
        edit = {tapax.at("h", index=np.s_[i, 1]): lambda h: 3 * h}
        return tapax.edit(lambda x: jnp.sum(tapax.sow(jnp.sin(x), "h")), values=edit)(x)

    x, h = jax.device_put(X, P("x", "y")), np.sin(X)
    for i in (0, 7):
        got, derivative = jax.jit(jax.value_and_grad(run, argnums=1))(i, x)
        assert_close(got, h.sum() + 2 * h[i, 1], 1e-5)
        factor = np.ones_like(X)
        factor[i, 1] = 3
        assert_close(derivative, factor * np.cos(X), 1e-5)
