"""The subjects of a page: one for each argument of `view`, by its type."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from tapax._results import SiteTable, Taps, load_taps
from tapax._results.difference import Difference
from tapax._results.residual_table import ResidualTable
from tapax._results.taps_file import holds_taps
from tapax._sites import wrong_type
from tapax.data._activations import Activations
from tapax.data._folder import is_dataset
from tapax.monitoring._log import Log
from tapax.monitoring._log_tail import LogTail
from tapax.nonfinite._finding import Finding
from tapax.viewer._blobs import Blobs
from tapax.viewer._by_token import ByToken, add_by_token
from tapax.viewer._captures import Tokens, add_site_table, add_taps
from tapax.viewer._datasets import Decode, Directions, add_dataset
from tapax.viewer._differences import add_difference
from tapax.viewer._findings import add_finding
from tapax.viewer._followed_run import FollowedRun
from tapax.viewer._format import Subject, empty_subject
from tapax.viewer._payload import FIRST_SECONDS
from tapax.viewer._residual_tables import add_residual_table
from tapax.viewer._runs import add_log
from tapax.viewer._site_columns import Sources

Viewable: TypeAlias = (
    Taps
    | SiteTable
    | ResidualTable
    | Log
    | Finding
    | Difference
    | ByToken
    | Activations
    | str
    | os.PathLike[str]
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `view` that apply to some kinds of subjects."""

    tokens: Tokens | None = None
    directions: Directions | None = None
    decode: Decode | None = None


@dataclasses.dataclass(frozen=True)
class PagePart:
    """The name of a subject, the blobs and sources to which it adds, and the page's options."""

    name: str
    blobs: Blobs
    sources: Sources
    options: Options


@dataclasses.dataclass(frozen=True)
class Subjects:
    """The subjects of a page by number; `Payload` fills in the empty subjects of `runs`."""

    subjects: list[Subject]
    runs: dict[int, FollowedRun]


_Add: TypeAlias = Callable[[Any, PagePart], Subject]
_KINDS: Sequence[tuple[type, str, _Add]] = (
    (Taps, "capture", lambda x, to: add_taps(x, to.name, to.blobs, to.sources, to.options.tokens)),
    (SiteTable, "sites", lambda x, to: add_site_table(x, to.name, to.blobs, to.sources)),
    (
        ResidualTable,
        "residuals",
        lambda x, to: add_residual_table(x, to.name, to.blobs, to.sources),
    ),
    (Log, "run", lambda x, to: add_log(x, to.name, to.blobs, to.sources)),
    (Finding, "finding", lambda x, to: add_finding(x, to.name, to.sources)),
    (Difference, "difference", lambda x, to: add_difference(x, to.name, to.blobs, to.sources)),
    (ByToken, "tokens", lambda x, to: add_by_token(x, to.name, to.blobs, to.sources)),
    (
        Activations,
        "dataset",
        lambda x, to: add_dataset(
            x, to.name, to.blobs, to.sources, to.options.directions, to.options.decode
        ),
    ),
)
"""The types that `view` accepts: the name on the page, and the function that makes a subject."""


def make_subjects(
    what: Sequence[Viewable | FollowedRun], blobs: Blobs, sources: Sources, options: Options
) -> Subjects:
    """Make the subject of each argument of `view`."""
    opened = [_open(each) for each in what]
    names = _name_all(opened)
    made = Subjects([], {})
    for number, ((each, _), name) in enumerate(zip(opened, names, strict=True)):
        if isinstance(each, FollowedRun):
            each.name = name
            made.runs[number] = each
            made.subjects.append(cast(Subject, empty_subject("log", name)))
        else:
            _, add = _find_kind(each)
            made.subjects.append(add(each, PagePart(name, blobs, sources, options)))
    return made


def _open(what: Any) -> tuple[Any, str]:
    """Open a path; return the object and its name, which is empty for an object without a path."""
    if isinstance(what, FollowedRun):
        return what, what.name
    if not isinstance(what, (str, os.PathLike)):
        kind, _ = _find_kind(what)
        return what, os.path.basename(what.path) if kind == "dataset" else ""
    path = os.fspath(what)
    name = os.path.basename(os.path.abspath(path))
    if holds_taps(path):
        return load_taps(path), name
    if is_dataset(path):
        return Activations(path), name
    run = FollowedRun(name, LogTail(path, exact=False))
    run.read(FIRST_SECONDS)
    run.raise_if_unreadable()
    return run, name


def _find_kind(what: Any) -> tuple[str, _Add]:
    for kind, name, add in _KINDS:
        if isinstance(what, kind):
            return name, add
    raise wrong_type(
        "tapax.view takes taps, a table of sites or residuals, a log, a finding, a difference, a "
        "dataset, or the path of one, but was given",
        what,
    )


def _name_all(opened: Sequence[tuple[Any, str]]) -> list[str]:
    """Name each subject by its file or its kind; a letter distinguishes equal names."""
    names = [name or _find_kind(each)[0] for each, name in opened]
    seen: dict[str, int] = {}
    numbered: list[str] = []
    for name in names:
        number = seen[name] = seen.get(name, -1) + 1
        letter = "abcdefgh"[number] if number < 8 else str(number)
        numbered.append(f"{name} {letter}" if names.count(name) > 1 else name)
    return numbered
