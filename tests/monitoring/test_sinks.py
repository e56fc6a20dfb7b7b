"""Sinks deliver records in order, survive failures, and finish at the end."""

import gc
import importlib.util
import io
import math
import os
import re
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import types
import warnings
import weakref

import numpy as np
import pytest
from rich.console import Console

from tapax import open as open_log
from tapax import sink
from tapax.monitoring._delivery import Delivery, Report
from tapax.monitoring._log import Log
from tapax.monitoring._records import AlertEvent, Histogram
from tapax.monitoring._tags import tag_numbers

pytestmark = pytest.mark.once

EVENT = AlertEvent(7, "Net/h", "grad_rms", math.inf, "step 7: the gradient of Net/h has rms inf.")
RECORD = {
    "Net/h[1]/value_rms": 0.5,
    "Net/h[1]/grad_rms": 0.25,
    "Net/h/value_histogram": Histogram(
        np.array([1.0, 2.0, 3.0]), np.array([0.0, 1.0, 2.0, np.inf])
    ),
    "Net/h/value_zeros": np.array([0.0, 1.0, np.nan]),
}


def script(code, *args, **options):
    """Run a script in a separate process."""
    source = textwrap.dedent(code)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", source, *map(str, args)],
        capture_output=True, text=True, timeout=120, check=False, env=environment, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("to", "shown"),
    [
        (None, []),
        ("table", ["table()"]),
        (print, ["<built-in function print>"]),
        ([print, ["table", None]], ["<built-in function print>", "table()"]),
        (("a.jsonl", "b.safetensors"), ["jsonl('a.jsonl')", "safetensors('b.safetensors')"]),
    ],
)
def test_every_form_of_to_makes_sinks(to, shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [repr(s) for s in sink.make(to)] == shown


@pytest.mark.parametrize(
    ("to", "error", "words"),
    [
        ("run.csv", ValueError, "to='run.csv' does not say what to write. A path must end in"),
        (
            "logs",
            ValueError,
            ".jsonl, .parquet or .safetensors. Or give 'table', 'page', or a sink of",
        ),
        (5, TypeError, "a list of these, but is 5 of type int"),
        (Log, TypeError, "the class Log. Call it to make a sink"),
    ],
)
def test_an_argument_that_is_not_a_sink_raises(to, error, words):
    with pytest.raises(error, match=words):
        sink.make(to)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "safetensors", "tensorboard"])
def test_a_path_that_cannot_be_written_is_told_at_once(kind, tmp_path):
    pytest.importorskip({"parquet": "pyarrow", "tensorboard": "tensorboardX"}.get(kind, "numpy"))
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match=r"cannot be written: Not a directory\. Choose a writable path"
    ):
        getattr(sink, kind)(tmp_path / "file" / f"run.{kind}")


