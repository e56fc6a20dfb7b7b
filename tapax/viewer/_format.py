"""The payload, which Python sends to the page, version 2.

A payload is a *header*, which is JSON, and numbered *blobs*, which are bytes. The page draws its
first view from the header and a few blobs, and reads other blobs when a view needs them. Each host
delivers the payload differently: a saved file contains the blobs as base64, the local server
answers requests for blobs, and a notebook sends blobs as binary messages.
`web/src/payload/types.ts` declares the header for the page, field by field. Change both files
together, and `VERSION` with them.

**Blobs.** Every blob is compressed with raw deflate (RFC 1951). The header describes its content
where it refers to the blob. A *column*, `{"blob": 3, "dtype": "f32", "shape": [12, 64]}`, is one
little-endian array in C order, of f32, f64, i32 or u8, or a text in UTF-8 (dtype `utf8`, shape
`[bytes]`). Several small arrays may share a blob: `offset` is the number of elements before the
array. A *tile* is a part of a matrix, in one of the two codecs below.

**Subjects.** `header["subjects"]` has an entry for each thing that the page shows: taps, a table of
sites, a log, a finding, a difference, a dataset. All entries have equal fields, most of them empty
for most kinds, so that a view depends on the content of a subject and never on its kind. Sites are
columns: `name` is unique and contains the call and the iteration (`GPT/blocks/mlp@1[3]`), and globs
match `path`. All other fields refer to a site by its number in these columns, or by -1.

**Statistics.** A statistic of one kind (`value`, `grad`, `param`, `param_grad`, `update`, or "" for
a plain number such as a loss) is a matrix. It has a row for each site with the statistic, and a
column for each step; a single capture has one column. A matrix is stored at one or several
*levels*. A column of a level summarises `factor` columns of the matrix by their number of largest
magnitude: NaN comes before infinity, infinity before any other number, and a missing number last.
The finest level comes first. The tiles of a level are consecutive blobs, row by row of tiles; the
tiles at the end of a row or a column are smaller.

- codec `f32`: float32, row by row. The number -2**-149 means "no number at this step".
- codec `q13`: every row of the tile is quantised to 13 bits between its extremes, on a logarithmic
  scale. First come the parameters of the rows, float32 [rows, 3]: `low`, `step`, `unit`; then the
  low bytes of all codes, then the high bytes. Code 0 is a missing number, 1 NaN, 2 infinity, 3
  minus infinity, 4 zero. Code c >= 5 is exp(t) for t = low + (c - 5) * step if `unit` is 0, as in
  rows without negative numbers, and unit * sinh(t) otherwise. The relative error is at most
  (exp(step) - 1) / 2: 0.06 percent for a row that spans four decades.

Payloads with up to `EXACT_BYTES` of statistics use `f32`. In `q13` a number takes at most 13 bits
after compression, so that a saved file is smaller than 0.6 times the statistics as float32,
whatever their values.

**Edges.** `edges` has the flow of data between sites, with the shape and dtype of the value that
flows. `back` marks an edge to the same or an earlier site, through the carry of a loop. `limited`
lists the sites to which data of more sites flow than `edges` has. If the flow is not known, `edges`
is None.

**Following a run.** An *update* is JSON of the type `Update`, with blobs whose numbers continue the
numbers of the header. It has the new steps, the statistics at these steps alone (one level, `f32`,
rows as in any matrix), the new sites, and in full what is small, such as events and messages.
`keep` is the number of known steps that remain, since a resumed run replaces later steps. The
updates of all runs are numbered together: the `revision` of a subject is the number of the last
update that the subject includes.

**Text.** Names, sources and messages are data. Nothing in a payload is markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

FORMAT = "tapax.page"
VERSION = 2
MISSING = -(2.0**-149)
"""The number that means "no number at this step": the negative float32 nearest to zero."""
EXACT_BYTES = 2**26
"""The size of statistics, in bytes of float32, above which they are quantised."""

Of: TypeAlias = Literal["value", "grad", "param", "param_grad", "update", ""]
Scale: TypeAlias = Literal["log", "linear", "diverging"]
Codec: TypeAlias = Literal["f32", "q13"]
SubjectKind: TypeAlias = Literal["taps", "sites", "log", "finding", "difference", "activations"]
JsonNumber: TypeAlias = "float | str"
"""A number, or "NaN", "Infinity" or "-Infinity", which JSON lacks."""
Line: TypeAlias = "tuple[int, int]"
"""The number of a file in `Header.sources`, and the number of a line."""


class Column(TypedDict):
    """An array in a blob."""

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
    """Numbers by site and step; row `i` is site `i` if `sites` is None."""

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
    """Columns with an entry for each site; a column without any known entry is absent."""

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
    """A captured array as f32; if `data` is None, `omitted` says why.

    `rendering` is the text that treescope shows for the array.
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


# The class syntax cannot declare `from`, a keyword of Python.
Edge = TypedDict(
    "Edge", {"from": int, "to": int, "shape": "Sequence[int]", "dtype": str, "back": bool}
)


class Operand(TypedDict):
    label: str
    type: str
    text: str


class Event(TypedDict):
    """An alert that fired, or a finding of a non-finite value."""

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
    """The first rows of a dataset: their numbers, and a text for each cell."""

    row: Sequence[int]
    cells: Sequence[Sequence[str]]


class Context(TypedDict):
    row: int
    activation: float
    tokens: Sequence[str]
    activations: Sequence[float | str]
    """Numbers; those that JSON lacks are the strings "NaN", "Infinity" and "-Infinity"."""


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
    """One of the things that the page shows."""

    kind: SubjectKind
    name: str
    sites: SiteColumns
    steps: Column | None
    revision: NotRequired[int]
    statistics: Sequence[Statistic]
    histograms: Sequence[Histogram]
    arrays: Sequence[ArrayEntry]
    tokens: Sequence[TokenGrid]
    edges: Sequence[Edge] | None
    limited: NotRequired[Sequence[int]]
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
    """The changes of a run since the last update."""

    format: str
    version: int
    subject: int
    revision: int
    keep: int
    sites: SiteColumns
    steps: Sequence[int]
    statistics: Sequence[Statistic]
    histograms: Sequence[Histogram]
    edges: NotRequired[Sequence[Edge]]
    limited: NotRequired[Sequence[int]]
    events: Sequence[Event]
    messages: Sequence[Message]
    blobs: int


def empty_subject(kind: SubjectKind, name: str) -> dict[str, Any]:
    """Make a subject without sites and numbers, which the caller completes."""
    return {
        "kind": kind,
        "name": name,
        "sites": {"name": [], "path": [], "role": [], "stack": [], "depth": []},
        "steps": None,
        "statistics": [],
        "histograms": [],
        "arrays": [],
        "tokens": [],
        "edges": None,
        "events": [],
        "messages": [],
    }
