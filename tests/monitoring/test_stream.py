"""A stream records the numbers of the loop run by hand, and leaves the results unchanged."""

import gc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tapax
from tapax import alert, reduce
from tests.oracles.closeness import assert_close

KEY = np.random.default_rng(0)
W = jnp.asarray(KEY.normal(size=(4, 3)), jnp.float32)
XS = jnp.asarray(KEY.normal(size=(23, 4)), jnp.float32)


def loss(w, x):
    return jnp.sum(tapax.sow(jnp.tanh(x @ w), "h") ** 2)


def step(w, x):
    value, grad = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * grad, value


def train(w, xs):
    return jax.lax.scan(step, w, xs)


def by_hand(w, xs, every):
    """Compute the rms of h and of its gradient in NumPy, with the derivative written out."""
    w, xs = np.asarray(w, np.float64), np.asarray(xs, np.float64)
    found = {}
    for i, x in enumerate(xs):
        h = np.tanh(x @ w)
        if i % every == 0:
            found[i] = np.sqrt(np.mean(h**2)), np.sqrt(np.mean((2 * h) ** 2))
        w = w - 0.1 * np.outer(x, 2 * h * (1 - h**2))
    return found


def assert_matches(log, expected):
    assert log.steps.tolist() == list(expected)
    numbers = np.array(list(expected.values()))
    assert_close(log["h/value_rms"].values, numbers[:, 0], 1e-5)
    assert_close(log["h/grad_rms"].values, numbers[:, 1], 1e-5)


@pytest.mark.parametrize("every", [1, 5, 23, 100])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_streamed_scan_records_what_the_loop_computes_by_hand(every, wrap):
    log = tapax.Log()
    fn = wrap(train)
    fn(W, XS)  # JAX caches it before the stream
    out = tapax.stream(fn, every=every, to=log)(W, XS)
    assert_matches(log, by_hand(W, XS, every))
    assert_close(out, train(W, XS))


def test_stream_inside_jit_and_called_twice_records_each_run():
    found = []
    streamed = jax.jit(tapax.stream(train, every=10, to=lambda step, r: found.append((step, r))))
    for _ in range(2):
        jax.block_until_ready(streamed(W, XS))
    assert [step for step, _ in found] == [0, 10, 20] * 2
    expected = by_hand(W, XS, 10)
    for step, record in found:
        assert_close(np.float64(record["h/value_rms"]), expected[step][0], 1e-5)


def test_numbers_go_on_from_call_to_call():
    log = tapax.Log()
    with tapax.stream(train, every=5, to=log) as streamed:
        w, _ = streamed(W, XS[:10])
        assert streamed.step_number == 10
        streamed(w, XS[10:20])
    assert_matches(log, by_hand(W, XS[:20], 5))


def test_stream_goes_on_after_the_steps_of_a_log(tmp_path):
    path = tmp_path / "run.jsonl"
    tapax.stream(train, every=5, to=path)(W, XS)
    with pytest.warns(UserWarning, match="numbered from 25"):
        streamed = tapax.stream(train, every=5, to=path)
    streamed(W, XS)
    streamed.close()
    assert tapax.open(path).steps.tolist() == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]


def test_fori_loop_with_known_and_traced_bounds_is_streamed():
    def run(n, w):
        return jax.lax.fori_loop(0, n, lambda i, w: step(w, XS[i])[0], w)

    expected = by_hand(W, XS, 4)
    for fn in (lambda w: run(23, w), lambda w: jax.jit(run)(jnp.int32(23), w)):
        log = tapax.Log()
        out = tapax.stream(fn, every=4, to=log)(W)
        assert_matches(log, expected)
        assert_close(out, train(W, XS)[0])


def until(w):
    """Double the value until its sum is large, so that the trip count depends on the value."""

    def body(w):
        return 2 * tapax.sow(w, "h")

    return jax.lax.while_loop(lambda w: jnp.sum(w) < 100.0, body, w)


