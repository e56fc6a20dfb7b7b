"""Recognition of reducers, passed to the `sow` of Flax, that keep every call."""

from typing import Any

_CALLS = tuple(object() for _ in range(1000))
_TRIED = 32


def find_container(reduce: Any, init: Any) -> type | None:
    """Return the container in which a reducer keeps every call; None if it does something else.

    The function tries the reducer on some calls, one after the other, and once on a container with
    more calls than any realistic window keeps.
    """
    try:
        state = init()
        for number in range(_TRIED):
            state = reduce(state, _CALLS[number])
            if type(state) not in (tuple, list) or list(state) != [*_CALLS[: number + 1]]:
                return None
        many = reduce(type(state)(_CALLS[:-1]), _CALLS[-1])
        return type(state) if list(many) == [*_CALLS] else None
    except Exception:
        return None
