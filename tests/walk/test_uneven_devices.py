"""Devices of a mesh that take different branches, or leave a loop at different times.

Values that are equal on all devices inside the branch or the loop differ outside of it, because
some devices did not compute them. All expected arrays are written by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import tapax

X = np.arange(4, dtype=np.float32)
"""One number for each device."""


def on_four_devices(local):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"))


def captured(local, **options):
    return tapax.capture(on_four_devices(local), grads=None, **options)(X)[1]


def add(x):
    """Fold ones: the state is one more than the number of calls."""
    return x + 0 * tapax.sow(jnp.float32(1), "count", reduce=jnp.add, init=lambda: jnp.float32(1))


def replicated(x):
    return x + tapax.sow(jnp.arange(3, dtype=jnp.float32), "k").sum()


def test_a_replicated_value_in_a_branch_that_some_devices_take():
    taps = captured(lambda x: lax.cond(x[0] > 1.5, replicated, lambda x: x, x))
    np.testing.assert_array_equal(taps.values["k"], [[0, 0, 0]] * 2 + [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(taps.valid["k"], [False, False, True, True])


def loop_of_two(x):
    step = lambda c: (c[0] + 1, replicated(c[1]))
    return lax.while_loop(lambda c: c[0] < 2, step, (0, x))[1]


def test_a_loop_in_a_branch_that_some_devices_take_counts_on_each_device():
    program = lambda x: lax.cond(x[0] > 1.5, loop_of_two, lambda x: x, x)
    taps = captured(program)
    np.testing.assert_array_equal(taps.valid["k"], [0, 0, 2, 2])
    np.testing.assert_array_equal(taps.values["k"], [[0, 0, 0]] * 2 + [[0, 1, 2]] * 2)
    steps = captured(program, steps=3)
    np.testing.assert_array_equal(steps.valid["k"], [[False] * 3] * 2 + [[True, True, False]] * 2)


def test_a_loop_in_one_of_three_branches():
    branches = [lambda x: x, loop_of_two, lambda x: 2 * x]
    taps = captured(lambda x: lax.switch(jnp.int32(x[0]) % 3, branches, x))
    np.testing.assert_array_equal(taps.valid["k"], [0, 2, 0, 0])


@pytest.mark.parametrize("remat", [False, True])
def test_folds_in_a_branch_that_some_devices_take(remat):
    taken = jax.checkpoint(add) if remat else add
    taps = captured(lambda x: lax.cond(x[0] > 1.5, taken, lambda x: x, x))
    np.testing.assert_array_equal(taps.values["count"], [0, 0, 2, 2])
    np.testing.assert_array_equal(taps.valid["count"], [False, False, True, True])


def test_folds_before_and_in_a_branch_that_some_devices_take():
    taps = captured(lambda x: lax.cond(x[0] > 1.5, add, lambda x: x, add(x)))
    np.testing.assert_array_equal(taps.values["count"], [2, 2, 3, 3])


def test_folds_in_a_loop_that_devices_leave_at_different_times():
    taps = captured(lambda x: lax.while_loop(lambda x: x[0] < 2, lambda x: add(x) + 1, x))
    np.testing.assert_array_equal(taps.values["count"], [3, 2, 0, 0])
    np.testing.assert_array_equal(taps.valid["count"], [True, True, False, False])


def test_folds_in_a_branch_in_a_scan():
    body = lambda x, _: (lax.cond(x[0] > 1.5, add, lambda x: x, x) + 1, None)
    taps = captured(lambda x: lax.scan(body, x, None, length=3)[0])
    np.testing.assert_array_equal(taps.values["count"], [2, 3, 4, 4])


def test_folds_in_a_loop_in_a_branch():
    loop = lambda x: lax.fori_loop(0, 2, lambda _, x: add(x), x)
    taps = captured(lambda x: lax.cond(x[0] > 1.5, loop, lambda x: x, x))
    np.testing.assert_array_equal(taps.values["count"], [0, 0, 3, 3])


@pytest.mark.parametrize(
    ("reducer", "expected"),
    [(tapax.reduce.sum, 12.0), (tapax.reduce.minmax, [0, 2]), (tapax.reduce.mean, 1.0)],
    ids=["sum", "minmax", "mean"],
)
def test_reducers_see_only_the_devices_that_ran(reducer, expected):
    program = lambda x: lax.cond(x[0] > 1.5, loop_of_two, lambda x: x, x)
    taps = captured(program, values={"k": reducer})
    np.testing.assert_allclose(taps.values["k"], expected, rtol=1e-6)
    np.testing.assert_array_equal(taps.valid["k"], 2)  # iterations of the device that ran longest


def test_the_nan_of_a_branch_that_one_device_takes_is_found():
    bad = lambda x: x + jnp.log(-jnp.ones(3, jnp.float32)).sum()
    found = tapax.find_nonfinite(
        on_four_devices(lambda x: lax.cond(x[0] > 2.5, bad, lambda x: x, x))
    )(X)
    assert found.operation == "log"


@pytest.mark.parametrize("jitted", [False, True])
def test_an_edit_of_one_iteration_of_a_loop_that_devices_leave_at_different_times(jitted):
    def local(x):
        return lax.while_loop(lambda x: x[0] < 3, lambda x: tapax.sow(x + 1, "h"), x)

    def edited(x, step):
        edit = {tapax.at("h", step=step): lambda h: 10 * h}
        return tapax.edit(on_four_devices(local), values=edit)(x)

    # Device 0 runs three iterations, device 3 none.
    for step, expected in ((0, [10, 20, 30, 3]), (1, [20, 30, 3, 3]), (2, [30, 3, 3, 3])):
        run = jax.jit(edited) if jitted else lambda x, step: edited(x, int(step))
        np.testing.assert_array_equal(run(X, step), expected)


def test_the_gradient_of_an_edit_of_one_iteration_in_a_branch_that_some_devices_take():
    body = lambda _, x: tapax.sow(x * x, "h")
    loop = lambda x: lax.fori_loop(0, 2, body, x)

    def loss(x):
        return on_four_devices(lambda x: lax.cond(x[0] > 1.5, loop, lambda x: x, x))(x).sum()

    edited = tapax.edit(loss, values={tapax.at("h", step=1): lambda h: 3 * h})
    # Devices 2 and 3 compute 3 x^4.
    np.testing.assert_allclose(jax.grad(edited)(X), [1, 1, 96, 324], rtol=1e-6)
