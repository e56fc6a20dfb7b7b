"""The results of a capture are a pytree and print as tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tests.oracles.closeness import assert_close
from tests.sites.test_selections import X, net


def test_tables_list_sites_in_program_order():
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


def test_tables_of_sites_that_may_not_have_run():
    def f(p, x):
        return jax.lax.cond(p, lambda x: tapax.sow(x, "yes"), lambda x: tapax.sow(x, "no"), x)

    text = repr(tapax.capture(jax.jit(f))(True, X)[1])
    assert "True" in text
    assert "False" in text


def test_tables_have_a_column_for_masks_only_if_there_are_masks():
    straight = lambda x: tapax.sow(2 * x, "h")
    branch = lambda x: jax.lax.cond(x.sum() > 0, straight, lambda x: x, x)
    assert "valid" not in repr(tapax.capture(straight)(X)[1])
    assert "valid" in repr(tapax.capture(branch)(X)[1])


def test_tables_do_not_call_a_statistic_a_root_mean_square():
    f = lambda x: tapax.sow(2 * x, "h") + tapax.sow(3 * x, "k")
    norms = {"h": tapax.reduce.norm}
    assert "value rms" not in repr(tapax.capture(f, values=norms)(X)[1])
    assert "value rms" in repr(tapax.capture(f, values=[norms, "k"])(X)[1])


def test_tables_can_be_printed_while_tracing():
    @jax.jit
    def f(x):
        out, taps = tapax.capture(net)(x)
        assert "traced" in repr(taps)
        return out

    f(X)


def test_sites_are_found_by_any_integer():
    sites = tapax.sites(lambda x: tapax.sow(tapax.sow(x, "a"), "b"))(1.0)
    assert sites[np.int64(1)] is sites[1] is sites[-1] is sites["b"]
    with pytest.raises(TypeError, match="integer"):
        sites[None]


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


@pytest.mark.filterwarnings("ignore:The chararray class")  # treescope inspects all of numpy
def test_taps_show_in_a_notebook():
    import treescope

    _, taps = tapax.capture(net)(X)
    assert "block0/attn" in treescope.render_to_text(taps)


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, jax.jit, lambda f: jax.vmap(f, axis_size=2, in_axes=None)],
    ids=["plain", "jit", "vmap"],
)
def test_results_are_in_the_order_of_the_program(wrap):
    names = [f"h/{i}" for i in reversed(range(12))]

    def loss(x):
        for name in names:
            x = tapax.sow(jnp.sin(x), name)
        return jnp.sum(x)

    x = jnp.ones(2)
    _, taps = wrap(tapax.capture(jax.jit(jax.grad(loss))))(x)
    assert list(taps.values) == list(taps.grads) == names
    assert list(wrap(tapax.grad(loss))(x)) == names
    zeros = tapax.perturbations(loss)(x)
    assert list(jax.grad(tapax.perturbed(loss))(zeros, x)) == list(zeros) == names
    assert taps.values == dict(taps.values)
