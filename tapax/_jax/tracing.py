"""The state of the trace under way, and how every `bind` on a thread is intercepted."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jax._src import config as _config
from jax._src import core as _core
from jax.extend.core import Primitive


def trace_state_clean() -> bool:
    """Whether no transformation is under way on this thread."""
    return _core.trace_state_clean()


def is_traced_here(tracer: Any) -> bool:
    """Whether a traced value belongs to the innermost transformation under way."""
    return tracer._trace is _core.trace_ctx.trace


def trace_context() -> Any:
    """Everything besides arguments that decides what a trace looks like; hashable."""
    return _config.trace_context()


def known_loops() -> contextlib.AbstractContextManager[Any]:
    """Within, `lax.scan` is the primitive that JAX can differentiate, map and transpose.

    With `jax_scan3` it is another, for which JAX itself cannot do so yet.
    """
    scan3 = getattr(_config, "scan3", None)
    return scan3(False) if scan3 is not None and scan3.value else contextlib.nullcontext()


_bind = Primitive.bind
_lock = threading.Lock()
_intercepting: list[Callable[..., Any]] = []


@contextlib.contextmanager
def intercept_bind(hook: Callable[..., Any]) -> Iterator[None]:
    """Routes `Primitive.bind` through `hook(bind, primitive, args, params)`, on every thread.

    The hook must be the same in every use, and tell by itself whether it has to do with a thread:
    the first to enter installs it, the last to leave takes it out. Different hooks see each bind
    one after the other.
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
