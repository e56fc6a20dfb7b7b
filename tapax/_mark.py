"""Marks: `sow`, `perturb`, `scope`, and the context in which they exist.

A mark binds nothing unless a capture is tracing; outside of one, a program with marks has the
jaxpr of the program without. The context is one of JAX's user contexts, which are part of the key
of every `jit` cache: a function that was jitted and called before is traced afresh under capture,
and equal captures share what was traced.

The names of the scopes around a mark are kept in JAX's name stack, which every equation has, and
are joined when the program is walked. So a function that is traced once and called in two scopes
has two sites, and entering a scope costs no cache anything.

>>> import jax.numpy as jnp, tapax
>>> def f(x):
...     with tapax.scope("net"):
...         return tapax.sow(jnp.sin(x), "h") * 2
>>> out, taps = tapax.capture(f)(1.0)
>>> list(taps.values)
['net/h']
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np

from tapax import _jax
from tapax._scopes import ScopeName
from tapax._sites.errors import SiteError
from tapax._sites.selections import CALLS, Rule
from tapax._tap import Mark, tap, tap_p

T = TypeVar("T")
Policy: TypeAlias = Callable[[Any, str], bool] | bool
"""Which modules are sites: a filter `(module, method name) -> bool`, or all with public methods."""


class Structure:
    """The structure of the arguments of a captured function: equal ones are the same object.

    Where a module is depends on the model, and so what is traced for one model is not for another.
    """

    __slots__ = ()

    @classmethod
    def of(cls, arguments: Any) -> Structure | None:
        try:
            return cls._known(jax.tree.structure(arguments))
        except TypeError:  # something in it cannot be hashed
            return None

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def _known(treedef: Any) -> Structure:
        del treedef
        return Structure()


@dataclasses.dataclass(frozen=True)
class Marking:
    """What a capture marks: a hashable value, so that equal captures hit the caches of JAX.

    `changing` if what is marked may be edited, `pairs` if gradients meet their values.
    """

    rules: frozenset[Rule] = frozenset()
    modules: frozenset[Policy] = frozenset()
    structure: Structure | None = None
    changing: bool = False
    pairs: bool = False

    def admits(self, module: Any, method: str) -> frozenset[Policy]:
        """The policies by which what a method of a module returns is a site."""
        public = method == "__call__" or not method.startswith("_")
        return frozenset(p for p in self.modules if (p(module, method) if callable(p) else public))

    def __or__(self, other: Marking) -> Marking:
        changing = self.changing or other.changing
        rules, modules = self.rules | other.rules, self.modules | other.modules
        return Marking(rules, modules, self.structure, changing, self.pairs or other.pairs)

    @property
    def on_marks(self) -> dict[str, Any]:
        """What every mark is told."""
        return {"changing": self.changing, "pairs": self.pairs}


_context = jax.make_user_context(None)
_thread = threading.local()


def marking() -> Marking | None:
    """What is being marked on this thread; None outside of a capture."""
    return _context.value


@contextlib.contextmanager
def marked(marking_: Marking) -> Iterator[None]:
    """Within, marks exist; and results that its rules pick are marked too."""
    outer = marking()
    here = marking_ if outer is None else marking_ | outer
    with contextlib.ExitStack() as stack:
        stack.enter_context(_context(here))
        if here.rules and not (outer and outer.rules):
            stack.enter_context(_jax.intercept_bind(_mark_operation))
        yield


@contextlib.contextmanager
def unmarked() -> Iterator[None]:
    """Within, marks do not exist."""
    with _context(None):
        yield


def sow(
    value: T,
    name: str,
    *,
    reduce: Callable[[Any, Any], Any] | None = None,
    init: Callable[[], Any] | None = None,
) -> T:
    """Marks `value`, an array or a pytree of arrays, as the site `name`; returns it.

    Every call is kept: the second is `name@1`. With `reduce` and `init` the calls are folded into
    one instead, `reduce(reduce(init(), first), second)`, over the iterations of loops as well, so
    that a sum in a scan is the total. Use the value that `sow` returns where the site's gradient
    is wanted: the gradient is that of what goes on from here.

    >>> import jax, jax.numpy as jnp, tapax
    >>> @jax.jit
    ... def step(w, x):
    ...     loss = lambda w: jnp.sum(tapax.sow(w * x, "h") ** 2)
    ...     return w - 0.1 * jax.grad(loss)(w)
    >>> out, taps = tapax.capture(step)(2.0, 3.0)
    >>> float(taps.values["h"]), float(taps.grads["h"])
    (6.0, 12.0)
    """
    if (reduce is None) != (init is None):
        raise TypeError(
            f"sow(..., {name!r}) was given {'`init`' if reduce is None else '`reduce`'} alone. "
            "`reduce(previous, new)` and `init()` go together: give both, or neither to keep "
            "every call."
        )
    return mark(value, name, "sow", reduce=reduce, init=init)


def perturb(value: T, name: str) -> T:
    """Marks `value` as a site meant for gradients and for explicit perturbations; returns it."""
    return mark(value, name, "perturb")


def scope(name: str) -> contextlib.AbstractContextManager[Any]:
    """Puts `name/` before the names of the sites within; also a `jax.named_scope`.

    >>> import jax.numpy as jnp, tapax
    >>> def f(x):
    ...     for i in range(2):
    ...         with tapax.scope(f"block{i}"):
    ...             x = tapax.sow(jnp.sin(x), "h")
    ...     return x
    >>> tapax.sites(f)(1.0).names
    ['block0/h', 'block1/h']
    """
    _check_name(name, "scope")
    return jax.named_scope(ScopeName(name))


def _check_name(name: Any, function: str) -> None:
    if not isinstance(name, str):
        raise TypeError(
            f"`{function}` takes a string as its name, but was given {name!r} of type "
            f"{type(name).__name__}."
        )
    if "Tracer" in name:
        raise TypeError(
            f"`{function}` was given the name {name!r}, which has a traced value in it. Make the "
            "number that it is made from static."
        )
    if not name or re.search(r"[*?@~:]|^/|/$|//", name):
        raise SiteError(
            f"{name!r} cannot be the name of a site: a name is made of segments with '/' between "
            "them, and the characters * ? @ ~ : have a meaning of their own in selections."
        )


def mark(value: Any, name: str, kind: str, **fields: Any) -> Any:
    """Marks the arrays in `value`, from the line that called the caller; returns it."""
    _check_name(name, kind)
    here = marking()
    if here is None:
        return value
    frame = sys._getframe(2)
    source = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def leaf(keys: tuple[Any, ...], x: Any) -> Any:
        if not is_array(x):
            return x
        path = name + (f":{leaf_name(keys)}" if keys else "")
        tapped = tap(x, Mark(path, kind, source, **here.on_marks, **fields))
        # A Python number stays one: the program may need its value.
        return tapped if isinstance(x, (jax.Array, np.ndarray, np.generic)) else x

    return jax.tree_util.tree_map_with_path(leaf, value)


def is_array(x: Any) -> bool:
    """Whether `mark` marks a leaf: an array, or a number."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))


