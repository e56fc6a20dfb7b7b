"""`view`: one page for a capture, a run, a finding or a dataset; and `Page`, which it returns."""

from __future__ import annotations

import os
import threading
from typing import Any

from tapax.viewer import _browser
from tapax.viewer._blobs import Blobs
from tapax.viewer._captures import Tokens
from tapax.viewer._datasets import Decode, Directions
from tapax.viewer._followed_run import FollowedRun
from tapax.viewer._format import FORMAT, VERSION, Header
from tapax.viewer._html import save_html
from tapax.viewer._payload import Payload
from tapax.viewer._server import Server
from tapax.viewer._site_columns import Sources
from tapax.viewer._subjects import Options, Viewable, make_subjects

NO_OPTIONS = Options()


class Page:
    """A page in the browser: see `view`. In a notebook it shows itself.

    A `with` block closes it in the end. Several pages may be open at a time.
    """

    def __init__(self, payload: Payload):
        self._payload = payload
        self._server: Server | None = None
        self._lock = threading.Lock()
        self._opening: threading.Timer | None = None

    @property
    def header(self) -> Header:
        """What the page is told of its subjects, as `tapax.viewer._format` specifies it."""
        return self._payload.read_header()

    @property
    def blobs(self) -> Blobs:
        """The blobs that the header refers to, by number."""
        return self._payload.blobs

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to one HTML file, which opens from disk and makes no request.

        A run that is being written is saved as far as it goes. A page that is saved as soon as it
        is made does not open in the browser.

        Args:
            path: the file, such as `"run.html"`; one that exists is replaced.

        Raises:
            OSError: if `path` cannot be written.
        """
        if self._opening is not None:
            self._opening.cancel()
        save_html(path, *self._payload.read_whole())

    def serve(self, port: int = 0) -> str:
        """Serve the page to browsers on this machine, and return its address.

        The address has a random token in it: whoever knows it can read the page. A second call
        returns the same address.

        Args:
            port: the port to listen on, on the loopback interface; 0 for any that is free.

        Raises:
            OSError: if the port is taken, or if the page was not built.
        """
        return self._serve(port).url

    def _serve(self, port: int = 0) -> Server:
        with self._lock:
            if self._server is None or self._server.is_closed:
                self._server = Server(self._payload, port)
            return self._server

    def open(self, *, waits: bool = True) -> None:
        """Open the page in the browser, soon: nothing happens if it is saved right away.

        Args:
            waits: whether a program that has come to its end goes on while the page is open.
        """
        self._opening = _browser.open_soon(self._serve, waits)

    def close(self) -> None:
        """Stop serving the page."""
        if self._opening is not None:
            self._opening.cancel()
        with self._lock:
            if self._server is not None:
                self._server.close()

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(subject["name"] for subject in self.header["subjects"])
        return f"<Page of {names}; .save('page.html') writes it>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        if not _browser.is_notebook():
            return {"text/plain": repr(self)}
        from tapax.viewer._notebook import make_mime_bundle

        return make_mime_bundle(self._payload, repr(self))


def view(
    *what: Viewable,
    tokens: Tokens | None = None,
    directions: Directions | None = None,
    decode: Decode | None = None,
) -> Page:
    """Show what was captured, logged or found in the browser.

    In a notebook the page is the output of the cell. Elsewhere a local server, which answers this
    machine alone, brings it to the browser. The log of a run that is being written is followed.

    Args:
        what: taps, a table of sites or residuals, a log, a finding, a difference, numbers by token
            (`tapax.viewer.ByToken`), a dataset of activations, or the path of a log or of taps;
            several of them are shown together, and compared.
        tokens: the text of each token, by example and position, for views of taps by token.
        directions: latents whose most active rows of a dataset are shown, by label: a site, and
            the number of a neuron of it or a vector. The default is one neuron of each site.
        decode: turns an integer of the column `token` of a dataset into text.

    Returns:
        A `Page`, whose `save` writes one self-contained HTML file instead.

    Raises:
        TypeError: if `what` is none of these.
        FileNotFoundError, ValueError: if there is no log, and no taps, at a path.

    >>> import os, tempfile, jax.numpy as jnp, tapax
    >>> _, taps = tapax.capture(lambda x: tapax.sow(2 * x, "h"))(jnp.ones(3))
    >>> path = os.path.join(tempfile.mkdtemp(), "taps.html")
    >>> tapax.view(taps).save(path)
    """
    page = make_page(*what, options=Options(tokens, directions, decode))
    if not _browser.is_notebook():
        page.open()
    return page


def make_page(*what: Viewable | FollowedRun, options: Options = NO_OPTIONS) -> Page:
    """Make the page of `view`, without opening it."""
    if not what:
        raise TypeError("tapax.view takes at least one capture, table of sites, log or path.")
    blobs = Blobs()
    sources = Sources(blobs)
    made = make_subjects(what, blobs, sources, options)
    header: Header = {
        "format": FORMAT,
        "version": VERSION,
        "title": " and ".join(dict.fromkeys(subject["name"] for subject in made.subjects)),
        "subjects": made.subjects,
        "sources": sources.files,
        "blobs": len(blobs),
    }
    return Page(Payload(header, blobs, made.runs))
