"""`sow`, `perturb` and `scope`: the marks that a user writes.

A mark binds a tap only while a capture traces the program. Otherwise a program with marks has the
same jaxpr as the program without them.
"""

import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from tapax._jax import PyTree, Value, pytrees, typed
from tapax._jax.pytrees import ValueStructure, split_arrays
from tapax._marks.closed_reducers import close_reducer
from tapax._marks.context import active_policy
from tapax._marks.scopes import ScopeName
from tapax._marks.tap import Mark, tap
from tapax._sites import SiteError, wrong_type

P = ParamSpec("P")
T = TypeVar("T")


def sow(
    value: T,
    name: str,
    *,
    reduce: Callable[[Any, Any], Any] | None = None,
    init: Callable[[], Any] | None = None,
) -> T:
    """Mark `value` as the site `name`, and return it.

    Outside a capture, `sow` does nothing. A capture returns every call of a site: the first is
    `name`, the second `name@1`. With `reduce` and `init`, a capture instead folds all calls and all
    iterations of loops into one value, `reduce(reduce(init(), first), second)`: a sum in a scan is
    then the total.

    Args:
        value: An array, or a pytree of arrays; the leaf `w` of `h` is the site `h:w`.
        name: The name of the site, in segments separated by slashes. The scopes and modules around
            the call come before it: `GPT/blocks/0/h`.
        reduce: A function `reduce(previous, new)` that folds the calls into one value.
        init: A function `init()` that returns the first `previous`.

    Returns:
        `value`. Compute with this value, not with the argument, if you want the gradient of the
        site: the gradient is the one that reaches the returned value.

    Raises:
        TypeError: If `name` is not a string or contains a traced value, or if `reduce` is given
            without `init` or the other way round.
        SiteError: If `name` or one of its segments is empty, or if `name` contains one of the
            characters `* ? @ ~ :`.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> @jax.jit
        ... def step(w, x):
        ...     loss = lambda w: jnp.sum(tapax.sow(w * x, "h") ** 2)
        ...     return w - 0.1 * jax.grad(loss)(w)
        >>> out, taps = tapax.capture(step)(2.0, 3.0)
        >>> float(taps.values["h"]), float(taps.grads["h"])
        (6.0, 12.0)
        >>> def total(xs):
        ...     def body(_, x):
        ...         return None, tapax.sow(x, "sum", reduce=jnp.add, init=lambda: 0.0)
        ...
        ...     return jax.lax.scan(body, None, xs)
        >>> float(tapax.capture(total)(jnp.array([1.5, 2.0, 4.0]))[1].values["sum"])
        7.5
    """
    if (reduce is None) != (init is None):
        raise TypeError(
            f"sow(..., {name!r}) was given {'`init`' if reduce is None else '`reduce`'} alone, but "
            "`reduce(previous, new)` and `init()` go together. Give both, or neither to return "
            "every call."
        )
    return mark(value, name, "sow", reduce=reduce, init=init)


def perturb(value: T, name: str) -> T:
    """Mark `value` as the site `name`, meant for gradients and perturbations, and return it.

    `perturb` marks a value as `tapax.sow` does, and tells the reader of the code why. `tapax.sites`
    lists the site with the kind `perturb`; `tapax.grad` and `tapax.perturbations` take sites of
    both kinds.

    Args:
        value: An array, or a pytree of arrays.
        name: The name of the site, as in `tapax.sow`.

    Returns:
        `value`. Compute with this value, not with the argument.

    Raises:
        TypeError: If `name` is not a string or contains a traced value.
        SiteError: If `name` or one of its segments is empty, or if `name` contains one of the
            characters `* ? @ ~ :`.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> def loss(x):
        ...     h = tapax.perturb(jnp.sin(x), "h")
        ...     return jnp.sum(h**3)
        >>> tapax.grad(loss)(jnp.array([0.0, jnp.pi / 2]))["h"].tolist()
        [0.0, 3.0]
    """
    return mark(value, name, "perturb")