def leaf_name(keys: tuple[Any, ...]) -> str:
    """The name of a leaf in its structure; characters that mean something else are escaped."""
    name = jax.tree_util.keystr(keys, simple=True, separator=".")
    return re.sub(r"[*?@~:]", lambda found: f"%{ord(found.group()):02X}", name)


# Rules mark what a user's code binds, before it is differentiated, so that the results have
# gradients. So the marks are made where operations are bound. A bind that is part of another
# (a derivative rule), or of evaluating a jaxpr (a backward pass), is no operation of the user's.

_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


# These trace the user's function while they are bound; `jit` has done so before.
_TRACING = (CALLS - {"jit", "pjit"}) | {"shard_map"}


@contextlib.contextmanager
def not_the_users() -> Iterator[None]:
    """Within, what is bound is no operation of the user's."""
    before = getattr(_thread, "binding", False)
    _thread.binding = True
    try:
        yield
    finally:
        _thread.binding = before


def _mark_operation(bind: Any, primitive: Any, args: Any, params: Any) -> Any:
    here = marking()
    if here is None or primitive is tap_p or getattr(_thread, "binding", False):
        return bind(primitive, *args, **params)
    source = _user_line()
    if source is None:
        return bind(primitive, *args, **params)
    if primitive.name in _TRACING:
        out = bind(primitive, *args, **params)
    else:
        with not_the_users():
            out = bind(primitive, *args, **params)
    op, label = _jax.operation(primitive, params)
    if not any(rule.marks(op, source, label) for rule in here.rules):
        return out
    path, kind = (label, "name") if label else (op, "op")
    several = primitive.multiple_results and len(list(out)) > 1
    numbers = itertools.count()

    def marked(x: Any) -> Any:
        name = f"{path}:{next(numbers)}" if several else path
        if not isinstance(x, jax.Array):
            return x
        return tap(x, Mark(name, kind, source, op=op, **here.on_marks))

    return _jax.map_results(marked, out, primitive)


def _user_line() -> str | None:
    """`file:line` of the user's code that binds an operation; None where JAX does so itself."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_JAX):
            if code.co_name == "eval_jaxpr" or code.co_name.startswith("backward_pass"):
                return None
        elif not code.co_filename.startswith(_HERE):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None
