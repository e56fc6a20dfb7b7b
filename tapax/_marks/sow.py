"""`sow`, `perturb` and `scope`: the marks that users write.

A mark binds nothing unless a capture is tracing: outside of a capture, a program with marks has the
same jaxpr as the program without them.

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
    """Mark `value`, an array or a pytree of arrays, as the site `name`, and return it.

    A capture keeps every call: the second is `name@1`. With `reduce` and `init` it folds the calls
    instead, `reduce(reduce(init(), first), second)`, over the iterations of loops too, so a sum in
    a scan is the total. To get the gradient of the site, continue with the value that `sow`
    returns: the gradient is that of the returned value.

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
            "Give both `reduce(previous, new)` and `init()`, or neither to keep every call."
        )
    return mark(value, name, "sow", reduce=reduce, init=init)


def perturb(value: T, name: str) -> T:
    """Mark `value` as a site for gradients and explicit perturbations, and return it."""
    return mark(value, name, "perturb")


def scope(name: str) -> contextlib.AbstractContextManager[Any]:
    """Prefix the names of the sites within the context with `name/`; also a `jax.named_scope`.

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
            f"`{function}` was given the name {name!r}, which contains a traced value. Format the "
            "name with a Python number, or make that argument static."
        )
    if not name or re.search(r"[*?@~:]|^/|/$|//", name):
        raise SiteError(
            f"{name!r} cannot be the name of a site: a name consists of segments separated by "
            "'/', and the characters * ? @ ~ : have a special meaning in selections."
        )


@dataclasses.dataclass(frozen=True)
class SownValue:
    """Facts from the mark of a framework, with which `compat` rebuilds the value.

    `structure` is the structure of the value, or of the state of the mark's reducer.
    """

    structure: ValueStructure | None = dataclasses.field(default=None, kw_only=True)


def mark(value: PyTree, name: str, kind: str, **fields: Any) -> Any:
    """Mark the arrays in `value` and return it; the source line is that of the caller's caller."""
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
        # Python numbers stay Python numbers, because the program may need their values.
        tapped.append(out if has_dtype(x) else x)
    return structure.join(tapped) if structure.count else value


def is_array(x: Value) -> bool:
    """Return whether `x` is a leaf that `mark` marks: an array or a Python number."""
    return has_dtype(x) or isinstance(x, (bool, int, float, complex))


def has_dtype(x: Value) -> bool:
    """Return whether a leaf is an array or a NumPy scalar, and not a Python number."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def leaf_name(keys: tuple[Any, ...]) -> str:
    """Return the name of a leaf in its structure; escape characters with a meaning in paths."""
    name = pytrees.keystr(keys, simple=True, separator=".")
    return re.sub(r"[*?@~:]", lambda found: f"%{ord(found.group()):02X}", name)
