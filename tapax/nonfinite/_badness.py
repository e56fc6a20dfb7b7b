"""The badness of values: all elements finite, one infinite, or one NaN.

A reduction for every value of a program would be a kernel for every value, and a search would spend
most of its time compiling kernels. So values of one shape share a word: each value takes two bits
in the word of every element, and one reduction combines the words of all elements by "or". There
is no such reduction across devices, so values that may be divided among devices are reduced one by
one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tapax._jax import Value

FINE, INFINITE, NOT_A_NUMBER = 0, 1, 3
_VALUES = 16
"""The number of values that share a word."""


class BadElements(NamedTuple):
    """Masks of the elements of a value that are finite, and of the elements that are not NaN.

    If `number` is None, an element that is not finite counts as infinite.
    """

    finite: Value
    number: Value | None = None


def bad_elements(x: Value, *, tell_nan: bool) -> BadElements:
    """Find the bad elements of a value; with `tell_nan`, tell NaN from infinity."""
    if jnp.iscomplexobj(x):
        parts = [bad_elements(part, tell_nan=tell_nan) for part in (jnp.real(x), jnp.imag(x))]
        finite, number = zip(*parts, strict=True)
        return BadElements(lax.bitwise_and(*finite), lax.bitwise_and(*number) if tell_nan else None)
    x = jnp.asarray(x)
    return BadElements(lax.is_finite(x), lax.eq(x, x) if tell_nan else None)


def worst_of_each(
    values: Sequence[BadElements | None], vary: Callable[[Value], Any], *, divided: bool
) -> Any:
    """Compute a vector of the badness of the worst element of each value.

    None in `values` means an infinite value. `vary` gives an array the type of arrays that differ
    from device to device. Set `divided` if the compiler may have to divide `values` among devices.
    """
    words: list[list[BadElements]] = []
    unfinished: dict[Any, int] = {}
    places: list[tuple[int, int]] = []
    for x in values:
        if x is None:
            places.append((0, 0))
            continue
        kind = jax.typeof(x.finite)
        if divided or kind not in unfinished or len(words[unfinished[kind]]) == _VALUES:
            unfinished[kind] = len(words)
            words.append([])
        word = unfinished[kind]
        places.append((1 + word, 2 * len(words[word])))
        words[word].append(x)
    infinite = jnp.full((), INFINITE, np.uint32)
    reduced = [_reduce_alone(*word) if divided else _reduce_word(word) for word in words]
    packed = jnp.stack([vary(x) for x in (infinite, *reduced)])
    numbers, bits = np.asarray(places, np.uint32).T
    return packed[numbers] >> bits & np.uint32(INFINITE | NOT_A_NUMBER)


def _reduce_word(values: Sequence[BadElements]) -> Any:
    """Reduce values to one word with the badness of the worst element of each."""
    return _reduce(_word(values), lax.reduce_or)


def _reduce_alone(value: BadElements) -> Any:
    """Reduce one value to a word, by way of its masks."""
    reduced = (None if mask is None else _reduce(mask, lax.reduce_and) for mask in value)
    return _word([BadElements(*reduced)])


def _word(values: Sequence[BadElements]) -> Value:
    fine = lax.full_like(values[0].finite, FINE, np.uint32)

    def bits(place: int, x: BadElements) -> Value:
        infinite, nan = (lax.full_like(fine, k << 2 * place) for k in (INFINITE, NOT_A_NUMBER))
        bad = infinite if x.number is None else lax.select(x.number, infinite, nan)
        return lax.select(x.finite, fine, bad)

    return functools.reduce(lax.bitwise_or, map(bits, range(len(values)), values))


def _reduce(x: Value, by: Callable[[Value, Sequence[int]], Value]) -> Value:
    return by(x, tuple(range(x.ndim)))
