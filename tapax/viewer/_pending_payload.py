"""A payload that is still being made while the browser loads the page."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tapax.viewer._format import Header, Update
    from tapax.viewer._payload import Payload


class PendingPayload:
    """A payload for a server that starts before it: requests wait until `set` is called."""

    def __init__(self) -> None:
        self._is_set = threading.Event()
        self._payload: Payload | None = None

    def set(self, payload: Payload) -> None:
        """Answer all requests, those that wait included, from `payload`."""
        self._payload = payload
        self._is_set.set()

    def _wait(self) -> Payload:
        self._is_set.wait()
        assert self._payload is not None
        return self._payload

    def read_header(self) -> Header:
        return self._wait().read_header()

    def read_blob(self, number: int) -> bytes | None:
        return self._wait().read_blob(number)

    def read_updates(self, after: int) -> Sequence[Update] | None:
        return self._wait().read_updates(after)
