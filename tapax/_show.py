"""Tables for people: sites, and what was captured of them."""

from __future__ import annotations

import io
import math
import os
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.core import Tracer
from rich.console import Console
from rich.table import Table

from tapax._sites.site import Site

if TYPE_CHECKING:
    from tapax._listing import ModuleTable
    from tapax._taps import SiteTable, Taps


def _render(table: Table) -> str:
    console = Console(file=io.StringIO(), width=140, force_terminal=False)
    console.print(table)
    return console.file.getvalue().rstrip()  # pyright: ignore[reportAttributeAccessIssue]


def _bytes(n: int) -> str:
    if n < 1024:
        return f"{n} B"
    power = min(4, int(math.log2(n)) // 10)
    return f"{n / 1024**power:.1f} {' KMGT'[power]}iB"


def _type(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _place(source: str) -> str:
    return os.path.basename(source)


def sites_table(sites: SiteTable) -> str:
    """Every site with its type, size, loops and place in the source."""
    title = f"{len(sites)} sites, {_bytes(sites.nbytes)}"
    table = Table("site", "kind", "type", "bytes", "loops", "source", title=title)
    for site in sites:
        table.add_row(
            site.name,
            site.kind,
            _type(site) if site.dtype is not None else "",
            _bytes(site.nbytes),
            " ".join(site.loops),
            _place(site.source),
        )
    return _render(table)


def modules_table(modules: ModuleTable) -> str:
    """Every module with its class."""
    table = Table("module", "class", title=f"{len(modules)} modules")
    for path, cls in modules:
        table.add_row(path, f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}")
    return _render(table)


def _number(x: Any, reducer: Any) -> str:
    """The root mean square of what was captured; what it was reduced to, if it was."""
    if isinstance(x, Tracer):
        return "traced"
    if reducer is not None:
        x = np.asarray(x)
        ends = dict.fromkeys(f"{end:.3g}" for end in (x.min(), x.max())) if x.size else {}
        return f"{reducer}: {' to '.join(ends)}"
    if not jax.numpy.issubdtype(x.dtype, np.inexact):
        return ""
    x = np.abs(np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64))
    return f"{np.sqrt(np.mean(x**2)):.3g}" if x.size else ""


def taps_table(taps: Taps) -> str:
    """Every captured site with its type, and the root mean square of its value and gradient."""
    found = {**taps.values, **taps.grads}
    names = [name for name in dict.fromkeys([*taps.sites.names, *found]) if name in found]
    title = f"{len(taps.values)} values, {len(taps.grads)} gradients"
    table = Table("site", "type", "value rms", "grad rms", "valid", "source", title=title)
    sites = {s.name: s for s in taps.sites}
    for name in names:
        x, g, site = taps.values.get(name), taps.grads.get(name), sites.get(name, Site(name))
        table.add_row(
            name,
            _type(x if x is not None else g),
            "" if x is None else _number(x, site.reducer),
            "" if g is None else _number(g, site.grad_reducer),
            _valid(taps.valid.get(name)),
            _place(site.source),
        )
    return _render(table)


def _valid(mask: Any) -> str:
    if mask is None:
        return ""
    if isinstance(mask, Tracer):
        return "traced"
    mask = np.asarray(mask)
    if mask.dtype != bool:
        return f"{mask} times" if mask.ndim == 0 else f"{mask.min()} to {mask.max()} times"
    return str(bool(mask)) if mask.ndim == 0 else f"{int(mask.sum())} of {mask.size}"
