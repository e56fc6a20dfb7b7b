"""Resumed runs continue in an existing log, and its reader returns their steps in order."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax

pytestmark = pytest.mark.once

FORMATS = ["jsonl", "parquet", "safetensors", "memory"]


@jax.jit
def step(x):
    return tapax.sow(x, "h") + 1


def train(to, calls, first=0.0, **options):
    """Call a monitored step, which logs the number of earlier calls."""
    with tapax.monitor(step, every=5, to=to, grads=None, **options) as watched:
        x = jnp.float32(first)
        for _ in range(calls):
            x = watched(x)
    return watched


@pytest.fixture(params=FORMATS)
def log(request, tmp_path):
    """Return a destination for the log, and a function that reads it."""
    if request.param == "memory":
        log = tapax.Log()
        return log, lambda: log
    if request.param == "parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"run.{request.param}"
    return path, lambda: tapax.open(path)


def series(log):
    found = log["h/value_rms"]
    assert found.steps.tolist() == log.steps.tolist() == [step for step, _ in log]
    return dict(zip(found.steps.tolist(), found.values.tolist(), strict=True))


def test_a_run_goes_on_after_the_last_step_of_its_log(log):
    to, read = log
    train(to, 12)
    assert series(read()) == {0: 0, 5: 5, 10: 10}
    with pytest.warns(
        UserWarning, match=r"contains steps 0 to 10.*numbered from 15.*`start`"
    ) as found:
        watched = train(to, 12, 100.0)
    assert found[0].filename == __file__
    assert series(read()) == {0: 0, 5: 5, 10: 10, 15: 100, 20: 105, 25: 110}
    assert watched.step_number == 15 + 12


def test_the_first_step_may_be_given(log):
    to, read = log
    train(to, 12)
    train(to, 12, 12.0, start=12)
    assert series(read()) == {0: 0, 5: 5, 10: 10, 15: 15, 20: 20}


def test_a_run_from_an_earlier_step_replaces_what_came_after_it(log):
    to, read = log
    train(to, 12)
    words = r"step 5 came after step 10.*later records replace the earlier ones from step 5 on"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train(to, 4, 100.0, start=4)  # a log in memory warns here, a log on disk when it is read
        found = series(read())
    assert found == {0: 0, 5: 101}
    [warning] = warned
    assert re.search(words, str(warning.message))
    if not isinstance(to, tapax.Log):
        assert warning.filename == __file__ and f"{str(to)!r}" in str(warning.message)


def test_an_old_log_with_two_runs_is_read_as_the_last_one(tmp_path):
    path = tmp_path / "run.jsonl"
    write = tapax.sink.jsonl(path)
    for run in (1.0, 2.0):
        for step in (0, 5, 10):
            write(step, {"a/value_rms": run})
    with pytest.warns(UserWarning, match="step 0 came after step 10"):
        log = tapax.open(path)
    assert log.steps.tolist() == [0, 5, 10] and log["a/value_rms"].values.tolist() == [2.0] * 3


def test_a_name_that_only_the_replaced_run_had_is_gone():
    log = tapax.Log()
    log(0, {"a": 1.0})
    log(5, {"a": 1.0, "once": 1.0})
    with pytest.warns(UserWarning, match="step 5 came after step 5"):
        log(5, {"a": 2.0})
    assert log.names == ["a"] and "once" not in log
    with pytest.raises(KeyError, match="has no 'once'"):
        log["once"]
    log(5, {"a": 3.0})  # does not warn a second time
    assert log["a"].values.tolist() == [1.0, 3.0]


def test_runs_with_other_names_share_a_log_in_the_order_of_steps(log):
    to, read = log
    sinks = [to, to] if isinstance(to, tapax.Log) else [getattr(tapax.sink, to.suffix[1:])(to)] * 2
    for sink, name in zip(sinks, "ab", strict=True):
        for step in (0, 10, 20):
            sink(step + 5 * (name == "b"), {name: float(step)})
    assert read().steps.tolist() == [0, 5, 10, 15, 20, 25]
    assert read().names == ["a", "b"]
    for name in "ab":
        assert read()[name].values.tolist() == [0.0, 10.0, 20.0]
    with pytest.warns(UserWarning, match="contains steps 0 to 25.*numbered from 30"):
        train(to, 1)


@pytest.mark.parametrize("first", [0, 3, 10, 11, 999])
def test_every_process_watches_the_same_calls_wherever_the_log_is(first):
    log = tapax.Log()
    log(first, {"a": 1.0})
    with pytest.warns(UserWarning, match="numbered from"):
        watched = train(log, 0)
    assert watched.step_number > first and watched.step_number % 5 == 0
    assert watched.step_number - first <= 5


def test_a_start_is_checked_at_once():
    with pytest.raises(ValueError, match="`start` must be at least 0, but is -1"):
        tapax.monitor(step, start=-1)
    for wrong in (1.5, True, "1"):
        with pytest.raises(TypeError, match="`start` must be a number of steps"):
            tapax.monitor(step, start=wrong)
    watched = train(None, 3, start=np.int64(7))
    assert watched.step_number == 10