@pytest.mark.parametrize(
    ("make", "package", "install"),
    [
        (lambda: sink.tensorboard("x"), "tensorboardX", "pip install 'tapax[tensorboard]'"),
        (lambda: sink.parquet("x.parquet"), "pyarrow", "pip install 'tapax[parquet]'"),
        (lambda: sink.wandb(), "wandb", "pip install 'wandb'"),
        (lambda: sink.mlflow(), "mlflow", "pip install 'mlflow'"),
    ],
)
def test_a_package_that_is_missing(make, package, install, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as caught:
        make()
    assert install in str(caught.value)


def test_the_table_is_kept_up_to_date_in_a_terminal():
    file = io.StringIO()
    table = sink.table(Console(file=file, force_terminal=True, width=100, height=40))
    table(0, RECORD)
    once = file.getvalue()
    assert "step 0" in once and "Net/h[1]" in once and "value rms" in once and "grad rms" in once
    table(100, RECORD)
    table.alert(EVENT)
    assert "step 100" in file.getvalue() and EVENT.message in file.getvalue()
    table.close()
    table.close()


def test_the_table_is_printed_once_without_a_terminal():
    file = io.StringIO()
    table = sink.table(Console(file=file, width=80))
    for step in range(100):
        table(step, RECORD | {"Net/h[1]/value_rms": float(step)})
    assert file.getvalue() == ""
    table.close()
    text = file.getvalue()
    assert text.count("step 99") == 1 and "▁▂▃▄▅▆▇█" in text and "Net/h[1]" in text
    sink.table(Console(file=file)).close()
    assert file.getvalue() == text


def events(folder):
    """Read the summaries in TensorBoard's event files, record by record."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            yield from ((event.step, value) for value in event.summary.value)
            data = data[16 + size :]


def test_tensorboard_gets_scalars_and_histograms(tmp_path):
    pytest.importorskip("tensorboardX")
    write = sink.tensorboard(tmp_path / "events")
    for step in (0, 100):
        write(step, RECORD)
    write.alert(EVENT)
    write.close()
    found = {(step, v.tag): v for step, v in events(tmp_path / "events")}
    assert found[100, "Net/h.1/value_rms"].simple_value == 0.5
    histogram = found[100, "Net/h/value_histogram"].histo
    assert list(histogram.bucket) == [1.0, 2.0, 3.0] and histogram.num == 6
    assert list(histogram.bucket_limit) == [1.0, 2.0, 3.0]
    assert found[0, "Net/h/value_zeros"].histo.num == 2
    assert any(step == 7 and tag.startswith("alerts") for step, tag in found)


@pytest.mark.parametrize(
    "numbers", [[1e38, 1e38], [-1e38, 2e38, 0.5], [1e20, np.inf, np.nan], [1.7e308, -1.7e308]]
)
def test_tensorboard_gets_histograms_of_huge_numbers(tmp_path, numbers):
    pytest.importorskip("tensorboardX")
    write = sink.tensorboard(tmp_path / "events")
    write(0, {"h/value_rms": np.array(numbers)})
    write.close()
    (histogram,) = (v.histo for _, v in events(tmp_path / "events"))
    finite = np.clip([x for x in numbers if np.isfinite(x)], -1e300, 1e300)
    assert histogram.num == sum(histogram.bucket) == len(finite)
    assert histogram.min <= min(finite) and max(finite) <= histogram.max


def test_weights_and_biases_gets_histograms_of_numbers_too_close_to_bin(monkeypatch):
    logged = []
    module = types.SimpleNamespace(run=types.SimpleNamespace(log=logged.append))
    # As wandb does: NumPy raises for equal numbers without 64 floats around them.
    module.Histogram = lambda x=None, np_histogram=None: np_histogram or np.histogram(x, bins=64)
    monkeypatch.setitem(sys.modules, "wandb", module)
    for numbers in ([1e38, 1e38], [1.0, np.nextafter(1, 2)], [0.0, 0.0], [np.nan]):
        sink.wandb()(0, {"h/value_rms": np.array(numbers)})
    assert [record["h/value_rms"][0].sum() for record in logged] == [2, 2, 2, 0]


def test_weights_and_biases_is_given_numbers_and_histograms(monkeypatch):
    logged, alerts = [], []
    run = types.SimpleNamespace(log=logged.append, alert=lambda **kw: alerts.append(kw))
    module = types.SimpleNamespace(
        run=None, Histogram=lambda x=None, np_histogram=None: (x, np_histogram)
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(RuntimeError, match=r"Call wandb.init\(\) first"):
        sink.wandb()
    module.run = run
    for write in (sink.wandb(), sink.wandb(run)):
        write(100, RECORD)
        write.alert(EVENT)
    for found in logged:
        assert found["Net/h[1]/value_rms"] == 0.5 and found["monitor/step"] == 100
        assert found["Net/h/value_histogram"][1][0].tolist() == [1.0, 2.0, 3.0]
        assert found["Net/h/value_histogram"][1][1].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert found["Net/h/value_zeros"][0].tolist() == [0.0, 1.0]
    assert alerts == [{"title": "Net/h", "text": EVENT.message}] * 2


def test_the_table_shows_numbers_of_any_type():
    out = io.StringIO()
    show = sink.table(Console(file=out))
    show(0, {"loss": np.float32(0.5), "count": 3, "units": np.arange(4)})
    show.close()
    assert all(text in out.getvalue() for text in ("0.5", "3", "1.5"))


def test_every_number_of_a_record_has_a_tag():
    names = ["h[1]", "h@1", "h.1", "h@1[1]", "h[1,1]", "h@1~1", "h@11", "a b", "a_b", "rnn:0"]
    record = {f"{name}/value_rms": float(i) for i, name in enumerate(names)}
    found = tag_numbers(record)
    assert list(found.values()) == list(record.values())
    assert all(re.fullmatch(r"[-/\w.]+", tag) for tag in found)


def test_mlflow_is_given_numbers_from_another_thread(monkeypatch):
    logged, tags = [], []
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    module = types.SimpleNamespace(
        active_run=lambda: run if threading.current_thread() is threading.main_thread() else None,
        log_metrics=lambda numbers, step, run_id: logged.append((numbers, step, run_id)),
        MlflowClient=lambda: types.SimpleNamespace(set_tag=lambda *a: tags.append(a)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    deliver([sink.mlflow()], [(100, RECORD, [EVENT])])
    ((numbers, step, run_id),) = logged
    assert (step, run_id) == (100, "r1") and numbers["Net/h.1/value_rms"] == 0.5
    assert tags == [("r1", "alert.7", EVENT.message)]


def deliver(sinks, found):
    delivery = Delivery(sinks, lambda: None)
    for one in found:
        delivery.put(lambda one=one: Report(*one))
    delivery.close()
    delivery.close()
    return delivery


class Recorder:
    def __init__(self, fails=()):
        self.calls, self.fails = [], fails

    def _see(self, what, *args):
        if what in self.fails:
            raise OSError(f"cannot {what}")
        self.calls.append((what, *args))

    def __call__(self, step, record):
        self._see(f"write {step}", threading.current_thread().name)

    def alert(self, event):
        self._see(f"alert {event.step}")

    def close(self):
        self._see("close")


def test_records_are_delivered_in_order_on_a_separate_thread():
    recorder, log = Recorder(), Log()
    deliver([recorder, log], [(step, RECORD, [EVENT] if step == 1 else []) for step in range(100)])
    assert log.steps.tolist() == list(range(100)) and log.alerts == [EVENT]
    writes = [(f"write {step}", "tapax-monitor") for step in range(100)]
    assert recorder.calls == [*writes[:2], ("alert 7",), *writes[2:], ("close",)]


@pytest.mark.parametrize("method", ["write 1", "alert 7"])
def test_a_sink_that_fails_is_dropped_with_one_warning(method):
    bad, good, log = Recorder({method}), Recorder(), Log()
    with pytest.warns(UserWarning, match="The sink") as caught:
        deliver([bad, good, log], [(step, RECORD, [EVENT] * (step == 1)) for step in range(5)])
    (message,) = (str(w.message) for w in caught)
    assert message.startswith(f"The sink <{__name__}.Recorder object at")
    assert "so the monitor sends it no more records. The training goes on" in message
    assert message.endswith(f"OSError: cannot {method}")
    assert bad.calls[0] == ("write 0", "tapax-monitor") and bad.calls[-1] == ("close",)
    assert ("write 2", "tapax-monitor") not in bad.calls
    assert len(log) == 5 and len(good.calls) == 7


def test_a_sink_that_cannot_be_closed_warns():
    bad, good = Recorder({"close"}), Recorder()
    with pytest.warns(UserWarning, match="OSError: cannot close"):
        deliver([bad, good], [(0, RECORD, [])])
    assert good.calls[-1] == ("close",)


def test_warnings_that_are_errors_do_not_end_the_thread(capsys):
    log = Log()
    deliver([Recorder({"write 0"}), log], [(step, RECORD, []) for step in range(3)])
    assert len(log) == 3 and "UserWarning: The sink <tests" in capsys.readouterr().err


def test_an_exit_in_a_sink_does_not_end_the_thread():
    log = Log()
    with pytest.warns(UserWarning, match="The sink .*<lambda> failed, .*: SystemExit"):
        deliver([lambda *a: sys.exit(), log], [(step, RECORD, []) for step in range(3)])
    assert len(log) == 3


def test_numbers_that_cannot_be_fetched_turn_the_monitor_off_and_warn_once():
    log, off = Log(), []
    delivery = Delivery([log], lambda: off.append(True))
    fetches = (threading.Event(), lambda: 1 / 0, lambda: 1 / 0, lambda: Report(1, {}, []))
    delivery.put(lambda: (fetches[0].wait(), Report(0, {}, []))[1])
    for fetch in fetches[1:]:
        delivery.put(fetch)
    with pytest.warns(UserWarning, match="is off, and the training goes on: Zero") as caught:
        (fetches[0].set(), delivery.close())
    assert len(caught) == 1 and off and log.steps.tolist() == [0, 1]


def test_the_thread_ends_and_lets_go():
    recorder = Recorder()
    delivery = deliver([recorder], [(0, RECORD, [])])
    assert "tapax-monitor" not in {t.name for t in threading.enumerate()}
    gone = weakref.ref(delivery)
    del delivery
    gc.collect()
    assert gone() is None


def test_a_sink_may_close_the_delivery():
    found = []
    delivery = Delivery([lambda *a: (found.append(a), delivery.close())], lambda: None)
    delivery.put(lambda: Report(1, {}, []))
    delivery.close()
    assert found == [(1, {})]


def test_waiting_records_are_written_at_the_end_of_the_interpreter(tmp_path):
    done = script(
        """
        import sys, time
        from tapax.monitoring._delivery import Delivery, Report
        from tapax import sink

        slow = lambda step, record: time.sleep(0.01)
        delivery = Delivery([slow, sink.jsonl(sys.argv[1])], lambda: None)
        for step in range(50):
            delivery.put(lambda step=step: Report(step, {"a": 1.0}, []))
        raise SystemExit(3)
        """,
        tmp_path / "run.jsonl",
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert open_log(tmp_path / "run.jsonl").steps.tolist() == list(range(50))


@pytest.fixture
def paths(tmp_path):
    kinds = ["jsonl", "safetensors", *(["parquet"] if importlib.util.find_spec("pyarrow") else [])]
    return [tmp_path / f"run.{kind}" for kind in kinds]


def test_a_run_that_is_killed_leaves_every_record_that_was_written(paths):
    code = """
        import sys
        import numpy as np
        from tapax import sink

        writes = sink.make(sys.argv[1:])
        for step in range(10**6):
            for write in writes:
                write(step, {"a": float(step), "b": np.full(2000, 1.0 * step)})
                print(step, flush=True)
        """
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for _ in range(100):
            run.stdout.readline()
        run.send_signal(signal.SIGKILL)
        steps = 100 + len(run.stdout.read().split())
    for i, path in enumerate(paths):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            log = open_log(path)
        written = (steps - i + len(paths) - 1) // len(paths)
        assert len(log) in (written, written + 1)
        assert log["b"].values[:, 7].tolist() == [float(i) for i in range(len(log))]


def test_a_full_disk_leaves_what_was_written(paths):
    done = script(
        """
        import resource, sys
        import numpy as np
        from tapax import sink
        from tapax.monitoring._delivery import Delivery, Report

        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        seen = []
        delivery = Delivery([*sink.make(sys.argv[1:]), lambda *a: seen.append(a)], lambda: None)
        random = np.random.default_rng(0)
        for step in range(50):
            record = {"a": float(step), "b": random.normal(size=500)}
            delivery.put(lambda step=step, record=record: Report(step, record, []))
        delivery.close()
        print(len(seen))
        """,
        *paths,
    )
    assert done.stdout == "50\n", done.stderr
    assert done.stderr.count("UserWarning: The sink") == len(paths)
    assert done.stderr.count("File too large") == len(paths)
    for path in paths:
        log = open_log(path)
        assert 5 < len(log) < 50 and log.steps.tolist() == list(range(len(log)))
        sink.make(path)[0](99, {"a": 1.0})
        assert open_log(path).steps[-1] == 99