def test_while_loop_streams_as_often_as_it_runs():
    log = tapax.Log()
    out = tapax.stream(until, grads=None, every=3, to=log)(jnp.ones(2))
    assert log.steps.tolist() == [0, 3]  # 2, 4, 8, 16, 32, 64: six iterations
    assert log["h/value_rms"].values.tolist() == [1.0, 8.0]
    assert out.tolist() == [64.0, 64.0]


def test_loop_that_does_not_run_sends_nothing():
    log = tapax.Log()
    assert tapax.stream(until, grads=None, every=3, to=log)(jnp.full(2, 99.0)).tolist() == [99, 99]
    assert len(log) == 0


def test_nested_loops_have_a_number_for_each_iteration_or_a_total():
    def inner(w, x):
        return jnp.tanh(w * tapax.sow(x + w.sum(), "h")), None

    def outer(w, x):
        return jax.lax.scan(inner, w, jnp.stack([x, 2 * x]))[0], None

    def fn(w):
        return jax.lax.scan(outer, w, XS[:6, 0])[0]

    log = tapax.Log()
    watch = {"h": [reduce.rms, reduce.sum.total]}
    tapax.stream(fn, values=watch, grads=None, every=3, to=log)(W)
    w, rows = np.asarray(W, np.float64), []
    for x in np.asarray(XS[:6, 0], np.float64):
        row = []
        for part in (x, 2 * x):
            h = part + w.sum()
            row.append(h)
            w = np.tanh(w * h)
        rows.append(row)
    for i, at in enumerate([0, 3]):
        assert_close(log["h[0]/value_rms"].values[i], abs(rows[at][0]), 1e-5)
        assert_close(log["h[1]/value_rms"].values[i], abs(rows[at][1]), 1e-5)
        assert_close(log["h/value_sum.total"].values[i], sum(rows[at]), 1e-5)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
def test_examples_of_a_map_inside_and_around_the_stream_are_merged(inside):
    ws = jnp.stack([W, 2 * W, -W])
    log = tapax.Log()
    if inside:
        out = tapax.stream(jax.vmap(train, (0, None)), every=5, to=log)(ws, XS)
    else:
        out = jax.vmap(tapax.stream(train, every=5, to=log), (0, None))(ws, XS)
        jax.block_until_ready(out)
    each = [by_hand(w, XS, 5) for w in ws]
    merged = {
        i: tuple(np.sqrt(np.mean([one[i][k] ** 2 for one in each])) for k in (0, 1))
        for i in each[0]
    }
    assert_matches(log, merged)
    assert_close(out, jax.vmap(train, (0, None))(ws, XS))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
def test_examples_whose_while_loop_is_over_no_longer_count(inside):
    log = tapax.Log()
    starts = jnp.array([[1.0, 1.0], [20.0, 20.0], [0.5, 0.5]])
    if inside:
        fn = tapax.stream(jax.vmap(until), grads=None, every=2, to=log)
    else:
        fn = jax.vmap(tapax.stream(until, grads=None, every=2, to=log))
    out = jax.block_until_ready(fn(starts))
    counts, states, number = {}, [1.0, 20.0, 0.5], 0
    while any(2 * s < 100 for s in states):
        if number % 2 == 0:
            counts[number] = [s for s in states if 2 * s < 100]
        states = [2 * s if 2 * s < 100 else s for s in states]
        number += 1
    assert log.steps.tolist() == list(counts)
    expected = [np.sqrt(np.mean(np.square(row))) for row in counts.values()]
    assert_close(log["h/value_rms"].values, np.array(expected), 1e-6)
    assert out[:, 0].tolist() == states


def test_reducers_that_keep_examples_apart_have_one_number_each():
    log = tapax.Log()
    fn = jax.vmap(tapax.stream(until, values={"h": reduce.last}, grads=None, every=2, to=log))
    jax.block_until_ready(fn(jnp.array([[1.0, 1.0], [3.0, 3.0]])))
    assert log["h/value_last"].values[0].tolist() == [[1.0, 1.0], [3.0, 3.0]]


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
def test_rematerialized_steps_send_each_record_once(policy):
    def remat_step(w, x):
        value, grad = jax.value_and_grad(jax.checkpoint(loss, policy=policy))(w, x)
        return w - 0.1 * grad, value

    log = tapax.Log()
    tapax.stream(lambda w, xs: jax.lax.scan(remat_step, w, xs), every=5, to=log)(W, XS)
    assert_matches(log, by_hand(W, XS, 5))


