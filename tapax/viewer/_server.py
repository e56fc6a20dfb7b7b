"""The local server, which delivers one page to a browser on this machine.

It listens only on the loopback interface, and answers only requests with the token in the address
of the page. Another web site could make its visitor's browser send requests to this server. So the
server answers only requests to a name of this machine, which excludes host names that an attacker
points at 127.0.0.1, and only requests from the page itself. It knows five paths and opens no file.

| path | answer |
|---|---|
| `/` | the page |
| `/page.js` | its bundle |
| `/header` | the header of the payload |
| `/blob/N` | a blob |
| `/updates?after=N` | the updates after number N, as server-sent events |
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import secrets
import socket
import socketserver
import sys
import threading
import time
import zlib
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, urlsplit

from tapax.viewer._assets import read_bundle
from tapax.viewer._html import server_document

if TYPE_CHECKING:
    from tapax.viewer._payload import Payload
    from tapax.viewer._pending_payload import PendingPayload

ADDRESS = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost", "::1")
"""The names of this machine. Any port is valid, since a tunnel may use another port."""
POLL_SECONDS = 0.2
"""The interval at which the server looks for updates while a page waits."""
THREADS = 8
"""The number of threads that answer requests; a browser opens six connections to a server."""
HEARTBEAT_SECONDS = 5.0
"""The interval at which the server writes to a waiting page, to notice that the page is gone."""
POLICY = (
    "default-src 'none'; script-src 'self' blob:; worker-src blob:; connect-src 'self'; "
    "style-src 'unsafe-inline'; img-src data: blob:; font-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The policy of the page, which lets it load its script and payload from this server alone."""


class Server:
    """A server of a payload on a port of the loopback interface, until it is closed.

    `port=0` takes any free port.

    Raises:
        OSError: If the port is taken, or the page was not built.
    """

    def __init__(self, payload: Payload | PendingPayload, port: int = 0):
        read_bundle()  # raises here, not in the thread of a request, if the page was not built
        self.payload = payload
        self.token = secrets.token_urlsafe(24)
        self._closing = threading.Event()
        self._waiting = 0
        self._last_request: float | None = None
        try:
            self._http = _LoopbackServer((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise OSError(f"The page cannot be served on port {port}: {why}.") from error
        self._http.page = self
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.1,), name="tapax-page", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return self._http.server_address[1]

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        return f"http://{ADDRESS}:{self.port}/?token={self.token}"

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    def idle_seconds(self) -> float | None:
        """Return the seconds since a browser last showed the page; None if it was never shown."""
        if self._waiting:
            return 0.0
        return None if self._last_request is None else time.monotonic() - self._last_request

    def close(self) -> None:
        """Stop serving; open pages say that the connection is lost."""
        if not self._closing.is_set():
            self._closing.set()
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()

    def note_request(self) -> None:
        self._last_request = time.monotonic()

    def is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode())

    def stream_updates(self, after: int, write: Callable[[bytes], object]) -> None:
        """Write updates as server-sent events until the page leaves or the server closes."""
        self._waiting += 1
        try:
            written = 0.0
            while not self._closing.is_set():
                updates = self.payload.read_updates(after)
                if updates is None:
                    write(b"event: reload\ndata:\n\n")
                    return
                for update in updates:
                    after = update["revision"]
                    content = json.dumps(update, allow_nan=False, separators=(",", ":"))
                    write(f"id: {after}\ndata: {content}\n\n".encode())
                if updates or time.monotonic() - written > HEARTBEAT_SECONDS:
                    write(b":\n\n")
                    written = time.monotonic()
                self._closing.wait(POLL_SECONDS)
        except (ConnectionError, TimeoutError):
            pass
        finally:
            self._waiting -= 1
            self.note_request()


