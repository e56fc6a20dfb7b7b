"""How Linen and NNX use the reducers that are given to `sow`."""

from typing import Any

_CALLS = tuple(object() for _ in range(1000))
_TRIED = 32


def find_container(reduce: Any, init: Any) -> type | None:
    """The container in which a reducer keeps every call, if that is what it does.

    It is tried on some calls, one after the other, and on more than anyone has a window of.
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
