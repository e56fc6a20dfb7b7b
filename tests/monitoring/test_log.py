"""Logs in memory and on disk."""

import json
import math
import re
import struct

import jax.numpy as jnp
import numpy as np
import pytest

from tapax import open as open_log
from tapax import sink
from tapax._results.flow import Flow, FlowSite
from tapax.monitoring._log import Log, flow_of_log
from tapax.monitoring._records import AlertEvent, Histogram

pytestmark = pytest.mark.once

HISTOGRAM = Histogram(np.array([1.0, 2.0, 0.0]), np.array([0.0, 1.0, 2.0, math.inf]))


def numbers(step):
    """Make a record with every kind of number, names that come and go, and one changing shape."""
    record = {
        "Net/mlp[3]/value_rms": 1.0 + step,
        "Net/mlp[3]/grad_norm": [math.nan, math.inf, -math.inf, 1e-300][step % 4],
        "Net/h/value_histogram": HISTOGRAM,
        "Net/h/value_zeros": np.array([[0.5, math.nan], [math.inf, step]]),
    }
    if step == 2:
        return {}
    if step % 5 == 3:
        del record["Net/mlp[3]/grad_norm"]
    if step == 6:
        record["Net/h/value_zeros"] = np.ones(3)
    return record


def assert_same(found, expected):
    assert [step for step, _ in found] == [step for step, _ in expected]
    for (_, a), (_, b) in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for x, y in ((a[name], b[name]) for name in b):
            assert type(x) is type(y)
            for one, other in (
                ((x.counts, y.counts), (x.edges, y.edges)) if isinstance(x, Histogram) else [(x, y)]
            ):
                np.testing.assert_array_equal(one, other)


def test_numbers_of_any_type_are_floats_in_a_log():
    log = Log()
    log(0, {"loss": np.float32(0.5), "late": jnp.bfloat16(2), "count": 3, "ok": True})
    log(1, {"loss": jnp.float32(0.25), "units": jnp.arange(3)})
    (_, first), (_, second) = log
    assert all(type(x) is float for x in first.values()) and type(second["loss"]) is float
    assert log["loss"].values.tolist() == [0.5, 0.25]
    assert second["units"].tolist() == [0, 1, 2] and "2 records" in repr(log)
    with pytest.raises(TypeError, match="A record has numbers by name, but 'loss' is 'low'"):
        log(2, {"loss": "low"})


def test_numbers_of_all_magnitudes_have_a_trend():
    log = Log()
    for step, x in enumerate((-1.7e308, 0.0, 1.7e308)):
        log(step, {"x": x})
    assert "▁" in repr(log) and "█" in repr(log)


FORMATS = ["jsonl", "parquet", "safetensors"]


@pytest.fixture(params=FORMATS)
def kind(request):
    if request.param == "parquet":
        pytest.importorskip("pyarrow")
    return request.param


@pytest.fixture
def path(kind, tmp_path):
    return tmp_path / "logs" / f"run.{kind}"


def test_a_log_has_series():
    log = Log()
    for step in range(0, 300, 100):
        record = {"a/value_rms": float(step), "h/value_histogram": HISTOGRAM}
        log(step, record | ({"late/value_rms": 1.0} if step else {}))
    assert len(log) == 3 and log.names == ["a/value_rms", "h/value_histogram", "late/value_rms"]
    assert log.steps.tolist() == log["a/value_rms"].steps.tolist() == [0, 100, 200]
    assert log["late/value_rms"].steps.tolist() == [100, 200] and len(log["late/value_rms"]) == 2
    assert log["a/value_rms"].values.tolist() == [0.0, 100.0, 200.0]
    assert log["a/value_rms"].counts is None
    np.testing.assert_array_equal(log["h/value_histogram"].counts, [[1, 2, 0]] * 3)
    np.testing.assert_array_equal(log["h/value_histogram"].edges, HISTOGRAM.edges)
    assert "a/value_rms" in log and "b" not in log
    with pytest.raises(KeyError, match=r"has no 'a/value_rm'. The nearest names are 'a/value_rms'"):
        log["a/value_rm"]
    with pytest.raises(KeyError, match="It contains no numbers yet"):
        Log()["a"]
    with pytest.raises(TypeError, match=r"takes the name of a number, .* not 0 of type int"):
        log[0]


