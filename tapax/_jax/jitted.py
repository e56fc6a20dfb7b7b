"""Jitted functions: the options that `jax.jit` made them with."""

from typing import Any

import jax
from jax._src.sharding_impls import UNSPECIFIED  # pyright: ignore[reportPrivateImportUsage]

from tapax._jax.types import Function

_Jitted = type(jax.jit(lambda: None))


def jit_options(fn: Function) -> dict[str, Any] | None:
    """The keyword arguments with which `jax.jit` made `fn`; None if it did not.

    A function that wraps a jitted one, as `jax.grad` makes it, has its attributes too: the type
    decides.
    """
    if type(fn) is not _Jitted:
        return None
    info = getattr(fn, "_jit_info")  # noqa: B009  (what pyright takes for the type has none)
    if any((*info.in_layouts_leaves, *info.out_layouts_leaves, info.device, info.backend)):
        return None  # these are kept by the equation that calling `fn` makes
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
            # In the arguments of `jit` None is what UNSPECIFIED is inside.
            options[name] = treedef.unflatten(
                [None if leaf is UNSPECIFIED else leaf for leaf in leaves]
            )
    return options
