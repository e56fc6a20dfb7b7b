"""The options of jitted functions."""

from typing import Any

import jax
from jax._src.sharding_impls import UNSPECIFIED  # pyright: ignore[reportPrivateImportUsage]

from tapax._jax.types import Function

_Jitted = type(jax.jit(lambda: None))


def jit_options(fn: Function) -> dict[str, Any] | None:
    """Return the keyword arguments of the `jax.jit` that made `fn`, or None for another function.

    The attributes of `fn` do not tell: `jax.grad` copies those of a jitted function to its result.
    The type of `fn` does.
    """
    if type(fn) is not _Jitted:
        return None
    info = getattr(fn, "_jit_info")  # noqa: B009  (pyright's type of `fn` lacks the attribute)
    if any((*info.in_layouts_leaves, *info.out_layouts_leaves, info.device, info.backend)):
        return None  # the `jit` equation of a call of `fn` keeps these options
    options: dict[str, Any] = {
        "static_argnums": info.static_argnums or None,
        "static_argnames": info.static_argnames or None,
        "donate_argnums": info.donate_argnums or None,
        "donate_argnames": info.donate_argnames or None,
        "keep_unused": info.keep_unused,
        "compiler_options": dict(info.compiler_options_kvs) or None,
    }
    for name in ("in_shardings", "out_shardings"):
        leaves = getattr(info, f"{name}_leaves")
        if not all(leaf is UNSPECIFIED for leaf in leaves):
            treedef = getattr(info, f"{name}_treedef")
            # `jax.jit` takes None where JAX stores UNSPECIFIED.
            options[name] = treedef.unflatten(
                [None if leaf is UNSPECIFIED else leaf for leaf in leaves]
            )
    return options