def test_a_name_that_changes_its_shape_has_no_series():
    log = Log()
    log(0, {"a": np.ones(2)})
    log(1, {"a": np.ones(3)})
    with pytest.raises(ValueError, match="the edges of 'a' change within the log"):
        log["a"]


def test_a_log_prints_as_a_table():
    log = Log()
    for step in range(200):
        log(step, {"Net/mlp[3]/value_rms": math.exp(step), "bad": math.nan if step > 99 else 1.0})
    log.alert(AlertEvent(0, "x", "value_rms", 1.0, "x"))
    text = repr(log)
    assert "200 records, steps 0 to 199, 1 alert" in text
    row = next(line for line in text.splitlines() if "Net/mlp[3]/value_rms" in line)
    assert re.search(r"│ +1 │ 2.66e\+86 │ ▁.*█ │", row)
    assert "▄▄▄▄▄▄▄▄!!!!!!!!" in text
    many = Log()
    many(0, {f"site{i}": 1.0 for i in range(1000)})
    assert "... 940 more ..." in repr(many) and "site999" in repr(many)
    assert len(repr(many).splitlines()) < 80
    assert "0 records" in repr(Log())


def test_reading_returns_the_written_data(kind, path):
    write, expected = getattr(sink, kind)(path), Log()
    for step in range(300):
        write(step, numbers(step))
        expected(step, numbers(step))
    events = [
        AlertEvent(3, "Net/h", "grad_rms", math.inf, "Æ"),
        AlertEvent(9, "b", "value_rms", 1.0, "two"),
    ]
    for event in events:
        write.alert(event)
    log = open_log(path)
    assert_same(log, expected)
    assert log.names == expected.names and log.alerts == events


def test_every_record_is_on_disk_at_once(kind, path):
    write = getattr(sink, kind)(path)
    assert len(open_log(path)) == 0
    for step in range(5):
        write(step, {"a": float(step)})
        assert open_log(path)["a"].values.tolist() == [float(i) for i in range(step + 1)]


def test_the_flow_of_a_program_is_written_with_its_first_record(kind, tmp_path):
    write = getattr(sink, kind)(tmp_path / f"run.{kind}")
    flows = [Flow((FlowSite(name, (2,), "float32"),), ()) for name in "ab"]
    for step, (flow, units) in enumerate(zip(flows, (2, 3), strict=True)):
        write._write_flow(flow)
        write(step, {"units": np.zeros(units)})  # another shape needs another part in safetensors
    log = open_log(tmp_path / f"run.{kind}")
    assert flow_of_log(log) == flows[1] and len(log) == 2


def test_a_log_is_continued(kind, path):
    for start in (0, 10, 20):
        write = getattr(sink, kind)(path)
        for step in range(start, start + 10):
            write(step, {"a": float(step)})
    assert open_log(path)["a"].steps.tolist() == list(range(30))


def test_two_runs_in_one_log_lose_nothing(kind, path):
    first, second = (getattr(sink, kind)(path) for _ in range(2))
    for step in range(10):
        first(step, {"a": 0.0})
        second(step, {"b": 1.0})
    log = open_log(path)
    assert log["a"].steps.tolist() == log["b"].steps.tolist() == list(range(10))


def test_numbers_of_any_type_are_written(kind, path):
    import jax.numpy as jnp

    getattr(sink, kind)(path)(np.int64(3), {"a": np.float32(0.5), "b": jnp.ones((2,), "bfloat16")})
    assert_same(open_log(path), [(3, {"a": 0.5, "b": np.ones(2)})])


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "run.jsonl"
    write = sink.jsonl(path)
    for step in range(3):
        write(step, {"a": float(step)})
    whole = path.read_bytes()
    for cut in (1, 10, 40):
        path.write_bytes(whole[:-cut])
        with pytest.warns(UserWarning, match="line 3 was left out: it is not complete") as caught:
            assert open_log(path).steps.tolist() == [0, 1]
        assert caught[0].filename == __file__
    sink.jsonl(path)(7, {"a": 7.0})
    assert open_log(path).steps.tolist() == [0, 1, 7]
    path.write_bytes(b'{"tap')
    with pytest.warns(UserWarning, match="line 1 was left out"):
        assert len(open_log(path)) == 0
    sink.jsonl(path)(1, {})
    assert open_log(path).steps.tolist() == [1]


