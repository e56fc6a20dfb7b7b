"""Random orders that depend only on a key, and are equal on every machine and in every version.

The generators of NumPy may change between versions, and they make a whole order at once. The number
at a place of an order here is computed from that place alone, by a Feistel network: it writes the
place as two digits, and adds to each in turn a hash of the other one, which can be undone. The two
digits have about the square root of the count as their base. A number that is too large goes
through the network again; there are fewer of them than the larger base.

The hash of a digit has 32 bits, which vector instructions multiply. Its keys come from SplitMix64.

>>> shuffled(5, 0).tolist() == shuffled(5, 0).tolist()
True
>>> sorted(shuffled(5, 7).tolist())
[0, 1, 2, 3, 4]
>>> shuffled_at(np.array([3, 1]), 5, 7).tolist() == shuffled(5, 7)[[3, 1]].tolist()
True
"""

import math

import numpy as np

_ROUNDS = 12
"""Enough that all orders of five numbers are about equally likely."""


def shuffled(count: int, *key: int) -> np.ndarray:
    """Return the numbers from 0 to `count` - 1, in an order that `key` decides."""
    return shuffled_at(np.arange(count), count, *key)


def shuffled_at(places: np.ndarray, count: int, *key: int) -> np.ndarray:
    """Return the numbers at some places of the order of `count` numbers that `key` decides."""
    start = 0
    for part in key:
        start = _mix(start ^ _mix(part % 2**64))
    keys = [_mix((start + number) % 2**64) >> 32 for number in range(_ROUNDS)]
    left = math.isqrt(max(count - 1, 0)) + 1
    bases = left, max(-(-count // left), 1)
    numbers = _permute(places, bases, keys)
    while len(large := np.flatnonzero(numbers >= count)):
        numbers[large] = _permute(numbers[large], bases, keys)
    return numbers


def _permute(x: np.ndarray, bases: tuple[int, int], keys: list[int]) -> np.ndarray:
    """Permute the numbers below the product of the `bases`, each below 2^31."""
    digits = [digit.astype(np.uint32) for digit in np.divmod(x, bases[1])]
    for number, key in enumerate(keys):
        changed = number % 2
        base, other = bases[changed], digits[1 - changed]
        if bases[1 - changed] < len(x):  # hash each digit once
            table = _step(np.arange(bases[1 - changed], dtype=np.uint32), base, key)
            step = table.take(other)
        else:
            step = _step(other, base, key)
        step += digits[changed]
        # Below the base, the difference wraps around to a larger number.
        digits[changed] = np.minimum(step, step - np.uint32(base))
    return digits[0].astype(np.int64) * bases[1] + digits[1]


def _step(digits: np.ndarray, base: int, key: int) -> np.ndarray:
    """Return a number below `base` for each digit: its hash, as a fraction of 2^32."""
    hashed = _hash(digits, np.uint32(key)).astype(np.uint64)
    return (hashed * np.uint64(base) >> np.uint64(32)).astype(np.uint32)


def _hash(x: np.ndarray, key: np.uint32) -> np.ndarray:
    """Hash 32-bit integers by a function of Wellons's hash prospector (2018)."""
    x = x + key
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(15)
    return x


def _mix(x: int) -> int:
    """Hash a 64-bit integer by SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31
