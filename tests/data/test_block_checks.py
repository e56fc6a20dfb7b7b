"""Threads that need blocks at once compare each block once, and all learn of an altered one."""

import collections
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tapax.data._block_checks import BlockChecks


def require_in_threads(checks, check, wanted):
    """Require blocks in a thread for each set of blocks, and return the errors."""
    ready = threading.Barrier(len(wanted))

    def require(blocks):
        ready.wait()
        try:
            checks.require(np.asarray(blocks), check)
        except ValueError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(wanted)) as threads:
        return list(threads.map(require, wanted))


def test_each_block_is_compared_once():
    compared = collections.Counter()

    def check(block):
        time.sleep(0.0005)
        compared[block] += 1

    checks = BlockChecks(100)
    wanted = [np.arange(60), np.arange(100), np.arange(0, 100, 3), np.arange(90, 100)]
    assert require_in_threads(checks, check, wanted) == [None] * 4
    assert compared == dict.fromkeys(range(100), 1) and checks.is_complete
    checks.require(np.arange(100), check)
    assert max(compared.values()) == 1


def test_every_thread_that_needs_an_altered_block_raises():
    def check(block):
        time.sleep(0.0005)
        if block == 30:
            raise ValueError("block 30 was altered")

    checks = BlockChecks(50)
    wanted = [np.arange(50), np.arange(20, 40), np.arange(10), np.arange(30, 50)]
    raised = "block 30 was altered"
    assert require_in_threads(checks, check, wanted) == [raised, raised, None, raised]
    assert not checks.is_complete
    with pytest.raises(ValueError, match=raised):
        checks.require(np.array([30]), check)