def recurrent(w, xs):
    def body(h, x):
        h = tapax.sow(jnp.tanh(w @ h + x), "h")
        return h, None

    return jnp.sum(jax.lax.scan(body, jnp.zeros(4), xs)[0] ** 2)


def recurrent_by_hand(w, xs):
    """Compute the states, and the gradients by them, by backpropagation through time."""
    w, xs = np.asarray(w, np.float64), np.asarray(xs, np.float64)
    states = [np.zeros(4)]
    for x in xs:
        states.append(np.tanh(w @ states[-1] + x))
    grads, grad = [], 2 * states[-1]
    for h in states[:0:-1]:
        grads.append(grad)
        grad = w.T @ (grad * (1 - h**2))
    return states[1:], grads[::-1]


SQUARE = jnp.asarray(KEY.normal(size=(4, 4)) / 3, jnp.float32)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("every", [5, 23, 1])
def test_gradients_of_a_differentiated_loop_come_in_the_order_of_steps(every, remat):
    found = []
    fn = jax.grad(jax.checkpoint(recurrent) if remat else recurrent)
    out = tapax.stream(fn, every=every, to=lambda s, r: found.append((s, r)))(SQUARE, XS)
    states, grads = recurrent_by_hand(SQUARE, XS)
    steps = list(range(0, 23, every))
    assert [s for s, r in found if "h/value_rms" in r] == steps
    assert [s for s, r in found if "h/grad_rms" in r] == steps
    for s, record in found:
        if "h/value_rms" in record:
            expected = np.sqrt(np.mean(states[s] ** 2))
            assert_close(np.float64(record["h/value_rms"]), expected, 1e-5)
        else:
            expected = np.sqrt(np.mean(grads[s] ** 2))
            assert_close(np.float64(record["h/grad_rms"]), expected, 1e-5)
    assert_close(out, jax.grad(recurrent)(SQUARE, XS))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["grad", "remat"])
def test_derivative_of_a_stream_is_plain_and_sends_once(wrap):
    log = tapax.Log()
    streamed = wrap(tapax.stream(recurrent, grads=None, every=5, to=log))
    out = jax.block_until_ready(jax.grad(streamed)(SQUARE, XS))
    jax.effects_barrier()
    assert_close(out, jax.grad(recurrent)(SQUARE, XS))
    assert log.steps.tolist() == [0, 5, 10, 15, 20]
    states, _ = recurrent_by_hand(SQUARE, XS)
    expected = np.array([np.sqrt(np.mean(states[i] ** 2)) for i in range(0, 23, 5)])
    assert_close(log["h/value_rms"].values, expected, 1e-5)


def test_branches_in_the_body_count_only_where_they_are_taken():
    def body(w, i):
        even = lambda w: tapax.sow(2 * w, "even")
        return jax.lax.cond(i % 4 == 0, even, lambda w: w, w), None

    log = tapax.Log()
    tapax.stream(lambda w: jax.lax.scan(body, w, jnp.arange(8))[0], grads=None, every=2, to=log)(
        jnp.float32(1.0)
    )
    assert [(s, r) for s, r in log] == [
        (0, {"even/value_rms": 2.0}),
        (2, {}),
        (4, {"even/value_rms": 4.0}),
        (6, {}),
    ]


