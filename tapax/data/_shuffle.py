"""Random orders that depend only on a key, and are equal on every machine and in every version.

The generators of NumPy may change between versions, and they make a whole order at once. The number
at a place of an order here is computed from that place alone, by a Feistel network: it splits the
bits of the place into two halves, and changes each half in turn by a hash of the other one, which
can be undone. A number that is too large goes through the network again. The hash is SplitMix64.

>>> shuffled(5, 0).tolist() == shuffled(5, 0).tolist()
True
>>> sorted(shuffled(5, 7).tolist())
[0, 1, 2, 3, 4]
>>> shuffled_at(np.array([3, 1]), 5, 7).tolist() == shuffled(5, 7)[[3, 1]].tolist()
True
"""

import numpy as np

_ROUNDS = 12
"""Enough that all orders of five numbers are about equally likely."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def shuffled(count: int, *key: int) -> np.ndarray:
    """Return the numbers from 0 to `count` - 1, in an order that `key` decides."""
    return shuffled_at(np.arange(count), count, *key)


def shuffled_at(places: np.ndarray, count: int, *key: int) -> np.ndarray:
    """Return the numbers at some places of the order of `count` numbers that `key` decides."""
    start = np.zeros(1, np.uint64)
    for part in key:
        start = _mix(start ^ _mix(np.array([part % 2**64], np.uint64)))
    numbers = _permute(places.astype(np.uint64), count, start)
    while len(large := np.flatnonzero(numbers >= count)):
        numbers[large] = _permute(numbers[large], count, start)
    return numbers.astype(np.int64)


def _permute(x: np.ndarray, count: int, start: np.ndarray) -> np.ndarray:
    """Permute the numbers that have as many bits as `count` - 1."""
    bits = max(count - 1, 1).bit_length()
    low = np.uint64(bits // 2)
    masks = np.uint64(2 ** (bits - bits // 2) - 1), np.uint64(2 ** (bits // 2) - 1)
    halves = [x >> low, x & masks[1]]
    for number in range(_ROUNDS):
        changed = number % 2
        seed = start + np.uint64(number << 32)
        halves[changed] = halves[changed] ^ (_mix(halves[1 - changed] + seed) & masks[changed])
    return halves[0] << low | halves[1]


def _mix(x: np.ndarray) -> np.ndarray:
    """Hash 64-bit integers by SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = x + _STEP
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))
