"""Pages follow runs that are still being written, and read incomplete logs."""

import json
import math
import subprocess
import sys
import time

import numpy as np
import pytest

from tapax import sink
from tapax.monitoring._log_tail import LogTail
from tapax.monitoring._records import AlertEvent, Histogram
from tapax.viewer import _followed_run, _payload
from tapax.viewer._page import make_page
from tests.viewer.payload_decoder import MISSING, Reader, column, read_saved

FORMATS = ["jsonl", "parquet", "safetensors"]


@pytest.fixture(params=FORMATS)
def log(request, tmp_path):
    if request.param == "parquet":
        pytest.importorskip("pyarrow")
    return getattr(sink, request.param)(tmp_path / f"run.{request.param}")


class Follower:
    """A page without a server, which reads the header of a payload, then its updates."""

    def __init__(self, *paths):
        self.payload = make_page(*paths)._payload
        self.reader = Reader(self.payload.read_header(), self.payload.read_blob)

    def read(self):
        updates = self.payload.read_updates(self.reader.revision)
        for update in json.loads(json.dumps(updates, allow_nan=False)):
            self.reader.apply(update)
        return len(updates)

    def numbers(self, name, of="value", stat="rms"):
        row = self.reader.numbers[0][name, of, stat]
        return [None if x == MISSING else float(x) for x in row]

    @property
    def texts(self):
        return [message["text"] for message in self.reader.messages[0]]


def test_records_written_after_the_page_was_made_arrive(log):
    log(0, {"a/value_rms": 1.0, "loss": 0.5})
    page = Follower(log.path)
    assert page.numbers("a") == [1] and page.texts == []
    assert page.read() == 0
    log(10, {"a/value_rms": 2.0, "loss": math.nan, "b/grad_rms": math.inf})
    log(20, {"b/grad_rms": 3.0})
    log.alert(AlertEvent(20, "b", "rms", math.inf, "b is infinite"))
    assert page.read() == 1
    assert page.reader.steps == [[0, 10, 20]]
    assert page.reader.names == [["a", "loss", "b"]]
    assert page.numbers("a") == [1, 2, None]
    assert page.numbers("b", "grad") == [None, math.inf, 3]
    np.testing.assert_equal(page.numbers("loss", "", ""), [0.5, math.nan, None])
    (event,) = page.reader.events[0]
    assert event["site"] == 2 and event["number"] == "Infinity"
    assert page.read() == 0


def test_a_resumed_run_replaces_later_steps(log):
    for step in range(4):
        log(step, {"a/value_rms": float(step)})
    page = Follower(log.path)
    log(2, {"a/value_rms": 20.0})
    page.read()
    assert page.reader.steps == [[0, 1, 2]]
    assert page.numbers("a") == [0, 1, 20]


def test_histograms_that_grew_are_sent_whole(log, monkeypatch):
    monkeypatch.setattr(_followed_run, "HISTOGRAM_SECONDS", -1.0)
    edges = np.array([0.0, 1.0, 2.0])
    log(0, {"a/value_histogram": Histogram(np.array([1.0, 2.0]), edges)})
    page = Follower(log.path)
    log(1, {"a/value_histogram": Histogram(np.array([3.0, 4.0]), edges)})
    (update,) = page.payload.read_updates(0)
    (entry,) = update["histograms"]
    counts = column(entry["counts"], page.payload.read_blob)
    np.testing.assert_array_equal(counts, [[1, 2], [3, 4]])


def test_a_record_appears_within_a_second_of_a_process_that_writes_it(tmp_path):
    """The process writes the time into its records, so that the page reveals the delay."""
    path = tmp_path / "run.jsonl"
    script = (
        "import sys, time\nfrom tapax import sink\nlog = sink.jsonl(sys.argv[1])\n"
        "for step in range(10):\n"
        "    log(step, {'time/value_rms': time.time() - float(sys.argv[2])})\n"
        "    time.sleep(0.1)\n"
    )
    sink.jsonl(path)
    page = Follower(path)
    assert page.texts == ["The log contains no records yet."]
    start = time.time()
    process = subprocess.Popen([sys.executable, "-c", script, str(path), str(start)])
    try:
        delays, seen = [], 0
        while seen < 10 and time.time() - start < 60:
            page.read()
            if len(page.reader.steps[0]) > seen:
                delays += [time.time() - start - x for x in page.numbers("time")[seen:]]
                seen = len(page.reader.steps[0])
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    assert page.reader.steps == [list(range(10))] and page.texts == []
    assert sorted(delays)[5] < 1


