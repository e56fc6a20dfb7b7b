"""The page of the local server in a real browser: served, followed, and safe from bad names."""

import time

import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tapax import sink
from tapax.viewer._page import make_page

pytestmark = pytest.mark.once

EVIL = "<img src=x onerror=document.title='hacked'>"
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def check_requests(tab, address):
    """Check that the page logged no error, and sent requests only to its server."""
    seen = tab._call("seen")
    assert seen["errors"] == [] and tab.evaluate("page.inspect().errors") == []
    origin = address.partition("?")[0]
    assert seen["requests"] and all(url.startswith(origin) for url in seen["requests"])


def test_a_record_is_drawn_within_a_second_of_being_written(chromium, tmp_path):
    log = sink.jsonl(tmp_path / "run.jsonl")
    names = [f"Net/blocks/{i}/mlp" for i in range(3)]
    log(0, {f"{name}/value_rms": 1.0 for name in names})
    with make_page(log.path) as page:
        tab = chromium.open(page.serve())
        delays = []
        for step in range(1, 6):
            start = time.perf_counter()
            log(10 * step, {f"{name}/value_rms": float(i + step) for i, name in enumerate(names)})
            tab.wait(f"drawn.width === {step + 1}")
            delays.append(time.perf_counter() - start)
        drawn = tab.drawn
        numbers = np.reshape(drawn["numbers"], (drawn["height"], drawn["width"]))
        np.testing.assert_array_equal(
            numbers, [[1, *(i + s for s in range(1, 6))] for i in range(3)]
        )
        assert tab.text(".live") == "live"
        check_requests(tab, page.serve())
        tab.close()
    assert sorted(delays)[2] < 1


def test_new_sites_alerts_and_messages_appear_on_an_open_page(chromium, tmp_path):
    path = tmp_path / "run.jsonl"
    log = sink.jsonl(path)
    with make_page(path) as page:
        tab = chromium.open(page.serve())
        assert "The log contains no records yet." in tab.text(".messages")
        log(0, {f"{EVIL}/value_rms": 1.0, "b/value_rms": 2.0})
        tab.wait("drawn.sites?.length === 2")
        assert tab.drawn["sites"] == [EVIL, "b"]
        with open(path, "ab") as file:
            file.write(b'{"tapax": 1, "st')
        tab.wait("root.querySelector('.messages').textContent.includes('is incomplete')")
        check_requests(tab, page.serve())
        tab.close()


def test_names_are_text_in_every_view_of_the_server(chromium, tmp_path):
    def net(x):
        for name in ("Net/a", EVIL, f"Net/{EVIL}/b"):
            x = tapax.sow(jnp.sin(x), name)
        return x.sum()

    _, taps = tapax.capture(net)(jnp.ones((2, 3, 4)))
    log = tapax.Log()
    log(0, {f"{EVIL}/value_rms": 1.0})
    with make_page(taps, log, tapax.diff(taps, taps)) as page:
        tab = chromium.open(page.serve())
        views = tab.evaluate("[...root.querySelectorAll('nav button')].length")
        for run in range(3):
            for view in range(views):
                tab.set(run=run, site=EVIL)
                tab.evaluate(f"root.querySelectorAll('nav button')[{view}].click()")
                tab._call("evaluate", script=DRAWN)
                assert tab.evaluate("root.querySelectorAll('img').length") == 0
        assert tab.evaluate("document.title") == "tapax"
        check_requests(tab, page.serve())
        tab.close()


def test_a_page_whose_server_is_gone_says_so(chromium, tmp_path):
    log = sink.jsonl(tmp_path / "run.jsonl")
    log(0, {"a/value_rms": 1.0})
    page = make_page(log.path)
    tab = chromium.open(page.serve())
    page.close()
    tab.wait("root.querySelector('.live').textContent === 'connection lost'")
    tab.close()


def test_another_site_cannot_read_the_page(chromium, tmp_path):
    """A page of another origin reads nothing, even with the full address and token."""
    _, taps = tapax.capture(lambda x: tapax.sow(x, "h"))(1.0)
    other = tmp_path / "other.html"
    other.write_text("<title>other</title>")
    with make_page(taps) as page:
        tab = chromium.open(other, wait="document.title === 'other'")
        address = page.serve().replace("/?", "/header?")
        script = f"fetch({address!r}).then((r) => r.text()).catch((e) => String(e))"
        assert "Failed to fetch" in tab._call("evaluate", script=script)
        tab.close()
