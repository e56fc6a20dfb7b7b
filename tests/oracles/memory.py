"""Counts of the objects that stay alive after a call, by Python's garbage collector."""

import contextlib
import gc

KEPT = {"Mark", "Jaxpr", "DynamicJaxprTrace", "MarkingPolicy"}
"""Classes of which a call makes some, none of which may outlive it."""


@contextlib.contextmanager
def new_objects_alone():
    """Collect only garbage made within the context; a pass over all objects takes a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def assert_nothing_stays(call, *more):
    """Call a function several times, and count the remaining objects of these classes."""

    def count():
        gc.collect()
        return sum(type(x).__name__ in {*KEPT, *more} for x in gc.get_objects())

    with new_objects_alone():
        for _ in range(2):
            call()
        before = count()
        for _ in range(5):
            call()
        assert count() <= before