def test_a_line_that_is_being_written_is_shown_once_it_is_whole(tmp_path):
    path = tmp_path / "run.jsonl"
    log = sink.jsonl(path)
    log(0, {"a/value_rms": 1.0})
    log(1, {"a/value_rms": 2.0})
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    page = Follower(path)
    assert page.reader.steps == [[0]]
    (text,) = page.texts
    assert "The last line of the log" in text and "being written, or the run was killed" in text
    with open(path, "ab") as file:
        file.write(whole[-9:])
    page.read()
    assert page.reader.steps == [[0, 1]] and page.texts == []


def test_a_broken_line_in_the_middle_is_left_out_with_a_message(tmp_path):
    path = tmp_path / "run.jsonl"
    log = sink.jsonl(path)
    log(0, {"a/value_rms": 1.0})
    with open(path, "ab") as file:
        file.write(b'{"tapax": 1, "step": 1, "rec\n')
    log(2, {"a/value_rms": 3.0})
    page = Follower(path)
    assert page.reader.steps == [[0, 2]]
    assert len(page.texts) == 1 and "line 2 was left out" in page.texts[0]
    assert page.reader.messages[0][0]["level"] == "warning"


def test_a_log_of_another_version_is_shown_as_far_as_it_goes(tmp_path):
    path = tmp_path / "run.jsonl"
    sink.jsonl(path)(0, {"a/value_rms": 1.0})
    with open(path, "ab") as file:
        file.write(b'{"tapax": 99, "step": 1, "record": {}}\n')
    page = Follower(path)
    assert page.numbers("a") == [1]
    (message,) = page.reader.messages[0]
    assert message["level"] == "error" and "version 99" in message["text"]
    assert page.read() == 0
    path.write_text('{"tapax": 99, "step": 0, "record": {}}\n')
    other = Follower(path)
    assert other.reader.steps == [[]] and "version 99" in other.texts[0]


def test_an_empty_log_says_so_and_is_followed(log):
    page = Follower(log.path)
    assert page.texts == ["The log contains no records yet."]
    log(3, {"a/value_rms": 1.0})
    page.read()
    assert page.texts == [] and page.reader.steps == [[3]]


def test_a_part_that_is_not_whole_is_left_out_with_a_message(tmp_path):
    log = sink.safetensors(tmp_path / "run.safetensors")
    log(0, {"a/value_rms": 1.0})
    (part,) = log.path.iterdir()
    broken = part.with_name(part.name.replace("part-00000", "part-00001"))
    broken.write_bytes(part.read_bytes()[:40])
    page = Follower(log.path)
    assert page.reader.steps == [[0]]
    assert len(page.texts) == 1 and broken.name in page.texts[0]
    broken.unlink()
    page.read()
    assert page.texts == [] and page.reader.steps == [[0]]


def test_a_new_run_at_the_same_path_begins_anew(tmp_path):
    path = tmp_path / "run.jsonl"
    log = sink.jsonl(path)
    for step in range(3):
        log(step, {"a/value_rms": 1.0})
    page = Follower(path)
    path.unlink()
    log = sink.jsonl(tmp_path / "new.jsonl")
    log(0, {"b/value_rms": 7.0})
    log.path.rename(path)
    page.read()
    assert page.reader.steps == [[0]]
    assert page.reader.names == [["a", "b"]]
    assert page.numbers("b") == [7] and page.numbers("a") == [None]


