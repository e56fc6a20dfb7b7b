"""`SiteError`, and what messages about sites and functions are made of."""

import difflib
import functools
from collections.abc import Iterable
from typing import Any

from tapax._jax import Function, PyTree, Value, typed


class SiteError(ValueError):
    """The error for a site that cannot be returned or changed, and for a bad selection.

    The message names the site, says what is wrong, and how to fix it.

    Example:
        >>> import tapax
        >>> f = lambda x: tapax.sow(2 * x, "hidden")
        >>> try:
        ...     tapax.capture(f, values="hiden")(1.5)
        ... except tapax.SiteError as error:
        ...     print("The nearest names are 'hidden'." in str(error))
        True
    """


def nearest(name: str, names: Iterable[str], count: int = 3) -> str:
    """A sentence with the names closest to `name`, or the names there are, or that none are."""
    known = sorted(set(names))
    if not known:
        return "The program has no sites: mark a value with tapax.sow(value, name)."
    bare = name.replace("*", "").strip("/") or name
    close = difflib.get_close_matches(bare, known, n=count, cutoff=0.6)
    tails = {k.rsplit("/", 1)[-1]: k for k in known}
    for tail in difflib.get_close_matches(bare.rsplit("/", 1)[-1], list(tails), n=count):
        if tails[tail] not in close:
            close.append(tails[tail])
    if close:
        return "The nearest names are " + ", ".join(repr(c) for c in close[:count]) + "."
    more = f" and {len(known) - 5} more" if len(known) > 5 else ""
    return "The sites are " + ", ".join(repr(k) for k in known[:5]) + more + "."


def as_array(x: Value, what: str) -> Any:
    """`x` as an array; `what` it is, should it be none."""
    try:
        return typed.asarray(x)
    except (TypeError, ValueError):
        raise wrong_type(f"{what} must be an array, but is", x) from None


def wrong_type(sentence: str, value: PyTree) -> TypeError:
    """An error for an argument: `sentence`, to which `value` and its type are the end."""
    return TypeError(f"{sentence} {value!r} of type {type(value).__name__}.")


def name_of(fn: Function) -> str:
    """What to call a function in a message, and a compiled program of it."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None)
    return name or type(fn).__name__
