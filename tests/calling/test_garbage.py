"""Garbage collection while a program is traced, and afterwards."""

import gc
import threading

import jax.numpy as jnp
import pytest

import tapax
from tapax._calling.garbage import full_collections_paused


@pytest.fixture(autouse=True)
def usual_thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_full_collections_pause_while_a_function_is_traced():
    seen = []

    def f(x):
        seen.append(gc.get_threshold())
        return tapax.sow(x, "h")

    tapax.capture(f)(jnp.ones(3))
    assert seen == [(700, 10, 2**31 - 1)]
    assert gc.get_threshold() == (700, 10, 10)


def test_full_collections_go_on_after_an_exception():
    def f(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tapax.capture(f)(jnp.ones(3))
    assert gc.get_threshold() == (700, 10, 10)


def test_full_collections_pause_until_the_last_of_several_threads_is_done():
    inside, leave = threading.Event(), threading.Event()

    def wait():
        with full_collections_paused:
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=wait)
    with full_collections_paused:
        thread.start()
        assert inside.wait(60)
    assert gc.get_threshold()[2] == 2**31 - 1
    leave.set()
    thread.join()
    assert gc.get_threshold() == (700, 10, 10)


def test_code_that_restores_what_it_read_during_a_pause_ends_it_only_until_the_next():
    with full_collections_paused:
        read = gc.get_threshold()
    gc.set_threshold(*read)
    with full_collections_paused:
        pass
    assert gc.get_threshold() == (700, 10, 10)


def test_a_threshold_that_other_code_sets_meanwhile_stays():
    with full_collections_paused:
        gc.set_threshold(500, 5, 7)
    assert gc.get_threshold() == (500, 5, 7)
