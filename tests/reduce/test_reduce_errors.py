"""Impossible requests to reducers raise clear errors."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapax
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

R = tapax.reduce
X = jnp.arange(6.0, dtype="float32").reshape(2, 3)
HERE = r".*test_reduce_errors\.py:\d+"


def f(x):
    n = tapax.sow(jnp.arange(3, dtype="int32"), "n")
    return jnp.sum(tapax.sow(jnp.sin(x), "h")) + tapax.sow(x, "k").sum() + n[1]


def raises(error, message, **asked):
    """Check that a capture raises this message; `HERE` means a line of this file."""
    pattern = re.escape(message).replace("HERE", HERE)
    with pytest.raises(error) as caught:
        tapax.capture(asked.pop("fn", f), **{"values": None, "grads": None, **asked})(X)
    text = str(caught.value)
    assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("wrong", ["rms", 3, None, {"h": R.rms}])
def test_an_argument_that_is_not_a_reducer_raises(wrong):
    raises(
        TypeError,
        f"`values` maps a selection to {wrong!r} of type {type(wrong).__name__}, which is neither "
        "a reducer nor a function of the value: use a reducer such as "
        "tapax.reduce.rms or tapax.reduce.histogram(edges), or several in a list.",
        values={"h": wrong},
    )


def test_one_of_several_that_is_not_a_reducer_raises():
    message = "`values` maps a selection to 3 of type int, which is neither a reducer nor"
    with pytest.raises(TypeError, match=message):
        tapax.capture(f, values={"h": [R.rms, 3]})


def test_factories_are_not_reducers():
    for factory in (R.histogram, R.topk, R.quantiles):
        with pytest.raises(TypeError, match="a function that makes a reducer: call it"):
            tapax.capture(f, values={"h": factory})


@pytest.mark.parametrize("empty", [[], ()])
def test_an_empty_list_of_reducers_raises(empty):
    message = "`grads` maps a selection to an empty list of reducers: give at least one."
    raises(TypeError, message, grads={"h": empty})


@pytest.mark.parametrize("reducer", [R.cosine, R.update_ratio.total, R.cosine(axis=0)])
def test_pairs_are_for_gradients(reducer):
    raises(
        TypeError,
        f"`values` maps a selection to tapax.reduce.{reducer}, which compares a gradient with its "
        "value: use it in `grads`.",
        values={"h": [R.rms, reducer]},
    )


@pytest.mark.parametrize("key", ["", 3, R.rms])
def test_keys_that_are_not_selections_raise(key):
    with pytest.raises((TypeError, tapax.SiteError)) as caught:
        tapax.capture(f, values={key: R.rms})
    assert "`values`" in str(caught.value)


def test_a_mapping_to_reducers_raises_where_nothing_is_reduced():
    sites = {"h": R.rms}
    for call in (
        lambda: tapax.grad(f, at=sites),
        lambda: tapax.value_and_grad(f, at=sites),
        lambda: tapax.perturbations(f, at=sites),
    ):
        with pytest.raises(TypeError, match=r"`at` must be a selection of sites: .* of type dict"):
            call()(X)
    with pytest.raises(TypeError, match=r"`modules` must be a selection of sites: .* of type dict"):
        tapax.capture(f, modules=sites)(X)
    for what in (sites, {"h": [R.rms]}):
        with pytest.raises(TypeError) as caught:
            tapax.edit(f, values=what)(X)
        assert "'h'" in str(caught.value)
        assert "reducer" in str(caught.value)


@pytest.mark.parametrize(
    "several",
    [
        [R.rms, R.rms(axis=0)],
        [R.histogram([0, 1]), R.histogram([0, 2])],
        [R.Reducer(lambda: 0.0, lambda s, x: s, lambda a, b: a), R.rms.named("reduced")],
    ],
)
def test_two_reducers_of_one_name(several):
    name = f"h:{several[0].name}"
    raises(
        tapax.SiteError,
        f"Two reducers of one name select {name!r}, marked at HERE, so the result would have two "
        "arrays of that name. Rename one: reducer.named(...).",
        values={"h": several},
    )


def test_two_reducers_with_different_names():
    several = [R.rms, R.rms(axis=0).named("rows"), R.rms(axis=1).total.named("columns")]
    _, taps = tapax.capture(f, values={"h": several})(X)
    assert set(taps.values) == {"h:rms", "h:rows", "h:columns.total"}


def test_sites_that_are_not_there():
    raises(
        tapax.SiteError,
        "values='hh' picks nothing: tracing the function reached no site with that name. The "
        "nearest names are 'h'.",
        values={"hh": R.rms},
    )
    with pytest.raises(tapax.SiteError, match=r"grads='h' picks the site 'h', .* has no gradient"):
        tapax.capture(f, grads={"h": R.rms})(X)
    with pytest.raises(tapax.SiteError, match="no site that it matches"):
        tapax.capture(f, values={"**/mlp": R.rms})(X)


def test_a_step_of_a_site_outside_of_loops_raises():
    message = (
        "`step` was given for the site 'h', marked at HERE, which is in no loop. Leave `step` out."
    )
    raises(tapax.SiteError, message, values={tapax.at("h", step=1): R.rms})
    raises(tapax.SiteError, message, values={tapax.at("h", step=1): R.rms.total})


def test_a_step_beyond_the_loop():
    scan = lambda x: lax.scan(lambda c, _: (tapax.sow(c, "h"), None), x, length=3)[0]
    raises(
        tapax.SiteError,
        "step=5 was given for the site 'h', marked at HERE, but its loop has 3 iterations.",
        fn=scan,
        values={tapax.at("h", step=5): R.rms.total},
    )


NEEDS = (
    "tapax.reduce.{} needs floating-point numbers, but the site 'n', marked at HERE, has values of "
    "the type int32. Choose a reducer that takes them, or leave the site out."
)


@pytest.mark.parametrize("reducer", [R.rms, R.mean, R.norm, R.var, R.moments, R.rms(axis=0).total])
def test_reducers_of_floats_refuse_integers(reducer):
    raises(tapax.SiteError, NEEDS.format(reducer), values={"n": reducer})
    raises(tapax.SiteError, NEEDS.format(reducer), values={"n*": reducer})
    raises(tapax.SiteError, NEEDS.format(reducer), values={("**", "n"): reducer})
    _, taps = tapax.capture(f, values={"**": reducer})(X)
    assert set(taps.values) == {"h", "k"}
    _, taps = tapax.capture(f, values={"**": [reducer, R.minmax]})(X)
    assert set(taps.values) >= {f"h:{reducer.label}", "n:minmax"}


def test_a_name_does_not_depend_on_what_was_left_out():
    """If one of two reducers rejects integers, the other keeps its usual name."""
    _, taps = tapax.capture(f, values={"**": [R.rms, R.minmax]})(X)
    assert set(taps.values) == {"h:rms", "h:minmax", "k:rms", "k:minmax", "n:minmax"}


def test_reducers_of_order_refuse_complex_numbers():
    fn = lambda x: tapax.sow(x + 1j, "z")
    for reducer in (R.minmax, R.topk(2), R.histogram([0, 1]), R.quantiles()):
        with pytest.raises(tapax.SiteError) as caught:
            tapax.capture(fn, values={"z": reducer})(X)
        text = str(caught.value)
        assert f"tapax.reduce.{reducer} needs real numbers, but the site 'z', marked at " in text
        assert "complex64" in text
        assert "such as tapax.reduce.minmax" not in text


def test_axes_that_do_not_exist_raise():
    for axis in (2, -3, (0, 2)):
        raises(
            tapax.SiteError,
            f"The site 'h', marked at HERE, is reduced by tapax.reduce.rms(axis={axis}), but its "
            "values have 2 axes: [2, 3].",
            values={"h": R.rms(axis=axis)},
        )
    # A mapped axis is not an axis of the value.
    fn = jax.vmap(lambda x: tapax.sow(x, "h"))
    with pytest.raises(tapax.SiteError, match=re.escape("values have 1 axes: [3]")):
        tapax.capture(fn, values={"h": R.rms(axis=1)})(X)


CHANGES = {
    "shape of update": (
        lambda: jnp.zeros(2, jnp.float32),
        lambda s, x: x.sum(),
        lambda a, b: a + b,
        "`init` gives float32[2] and `update` gives float32[]",
    ),
    "dtype of update": (
        lambda: jnp.zeros((), jnp.int32),
        lambda s, x: s + x.sum(),
        lambda a, b: a + b,
        "`init` gives int32[] and `update` gives float32[]",
    ),
    "structure of update": (
        lambda: (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)),
        lambda s, x: {"a": s[0]},
        lambda a, b: a,
        "`init` gives (float32[], float32[]) and `update` gives {a: float32[]}",
    ),
    "shape of combine": (
        lambda: jnp.zeros(2, jnp.float32),
        lambda s, x: s + x.sum(),
        lambda a, b: jnp.concatenate([a, b]),
        "`update` gives float32[2] and `combine` gives float32[4]",
    ),
    "dtype of combine": (
        lambda: jnp.zeros((), jnp.float32),
        lambda s, x: s + x.sum(),
        lambda a, b: a > b,
        "`update` gives float32[] and `combine` gives bool[]",
    ),
}


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("name", list(CHANGES))
def test_a_state_that_changes_its_type_raises(name, total):
    *functions, wrong = CHANGES[name]
    reducer = R.Reducer(*functions, name="mine")
    raises(
        tapax.SiteError,
        "The site 'h', marked at HERE, is reduced by 'mine', whose state must keep its structure, "
        f"shapes and dtypes, but {wrong}.",
        values={"h": reducer.total if total else reducer},
    )


@pytest.mark.parametrize("field", ["init", "update", "combine", "finish"])
def test_an_argument_that_is_not_a_function_raises(field):
    parts = {"init": lambda: 0.0, "update": lambda s, x: s, "combine": lambda a, b: a}
    message = f"Reducer takes a function as `{field}`, but was given 3 of type int."
    with pytest.raises(TypeError, match=re.escape(message)):
        R.Reducer(**{**parts, field: 3})


def test_an_error_that_a_reducer_raises_is_unchanged():
    def update(state, x):
        raise RuntimeError("mine")

    reducer = R.Reducer(lambda: 0.0, update, lambda a, b: a + b)
    with pytest.raises(RuntimeError, match="mine"):
        tapax.capture(f, values={"h": reducer})(X)


@pytest.mark.parametrize(
    "edges", [[], [1.0], 5, [0, 0], [1, 0], [0, np.nan], [np.nan, 1], [0, 2, 1]], ids=str
)
def test_edges_that_do_not_rise_are_refused(edges):
    message = (
        f"`edges` must be two numbers or more, each larger than the one before, but is {edges}."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        R.histogram(edges)


@pytest.mark.parametrize("log2", [(3, 1), (1.0, 2.0), ("a", "b"), (-2000, 0), (0, 2000), 5, (1,)])
def test_bad_powers_of_two_are_refused(log2):
    message = f"`log2` must be two integers, the smaller first, but is {log2!r}"
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        R.histogram(log2=log2)


def test_a_histogram_needs_either_edges_or_powers_of_two():
    message = "`histogram` takes `edges`, or `log2=(lo, hi)`, and not both."
    for arguments in ({}, {"edges": [0, 1], "log2": (0, 1)}):
        with pytest.raises(TypeError, match=re.escape(message)):
            R.histogram(**arguments)


def test_traced_edges_are_refused():
    with pytest.raises((TypeError, ValueError), match="`edges`"):
        jax.jit(lambda e: R.histogram(e))(jnp.arange(3.0))


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "3", None])
def test_a_bad_number_of_largest_elements_is_refused(k):
    message = f"`topk` takes a number of elements, at least 1, but was given {k!r}."
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        R.topk(k)


@pytest.mark.parametrize("q", [[], 1.5, -0.1, [0.5, np.nan], "median"])
def test_ranks_outside_the_unit_interval_are_refused(q):
    message = f"`q` must be numbers from 0 to 1, but is {q!r}."
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        R.quantiles(q)


@pytest.mark.parametrize("error", [0, 1, -0.1, 2.0, 1e-9, "small", np.nan])
def test_errors_of_quantiles_that_are_out_of_range_are_refused(error):
    message = f"`error` must be between 1e-5 and 1, but is {error!r}."
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        R.quantiles(error=error)


@pytest.mark.parametrize("magnitudes", [(0, 1), (2, 1), (1, 1), (1, np.inf), (1,), 5, (-1, 1)])
def test_bad_magnitudes_are_refused(magnitudes):
    message = f"`magnitudes` must be two positive numbers, the smaller first, but is {magnitudes!r}"
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        R.quantiles(magnitudes=magnitudes)


@pytest.mark.parametrize("axis", [1.5, None, "a", (0, 1.5)])
def test_axes_that_are_not_integers_raise(axis):
    with pytest.raises(TypeError, match="`axis`"):
        R.rms(axis=axis)


def test_integers_of_numpy_are_integers():
    assert R.rms(axis=np.int64(1)) == R.rms(axis=1)
    assert R.topk(np.int64(2)) == R.topk(2)
    assert R.histogram(log2=(np.int64(-1), np.int64(1))) == R.histogram(log2=(-1, 1))


@pytest.mark.parametrize("reducer", [R.last, R.topk(2), R.quantiles(), R.histogram([0, 1])])
def test_reducers_without_results_along_an_axis_raise(reducer):
    message = f"tapax.reduce.{reducer.name} cannot be computed along an axis."
    with pytest.raises(TypeError, match=re.escape(message)):
        reducer(axis=0)


def test_second_derivatives_through_a_checkpoint():
    """A gradient cannot be reduced if its summands do not exist at the same time."""
    block = jax.checkpoint(lambda x: tapax.sow(jnp.sin(x), "h"))
    loss = lambda x: jnp.sum(block(x) ** 3)
    step = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))
    _, whole = tapax.capture(step, grads="h")(X)
    found = {}
    with contextlib.suppress(tapax.SiteError):
        found = tapax.capture(step, values=None, grads={"h": R.sum})(X)[1].grads
    assert set(found) in ({*whole.grads}, set())
    for name in found:
        assert_close(found[name], np.sum(whole.grads[name]))


def test_a_site_without_the_axis_among_others_that_have_it():
    def fn(x):
        return tapax.sow(tapax.sow(jnp.sin(x), "h").sum(), "s")

    _, taps = tapax.capture(fn, values={"**": R.rms(axis=-1)})(X)
    expected = np.sqrt(np.mean(np.sin(np.asarray(X, np.float64)) ** 2, 0))
    assert_close(taps.values["h"], expected)
    assert set(taps.values) == {"h"}
    with pytest.raises(
        tapax.SiteError, match=r"'s', marked at .* but its values have 0 axes: \[\]"
    ):
        tapax.capture(fn, values={"s": R.rms(axis=-1)})(X)
