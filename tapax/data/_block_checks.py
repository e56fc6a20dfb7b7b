"""Checks of the blocks of an array, each of which one of several threads compares once.

The first batches of a shuffled dataset need rows from almost every block, and several threads read
them at once. So a thread claims a few blocks at a time, and then waits for the blocks that other
threads have claimed.
"""

import threading
from collections.abc import Callable

import numpy as np

_UNKNOWN, _CLAIMED, _INTACT = range(3)
_CLAIM = 8
"""The number of blocks that a thread claims at a time."""


class BlockChecks:
    """A record of the blocks of an array whose checksums were compared; `count` is their number."""

    def __init__(self, count: int):
        self._states = np.full(count, _UNKNOWN, np.uint8)
        self._changed = threading.Condition()
        self.is_complete = not count
        """True once all blocks are known to be intact."""

    def require(self, blocks: np.ndarray, check: Callable[[int], None]) -> None:
        """Compare the given blocks, except blocks that were compared before.

        `check` compares the block with a number, and raises if the block was altered.
        """
        left = blocks[self._states[blocks] != _INTACT]
        while len(claimed := self._claim(left)):
            state = _UNKNOWN
            try:
                for block in claimed.tolist():
                    check(block)
                state = _INTACT
            finally:
                with self._changed:
                    self._states[claimed] = state
                    self.is_complete = bool((self._states == _INTACT).all())
                    self._changed.notify_all()

    def _claim(self, blocks: np.ndarray) -> np.ndarray:
        """Claim some of the blocks that no thread has compared; none if all are intact."""
        with self._changed:
            while True:
                states = self._states[blocks]
                claimed = blocks[states == _UNKNOWN][:_CLAIM]
                if len(claimed) or not (states == _CLAIMED).any():
                    self._states[claimed] = _CLAIMED
                    return claimed
                self._changed.wait()
