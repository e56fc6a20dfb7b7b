"""`sow`, `perturb` and `scope`: marks that a user writes.

A mark binds nothing unless a capture is tracing; outside of a capture, a program with marks has the
jaxpr of the program without them.

>>> import jax.numpy as jnp, tapax
>>> def f(x):
...     with tapax.scope("net"):
...         return tapax.sow(jnp.sin(x), "h") * 2
>>> out, taps = tapax.capture(f)(1.0)
>>> list(taps.values)
['net/h']
"""

import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from tapax._jax import PyTree, Value, pytrees, typed
from tapax._jax.pytrees import ValueStructure, split_arrays
from tapax._marks.closed_reducers import close_reducer
from tapax._marks.context import active_policy
from tapax._marks.scopes import ScopeName
from tapax._marks.tap import Mark, tap
from tapax._sites import SiteError, wrong_type

T = TypeVar("T")


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
        raise wrong_type(f"`{function}` takes a string as its name, but was given", name)
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


@dataclasses.dataclass(frozen=True)
class SownValue:
    """What a framework's mark says of a value, for those who put it together again.

    `structure` is that of the value, or of what the reducer of the mark has made of all calls.
    """

    structure: ValueStructure | None = dataclasses.field(default=None, kw_only=True)


def mark(value: PyTree, name: str, kind: str, **fields: Any) -> Any:
    """Marks the arrays in `value`, from the line that called the caller; returns it."""
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
        # A Python number stays one: the program may need its value.
        tapped.append(out if has_dtype(x) else x)
    return structure.join(tapped) if structure.count else value


def is_array(x: Value) -> bool:
    """Whether `mark` marks a leaf: an array, or a number."""
    return has_dtype(x) or isinstance(x, (bool, int, float, complex))


def has_dtype(x: Value) -> bool:
    """Whether a leaf is an array, and not a number of Python's."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def leaf_name(keys: tuple[Any, ...]) -> str:
    """The name of a leaf in its structure; characters that mean something else are escaped."""
    name = pytrees.keystr(keys, simple=True, separator=".")
    return re.sub(r"[*?@~:]", lambda found: f"%{ord(found.group()):02X}", name)