def test_custom_rules_and_bfloat16_are_streamed():
    @jax.custom_vjp
    def clip(x):
        return tapax.sow(x, "inner")

    clip.defvjp(lambda x: (clip(x), None), lambda _, ct: (jnp.clip(ct, -1, 1),))

    def body(w, _):
        grad = jax.grad(lambda w: jnp.sum(tapax.sow(clip(w * 4), "outer")))(w)
        return w - grad.astype(w.dtype), None

    log = tapax.Log()
    fn = lambda w: jax.lax.scan(body, w, None, 4)[0]
    out = tapax.stream(fn, every=2, to=log)(jnp.ones(2, jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    assert log["outer/value_rms"].values.tolist() == [4.0, 28.0]
    assert log["outer/grad_rms"].values.tolist() == [1.0, 1.0]
    assert log["inner/value_rms"].values.tolist() == [4.0, 28.0]


def test_sharded_program_sends_one_record_of_the_whole_value():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    batch = jnp.asarray(np.random.default_rng(1).normal(size=(6, 16, 4)), jnp.float32)

    def body(w, x):
        grad = jax.grad(lambda w: jnp.sum(tapax.sow(jnp.tanh(x @ w), "h") ** 2))(w)
        return w - 0.01 * grad, None

    spread = NamedSharding(mesh, PartitionSpec(None, "d"))
    fn = jax.jit(lambda w, xs: jax.lax.scan(body, w, xs)[0], in_shardings=(None, spread))
    log = tapax.Log()
    tapax.stream(fn, every=2, to=log)(W, batch)
    w, expected = np.asarray(W, np.float64), []
    for i, x in enumerate(np.asarray(batch, np.float64)):
        h = np.tanh(x @ w)
        expected += [np.sqrt(np.mean(h**2))] if i % 2 == 0 else []
        w = w - 0.01 * x.T @ (2 * h * (1 - h**2))
    assert log.steps.tolist() == [0, 2, 4]
    assert_close(log["h/value_rms"].values, np.array(expected), 1e-5)


@pytest.mark.parametrize("check", [True, False])
def test_loop_inside_a_shard_map_sends_one_record_of_all_devices(check):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x):
        def body(x, _):
            return tapax.sow(2 * x, "h"), None

        return jax.lax.scan(body, x, None, 6)[0]

    spec = PartitionSpec("d")
    fn = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check))
    log = tapax.Log()
    x = jnp.arange(16.0)
    tapax.stream(fn, grads=None, every=4, to=log)(x)
    rms = np.sqrt(np.mean(np.arange(16.0) ** 2))
    assert log.steps.tolist() == [0, 4]
    assert_close(log["h/value_rms"].values, np.array([2 * rms, 32 * rms]), 1e-6)


def test_results_are_those_of_the_plain_program_one_operation_at_a_time():
    with jax.disable_jit():
        log = tapax.Log()
        out = tapax.stream(train, every=10, to=log)(W, XS)
        plain = train(W, XS)
    for a, b in zip(out, plain, strict=True):
        np.testing.assert_array_equal(a, b)
    assert_matches(log, by_hand(W, XS, 10))


def test_prints_in_the_loop_are_printed_once(capfd):
    def body(x, i):
        jax.debug.print("at {}", i)
        return tapax.sow(x + 1, "h"), None

    tapax.stream(lambda x: jax.lax.scan(body, x, jnp.arange(4))[0], grads=None, every=2)(1.0)
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "at 0", "at 1", "at 2", "at 3"]


def test_sink_that_raises_is_reported_once_and_the_run_goes_on():
    def sink(step, record):
        raise OSError("the disk is full")

    log = tapax.Log()
    with pytest.warns(
        UserWarning, match="failed, so the monitor sends it no more records"
    ) as warned:
        out = tapax.stream(train, every=2, to=[sink, log])(W, XS)
    assert len(warned) == 1
    assert_close(out, train(W, XS))
    assert len(log) == 12


def test_alerts_go_off_in_the_loop():
    log = tapax.Log()
    limit = alert.above("h", value_rms=5.0)
    streamed = tapax.stream(until, grads=None, every=3, to=log, alerts=limit)
    with pytest.warns(alert.AlertWarning, match="step 3: the value of h has rms 8"):
        streamed(jnp.ones(2))
    assert [event.step for event in streamed.alerts] == [3]
    assert log.alerts == streamed.alerts


def test_closed_stream_runs_on_without_records():
    log = tapax.Log()
    with tapax.stream(train, every=5, to=log) as streamed:
        streamed(W, XS)
    assert_close(streamed(W, XS), train(W, XS))
    assert len(log) == 5


def test_stream_that_nobody_keeps_delivers_all_records():
    log = tapax.Log()
    out = jax.jit(tapax.stream(train, every=5, to=log))(W, XS)
    gc.collect()
    jax.block_until_ready(out)
    assert len(log) == 5


