"""The programs: a small language whose every construct maps a vector to a vector.

A `Program` is a value: it compares, hashes, prints as Python that rebuilds it, and shrinks. A
block is a tuple of nodes applied in order to `x`, a float vector of length `DIM`. Every node also
sees an environment of two closed-over values: `outer`, the `x` that entered the nearest enclosing
construct, and `n`, an integer vector. `outer` makes values that do not depend on a mapped axis or
a loop; `n` makes predicates and trip counts that both sides compute exactly.

    >>> Program((Scan((Do("sin", "a"),), length=3),))
    Program(body=(Scan(body=(Do(op='sin', name='a'),), length=3),))

Each node has two definitions, on purpose: in `build.py` with JAX's transformations and
in `reference.py` with Python loops. Only `Do`, straight arithmetic, has one definition
(`leaf.py`), written against an array namespace.

Two properties hold of every node, and the oracle relies on both:
- its result depends on its `x`, so inside a gradient every `x` carries a tangent;
- it is (nearly) non-expansive, so that float32 and float64 stay close however deep the nesting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

DIM = 3

Op = Literal[
    "sin", "tanh", "scale", "dot", "mix", "mask", "named", "outer", "half", "int", "scalar"
]
Use = Literal["through", "side", "drop", "stop"]
ModuleFilter = Literal["default", "everything", "nothing", "dots", "names"]
Mesh = Literal["line", "grid", "row"]
How = Literal["plain", "jit outside", "jit inside"]
Of = Literal["value", "grad"]
What = Literal[
    "scale", "sin", "square", "turn", "clip", "stop", "site", "closed", "number", "array"
]
By = Literal["double", "total", "pair", "by_call", "square", "rms"]
Index = Literal[
    "first", "last", "middle", "tail", "back", "odd", "some", "twice", "mask", "grid", "all", "new"
]


@dataclass(frozen=True, repr=False)
class Node:
    """One construct. Its repr leaves out fields with default values."""

    def __repr__(self) -> str:
        pairs = [(f, getattr(self, f.name)) for f in fields(self)]
        shown = [f"{f.name}={value!r}" for f, value in pairs if value != f.default]
        return f"{type(self).__name__}({', '.join(shown)})"


Block = tuple[Node, ...]


@dataclass(frozen=True, repr=False)
class Do(Node):
    """One operation, marked as `name` if it has one. `use` says how the program uses the value.

    through: it replaces x; side: it is mixed into x; drop: the sow's result is dropped; stop:
    mixed in under stop_gradient.
    """

    op: Op
    name: str | None = None
    use: Use = "through"


@dataclass(frozen=True, repr=False)
class Jit(Node):
    body: Block
    inline: bool = False


@dataclass(frozen=True, repr=False)
class Twice(Node):
    """One function called twice in a row: one body, two calls of each of its sites."""

    body: Block


@dataclass(frozen=True, repr=False)
class Remat(Node):
    body: Block
    policy: ModuleFilter = "default"


@dataclass(frozen=True, repr=False)
class Scan(Node):
    body: Block
    length: int = 2
    xs: bool = False
    reverse: bool = False
    unroll: int = 1


@dataclass(frozen=True, repr=False)
class Map(Node):
    """`lax.map`."""

    body: Block
    length: int = 2


@dataclass(frozen=True, repr=False)
class Fori(Node):
    """`lax.fori_loop` with a known trip count: a scan."""

    body: Block
    trips: int = 2
    lower: int = 0


@dataclass(frozen=True, repr=False)
class While(Node):
    """`lax.while_loop`.

    `int`: n[0] % (limit + 1) iterations. `value`: at most `limit`, until the sum of x falls.
    `fori`: a `fori_loop` whose trip count is traced, which JAX turns into a while loop.
    """

    body: Block
    limit: int = 2
    test: Literal["int", "value", "fori"] = "int"


@dataclass(frozen=True, repr=False)
class Cond(Node):
    true: Block
    false: Block
    test: Literal["int", "value"] = "int"


@dataclass(frozen=True, repr=False)
class Switch(Node):
    branches: tuple[Block, ...]
    test: Literal["int", "value"] = "int"


@dataclass(frozen=True, repr=False)
class Vmap(Node):
    """`vmap`; `sharded`: over an axis sharded over this axis of an explicit mesh (2 x 2)."""

    body: Block
    size: int = 2
    in_axis: Literal[0, 1, -1] = 0
    out_axis: Literal[0, 1] = 0
    outer: Literal[0, 1] | None = None
    map_n: bool = False
    sharded: Literal["d", "e"] | None = None


@dataclass(frozen=True, repr=False)
class Grad(Node):
    body: Block
    kind: Literal["grad", "value_and_grad", "vjp"] = "grad"


@dataclass(frozen=True, repr=False)
class Jvp(Node):
    body: Block
    kind: Literal["jvp", "linearize"] = "jvp"


@dataclass(frozen=True, repr=False)
class Custom(Node):
    """A function whose derivative is `scale * cos(x)`, whatever its body computes.

    `own` is the code of the forward rule (`fwd` of custom_vjp, the primal part of a custom_jvp
    rule); None makes the rule call the function itself. `bwd` marks the cotangent that enters a
    custom_vjp's backward rule.
    """

    body: Block
    kind: Literal["vjp", "jvp"] = "vjp"
    scale: float = 0.75
    own: Block | None = None
    bwd: str | None = None


@dataclass(frozen=True, repr=False)
class Shard(Node):
    """`shard_map`: `pre` on each device, then (`mean`) a mean over mesh axis "d", marked if
    named, then `post` on each.

    Meshes: line (4), grid (2 x 2, split over both axes), row (2 x 2, split over the first axis
    alone). All of four devices: JAX refuses a program that mixes device sets.
    """

    pre: Block
    post: Block = ()
    mesh: Mesh = "line"
    mean: bool = False
    name: str | None = None


@dataclass(frozen=True, repr=False)
class Scope(Node):
    """`tapax.scope`. In a loop, it makes layers of the iterations: `scope/2/name`."""

    body: Block
    name: Literal["L", "M"] = "L"


@dataclass(frozen=True, repr=False)
class Glob(Node):
    """A selection by name."""

    pattern: str = "**"


@dataclass(frozen=True, repr=False)
class Rule(Node):
    """A selection of the results of operations: see `leaf.RULES`."""

    name: Literal["dot_general", "kept"] = "dot_general"


@dataclass(frozen=True, repr=False)
class Both(Node):
    """Selections joined by `&`."""

    body: Block


@dataclass(frozen=True, repr=False)
class Either(Node):
    """Selections joined by `|`."""

    body: Block


@dataclass(frozen=True, repr=False)
class Not(Node):
    """`~` of the selections, joined by `|`."""

    body: Block


@dataclass(frozen=True, repr=False)
class Pick(Node):
    """A request to a capture for the sites that any of some selections picks.

    `step` and `stop` are as for an `Edit`, `index` is a part of the value, a key of
    `parts.INDICES`, and `by` is a function of `parts.FUNCTIONS`, or a reducer.
    """

    body: Block
    of: Of = "value"
    step: int | None = None
    stop: int | None = None
    index: Index | None = None
    by: By | None = None


@dataclass(frozen=True, repr=False)
class Edit(Node):
    """A change of the values, or of the gradients, that the selection `name` picks.

    `what` is a function of `edits.FUNCTIONS`, or a number or an array to replace the value. `step`
    and `stop` pick iterations of the innermost loop: one, or those from `step` up to `stop`.
    `index` picks a part of the value, a key of `parts.INDICES`. `traced`: what can be traced is.
    `axes`: an array has one value for every iteration, example and device.
    """

    name: str
    what: What = "scale"
    of: Of = "value"
    step: int | None = None
    stop: int | None = None
    traced: bool = False
    axes: bool = False
    index: Index | None = None


@dataclass(frozen=True, repr=False)
class Program(Node):
    """A body, the seed of its arguments, the way to capture it, its edits and its picks."""

    body: Block
    seed: int = 0
    how: How = "plain"
    steps: int | None = None
    edits: tuple[Edit, ...] = ()
    picks: tuple[Pick, ...] = ()

    def arguments(self) -> tuple[np.ndarray, np.ndarray]:
        """Draw a float vector within [-1, 1] and a vector of small integers."""
        rng = np.random.default_rng(self.seed)
        return rng.uniform(-1, 1, DIM), rng.integers(0, 6, DIM).astype(np.int32)


def blocks(node: Node) -> Iterator[Block]:
    """Return the blocks directly inside a node."""
    match node:
        case Cond(true, false):
            yield from (true, false)
        case Switch(branches):
            yield from branches
        case Custom(body, own=own):
            yield body
            if own is not None:
                yield own
        case Shard(pre, post):
            yield from (pre, post)
        case Do() | Edit() | Glob() | Pick() | Rule():
            return
        case _:
            yield node.body  # pyright: ignore[reportAttributeAccessIssue]


def is_explicit(block: Block) -> bool:
    """Return whether the program runs on an explicit mesh, where types include shardings."""
    return any(isinstance(node, Vmap) and node.sharded for node in nodes(block))


def nodes(block: Block) -> Iterator[Node]:
    """Yield every node of a block, outermost first."""
    for node in block:
        yield node
        for inner in blocks(node):
            yield from nodes(inner)
