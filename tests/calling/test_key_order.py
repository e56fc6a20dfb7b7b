"""Dicts keep the user's order of keys in a captured call.

JAX sorts the keys of every dict that it flattens.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import pytest
from flax import struct

import tapax
from tests.oracles.closeness import assert_close

X = jnp.array([0.3, -0.7])


class Named(NamedTuple):
    named: Any


class Module(eqx.Module):
    named: Any


@struct.dataclass
class Struct:
    named: Any


HOLDERS = {
    "dict": lambda d: d,
    "list": lambda d: [d],
    "named tuple": Named,
    "equinox module": Module,
    "dataclass": Struct,
    "nested": lambda d: Named({"b": [Module({"z": d, "a": X})], "a": Struct(None)}),
}
KEYS = {"text": ("second", "first"), "numbers": (10, 2)}


def find(held):
    """Return the dict in a holder."""
    while not (isinstance(held, dict) and "b" not in held and "z" not in held):
        if isinstance(held, dict):
            assert list(held) in (["b", "a"], ["z", "a"])
            held = held["b"] if "b" in held else held["z"]
        else:
            held = held[0] if isinstance(held, (list, Named)) else held.named
    return held


def weigh(held):
    """Compute a result that depends on the order of the keys."""
    return sum((i + 1) * jnp.sin(x) for i, x in enumerate(find(held).values()))


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_captured_calls_see_keys_in_the_order_of_the_user(holder, keys):
    held = HOLDERS[holder](dict(zip(KEYS[keys], (X, 2 * X), strict=True)))
    expected = jnp.sin(X) + 2 * jnp.sin(2 * X)
    run = lambda held: tapax.sow(weigh(held), "out")
    assert_close(tapax.capture(run)(held)[0], expected)
    assert_close(tapax.edit(run, values={"out": lambda x: 2 * x})(held), 2 * expected)
    sown = lambda held: weigh(tapax.sow(held, "all"))
    assert_close(tapax.capture(sown)(held)[0], expected)
    made = lambda x: tapax.sow(HOLDERS[holder](dict.fromkeys(KEYS[keys], x)), "made")
    assert list(find(tapax.capture(made)(X)[0])) == list(KEYS[keys])


def test_calls_that_differ_in_the_order_alone_are_traced_apart():
    run = tapax.capture(lambda held: tapax.sow(weigh(held), "out"))
    for keys in (("a", "c"), ("c", "a")):
        held = Module(dict(zip(keys, (X, 2 * X), strict=True)))
        assert_close(run(held)[0], jnp.sin(X) + 2 * jnp.sin(2 * X))


def test_dicts_of_the_user_are_left_as_they_are():
    held = Module({"second": X, "first": 2 * X})
    tapax.capture(lambda held: tapax.sow(weigh(held), "out"))(held)
    assert list(held.named) == ["second", "first"]
