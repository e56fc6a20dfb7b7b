"""The program of each of two processes: every public function, on arrays that span both.

`python -m tests.models.two_processes PROCESS PORT FOLDER`. Only process 0 prints results: if
printing communicated, it would wait forever.
"""

import os
import sys
import traceback
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tapax

PROCESS, PORT, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
X = np.linspace(0.1, 1.1, 32, dtype=np.float32).reshape(8, 4)
W = np.linspace(-0.5, 0.7, 16, dtype=np.float32).reshape(4, 4)


def make_loss(mark):
    """Make the loss of a small network; `mark` sees a value and its name."""

    def loss(w, x):
        h = mark(jnp.tanh(x @ w), "h")

        def layer(h, i):
            return mark(jnp.tanh(h @ w), "layer", i), None

        h, _ = jax.lax.scan(layer, h, jnp.arange(3))
        return jnp.mean(mark(h, "out") ** 2)

    return loss


def sow(x, name, i=None):
    return tapax.sow(x, name)


LOSS = make_loss(sow)


def reference():
    """Compute values in NumPy, and gradients in JAX with respect to numbers added to them."""
    h = np.tanh(X @ W)
    layers = [h]
    for _ in range(3):
        layers.append(np.tanh(layers[-1] @ W))

    def shifted(shifts):
        return make_loss(lambda x, name, i=None: x + shifts[name][() if i is None else i])(W, X)

    values = {"h": h, "layer": np.stack(layers[1:]), "out": layers[-1]}
    grads = jax.grad(shifted)({name: jnp.zeros(x.shape) for name, x in values.items()})
    return values, {name: np.asarray(g) for name, g in grads.items()}


def check(found, expected):
    """Compare the shards of an array on this process."""
    assert found.shape == expected.shape
    for shard in found.addressable_shards:
        np.testing.assert_allclose(shard.data, expected[shard.index], rtol=2e-5, atol=1e-6)


def check_all(found, expected):
    assert list(found) == ["h", "layer", "out"]
    for name, x in found.items():
        check(x, expected[name])


def rms(x):
    return np.sqrt(np.mean(np.square(x, dtype=np.float64)))


def check_looking(mesh, w, x):
    values, grads = reference()
    step = jax.jit(jax.value_and_grad(LOSS))
    (loss, _), taps = tapax.capture(step)(w, x)
    assert not taps.values["h"].is_fully_addressable
    check_all(taps.values, values)
    check_all(taps.grads, grads)
    np.testing.assert_allclose(loss, np.mean(values["out"] ** 2), rtol=1e-5)
    assert tapax.sites(step)(w, x).names == ["h", "layer", "out"]
    check_all(tapax.grad(LOSS)(w, x), grads)
    value, found = tapax.value_and_grad(LOSS)(w, x)
    check_all(found, grads)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    small = tapax.capture(step, values={"**": tapax.reduce.rms}, grads=None)(w, x)[1]
    np.testing.assert_allclose(small.to_host().values["h"], rms(values["h"]), rtol=1e-5)
    members = tapax.nn.members(taps, 2)
    masked = tapax.capture(
        jax.jit(
            jax.vmap(
                lambda x: jax.lax.cond(x[0] > 0.5, lambda x: tapax.sow(x, "large"), lambda x: x, x)
            )
        ),
        grads=None,
    )(x)[1]
    if PROCESS == 0:
        check_text(taps, values)
        assert "8 of 8" not in repr(masked) and "of 4*" in repr(masked)
        assert "2 members" in repr(members)
    return taps


def check_text(taps, values):
    text = repr(taps)
    assert "* computed from the elements of process 0 of 2" in text
    local = {str(s.index): np.ravel(s.data) for s in taps.values["h"].addressable_shards}
    part = np.concatenate(list(local.values()))
    assert part.size == 16
    assert f" {rms(part):.3g}* " in text and f">{rms(part):.3g}*<" in taps._repr_html_()
    import treescope

    assert "layer" in treescope.render_to_text(taps)
    with pytest.raises(ValueError, match="this process has only a part"):
        taps.plot()
    uses = taps.to_host, lambda: taps.save(FOLDER / "taps"), lambda: tapax.diff(taps, taps)
    for use in uses:
        with pytest.raises(ValueError, match="it is divided over several processes, and process 0"):
            use()


