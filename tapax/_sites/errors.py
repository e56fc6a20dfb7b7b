"""`SiteError`, and building blocks for messages about sites and functions."""

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
    """Write a sentence with the names closest to `name`.

    If no name is close, list the first few `names`; if there are none, say how to make one.
    """
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
    """Convert `x` to an array; `what` names it in the error if that fails."""
    try:
        return typed.asarray(x)
    except (TypeError, ValueError):
        raise wrong_type(f"{what} must be an array, but is", x) from None


def wrong_type(sentence: str, value: PyTree) -> TypeError:
    """Make an error for an argument; the message is `sentence`, then `value` and its type."""
    return TypeError(f"{sentence} {value!r} of type {type(value).__name__}.")


def name_of(fn: Function) -> str:
    """Return a name for a function, for messages and for compiled programs."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None)
    return name or type(fn).__name__
