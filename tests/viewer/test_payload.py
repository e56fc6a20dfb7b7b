"""Payloads: codecs, levels, growing and resumed runs, statistics of captured arrays."""

import json
import zlib

import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tapax.viewer._blobs import Blobs, quantise, summarise
from tapax.viewer._format import MISSING
from tapax.viewer._page import make_page
from tapax.viewer._runs import RunColumns
from tapax.viewer._statistics import count_bins


def inflate(blob):
    return zlib.decompress(blob, -15)


def read(page, column):
    """Read an array of a payload as its specification says."""
    dtype = {"f32": "<f4", "f64": "<f8", "i32": "<i4"}[column["dtype"]]
    whole = np.frombuffer(inflate(page.blobs[column["blob"]]), dtype)
    start = column.get("offset", 0)
    return whole[start : start + int(np.prod(column["shape"]))].reshape(column["shape"])


def read_statistic(page, of, stat, subject=0):
    """Return the numbers of an exact statistic by the names of its sites."""
    entry = page.header["subjects"][subject]
    found = [each for each in entry["statistics"] if (each["of"], each["stat"]) == (of, stat)]
    (statistic,) = found
    matrix = statistic["matrix"]
    level = matrix["levels"][0]
    assert level["codec"] == "f32" and matrix["rows"] <= level["tileRows"]
    numbers = np.frombuffer(inflate(page.blobs[level["blob"]]), "<f4")
    names = entry["sites"]["name"]
    sites = range(len(names)) if matrix["sites"] is None else read(page, matrix["sites"])
    rows = numbers.reshape(matrix["rows"], matrix["columns"])
    return {names[site]: row for site, row in zip(sites, rows, strict=True)}


def dequantise(content, rows, columns):
    """Decode `q13` one number at a time, as the specification says."""
    parameters = np.frombuffer(content[: 12 * rows], "<f4").reshape(rows, 3).astype(np.float64)
    low, high = np.frombuffer(content[12 * rows :], np.uint8).reshape(2, rows, columns)
    special = [MISSING, np.nan, np.inf, -np.inf, 0.0]
    found = np.empty((rows, columns))
    for i in range(rows):
        start, step, unit = parameters[i]
        for j in range(columns):
            code = int(low[i, j]) + 256 * int(high[i, j])
            assert code < 2**13
            place = start + (code - 5) * step
            number = unit * np.sinh(place) if unit else np.exp(place)
            found[i, j] = special[code] if code < 5 else number
    return found


def test_quantised_numbers_are_near_and_special_ones_exact(rng):
    tile = np.exp(2 * rng.standard_normal((6, 50))).astype(np.float32)
    tile[1] *= np.where(np.arange(50) % 2, 1, -1)  # both signs
    tile[2] = 3.5  # all equal
    tile[3] = 0
    tile[4, :5] = [np.nan, np.inf, -np.inf, 0, MISSING]
    tile[5] = MISSING
    found = dequantise(quantise(tile), *tile.shape)
    ordinary = np.isfinite(tile) & (tile != 0) & (tile != np.float32(MISSING))
    np.testing.assert_allclose(found[ordinary], tile[ordinary], rtol=2e-3)
    np.testing.assert_allclose(found[0], tile[0], rtol=1e-3)
    np.testing.assert_array_equal(found[~ordinary].astype(np.float32), tile[~ordinary])


@pytest.mark.parametrize("factor", [2, 3, 7])
def test_a_summary_keeps_the_largest_magnitude_of_each_group(rng, factor):
    matrix = rng.standard_normal((5, 11)).astype(np.float32)
    matrix[0, 3] = np.nan
    matrix[1, 4] = -np.inf
    matrix[2, :] = MISSING
    matrix[3, 2] = MISSING
    found = summarise(matrix, factor)
    for i, row in enumerate(matrix):
        for j, start in enumerate(range(0, 11, factor)):
            group = [x for x in row[start : start + factor] if x != np.float32(MISSING)]
            bad = [x for x in group if np.isnan(x)]
            wanted = bad[0] if bad else max(group, key=abs) if group else np.float32(MISSING)
            np.testing.assert_array_equal(found[i, j], wanted)


def test_numbers_of_a_log_come_by_site_and_step():
    log = tapax.Log()
    log(0, {"net/a/value_rms": 1.0, "net/b/grad_rms": 2.0, "loss": 5.0})
    log(10, {"net/a/value_rms": float("inf"), "loss": 4.0, "net/c/value_rms": 1e300})
    page = make_page(log)
    subject = page.header["subjects"][0]
    assert subject["sites"]["name"] == ["net/a", "net/b", "loss", "net/c"]
    assert read(page, subject["steps"]).tolist() == [0, 10]
    rms = read_statistic(page, "value", "rms")
    assert rms["net/a"].tolist() == [1, np.inf]
    assert rms["net/c"].tolist() == [MISSING, np.inf]  # beyond float32
    assert read_statistic(page, "", "")["loss"].tolist() == [5, 4]
    json.dumps(page.header, allow_nan=False)