def check_changing(taps, w, x):
    values, _ = reference()
    plain = make_loss(lambda x, name, i=None: x)

    def after(h):
        for _ in range(3):
            h = np.tanh(h @ W)
        return np.mean(h**2)

    close = np.testing.assert_allclose
    close(tapax.edit(LOSS, values={"h": lambda h: 3 * h})(w, x), after(3 * values["h"]), rtol=1e-5)
    close(tapax.edit(LOSS, values={"h": taps.values["h"]})(w, x), plain(W, X), rtol=1e-5)
    half = values["h"] / 2
    close(tapax.edit(LOSS, values={"h": half})(w, x), after(half), rtol=1e-5)
    doubled = tapax.edit(jax.grad(LOSS), grads={"out": lambda g: 2 * g})(w, x)
    check(doubled, 2 * np.asarray(jax.grad(plain)(W, X)))
    check(tapax.prefix(LOSS, "h")(w, x), values["h"])
    close(tapax.suffix(LOSS, "h")(taps.values["h"], w, x), plain(W, X), rtol=1e-5)
    zeros = tapax.perturbations(LOSS)(w, x)
    assert all(not np.any(z) for z in zeros.values())
    check_all(jax.grad(tapax.perturbed(LOSS))(zeros, w, x), reference()[1])


def check_statistics(w, x):
    values, grads = reference()
    reduce = tapax.reduce
    expected = {
        reduce.rms: rms,
        reduce.mean: np.mean,
        reduce.var: np.var,
        reduce.sum: np.sum,
        reduce.norm: lambda x: np.sqrt(np.sum(x**2)),
        reduce.minmax: lambda x: [x.min(), x.max()],
        reduce.zeros: lambda x: np.mean(x == 0),
        reduce.nonfinite: lambda x: np.sum(~np.isfinite(x)),
        reduce.topk(3): lambda x: np.sort(np.abs(x).ravel())[::-1][:3],
        reduce.histogram((-1.0, 0.0, 1.0)): lambda x: np.histogram(x, (-1, 0, 1))[0],
    }
    for reducer, compute in expected.items():
        step = jax.jit(jax.grad(LOSS))
        _, taps = tapax.capture(step, values={"h": reducer}, grads={"h": reducer})(w, x)
        for found, whole in ((taps.values, values["h"]), (taps.grads, grads["h"])):
            [number] = found.values()
            np.testing.assert_allclose(number, compute(whole), rtol=1e-4, atol=1e-6)
        if PROCESS == 0:
            assert "computed from" not in repr(taps)
        if reducer is reduce.rms:
            taps.plot()


def check_nonfinite(mesh, x):
    assert tapax.find_nonfinite(LOSS)(x[:4], x) is None
    finding = tapax.find_nonfinite(lambda x: jnp.log(tapax.sow(x - 0.2, "h")))(x)
    below = np.argwhere(X - np.float32(0.2) < 0)
    assert (finding.operation, finding.count) == ("log", len(below))
    assert finding.position == tuple(below[0])
    spec = PartitionSpec("d")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
    def last_device(x):  # the last device belongs to process 1
        return jnp.log(jnp.where(jax.lax.axis_index("d") == 3, -x, x))

    assert tapax.find_nonfinite(last_device)(x).device == {"d": 3}
    finding = tapax.find_nonfinite(lambda x: 2 * x)(jnp.log(0.2 - x))
    assert (finding.operation, finding.count) == ("argument", 32 - len(below))