def scope(name: str) -> contextlib.AbstractContextManager[Any]:
    """Put `name/` before the names of the sites inside a `with` block.

    Args:
        name: The name of the scope, in segments separated by slashes.

    Returns:
        A context manager, which is also a `jax.named_scope(name)`.

    Raises:
        TypeError: If `name` is not a string or contains a traced value.
        SiteError: If `name` or one of its segments is empty, or if `name` contains one of the
            characters `* ? @ ~ :`.

    Example:
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
    return _Scope(name)


class _Scope:
    """A context manager and decorator that enters a new scope each time, also in a recursion."""

    def __init__(self, name: str):
        self._name = name
        self._entered: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        self._entered.append(jax.named_scope(ScopeName(self._name)))
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def __call__(self, fn: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(fn)
        def scoped(*args: P.args, **kwargs: P.kwargs) -> T:
            with _Scope(self._name):
                return fn(*args, **kwargs)

        return scoped


def _check_name(name: Any, function: str) -> None:
    if not isinstance(name, str):
        raise wrong_type(f"`{function}` takes a string as its name, but was given", name)
    if "Tracer" in name:
        raise TypeError(
            f"`{function}` was given the name {name!r}, which contains a traced value. Make the "
            "value in the name a static argument."
        )
    if not name or re.search(r"[*?@~:]|^/|/$|//", name):
        raise SiteError(
            f"{name!r} cannot be the name of a site. A name consists of segments separated by '/', "
            "and must not contain * ? @ ~ :, which have a meaning in selections."
        )


@dataclasses.dataclass(frozen=True)
class SownValue:
    """The data of a framework's mark from which its adapter rebuilds the sown value.

    `structure` is the pytree structure of the value, or of the result of the mark's reducer.
    """

    structure: ValueStructure | None = dataclasses.field(default=None, kw_only=True)


def mark(value: PyTree, name: str, kind: str, **fields: Any) -> Any:
    """Mark the arrays in `value`, and return it; the source line is that of the caller's caller."""
    _check_name(name, kind)
    here = active_policy()
    if here is None:
        return value
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    source = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    arrays, structure = split_arrays(value, is_array)
    paths = [
        name + (f":{leaf_name(keys)}" if keys else "")
        for keys, x in pytrees.leaves_with_path(value)
        if is_array(x)
    ]
    sown = fields.get("collection")
    is_whole = isinstance(sown, SownValue)
    if is_whole:
        fields["collection"] = dataclasses.replace(sown, structure=structure)
    tapped: list[Value] = []
    reduce, whole = fields.get("reduce"), structure
    if not arrays and (is_whole or reduce is not None):
        paths, arrays = [name], [typed.zeros((0,), bool)]
    closed = reduce and close_reducer(reduce, fields["init"], arrays, structure)
    if closed:
        fields |= {"reduce": closed[0].reduce, "init": closed[0].init}
        paths += [f"{name}:closed.{i}" for i in range(len(closed[1]))]
        arrays, whole = split_arrays([*arrays, *closed[1]], is_array)
    for leaf, (path, x) in enumerate(zip(paths, arrays, strict=True)):
        said: dict[str, Any] = {**here.on_marks, **fields, "structure": whole, "leaf": leaf}
        is_closed = closed and leaf >= closed[0].count
        out = tap(x, Mark(path, "closed" if is_closed else kind, source, **said))
        # A Python number is returned as it is: the program may need its value.
        tapped.append(out if has_dtype(x) else x)
    return structure.join(tapped) if structure.count else value


def is_array(x: Value) -> bool:
    """Return whether `mark` marks a leaf: an array, or a number."""
    return has_dtype(x) or isinstance(x, (bool, int, float, complex))


def has_dtype(x: Value) -> bool:
    """Return whether a leaf is an array, and not a Python number."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def leaf_name(keys: tuple[Any, ...]) -> str:
    """Make the name of a leaf from its keys; escape the characters that selections use."""
    name = pytrees.keystr(keys, simple=True, separator=".")
    return re.sub(r"[*?@~:]", lambda found: f"%{ord(found.group()):02X}", name)
