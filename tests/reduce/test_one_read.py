"""Statistics from one read of a value: packed counts, and the GPU kernel."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tapax
from tapax.reduce import _gpu_kernel
from tapax.reduce._scattered_counts import count_by_scatter, count_in_copies
from tapax.reduce._sums import _sum_squares, _sum_squares_in_one_read
from tapax.reduce._together import _see_by_kernel, _see_plainly, see_together
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

R = tapax.reduce
POWERS = (-14, 12)
LOG2 = R.histogram(log2=POWERS)
EDGES = np.array([0.0, *(2.0**p for p in range(POWERS[0], POWERS[1] + 1)), np.inf])
SHAPES = [
    (),
    (1,),
    (0,),
    (3, 0),
    (1009,),
    (7, 11, 13),
    (128,),
    (300,),
    (2, 255),
    (4, 256, 6),
    (5, 1),
]


def sample(shape, dtype=np.float32, special=True):
    """Draw magnitudes of all sizes, including zeros and some that are not finite."""
    rng = np.random.default_rng(len(shape))
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 18, shape)
    x = np.asarray(np.where(rng.random(shape) < 0.1, 0, np.clip(x, -6e4, 6e4)))
    if special and x.size > 8:
        x.flat[[2, 3, 5]] = np.nan, np.inf, -np.inf
    return jnp.asarray(x, dtype)


def counted(x):
    x = np.abs(np.asarray(x, np.float64))
    return np.histogram(x[~np.isnan(x)], EDGES)[0]


def one(x, reducer):
    return tapax.capture(lambda x: tapax.sow(x, "h"), values={"h": reducer})(x)[1].values["h"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.many), "float32"]
)
def test_counts_in_every_shape(shape, dtype):
    x = sample(shape, dtype)
    wide = np.asarray(x, np.float64)
    assert one(x, LOG2).tolist() == counted(x).tolist()
    assert one(x, R.nonfinite) == np.sum(~np.isfinite(wide))
    edges = [-3, -0.1, 0, 0.1, 1e4]
    expected = np.histogram(wide[~np.isnan(wide)], edges)[0]
    assert one(x, R.histogram(edges)).tolist() == expected.tolist()


def test_many_equal_values_overflow_no_packed_count():
    for n in (255, 256, 257, 2**17 + 1):
        assert one(jnp.full(n, 3.0), LOG2)[16] == n
        assert one(jnp.full((4, n), jnp.nan), R.nonfinite) == 4 * n


def test_counts_by_exponent_beyond_the_exponents_of_the_type():
    x = jnp.asarray([0, 1e-38, 1, 3e38, np.inf, -np.inf, np.nan], jnp.float32)
    for powers in ((-140, 140), (-126, 128), (-127, 127), (127, 128)):
        edges = [0.0, *(2.0**p for p in range(powers[0], powers[1] + 1)), np.inf]
        normal = np.where(np.abs(np.asarray(x)) < 2.0**-126, 0, np.abs(np.asarray(x, np.float64)))
        expected = np.histogram(normal[~np.isnan(normal)], edges)[0]
        assert one(x, R.histogram(log2=powers)).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_nan_in_a_large_value_is_in_its_ends(dtype, value):
    # XLA's minimum loses a NaN in a large array on a CPU.
    x = jnp.zeros((64, 1024), dtype).at[3, 5].set(value).at[40, 7].set(-np.inf)
    found = np.asarray(one(x, R.minmax), np.float64)
    wide = np.asarray(x, np.float64)
    np.testing.assert_array_equal(found, [wide.min(), wide.max()])
    by_unit = np.asarray(one(x, R.minmax(axis=0)), np.float64)
    np.testing.assert_array_equal(by_unit, np.stack([wide.min(1), wide.max(1)], -1))


def test_gradients_of_statistics_of_narrow_values():
    def loss(x, reducer):
        return jnp.sum(one(3 * x, reducer).astype(jnp.float32))

    x = sample((4, 6), jnp.bfloat16, special=False)
    wide = np.asarray(3 * x, np.float64)
    rms = np.sqrt(np.mean(wide**2))
    found = jax.grad(loss)(x, R.rms)
    assert_close(np.asarray(found, np.float64), 3 * wide / (rms * x.size), 0.02)
    ends = jax.grad(loss)(x, R.minmax)
    expected = 3.0 * ((wide == wide.min()) / (wide == wide.min()).sum())
    expected += 3.0 * ((wide == wide.max()) / (wide == wide.max()).sum())
    assert_close(np.asarray(ends, np.float64), expected, 0.02)


def test_statistics_are_of_the_rounded_value():
    def f(x):
        return tapax.sow((x * 1.0009765625).astype(jnp.bfloat16), "h").astype(jnp.float32).sum()

    x = sample((64, 128), special=False)
    _, whole = jax.jit(tapax.capture(f))(x)
    _, taps = jax.jit(tapax.capture(f, values={"h": [R.sum, R.norm]}))(x)
    exact = np.asarray(whole.values["h"], np.float64)
    assert_close(taps.values["h:norm"], np.sqrt((exact**2).sum()), 1e-6)


def test_both_sums_of_squares_in_one_read():
    x = sample((8, 6, 16), special=False)
    for axes in ((0, 1, 2), (1,), ()):
        for a, b in zip(
            _sum_squares(x, axes=axes), _sum_squares_in_one_read(x, axes=axes), strict=True
        ):
            assert_close(b, a, 1e-5)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    local = lambda x: [jax.lax.psum(s, "d") for s in _sum_squares_in_one_read(x, axes=(0, 1, 2))]
    found = jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P())(x)
    for a, b in zip(_sum_squares(x, axes=(0, 1, 2)), found, strict=True):
        assert_close(b, a, 1e-5)


@pytest.mark.parametrize("reducer", [R.rms, R.norm, R.rms.total], ids=["rms", "norm", "total"])
def test_a_gpu_reads_a_value_once_for_its_squares(reducer):
    def straight(x):
        return tapax.sow(2 * x, "h")

    def scanned(x):
        return jax.lax.scan(lambda c, row: (c, tapax.sow(2 * row, "h")), 0.0, x)[1]

    for f in (straight, scanned):
        step = jax.jit(tapax.capture(f, values={"h": reducer}))
        lowered = step.trace(sample((8, 64))).lower(lowering_platforms=("cuda",))
        text = lowered.as_text()
        assert ("optimization_barrier" in text) == (f is scanned)
        reductions = [line for line in text.splitlines() if "stablehlo.reduce(" in line]
        assert sum("64x" in line for line in reductions) == 1


def test_uses_of_a_value_in_a_loop_on_a_gpu_wait_for_its_reductions():
    def f(x):
        return jax.lax.scan(lambda c, row: (c + tapax.sow(2 * row, "h").sum(), None), 0.0, x)[0]

    asked = {"h": [R.rms, R.minmax]}
    step = jax.jit(tapax.capture(jax.value_and_grad(f), values=asked, grads=asked))
    text = step.trace(sample((8, 64))).lower(lowering_platforms=("cuda",)).as_text()
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    # The value, the three parts of the state of rms, and both ends; as many for the gradient.
    assert [line.count("tensor<") for line in barriers] == [6, 6]
    assert "optimization_barrier" not in step.lower(sample((8, 64))).as_text()


@pytest.mark.parametrize("wrap", [jax.vmap, jax.grad, jax.jit], ids=lambda wrap: wrap.__name__)
def test_a_captured_loop_with_reductions_is_transformed_as_the_plain_one(wrap):
    def f(x):
        return jax.lax.scan(lambda c, row: (c * tapax.sow(2 * row, "h").sum(), None), 1.0, x)[0]

    def captured(x):
        out, taps = tapax.capture(f, values=R.rms)(x)
        return out + 0 * taps.values["h"].sum()

    x = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (3, 4, 5)))
    x = x if wrap is jax.vmap else x[0]
    assert_close(wrap(captured)(x), wrap(f)(x), 1e-6)


def test_a_captured_linear_loop_with_reductions_is_transposed():
    a = jnp.array([[4.0, 1.0], [2.0, 3.0]])

    def multiply(v):
        return jax.lax.scan(lambda c, row: (c, tapax.sow(row @ v, "row")), 0, a)[1]

    watched = lambda v: tapax.capture(multiply, values=R.rms)(v)[0]
    (found,) = jax.linear_transpose(watched, jnp.ones(2))(jnp.array([1.0, 2.0]))
    assert_close(found, a.T @ jnp.array([1.0, 2.0]), 1e-6)
    solve = jax.scipy.sparse.linalg.gmres
    slope = jax.grad(lambda b: solve(watched, b)[0].sum())(jnp.ones(2))
    assert_close(slope, jnp.linalg.inv(a).T @ jnp.ones(2), 1e-4)


def test_unused_reductions_of_a_loop_are_not_computed():
    def f(x):
        step = lambda c, row: (c + jnp.sin(tapax.sow(jnp.tanh(row), "h")).sum(), None)
        return jax.lax.scan(step, 0.0, x)[0]

    def captured(x):
        out, taps = tapax.capture(f, values=R.rms)(x)
        return out, taps.values["h"]

    recomputed = jax.grad(jax.checkpoint(captured), has_aux=True)
    text = str(jax.make_jaxpr(recomputed)(sample((8, 64))))
    # The recomputation in the backward pass needs the value, but not its statistics.
    plain = str(jax.make_jaxpr(jax.grad(jax.checkpoint(f)))(sample((8, 64))))
    assert text.count("tanh") == plain.count("tanh") == 2
    assert text.count("reduce_sum") == plain.count("reduce_sum") + 2  # rms has two sums on a GPU


@pytest.fixture
def interpreted(monkeypatch):
    """Run the kernel in Python, on any device."""
    compiled = pallas.pallas_call

    def interpret(*args, compiler_params, **options):
        return compiled(*args, interpret=True, **options)

    monkeypatch.setattr(pallas, "pallas_call", interpret)


@pytest.mark.many
@pytest.mark.parametrize("shape", [(2**16,), (3, 257, 130)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("special", [True, False])
def test_the_kernel_finds_what_numpy_finds(interpreted, shape, dtype, special):
    x = sample(shape, dtype, special)
    assert _gpu_kernel.is_for(x, POWERS)
    wide = np.asarray(x, np.float64)
    (alone,) = _see_by_kernel(x, reducers=(LOG2,))
    assert alone.tolist() == counted(x).tolist()
    reducers = (R.rms, LOG2, R.minmax, R.nonfinite)
    leaves = _see_by_kernel(x, reducers=reducers)
    structure = jax.tree.structure([r.start(x) for r in reducers])
    states = dict(zip(reducers, structure.unflatten(leaves), strict=True))
    assert states[LOG2].tolist() == counted(x).tolist()
    assert R.nonfinite.finish(states[R.nonfinite]) == np.sum(~np.isfinite(wide))
    ends = R.minmax.finish(states[R.minmax])
    assert ends.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(ends, np.float64), [wide.min(), wide.max()])
    if not special:
        assert_close(R.rms.finish(states[R.rms]), np.sqrt(np.mean(wide**2)), 1e-5)


def test_values_that_the_kernel_is_not_for():
    x = sample((2**16,))
    assert set(see_together([LOG2, R.rms], x)) == {LOG2, R.rms}
    assert see_together([R.rms, R.minmax], x) == {}
    assert see_together([LOG2], x[:100]) == {}
    assert see_together([LOG2], x.astype(jnp.float16)) == {}
    assert see_together([LOG2], x.astype(jnp.bfloat16)[1:]) == {}
    assert see_together([R.histogram(log2=(-140, 0))], x) == {}
    assert see_together([LOG2, R.histogram(log2=(-2, 2)).named("other")], x) == {}


def test_a_value_seen_at_once_gives_the_numbers_of_each_reducer_alone():
    x = sample((4, 128, 256), special=False)
    reducers = [R.rms, LOG2, R.minmax, R.nonfinite, R.rms(axis=-1).named("units")]

    def f(x):
        return jax.lax.scan(lambda c, x: (c, jnp.sum(tapax.sow(2 * x, "h"))), 0.0, x)[1]

    def loss(x):
        return jnp.sum(f(x) ** 2)

    select = {"h": reducers}
    for call in (lambda g: g, jax.jit):
        _, taps = call(tapax.capture(jax.grad(loss), values=select, grads=select))(x)
        for r in reducers:
            _, alone = tapax.capture(jax.grad(loss), values={"h": r}, grads={"h": r})(x)
            assert_close(taps.values[f"h:{r.name}"], alone.values["h"], 1e-5)
            assert_close(taps.grads[f"h:{r.name}"], alone.grads["h"], 1e-5)


def test_sharded_statistics_add_only_small_reductions():
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(auto, auto))

    def loss(w, x):
        return jnp.mean(tapax.sow(jnp.tanh(x @ w), "h") ** 2)

    w = jax.device_put(jnp.full((256, 512), 0.01), NamedSharding(mesh, P(None, "model")))
    x = jax.device_put(jnp.ones((8, 64, 256)), NamedSharding(mesh, P("data")))

    def collectives(step):
        text = jax.jit(step).lower(w, x).compile().as_text()
        found = re.findall(r"= ([^=]*?) (all-\w+|collective-permute|reduce-scatter)\(", text)
        return [
            (kind, int(np.prod([int(n) for n in shape.split(",") if n], dtype=int)))
            for shapes, kind in found
            for shape in re.findall(r"\[([\d,]*)\]", shapes)
        ]

    plain = {kind for kind, _ in collectives(jax.grad(loss))}
    largest = max(size for _, size in collectives(jax.grad(loss)))
    assert "all-gather" not in plain
    few = [R.rms, R.minmax, R.nonfinite, R.zeros, LOG2, R.moments]
    few += [R.histogram([-1, 0, 1]).named("edges")]
    step = tapax.capture(jax.grad(loss), values={"**": few}, grads={"**": few})
    added = [size for kind, size in collectives(step) if size != largest]
    assert {kind for kind, _ in collectives(step)} <= plain | {"all-reduce"}
    assert max(added) <= LOG2.start(x).size


def test_divided_features_are_not_gathered():
    # A group of 128 elements would span four devices.
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    value = np.asarray(sample((4, 8, 256), special=False))
    x = jax.device_put(value, NamedSharding(mesh, P(None, None, "d")))
    few = [R.rms, R.minmax, R.nonfinite, LOG2, R.quantiles([0.5])]
    step = jax.jit(tapax.capture(lambda x: tapax.sow(2 * x, "h"), values={"h": few}))
    text = step.lower(x).compile().as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
    found = step(x)[1].values
    assert found["h:minmax"].tolist() == [2 * value.min(), 2 * value.max()]
    assert found["h:histogram"].tolist() == counted(2 * value).tolist()
    middle = np.quantile(2 * value, 0.5, method="lower")
    np.testing.assert_allclose(found["h:quantiles"], [middle], rtol=0.0101, atol=1e-10)


def test_counts_in_copies_are_those_of_numpy():
    places = np.random.default_rng(3).integers(0, 90, 2**16 + 7, np.int32)
    expected = np.bincount(places, minlength=90)[:80]  # indices beyond the last bin are not counted
    for count in (count_by_scatter, count_in_copies):
        (found,) = jax.jit(count, static_argnames="bins")(places, bins=80)
        assert found.dtype == jnp.uint32
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("special", [True, False])
def test_integers_of_one_reduction_are_those_of_numpy(dtype, special):
    x = sample((2**8, 257), dtype, special)
    wide = np.asarray(x, np.float64)
    reducers = (R.minmax, LOG2, R.nonfinite)
    low, high, counts, odd, size = _see_plainly(x, reducers=reducers)
    np.testing.assert_array_equal(np.float64([low, high]), [wide.min(), wide.max()])
    assert low.dtype == x.dtype
    assert counts.tolist() == counted(x).tolist()
    assert (odd, size) == (np.sum(~np.isfinite(wide)), x.size)


def test_ends_of_values_in_any_shape():
    for shape in SHAPES:
        if 0 in shape:
            continue
        x = sample(shape, special=False)
        found = np.asarray(one(x, R.minmax))
        assert found.tolist() == [np.asarray(x).min(), np.asarray(x).max()]
