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
    _check_options([each for each, _ in opened], options)
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
    if options.tokens is not None:
        captures = (
            s for (each, _), s in zip(opened, made.subjects, strict=True) if isinstance(each, Taps)
        )
        if not any("tokens" in grid for subject in captures for grid in subject["tokens"]):
            raise _no_array_with_tokens(options.tokens, [each for each, _ in opened])
    return made


def _check_options(what: Sequence[Any], options: Options) -> None:
    """Raise if an argument of `view` applies to none of the subjects, or has a wrong form."""
    for name, kind, noun in (
        ("tokens", Taps, "taps"),
        ("directions", Activations, "datasets"),
        ("decode", Activations, "datasets"),
    ):
        if getattr(options, name) is not None and not any(isinstance(x, kind) for x in what):
            raise TypeError(f"`{name}` is for views of {noun}, but tapax.view was given none.")
    if options.decode is not None and not callable(options.decode):
        raise wrong_type(
            "`decode` takes a function from a token to its text, but is", options.decode
        )
    tokens = options.tokens
    if tokens is not None and (
        isinstance(tokens, str) or not len(tokens) or len(set(map(_length, tokens)) | {-1}) != 2
    ):
        raise ValueError(
            "`tokens` takes a list of strings for each example, all of one length, but is "
            f"{str(tokens)[:60]}."
        )


def _length(line: Any) -> int:
    return len(line) if isinstance(line, Sequence) or hasattr(line, "__len__") else -1


def _no_array_with_tokens(tokens: Tokens, what: Sequence[Any]) -> ValueError:
    shapes = {
        str(list(x.shape[:2]))
        for taps in what
        if isinstance(taps, Taps)
        for x in (*taps.values.values(), *taps.grads.values())
        if x.ndim == 3
    }
    there = f"they begin with {', '.join(sorted(shapes))}" if shapes else "none has three axes"
    return ValueError(
        f"`tokens` has {len(tokens)} examples of {len(tokens[0])} tokens, but no captured array is "
        f"[examples, positions, width] with these sizes: {there}. Give a list of strings for each "
        "example."
    )


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
