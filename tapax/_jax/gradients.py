"""How every reverse-mode derivative that a program takes is intercepted."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import api as _api

from tapax._jax.types import Function

_vjp = jax.vjp
_lock = threading.Lock()
_intercepting: list[Callable[[Function], Function]] = []


@contextlib.contextmanager
def intercept_vjp(wrap: Callable[[Function], Function]) -> Iterator[None]:
    """Differentiates `wrap(fn)` wherever `jax.vjp`, `jax.grad` and the like are given `fn`.

    `wrap` is called on every thread. It must be the same in every use, and tell by itself whether
    it has to do with a thread: the first to enter installs it, the last to leave takes it out.
    """
    with _lock:
        _intercepting.append(wrap)
        _api.vjp = jax.vjp = _wrapped_vjp
    try:
        yield
    finally:
        with _lock:
            _intercepting.remove(wrap)
            if not _intercepting:
                _api.vjp = jax.vjp = _vjp


@functools.wraps(_vjp)
def _wrapped_vjp(fn: Function, *primals: Any, **options: Any) -> Any:
    for wrap in dict.fromkeys(_intercepting):
        fn = wrap(fn)
    return _vjp(fn, *primals, **options)
