"""A fast parser of JSON lines that have the names of an earlier line.

Nearly all lines of a log have the same names in the same order, and only floats. `json` spends most
of its time on names that are known, and on the last digits of numbers. This parser compares the
names as bytes, and computes all numbers of a line together. A result may differ from the exact
number in the last places of a double, which does not matter to the page, whose numbers have single
precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

import tapax.monitoring._log_format as log_format

_LEAST_NAMES = 64
"""The number of names from which on this parser is faster than `json`."""
_WIDTH = 28
"""The most characters of a text such as `: 0.25, `; a number has at most 24 in Python."""


class NumberRecord(Mapping[str, float]):
    """A record of floats, as an array. The records of one parser with equal names share `names`."""

    def __init__(self, names: Sequence[str], numbers: np.ndarray):
        self.names = names
        self.numbers = numbers
        self._by_name: dict[str, float] | None = None

    def _as_dict(self) -> dict[str, float]:
        if self._by_name is None:
            self._by_name = dict(zip(self.names, self.numbers.tolist(), strict=True))
        return self._by_name

    def __getitem__(self, name: str) -> float:
        return self._as_dict()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class RepeatedLineParser:
    """A parser that learns the names of one line, and parses the following lines that have them."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._quoted: list[bytes] = []

    def learn(self, line: bytes, record: Mapping[str, object]) -> None:
        """Learn the names of a line with this record, if a line like it can be parsed."""
        if len(record) >= _LEAST_NAMES and all(type(x) is float for x in record.values()):
            self._quoted, self._names = line.split(b'"')[1::2], list(record)

    def parse(self, line: bytes) -> tuple[int, NumberRecord] | None:
        """Return the step and the record of a line, or None if it has another form."""
        if not self._quoted or not line.endswith(b"}}\n"):
            return None
        # {"tapax": 1, "step": 100, "record": {"a": 0.5, "b": 0.25}}
        parts = line.split(b'"')
        if parts[1::2] != self._quoted or parts[6] != b": {":
            return None
        step = parts[4].removeprefix(b": ").removesuffix(b", ")
        if parts[2] != b": %d, " % log_format.VERSION or not step.isdigit():
            return None
        parts[-1] = parts[-1].removesuffix(b"}}\n") + b", "
        numbers = _parse_numbers(parts[8::2])
        return None if numbers is None else (int(step), NumberRecord(self._names, numbers))


def _parse_numbers(texts: Sequence[bytes]) -> np.ndarray | None:
    """Parse texts such as `: 0.25, `, or return None if one of them is not a number."""
    characters = np.array(texts, f"S{_WIDTH}").view(np.uint8).reshape(len(texts), _WIDTH)
    ends = np.where(characters[:, -1] == 0, (characters == 0).argmax(1), _WIDTH)
    # Check the marks around the numbers, and remove them. A text that is too long lacks the last.
    every, signs = np.arange(len(texts)), characters[:, 2].copy()
    for place, mark in ((0, ":"), (1, " "), (ends - 2, ","), (ends - 1, " ")):
        if (characters[every, place] != ord(mark)).any():
            return None
        characters[every, place] = 0
    is_negative = signs == ord("-")
    characters[is_negative, 2] = 0
    digits = characters - np.uint8(ord("0"))
    is_digit, is_point = digits < 10, characters == ord(".")
    points = is_point.argmax(1)
    numbers = np.empty(len(texts))
    weighed = (digits * is_digit).astype(np.float64)
    for position in np.flatnonzero(np.bincount(points)):
        # A product with one vector: that with a matrix starts threads, which take longer.
        np.copyto(numbers, weighed @ _WEIGHTS[position], where=points == position)
    np.negative(numbers, out=numbers, where=is_negative)
    is_other = ~(is_digit | is_point | (characters == 0))
    if is_other.any() or not points.all() or np.count_nonzero(is_point) > len(texts):
        # Numbers without a point, with an exponent, or not numbers at all.
        is_plain = ~is_other.any(1) & (is_point.sum(1) == 1)
        for i in np.flatnonzero(~is_plain).tolist():
            try:
                numbers[i] = float(texts[i][2:-2])
            except ValueError:
                return None
    return numbers


def _weigh_digits(point: int) -> np.ndarray:
    """Return the power of ten of a digit at each position, if the point is at position `point`."""
    places = np.arange(_WIDTH)
    return np.power(10.0, np.where(places < point, point - 1 - places, point - places))


_WEIGHTS = np.stack([_weigh_digits(point) for point in range(_WIDTH)])
