"""The page in a notebook: a widget while the kernel runs, and one HTML element in the saved file.

The output of the cell has both. JupyterLab shows the widget. Without a kernel, as on a page of
nbconvert or in a viewer of notebooks, the element appears: a frame with the saved page.
"""

from __future__ import annotations

import html
import importlib.util
import json
import threading
import weakref
from typing import Any

from tapax.viewer._assets import read_bundle
from tapax.viewer._html import make_document
from tapax.viewer._payload import Payload
from tapax.viewer._server import POLL_SECONDS

HEIGHT = 640
STATIC_BYTES = 2**24
"""The size above which a page is not stored in the notebook."""


def display_page(page: Any) -> None:
    """Show a page as an output of the running cell."""
    importlib.import_module("IPython.display").display(page)


def make_mime_bundle(payload: Payload, text: str) -> dict[str, Any]:
    """Make the output of a cell that shows a page; without anywidget, it has only the frame."""
    bundle: dict[str, Any] = {"text/plain": text, "text/html": _make_frame(payload)}
    if importlib.util.find_spec("anywidget") is None:
        return bundle
    shown = make_widget(payload)._repr_mimebundle_()
    data = shown[0] if isinstance(shown, tuple) else shown
    return {**(data or {}), **bundle}


def _make_frame(payload: Payload) -> str:
    document = make_document(*payload.read_whole())
    if len(document) > STATIC_BYTES:
        return (
            f"<p>This page takes {len(document) / 1e6:.0f} MB, which is too much to keep in a "
            "notebook: run the cell again, or write a file with <code>.save(path)</code>.</p>"
        )
    return (
        f'<iframe sandbox="allow-scripts" style="width:100%;height:{HEIGHT}px;border:0" '
        f'srcdoc="{html.escape(document.decode())}"></iframe>'
    )


def make_widget(payload: Payload) -> Any:
    """Make the widget of a page, which sends blobs when the page asks for them."""
    anywidget, traitlets = map(importlib.import_module, ("anywidget", "traitlets"))

    class PageWidget(anywidget.AnyWidget):
        _esm = f"{read_bundle()}\nexport default {{ render: tapaxPage.render }};\n"
        header = traitlets.Unicode().tag(sync=True)
        blobs = traitlets.Dict().tag(sync=True)
        height = traitlets.Int(HEIGHT).tag(sync=True)

        def answer(self, _: Any, content: Any, buffers: Any) -> None:
            """Answer a message from the page."""
            match content:
                case {"kind": "blob", "blob": int(number)}:
                    blob = payload.read_blob(number)
                    if blob is not None:
                        self.send({"kind": "blob", "blob": number}, [blob])
                case {"kind": "follow", "after": int(number)}:
                    _send_updates(self, payload, number)

    # A kernel answers no messages while it runs a cell, so send what the first view needs.
    header = json.dumps(payload.read_header(), allow_nan=False)
    blobs = {str(number): blob for number, blob in payload.read_urgent_blobs().items()}
    widget = PageWidget(header=header, blobs=blobs)
    widget.on_msg(widget.answer)
    if payload.is_followed:
        stop = threading.Event()
        weakref.finalize(widget, stop.set)
        _follow(weakref.ref(widget), payload, stop)
    return widget


def _send_updates(widget: Any, payload: Payload, after: int) -> int:
    """Send the updates after number `after`, and return the number of the last."""
    updates = payload.read_updates(after)
    if updates is None:
        return after
    for update in updates:
        blobs = payload.read_blobs_of(update)
        message = {"kind": "update", "update": update, "blobs": list(blobs)}
        widget.send(message, list(blobs.values()))
        after = update["revision"]
    return after


def _follow(reference: weakref.ref[Any], payload: Payload, stop: threading.Event) -> None:
    """Send updates from a thread, even while the kernel runs a cell."""
    subjects = payload.read_header()["subjects"]
    sent = max(subject.get("revision", 0) for subject in subjects)

    def work(sent: int) -> None:
        while not stop.wait(POLL_SECONDS):
            widget = reference()
            if widget is None:
                return
            sent = _send_updates(widget, payload, sent)
            del widget

    threading.Thread(target=work, args=(sent,), name="tapax-widget", daemon=True).start()
