"""Interception of every reverse-mode derivative that a program takes."""

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
    """Differentiate `wrap(fn)` wherever a program passes `fn` to `jax.vjp`, `jax.grad` and others.

    JAX calls `wrap` on every thread, so `wrap` must check whether it concerns the current thread.
    The first context to enter patches JAX, and the last to leave restores it. A `wrap` that several
    contexts share is applied once, so pass the same function each time, not a new lambda.
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