def test_a_resumed_run_replaces_steps_as_its_log_does():
    records = [
        (0, {"a/value_rms": 1.0}),
        (10, {"a/value_rms": 2.0, "b/value_rms": 3.0}),
        (20, {"b/value_rms": 4.0}),
        (30, {"a/value_rms": 5.0}),
        (10, {"a/value_rms": 6.0}),
        (15, {"a/value_rms": 7.0}),
        (15, {"b/value_rms": 8.0}),
    ]
    log, run = tapax.Log(), RunColumns()
    for step, record in records:
        log._add(step, record)
        run.append(step, record)
    blobs = Blobs()
    (statistic,) = run.add_statistics(blobs)
    level = statistic["matrix"]["levels"][0]
    numbers = np.frombuffer(inflate(blobs[level["blob"]]), "<f4").reshape(2, -1)
    wanted = {}
    for step, record in log:
        wanted.setdefault(step, {}).update(record)
    assert run.steps == list(wanted)
    for row, name in zip(numbers, ("a/value_rms", "b/value_rms"), strict=True):
        assert row.tolist() == [wanted[step].get(name, MISSING) for step in run.steps]


@pytest.mark.parametrize("seed", range(20))
def test_runs_with_several_records_of_a_step_are_those_of_a_log(seed):
    random = np.random.default_rng(seed)
    log, run = tapax.Log(), RunColumns()
    groups = [["a/value_rms", "b/value_rms"], ["eval"], ["loss", "b/grad_rms"], ["a/value_rms"], []]
    for _ in range(30):
        names, step = groups[random.integers(len(groups))], int(random.integers(8))
        record = {name: float(random.integers(1, 99)) for name in names}
        log._add(step, record)
        run.append(step, record)
    wanted = {}
    for step, record in log:
        wanted.setdefault(step, {}).update(record)
    assert run.steps == list(wanted)
    found = {step: {} for step in wanted}
    for name, (key, row) in run._places.items():
        matrix = run._matrices[key]
        matrix.resize(matrix.rows, len(run.steps))
        for step, number in zip(run.steps, matrix.numbers[row].tolist(), strict=True):
            if number != MISSING:
                found[step][name] = number
    assert found == wanted


def test_a_number_that_becomes_an_array_is_its_mean():
    log = tapax.Log()
    for step, x in enumerate((0.5, np.array([1.0, 2.0]), 4.0)):
        log(step, {"a": x})
    assert read_statistic(make_page(log), "", "")["a"].tolist() == [0.5, 1.5, 4.0]


@pytest.mark.parametrize(
    "numbers",
    [[1.0, np.nextafter(1, 2)], [-1.7e308, 1.7e308], [2.0**53, 2.0**53 + 2], [0, 5e-324], [0, 0]],
)
def test_histograms_of_all_ranges_count_every_element(numbers):
    counts, edges = count_bins(np.array(numbers))
    assert counts.sum() == 2 and len(edges) == len(counts) + 1
    assert np.isfinite(edges).all() and (np.diff(edges) > 0).all()
    assert edges[0] <= min(numbers) and max(numbers) <= edges[-1]


@pytest.mark.parametrize(
    ("shape", "messages"),
    [
        ((16, 1024, 1), []),
        ((20, 3, 2), ["The view of tokens shows the first 16 of 20 examples."]),
        (
            (17, 1025, 1),
            [
                "The view of tokens shows the first 16 of 17 examples and the first 1,024 of 1,025 "
                "positions."
            ],
        ),
    ],
)
def test_tokens_beyond_the_limits_of_the_page_are_counted(shape, messages):
    _, taps = tapax.capture(lambda x: tapax.sow(x, "h"), grads=None)(np.ones(shape, np.float32))
    (subject,) = make_page(taps).header["subjects"]
    (grid,) = subject["tokens"]
    assert (grid["examples"], grid["positions"]) == (min(shape[0], 16), min(shape[1], 1024))
    assert [each["text"] for each in subject["messages"]] == messages


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_histograms_with_other_edges_are_left_out_with_a_message(tmp_path, is_on_disk):
    log = tapax.sink.jsonl(tmp_path / "run.jsonl") if is_on_disk else tapax.Log()
    for step, edges in enumerate(([0.0, 1, 2], [0.0, 1, 2], [0.0, 10, 20])):
        log(step, {"h/value_histogram": tapax.Histogram(np.ones(2), np.array(edges))})
        header = make_page(log.path if is_on_disk else log).header
        messages = [each["text"] for each in header["subjects"][0]["messages"]]
        assert messages == [] if step < 2 else "edges of some histograms change" in messages[0]
    (histogram,) = header["subjects"][0]["histograms"]
    assert histogram["counts"]["shape"] == [1, 2]


