"""The page as a whole: linked views, the address, keys, themes, hostile names, broken logs."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

import tapax

pytestmark = pytest.mark.once

VIEWS = (
    "layers", "sites", "histograms", "alerts", "modules", "source", "tokens", "heads", "arrays",
    "compare", "dataset",
)  # fmt: skip
HOSTILE = "<img src=x onerror=\"document.title='pwned'\">"


def save(what, path, **options):
    tapax.view(what, **options).save(path)
    return path


@pytest.fixture
def open_page(chromium):
    """Open pages, and check at the end that they logged no errors and made no requests."""
    tabs = []

    def open_one(*args, **options):
        tabs.append(chromium.open(*args, **options))
        return tabs[-1]

    yield open_one
    for tab in tabs:
        tab.check_quiet()
        tab.close()


@pytest.fixture
def log_of():
    def make(records, alerts=()):
        log = tapax.Log()
        for step, record in records:
            log(step, record)
        for event in alerts:
            log.alert(event)
        return log

    return make


def test_selecting_a_site_in_one_view_selects_it_in_all(open_page, capture_page):
    tab = open_page(capture_page, "#view=sites")
    tab.click(".row:has-text('GPT/blocks/1/mlp')")
    assert tab.state["site"] == "GPT/blocks/1/mlp"
    tab.set(view="modules", more={"open": "GPT|GPT/blocks|GPT/blocks/1"})
    tab.wait("root.querySelector('.module.selected')")
    assert tab.text(".module.selected text") == "mlp"
    tab.set(view="source")
    tab.wait("root.querySelector('.line.selected')")
    tab.set(view="arrays")
    tab.wait("drawn.site == 'GPT/blocks/1/mlp'")
    assert "GPT/blocks/1/mlp" in tab.text(".detail h2")


def test_the_address_brings_a_colleague_to_the_same_view(open_page, run_page):
    tab = open_page(run_page)
    tab.set(view="sites", filter="**/attn/**", site="GPT/blocks/0/attn/out", stat="grad.mean")
    tab.set(theme="dark", more={"sort": "grad.mean"})
    tab.wait("drawn.sites")
    address = tab.evaluate("location.hash")
    twin = open_page(run_page, address)
    twin.wait("drawn.sites")
    assert twin.state == tab.state
    assert twin.drawn["sites"] == tab.drawn["sites"]
    assert twin.evaluate("root.querySelector('.page').dataset.theme") == "dark"


def test_everything_can_be_reached_with_keys(open_page, run_page):
    tab = open_page(run_page)
    tab.evaluate("root.querySelector('.page').focus()")
    for number, view in enumerate(VIEWS[:9], 1):
        tab.press(str(number))
        assert tab.state["view"] == view
    tab.press("]")
    assert tab.state["view"] == "compare"
    tab.press("1")
    tab.press("ArrowDown")
    tab.press("ArrowDown")
    sites = tab.evaluate("page.subject().sites.map(site => site.name)")
    assert tab.state["site"] == sites[1]
    tab.press("Escape")
    assert tab.state["site"] == ""
    tab.press("/")
    for key in "**/mlp":
        tab.press(key)
    assert tab.state["filter"] == "**/mlp"
    tab.press("Escape")
    tab.press("t")


def test_themes_differ_in_colours_alone(open_page, capture_page):
    boxes = []
    for dark in (False, True):
        tab = open_page(capture_page, "#site=GPT/blocks/0/mlp", dark=dark)
        tab.wait("drawn.cells")
        boxes.append(
            tab.evaluate(
                "[...root.querySelectorAll('*')].filter(e => !e.closest('.uplot'))"
                ".map(e => { const b = e.getBoundingClientRect(); "
                "return [e.tagName, b.x, b.y, b.width, b.height]; })"
            )
        )
    assert boxes[0] == boxes[1]


@pytest.mark.parametrize("size", [(1280, 800), (480, 860)])
def test_nothing_is_wider_than_the_window(open_page, capture_page, run_page, size):
    for page in (capture_page, run_page):
        tab = open_page(page, size=size)
        for view in VIEWS:
            tab.set(view=view, site="GPT/blocks/0/mlp")
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert tab.evaluate("root.querySelector('.page').scrollWidth <= innerWidth")


def test_hostile_names_are_shown_as_text(open_page, tmp_path, log_of):
    def program(x):
        with tapax.scope(HOSTILE):
            return tapax.sow(jnp.sin(x), "</script><script>document.title='pwned'</script>")

    _, taps = tapax.capture(program)(jnp.ones((2, 3, 4)))
    tokens = [[HOSTILE] * 3] * 2
    alert = tapax.monitoring.AlertEvent(1, HOSTILE, "rms", float("nan"), f"{HOSTILE} is bad")
    bins = tapax.Histogram(np.ones(3), np.arange(4.0))
    record = {f"{HOSTILE}/value_rms": 1.0, f"{HOSTILE}/value_histogram": bins}
    log = log_of([(0, record), (1, record)], [alert])
    pages = [save(taps, tmp_path / "taps.html", tokens=tokens), save(log, tmp_path / "log.html")]
    for page in pages:
        assert HOSTILE.encode() not in page.read_bytes()
        tab = open_page(page)
        name = tab.evaluate("page.subject().sites[0].name")
        for view in VIEWS:
            tab.set(view=view, site=name)
            tab.evaluate("new Promise(done => setTimeout(done, 60))")
            assert tab.evaluate("root.querySelectorAll('img, script, iframe').length") == 0
        assert tab.evaluate("document.title") != "pwned"
        tab.set(view="sites")
        tab.wait("drawn.sites")
        assert tab.text(".detail h2") == name and "<img" in name
        assert tab.text(".row .site-name").lstrip("…") in name


def test_a_saved_page_allows_no_request_and_no_other_script(capture_page):
    text = capture_page.read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and "connect-src" not in rules
    assert re.fullmatch(r"'sha256-[\w+/=]+' blob:", rules["script-src"])
    assert not re.search(r'(src|href)="http', text)


def test_an_empty_log_says_that_it_is_empty(open_page, tmp_path):
    (tmp_path / "run.jsonl").write_text("")
    tab = open_page(save(tmp_path / "run.jsonl", tmp_path / "page.html"))
    assert "contains no records yet" in tab.text(".messages")
    for view in VIEWS:
        tab.set(view=view)
        assert tab.evaluate("root.querySelector('.view').textContent.length") > 10


def test_a_log_that_is_cut_is_shown_as_far_as_it_goes(open_page, run_log, tmp_path):
    lines = run_log.read_bytes().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    tab = open_page(save(cut, tmp_path / "page.html"))
    assert "The last line of the log" in tab.text(".messages")
    steps = [json.loads(line)["step"] for line in lines[:-1] if b'"record"' in line]
    assert tab.evaluate("page.subject().steps") == sorted(set(steps))


def test_a_log_of_another_version_says_so_on_the_page(open_page, tmp_path):
    (tmp_path / "run.jsonl").write_text('{"tapax": 99, "step": 0, "record": {}}\n')
    tab = open_page(save(tmp_path / "run.jsonl", tmp_path / "page.html"))
    assert "version 99 of the format of logs" in tab.text(".messages")


def test_a_page_that_is_cut_says_that_it_is_not_whole(chromium, capture_page, tmp_path):
    content = capture_page.read_bytes()
    cut = tmp_path / "cut.html"
    script = content.index(b"<script>")
    header = content.index(b'id="tapax-blob')
    end = content.index(b"</script>", script) + 9
    cut.write_bytes(content[: content.rindex(b"<script", 0, header)] + content[script:end])
    tab = chromium.open(
        cut, wait="document.getElementById('tapax-page')?.shadowRoot?.querySelector('.empty')"
    )
    assert "The file is not complete" in tab.text(".empty")
    tab.close()


def test_numbers_that_are_not_finite_or_missing_stand_out(open_page, tmp_path, log_of):
    records = [
        (0, {"net/a/value_rms": 1.0, "net/b/value_rms": 2.0}),
        (1, {"net/a/value_rms": float("nan")}),
        (2, {"net/a/value_rms": float("inf"), "net/b/value_rms": 1e30}),
    ]
    tab = open_page(save(log_of(records), tmp_path / "page.html"))
    tab.wait("drawn.numbers")
    missing = -(2.0**-149)
    assert tab.drawn["numbers"] == [1, "NaN", "Infinity", 2, missing, pytest.approx(1e30)]
    area = tab.drawn["area"]

    def colour(row, column):
        x = area["x"] + (column + 0.5) * area["width"] / 3
        y = area["y"] + (row + 0.5) * area["height"] / 2
        return tab.pixel("canvas.plot", round(x), round(y))

    assert colour(0, 1) == colour(0, 2) == [214, 20, 122, 255]
    assert colour(1, 1)[3] == 0
    assert colour(1, 0) != colour(0, 1)


def test_a_table_of_sites_is_shown_without_numbers(open_page, tmp_path):
    sites = tapax.sites(lambda x: tapax.sow(jnp.sin(x), "net/h"))(jnp.ones(3))
    tab = open_page(save(sites, tmp_path / "sites.html"))
    tab.wait("drawn.sites")
    assert tab.drawn["sites"] == ["net/h"]
    tab.set(view="layers")
    assert "No numbers here" in tab.text(".view")


def test_scans_have_a_row_for_each_layer_and_one_module(open_page, tmp_path):
    import jax

    def program(x):
        def layer(x, w):
            return tapax.sow(jnp.tanh(x * w), "net/layers/mlp"), None

        return jax.lax.scan(layer, x, jnp.arange(1.0, 4.0))[0]

    _, taps = tapax.capture(program)(jnp.ones((2, 3)))
    tab = open_page(save(taps, tmp_path / "scan.html"), "#view=modules")
    tab.wait("drawn.boxes")
    boxes = {box["path"]: box for box in tab.drawn["boxes"]}
    assert boxes["net/layers/mlp"]["repeats"] == "× 3"
    tab.set(view="sites")
    tab.wait("drawn.sites")
    assert tab.drawn["sites"] == [f"net/layers/mlp[{i}]" for i in range(3)]
    assert "float32[2, 3]" in tab.text(".row")
    tab.set(view="layers")
    tab.wait("drawn.cells")
    numbers = {cell["sites"][0]: cell["number"] for cell in tab.drawn["cells"]}
    for i, x in enumerate(np.asarray(taps.values["net/layers/mlp"])):
        wanted = np.sqrt(np.mean(np.square(x)))
        assert numbers[f"net/layers/mlp[{i}]"] == pytest.approx(wanted, rel=1e-5)


def test_first_view_of_a_capture_of_four_hundred_sites_is_fast(chromium, tmp_path):
    def program(x):
        for i in range(100):
            for part in ("norm", "attn", "up", "down"):
                x = tapax.sow(jnp.tanh(x), f"net/blocks/{i}/{part}")
        return x

    _, taps = tapax.capture(program)(jnp.linspace(-1, 1, 16))
    page = save(taps, tmp_path / "capture.html")
    seconds = []
    for _ in range(3):
        tab = chromium.open(page)
        assert len(tab.drawn["cells"]) == 400
        seconds.append(tab.seconds)
        tab.close()
    # The limit is one second; a machine that tests on all its cores gets more.
    assert min(seconds) < 3
