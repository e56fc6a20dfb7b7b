"""The payload: what Python hands to the page, version 1.

A payload is a *header*, which is JSON, and numbered *blobs*, which are bytes. The page draws its
first view from the header and a few blobs, and reads the others when a view needs them. Each host
brings the same payload to the page in its own way: a saved file holds the blobs as base64, the
local server answers requests for them, a notebook sends them as binary messages.
`web/src/payload/types.ts` declares the header for the page, field by field; the two change
together, with `VERSION`.

**Blobs.** Every blob is compressed with raw deflate (RFC 1951). What it holds is said where the
header refers to it: a *column*, `{"blob": 3, "dtype": "f32", "shape": [12, 64]}`, is one
little-endian array in C order, of f32, f64, i32 or u8, or a text in UTF-8 (dtype `utf8`, shape
`[bytes]`). Several small arrays may share a blob: `offset` is the number of elements before this
one. A *tile* is a part of a matrix, in one of the two codecs below.

**Subjects.** `header["subjects"]` has an entry for each thing that is viewed: taps, a table of
sites, a log, a finding, a difference, a dataset. All have the same fields, most of them empty for
most kinds, so that a view asks what a subject has and never what it is. Sites are columns: `name`
is unique and has the call and the iteration (`GPT/blocks/mlp@1[3]`), `path` is what a glob is
matched with. Elsewhere a site is its number in these columns, or -1.

**Statistics.** A statistic of one kind (`value`, `grad`, `param`, `param_grad`, `update`, or "" for
a plain number such as a loss) is a matrix with a row for each site that has it, and a column for
each step; one column for a single capture. A matrix is stored at one or several *levels*. A column
of a level stands for `factor` columns of the matrix, and holds the number of largest magnitude
among them: NaN before infinity before any other, a missing number last. The finest level comes
first. Its tiles are consecutive blobs, row by row of tiles; those at the end of a row or a column
are smaller.

- codec `f32`: float32, row by row. The number -2**-149 stands for "no number at this step".
- codec `q13`: every row of the tile is quantised to 13 bits between its extremes, on a logarithmic
  scale. First the rows' parameters, float32 [rows, 3]: `low`, `step`, `unit`; then the low bytes of
  all codes, then the high bytes. A code of 0 is a missing number, 1 NaN, 2 infinity, 3 minus
  infinity, 4 zero. Code c >= 5 is exp(t) for t = low + (c - 5) * step if `unit` is 0, as in rows
  without negative numbers, and unit * sinh(t) otherwise. The relative error is at most (exp(step) -
  1) / 2: 0.06 percent for a row that spans four decades.

`f32` is for payloads up to `EXACT_BYTES` of statistics. In `q13` a number takes 13 bits at most,
deflated, so that a saved file is smaller than 0.6 times the statistics as float32, whatever they
are.

**Following a run.** An *update* is JSON of the type `Update`, with blobs whose numbers continue
those of the header: new steps, the statistics at these alone (one level, `f32`, rows as in any
matrix), new sites, and in full what is small. `keep` says how many of the known steps remain, since
a resumed run replaces later ones. Updates of all runs are numbered together: the `revision` of a
subject is the number of the last one that it has in it.

**Text.** Names, sources and messages are data. Nothing in a payload is markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

FORMAT = "tapax.page"
VERSION = 1
MISSING = -(2.0**-149)
"""Stands for "no number at this step": the negative float32 nearest to zero."""
EXACT_BYTES = 2**26
"""Statistics of more bytes than this, as float32, are quantised."""

Of: TypeAlias = Literal["value", "grad", "param", "param_grad", "update", ""]
Scale: TypeAlias = Literal["log", "linear", "diverging"]
Codec: TypeAlias = Literal["f32", "q13"]
SubjectKind: TypeAlias = Literal["taps", "sites", "log", "finding", "difference", "activations"]
JsonNumber: TypeAlias = "float | str"
"""A number, or "NaN", "Infinity" or "-Infinity", which JSON does not have."""
Line: TypeAlias = "tuple[int, int]"
"""The number of a file in `Header.sources`, and a line of it."""


class Column(TypedDict):
    """A blob that holds one array."""

    blob: int
    dtype: Literal["f32", "f64", "i32", "u8", "utf8"]
    shape: Sequence[int]
    offset: NotRequired[int]


class Level(TypedDict):
    """A matrix at one resolution along the steps."""

    factor: int
    columns: int
    codec: Codec
    tileRows: int
    tileColumns: int
    blob: int


class Matrix(TypedDict):
    """Numbers by site and step; row `i` is site `i` where `sites` is None."""

    sites: Column | None
    rows: int
    columns: int
    levels: Sequence[Level]


class Statistic(TypedDict):
    of: Of
    stat: str
    unit: str
    scale: Scale
    matrix: Matrix


class SiteColumns(TypedDict):
    """An entry for each site in every column; a column that is known for no site is absent."""

    name: Sequence[str]
    path: Sequence[str]
    call: NotRequired[Sequence[int]]
    pullback: NotRequired[Sequence[int]]
    kind: NotRequired[Sequence[str]]
    shape: NotRequired[Sequence[Sequence[int] | None]]
    dtype: NotRequired[Sequence[str]]
    nbytes: NotRequired[Sequence[int]]
    source: NotRequired[Sequence[Line | None]]
    loops: NotRequired[Sequence[Sequence[str]]]
    iteration: NotRequired[Sequence[Sequence[int]]]
    module: NotRequired[Sequence[str]]
    method: NotRequired[Sequence[str]]
    op: NotRequired[Sequence[str]]
    conditional: NotRequired[Sequence[bool]]
    role: Sequence[str]
    stack: Sequence[str]
    depth: Sequence[Sequence[int]]


class Histogram(TypedDict):
    """Counts over time: `counts` is f32 [lines, bins], and line `i` begins at step `steps[i]`."""

    of: Of
    stat: str
    site: int
    steps: Column | None
    edges: Column
    counts: Column


class ArrayEntry(TypedDict):
    """A captured array as f32; without `data` if it was left out, and `omitted` says why.

    `rendering` is the text by which treescope shows it.
    """

    site: int
    of: Literal["value", "grad", "valid"]
    shape: Sequence[int]
    dtype: str
    data: Column | None
    omitted: NotRequired[str]
    rendering: NotRequired[str]


class TokenGrid(TypedDict):
    """Numbers by site, example and position: f32 [rows, examples, positions]."""

    label: str
    unit: str
    scale: Scale
    sites: Sequence[int]
    rowLabels: Sequence[str]
    examples: int
    positions: int
    data: Column
    tokens: NotRequired[Sequence[Sequence[str]]]
    cells: NotRequired[Column]
    texts: NotRequired[Sequence[str]]


# `from` is a keyword of Python, hence the other form.
Edge = TypedDict("Edge", {"from": int, "to": int, "shape": "Sequence[int] | None", "dtype": str})


class Operand(TypedDict):
    label: str
    type: str
    text: str


class Event(TypedDict):
    """An alert that went off, or a non-finite value that was found."""

    kind: Literal["alert", "finding"]
    step: int | None
    site: int
    siteName: str
    message: str
    stat: NotRequired[str]
    number: NotRequired[JsonNumber]
    operation: NotRequired[str]
    phase: NotRequired[str]
    iterations: NotRequired[Sequence[tuple[str, int]]]
    examples: NotRequired[Sequence[tuple[int, int]]]
    device: NotRequired[Sequence[tuple[str, int]]]
    index: NotRequired[Sequence[int]]
    count: NotRequired[int]
    shape: NotRequired[Sequence[int]]
    dtype: NotRequired[str]
    operands: NotRequired[Sequence[Operand]]
    source: NotRequired[Line | None]


class Message(TypedDict):
    level: Literal["info", "warning", "error"]
    text: str


class SourceFile(TypedDict):
    path: str
    text: Column | None


class SiteDifferenceEntry(TypedDict):
    site: int
    otherName: str
    of: Literal["value", "grad"]
    types: tuple[str, str]
    differs: bool
    reason: str
    absolute: JsonNumber
    relative: JsonNumber
    ulps: JsonNumber
    index: Sequence[int] | None
    iteration: Sequence[int]
    sentence: str


class DifferenceEntry(TypedDict):
    a: str
    b: str
    tolerance: str
    entries: Sequence[SiteDifferenceEntry]
    first: int | None
    firstGrad: int | None
    onlyA: Sequence[str]
    onlyB: Sequence[str]


class DatasetColumn(TypedDict):
    name: str
    dtype: str
    shape: Sequence[int]


class Sample(TypedDict):
    """Some rows of a dataset: their numbers, and a text for each cell."""

    row: Sequence[int]
    cells: Sequence[Sequence[str]]


class Context(TypedDict):
    row: int
    activation: float
    tokens: Sequence[str]
    activations: Sequence[float]


class TopContexts(TypedDict):
    """The rows in which a latent, a neuron or a direction is most active."""

    label: str
    site: int
    contexts: Sequence[Context]


class Dataset(TypedDict):
    rows: int
    columns: Sequence[DatasetColumn]
    sample: Sample
    tops: Sequence[TopContexts]


class Subject(TypedDict):
    """One thing that is viewed."""

    kind: SubjectKind
    name: str
    sites: SiteColumns
    steps: Column | None
    revision: NotRequired[int]
    statistics: Sequence[Statistic]
    histograms: Sequence[Histogram]
    arrays: Sequence[ArrayEntry]
    tokens: Sequence[TokenGrid]
    edges: Sequence[Edge]
    events: Sequence[Event]
    messages: Sequence[Message]
    difference: NotRequired[DifferenceEntry]
    dataset: NotRequired[Dataset]


class Header(TypedDict):
    format: str
    version: int
    title: str
    subjects: Sequence[Subject]
    sources: Sequence[SourceFile]
    blobs: int


class Update(TypedDict):
    """The growth of a subject that is followed."""

    format: str
    version: int
    subject: int
    revision: int
    keep: int
    sites: SiteColumns
    steps: Sequence[int]
    statistics: Sequence[Statistic]
    histograms: Sequence[Histogram]
    events: Sequence[Event]
    messages: Sequence[Message]
    blobs: int


def empty_subject(kind: SubjectKind, name: str) -> dict[str, Any]:
    """Make a subject without sites and numbers, for its kind to fill in."""
    return {
        "kind": kind,
        "name": name,
        "sites": {"name": [], "path": [], "role": [], "stack": [], "depth": []},
        "steps": None,
        "statistics": [],
        "histograms": [],
        "arrays": [],
        "tokens": [],
        "edges": [],
        "events": [],
        "messages": [],
    }
