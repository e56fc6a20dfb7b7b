"""Globs, predicates and sequences as selections."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapax
from tapax._sites import matches

X = jnp.array([1.0, 2.0])


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("**", "a", True),
        ("**", "a/b/c", True),
        ("*", "a", True),
        ("*", "a/b", False),
        ("a/*", "a/b", True),
        ("a/*", "a/b/c", False),
        ("a/**", "a/b/c", True),
        ("a/**", "a", True),
        ("**/c", "c", True),
        ("**/c", "a/b/c", True),
        ("**/c", "a/bc", False),
        ("a/**/c", "a/c", True),
        ("a/**/c", "a/b/b/c", True),
        ("block?", "block1", True),
        ("block?", "block12", False),
        ("block*/h", "block12/h", True),
        ("a.b", "aXb", False),
        ("a[0]", "a0", False),
        ("a", "a:w", True),
        ("a:w", "a:w", True),
        ("a:w", "a:v", False),
        ("**:w", "x/a:w", True),
    ],
)
def test_globs_match_whole_segments(pattern, path, expected):
    assert matches(pattern, tapax.Site(path)) is expected


def test_globs_match_numbered_calls():
    third = tapax.Site("h", call=2)
    assert third.name == "h@2"
    assert matches("h", third)
    assert matches("h@2", third)
    assert not matches("h@0", third)
    assert matches("h@0", tapax.Site("h"))
    assert matches("**@2", third)


def net(x):
    for i in range(3):
        with tapax.scope(f"block{i}"):
            x = tapax.sow(jnp.sin(x), "attn")
            x = tapax.sow(jnp.cos(x), "mlp")
    return jnp.sum(x)


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ("block1/attn", {"block1/attn"}),
        ("**/mlp", {"block0/mlp", "block1/mlp", "block2/mlp"}),
        (["block0/attn", "block2/*"], {"block0/attn", "block2/attn", "block2/mlp"}),
        (lambda site: site.path.startswith("block1"), {"block1/attn", "block1/mlp"}),
        (
            ("block?/attn", lambda s: s.path == "block2/mlp"),
            {*(f"block{i}/attn" for i in range(3)), "block2/mlp"},
        ),
        (None, set()),
    ],
)
def test_values_and_gradients_are_selected_separately(selection, names):
    _, taps = tapax.capture(jax.grad(net), values=selection, grads=None)(X)
    assert set(taps.values) == names
    assert taps.grads == {}
    _, taps = tapax.capture(jax.grad(net), values=None, grads=selection)(X)
    assert set(taps.grads) == names
    assert taps.values == {}


def test_a_predicate_need_not_be_hashable():
    class Short:
        __hash__ = None

        def __call__(self, site):
            return site.path.endswith("mlp")

    for form in (net, jax.jit(net)):
        _, taps = tapax.capture(form, values=Short())(X)
        assert set(taps.values) == {f"block{i}/mlp" for i in range(3)}


def test_numbered_calls_are_selected():
    def f(x):
        for _ in range(3):
            x = tapax.sow(x + 1, "h")
        return jnp.sum(x**2)

    step = jax.grad(f)
    assert set(tapax.capture(step, values="h")(X)[1].values) == {"h", "h@1", "h@2"}
    _, taps = tapax.capture(step, values="h@0", grads="h@2")(X)
    assert set(taps.values) == {"h"}
    assert set(taps.grads) == {"h@2"}


def test_predicates_see_the_loops_of_a_site():
    seen = []

    def small(site):
        seen.append(site)
        return site.nbytes < 10**6

    f = lambda x: lax.scan(lambda c, _: (tapax.sow(c, "h"), None), x, None, length=4)[0]
    _, taps = tapax.capture(f, values=small)(jnp.zeros(3))
    assert taps.values["h"].shape == seen[0].shape == (4, 3)
    assert seen[0].loops == ("scan[4]",)
