"""What stays alive after a call, counted by Python itself."""

import gc

KEPT = {"Mark", "Jaxpr", "DynamicJaxprTrace", "MarkingPolicy"}
"""Classes of which a call makes some, none of which may outlive it."""


def assert_nothing_stays(call, *more):
    """Calls a function several times, and counts the objects of these classes that are left."""

    def count():
        gc.collect()
        return sum(type(x).__name__ in {*KEPT, *more} for x in gc.get_objects())

    for _ in range(2):
        call()
    before = count()
    for _ in range(5):
        call()
    assert count() <= before
