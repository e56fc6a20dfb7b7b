"""User scalars in the records of a monitor, and the steps of a run in W&B."""

import gc
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tapax import sink

pytestmark = pytest.mark.once


@jax.jit
def step(x):
    return tapax.sow(x, "h") + 1, 2 * x


def run(log, calls, every=2, **options):
    with tapax.monitor(step, every=every, grads=None, to=log) as watched:
        x = jnp.float32(0)
        for i in range(calls):
            x, loss = watched(x)
            watched.log(loss=loss, rate=0.1 * i, **options)
    return watched


def test_scalars_are_in_the_record_of_the_call_before():
    log = tapax.Log()
    run(log, 5)
    assert [(number, sorted(record)) for number, record in log] == [
        (0, ["h/value_rms", "loss", "rate"]),
        (2, ["h/value_rms", "loss", "rate"]),
        (4, ["h/value_rms", "loss", "rate"]),
    ]
    assert log["loss"].values.tolist() == [0.0, 4.0, 8.0]
    np.testing.assert_allclose(log["rate"].values, [0.0, 0.2, 0.4])


def test_scalars_of_calls_that_are_not_watched_are_kept_if_asked_for():
    log = tapax.Log()
    run(log, 5, always=True)
    assert log.steps.tolist() == [0, 1, 2, 3, 4]
    assert log["loss"].values.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert log["h/value_rms"].steps.tolist() == [0, 2, 4]


def test_run_goes_on_after_scalars_that_were_always_logged(tmp_path):
    path = tmp_path / "run.jsonl"
    run(path, 4, always=True)
    with pytest.warns(UserWarning, match="contains steps 0 to 3.*numbered from 4"):
        watched = run(path, 2)
    assert watched.step_number == 6


def test_names_that_are_not_identifiers_go_in_a_mapping():
    log = tapax.Log()
    with tapax.monitor(step, every=1, grads=None, to=log) as watched:
        watched(1.0)
        watched.log({"train/loss": 1}, loss=np.float16(2.0))
        watched.log(loss=True)
    ((_, record),) = list(log)
    assert record == {"h/value_rms": 1.0, "train/loss": 1.0, "loss": 1.0}


def test_arrays_that_the_next_step_donates_are_logged():
    donating = jax.jit(lambda x: tapax.sow(x, "h") + 1, donate_argnums=0)
    log = tapax.Log()
    with tapax.monitor(donating, every=1, grads=None, to=log) as watched:
        x = jnp.float32(1)
        for _ in range(3):
            x = watched(x)
            watched.log(x=x)
    assert log["x"].values.tolist() == [2.0, 3.0, 4.0]


def test_record_is_delivered_if_the_monitor_is_dropped():
    log = tapax.Log()
    watched = tapax.monitor(step, every=1, grads=None, to=log)
    watched(1.0)
    watched.log(loss=3.0)
    delivery = watched._delivery
    del watched
    gc.collect()
    delivery._thread.join(30)
    ((_, record),) = list(log)
    assert record["loss"] == 3.0


def test_a_value_that_is_not_a_scalar_raises():
    with tapax.monitor(step, every=1, grads=None) as watched:
        with pytest.raises(RuntimeError, match="has not been called yet"):
            watched.log(loss=1.0)
        watched(1.0)
        with pytest.raises(TypeError, match=r"'loss' is an array of shape \[3\]"):
            watched.log(loss=jnp.ones(3))
        with pytest.raises(TypeError, match="takes real numbers, but 'loss' is"):
            watched.log(loss="1.0")
        with pytest.raises(TypeError, match="takes real numbers, but 'loss' is"):
            watched.log(loss=1j)
        with pytest.raises(TypeError, match="traced value 'loss'"):
            jax.jit(lambda x: watched.log(loss=x))(1.0)


def test_closed_monitor_logs_nothing():
    log = tapax.Log()
    watched = run(log, 2)
    watched(1.0)
    with pytest.warns(UserWarning, match="is closed, so no record contains what you log now"):
        watched.log(loss=1.0, always=True)
    assert len(log) == 1


class Run:
    """A fake W&B run that raises wherever W&B does."""

    def __init__(self, resumed=False, summary=()):
        self.logged, self.metrics, self.resumed = [], {}, resumed
        self.summary = dict(summary)

    def log(self, record, step=None):
        assert step is None, "W&B drops records of a step before its own"
        assert record.keys() <= self.metrics.keys(), "plotted over another step"
        self.logged.append(record)

    def define_metric(self, name, step_metric=None):
        assert name not in self.metrics
        self.metrics[name] = step_metric


def test_every_number_in_wandb_is_plotted_over_the_step_of_the_monitor(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=None))
    kept = Run()
    with tapax.monitor(step, every=2, grads=None, to=sink.wandb(kept)) as watched:
        for _ in range(4):
            watched(1.0)
            watched.log(loss=1.0)
    assert kept.metrics.pop("monitor/step") is None
    assert kept.metrics == {"h/value_rms": "monitor/step", "loss": "monitor/step"}
    assert [record["monitor/step"] for record in kept.logged] == [0, 2]


def test_resumed_run_of_wandb_goes_on_after_its_last_step(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=None))
    kept = Run(resumed=True, summary={"monitor/step": 7})
    with pytest.warns(UserWarning, match=r"run of wandb\(\) contains steps up to 7.*from 8"):
        watched = tapax.monitor(step, every=2, grads=None, to=sink.wandb(kept))
    assert watched.step_number == 8
    watched.close()
    fresh = tapax.monitor(step, every=2, grads=None, to=sink.wandb(Run(summary=kept.summary)))
    assert fresh.step_number == 0
    fresh.close()
