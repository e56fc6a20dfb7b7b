"""Tables to print: of sites, modules, residuals and taps."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from rich.console import Console
from rich.table import Column, Table

from tapax._jax import Value, local_elements, spans_processes
from tapax._results.residual import Residual, kept_nbytes, policy_nbytes
from tapax._results.source_names import name_line
from tapax._sites import Site


def render(table: Table) -> str:
    """Render a table as text, even in a notebook, in which rich would display it instead."""
    console = Console(
        file=io.StringIO(),
        width=140,
        force_terminal=False,
        force_jupyter=False,
        markup=False,
        emoji=False,
    )
    console.print(table)
    return console.file.getvalue().rstrip()  # pyright: ignore[reportAttributeAccessIssue]


def number_column(header: str, style: str = "") -> Column:
    """Make a column of numbers; in HTML, a style colours them by magnitude."""
    return Column(header, justify="right", style=style)


def show_bytes(n: int) -> str:
    """Write a number of bytes in the largest unit that fits."""
    if n < 1024:
        return f"{n} B"
    power = min(4, int(math.log2(n)) // 10)
    return f"{n / 1024**power:.1f} {' KMGT'[power]}iB"


def type_of(x: Value) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def sites_table(sites: Sequence[Site]) -> Table:
    """Make a table of sites: their types, sizes, loops and source lines."""
    title = f"{len(sites)} sites, {show_bytes(sum(site.nbytes for site in sites))}"
    table = Table("site", "kind", "type", number_column("bytes"), "loops", "source", title=title)
    for site in sites:
        table.add_row(
            site.name,
            site.kind,
            type_of(site) if site.dtype is not None else "",
            show_bytes(site.nbytes),
            " ".join(site.loops),
            name_line(site.source),
        )
    return table


def modules_table(modules: Sequence[tuple[str, type]]) -> Table:
    """Make a table of modules: their paths and classes."""
    table = Table("module", "class", title=f"{len(modules)} modules")
    for path, cls in modules:
        table.add_row(path, f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}")
    return table


def residuals_table(
    residuals: Sequence[Residual], arguments: Sequence[Residual], policy: str | None
) -> Table:
    """Make a table of residuals: their operations, types, sizes and source lines."""
    noun = "values" if not residuals or residuals[0].kind == "computed" else "arguments"
    title = f"{len(residuals)} kept {noun}, {show_bytes(kept_nbytes(residuals))}"
    if policy is not None:
        title += f", {show_bytes(policy_nbytes(residuals))} with {policy}"
    columns = ["site", "operation", "type", number_column("bytes"), "loops", "source"]
    if policy is not None:
        columns.insert(-1, "with policy")
    table = Table(*columns, title=title)
    for residual in residuals:
        cells = [
            residual.site,
            f"{residual.operation or residual.kind} {residual.name}".rstrip(),
            type_of(residual),
            show_bytes(residual.nbytes),
            " ".join(residual.loops),
            name_line(residual.source),
        ]
        if policy is not None:
            cells.insert(-1, residual.change)
        table.add_row(*cells)
    if arguments:
        table.caption = (
            f"arguments and constants, in memory anyway: {show_bytes(kept_nbytes(arguments))}"
        )
    return table


def residual_groups_table(
    by: str, groups: Mapping[str, Sequence[Residual]], policy: str | None
) -> Table:
    """Make a table of the number and the size of the residuals in each group."""
    columns = [by, *map(number_column, ("residuals", "bytes"))]
    if policy is not None:
        columns.append(number_column(f"with {policy}"))
    table = Table(*columns, title=f"Residuals by {by}")
    for key, residuals in groups.items():
        cells = [str(len(residuals)), show_bytes(kept_nbytes(residuals))]
        if policy is not None:
            cells.append(show_bytes(policy_nbytes(residuals)))
        table.add_row(name_line(key) if by == "source" else key, *cells)
    return table


def _read(x: Value) -> tuple[np.ndarray, str]:
    """Return an array and an empty string, or the elements of this process and a star."""
    return (local_elements(x), "*") if spans_processes(x) else (np.asarray(x), "")


def _number(x: Value, reducer: Any) -> str:
    """Format the root mean square of a captured array, or the range of a reduced one."""
    if isinstance(x, Tracer):
        return "traced"
    if reducer is not None:
        x, star = _read(x)
        ends = dict.fromkeys(f"{end:.3g}" for end in (x.min(), x.max())) if x.size else {}
        return f"{reducer}: {' to '.join(ends)}{star}"
    if not jax.numpy.issubdtype(x.dtype, np.inexact):
        return ""
    x, star = _read(x)
    x = np.abs(x.astype(np.complex128 if np.iscomplexobj(x) else np.float64))
    return f"{np.sqrt(np.mean(x**2)):.3g}{star}" if x.size else star


def taps_table(
    sites: Sequence[Site],
    values: Mapping[str, Any],
    grads: Mapping[str, Any],
    valid: Mapping[str, Any],
) -> Table:
    """Make a table of captured sites: types, and root mean squares of values and gradients.

    The column `valid` is there only if a site may not have run. Making the table communicates
    nothing: for an array that spans processes, it shows the part of this process.
    """
    by_name = {site.name: site for site in sites}
    title = f"{len(values)} values, {len(grads)} gradients"
    reducers = {"value": {by_name[name].reducer for name in values if name in by_name}}
    reducers["grad"] = {by_name[name].grad_reducer for name in grads if name in by_name}
    columns = (
        number_column(kind if found and None not in found else f"{kind} rms", style="blue")
        for kind, found in reducers.items()
    )
    optional = ["valid"] if valid else []
    table = Table("site", "type", *columns, *optional, "source", title=title)
    for name in dict.fromkeys([*by_name, *values, *grads]):
        x, g, site = values.get(name), grads.get(name), by_name.get(name, Site(name))
        if x is None and g is None:
            continue
        table.add_row(
            name,
            type_of(x if x is not None else g),
            "" if x is None else _number(x, site.reducer),
            "" if g is None else _number(g, site.grad_reducer),
            *([_valid(valid.get(name))] if valid else []),
            name_line(site.source),
        )
    if any(map(spans_processes, (*values.values(), *grads.values(), *valid.values()))):
        table.caption = (
            f"* computed from the elements of process {jax.process_index()} of "
            f"{jax.process_count()}"
        )
    return table


def _valid(mask: Value) -> str:
    if mask is None:
        return ""
    if isinstance(mask, Tracer):
        return "traced"
    mask, star = _read(mask)
    if mask.dtype != bool:
        counts = f"{mask}" if mask.ndim == 0 else f"{mask.min()} to {mask.max()}"
        return f"{counts} times{star}"
    return str(bool(mask)) if mask.ndim == 0 else f"{int(mask.sum())} of {mask.size}{star}"
