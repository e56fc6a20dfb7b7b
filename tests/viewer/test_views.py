"""Every view of the page draws the captured or logged numbers, in a real browser."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tests.viewer.programs import HEADS, LAYERS, LENGTH

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def capture_tab(chromium, capture_page):
    tab = chromium.open(capture_page)
    yield tab
    tab.check_quiet()
    tab.close()


@pytest.fixture(scope="module")
def run_tab(chromium, run_page):
    tab = chromium.open(run_page)
    yield tab
    tab.check_quiet()
    tab.close()


@pytest.fixture
def run(run_log):
    return tapax.open(run_log)


def rms(x):
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def test_layers_of_a_capture_have_the_number_of_every_site(capture_tab, captured):
    taps, _ = captured
    drawn = capture_tab.show("layers", stat="grad.rms")
    numbers = {name: cell["number"] for cell in drawn["cells"] for name in cell["sites"]}
    assert numbers.keys() == taps.grads.keys()
    for name, number in numbers.items():
        assert number == pytest.approx(rms(taps.grads[name]), rel=1e-6)
    rows = {name: cell["y"] for cell in drawn["cells"] for name in cell["sites"]}
    assert rows["GPT/blocks/0/attn"] == rows["GPT/blocks/0/mlp"] < rows["GPT/blocks/1/mlp"]


def test_cells_of_a_capture_have_the_colours_of_the_legend(capture_tab):
    drawn = capture_tab.show("layers", stat="value.rms", scale="log")
    cells = sorted(drawn["cells"], key=lambda cell: cell["number"])

    def lightness(cell):
        colour = capture_tab.pixel("canvas.plot", round(cell["x"] + 4), round(cell["y"] + 4))
        return sum(colour[:3])

    # The light theme draws larger numbers darker.
    assert lightness(cells[0]) > lightness(cells[len(cells) // 2]) > lightness(cells[-1])


def test_heat_map_of_a_run_has_the_number_of_every_step(run_tab, run):
    drawn = run_tab.show("layers", stat="value.rms")
    assert drawn["statistic"] == "value.rms"
    numbers = np.reshape(drawn["numbers"], (drawn["height"], drawn["width"]))
    assert numbers.shape == (len(drawn["sites"]), len(run.steps))
    for row, site in zip(numbers, drawn["sites"], strict=True):
        np.testing.assert_allclose(row, run[f"{site}/value_rms"].values, rtol=1e-6)


def test_hovering_over_the_heat_map_shows_number_site_and_step(run_tab, run):
    drawn = run_tab.show("layers", stat="value.rms")
    area = drawn["area"]
    box = run_tab.evaluate("root.querySelector('canvas.plot').getBoundingClientRect().toJSON()")
    row, column = 3, 4
    x = box["left"] + area["x"] + (column + 0.5) / drawn["width"] * area["width"]
    y = box["top"] + area["y"] + (row + 0.5) / drawn["height"] * area["height"]
    run_tab.move(x, y)
    shown = run_tab.text(".tooltip")
    site = drawn["sites"][row]
    number = run[f"{site}/value_rms"].values[column]
    assert site in shown and f"step {run.steps[column]}" in shown
    assert f"{number:.3g}" in shown
    run_tab.tap(x, y)
    assert run_tab.state["site"] == site and run_tab.state["step"] == run.steps[column]
    run_tab.set(site="", step=None)


def test_zooming_in_shows_a_part_of_the_steps(run_tab, run):
    drawn = run_tab.show("layers", "drawn.width == 3", more={"columns": "2-5", "rows": "1-4"})
    assert drawn["columnEdges"] == [2, 3, 4, 5] and drawn["height"] == 3
    wanted = run[f"{drawn['sites'][1]}/value_rms"].values[2:5]
    np.testing.assert_allclose(drawn["numbers"][:3], wanted, rtol=1e-6)
    run_tab.set(more={"columns": "", "rows": ""})


def test_table_of_sites_filters_and_sorts(capture_tab, captured):
    taps, _ = captured
    drawn = capture_tab.show("sites", "drawn.sites", stat="value.rms")
    assert drawn["sites"] == taps.sites.names
    drawn = capture_tab.show("sites", "drawn.sites.length == 2", filter="**/mlp")
    assert drawn["sites"] == ["GPT/blocks/0/mlp", "GPT/blocks/1/mlp"]
    capture_tab.set(filter="", more={"sort": "value.rms", "descending": "1"})
    capture_tab.wait(f"drawn.sites.length == {len(taps.values)}")
    wanted = sorted(taps.values, key=lambda name: -rms(taps.values[name]))
    assert capture_tab.drawn["sites"] == wanted
    capture_tab.set(more={"sort": "", "descending": ""})
    row = capture_tab.text(".row:has-text('GPT/embed')")
    assert "float32[2, 6, 8]" in row and "programs.py:" in row


def test_a_filter_that_picks_nothing_says_so(capture_tab):
    capture_tab.show("sites", "drawn.sites.length == 0", filter="**/nothing")
    assert "No site matches" in capture_tab.text(".table-body")
    assert "0 of" in capture_tab.text(".filter-count")
    capture_tab.set(filter="")


def test_histograms_of_a_run_have_the_counts_of_every_step(run_tab, run):
    drawn = run_tab.show("histograms", "drawn.length == 2", site="GPT/blocks/1")
    for panel, kind in zip(drawn, ("value", "grad"), strict=True):
        series = run[f"GPT/blocks/1/{kind}_histogram"]
        assert [line["label"] for line in panel["lines"]] == [str(step) for step in series.steps]
        np.testing.assert_array_equal([line["counts"] for line in panel["lines"]], series.counts)
    run_tab.set(more={"form": "heat"})
    run_tab.wait("root.querySelectorAll('figure canvas').length == 2")
    run_tab.set(more={"form": ""}, site="")


def test_histograms_of_a_capture_count_every_element(capture_tab, captured):
    taps, _ = captured
    drawn = capture_tab.show("histograms", "drawn.length == 2")
    for panel, arrays in zip(drawn, (taps.values, taps.grads), strict=True):
        assert [line["label"] for line in panel["lines"]] == list(arrays)
        for line in panel["lines"]:
            counts, _ = np.histogram(np.asarray(arrays[line["label"]], np.float64), line["edges"])
            np.testing.assert_array_equal(line["counts"], counts)


def test_module_graph_folds_by_path_and_opens_on_a_click(capture_tab):
    drawn = capture_tab.show("modules", "drawn.boxes", more={"open": "GPT|GPT/blocks"})
    capture_tab.wait("drawn.boxes.length == 6")
    paths = {box["path"]: box for box in capture_tab.drawn["boxes"]}
    assert {"GPT", "GPT/blocks", "GPT/embed", "GPT/head"} <= paths.keys()
    outer, inner = paths["GPT"], paths["GPT/blocks/0"]
    assert outer["x"] < inner["x"] and inner["y"] + inner["height"] < outer["y"] + outer["height"]
    drawn = capture_tab.show(
        "modules", "drawn.boxes.length > 6", more={"open": "GPT|GPT/blocks|GPT/blocks/0"}
    )
    edges = {(edge["from"], edge["to"]): edge["label"] for edge in drawn["edges"]}
    assert edges["GPT/embed", "GPT/blocks/0/norm"] == "float32[2, 6, 8]"
    block = "GPT/blocks/0"
    assert edges.keys() == {
        *(("GPT/embed", inside) for inside in (f"{block}/norm", f"{block}/mlp", block)),
        (f"{block}/norm", f"{block}/attn"),
        (f"{block}/attn", f"{block}/mlp"),
        (block, "GPT/blocks/1"),
        ("GPT/blocks/1", "GPT/head"),
    }
    capture_tab.set(more={"open": ""})


def test_alerts_lead_to_the_site_in_one_click(run_tab, run):
    drawn = run_tab.show("alerts", "drawn.length")
    assert [mark["step"] for mark in drawn] == [event.step for event in run.alerts]
    assert [mark["message"] for mark in drawn] == [event.message for event in run.alerts]
    run_tab.click(".event:nth-child(2) .event-title")
    assert run_tab.state["site"] == run.alerts[1].site
    assert run_tab.state["step"] == run.alerts[1].step
    run_tab.set(site="", step=None)


def test_source_has_every_site_at_its_line(capture_tab, captured):
    taps, _ = captured
    drawn = capture_tab.show("source", "drawn && drawn.margins.length", site="GPT/blocks/0/mlp")
    assert drawn["file"].endswith("programs.py")
    wanted = {}
    for site in taps.sites:
        wanted.setdefault(int(site.source.rpartition(":")[2]), []).append(site.name)
    assert {margin["line"]: margin["sites"] for margin in drawn["margins"]} == wanted
    selected = capture_tab.text(".line.selected code")
    assert "self.mlp(x)" in selected
    capture_tab.set(site="")


def test_tokens_have_the_norm_of_every_layer(capture_tab, captured):
    taps, tokens = captured
    drawn = capture_tab.show("tokens", "drawn && drawn.numbers", more={"grid": "", "example": "1"})
    assert drawn["grid"] == "norm of the value" and drawn["example"] == 1
    norms = np.reshape(drawn["numbers"], (len(drawn["rows"]), len(tokens), LENGTH))
    labels = capture_tab.evaluate("page.subject().data.tokens[0].rowLabels")
    for label, of_site in zip(labels, norms, strict=True):
        wanted = np.linalg.norm(np.asarray(taps.values[label]).reshape(2, LENGTH, -1), axis=-1)
        np.testing.assert_allclose(of_site, wanted, rtol=1e-5)
    shown = capture_tab.evaluate("page.subject().data.tokens[0].tokens")
    assert shown == tokens
    capture_tab.set(more={"example": ""})


def test_heads_are_small_multiples_of_the_weights(capture_tab, captured):
    taps, _ = captured
    name = f"GPT/blocks/{LAYERS - 1}/attn:weights"
    drawn = capture_tab.show("heads", f"drawn && drawn.site == '{name}'", site=name)
    assert len(drawn["heads"]) == HEADS
    for head in drawn["heads"]:
        wanted = np.asarray(taps.values[name])[0, head["head"]]
        np.testing.assert_allclose(np.reshape(head["numbers"], wanted.shape), wanted, rtol=1e-6)
    capture_tab.set(site="")


def test_array_inspector_shows_the_slice_that_is_chosen(capture_tab, captured):
    taps, _ = captured
    name = "GPT/blocks/0/mlp"
    more = {"of": "grad", "axes": "2,0", "indices": "0,3,0"}
    drawn = capture_tab.show("arrays", "drawn && drawn.of == 'grad'", site=name, more=more)
    wanted = np.asarray(taps.grads[name])[:, 3, :].T
    assert (drawn["rows"], drawn["columns"]) == wanted.shape
    np.testing.assert_allclose(np.reshape(drawn["numbers"], wanted.shape), wanted, rtol=1e-6)
    capture_tab.set(site="", more={"of": "", "axes": "", "indices": ""})


def test_two_steps_of_a_run_are_compared(run_tab, run):
    drawn = run_tab.show(
        "compare", "drawn && drawn.rows", stat="value.rms", more={"from": "2", "to": "8"}
    )
    assert (drawn["a"], drawn["b"]) == ("step 2", "step 8")
    for row in drawn["rows"]:
        series = run[f"{row['site']}/value_rms"]
        first, second = (series.values[list(series.steps).index(step)] for step in (2, 8))
        assert (row["a"], row["b"]) == pytest.approx((first, second), rel=1e-6)
        assert row["differs"] == (abs(first - second) > 0.01 * max(abs(first), abs(second)))


def test_series_of_the_selected_site_are_beside_every_view(run_tab, run):
    run_tab.show("sites", "series.length == 2", site="GPT/blocks/0/mlp", stat="grad.rms")
    series = run_tab.evaluate("page.inspect().series")
    for line, name in zip(series, ("grad_rms", "value_rms"), strict=True):
        logged = run[f"GPT/blocks/0/mlp/{name}"]
        assert line["steps"] == logged.steps.tolist()
        np.testing.assert_allclose(line["numbers"], logged.values, rtol=1e-6)
    run_tab.set(site="", stat="")


def test_two_captures_are_compared_by_their_first_difference(chromium, captured, tmp_path):
    taps, _ = captured
    changed = tapax.Taps(
        type(taps.values)(
            {k: np.asarray(x) * (2 if "1/mlp" in k else 1) for k, x in taps.values.items()}
        ),
        taps.grads,
        taps.valid,
        taps.sites,
    )
    tapax.view(taps, changed).save(tmp_path / "two.html")
    tab = chromium.open(tmp_path / "two.html", "#view=compare")
    tab.wait("drawn && drawn.rows")
    assert tab.drawn["first"] == "GPT/blocks/1/mlp"
    assert [row["site"] for row in tab.drawn["rows"] if row["differs"]] == ["GPT/blocks/1/mlp"]
    tab.check_quiet()
    tab.close()


def test_two_runs_are_compared_at_a_step_that_the_page_names(chromium, tmp_path):
    for name, every, count in (("a", 10, 11), ("b", 25, 41)):
        log = tapax.sink.jsonl(tmp_path / f"{name}.jsonl")
        for step in range(0, every * count, every):
            log(step, {"h/value_rms": float(step)})
    logs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    tapax.view(*logs).save(tmp_path / "two.html")
    tab = chromium.open(tmp_path / "two.html", "#view=compare")
    tab.wait("drawn && drawn.rows")

    def read():
        (row,) = tab.drawn["rows"]
        heads = tab.evaluate(
            "[...root.querySelectorAll('.compare th.number')].map(x => x.textContent)"
        )
        return [*heads[:2], row["a"], row["b"]]

    # The last step of both, and the last steps up to the selected one.
    assert read() == ["a.jsonl, step 100", "b.jsonl, step 100", 100, 100]
    tab.set(step=30)
    tab.wait("drawn.rows[0].a == 30")
    assert read() == ["a.jsonl, step 30", "b.jsonl, step 25", 30, 25]
    tab.set(step=500)
    tab.wait("drawn.rows[0].b == 500")
    assert read() == ["a.jsonl, step 100", "b.jsonl, step 500", 100, 500]
    tab.check_quiet()
    tab.close()


def test_captures_without_a_common_number_are_not_called_equal(chromium, tmp_path):
    captured = [
        tapax.capture(lambda x: tapax.sow(2 * x, name))(np.ones(3, np.float32))[1]  # noqa: B023
        for name in ("a", "b")
    ]
    tapax.view(*captured).save(tmp_path / "two.html")
    tab = chromium.open(tmp_path / "two.html", "#view=compare")
    tab.wait("drawn && drawn.rows")
    assert tab.drawn["rows"] == []
    said = tab.evaluate("root.querySelector('.summary').textContent")
    assert said.startswith("No site that the filter picks has this number in both")
    assert "1 site only in capture a, 1 only in capture b" in said
    tab.check_quiet()
    tab.close()


def test_a_difference_in_a_scan_names_each_iteration_once(chromium, tmp_path):
    def fn(x, wrong):
        def body(carry, i):
            return carry, tapax.sow(carry * (1 + i) + wrong * (i == 2), "h")

        return jax.lax.scan(body, x, jnp.arange(4.0))[1].sum()

    captured = tapax.capture(fn, grads=None)
    difference = tapax.diff(captured(1.0, 0.0)[1], captured(1.0, 0.5)[1])
    tapax.view(difference).save(tmp_path / "difference.html")
    tab = chromium.open(tmp_path / "difference.html")
    tab.wait("drawn && drawn.entries")
    assert tab.evaluate("root.querySelector('.summary button').textContent") == "h[2]"
    assert tab.evaluate("root.querySelector('td.site-name').textContent") == "h[2]"
    tab.check_quiet()
    tab.close()


def test_a_message_that_was_dismissed_hides_no_other(run_tab):
    texts = "[...root.querySelectorAll('.message > span')].map((each) => each.textContent)"

    def show(*messages):
        found = [{"level": "warning", "text": text} for text in messages]
        run_tab.evaluate(f"page.subject().data.messages = {json.dumps(found)}")
        run_tab.evaluate("page.update()")
        return run_tab.evaluate(texts)

    assert show("The log is still being read.") == ["The log is still being read."]
    run_tab.click(".message .close")
    assert run_tab.evaluate(texts) == []
    assert show("The log is still being read.", "A line was left out.") == ["A line was left out."]
    show()