class _LoopbackServer(HTTPServer):
    """A server whose threads start with it, and more when all of them are busy.

    Python 3.12.0 to 3.12.2 cannot start a thread once the main thread has ended, but a page is
    served for as long as a browser shows it.
    """

    page: Server

    def __init__(self, *args: Any):
        self._requests: queue.SimpleQueue[tuple[Any, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._busy = 0
        super().__init__(*args)
        for _ in range(THREADS):
            self._start_thread()

    def _start_thread(self) -> None:
        threading.Thread(target=self._handle_all, name="tapax-request", daemon=True).start()
        self._threads += 1

    def process_request(self, request: Any, client_address: Any) -> None:
        """Let a thread handle a request."""
        with self._lock:
            self._busy += 1
            if self._busy > self._threads:
                with contextlib.suppress(RuntimeError):  # the program has ended
                    self._start_thread()
        self._requests.put((request, client_address))

    def _handle_all(self) -> None:
        while (waiting := self._requests.get()) is not None:
            try:
                self.finish_request(*waiting)
            except Exception:
                self.handle_error(*waiting)
            finally:
                self.shutdown_request(waiting[0])
                with self._lock:
                    self._busy -= 1

    def server_close(self) -> None:
        super().server_close()
        for _ in range(self._threads):
            self._requests.put(None)

    def server_bind(self) -> None:
        # HTTPServer.server_bind resolves the name of the machine, which can take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error, unless the browser has closed the connection."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Refusal(Exception):
    def __init__(self, status: HTTPStatus, sentence: str):
        super().__init__(sentence)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "tapax"
    sys_version = ""
    timeout = 60

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)

    def do_GET(self) -> None:
        page = cast(_LoopbackServer, self.server).page
        try:
            path, query = self._check(page)
            page.note_request()
            self._answer(page, path, query)
        except _Refusal as refusal:
            text = f"{refusal}\n".encode()
            self._send(text, "text/plain; charset=utf-8", refusal.status)

    def _check(self, page: Server) -> tuple[str, dict[str, str]]:
        """Refuse a request that does not come from the page, or return its path and query."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or _host_name(f"//{hosts[0]}") not in NAMES:
            raise _Refusal(
                HTTPStatus.MISDIRECTED_REQUEST, "This server answers to localhost alone."
            )
        for origin in self.headers.get_all("Origin") or []:
            if origin != f"http://{hosts[0]}":
                raise _Refusal(HTTPStatus.FORBIDDEN, "Other sites may not read this page.")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise _Refusal(HTTPStatus.FORBIDDEN, "Other sites may not read this page.")
        try:
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        except ValueError:
            raise _Refusal(HTTPStatus.BAD_REQUEST, "The address cannot be read.") from None
        if not page.is_token(query.get("token", "")):
            raise _Refusal(
                HTTPStatus.FORBIDDEN,
                "The token in the address is wrong: open the address that tapax printed.",
            )
        return parts.path, query

    def _answer(self, page: Server, path: str, query: dict[str, str]) -> None:
        if path == "/":
            self._send(server_document(page.token).encode(), "text/html; charset=utf-8")
        elif path == "/page.js":
            self._send_text(read_bundle(), "text/javascript; charset=utf-8")
        elif path == "/header":
            header = json.dumps(page.payload.read_header(), allow_nan=False, separators=(",", ":"))
            self._send_text(header, "application/json")
        elif path.startswith("/blob/"):
            number = _parse_count(path.removeprefix("/blob/"))
            blob = None if number is None else page.payload.read_blob(number)
            if blob is None:
                raise _Refusal(HTTPStatus.NOT_FOUND, "The page has no such blob.")
            self._send(blob, "application/octet-stream")
        elif path == "/updates":
            after = self.headers.get("Last-Event-ID") or query.get("after", "0")
            number = _parse_count(after)
            if number is None:
                raise _Refusal(HTTPStatus.BAD_REQUEST, "`after` must be the number of an update.")
            self._stream(page, number)
        else:
            raise _Refusal(HTTPStatus.NOT_FOUND, "There is nothing at this address.")

    def _stream(self, page: Server, after: int) -> None:
        self.close_connection = True
        self._send_head(HTTPStatus.OK, "text/event-stream", None)
        page.stream_updates(after, self.wfile.write)

    def _send_text(self, text: str, kind: str) -> None:
        content = text.encode()
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            compressor = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
            content = compressor.compress(content) + compressor.flush()
            self._send(content, kind, encoding="gzip")
        else:
            self._send(content, kind)

    def _send(
        self,
        content: bytes,
        kind: str,
        status: HTTPStatus = HTTPStatus.OK,
        encoding: str | None = None,
    ) -> None:
        self._send_head(status, kind, len(content), encoding)
        self.wfile.write(content)

    def _send_head(
        self, status: HTTPStatus, kind: str, length: int | None, encoding: str | None = None
    ) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Security-Policy": POLICY,
            "Cache-Control": "no-store",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        if length is None:
            headers["Connection"] = "close"
        else:
            headers["Content-Length"] = str(length)
        if encoding:
            headers["Content-Encoding"] = encoding
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing, because requests contain the token."""


def _host_name(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def _parse_count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None