def test_records_with_the_same_names_are_written_as_one_column():
    run, slow = RunColumns(), {}
    names = [f"net/{i}/value_rms" for i in range(7)]
    for step in range(5):
        record = {name: float(step * 10 + i) for i, name in enumerate(names)}
        if step == 3:
            record = dict(reversed(record.items()))
        run.append(step, record)
        slow[step] = record
    blobs = Blobs()
    (statistic,) = run.add_statistics(blobs)
    blob = blobs[statistic["matrix"]["levels"][0]["blob"]]
    numbers = np.frombuffer(inflate(blob), "<f4").reshape(7, 5)
    wanted = [[slow[step][name] for step in range(5)] for name in names]
    np.testing.assert_array_equal(numbers, wanted)


def test_histograms_over_many_steps_are_summed_into_lines():
    log = tapax.Log()
    for step in range(1000):
        counts = np.array([1.0, step % 2, 0.0])
        log(step, {"net/h/value_histogram": tapax.Histogram(counts, np.arange(4.0))})
    page = make_page(log)
    (histogram,) = page.header["subjects"][0]["histograms"]
    counts, steps = read(page, histogram["counts"]), read(page, histogram["steps"])
    assert counts.shape == (250, 3) and steps.tolist() == list(range(0, 1000, 4))
    assert (counts == [4, 2, 0]).all()


def test_statistics_of_a_capture_are_those_of_its_arrays():
    x = np.array([[1.0, -2.0, 0.0], [4.0, np.nan, np.inf]], np.float32)
    _, taps = tapax.capture(lambda x: tapax.sow(x * 1, "h"))(jnp.asarray(x))
    page = make_page(taps)
    for stat in ("min", "max"):  # like tapax.reduce.minmax
        assert np.isnan(read_statistic(page, "value", stat)["h"][0])
    assert read_statistic(page, "value", "zeros")["h"][0] == pytest.approx(1 / 6)
    assert read_statistic(page, "value", "nonfinite")["h"][0] == 2
    assert np.isnan(read_statistic(page, "value", "mean")["h"][0])
    assert not np.isfinite(read_statistic(page, "value", "rms")["h"][0])
    (entry,) = page.header["subjects"][0]["arrays"]
    np.testing.assert_array_equal(read(page, entry["data"]), x)


def test_reduced_values_are_shown_as_what_they_were_reduced_to():
    reducers = {"h": [tapax.reduce.rms, tapax.reduce.minmax]}
    capture = tapax.capture(lambda x: tapax.sow(x * 1, "h"), values=reducers, grads=None)
    _, taps = capture(jnp.array([3.0, -4.0]))
    page = make_page(taps)
    assert page.header["subjects"][0]["sites"]["name"] == ["h"]
    assert read_statistic(page, "value", "rms")["h"][0] == pytest.approx(np.sqrt(12.5))
    assert read_statistic(page, "value", "min")["h"][0] == -4
    assert page.header["subjects"][0]["arrays"] == []


def test_arrays_beyond_the_limit_are_left_out_with_a_reason(monkeypatch):
    monkeypatch.setattr("tapax.viewer._captures.ARRAY_BYTES", 100)
    _, taps = tapax.capture(lambda x: tapax.sow(x * 1, "h"))(jnp.ones(50))
    (entry,) = make_page(taps).header["subjects"][0]["arrays"]
    assert entry["data"] is None and "taps.select" in entry["omitted"]


def test_only_files_of_the_program_are_read(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("password")
    sites = tapax.SiteTable(
        [
            tapax.Site("a", source=f"{__file__}:3"),
            tapax.Site("b", source=f"{secret}:1"),
            tapax.Site("c", source="/nowhere/model.py:2"),
            tapax.Site("d", source=""),
        ]
    )
    page = make_page(sites)
    assert [file["text"] is not None for file in page.header["sources"]] == [True, False, False]
    assert page.header["subjects"][0]["sites"]["source"] == [(0, 3), (1, 1), (2, 2), None]


@pytest.mark.parametrize("what", [3, None, {"a": 1}])
def test_an_object_without_a_view_raises(what):
    with pytest.raises(TypeError, match=r"tapax\.view takes"):
        tapax.view(what)


def test_a_page_that_cannot_be_written_says_why(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="The page cannot be written to"):
        tapax.view(tapax.Log()).save(tmp_path / "file" / "page.html")
    with pytest.raises(TypeError, match="at least one"):
        tapax.view()


def test_arrays_have_the_summary_of_treescope():
    _, taps = tapax.capture(lambda x: tapax.sow(x * 1, "h"))(jnp.ones((2, 300), jnp.float32))
    (entry,) = tapax.view(taps).header["subjects"][0]["arrays"]
    assert "float32(2, 300)" in entry["rendering"] and "<" in entry["rendering"]
