"""Counts of the objects that stay alive after a call, by Python's garbage collector."""

import gc

KEPT = {"Mark", "Jaxpr", "DynamicJaxprTrace", "MarkingPolicy"}
"""Classes of which a call makes some, none of which may outlive it."""


def assert_nothing_stays(call, *more):
    """Call a function several times, and count the remaining objects of these classes."""

    def count():
        gc.collect()
        return sum(type(x).__name__ in {*KEPT, *more} for x in gc.get_objects())

    for _ in range(2):
        call()
    before = count()
    for _ in range(5):
        call()
    assert count() <= before
