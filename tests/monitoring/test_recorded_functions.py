"""A function of a value may stand where a reducer does, in monitors and in streams."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tapax

X = np.linspace(-1.0, 2.0, 12, dtype=np.float32).reshape(3, 4)


def peak(h):
    return jnp.abs(h).max()


def records_of(watch, step, *args, grads=None, **options):
    """Return the records of one call."""
    found = []
    with watch(step, to=lambda _, r: found.append(dict(r)), grads=grads, **options) as watched:
        watched(*args)
    return found


def record_of(step, *args, **options):
    """Return the only record of a monitored call."""
    (record,) = records_of(tapax.monitor, step, *args, **options)
    return record


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_function_is_recorded_under_its_name_beside_reducers(wrap, exact):
    step = wrap(lambda x: tapax.sow(2 * x, "h").sum())
    found = record_of(step, X, values={"h": [peak, tapax.reduce.rms]}, exact=exact)
    assert list(found) == ["h/value_peak", "h/value_rms"]
    assert found["h/value_peak"] == np.abs(2 * X).max()
    np.testing.assert_allclose(found["h/value_rms"], np.sqrt(np.mean(4 * X**2)), rtol=1e-6)


def test_a_function_of_a_gradient_is_recorded():
    step = jax.grad(lambda x: jnp.sum(tapax.sow(2 * x, "h") ** 2))
    found = record_of(step, X, values=None, grads={"h": peak})
    assert found == {"h/grad_peak": np.abs(4 * X).max()}


def test_a_function_has_a_number_for_each_iteration_that_ran():
    def body(c, _):
        c = jax.lax.cond(c.sum() < 5, lambda c: tapax.sow(c + 1, "h"), lambda c: c, c)
        return c, None

    step = jax.jit(lambda x: jax.lax.scan(body, x, length=4)[0])
    found = record_of(step, jnp.zeros(3), values={"h": peak})
    assert found == {"h[0]/value_peak": 1.0, "h[1]/value_peak": 2.0}


def test_a_function_sees_the_last_iteration_of_a_while_loop():
    body = lambda x: tapax.sow(x + 1, "h")
    step = jax.jit(lambda x: jax.lax.while_loop(lambda x: x.sum() < 8, body, x))
    assert record_of(step, jnp.zeros(2), values={"h": peak}) == {"h/value_peak": 4.0}


def test_a_function_has_a_number_for_each_example_and_device(mesh):
    """As in a capture, a function sees one example, and the part of a value on one device."""
    step = jax.vmap(lambda x: tapax.sow(2 * x, "h"))
    assert record_of(step, X, values={"h": peak})["h/value_peak"].tolist() == [2.0, *2 * X[1:, 3]]
    spec = jax.sharding.PartitionSpec("a")
    sharded = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec)
    _, taps = tapax.capture(sharded, values={"h": peak}, grads=None)(X[:2])
    found = record_of(sharded, X[:2], values={"h": peak})
    assert [float(np.squeeze(x)) for x in found.values()] == taps.values["h"].ravel().tolist()


def test_a_function_that_returns_an_array_is_recorded_as_an_array():
    step = jax.jit(lambda x: tapax.sow(2 * x, "h"))
    found = record_of(step, X, values={"h": lambda h: h.mean(0) > 0.5})
    assert found["h/value_lambda"].tolist() == ((2 * X).mean(0) > 0.5).tolist()


def test_equal_functions_share_one_trace_of_the_step():
    traces = []

    @jax.jit
    def step(x):
        traces.append(1)
        return tapax.sow(x, "h")

    for _ in range(2):
        record_of(step, X, values={"h": peak})
    assert len(traces) == 2  # the plain step, and the watched one


def test_a_function_of_parameters_is_recorded_for_single_parameters():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    step = nnx.jit(nnx.grad(lambda model, x: jnp.mean(model(x) ** 2)))
    found = record_of(step, model, X, values=None, params={"**": peak})
    expected = {name: np.abs(getattr(model, name)[...]).max() for name in ("kernel", "bias")}
    for name, number in expected.items():
        assert found[f"Linear/{name}/param_peak"] == number
    gradient = step(model, X)
    assert found["Linear/kernel/param_grad_peak"] == np.abs(gradient.kernel[...]).max()
    # Two results of a function have no sum, so the module as a whole has no number.
    assert not {"Linear/param_peak", "Linear/param_grad_peak"} & set(found)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_function_is_streamed_out_of_a_loop(mapped):
    def body(c, _):
        return tapax.sow(c + 1, "h"), None

    run = lambda x: jax.lax.scan(body, x, length=6)[0]
    step = jax.vmap(run) if mapped else run
    found = records_of(tapax.stream, step, X, values={"h": peak}, every=2)
    expected = [[np.abs(x + i).max() for x in (X if mapped else [X])] for i in (1, 3, 5)]
    numbers = [np.ravel(record["h/value_peak"]) for record in found]
    np.testing.assert_allclose(numbers, expected, rtol=1e-6)


def test_a_function_that_returns_no_array_is_an_error():
    step = lambda x: tapax.sow(x, "h")
    words = "The function 'lambda' in `values` returns str, but must return a number or an array"
    with pytest.raises(TypeError, match=words):
        record_of(step, X, values={"h": lambda h: str(h.shape)})
