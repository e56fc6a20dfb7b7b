"""The state of the current trace, and interception of `Primitive.bind`."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jax._src import config as _config
from jax._src import core as _core
from jax.extend.core import Primitive


def trace_state_clean() -> bool:
    """Return whether this thread is outside of every transformation of JAX."""
    return _core.trace_state_clean()


def is_traced_here(tracer: Any) -> bool:
    """Return whether a traced value belongs to the innermost current transformation."""
    return tracer._trace is _core.trace_ctx.trace


def trace_context() -> Any:
    """Return a hashable value of all settings, apart from arguments, on which a trace depends."""
    return _config.trace_context()


def known_loops() -> contextlib.AbstractContextManager[Any]:
    """Disable the option `jax_scan3` within the context.

    The option replaces the primitive of `lax.scan` with one that JAX itself cannot differentiate,
    map and transpose yet.
    """
    scan3 = getattr(_config, "scan3", None)
    return scan3(False) if scan3 is not None and scan3.value else contextlib.nullcontext()


_bind = Primitive.bind
_lock = threading.Lock()
_intercepting: list[Callable[..., Any]] = []


@contextlib.contextmanager
def intercept_bind(hook: Callable[..., Any]) -> Iterator[None]:
    """Route `Primitive.bind` through `hook(bind, primitive, args, params)` on every thread.

    JAX calls `hook` on every thread, so `hook` must check whether it concerns the current thread.
    The first context to enter patches JAX, and the last to leave restores it. A hook that several
    contexts share runs once per bind, so pass the same function each time; different hooks run one
    inside the other.
    """
    with _lock:
        _intercepting.append(hook)
        Primitive.bind = _bind_through_hooks
    try:
        yield
    finally:
        with _lock:
            _intercepting.remove(hook)
            if not _intercepting:
                Primitive.bind = _bind


def _bind_through_hooks(self: Any, *args: Any, **params: Any) -> Any:
    bind = _bind
    for hook in dict.fromkeys(_intercepting):
        bind = functools.partial(_bind_through, hook, bind)
    return bind(self, *args, **params)


def _bind_through(hook: Any, bind: Any, primitive: Any, *args: Any, **params: Any) -> Any:
    return hook(bind, primitive, args, params)
