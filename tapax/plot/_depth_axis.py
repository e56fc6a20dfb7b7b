"""The axis of depth: layers one apart from left to right, and the sites before and after them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

import tapax.plot._style as style
from tapax._sites.roles import Place

CHARACTER = 0.062
"""The approximate width of a character of a label, in inches."""
STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


@dataclasses.dataclass(frozen=True)
class Stack:
    """The layers of one stack on the axis: their positions and their labels."""

    name: str
    xs: Sequence[float]
    labels: Sequence[str]


@dataclasses.dataclass(frozen=True)
class DepthAxis:
    """The position of each row on the axis, the stacks of layers, and the sites outside of them."""

    xs: Mapping[str, float]
    stacks: Sequence[Stack]
    outside: Mapping[str, float]
    inch: float

    @classmethod
    def of(cls, rows: Sequence[str], places: Mapping[str, Place], width: float) -> DepthAxis:
        """Make the axis for some rows, in the order of the program.

        `width` is the width of a panel in inches. The distance between sites outside of the layers
        is the height of a label.
        """
        members: dict[str, list[str]] = {}
        for row in rows:
            if places[row].depth:
                members.setdefault(places[row].stack, []).append(row)
        layers = {
            stack: sorted({places[row].depth for row in mine}, key=lambda d: (*d, np.inf))
            for stack, mine in members.items()
        }
        apart = max(1.0, style.LINE / width * sum(map(len, layers.values())))
        xs: dict[str, float] = {}
        stacks: list[Stack] = []
        outside: dict[str, float] = {}
        x = -apart
        for name, is_stack in _order(rows, members):
            x += apart
            if not is_stack:
                xs[name] = outside[name] = x
                continue
            at = {depth: x + i for i, depth in enumerate(layers[name])}
            xs |= {row: at[places[row].depth] for row in members[name]}
            labels = [".".join(map(str, depth)) for depth in at]
            stacks.append(Stack(name, list(at.values()), labels))
            x += len(at) - 1
        return cls(xs, stacks, outside, width / (x + 1))

    def dress(self, axes: Axes) -> None:
        """Give axes their ticks and limits."""
        high = max(self.xs.values())
        pad = max(0.5, 0.02 * high)
        axes.set_xlim(-pad, high + pad)
        ticks: list[tuple[float, str, bool]] = []
        for stack in self.stacks:
            ticks += self._label(stack)
        names = style.shorten_names(list(self.outside), 16)[1] if self.outside else []
        ticks += [(x, name, True) for x, name in zip(self.outside.values(), names, strict=True)]
        ticks.sort()
        axes.set_xticks([x for x, *_ in ticks], [label for _, label, _ in ticks], parse_math=False)
        upright = not self._have_room([tick for tick in ticks if tick[1]])
        for text, (*_, is_outside) in zip(axes.get_xticklabels(), ticks, strict=True):
            if is_outside and upright:
                text.set(rotation=90, va="top")
        axes.set_xticks([x for stack in self.stacks for x in stack.xs], minor=True)
        axes.tick_params(axis="x", which="minor", length=2)
        axes.grid(False, axis="x")
        if len(self.stacks) == 1:
            axes.set_xlabel(self.stacks[0].name, parse_math=False, **style.LABEL)

    def _label(self, stack: Stack) -> Iterator[tuple[float, str, bool]]:
        """Yield the labels of some layers; with several stacks, a middle label names the stack."""
        longest = max(map(len, stack.labels))
        needed = (CHARACTER * longest + 0.1) / self.inch
        step = next((s for s in STEPS if s >= needed), STEPS[-1])
        kept = range(0, len(stack.xs), step)
        middle = kept[len(kept) // 2]
        for i in kept:
            name = f"\n{stack.name}" if i == middle and len(self.stacks) > 1 else ""
            yield stack.xs[i], stack.labels[i] + name, False

    def _have_room(self, ticks: Sequence[tuple[float, str, bool]]) -> bool:
        """Return whether the labels fit next to each other."""
        widths = [CHARACTER * len(label.partition("\n")[0]) for _, label, _ in ticks]
        return all(
            (b[0] - a[0]) * self.inch > (widths[i] + widths[i + 1]) / 2 + 0.06
            for i, (a, b) in enumerate(itertools.pairwise(ticks))
        )


def _order(rows: Sequence[str], members: Mapping[str, Sequence[str]]) -> list[tuple[str, bool]]:
    """Order the stacks and the rows outside from left to right; tell whether each is a stack.

    A row that the program reaches between the layers of a stack comes after the stack.
    """
    number = {row: i for i, row in enumerate(rows)}
    spans = {stack: (number[mine[0]], number[mine[-1]]) for stack, mine in members.items()}
    items = [(float(first), stack, True) for stack, (first, _) in spans.items()]
    inside = {row for mine in members.values() for row in mine}
    for row in rows:
        if row not in inside:
            around = (last + 0.5 for first, last in spans.values() if first < number[row] < last)
            items.append((max([float(number[row]), *around]), row, False))
    return [(name, is_stack) for _, name, is_stack in sorted(items)]