def test_a_log_that_takes_long_to_read_comes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(_payload, "READ_SECONDS", 0.0)
    monkeypatch.setattr("tapax.viewer._subjects.FIRST_SECONDS", 0.0)
    path = tmp_path / "run.jsonl"
    log = sink.jsonl(path)
    for step in range(5):
        log(step, {"a/value_rms": float(step)})
    page = Follower(path)
    assert page.reader.steps == [[0]] and page.texts == ["The log is still being read."]
    while page.read():
        pass
    assert page.numbers("a") == [0, 1, 2, 3, 4] and page.texts == []


def test_a_saved_page_has_all_of_a_log_that_was_read_in_part(tmp_path, monkeypatch, stub_bundle):
    monkeypatch.setattr("tapax.viewer._subjects.FIRST_SECONDS", 0.0)
    path, saved = tmp_path / "run.jsonl", tmp_path / "run.html"
    log = sink.jsonl(path)
    for step in range(3):
        log(step, {"a/value_rms": float(step)})
    page = make_page(path)
    log(3, {"a/value_rms": 3.0})
    page.save(saved)
    reader = Reader(*read_saved(saved.read_text()))
    assert reader.steps == [[0, 1, 2, 3]]
    assert "revision" not in reader.subjects[0]
    assert reader.numbers[0]["a", "value", "rms"] == [0, 1, 2, 3]


def test_many_steps_come_in_updates_that_are_exact(tmp_path):
    path = tmp_path / "run.jsonl"
    log = sink.jsonl(path)
    log(0, {"a/value_rms": 0.0})
    page = Follower(path)
    lines = [
        json.dumps({"tapax": 1, "step": i, "record": {"a/value_rms": float(i)}}) + "\n"
        for i in range(1, 1200)
    ]
    with open(path, "a") as file:
        file.writelines(lines)
    assert page.read() > 2
    assert page.numbers("a") == list(range(1200))
    again = Reader(page.payload.read_header(), page.payload.read_blob)
    assert len(again.steps[0]) == 1200, "a page that is opened late reads them with the header"
    assert again.revision == page.reader.revision


def test_pages_load_again_when_steps_of_several_levels_are_replaced(tmp_path):
    path = tmp_path / "run.jsonl"
    lines = [
        json.dumps({"tapax": 1, "step": i, "record": {"a/value_rms": float(i)}}) + "\n"
        for i in range(600)
    ]
    path.write_text("".join(lines))
    page = Follower(path)
    sink.jsonl(path)(100, {"a/value_rms": -1.0})
    assert page.payload.read_updates(0) is None
    again = Reader(page.payload.read_header(), page.payload.read_blob)
    assert again.steps == [list(range(101))]
    assert page.payload.read_updates(again.revision) == []


def test_two_runs_are_followed_on_one_page(tmp_path):
    logs = [sink.jsonl(tmp_path / name / "run.jsonl") for name in ("x", "y")]
    for log in logs:
        log(0, {"a/value_rms": 1.0})
    page = Follower(*(log.path for log in logs))
    assert [subject["name"] for subject in page.reader.subjects] == ["run.jsonl a", "run.jsonl b"]
    logs[1](1, {"a/value_rms": 2.0})
    page.read()
    logs[0](5, {"a/value_rms": 3.0})
    page.read()
    assert page.reader.steps == [[0, 5], [0, 1]]


def test_a_tail_reads_only_what_is_new(log):
    log(0, {"a/value_rms": 1.0})
    tail = LogTail(log.path)
    assert [step for step, _ in tail.read()] == [0]
    assert [*tail.read()] == [] and tail.is_at_end
    log(1, {"a/value_rms": 2.0})
    assert [*tail.read()] == [(1, {"a/value_rms": 2.0})]


@pytest.mark.parametrize(
    ("name", "content", "error", "text"),
    [
        ("none.jsonl", None, FileNotFoundError, "There is no file or folder"),
        ("notes.jsonl", "hello\n", ValueError, "its first line is not one of a log"),
        ("notes.txt", "hello\n", ValueError, "its name ends in '.txt'"),
    ],
)
def test_a_path_without_a_log_is_refused(tmp_path, name, content, error, text):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(error, match=text):
        make_page(tmp_path / name)