@pytest.mark.parametrize("inside", [False, True])
def test_reverse_loop_that_failed_leaves_no_records_to_the_next_call(inside):
    fails = True

    def check(x):
        if fails and x > 6:
            raise RuntimeError("this call fails")
        return np.float32(0)

    @jax.jit
    def fn(x):
        def body(c, _):
            c = tapax.sow(c + 1, "h")
            return c + jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.float32), c), None

        return jax.lax.scan(body, x, jnp.arange(8), reverse=True)[0]

    log = tapax.Log()
    with tapax.stream(fn, {"h": tapax.reduce.mean}, None, every=2, to=log) as streamed:
        call = jax.jit(lambda x: streamed(x)) if inside else streamed
        with pytest.raises(Exception, match="this call fails"):
            jax.block_until_ready(call(jnp.float32(0)))
        fails = False
        jax.block_until_ready(call(jnp.float32(100)))
        jax.effects_barrier()
    assert [(step, record["h/value_mean"]) for step, record in log] == [
        (step, 108.0 - step) for step in (0, 2, 4, 6)
    ]


def test_error_in_the_function_leaves_the_stream_usable():
    log = tapax.Log()
    streamed = tapax.stream(train, every=5, to=log)
    with pytest.raises(TypeError):
        streamed(W, XS[:, :2])
    streamed(W, XS)
    assert len(log) == 5


def test_function_without_a_loop_is_refused():
    with pytest.raises(tapax.SiteError, match="has no loop to stream from"):
        tapax.stream(loss)(W, XS[0])


def test_sites_outside_of_the_loop_are_refused():
    def fn(w, xs):
        return train(tapax.sow(w, "outside"), xs)

    log = tapax.Log()
    tapax.stream(fn, to=log)(W, XS)
    assert log.names == ["h/value_rms", "h/grad_rms"]
    with pytest.raises(tapax.SiteError, match="'outside' is selected, but it is not inside a loop"):
        tapax.stream(fn, values="outside", grads=None)(W, XS)
    with pytest.raises(tapax.SiteError, match="no site with that name"):
        tapax.stream(fn, values="missing", grads=None)(W, XS)
    with pytest.raises(tapax.SiteError, match="No selected site is in a loop"):
        tapax.stream(lambda w: jax.lax.fori_loop(0, 3, lambda i, w: w + 1, w))(W)


def test_arguments_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="nothing to stream"):
        tapax.stream(train, values=None, grads=None)
    with pytest.raises(ValueError, match="`every` must be at least 1"):
        tapax.stream(train, every=0)
    with pytest.raises(TypeError, match="`stream` takes a function"):
        tapax.stream(3)


def test_while_loop_that_ends_unevenly_over_a_mesh_is_refused():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("d")
    fn = jax.shard_map(until, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(tapax.SiteError, match="may end on one device before"):
        tapax.stream(fn, grads=None)(jnp.arange(1.0, 17.0))


def test_edited_function_is_streamed_and_a_stream_inside_a_capture_is_refused():
    log = tapax.Log()
    edited = tapax.edit(train, values={"h": lambda h: jnp.zeros_like(h)})
    w, losses = tapax.stream(edited, every=5, to=log)(W, XS)
    assert not losses.any() and not log["h/value_rms"].values.any()
    np.testing.assert_array_equal(w, W)
    with pytest.raises(TypeError, match="Stream that function instead"):
        tapax.capture(tapax.stream(train))(W, XS)


def test_nothing_warns_in_an_ordinary_stream():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tapax.stream(jax.jit(train), every=5, to=tapax.Log())(W, XS)


def test_a_loop_without_iterations_has_no_records():
    def train(x, ts):
        return jax.lax.scan(lambda c, t: (tapax.sow(c + t, "h"), None), x, ts)[0]

    log = tapax.Log()
    with tapax.stream(train, every=2, to=log) as streamed:
        np.testing.assert_array_equal(streamed(jnp.ones(3), jnp.zeros((0, 3))), jnp.ones(3))
    assert len(log) == 0
