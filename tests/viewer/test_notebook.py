"""The page in a notebook: the output of a cell, and the messages of the widget."""

import html
import json
import re
import time

import pytest

import tapax
from tapax import sink
from tapax.viewer import _browser
from tapax.viewer._notebook import make_mime_bundle, make_widget
from tapax.viewer._page import make_page
from tests.viewer.payload_decoder import Reader, read_saved

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture
def taps():
    return tapax.capture(lambda x: tapax.sow(x, EVIL))(2.0)[1]


def read_frame(markup):
    """Return the saved page in the element of a notebook."""
    found = re.fullmatch(r'<iframe sandbox="allow-scripts" [^>]*srcdoc="([^"]*)"></iframe>', markup)
    return html.unescape(found[1])


def test_the_output_has_a_frame_that_needs_no_kernel(taps, stub_bundle):
    bundle = make_mime_bundle(make_page(taps)._payload, "a page")
    assert bundle["text/plain"] == "a page"
    document = read_frame(bundle["text/html"])
    reader = Reader(*read_saved(document))
    assert reader.numbers[0][EVIL, "value", "rms"] == [2]
    assert "onerror" not in document and "onerror" not in bundle["text/html"]
    assert "default-src 'none'" in document


def test_a_page_that_is_too_large_says_so_in_the_saved_notebook(taps, stub_bundle, monkeypatch):
    monkeypatch.setattr("tapax.viewer._notebook.STATIC_BYTES", 100)
    bundle = make_mime_bundle(make_page(taps)._payload, "a page")
    assert "too much to keep in a notebook" in bundle["text/html"]


def test_a_page_shows_itself_in_a_kernel_alone(taps, stub_bundle, monkeypatch):
    page = make_page(taps)
    assert page._repr_mimebundle_() == {"text/plain": repr(page)}
    monkeypatch.setattr(_browser, "is_notebook", lambda: True)
    assert "text/html" in page._repr_mimebundle_()
    assert tapax.view(taps)._opening is None


@pytest.fixture
def messages(monkeypatch):
    """Record the messages that widgets send to the page."""
    anywidget = pytest.importorskip("anywidget")
    sent = []
    send = lambda widget, content, buffers=None: sent.append((content, buffers))
    monkeypatch.setattr(anywidget.AnyWidget, "send", send)
    return sent


def test_the_widget_sends_the_blobs_that_the_page_asks_for(taps, stub_bundle, messages):
    payload = make_page(taps)._payload
    widget = make_widget(payload)

    def ask(number):
        widget._handle_custom_msg({"kind": "blob", "blob": number}, [])
        content, (blob,) = messages.pop()
        assert content == {"kind": "blob", "blob": number}
        return blob

    reader = Reader(json.loads(widget.header), ask)
    assert reader.numbers[0][EVIL, "value", "rms"] == [2]
    assert "tapaxPage.render" in widget._esm and EVIL not in widget._esm


@pytest.mark.parametrize(
    "content",
    [{"kind": "blob", "blob": -1}, {"kind": "blob", "blob": "../x"}, {"kind": "x"}, [], 3],
)
def test_the_widget_ignores_messages_that_make_no_sense(taps, stub_bundle, messages, content):
    widget = make_widget(make_page(taps)._payload)
    widget._handle_custom_msg(content, [])
    assert messages == []


def test_the_widget_follows_a_run_while_the_kernel_is_busy(tmp_path, stub_bundle, messages):
    """A thread sends updates, since a kernel does not answer messages while it runs a cell."""
    log = sink.jsonl(tmp_path / "run.jsonl")
    log(0, {"a/value_rms": 1.0})
    payload = make_page(log.path)._payload
    widget = make_widget(payload)
    reader = Reader(json.loads(widget.header), payload.read_blob)
    log(1, {"a/value_rms": 2.0})
    deadline = time.monotonic() + 10
    while not messages and time.monotonic() < deadline:
        time.sleep(0.05)
    (update, _), *_ = messages
    reader.apply(update["update"])
    assert reader.numbers[0]["a", "value", "rms"] == [1, 2]
    messages.clear()
    widget._handle_custom_msg({"kind": "follow", "after": 0}, [])
    assert messages[0][0]["update"]["revision"] == 1, "a view that was opened late catches up"