def test_a_long_line_that_was_cut_off_is_taken_back(tmp_path):
    path = tmp_path / "run.jsonl"
    write = sink.jsonl(path)
    for step in range(2):
        write(step, {"a": np.arange(50_000.0)})
    path.write_bytes(path.read_bytes()[:-200_000])
    sink.jsonl(path)(7, {"a": np.zeros(1)})
    assert open_log(path).steps.tolist() == [0, 7]


@pytest.mark.parametrize("kind", FORMATS[1:], indirect=True)
def test_a_part_that_was_cut_off_is_left_out(kind, path):
    for step in (0, 1):
        getattr(sink, kind)(path)(step, {"a": float(step)})
    last = sorted(path.iterdir())[-1]
    for size in (0, 7, last.stat().st_size // 2, last.stat().st_size - 3):
        last.write_bytes(last.read_bytes()[:size])
        with pytest.warns(UserWarning, match=f"the part '{last.name}' was left out") as caught:
            assert open_log(path).steps.tolist() == [0]
        assert caught[0].filename == __file__
        last.write_bytes(last.read_bytes().ljust(500, b"x"))
    getattr(sink, kind)(path)(2, {"a": 2.0})
    with pytest.warns(UserWarning, match="left out"):
        assert open_log(path).steps.tolist() == [0, 2]


def _with_version(path, kind):
    """Write a log as a later version of tapax might, without using this version."""
    if kind == "jsonl":
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"tapax": 7, "step": 0, "entries": []}) + "\n")
        return
    path.mkdir(parents=True)
    part = path / f"part-00000-0a1b2c3d.{kind}"
    if kind == "safetensors":
        header = json.dumps({"__metadata__": {"tapax": "7"}}).encode()
        part.write_bytes(struct.pack("<Q", len(header)) + header)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"x": [1]}).replace_schema_metadata({"tapax": "7"}), part)


def test_a_log_of_another_version_is_refused(kind, path):
    _with_version(path, kind)
    for use in (open_log, getattr(sink, kind)):
        with pytest.raises(RuntimeError, match=r"version 7 of the .* this tapax knows version 1\."):
            use(path)


def test_a_file_that_is_not_a_log_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file or folder"):
        open_log(tmp_path / "none.jsonl")
    for name, content in (
        ("a.jsonl", b"text\n"),
        ("b.jsonl", b'{"step": 1}\n'),
        ("c.csv", b"a,b\n"),
        ("d.parquet", b"PAR1 not really"),
        ("e.safetensors", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "),
    ):
        if name == "d.parquet":
            pytest.importorskip("pyarrow")
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(f"{str(file)!r} is not a log of tapax")):
            open_log(file)
    folder = tmp_path / "folder.safetensors"
    folder.mkdir()
    (folder / "notes.txt").touch()
    for use in (open_log, sink.safetensors):
        with pytest.raises(ValueError, match="is not a log of tapax: it contains"):
            use(folder)
    with pytest.raises(ValueError, match="is not a log of tapax: its first line"):
        sink.jsonl(tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == b"text\n"


def test_a_part_can_be_read_by_others(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    from safetensors.numpy import load_file

    for kind in FORMATS[1:]:
        write = getattr(sink, kind)(tmp_path / f"run.{kind}")
        for step in (0, 100):
            write(step, {"Net/mlp/value_rms": 0.5 + step, "Net/h/value_histogram": HISTOGRAM})
    rows = pq.read_table(tmp_path / "run.parquet").to_pylist()
    assert [(r["step"], r["name"], r["value"]) for r in rows[::2]] == [
        (0, "Net/mlp/value_rms", 0.5),
        (100, "Net/mlp/value_rms", 100.5),
    ]
    assert rows[1]["counts"] == [1.0, 2.0, 0.0] and rows[1]["edges"] == [0.0, 1.0, 2.0, math.inf]
    (part,) = (tmp_path / "run.safetensors").iterdir()
    arrays = load_file(part)
    assert arrays["Net/mlp/value_rms"].tolist() == [0.5, 100.5]
    assert arrays["Net/h/value_histogram"].shape == (2, 3) and arrays["/steps"].tolist() == [0, 100]


def test_lines_are_json_to_others(tmp_path):
    write = sink.jsonl(tmp_path / "run.jsonl")
    write(0, {"a": math.nan, "b": np.array([1.0, -math.inf])})

    def refuse(constant):
        raise AssertionError(constant)

    line = json.loads((tmp_path / "run.jsonl").read_text(), parse_constant=refuse)
    assert line["record"] == {"a": "NaN", "b": [1.0, "-Infinity"]}