def check_monitor(w, x):
    step = jax.jit(jax.value_and_grad(LOSS))
    values, _ = reference()
    log, alerts = tapax.Log(), tapax.alert.above("h", value_rms=1e-3)
    units = tapax.reduce.Reducer(
        init=lambda x: jnp.zeros(x.shape[:1]),
        update=lambda state, x: state + x.sum(1),
        combine=lambda a, b: a + b,
        finish=lambda state: state,
        name="rows",
    )
    statistics = {"h": [tapax.reduce.rms, units]}
    options = {"every": 2, "values": statistics, "grads": None}
    own = FOLDER / f"run-{PROCESS}.jsonl"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tapax.alert.AlertWarning)
        to = [log, FOLDER / "run.jsonl"]
        with tapax.monitor(step, to=to, alerts=alerts, **options) as watched:
            for _ in range(5):
                watched(w, x)
    assert [event.step for event in watched.alerts] == [0]
    assert log.steps.tolist() == ([] if PROCESS else [0, 2, 4])
    if PROCESS == 0:
        np.testing.assert_allclose(log["h/value_rms"].values, 3 * [rms(values["h"])], rtol=1e-5)
        rows = log["h/value_rows"].values
        np.testing.assert_allclose(rows, 3 * [values["h"].sum(1)], rtol=1e-4)
    # The processes need not see the same log: they watch the same calls.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tapax.monitor(step, to=to, **options) as watched:
            for _ in range(3):
                watched(w, x)
    assert log.steps.tolist() == ([] if PROCESS else [0, 2, 4, 6, 8])
    with tapax.monitor(step, to=own, every_process=True, **options) as watched:
        watched(w, x)
    assert tapax.open(own).steps.tolist() == [0]


def check_stream(w, x):
    @jax.jit
    def train(w, x):
        def body(w, _):
            grad = jax.grad(lambda w: jnp.sum(tapax.sow(jnp.tanh(x @ w), "h") ** 2))(w)
            return w - 0.01 * grad, None

        return jax.lax.scan(body, w, None, 5)[0]

    log = tapax.Log()
    with tapax.stream(train, every=2, to=log) as streamed:
        streamed(w, x)
    assert log.steps.tolist() == ([] if PROCESS else [0, 2, 4])
    weights, data, expected = np.asarray(W, np.float64), np.asarray(X, np.float64), []
    for _ in range(5):
        h = np.tanh(data @ weights)
        expected.append(rms(h))
        weights = weights - 0.01 * data.T @ (2 * h * (1 - h**2))
    if PROCESS == 0:
        np.testing.assert_allclose(log["h/value_rms"].values, expected[::2], rtol=1e-4)


def check_parameters(w, x):
    def step(w, x):
        return w - 0.1 * jax.grad(LOSS)(w, x)

    values, _ = reference()
    for exact in (True, False):
        log = tapax.Log()
        options = {"grads": None, "params": True, "to": log, "exact": exact}
        with tapax.monitor(jax.jit(step), every=1, **options) as watched:
            new = watched(w, x)
        assert new.sharding.is_equivalent_to(w.sharding, w.ndim)
        if PROCESS == 0:
            ((_, record),) = list(log)
            np.testing.assert_allclose(record["h/value_rms"], rms(values["h"]), rtol=1e-5)
            np.testing.assert_allclose(record["w/param_rms"], rms(W), rtol=1e-5)
            ratio = 0.1 * record["w/param_grad_rms"] / rms(W)
            np.testing.assert_allclose(record["w/update_ratio"], ratio, rtol=1e-3)


def main():
    jax.distributed.initialize(f"localhost:{PORT}", 2, PROCESS)
    assert (jax.process_count(), jax.device_count()) == (2, 4)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    x, w = (
        jax.make_array_from_callback(a.shape, NamedSharding(mesh, spec), lambda i, a=a: a[i])
        for a, spec in ((X, PartitionSpec("d")), (W, PartitionSpec(None, "d")))
    )
    taps = check_looking(mesh, w, x)
    check_changing(taps, w, x)
    check_statistics(w, x)
    check_nonfinite(mesh, x)
    check_monitor(w, x)
    check_stream(w, x)
    check_parameters(w, x)
    from flax import nnx

    assert "flax.Linear" in repr(tapax.modules(nnx.Linear(4, 4, rngs=nnx.Rngs(0))))
    print("done")


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # without waiting for the other process, which may wait for this one
