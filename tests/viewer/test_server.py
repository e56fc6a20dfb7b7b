"""The local server answers only requests from its page on this machine."""

import contextlib
import http.client
import json
import socket
import threading
import time
from urllib.parse import urlsplit

import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tapax import sink
from tapax.viewer._page import make_page
from tests.viewer.payload_decoder import Reader, column

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def taps():
    return tapax.capture(lambda x: tapax.sow(2 * x, EVIL) + tapax.sow(x, "h"))(jnp.arange(3.0))[1]


@pytest.fixture
def page(taps, stub_bundle):
    with make_page(taps) as page:
        yield page


class Client:
    """A client that requests a page with headers and addresses no browser would send."""

    def __init__(self, page):
        parts = urlsplit(page.serve())
        self.port, self.token = parts.port, parts.query.removeprefix("token=")

    def get(self, path, token=True, method="GET", **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            path += f"{'&' if '?' in path else '?'}token={self.token}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host="Host" in headers)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            response = connection.getresponse()
            return response, response.read()

    def status(self, *args, **headers):
        return self.get(*args, **headers)[0].status


def test_page_header_and_blobs_are_served_to_who_knows_the_token(page):
    client = Client(page)
    response, document = client.get("/")
    assert response.status == 200 and b'<script src="page.js?token=' in document
    assert client.get("/page.js")[1].decode() == "var tapaxPage = { render() {} };"
    header = json.loads(client.get("/header")[1])
    (subject,) = header["subjects"]
    entry = subject["arrays"][0]
    assert subject["sites"]["name"][entry["site"]] == EVIL
    numbers = column(entry["data"], lambda number: client.get(f"/blob/{number}")[1])
    np.testing.assert_array_equal(numbers, [0, 2, 4])


def test_every_path_needs_the_right_token(page):
    client = Client(page)
    for path in ("/", "/page.js", "/header", "/blob/0", "/updates", "/nothing"):
        assert client.status(path, token=False) == 403
        assert client.status(f"{path}?token=", token=False) == 403
        assert client.status(f"{path}?token={client.token[:-1]}", token=False) == 403
        assert client.status(f"{path}?token=%ff%00{client.token}", token=False) == 403


def test_tokens_are_long_and_never_the_same(taps):
    with make_page(taps) as first, make_page(taps) as second:
        one, other = Client(first), Client(second)
        assert one.token != other.token and len(one.token) >= 32
        assert one.port != other.port
        assert one.status(f"/?token={other.token}", token=False) == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.", "", "[::"]
)
def test_requests_to_another_host_name_are_refused(page, host):
    """A host name that resolves to 127.0.0.1 would put an attacker's page on our origin."""
    assert Client(page).status("/header", Host=host) == 421


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1234", "[::1]:8000"])
def test_names_of_this_machine_are_answered_on_the_port_of_a_tunnel(page, host):
    assert Client(page).status("/header", Host=host) == 200
    assert Client(page).status("/header", Host=host, Origin=f"http://{host}") == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1", "file://"])
def test_scripts_of_other_sites_are_refused(page, origin):
    assert Client(page).status("/header", Origin=origin) == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_embedding_by_other_sites_is_refused(page, site):
    assert Client(page).status("/page.js", Sec_Fetch_Site=site) == 403
    assert Client(page).status("/page.js", Sec_Fetch_Site="same-origin") == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/page.js/../../_server.py",
        "/blob/../header",
        "/blob/-1",
        "/blob/1e3",
        "/blob/%31",
        "/blob/99999999999999999999",
        "/assets/page.js",
    ],
)
def test_no_path_of_a_client_is_opened(page, path):
    assert Client(page).status(path) == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_other_methods_are_not_answered(page, method):
    assert Client(page).status("/header", method=method) == 501


def test_answers_forbid_scripts_frames_referrers_and_caches(page):
    response, _ = Client(page).get("/")
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self' blob:;" in policy
    assert "frame-ancestors 'none'" in policy and "connect-src 'self'" in policy
    assert response.headers["Referrer-Policy"] == "no-referrer"
    assert response.headers["Cache-Control"] == "no-store"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in response.headers


def test_names_are_data_and_never_in_the_document(page):
    client = Client(page)
    assert b"onerror" not in client.get("/")[1]
    response, header = client.get("/header")
    assert response.headers["Content-Type"] == "application/json"
    assert EVIL in json.loads(header)["subjects"][0]["sites"]["name"]


def test_only_the_loopback_interface_is_listened_on(page):
    port = Client(page).port
    others = {
        info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    } - {"127.0.0.1"}
    for address in others:
        with pytest.raises(OSError):
            socket.create_connection((address, port), timeout=1).close()


def test_a_port_that_is_taken_is_named(page, taps):
    port = Client(page).port
    with make_page(taps) as other, pytest.raises(OSError, match=f"on port {port}: "):
        other.serve(port)


def test_a_closed_page_frees_its_port_and_its_threads(taps, stub_bundle):
    page = make_page(taps)
    client = Client(page)
    assert page.serve() == page.serve()
    before = threading.active_count()
    page.close()
    page.close()
    with pytest.raises(ConnectionRefusedError):
        client.status("/header")
    assert threading.active_count() < before
    with make_page(taps) as again:
        assert again.serve(client.port).startswith(f"http://127.0.0.1:{client.port}/")


def test_closing_ends_the_streams_of_pages_that_listen(tmp_path):
    path = tmp_path / "run.jsonl"
    sink.jsonl(path)(0, {"h/value_rms": 1.0})
    page = make_page(path)
    client = Client(page)
    received = threading.Thread(target=client.get, args=("/updates?after=0",))
    received.start()
    time.sleep(0.3)
    page.close()
    received.join(5)
    assert not received.is_alive()


class Stream:
    """A stream of server-sent events, read one by one."""

    def __init__(self, client, after=0, **headers):
        self._connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=10)
        address = f"/updates?after={after}&token={client.token}"
        self._connection.request("GET", address, headers=headers)
        self._response = self._connection.getresponse()
        assert self._response.headers["Content-Type"] == "text/event-stream"

    def next(self):
        event = {}
        while line := self._response.readline():
            name, _, content = line.decode().rstrip("\n").partition(": ")
            if name:
                event[name.rstrip(":")] = content
            elif "data" in event:
                return event
        raise EOFError

    def close(self):
        self._response.close()
        self._connection.close()


def test_a_stream_resumes_after_the_last_event_that_came(tmp_path):
    path = tmp_path / "run.jsonl"
    log = sink.jsonl(path)
    log(0, {"h/value_rms": 1.0})
    with make_page(path) as page:
        client = Client(page)
        reader = Reader(json.loads(client.get("/header")[1]), lambda i: client.get(f"/blob/{i}")[1])
        stream = Stream(client)
        log(1, {"h/value_rms": 2.0})
        reader.apply(json.loads(stream.next()["data"]))
        log(2, {"h/value_rms": 3.0})
        assert stream.next()["id"] == "2"
        stream.close()
        stream = Stream(client, **{"Last-Event-ID": "1"})
        reader.apply(json.loads(stream.next()["data"]))
        stream.close()
    assert reader.steps == [[0, 1, 2]]
    assert reader.numbers[0]["h", "value", "rms"] == [1, 2, 3]


def test_a_page_of_another_time_is_told_to_load_again(tmp_path):
    path = tmp_path / "run.jsonl"
    sink.jsonl(path)(0, {"h/value_rms": 1.0})
    with make_page(path) as page:
        stream = Stream(Client(page), after=7)
        assert stream.next()["event"] == "reload"
        stream.close()
