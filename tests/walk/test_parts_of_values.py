"""tapax keeps, edits and reduces only the selected part or function of a value."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import tapax

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 3)).astype(np.float32))
TIMES = jnp.arange(5, dtype=X.dtype)
INDICES = [
    np.s_[:, -1],
    np.s_[0],
    np.s_[..., 2],
    np.s_[1:3, ::2],
    np.s_[:, None, 1],
    np.s_[np.array([0, 2])],
    np.s_[:, np.array([True, False, True, False, True, False])],
    np.s_[[0, 1], [2, 3]],
    np.s_[np.array([0, 2]), :, 1],
]


def straight(x):
    return tapax.sow(jnp.sin(x), "h")


def scanned(x):
    return lax.scan(lambda c, t: (c + tapax.sow(jnp.sin(x * t), "h"), None), x, TIMES)[0]


def mapped(x):
    return jax.vmap(straight)(jnp.stack([x, 2 * x]))


def branched(x):
    return lax.cond(x.sum() > 1e9, straight, lambda x: x, x)


def looped(x):
    step = lambda s: (s[0] + 1, tapax.sow(jnp.sin(s[1]), "h"))
    return lax.while_loop(lambda s: s[0] < 3, step, (0, x))[1]


def recomputed(x):
    return jax.checkpoint(straight)(x)


PROGRAMS = [straight, scanned, mapped, branched, looped, recomputed]


def training(program):
    return jax.jit(jax.value_and_grad(lambda x: jnp.sum(program(x) ** 2)))


@pytest.mark.parametrize(
    "program",
    [
        *(straight, scanned, looped),
        *(
            pytest.param(program, marks=pytest.mark.many)
            for program in (mapped, branched, recomputed)
        ),
    ],
)
@pytest.mark.parametrize("index", INDICES, ids=map(str, INDICES))
def test_a_captured_part_equals_the_part_of_the_whole(program, index):
    fn = program if program is looped else training(program)
    part = tapax.at("h", index=index)
    grads = None if program is looped else "**"
    _, whole = tapax.capture(fn, grads=grads)(X)
    _, taps = tapax.capture(fn, values=part, grads=grads and part)(X)
    lead = whole.values["h"].ndim - X.ndim
    take = lambda x: np.stack([np.asarray(v)[index] for v in x]) if lead else np.asarray(x)[index]
    np.testing.assert_array_equal(taps.values["h"], take(whole.values["h"]))
    assert taps.sites["h"].rank == taps.values["h"].ndim - lead
    if grads and "h" in whole.grads:
        np.testing.assert_array_equal(taps.grads["h"], take(whole.grads["h"]))


def test_only_the_part_is_stacked():
    part = tapax.at("h", index=np.s_[0, 0])
    text = str(jax.make_jaxpr(tapax.capture(scanned, values=part))(X))
    assert "f32[5,3]" in text and "f32[5,4,6,3]" not in text


@pytest.mark.parametrize("index", INDICES, ids=map(str, INDICES))
def test_an_edit_changes_only_the_part(index):
    def by_hand(x):
        def step(c, t):
            h = jnp.sin(x * t)
            return c + h.at[index].set(3 * h[index]), None

        return lax.scan(step, x, TIMES)[0]

    edited = tapax.edit(scanned, values={tapax.at("h", index=index): lambda h: 3 * h})
    np.testing.assert_allclose(edited(X), by_hand(X), rtol=1e-6)
    loss = lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 2))
    np.testing.assert_allclose(loss(edited)(X), loss(by_hand)(X), rtol=1e-4, atol=1e-5)


def test_an_entry_that_an_index_selects_twice_is_edited_once():
    twice = tapax.at("h", index=np.array([1, -3, 0]))
    edited = tapax.edit(lambda x: tapax.sow(x, "h"), values={twice: lambda h: 2 * h})
    grad = jax.grad(lambda x: jnp.sum(edited(x) ** 2))
    x = jnp.arange(1.0, 5.0)
    np.testing.assert_array_equal(edited(x), [2.0, 4.0, 3.0, 4.0])
    np.testing.assert_array_equal(grad(x), [8.0, 16.0, 6.0, 8.0])


def test_an_array_replaces_a_part():
    part = tapax.at("h", index=np.s_[:, -1])
    for array in (0.0, jnp.ones((4, 3), X.dtype), jnp.ones((5, 4, 3), X.dtype)):
        edited = tapax.edit(scanned, values={part: array})(X)
        hs = np.stack([np.sin(np.asarray(X) * t) for t in range(5)])
        hs[:, :, -1] = array
        np.testing.assert_allclose(edited, np.asarray(X) + hs.sum(0), rtol=1e-5, atol=1e-5)
    with pytest.raises(tapax.SiteError, match=r"but the value has shape \[4, 3\]"):
        tapax.edit(scanned, values={part: jnp.ones((6, 3), X.dtype)})(X)


def test_a_part_of_one_iteration_is_edited():
    part = tapax.at("h", step=3, index=np.s_[1])
    _, taps = tapax.capture(scanned, values=part)(X)
    np.testing.assert_allclose(taps.values["h"], np.sin(np.asarray(X[1]) * 3), rtol=1e-5)
    edited = tapax.edit(scanned, values={part: 0.0})(X)
    hs = np.stack([np.sin(np.asarray(X) * t) for t in range(5)])
    hs[3, 1] = 0
    np.testing.assert_allclose(edited, np.asarray(X) + hs.sum(0), rtol=1e-5, atol=1e-5)


def test_gradients_of_a_part_are_edited():
    step = jax.jit(jax.grad(lambda x: jnp.sum(straight(x) ** 2)))
    edited = tapax.edit(step, grads={tapax.at("h", index=np.s_[0]): 0.0})(X)
    want = np.array(step(X))
    want[0] = 0
    np.testing.assert_allclose(edited, want, rtol=1e-6)


def test_positions_are_swept_in_one_program():
    def ablate(i):
        return tapax.edit(scanned, values={tapax.at("h", index=np.s_[:, i]): 0.0})(X)

    swept = jax.jit(jax.vmap(ablate))(jnp.arange(-1, 6))
    for row, i in zip(swept, range(-1, 6), strict=True):
        one = tapax.edit(scanned, values={tapax.at("h", index=np.s_[:, i]): 0.0})(X)
        np.testing.assert_allclose(row, one, rtol=1e-6, atol=1e-6)
    assert np.isnan(jax.jit(ablate)(6)).all()  # a traced index cannot be checked beforehand


def test_parts_are_reduced_alone():
    part = tapax.at("h", index=np.s_[:, -1])
    _, taps = tapax.capture(scanned, values={part: [tapax.reduce.rms, tapax.reduce.minmax]})(X)
    for t in range(5):
        h = np.sin(np.asarray(X, np.float64) * t)[:, -1]
        np.testing.assert_allclose(taps.values["h:rms"][t], np.sqrt((h**2).mean()), rtol=1e-5)
        np.testing.assert_allclose(taps.values["h:minmax"][t], [h.min(), h.max()], rtol=1e-5)


def test_tapax_grad_returns_parts_of_gradients():
    loss = lambda x: jnp.sum(scanned(x) ** 2)
    whole = tapax.grad(loss)(X)["h"]
    part = tapax.grad(loss, at=tapax.at("h", index=np.s_[..., 0]))(X)["h"]
    np.testing.assert_array_equal(part, whole[..., 0])
    one = tapax.grad(loss, at=tapax.at("h", step=2, index=np.s_[1]))(X)["h"]
    np.testing.assert_array_equal(one, whole[2, 1])


def test_parts_on_a_mesh_are_captured():
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    spread = jax.shard_map(straight, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    _, taps = tapax.capture(jax.jit(spread), values=tapax.at("h", index=np.s_[0]))(X)
    np.testing.assert_array_equal(taps.values["h"], jnp.sin(X)[::2])
    edited = tapax.edit(jax.jit(spread), values={tapax.at("h", index=np.s_[0]): 0.0})(X)
    np.testing.assert_array_equal(edited, jnp.sin(X).at[::2].set(0))


def test_the_result_of_a_function_replaces_the_value():
    top = lambda h: jnp.sort(h.ravel())[-2:]
    for program in PROGRAMS:
        _, whole = tapax.capture(program)(X)
        _, taps = tapax.capture(program, values={"h": top})(X)
        lead = whole.values["h"].ndim - X.ndim
        values = np.asarray(whole.values["h"])
        want = np.stack([top(v) for v in values]) if lead else np.asarray(top(values))
        np.testing.assert_allclose(taps.values["h"], want, rtol=1e-6)
    _, taps = tapax.capture(training(scanned), values={"h": jnp.mean}, grads={"h": jnp.abs})(X)
    assert taps.values["h"].shape == (5,) and taps.grads["h"].shape == (5, *X.shape)


def test_one_value_takes_several_functions_and_reducers():
    def half(h):
        return h / 2

    asked = {"h": [half, tapax.reduce.rms, functools.partial(jnp.sum, axis=-1)], "**": jnp.max}
    _, taps = tapax.capture(straight, values=asked)(X)
    assert list(taps.values) == ["h:half", "h:rms", "h:sum", "h:max"]
    np.testing.assert_allclose(taps.values["h:half"], jnp.sin(X) / 2)


def test_a_function_may_take_the_site():
    _, taps = tapax.capture(straight, values={"h": lambda h, site: h * len(site.shape)})(X)
    np.testing.assert_allclose(taps.values["h"], 3 * jnp.sin(X))


def test_a_function_may_close_over_arrays():
    direction = jnp.array([1.0, 0.0, -1.0], X.dtype)
    project = lambda w: tapax.capture(training(scanned), values={"h": lambda h: h @ w})(X)[1]
    want = np.stack([np.sin(np.asarray(X) * t) @ np.asarray(direction) for t in range(5)])
    np.testing.assert_allclose(project(direction).values["h"], want, rtol=1e-4, atol=1e-5)
    traced = jax.jit(lambda w: project(w).values["h"])(direction)
    np.testing.assert_allclose(traced, want, rtol=1e-4, atol=1e-5)


def message(call, kind=tapax.SiteError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_bad_parts_raise_clear_errors():
    line = straight.__code__.co_firstlineno + 1
    for index, why in [
        (np.s_[4], "index 4 is out of bounds for axis 0 with size 4"),
        (np.s_[:, :, :, 0], "too many indices for array"),
        (np.s_[:, np.array([0, 9])], "index 9 is out of bounds"),
    ]:
        for call in (
            lambda: tapax.capture(straight, values=tapax.at("h", index=index))(X),  # noqa: B023
            lambda: tapax.edit(straight, values={tapax.at("h", index=index): 0.0})(X),  # noqa: B023
            lambda: tapax.grad(
                lambda x: straight(x).sum(),
                at=tapax.at("h", index=index),  # noqa: B023
            )(X),
        ):
            text = message(call)
            assert f"does not fit the site 'h', marked at {__file__}:{line}, whose" in text
            assert why in text
    for index in ("a", 1.0, True, jnp.ones(3), {}):
        text = message(lambda: tapax.at("h", index=index), TypeError)  # noqa: B023
        assert "`at` takes an index of an array as `index`" in text
    assert "was given neither" in message(lambda: tapax.at("h"), TypeError)
    traced = lambda i: tapax.capture(straight, values=tapax.at("h", index=i))(X)[1].values["h"]
    assert "`index` is traced in tapax.at('h', index=np.s_[a traced integer])" in message(
        lambda: jax.jit(traced)(0)
    )
    first, second = "tapax.at('h', index=np.s_[0])", "tapax.at('h', index=np.s_[1])"
    for two, shown in [
        ([tapax.at("h", index=0), tapax.at("h", index=1)], (first, second)),
        ([tapax.at("h", index=0), "h"], (first, "'h'")),
        (["h", tapax.at("h", index=1)], ("'h'", second)),
        ([tapax.at("h", index=0), "**"], (first, "'**'")),
    ]:
        text = message(lambda: tapax.capture(straight, values=two)(X))  # noqa: B023
        assert text == (
            f"`values` asks for the site 'h', marked at {__file__}:{line}, both as {shown[0]} and "
            f"as {shown[1]}, but every name has one array. Capture the whole value, and index the "
            "result."
        )
    part = tapax.at("h", index=0)
    assert "perturbation has an entry for every" in message(
        lambda: tapax.perturbations(straight, at=part)
    )
    assert "a cut needs a whole value" in message(lambda: tapax.prefix(straight, part))


def test_functions_that_return_no_array_are_refused():
    for out in ("text", None, {}, (X, X)):
        text = message(lambda: tapax.capture(straight, values={"h": lambda h: out})(X))  # noqa: B023
        assert f"returns {type(out).__name__}, but must return one array" in text
    assert "neither a reducer nor a function" in message(
        lambda: tapax.capture(straight, values={"h": 3}), TypeError
    )


@pytest.mark.parametrize(
    "index",
    [np.s_[7:9], np.s_[3:], np.zeros(3, bool), np.zeros(0, int), np.s_[2:1]],
    ids=["past", "end", "mask", "array", "backward"],
)
def test_a_part_without_entries_is_refused(index):
    def f(x):
        return tapax.sow(2 * x, "h").sum()

    part, x = tapax.at("h", index=index), jnp.arange(3.0)
    for call in (
        tapax.capture(f, values=part),
        tapax.edit(f, values={part: 0.0}),
        tapax.grad(f, at=part),
    ):
        with pytest.raises(tapax.SiteError, match=r"does not fit the .*it selects nothing"):
            call(x)


def test_a_part_of_an_empty_value_is_empty():
    _, taps = tapax.capture(lambda x: tapax.sow(2 * x, "h"), values=tapax.at("h", index=np.s_[1:]))(
        jnp.zeros((0, 2))
    )
    assert taps.values["h"].shape == (0, 2)
