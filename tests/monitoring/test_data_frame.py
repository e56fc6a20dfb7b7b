"""A log as a pandas data frame."""

import subprocess
import sys

import numpy as np
import pytest

import tapax
from tapax import sink

pd = pytest.importorskip("pandas")


def test_a_frame_has_a_row_for_each_step():
    log = tapax.Log()
    log(0, {"net/h/value_rms": 1.0, "net/h/grad_rms": 0.5})
    log(100, {"net/h/value_rms": 2.0, "late": np.inf})
    log(200, {})
    frame = log.to_pandas()
    expected = pd.DataFrame(
        {
            "net/h/value_rms": [1.0, 2.0, np.nan],
            "net/h/grad_rms": [0.5, np.nan, np.nan],
            "late": [np.nan, np.inf, np.nan],
        },
        index=pd.Index([0, 100, 200], name="step"),
    )
    pd.testing.assert_frame_equal(frame, expected)


def test_arrays_have_a_column_for_each_element():
    log = tapax.Log()
    log(0, {"units": np.array([[1.0, 2.0], [3.0, 4.0]]), "counts": np.array([1, 2])})
    log(1, {"units": np.array([[5.0, 6.0], [7.0, np.nan]]), "counts": np.array([3, 4, 5])})
    frame = log.to_pandas()
    names = ["units[0,0]", "units[0,1]", "units[1,0]", "units[1,1]"]
    assert list(frame) == [*names, "counts[0]", "counts[1]", "counts[2]"]
    np.testing.assert_array_equal(frame[names], [[1, 2, 3, 4], [5, 6, 7, np.nan]])
    np.testing.assert_array_equal(frame["counts[2]"], [np.nan, 5])


def test_histograms_have_a_column_for_each_bin():
    log, edges = tapax.Log(), np.array([0.0, 1.0, np.inf])
    for step in range(2):
        log(step, {"h": tapax.Histogram(np.array([step, 3.0]), edges), "rms": 1.0})
    frame = log.to_pandas()
    assert list(frame) == ["h[0]", "h[1]", "rms"]
    np.testing.assert_array_equal(frame[["h[0]", "h[1]"]], [[0, 3], [1, 3]])
    assert frame.attrs["edges"] == {"h": (0.0, 1.0, np.inf)}
    assert len(pd.concat([frame, log.to_pandas()])) == 4


def test_bins_that_change_are_refused():
    log = tapax.Log()
    for step, end in enumerate((2.0, 20.0)):
        log(step, {"h": tapax.Histogram(np.array([step, 3.0]), np.array([0.0, 1.0, end]))})
    with pytest.raises(ValueError, match="The edges of 'h' change at step 1"):
        log.to_pandas()


def test_two_records_of_one_step_are_one_row():
    log = tapax.Log()
    for name in ("a", "b"):
        for step in (0, 10):
            log(step, {name: float(step)})
    frame = log.to_pandas()
    assert frame.index.tolist() == [0, 10]
    np.testing.assert_array_equal(frame, [[0, 0], [10, 10]])


def test_a_log_from_disk_becomes_a_frame(tmp_path):
    write = sink.jsonl(tmp_path / "run.jsonl")
    for step in range(3):
        write(step, {"loss": 1.0 / (1 + step)})
    frame = tapax.open(tmp_path / "run.jsonl").to_pandas()
    np.testing.assert_allclose(frame["loss"], [1, 1 / 2, 1 / 3])


def test_an_empty_log_is_an_empty_frame():
    frame = tapax.Log().to_pandas()
    assert frame.empty and frame.index.name == "step" and frame.index.dtype == np.int64


@pytest.mark.once
def test_pandas_is_imported_for_frames_alone():
    code = """
import sys, tapax
log = tapax.Log()
log(0, {"a": 1.0})
repr(log)
assert "pandas" not in sys.modules
sys.modules["pandas"] = None
try:
    log.to_pandas()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = "A data frame needs pandas, which is not installed: pip install pandas.\n"
    assert done.stdout == said
