"""Selections, and the tables that people read."""

import jax
import jax.numpy as jnp
import pytest

import tapax
from tapax._sites import matches
from tests.oracles.closeness import assert_close

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
def test_globs(pattern, path, expected):
    assert matches(pattern, tapax.Site(path)) is expected


def test_calls():
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
        (("block?/attn", lambda s: s.shape == (9,)), {f"block{i}/attn" for i in range(3)}),
        (None, set()),
    ],
)
def test_values_and_gradients_are_selected_apart(selection, names):
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


def test_calls_are_selected():
    def f(x):
        for _ in range(3):
            x = tapax.sow(x + 1, "h")
        return jnp.sum(x**2)

    step = jax.grad(f)
    assert set(tapax.capture(step, values="h")(X)[1].values) == {"h", "h@1", "h@2"}
    _, taps = tapax.capture(step, values="h@0", grads="h@2")(X)
    assert set(taps.values) == {"h"}
    assert set(taps.grads) == {"h@2"}


def test_tables():
    _, taps = tapax.capture(jax.jit(jax.grad(net)))(X)
    program = [f"block{i}/{part}" for i in range(3) for part in ("attn", "mlp")]
    assert taps.sites.names == program
    text = repr(taps)
    assert "6 values, 6 gradients" in text
    assert text.index("block0/attn") < text.index("block0/mlp") < text.index("block2/mlp")
    assert "test_selections.py:" in text
    table = tapax.sites(net)(X)
    assert "6 sites, 48 B" in repr(table) or "6 sites, 96 B" in repr(table)
    assert len(table) == 6
    assert table[0].path == "block0/attn"
    assert [s.name for s in table[:2]] == ["block0/attn", "block0/mlp"]
    assert "block1/mlp" in table
    assert "nothing" not in table
    with pytest.raises(KeyError, match="nearest names are"):
        table["block1/mpl"]


def test_tables_of_what_may_not_have_run():
    def f(p, x):
        return jax.lax.cond(p, lambda x: tapax.sow(x, "yes"), lambda x: tapax.sow(x, "no"), x)

    text = repr(tapax.capture(jax.jit(f))(True, X)[1])
    assert "True" in text
    assert "False" in text


def test_tables_can_be_printed_while_tracing():
    @jax.jit
    def f(x):
        out, taps = tapax.capture(net)(x)
        assert "traced" in repr(taps)
        return out

    f(X)


def test_taps_are_a_pytree():
    _, taps = tapax.capture(jax.grad(net))(X)
    leaves, treedef = jax.tree.flatten(taps)
    assert len(leaves) == 12
    again = jax.tree.unflatten(treedef, leaves)
    assert again.sites == taps.sites
    doubled = jax.tree.map(lambda x: 2 * x, taps)
    assert_close(doubled.values["block0/attn"], 2 * taps.values["block0/attn"])
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(taps)]
    assert ".values['block0/attn']" in paths


@pytest.mark.filterwarnings("ignore:The chararray class")  # treescope looks through all of numpy
def test_taps_show_in_a_notebook():
    import treescope

    _, taps = tapax.capture(net)(X)
    assert "block0/attn" in treescope.render_to_text(taps)
