"""Every reducer by itself, against NumPy in float64 on the same values."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import tapax
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

R = tapax.reduce
EDGES = (-2.0, -0.5, 0.0, 0.1, 0.7, 3.0)
RNG = np.random.default_rng(0)
STATISTICS = {  # over the elements along the last axis, in float64
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "var": lambda x: x.var(-1),
    "moments": lambda x: np.stack([x.mean(-1), x.var(-1)], -1),
    "norm": lambda x: np.sqrt((np.abs(x) ** 2).sum(-1)),
    "rms": lambda x: np.sqrt((np.abs(x) ** 2).mean(-1)),
    "minmax": lambda x: np.stack([x.min(-1), x.max(-1)], -1),
    "zeros": lambda x: (x == 0).mean(-1),
    "nonfinite": lambda x: (~np.isfinite(x)).sum(-1),
}
FLOATS = {"mean", "var", "moments", "norm", "rms"}
ALONG = [getattr(R, name) for name in STATISTICS]


def sow(x):
    return tapax.sow(x, "h")


def over_scan(xs):
    return lax.scan(lambda c, x: (c, jnp.sum(sow(x) != 0)), 0, xs)[1]


def reduced(fn, reducers, *args):
    _, taps = tapax.capture(fn, values={"h": reducers})(*args)
    return {name.removeprefix("h:"): np.asarray(v) for name, v in taps.values.items()}


def one(x, reducer):
    (found,) = reduced(sow, reducer, jnp.asarray(x)).values()
    return found


def exact(x):
    """Convert a value to NumPy in 64 bits."""
    x = np.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x.astype(np.complex128)
    return x.astype(np.float64)


def rows(x, axis=None, keep=0):
    """Move the elements of each unit to a new last axis, keeping the first few axes."""
    rank = x.ndim - keep
    kept = () if axis is None else (axis,) if isinstance(axis, int) else axis
    kept = [*range(keep), *sorted(keep + k % rank for k in kept)]
    rest = [a for a in range(x.ndim) if a not in kept]
    return x.transpose(*kept, *rest).reshape(*(x.shape[a] for a in kept), -1)


def close(found, expected, tol=1e-5):
    assert np.shape(found) == np.shape(expected)
    assert_close(exact(found), np.asarray(expected), tol)


def sample(dtype, shape=(5, 4, 6)):
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return jnp.asarray(RNG.integers(max(info.min, -90), 90, shape), dtype)
    x = RNG.standard_normal(shape) * (RNG.random(shape) < 0.8)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = x + 1j * RNG.standard_normal(shape) * (x != 0)
    return jnp.asarray(x, dtype)


DTYPES = ["bfloat16", "float16", "float32", "float64", "complex64", "complex128"]
DTYPES += ["bool", "int8", "int32", "uint8", "uint32", "int64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_reducer_on_every_type(dtype):
    wide = dtype in ("float64", "complex128", "int64")
    with jax.enable_x64(wide or jax.config.jax_enable_x64):
        xs = sample(jnp.dtype(dtype))
        assert xs.dtype == dtype
        taken = [r for r in ALONG if r.takes(xs.dtype)]
        found = reduced(over_scan, [*taken, *(r.total for r in taken)], xs)
        assert len(found) == 2 * len(taken)
        assert {"sum", "zeros", "nonfinite"} <= set(found)
        assert set(found) >= FLOATS or not jnp.issubdtype(dtype, jnp.inexact)
        for r in taken:
            tol = 1e-12 if wide and r is not R.zeros else 1e-5  # a fraction is a float32
            close(found[r.name], STATISTICS[r.name](rows(exact(xs), keep=1)), tol)
            close(found[f"{r.name}.total"], STATISTICS[r.name](rows(exact(xs))), tol)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int4"])
def test_types_of_few_bits(dtype):
    """JAX does not promote types of few bits, and some have no infinity."""
    x = jnp.asarray(np.array([[-2.0, 0.0, 1.0], [3.0, 3.0, 0.5]]).round(), dtype)
    taken = [r for r in ALONG if r.takes(x.dtype)]
    found = reduced(sow, [*taken, R.topk(2), R.histogram(EDGES)], x)
    for r in taken:
        close(found[r.name], STATISTICS[r.name](rows(exact(x))))
    close(found["topk"], [3, 3])
    assert found["histogram"].tolist() == binned(x, EDGES).tolist()


@pytest.mark.parametrize(
    ("dtype", "accumulated"),
    [
        *((d, "float32") for d in ("bfloat16", "float16", "float32")),
        *((d, d) for d in ("float64", "complex64")),
    ],
)
def test_results_have_the_documented_types(dtype, accumulated):
    with jax.enable_x64(dtype == "float64" or jax.config.jax_enable_x64):
        x = sample(jnp.dtype(dtype), (4, 6))
        found = reduced(sow, [R.sum, R.mean, R.rms, R.nonfinite, R.last], x)
        real = jnp.finfo(accumulated).dtype
        assert found["sum"].dtype == found["mean"].dtype == accumulated
        assert found["rms"].dtype == real
        assert found["nonfinite"].dtype == np.int32
        assert found["last"].dtype == dtype


@pytest.mark.parametrize("axis", [0, -1, (2, 0), (-1, -2), (0, 1, 2)])
def test_one_result_for_each_unit(axis):
    xs = sample(jnp.float32, (3, 4, 2, 5))
    along = [r(axis=axis) for r in (R.sum, R.var, R.rms, R.minmax, R.zeros)]
    found = reduced(over_scan, [*along, *(r.total for r in along)], xs)
    assert len(found) == 2 * len(along)
    for r in along:
        assert r.axis == axis
        close(found[r.name], STATISTICS[r.name](rows(exact(xs), axis, keep=1)))
        moved = np.moveaxis(exact(xs), 0, -1)  # iterations are elements of a unit
        every = np.atleast_1d(axis)
        fixed = tuple(int(a % 3) for a in every)
        close(found[f"{r.name}.total"], STATISTICS[r.name](rows(moved, fixed)))


@pytest.mark.parametrize("name", list(STATISTICS))
@pytest.mark.parametrize("axis", [None, -1])
def test_alone_it_has_the_name_of_the_site(name, axis):
    x = sample(jnp.float32, (4, 6))
    reducer = getattr(R, name) if axis is None else getattr(R, name)(axis=axis)
    _, taps = tapax.capture(sow, values={"h": reducer})(x)
    assert list(taps.values) == ["h"]
    assert taps.sites["h"].reducer == reducer
    assert taps.sites["h"].shape == taps.values["h"].shape
    close(taps.values["h"], STATISTICS[name](rows(exact(x), axis)))


def test_reducers_describe_themselves():
    assert R.minmax.labels == ("min", "max")
    assert R.moments.labels == ("mean", "var")
    assert R.quantiles([0.05, 0.5]).labels == ("q0.05", "q0.5")
    assert R.rms.labels is None
    assert R.rms(axis=-1).labels is R.rms.labels
    assert R.histogram(EDGES).edges == EDGES
    assert R.histogram(log2=(-1, 1)).edges == (0.0, 0.5, 1.0, 2.0, math.inf)
    assert R.rms.total.total == R.rms.total != R.rms
    assert R.rms(axis=1).total == R.rms.total(axis=1)
    assert R.histogram(list(EDGES)) == R.histogram(np.array(EDGES))
    assert hash(R.topk(2)) == hash(R.topk(2))
    assert str(R.rms(axis=-1).total) == "rms(axis=-1).total"
    for name in R.__all__:
        assert name == "Reducer" or getattr(R, name)


NONFINITE = [
    [1.0, np.nan, 2.0],
    [np.inf, 1.0, 0.0],
    [-np.inf, np.inf, 1.0],
    [np.nan, np.inf, np.nan],
    [1.0, 2.0, 3.0],
]


@pytest.mark.parametrize("row", range(len(NONFINITE)))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_and_infinity_count_as_in_numpy(row):
    x = np.array([NONFINITE[row]] * 2, np.float32)
    found = reduced(sow, ALONG, jnp.asarray(x))
    for r in ALONG:
        close(found[r.name], STATISTICS[r.name](rows(exact(x))))


@pytest.mark.parametrize("order", [[1, 4], [4, 1], [1, 1], [4, 0], [2, 4, 4]])
@pytest.mark.parametrize("over", ["scan", "vmap"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_and_inf_in_some_iterations(order, over):
    xs = np.array([NONFINITE[i] for i in order], np.float32)
    fn = over_scan if over == "scan" else jax.vmap(sow)
    found = reduced(fn, [r.total for r in ALONG], jnp.asarray(xs))
    for r in ALONG:
        close(found[f"{r.name}.total"], STATISTICS[r.name](rows(exact(xs))))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_values_without_elements_have_statistics(shape):
    x = jnp.zeros(shape)
    kept = [r for r in ALONG if r is not R.minmax]
    found = reduced(sow, [*kept, R.histogram(EDGES), R.topk(2), R.quantiles(), R.last], x)
    for r in kept:
        close(found[r.name], STATISTICS[r.name](rows(exact(x))))
    assert found["histogram"].tolist() == [0] * 5
    assert found["topk"].tolist() == [-np.inf] * 2
    assert np.isnan(found["quantiles"]).all()
    assert found["last"].shape == shape
    close(one(x, R.minmax), [np.inf, -np.inf])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_examples_at_all():
    kept = [r for r in ALONG if r is not R.minmax]
    others = [R.minmax, R.topk(2), R.histogram(EDGES), R.quantiles([0.5])]
    found = reduced(jax.vmap(sow), [*kept, *others], jnp.zeros((0, 3)))
    for r in kept:
        close(found[r.name], STATISTICS[r.name](np.zeros(0)))
    close(found["minmax"], [np.inf, -np.inf])
    close(found["topk"], [-np.inf, -np.inf])
    assert found["histogram"].tolist() == [0] * 5
    assert np.isnan(found["quantiles"]).all()


def test_every_reducer_on_scalars():
    found = reduced(lambda x: sow(x * 1), [*ALONG, R.topk(1), R.histogram([0, 2, 4])], 3.0)
    for r in ALONG:
        close(found[r.name], STATISTICS[r.name](np.array([3.0])))
    assert found["histogram"].tolist() == [0, 1]
    assert found["topk"].tolist() == [3.0]


def test_large_integers_stay_exact():
    x = jnp.array([3_000_000_000, 5, 2**32 - 1], jnp.uint32)
    assert one(x, R.minmax).tolist() == [5, 2**32 - 1]
    assert one(x, R.topk(2)).tolist() == [2**32 - 1, 3_000_000_000]
    assert one(x[:2], R.sum) == 3_000_000_005
    assert one(x, R.histogram([0, 6, 4e9, 2**32])).tolist() == [1, 1, 1]
    assert one(x, R.zeros) == 0
    assert one(jnp.full(4, 100, jnp.uint8), R.sum) == 400
    assert one(jnp.full(4, -100, jnp.int8), R.sum) == -400
    low = jnp.array([-(2**31), 2**31 - 1], jnp.int32)
    assert one(low, R.minmax).tolist() == [-(2**31), 2**31 - 1]
    assert one(low, R.histogram(log2=(30, 31))).tolist() == [0, 1, 1]


def binned(x, edges):
    """Call `numpy.histogram` without the NaNs."""
    x = exact(x).ravel()
    return np.histogram(x[~np.isnan(x)], np.asarray(edges, np.float64))[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int8", "bool"])
def test_histogram_of_every_type(dtype):
    with jax.enable_x64(dtype == "float64" or jax.config.jax_enable_x64):
        xs = sample(jnp.dtype(dtype), (3, 4, 7))
        edges = (-50.0, *EDGES, 60.5)
        found = reduced(over_scan, [R.histogram(edges), R.histogram(edges).total], xs)
        assert found["histogram"].tolist() == [binned(x, edges).tolist() for x in xs]
        assert found["histogram.total"].tolist() == binned(xs, edges).tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("step", [0.1, 0.3, 1.0])
def test_values_on_the_edges(dtype, step):
    """Edges that the dtype of the values cannot represent are not rounded to it."""
    edges = np.arange(-5, 6) * step
    with jax.enable_x64(dtype == "float64" or jax.config.jax_enable_x64):
        near = np.asarray(jnp.asarray(edges, dtype))
        infinity = np.asarray(np.inf, near.dtype)
        around = [near, np.nextafter(near, infinity), np.nextafter(near, -infinity)]
        x = np.concatenate(around)
        x = jnp.asarray(x[(x == 0) | (np.abs(x) > 1e-30)])  # a CPU treats subnormal numbers as zero
        assert x.dtype == dtype
        assert one(x, R.histogram(edges)).tolist() == binned(x, edges).tolist()


@settings(max_examples=8, deadline=None)
@given(st.lists(st.floats(-1e30, 1e30, width=64), min_size=4, max_size=4, unique=True))
def test_histograms_with_any_edges(edges):
    edges = np.sort(np.array(edges))
    x = edges.astype(np.float32)
    up = np.float32(np.inf)
    x = np.concatenate([x, np.nextafter(x, up), np.nextafter(x, -up)])
    if np.abs(x[x != 0]).min(initial=1) < 1e-37:
        x = x[np.abs(x) > 1e-37]  # the CPU treats smaller numbers as zero
        x = np.resize(x, 12) if x.size else np.ones(12, np.float32)
    # All cases have one shape, so that JAX compiles one comparison.
    assert one(x, R.histogram(edges)).tolist() == binned(x, edges).tolist()


def test_zeros_are_below_every_positive_edge():
    """A CPU may treat subnormal numbers as zero, but must not count zero as subnormal."""
    found = one(np.zeros(3, np.float32), R.histogram(log2=(-140, 0)))
    assert found[0] == found.sum() == 3
    assert one(np.zeros(3, np.float32), R.histogram([-1, 1e-40, 1])).tolist() == [3, 0]


def test_edges_beyond_the_type():
    x = jnp.array([0.0, 1.0, 3e38, jnp.inf, -jnp.inf, jnp.nan])
    for edges in ([0, 1e39], [-1e300, 0, 1e300], [1e39, 1e40], [-np.inf, 0, np.inf], [2, np.inf]):
        finite = exact(x)[~np.isnan(x)]
        expected = [
            int(((finite >= a) & ((finite <= b) if b == edges[-1] else (finite < b))).sum())
            for a, b in itertools.pairwise(edges)
        ]
        assert one(x, R.histogram(edges)).tolist() == expected, edges


def test_integers_are_not_rounded_on_their_way_into_a_histogram():
    x = np.array([2**24, 2**24 + 1, 2**24 + 2, -(2**24) - 1], np.int32)
    edges = [-(2**24) - 1, 0, 2**24 + 1, 2**25]
    assert one(x, R.histogram(edges)).tolist() == binned(x, edges).tolist()
    assert one(x, R.histogram([0, 2**24 + 0.5, 2**25])).tolist() == [1, 2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "complex64", "int32"])
def test_a_log2_histogram_counts_magnitudes(dtype):
    with jax.enable_x64(dtype == "float64" or jax.config.jax_enable_x64):
        x = 2.0 ** np.arange(-12, 12) * (-1) ** np.arange(24)
        x = np.concatenate([x, x * 1.5, [0.0, 0.0]])
        x = jnp.asarray(x * (0.6 + 0.8j) if dtype == "complex64" else x, dtype)
        edges = [0.0, *2.0 ** np.arange(-10, 11), np.inf]
        magnitudes = np.abs(np.asarray(x)).astype(np.float64)
        expected = [
            ((a <= magnitudes) & (magnitudes < b)).sum() for a, b in itertools.pairwise(edges)
        ]
        found = one(x, R.histogram(log2=(-10, 10)))
        if dtype == "complex64":  # up to rounding, the magnitude of 0.6 + 0.8i is one
            assert found.sum() == len(x)
        else:
            assert found.tolist() == expected
    assert one([np.inf, -np.inf, np.nan, 1.0], R.histogram(log2=(0, 3))).tolist() == [0, 1, 0, 0, 2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32", "uint8", "bool"])
@pytest.mark.parametrize("k", [1, 3, 30])
def test_topk_in_a_scan(dtype, k):
    xs = sample(jnp.dtype(dtype), (3, 2, 5))
    found = reduced(over_scan, [R.topk(k), R.topk(k).total], xs)
    low = {"int32": -(2**31), "uint8": 0, "bool": 0}.get(dtype, -np.inf)

    def largest(x):
        return np.sort(np.concatenate([exact(x).ravel(), [low] * k]))[::-1][:k]

    assert found["topk"].dtype == dtype
    close(found["topk"], np.stack([largest(x) for x in xs]), 0)
    close(found["topk.total"], largest(xs), 0)


def test_last_is_the_value():
    xs = sample(jnp.float32)
    found = reduced(over_scan, [R.last, R.last.total], xs)
    close(found["last"], xs, 0)
    close(found["last.total"], xs[-1], 0)
    found = reduced(jax.vmap(over_scan), [R.last, R.last.total], xs)
    close(found["last"], jnp.moveaxis(xs, 1, 0), 0)  # loops come before mapped axes
    close(found["last.total"], xs[:, -1], 0)


RANKS = (0.0, 0.05, 0.25, 0.29, 0.5, 0.75, 0.95, 0.999, 1.0)
MANY = {
    "normal": RNG.standard_normal(5001),
    "lognormal": np.exp(RNG.uniform(math.log(1e-6), math.log(1e6), 5001)),
    "negative": -np.exp(RNG.standard_normal(5001) * 3),
    "half zeros": RNG.standard_normal(5001) * (RNG.random(5001) < 0.5),
    "ties": RNG.integers(-2, 3, 5001) * 1.0,
    "two far apart": np.where(np.arange(5001) < 1450, 1e-3, 1e3),  # 1450 = 0.29 * 5000
    "constant": np.full(5001, -0.1),
}
FEW = [[7.0], [3.0, -1.0, 2.0], [*range(1, 102)], [0.0] * 29 + [1.0] * 72]


def lower(x, ranks):
    """Call `numpy.quantile` with `method="lower"`, which rounds 0.29 * 100 below 29."""
    x = np.sort(np.ravel(x))
    return np.array([x[int(q * (x.size - 1) + 1e-9)] for q in ranks])


def within(found, x, ranks, error):
    expected = lower(exact(x), ranks)
    assert found.shape == (len(ranks),)
    np.testing.assert_array_less(np.abs(found - expected), error * np.abs(expected) + 1e-30)


@pytest.mark.parametrize(
    ("error", "dtype"), [(0.01, "float32"), (0.01, "bfloat16"), (0.1, "float32")]
)
def test_quantiles_are_within_the_error(error, dtype):
    xs = jnp.asarray(np.stack(list(MANY.values())), dtype)
    for found, x in zip(
        reduced(over_scan, R.quantiles(RANKS, error=error), xs)["h"], xs, strict=True
    ):
        within(found, x, RANKS, error)


@pytest.mark.parametrize("x", FEW, ids=len)
def test_quantiles_of_few_elements_are_within_the_error(x):
    within(one(np.array(x, np.float32), R.quantiles(RANKS)), x, RANKS, 0.01)


def test_quantiles_of_small_error():
    x = np.exp(RNG.uniform(-20, 20, 5001)).astype(np.float32)
    expected = lower(exact(x), RANKS)
    found = one(x, R.quantiles(RANKS, error=1e-3))
    np.testing.assert_array_less(np.abs(found - expected), 1.01e-3 * np.abs(expected))


def test_quantiles_in_64_bits():
    with jax.enable_x64(True):
        x = np.exp(RNG.uniform(-20, 20, 5001))
        expected = lower(x, RANKS)
        found = one(x, R.quantiles(RANKS, error=1e-3))
        assert found.dtype == np.float64
        np.testing.assert_array_less(np.abs(found - expected), 1.01e-3 * np.abs(expected))


@pytest.mark.parametrize("sign", [1, -1])
def test_quantiles_at_the_ends_of_the_magnitudes(sign):
    """Values outside the range of magnitudes do not affect values inside it."""
    kept = sign * np.array([0.0011] * 10 + [999.0] * 10)
    more = [[1e30] * 3, [-1e30] * 3, [1e-9] * 3, [np.inf] * 3, [-np.inf] * 3, [1e30, -1e30, 0.0]]
    xs = np.stack([np.concatenate([kept, beyond]) for beyond in more]).astype(np.float32)
    ranks = np.linspace(0, 1, 45)
    reducer = R.quantiles(ranks, magnitudes=(1e-3, 1e3))
    for x, found in zip(xs, reduced(over_scan, reducer, xs)["h"], strict=True):
        expected = lower(exact(x), ranks)
        inside = (np.abs(expected) >= 1e-3) & (np.abs(expected) <= 1e3)
        error = np.abs(found[inside] - expected[inside])
        np.testing.assert_array_less(error, 0.0101 * np.abs(expected[inside]))
        assert found.min() >= x.min()
        assert found.max() <= x.max()


def test_quantiles_over_loops_and_examples():
    xs = sample(jnp.float32, (7, 5, 3))
    found = reduced(over_scan, [R.quantiles(RANKS), R.quantiles(RANKS).total], xs)
    expected = np.stack([lower(x, RANKS) for x in exact(xs).reshape(7, -1)])
    np.testing.assert_allclose(found["quantiles"], expected, rtol=0.0101)
    expected = lower(exact(xs), RANKS)
    np.testing.assert_allclose(found["quantiles.total"], expected, rtol=0.0101)
    np.testing.assert_allclose(
        reduced(jax.vmap(sow), R.quantiles(RANKS), xs)["h"], expected, 0.0101
    )


def test_quantiles_leave_nan_out():
    x = np.array([np.nan, 5.0, 6.0, 7.0, np.nan], np.float32)
    np.testing.assert_allclose(one(x, R.quantiles([0, 0.5, 1])), [5, 6, 7], rtol=0.01)
    assert np.isnan(one(x[:1], R.quantiles())).all()


def compared(g, v):
    """Compute both statistics of flat gradients and values in float64."""
    g, v = exact(g).ravel(), exact(v).ravel()
    return np.vdot(g, v).real / np.linalg.norm(g) / np.linalg.norm(v), (
        np.linalg.norm(g) / np.linalg.norm(v)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_gradients_are_compared_with_their_values(dtype):
    with jax.enable_x64(dtype == "float64" or jax.config.jax_enable_x64):
        xs, ws = sample(jnp.dtype(dtype), (3, 4, 6)), sample(jnp.dtype(dtype), (3, 4, 6))

        def loss(xs):
            body = lambda c, xw: (c + jnp.sum(sow(xw[0]) * xw[1], dtype=c.dtype), None)
            start = jnp.zeros((), "float64" if dtype == "float64" else "float32")
            return lax.scan(body, start, (xs, ws))[0]

        pairs = [R.cosine, R.update_ratio]
        asked = [*pairs, *(r.total for r in pairs)]
        _, taps = tapax.capture(jax.grad(loss), values=None, grads={"h": asked})(xs)
        assert taps.values == {}
        each = np.array([compared(g, v) for g, v in zip(ws, xs, strict=True)])
        tol = 1e-12 if dtype == "float64" else 3e-6
        for i, r in enumerate(pairs):
            close(taps.grads[f"h:{r.name}"], each[:, i], tol)
            close(taps.grads[f"h:{r.name}.total"], compared(ws, xs)[i], tol)


def test_gradients_are_compared_with_their_values_by_unit():
    x, w = sample(jnp.float32, (4, 6)), sample(jnp.float32, (4, 6))
    step = jax.grad(lambda x: jnp.sum(sow(x) * w))
    reducers = [R.cosine(axis=0), R.update_ratio(axis=0)]
    _, taps = tapax.capture(step, values=None, grads={"h": reducers})(x)
    expected = np.array([compared(g, v) for g, v in zip(w, x, strict=True)])
    close(taps.grads["h:cosine"], expected[:, 0])
    close(taps.grads["h:update_ratio"], expected[:, 1])


def test_cosine_of_nothing_is_zero():
    step = jax.grad(lambda x: jnp.sum(sow(x) * 0))
    _, taps = tapax.capture(step, values=None, grads={"h": [R.cosine, R.update_ratio]})(jnp.ones(3))
    assert taps.grads["h:cosine"] == taps.grads["h:update_ratio"] == 0


@pytest.mark.parametrize(("count", "noise"), [(1000, 1.0), (1000, 0.01), (100_000, 0.1)])
@pytest.mark.parametrize("over", ["nothing", "scan", "vmap"])
def test_variance_far_from_zero(count, noise, over):
    x = (1e4 + noise * RNG.standard_normal((10, count // 10))).astype(np.float32)
    fn = {"nothing": sow, "scan": over_scan, "vmap": jax.vmap(sow)}[over]
    found = reduced(fn, [R.var.total, R.moments.total], jnp.asarray(x))
    np.testing.assert_allclose(found["var.total"], exact(x).var(), rtol=1e-3)
    np.testing.assert_allclose(found["moments.total"][1], exact(x).var(), rtol=1e-3)
    np.testing.assert_allclose(found["moments.total"][0], exact(x).mean(), rtol=1e-6)


def test_variance_where_the_first_examples_do_not_count():
    """The variance must not take its shift from an example that did not run."""
    x = (1e4 + 0.1 * RNG.standard_normal((16, 500))).astype(np.float32)
    p = jnp.arange(16) >= 5
    fn = jax.vmap(lambda p, x: lax.cond(p, sow, lambda x: x, x))
    found = reduced(fn, R.moments, p, jnp.asarray(x))["h"]
    np.testing.assert_allclose(found[1], exact(x)[5:].var(), rtol=1e-3)


def test_variance_of_large_numbers():
    x = np.array([2e19, 2e19, 2.0001e19], np.float32)
    np.testing.assert_allclose(one(x, R.var), exact(x).var(), rtol=1e-3)


def test_low_precision_is_accumulated_in_float32():
    ones = jnp.ones(100_000, jnp.bfloat16)
    found = reduced(sow, [R.mean, R.sum, R.rms, R.norm, R.zeros], ones)
    assert found["mean"] == found["rms"] == 1
    assert found["sum"] == 100_000
    np.testing.assert_allclose(found["norm"], math.sqrt(100_000), rtol=1e-5)
    half = jnp.full(1000, 60_000, jnp.float16)  # their sum and squares overflow float16
    np.testing.assert_allclose(one(half, R.mean), 60_000, rtol=1e-5)
    np.testing.assert_allclose(one(half, R.rms), 60_000, rtol=1e-5)
    many = jnp.ones((4096, 64), jnp.bfloat16)
    assert reduced(over_scan, R.mean.total, many)["h"] == 1
    assert reduced(over_scan, R.sum.total, many)["h"] == 4096 * 64


def test_counts_stop_at_the_largest_number():
    from tapax.reduce._sums import COUNT

    most = 2**32 - 1
    counting = dataclasses.replace(
        R.nonfinite, init=lambda x: (jnp.asarray(most - 2, COUNT), jnp.asarray(most - 2, COUNT))
    )
    assert one(np.full(9, np.nan), counting) == 2**31 - 1
