"""`view`: show a capture, a run, a finding or a dataset; and `Page`, which `view` returns."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

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
    """A page in the browser, which `tapax.view` makes.

    At the end of a notebook cell, it is the output of the cell. A `with` block closes the page at
    the end. Several pages may be open at a time.

    Args:
        payload: The content of the page.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> _, taps = tapax.capture(lambda x: tapax.sow(2 * x, "h"))(jnp.ones(3))
        >>> with tapax.view(taps) as page:
        ...     print(page.header["title"], page.header["blobs"] == len(page.blobs))
        capture True
    """

    def __init__(self, payload: Payload):
        self._payload = payload
        self._server: Server | None = None
        self._lock = threading.Lock()
        self._opening: _browser.Opening | None = None
        self._is_address_known = False

    @property
    def header(self) -> Header:
        """The header of the payload, as `tapax.viewer._format` specifies it."""
        return self._payload.read_header()

    @property
    def blobs(self) -> Blobs:
        """The blobs that the header refers to, by number."""
        return self._payload.blobs

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to one HTML file, which opens from disk and makes no requests.

        If a run is still being written, the file has the steps so far. If you call `save` right
        after `tapax.view`, the page does not open in the browser.

        Args:
            path: The file, such as `"run.html"`; an existing file is replaced.

        Raises:
            OSError: If `path` cannot be written.

        Example:
            >>> import os, tempfile, jax.numpy as jnp, tapax
            >>> _, taps = tapax.capture(lambda x: tapax.sow(2 * x, "h"))(jnp.ones(3))
            >>> path = os.path.join(tempfile.mkdtemp(), "taps.html")
            >>> tapax.view(taps).save(path)
            >>> os.path.exists(path)
            True
        """
        self._cancel_opening()
        save_html(path, *self._payload.read_whole())

    def serve(self, port: int = 0) -> str:
        """Serve the page to browsers on this machine.

        A second call returns the address of the running server, and ignores `port`.

        Args:
            port: The port of the loopback interface to listen on; 0 for any free port.

        Returns:
            The address of the page. It contains a random token: anybody who knows the address can
            read the page.

        Raises:
            OSError: If the port is taken, or the page was not built into this installation.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> _, taps = tapax.capture(lambda x: tapax.sow(2 * x, "h"))(jnp.ones(3))
            >>> with tapax.view(taps) as page:
            ...     print(page.serve().startswith("http://127.0.0.1:"))
            True
        """
        self._is_address_known = True
        return self._serve(port).url

    def _serve(self, port: int = 0) -> Server:
        with self._lock:
            if self._server is None or self._server.is_closed:
                self._server = Server(self._payload, port)
            return self._server

    def open(self, *, waits: bool = True) -> None:
        """Open the page in the browser after a moment, unless `save` or `close` is called first.

        Args:
            waits: If True, a program that reaches its end first waits until no browser shows the
                page any more.

        Raises:
            FileNotFoundError: If the page was not built into this installation.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> _, taps = tapax.capture(lambda x: tapax.sow(2 * x, "h"))(jnp.ones(3))
            >>> page = tapax.view(taps)  # calls `open`, except in a notebook
            >>> page.close()
        """
        self._opening = _browser.Opening(self._serve(), waits)

    def _cancel_opening(self) -> None:
        """Do not open the page if it has not opened yet, nor serve it if nobody asked for that."""
        if self._opening is None or self._opening.has_begun:
            return
        self._opening.cancel()
        if self._server is not None and not self._is_address_known:
            self._server.close()

    def close(self) -> None:
        """Stop serving the page.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> _, taps = tapax.capture(lambda x: tapax.sow(2 * x, "h"))(jnp.ones(3))
            >>> page = tapax.view(taps)
            >>> address = page.serve()
            >>> page.close()
        """
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
    *what: Viewable | Sequence[Viewable],
    tokens: Tokens | None = None,
    directions: Directions | None = None,
    decode: Decode | None = None,
) -> Page:
    """Show captures, runs, findings and datasets in the browser.

    In a notebook, the page is the output of the cell. Elsewhere, a local server delivers the page
    to the browser, and answers only this machine. The page follows the log of a run that is still
    being written.

    Args:
        *what: Taps, a table of sites or residuals, a log, a finding, a difference, numbers by token
            (`tapax.viewer.ByToken`), a dataset of activations, or the path of a log, of taps or of
            a dataset. The page shows several of these, or a list of them, together, and compares
            them.
        tokens: The text of each token, for views of taps by token: a list of strings for each
            example.
        directions: The directions whose most active rows the page shows, for a dataset: a dict from
            a label to `(site, neuron)` or `(site, vector)`. By default it is the neuron with the
            largest variance at each site.
        decode: A function from an integer in the column `token` of a dataset to its text.

    Returns:
        A `Page`. Its method `save` writes one self-contained HTML file, instead of opening the page
        in the browser.

    Raises:
        TypeError: If `what` is empty, or contains something that the page cannot show; or if
            `tokens`, `directions` or `decode` has another form, or applies to nothing in `what`.
        FileNotFoundError: If a path does not exist, or the page was not built into this
            installation.
        ValueError: If a path is not that of a log, of taps or of a dataset, or if a direction does
            not fit its site, or `tokens` no captured array.

    Example:
        >>> import os, tempfile, jax.numpy as jnp, tapax
        >>> _, taps = tapax.capture(lambda x: tapax.sow(2 * x, "h"))(jnp.ones(3))
        >>> path = os.path.join(tempfile.mkdtemp(), "taps.html")
        >>> tapax.view(taps).save(path)
    """
    page = make_page(*_flatten(what), options=Options(tokens, directions, decode))
    if not _browser.is_notebook():
        page.open()
    return page


def _flatten(what: Sequence[Viewable | Sequence[Viewable]]) -> Iterator[Viewable]:
    for each in what:
        if isinstance(each, (list, tuple)):
            yield from cast(Sequence[Viewable], each)
        else:
            yield cast(Viewable, each)


def make_payload(*what: Viewable | FollowedRun, options: Options = NO_OPTIONS) -> Payload:
    """Make the content of the page of `view`."""
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
    return Payload(header, blobs, made.runs)


def make_page(*what: Viewable | FollowedRun, options: Options = NO_OPTIONS) -> Page:
    """Make the page of `view`, without opening it."""
    return Page(make_payload(*what, options=options))
