"""Statistics leave a watched step as one array for each dtype."""

import jax
import jax.numpy as jnp
import numpy as np

import tapax
from tapax.monitoring._packed_arrays import PackedArrays


def test_arrays_are_packed_by_dtype_and_come_back_in_place():
    tree = {
        "a": jnp.arange(6.0).reshape(2, 3),
        "b": (jnp.int32(7), jnp.float32(-0.0)),
        "c": jnp.zeros((0, 2)),
        "d": jnp.array([True, False]),
        "e": jnp.array(jnp.nan, jnp.float32),
    }
    packed = jax.jit(PackedArrays.of)(tree)
    assert sorted(str(x.dtype) for x in packed.packed) == sorted(
        {str(x.dtype) for x in jax.tree.leaves(tree)}
    )
    found = packed.fetch()
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        want = np.asarray(want)
        assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())


def test_structure_without_arrays_is_packed_into_none():
    packed = PackedArrays.of({"a": None})
    assert packed.packed == ()
    assert packed.fetch() == {"a": None}


def test_watched_step_returns_one_array_for_all_statistics():
    def loss(w, x):
        for i in range(12):
            x = tapax.sow(jnp.tanh(x @ w), f"h{i}")
        return (x**2).sum()

    log = tapax.Log()
    w, x = jnp.eye(3) * 0.5, jnp.ones((2, 3))
    with tapax.monitor(jax.jit(jax.grad(loss)), every=1, to=log) as watched:
        watched(w, x)
        _, captured = watched._watched((), (w, x), {})
    assert [len(captured.statistics.packed), len(log.names)] == [1, 24]
    h, expected = np.ones((2, 3)), {}
    for i in range(12):
        h = np.tanh(h @ (np.eye(3) * 0.5))
        expected[f"h{i}/value_rms"] = np.sqrt((h**2).mean())
    for name, number in expected.items():
        np.testing.assert_allclose(log[name].values, [number], rtol=1e-5)
