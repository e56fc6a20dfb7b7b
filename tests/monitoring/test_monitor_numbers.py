"""A monitor records the numbers that NumPy computes, under the right names."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import tapax
from tapax import alert, reduce
from tapax.monitoring._log import Log
from tapax.monitoring._monitor import monitor
from tapax.monitoring._records import Histogram
from tests.models.monitored import W, X, batch, scanned, watched
from tests.oracles.closeness import assert_close

EDGES = (-1.0, 0.0, 0.5, 3.0)


def hand_made(w, x):
    """Compute the values and gradients of `scanned` layer by layer in float64."""

    def loss(zeros):
        h, values = x.astype(jnp.float32), []
        for layer, zero in zip(w, zeros[:-1], strict=True):
            h = jnp.tanh(h @ layer) + zero
            values.append(h)
        h = h + zeros[-1]
        return jnp.mean((h - 1) ** 2), [*values, h]

    zeros = [jnp.zeros_like(x)] * (len(w) + 1)
    grads, values = jax.grad(loss, has_aux=True)(zeros)
    names = [*(f"h[{i}]" for i in range(len(w))), "out"]
    pairs = zip(names, values, grads, strict=True)
    return {name: (np.asarray(v, np.float64), np.asarray(g, np.float64)) for name, v, g in pairs}


STATS = {
    "rms": lambda x: np.sqrt(np.mean(x**2)),
    "norm": lambda x: np.sqrt(np.sum(x**2)),
    "mean": np.mean,
    "var": np.var,
    "min": np.min,
    "max": np.max,
    "histogram": lambda x: np.histogram(x, EDGES)[0],
    "zeros(axis=-1)": lambda x: np.mean(x == 0, 0),
    "zeros": lambda x: np.mean(x == 0),
}


def test_numbers_are_those_of_numpy():
    R = reduce
    asked = [R.rms, R.norm, R.moments, R.minmax, R.histogram(EDGES), R.zeros, R.zeros(axis=-1)]
    log = Log()
    with monitor(
        scanned, every=2, values={"**": asked}, grads={"h": asked[:2], "out": [R.minmax]}, to=log
    ) as step:
        w, momentum = W.copy(), jnp.zeros_like(W)
        records = []
        for i in range(3):
            records.append(hand_made(np.asarray(w), batch(i)))
            w, momentum = step(w, momentum, batch(i))
    assert log.steps.tolist() == [0, 2]
    for (_, record), expected in zip(log, records[::2], strict=True):
        names = {f"{site}/value_{stat}" for site in expected for stat in STATS}
        names |= {f"h[{i}]/grad_{stat}" for i in range(3) for stat in ("rms", "norm")}
        assert set(record) == names | {"out/grad_min", "out/grad_max"}
        for name, found in record.items():
            site, kind, stat = re.fullmatch(r"(.*)/(value|grad)_(.*)", name).groups()
            right = STATS[stat](expected[site][kind == "grad"])
            if isinstance(found, Histogram):
                assert found.edges.tolist() == list(EDGES)
                found = found.counts
            assert_close(found, right, 1e-5, err_msg=name)
            assert isinstance(found, np.ndarray) == (stat in ("histogram", "zeros(axis=-1)"))


def test_a_value_and_its_gradient_may_have_different_reducers_of_one_name():
    step = jax.jit(jax.grad(lambda x: jnp.sum(tapax.sow(x**2, "h"))))
    own = reduce.Reducer(
        lambda: 0.0, lambda s, x: s + x.sum(), jnp.add, lambda s: {"a": s, "b": (s, 2 * s)}, "rms"
    )
    log, _ = watched(step, (jnp.arange(3.0),), values={"h": own}, grads="h")
    ((_, record),) = log
    assert record == {
        "h/value_rms.a": 5.0, "h/value_rms.b.0": 5.0, "h/value_rms.b.1": 10.0, "h/grad_rms": 1.0
    }  # fmt: skip


def test_names_of_loops_branches_and_calls():
    @jax.jit
    def step(x, flags):
        def layer(x, flag):
            x, _ = lax.scan(lambda c, _: (tapax.sow(c + 1, "in"), None), x, length=2)
            x = lax.cond(flag, lambda x: tapax.sow(2 * x, "yes"), lambda x: x, x)
            x = lax.while_loop(lambda c: c < 3, lambda c: tapax.sow(c + 1, "w"), x)
            return tapax.sow(tapax.sow(x, "h"), "h"), None

        return tapax.sow({"a": (lax.scan(layer, x, flags)[0],)}, "p")["a"][0]

    R = reduce
    asked = {"**": R.mean, ("in", "h"): R.sum.total, tapax.at("in", step=1): R.norm}
    log, _ = watched(step, (jnp.float32(-3), jnp.array([False, True])), values=asked, grads=None)
    ((_, record),) = log
    # by hand: -3 -> -2, -1 -> (no) -> 0, 1, 2, 3; 3 -> 4, 5 -> 10, which ends the loop
    assert record == {
        "in[0,0]/value_mean": -2.0, "in[0,1]/value_mean": -1.0,
        "in[1,0]/value_mean": 4.0, "in[1,1]/value_mean": 5.0,
        "in/value_sum.total": 6.0, "in[0,1]/value_norm": 1.0, "in[1,1]/value_norm": 5.0,
        "yes[1]/value_mean": 10.0, "w[0]/value_mean": 1.5,
        "h[0]/value_mean": 3.0, "h[1]/value_mean": 10.0, "h/value_sum.total": 13.0,
        "h@1[0]/value_mean": 3.0, "h@1[1]/value_mean": 10.0, "h@1/value_sum.total": 13.0,
        "p:a.0/value_mean": 10.0,
    }  # fmt: skip


def test_iterations_that_were_asked_for_keep_their_numbers():
    step = lambda x: lax.scan(lambda c, _: (tapax.sow(c + 1, "h"), None), x, length=6)[0]
    asked = {tapax.at("h", step=slice(1, None, 2)): reduce.sum, tapax.at("h", step=-1): reduce.mean}
    log, _ = watched(step, (0.0,), values=asked, grads=None)
    numbers = {f"h[{i}]/value_sum": i + 1.0 for i in (1, 3, 5)}
    assert list(log) == [(0, {**numbers, "h[5]/value_mean": 6.0})]


@pytest.mark.many
def test_devices_of_a_mesh_give_the_numbers_of_one(mesh):
    P = jax.sharding.PartitionSpec
    place = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))
    asked = {"values": {"**": [reduce.rms, reduce.minmax]}, "grads": "**"}
    one, _ = watched(scanned, (W.copy(), jnp.zeros_like(W), X), **asked)
    args = place(W, None, None, "b"), place(jnp.zeros_like(W), None, None, "b"), place(X[:4], "a")
    many, _ = watched(scanned, args, **asked)
    one, _ = watched(scanned, (W.copy(), jnp.zeros_like(W), X[:4]), **asked)
    ((_, expected),), ((_, found),) = one, many
    assert found.keys() == expected.keys()
    for name in found:
        assert_close(found[name], expected[name], err_msg=name)


def test_a_step_is_traced_once_for_each_shape():
    traces = []

    @functools.partial(jax.jit, static_argnames=("depth",))
    def step(x, number, depth, scale=1.0):
        traces.append(x.shape)
        for _ in range(depth):
            x = tapax.sow(x * scale + number, "h")
        return x

    log = Log()
    with monitor(step, every=1, values={"h": reduce.last}, grads=None, to=log) as m:
        for i in range(5):
            m(jnp.zeros(2), i, depth=2, scale=0.5 * i)
        assert len(traces) == 2  # those of the step and of the copy
        for i in range(5):
            m(jnp.zeros(3), i, depth=2, scale=0.5 * i)
        assert len(traces) == 4
    np.testing.assert_array_equal(log.__iter__().__next__()[1]["h@1/value_last"], [0.0, 0.0])
    np.testing.assert_array_equal(list(log)[4][1]["h@1/value_last"], [12.0, 12.0])


def test_monitors_that_ask_for_the_same_share_what_was_traced():
    traces = []

    @jax.jit
    def step(x):
        traces.append(1)
        return tapax.sow(2 * x, "h")

    for _ in range(3):
        log, _ = watched(step, (jnp.ones(2),), alerts=alert.nonfinite())
        assert log["h/value_rms"].values.tolist() == [2.0]
    assert len(traces) == 2


def test_modules_may_be_narrowed():
    class Net(nnx.Module):
        def __init__(self):
            self.a, self.b = (nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2))

        def __call__(self, x):
            return self.b(tapax.sow(self.a(x), "h"))

    step = nnx.jit(lambda net, x: net(x))
    for modules, names in ((False, []), ("**/a", ["Net/a"]), (True, ["Net", "Net/a", "Net/b"])):
        log, _ = watched(step, (Net(), X), modules=modules)
        assert sorted(log.names) == sorted(f"{name}/value_rms" for name in [*names, "Net/h"])


def test_a_checkpoint_changes_no_number():
    def step(kept, x):
        def body(h, w):
            return tapax.sow(jnp.tanh(h @ w), "h"), None

        def loss(w):
            h, _ = lax.scan(body if kept else jax.checkpoint(body), x, w)
            return jnp.sum(h**2)

        return jax.grad(loss)(W)

    (((_, a),), _), (((_, b),), _) = (watched(step, (kept, X)) for kept in (True, False))
    assert a.keys() == b.keys() == {f"h[{i}]/{k}_rms" for i in range(3) for k in ("value", "grad")}
    for name in a:
        assert_close(a[name], b[name])


def test_a_python_step_with_a_counter_is_traced_once():
    traces = []

    def step(x, number):
        traces.append(number)
        return tapax.sow(x * number, "h")

    log, _ = watched(step, *((jnp.ones(2), i) for i in range(5)))
    assert log["h/value_rms"].values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert len(traces) == 5 + 1


def test_results_of_the_step_are_not_computed(capfd):
    """The watched copy returns only the statistics."""

    @jax.jit
    def step(x):
        h = tapax.sow(jnp.tanh(x), "h")
        return jax.pure_callback(lambda v: (print("called"), v)[1], h, h)

    m = monitor(step, every=1)
    m(jnp.ones(3)).block_until_ready()
    m.close()
    assert capfd.readouterr().out == "called\n"


def test_scalars_logged_after_the_end_are_warned_of_once():
    log = tapax.Log()
    with tapax.monitor(lambda x: tapax.sow(2 * x, "h"), every=1, to=log) as watched:
        loss = watched(jnp.float32(1))
    with pytest.warns(UserWarning, match="is closed, so no record contains what you log now"):
        watched.log(loss=loss)
    watched.log(loss=loss)
    assert "loss" not in log.names


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".safetensors"])
@pytest.mark.parametrize("name", ["a\nb", "h[1,]", "h/value_rms", "0"])
def test_names_of_any_characters_are_recorded(tmp_path, name, suffix):
    path = tmp_path / f"run{suffix}"
    step = jax.jit(lambda x: tapax.sow(x, name))
    with tapax.monitor(step, every=1, values=["**"], grads=None, to=path) as watched:
        for x in (1.0, 2.0):
            watched(x)
    log = tapax.open(path)
    assert log.names == [f"{name}/value_rms"]
    assert log[f"{name}/value_rms"].values.tolist() == [1.0, 2.0]
    assert list(log.steps) == [0, 1]
