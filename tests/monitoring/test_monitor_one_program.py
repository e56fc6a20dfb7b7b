"""With `exact=False`, a watched call runs one program: the step, with statistics of its sites."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback

import tapax
from tapax import alert, reduce
from tests.models.monitored import W, X, scanned, watched
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

watch = functools.partial(watched, exact=False)


def rms(x):
    return np.sqrt(np.mean(np.asarray(x, np.float64) ** 2))


@functools.partial(jax.jit, donate_argnums=0)
def update(w, x):
    """Train `sum(tanh(x @ w) ** 2)`, whose derivatives NumPy computes below."""

    def loss(w):
        return jnp.sum(tapax.sow(jnp.tanh(x @ w), "h") ** 2)

    return w - 0.1 * jax.grad(loss)(w)


def by_hand(w, x):
    """Compute the value and gradient of `h`, and the new weights, in NumPy."""
    w, x = np.asarray(w, np.float64), np.asarray(x, np.float64)
    h = np.tanh(x @ w)
    return h, 2 * h, w - 0.1 * x.T @ (2 * h * (1 - h**2))


def test_numbers_and_results_are_those_of_numpy():
    log, w = tapax.Log(), W[0].copy()
    expected = np.asarray(w)
    with tapax.monitor(update, every=1, to=log, params=True, exact=False) as step:
        for number in range(3):
            h, gradient, new = by_hand(expected, X)
            w = step(w, X)
            step.log(number=number)
            assert_close(np.asarray(w), new, 1e-5)
            expected, before = new, expected
    assert log.steps.tolist() == [0, 1, 2] and log["number"].values.tolist() == [0, 1, 2]
    record = list(log)[2][1]
    assert_close(record["h/value_rms"], rms(h), 1e-5)
    assert_close(record["h/grad_rms"], rms(gradient), 1e-5)
    assert_close(record["w/param_rms"], rms(before), 1e-5)
    assert_close(record["w/param_grad_rms"], rms(new - before) / 0.1, 1e-5)
    assert_close(record["w/update_ratio"], rms(new - before) / rms(before), 1e-5)


@functools.partial(jax.jit, donate_argnums=0)
def update_all(ws, x):
    def loss(ws):
        h = x
        for i, w in enumerate(ws):
            h = tapax.sow(jnp.tanh(h @ w), f"h{i}")
        return jnp.sum(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))


def taken(program, *args):
    """Return the bytes that a program takes, except for donated arguments that it reuses."""
    found = program.lower(*args).compile().memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


@pytest.mark.parametrize("params", [None, True])
def test_donated_arguments_are_donated_and_memory_does_not_double(params, monkeypatch):
    make = lambda: [jnp.full((128, 128), 0.1) for _ in range(16)]
    given, x, programs, jit = make(), jnp.ones((2, 128)), [], jax.jit

    def spy(*args, **options):
        programs.append(jit(*args, **options))
        return programs[-1]

    with tapax.monitor(update_all, every=1, params=params, exact=False) as step:
        monkeypatch.setattr(jax, "jit", spy)
        step(given, x)
    assert all(w.is_deleted() for w in given) and not x.is_deleted()
    extra = taken(programs[-1], (), *make(), x) - taken(update_all, make(), x)
    assert extra < 0.4 * sum(w.nbytes for w in make())


def test_arguments_that_are_not_donated_stay():
    keeping = jax.jit(update.__wrapped__)
    w = W[0].copy()
    watch(keeping, (w, X), (w, X), params=True)
    assert not w.is_deleted()


def test_callbacks_run_once_and_do_not_warn():
    counted, printed = [], []

    @jax.jit
    def step(x):
        jax.debug.callback(lambda x: printed.append(float(x)), x)
        drawn = io_callback(lambda: np.float32(counted.append(1) or len(counted)), jnp.float32(0))
        return tapax.sow(x + drawn, "h")

    log = tapax.Log()
    with tapax.monitor(step, every=1, grads=None, to=log, exact=False) as m:
        outs = [float(m(jnp.float32(10 * i))) for i in range(3)]
    jax.effects_barrier()
    assert outs == [1.0, 12.0, 23.0] == log["h/value_rms"].values.tolist()
    assert len(counted) == 3 and sorted(printed) == [0.0, 10.0, 20.0]


def test_static_arguments_and_numbers_do_not_trace_again():
    traces = []

    @functools.partial(jax.jit, static_argnames="depth")
    def step(x, number, *, depth):
        traces.append(depth)
        for _ in range(depth):
            x = tapax.sow(2 * x + number, "h")
        return x

    with tapax.monitor(step, every=1, grads=None, exact=False) as m:
        outs = [m(jnp.ones(2), i, depth=depth).tolist() for depth in (1, 2) for i in range(3)]
    assert outs == [[2.0] * 2, [3.0] * 2, [4.0] * 2, [4.0] * 2, [7.0] * 2, [10.0] * 2]
    assert traces == [1, 2]


def test_shardings_of_results_are_those_of_the_step(mesh):
    P = jax.sharding.PartitionSpec
    place = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))
    make = lambda: (place(W, None, None, "b"), place(jnp.zeros_like(W), None, None, "b"))
    x = place(X[:4], "a")
    expected = scanned(*make(), x)
    log = tapax.Log()
    given = make()
    with tapax.monitor(scanned, every=1, to=log, exact=False) as step:
        found = step(*given, x)
    for a, b, old in zip(found, expected, given, strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim) and old.is_deleted()
        assert_close(np.asarray(a), np.asarray(b))
    one, _ = watched(scanned, (W.copy(), jnp.zeros_like(W), X[:4]))
    ((_, record),), ((_, plain),) = log, one
    assert record.keys() == plain.keys()
    assert_close(record, plain)


def test_a_failure_later_turns_the_monitor_off_and_the_step_runs():
    @jax.jit
    def step(x):
        if x.shape == (3,):
            tapax.sow(x, "late")
        return tapax.sow(2 * x, "h")

    def no_late_site(site):
        if site.path == "late":
            raise MemoryError("too much")
        return True

    log = tapax.Log()
    m = tapax.monitor(step, every=1, values=no_late_site, to=log, exact=False)
    m(jnp.ones(2))
    with pytest.warns(UserWarning, match="is off, and the training goes on: .* MemoryError: too"):
        outs = [m(jnp.ones(3)).tolist() for _ in range(3)]
    m.close()
    assert outs == [[2.0] * 3] * 3 and log.steps.tolist() == [0] and m.step_number == 4


def test_a_program_that_does_not_fit_leaves_objects_to_the_plain_step(monkeypatch):
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)

    def full(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    copy = nnx.clone(model)
    plain = nnx.Optimizer(copy, optax.sgd(0.1), wrt=nnx.Param)
    m = tapax.monitor(step, every=1, params=True, exact=False)
    m(model, optimizer, X)
    ((key, compiled),) = m._watched._known.programs.items()
    monkeypatch.setitem(m._watched._known.programs, key, compiled._replace(run=full))
    with pytest.warns(UserWarning, match="JaxRuntimeError: RESOURCE_EXHAUSTED"):
        m(model, optimizer, X)
    m.close()
    step(copy, plain, X)
    step(copy, plain, X)
    assert_close(np.asarray(model.kernel[...]), np.asarray(copy.kernel[...]))
    assert optimizer.step[...] == 2


def test_a_program_that_fails_after_it_took_its_arguments_raises(monkeypatch):
    m = tapax.monitor(jax.jit(update.__wrapped__), every=1, exact=False)
    w = m(W[0].copy(), X)

    def fail(operands, w, x):
        w.delete()
        raise jax.errors.JaxRuntimeError("INTERNAL: lost")

    ((key, compiled),) = m._watched._known.programs.items()
    monkeypatch.setitem(m._watched._known.programs, key, compiled._replace(run=fail))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: lost"):
        m(w, X)
    m.close()


def test_a_wrong_selection_raises_at_the_first_call_and_changes_nothing():
    w = W[0].copy()
    m = tapax.monitor(update, every=1, values={"nowhere": reduce.rms}, exact=False)
    with pytest.raises(tapax.SiteError, match="nowhere"):
        m(w, X)
    m.close()
    assert not w.is_deleted() and m.step_number == 0


def test_alerts_go_off():
    with pytest.warns(alert.AlertWarning):
        _, alerts = watch(
            jax.jit(lambda x: tapax.sow(1 / x, "h")),
            (jnp.ones(2),),
            (jnp.zeros(2),),
            grads=None,
            alerts=alert.nonfinite(),
        )
    assert [(a.step, a.site) for a in alerts] == [(1, "h")]


def test_calls_that_are_not_watched_run_the_plain_step():
    log = tapax.Log()
    m = tapax.monitor(update, every=2, to=log, exact=False)
    w, expected = W[0].copy(), W[0]
    for _ in range(4):
        w = m(w, X)
        expected = by_hand(expected, X)[2]
    m.close()
    assert_close(np.asarray(w), expected, 1e-5)
    assert log.steps.tolist() == [0, 2]
