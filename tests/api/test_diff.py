"""`tapax.diff` finds the changed site as the first difference between two captures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapax

LAYERS, WIDTH, BATCH = 48, 16, 8
NAMES = [f"net/layers/{i}" for i in range(LAYERS)]


def unwrapped(difference):
    """Join the table into one line."""
    return " ".join(repr(difference).split())


def weights(dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)) / (2 * WIDTH**0.5), dtype)


def inputs(dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, WIDTH)), dtype)


def deep(ws, x):
    """Run a residual network of 48 unrolled layers."""
    for i, w in enumerate(ws):
        x = x + tapax.sow(jnp.tanh(x @ w), f"net/layers/{i}")
    return jnp.sum(x.astype(jnp.float32) ** 2)


def scanned(ws, x):
    """Run these layers in a scan, with two sites in each."""

    def layer(x, w):
        up = tapax.sow(x @ w, "net/layers/up")
        return x + tapax.sow(jnp.tanh(up), "net/layers/down"), None

    return jnp.sum(lax.scan(layer, x, ws)[0].astype(jnp.float32) ** 2)


def linear(ws, x):
    """Run layers without an activation, with a site before and after each."""
    for i, w in enumerate(ws):
        x = tapax.sow(x, f"net/layers/{i}/in")
        x = tapax.sow(x + x @ w, f"net/layers/{i}/out")
    return jnp.sum(x.astype(jnp.float32))


step = tapax.capture(jax.jit(jax.grad(deep)))
linear_step = tapax.capture(jax.jit(jax.grad(linear)))
scanned_step = tapax.capture(jax.jit(jax.grad(scanned)))


@pytest.mark.parametrize("planted", [0, 17, 47])
def test_a_changed_weight_is_found_forward(planted):
    ws, x = weights(), inputs()
    changed = ws.at[planted, 3, 5].add(0.2)
    difference = tapax.diff(step(ws, x)[1], step(changed, x)[1])
    assert difference.first.name == f"net/layers/{planted}"
    assert difference.first.index[-1] == 5  # the column of the weight
    assert list(difference.values) == list(difference.grads) == NAMES
    identical = [name for name, each in difference.values.items() if each.is_identical]
    assert identical == NAMES[:planted]
    assert difference and not difference.equal


@pytest.mark.parametrize("planted", [1, 17, 47])
def test_a_changed_weight_is_found_backward(planted):
    """The layers are linear, so that gradients depend only on the weights.

    The weight of a layer is between its input and its output: it changes the gradient of its input,
    and no gradient of a later value.
    """

    ws, x = weights(), inputs()
    changed = ws.at[planted, 3, 5].add(0.2)
    difference = tapax.diff(linear_step(ws, x)[1], linear_step(changed, x)[1])
    assert difference.first.name == f"net/layers/{planted}/out"
    assert difference.first_grad.name == f"net/layers/{planted}/in"
    assert difference.first_grad.index[-1] == 3  # the row of the weight
    same = [name for name, each in difference.grads.items() if each.is_identical]
    expected = [f"net/layers/{i}/{end}" for i in range(planted, LAYERS) for end in ("in", "out")]
    assert same == expected[1:]


def test_a_changed_rule_is_found_backward_alone():
    """A wrong derivative changes no values, only the gradients of that layer and earlier ones."""
    planted = 30

    @jax.custom_vjp
    def activation(x, factor):
        return jnp.tanh(x)

    def backward(residuals, g):
        x, factor = residuals
        return factor * g * (1 - jnp.tanh(x) ** 2), jnp.zeros_like(factor)

    activation.defvjp(lambda x, factor: (jnp.tanh(x), (x, factor)), backward)

    def model(ws, x, factor):
        one = jnp.ones_like(factor)
        for i, w in enumerate(ws):
            up = tapax.sow(x @ w, f"net/layers/{i}/up")
            x = x + tapax.sow(activation(up, factor if i == planted else one), f"net/layers/{i}")
        return jnp.sum(x.astype(jnp.float32) ** 2)

    captured = tapax.capture(jax.jit(jax.grad(model)))
    ws, x = weights(), inputs()
    a, b = (captured(ws, x, jnp.asarray(factor, x.dtype))[1] for factor in (1.0, 1.5))
    difference = tapax.diff(a, b)
    assert difference.first is None
    assert difference.first_grad.name == f"net/layers/{planted}/up"
    assert difference and not difference.equal


@pytest.mark.parametrize("planted", [0, 17, 47])
def test_a_changed_layer_of_a_scan_is_found(planted):
    ws, x = weights(), inputs()
    changed = ws.at[planted, 3, 5].add(0.2)
    difference = tapax.diff(scanned_step(ws, x)[1], scanned_step(changed, x)[1])
    assert list(difference.values) == ["net/layers/up", "net/layers/down"]
    first = difference.first
    assert (first.name, first.iteration) == ("net/layers/up", (planted,))
    assert first.differs_by_iteration.tolist() == [i >= planted for i in range(LAYERS)]
    assert not first.ulps_by_iteration[:planted].any()
    assert f"first 'net/layers/up[{planted}]'" in unwrapped(difference)


def test_sites_of_a_scan_run_in_turns():
    """`down` of iteration 2 runs before `up` of iteration 3, though `up` comes first in a body."""

    def layers(x, change):
        def layer(x, i):
            x = tapax.sow(x * 1.5, "up")
            x = tapax.sow(jnp.sin(x) + jnp.where(i == 2, change, 0.0), "down")
            return x, None

        x = tapax.sow(x, "before")
        return jnp.sum(tapax.sow(lax.scan(layer, x, jnp.arange(5))[0], "after"))

    captured = tapax.capture(jax.jit(jax.grad(layers)))
    a, b = (captured(jnp.ones(3), change)[1] for change in (0.0, 0.5))
    difference = tapax.diff(a, b)
    assert (difference.first.name, difference.first.iteration) == ("down", (2,))
    assert difference.values["up"].iteration == (3,)
    # Backward, the first difference is the derivative of the sine in the last changed iteration.
    assert (difference.first_grad.name, difference.first_grad.iteration) == ("up", (4,))
    swapped = tapax.diff(b, a)
    assert (swapped.first.name, swapped.first.iteration) == ("down", (2,))


def test_nested_loops_name_the_iteration_of_each():
    def layers(x, change):
        def outer(x, i):
            def inner(x, j):
                here = (i == 1) & (j == 2)
                return tapax.sow(jnp.sin(x) + jnp.where(here, change, 0.0), "inner"), None

            x, _ = lax.scan(inner, x, jnp.arange(4))
            return tapax.sow(x * 1.25, "outer"), None

        return lax.scan(outer, x, jnp.arange(3))[0]

    captured = tapax.capture(layers)
    first = tapax.diff(*(captured(jnp.ones(2), change)[1] for change in (0.0, 0.5))).first
    assert (first.name, first.iteration) == ("inner", (1, 2))


def test_the_same_capture_is_equal():
    _, taps = step(weights(), inputs())
    difference = tapax.diff(taps, taps)
    assert difference.equal and not difference
    assert difference.first is None and difference.first_grad is None
    assert all(each.is_identical for each in difference.values.values())
    assert "none of 48 values differ; none of 48 gradients differ" in unwrapped(difference)


def test_two_dtypes_are_equal_within_units_of_the_coarser():
    few = weights(jnp.float32)[:2]
    _, a = step(few, inputs(jnp.float32))
    _, b = step(few.astype(jnp.bfloat16), inputs())
    difference = tapax.diff(a, b)
    each = difference.values["net/layers/0"]
    assert each.dtype == "bfloat16" and each.types == ("float32[8,16]", "bfloat16[8,16]")
    assert difference.first is None and not any(x.is_identical for x in difference.values.values())
    assert tapax.diff(a, b, ulps=0.01).first.name == "net/layers/0"
    assert tapax.diff(a, b, rtol=1e-6, atol=1e-6).first.name == "net/layers/0"
    assert tapax.diff(a, b, rtol=0.5).equal


def test_errors_are_those_of_numpy():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4, 5)).astype(np.float32)
    y = x + rng.normal(size=x.shape).astype(np.float32) * np.float32(1e-3)
    found = tapax.diff({"h": x}, {"h": y}).values["h"]
    error = np.abs(x.astype(np.float64) - y)
    assert found.absolute == error.max()
    assert found.index == np.unravel_index(error.argmax(), x.shape)
    assert str(list(found.index)) in str(found) and "of float32" in str(found)


def test_shapes_that_differ_are_reported():
    a = {"h": np.ones((2, 3)), "same": np.ones(2)}
    b = {"h": np.ones((2, 4)), "same": np.ones(2)}
    difference = tapax.diff(a, b)
    assert difference.first.name == "h" and difference.first.reason == "the shapes differ"
    assert difference.first.types == ("float64[2,3]", "float64[2,4]")
    assert not difference.values["same"].differs
    assert "float64[2,3] | float64[2,4]" in repr(difference)
    assert "the shapes differ" in difference._repr_html_()
    said = "h: the values cannot be compared, because the shapes differ"
    assert str(difference.first) == said


def test_nan_in_both_captures_is_equal():
    x = np.array([1.0, np.nan, np.inf])
    assert tapax.diff({"h": x}, {"h": x.copy()}).equal
    difference = tapax.diff({"h": x}, {"h": np.array([1.0, 2.0, np.inf])}, rtol=1e9)
    assert str(difference.first) == "h: the value is NaN or infinite in one capture alone at [1]"


def test_integers_booleans_and_keys_are_exact():
    def f(x, shift):
        tapax.sow(jnp.arange(3) + shift, "integers")
        tapax.sow(jnp.arange(3) > shift, "booleans")
        tapax.sow(jax.random.key(shift), "keys")
        return tapax.sow(x + 1e-9 * shift, "floats")

    a, b = (tapax.capture(f)(jnp.ones(3), shift)[1] for shift in (0, 1))
    difference = tapax.diff(a, b, rtol=1.0, atol=10.0)
    differing = [name for name, each in difference.values.items() if each.differs]
    assert differing == ["integers", "booleans", "keys"]
    assert tapax.diff(a, a).equal


def test_a_gradient_that_one_capture_lacks_is_a_difference():
    def loss(x, cut):
        h = tapax.sow(2 * x, "first")
        h = lax.stop_gradient(h) if cut else h
        return jnp.sum(tapax.sow(h * x, "second"))

    a, b = (
        tapax.capture(jax.grad(lambda x: loss(x, cut)))(jnp.ones(2))[1]  # noqa: B023
        for cut in (False, True)
    )
    assert "first" not in b.grads
    difference = tapax.diff(a, b)
    assert difference.first is None and difference.first_grad.name == "first"
    assert difference.first_grad.reason == "`b` has no gradient"
    # A capture without gradients did not request any, and a dict need not hold all of them.
    assert tapax.diff(a, tapax.capture(lambda x: loss(x, True))(jnp.ones(2))[1]).equal
    some = dict(a.values), {"second": a.grads["second"]}
    assert tapax.diff(a, some).equal and len(tapax.diff(a, some).grads) == 1
    _, fewer = tapax.capture(jax.grad(lambda x: loss(x, False)), values="second")(jnp.ones(2))
    assert tapax.diff(a, fewer).equal and list(tapax.diff(a, fewer).values) == ["second"]


def test_loops_that_run_another_number_of_times_differ():
    def f(x, end):
        return lax.while_loop(lambda x: x[0] < end, lambda x: tapax.sow(2 * x, "h"), x)

    a, b = (tapax.capture(f)(jnp.ones(2), end)[1] for end in (5.0, 20.0))
    first = tapax.diff(a, b).first
    assert first.reason == "it ran 3 times in `a` and 5 times in `b`"

    def g(x, p):
        return lax.cond(p, lambda x: tapax.sow(0 * x, "h"), lambda x: x, x)

    a, b = (tapax.capture(jax.jit(g))(jnp.ones(2), p)[1] for p in (True, False))
    assert tapax.diff(a, b).first.reason == "it ran in different iterations or branches"


def test_sites_of_one_capture_alone_are_listed():
    a = {"h": np.ones(2), "old": np.ones(2)}
    b = {"new": np.ones(2), "h": np.ones(2), "newer": np.ones(2)}
    difference = tapax.diff(a, b)
    assert difference.only_a == ("old",) and difference.only_b == ("new", "newer")
    assert difference.equal
    text = unwrapped(difference)
    assert "Only a has 'old'." in text and "Only b has 'new', 'newer'." in text


def test_captures_without_a_common_site_raise():
    message = (
        "^The captures have no site in common: `a` has 'h', and `b` has 'w', 'x', 'y' and 1 more. "
        "Pass `rename`, which gives the sites of `b` their names in `a`.$"
    )
    with pytest.raises(tapax.SiteError, match=message):
        tapax.diff({"h": np.ones(1)}, {name: np.ones(1) for name in "wxyz"})
    with pytest.raises(tapax.SiteError, match=r"and `b` has none\. Pass"):
        tapax.diff({"h": np.ones(1)}, {})
    message = "have 'h' in common, but one contains only values and the other only gradients"
    with pytest.raises(tapax.SiteError, match=message):
        tapax.diff({"h": np.ones(1)}, ({}, {"h": np.ones(1)}))


@pytest.mark.parametrize(
    ("a", "message"),
    [
        (3, "`a` must be the taps of a capture, a dict of arrays, or a pair of dicts"),
        ({"h": "text"}, "The value of 'h' in `a` must be an array of numbers, but is 'text'"),
        ({"h": object()}, "The value of 'h' in `a` must be an array"),
        ({3: np.ones(1)}, "`a` must have strings as its keys, but has 3 of type int"),
        (({}, {"h": [[1], [1, 2]]}), "The gradient of 'h' in `a` must be an array, but is"),
    ],
)
def test_captures_of_a_wrong_type_raise(a, message):
    b = ({"h": np.ones(1)}, {"h": np.ones(1)})
    with pytest.raises(TypeError, match=message):
        tapax.diff(a, b)


def test_a_negative_tolerance_raises():
    with pytest.raises(ValueError, match="`rtol` must be zero or more, but is -1"):
        tapax.diff({"h": 1.0}, {"h": 1.0}, rtol=-1)


def test_traced_captures_cannot_be_compared():
    def f(x):
        return tapax.diff({"h": x}, {"h": x}).equal

    with pytest.raises(TypeError, match="The value of 'h' in `a` is traced, so it cannot be"):
        jax.jit(f)(jnp.ones(2))


def test_sharded_captures_are_compared(mesh):
    from jax.sharding import NamedSharding, PartitionSpec

    captured = tapax.capture(jax.jit(lambda x: tapax.sow(jnp.sin(x), "h")))
    x = np.linspace(0, 1, 32, dtype=np.float32).reshape(8, 4)
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", "b")))
    _, a = captured(sharded)
    assert tapax.diff(a, captured(x)[1], rtol=1e-5).equal
    found = tapax.diff(a, captured(x + np.eye(8, 4, dtype=np.float32))[1])
    assert found.first.name == "h"


def test_a_capture_from_disk_is_compared(tmp_path):
    _, taps = scanned_step(weights(), inputs())
    taps.save(tmp_path / "before.safetensors")
    _, after = scanned_step(weights().at[9, 3, 5].add(0.2), inputs())
    first = tapax.diff(tapax.open(tmp_path / "before.safetensors"), after).first
    assert (first.name, first.iteration) == ("net/layers/up", (9,))


def test_a_mapped_capture_is_compared_by_iteration():
    """The mapped axis comes first, the axis of the loop second."""

    def layers(x, change):
        body = lambda x, i: (tapax.sow(jnp.sin(x) + jnp.where(i == 2, change, 0.0), "h"), None)
        return lax.scan(body, x, jnp.arange(4))[0]

    mapped = jax.vmap(tapax.capture(layers), in_axes=(0, None))
    a, b = (mapped(jnp.ones((5, 3)), change)[1] for change in (0.0, 0.5))
    assert a.values["h"].shape == (5, 4, 3)
    assert tapax.diff(a, b).first.iteration == (2,)


def test_the_table_says_where_exactness_ends():
    """A small change starts within the tolerance and grows beyond it."""
    a = {f"h{i}": np.float32([1.0, 2.0]) for i in range(3)}
    b = {"h0": a["h0"], "h1": a["h1"] + np.float32(2**-23), "h2": a["h2"] + np.float32(0.5)}
    difference = tapax.diff(a, b)
    assert difference.first.name == "h2" and not difference.values["h1"].differs
    assert "The first value that is not the same bit for bit is 'h1'." in unwrapped(difference)
    assert "is equal within the tolerance, but differs by" in str(difference.values["h1"])
    assert str(difference.values["h0"]) == "h0: the value is the same"


def test_two_modules_of_different_classes_are_compared():
    from flax import nnx

    class Old(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(3)])

        def __call__(self, x):
            for block in self.blocks:
                x = jnp.tanh(block(x))
            return x

    class New(nnx.Module):
        def __init__(self, rngs):
            self.first, *rest = (nnx.Linear(4, 4, rngs=rngs) for _ in range(3))
            self.rest = nnx.List(rest)

        def __call__(self, x):
            x = jnp.tanh(self.first(x))
            for block in self.rest:
                x = jnp.tanh(block(x))
            return x

    old, new = Old(nnx.Rngs(0)), New(nnx.Rngs(0))
    rename = {
        "New": "Old",
        "New/first": "Old/blocks/0",
        "New/rest/0": "Old/blocks/1",
        "New/rest/1": "Old/blocks/2",
    }
    captures = lambda: (tapax.capture(m)(jnp.ones((2, 4)))[1] for m in (old, new))
    difference = tapax.diff(*captures(), rename=rename, rtol=1e-5)
    assert difference.equal and not difference.only_a and not difference.only_b
    new.rest[0].bias[...] = new.rest[0].bias[...] + 0.5
    first = tapax.diff(*captures(), rename=rename, rtol=1e-5).first
    assert (first.name, first.other_name) == ("Old/blocks/1", "New/rest/0")


def test_a_loop_on_every_device_is_compared_by_iteration(mesh):
    """The mesh axis comes first, and is not an axis of iterations."""
    from jax.sharding import PartitionSpec

    def layers(x, change):
        body = lambda x, i: (tapax.sow(jnp.sin(x) + jnp.where(i == 2, change, 0.0), "h"), None)
        return lax.scan(body, x, jnp.arange(4))[0]

    spec = PartitionSpec("a")
    over = jax.shard_map(
        layers, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False
    )
    captured = tapax.capture(jax.jit(over))
    a, b = (captured(jnp.ones((4, 3)), jnp.float32(change))[1] for change in (0.0, 0.5))
    assert a.sites["h"].loops[-1] == "scan[4]" and len(a.sites["h"].loops) > 1
    first = tapax.diff(a, b).first
    assert first.iteration == (2,) and first.ulps_by_iteration.shape == (4,)
