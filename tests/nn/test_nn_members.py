"""Captures of ensembles by member, against captures of plain models with equal weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import tapax
from tapax import nn
from tests.nn.test_nn_models import member, normal, vary
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

E, B = 4, 3


def close(a, b, tolerance=1e-4):
    assert_close(a, b, tolerance)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(5, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)
        self.place = nnx.Embed(E, 8, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.first(x))
        self.sow(nnx.Intermediate, "active", x > 0)
        x = self.norm(x + self.place(jnp.arange(E)).mean(0))
        self.sow(nnx.Intermediate, "scale", jnp.abs(x).max())
        return self.last(x)


def of(model_type=Net, **options):
    model = model_type(nnx.Rngs(0))
    where = lambda path, layer: not path.endswith("place")
    return model, vary(nn.batch_ensemble(model, E, rngs=0, where=where, **options))


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def captured(model, x, **how):
    return tapax.capture(nnx.jit(nnx.grad(loss)), **how)(model, x)[1]


@functools.cache
def taken():
    """Capture an ensemble whose members have different rows."""
    model, ensemble = of()
    x = normal(E, B, 5)
    return model, ensemble, x, captured(ensemble, nn.fold(x))


def test_values_and_gradients_by_member():
    model, ensemble, x, taps = taken()
    got = nn.members(taps)
    assert got.num_members == E and set(got.values) >= {"Net", "Net/first", "Net/norm", "Net/last"}
    for k in range(E):
        alone = captured(member(model, ensemble, k), x[k])
        for name, value in got.values.items():
            close(value[k], alone.values[name])
        for name, gradient in got.grads.items():
            close(E * gradient[k], alone.grads[name])  # the loss is a mean over all rows
    assert got.values["Net/active"].shape == (E, B, 8)


def test_shared_values_are_named():
    """A number and an embedding with as many positions as members are shared, not batches."""
    taps = taken()[-1]
    got = nn.members(taps)
    assert taps.values["Net/place"].shape == (E, 8)
    assert set(got.shared) == {"Net/scale", "Net/place"}
    assert not set(got.shared) & {*got.values, *got.grads}
    assert {*got.values, *got.shared} == set(taps.values)


def by_hand(x):
    x = np.asarray(x, np.float64)
    rows = x.reshape(len(x), -1)
    apart = np.sqrt(np.mean((x - x.mean(0)) ** 2) / np.mean(x**2))
    return {
        "mean": rows.mean(1), "rms": np.sqrt((rows**2).mean(1)), "min": rows.min(1),
        "max": rows.max(1), "nonfinite": (~np.isfinite(rows)).sum(1), "disagreement": apart,
    }  # fmt: skip


def test_statistics_over_members_of_every_site():
    got = nn.members(taken()[-1])
    for found, arrays in ((got.statistics, got.values), (got.grad_statistics, got.grads)):
        assert set(found) == set(arrays)
        for name, statistics in found.items():
            for key, want in by_hand(arrays[name]).items():
                close(getattr(statistics, key), want)
                assert getattr(statistics, key).shape == (() if key == "disagreement" else (E,))


def test_disagreement_of_equal_members_is_zero():
    values = lambda x: nn.members(tapax.capture(lambda x: tapax.sow(x, "h"))(x)[1], 2).statistics[
        "h"
    ]
    one = normal(3, 4)
    assert float(values(jnp.concatenate([one, one])).disagreement) == 0
    close(values(jnp.concatenate([one, -one])).disagreement, 1)
    assert float(values(jnp.zeros((4, 2))).disagreement) == 0
    broken = values(jnp.concatenate([one, one.at[0, 0].set(jnp.nan).at[1, 1].set(jnp.inf)]))
    assert broken.nonfinite.tolist() == [0, 2] and np.isnan(broken.rms[1])
    assert values(jnp.arange(6)).mean.tolist() == [1, 4]
    close(values(jnp.full((2, 3), 3 + 4j)).rms, [5, 5])
    assert values(jnp.ones((2, 1), jnp.bfloat16)).rms.dtype == jnp.float32


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(5, 5, rngs=rngs))(rngs.split(3))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return jnp.tanh(nnx.remat(lambda layer, x: layer(x))(layer, x))

        return run(x, self.layers)


def test_stacked_layers_under_scan():
    """In `[E, layer, B, ...]` the axis of the loop follows the axis of members."""
    model, ensemble = of(Stacked)
    x = normal(B, 5)
    got = nn.members(captured(ensemble, nn.tile(x, E)))
    name = "Stacked/layers"
    assert got.values[name].shape == got.grads[name].shape == (E, 3, B, 5)
    for k in range(E):
        alone = captured(member(model, ensemble, k, stacked=True), x)
        close(got.values[name][k], alone.values[name])
        close(E * got.grads[name][k], alone.grads[name])


def test_mapped_axis_is_not_the_member_axis():
    """A mapped axis is not the axis of members, even if it is as long."""
    ensemble, x = taken()[1], normal(E, E * B, 5)
    _, taps = tapax.capture(jax.vmap(ensemble))(x)
    got = nn.members(taps)
    assert got.values["Net/first"].shape == (E, E, B, 8)
    for i in range(E):
        alone = nn.members(tapax.capture(ensemble)(x[i])[1])
        close(got.values["Net/first"][:, i], alone.values["Net/first"])
    each = jax.vmap(lambda x: nn.members(tapax.capture(ensemble)(x)[1]))(x)
    close(jnp.swapaxes(each.values["Net/first"], 0, 1), got.values["Net/first"])


def test_gradients_that_have_a_mapped_axis_where_values_have_none():
    layer = nn.BatchEnsembleLinear(nnx.Linear(5, 4, rngs=nnx.Rngs(0)), 0, E)
    x = normal(E * B, 5)
    f = jax.vmap(jax.grad(lambda x, c: jnp.sum(c * layer(x))), in_axes=(None, 0))
    _, taps = tapax.capture(f)(x, jnp.arange(float(E)))
    (name,) = taps.values
    got = nn.members(taps)
    assert got.values[name].shape == (E, B, 4) and got.grads[name].shape == (E, E, B, 4)
    close(got.grads[name][:, 2], 2 * jnp.ones((E, B, 4)))


def test_scans_in_maps_and_one_iteration():
    layer = nn.BatchEnsembleLinear(nnx.Linear(5, 5, rngs=nnx.Rngs(0)), 0, E)
    loop = lambda x: lax.scan(lambda x, _: (layer(x), None), x, length=6)[0]
    x = normal(2, E * B, 5)
    name = "BatchEnsembleLinear"
    got = nn.members(tapax.capture(jax.vmap(loop))(x)[1])
    assert got.values[name].shape == (E, 6, 2, B, 5)
    one = nn.members(tapax.capture(loop, values=tapax.at(name, step=2))(x[0])[1])
    close(one.values[name], got.values[name][:, 2, 0])
    some = nn.members(tapax.capture(loop, values=tapax.at(name, step=slice(1, 3)))(x[0])[1])
    close(some.values[name], got.values[name][:, 1:3, 0])


def test_values_that_did_not_run_do_not_count():
    layer = nn.BatchEnsembleLinear(nnx.Linear(5, 5, rngs=nnx.Rngs(0)), 0, E)
    grow = lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, layer(c[1])), (0, x))
    x = normal(E * B, 5)
    name = "BatchEnsembleLinear"
    got = nn.members(tapax.capture(grow, steps=7)(x)[1])
    assert (
        got.values[name].shape == (E, 7, B, 5)
        and got.valid[name].tolist() == [True] * 3 + [False] * 4
    )
    for key, want in by_hand(got.values[name][:, :3]).items():
        close(getattr(got.statistics[name], key), want)
    last = nn.members(tapax.capture(grow)(x)[1])
    close(last.values[name], got.values[name][:, 2])
    branch = lambda p, x: lax.cond(p, layer, lambda x: x, x)
    none = nn.members(tapax.capture(jax.jit(branch))(False, x)[1]).statistics[name]
    assert np.isnan(none.mean).all() and none.nonfinite.tolist() == [0] * E


def test_a_jitted_function_may_return_statistics_alone():
    """A jitted function can return only the statistics, and nothing as large as a value."""
    _, ensemble, x, taps = taken()
    graphdef, state = nnx.split(ensemble)
    x = nn.fold(x)

    @jax.jit
    def run(state, x):
        return nn.members(captured(nnx.merge(graphdef, state), x)).statistics

    jax.tree.map(close, run(state, x), nn.members(taps).statistics)


def test_members_are_a_pytree_and_a_table():
    got = nn.members(taken()[-1])
    twice = jax.jit(lambda m: jax.tree.map(lambda x: x, m))(got)
    assert twice.shared == got.shared and set(twice.values) == set(got.values)
    text = repr(got)
    assert "4 members" in text and "Net/first" in text and "Net/scale" in text
    assert "disagree" in text and f"float32[{E},{B},8]" in text
    shown = []
    jax.jit(lambda m: shown.append(repr(m)) or m)(got)
    assert "traced" in shown[0]


def test_order_is_that_of_the_program():
    got = nn.members(taken()[-1])
    assert list(got.values) == ["Net/first", "Net/active", "Net/norm", "Net/last", "Net"]


def test_reduced_sites_have_no_members():
    ensemble = taken()[1]
    reduced = {"Net/first": tapax.reduce.rms}
    for how in ({"values": reduced}, {"values": None, "grads": reduced}):
        taps = captured(ensemble, normal(E * B, 5), **how)
        with pytest.raises(tapax.SiteError, match="'Net/first' was reduced by rms over the"):
            nn.members(taps)


def test_taps_without_members_need_their_number():
    taps = tapax.capture(lambda x: tapax.sow(x, "h"))(jnp.ones((6, 2)))[1]
    message = (
        "`num_members` must be given for taps that have no BatchEnsemble layer among the sites."
    )
    with pytest.raises(ValueError, match=message):
        nn.members(taps)
    assert nn.members(taps, 3).values["h"].shape == (3, 2, 2)
    assert nn.members(taps, 4).shared == ("h",)
    with pytest.raises(ValueError, match="`num_members` must be 1 or more, but is 0"):
        nn.members(taps, 0)
    with pytest.raises(TypeError, match="must be the taps of a capture, but is 3 of type int"):
        nn.members(3)


def test_ensembles_of_different_sizes_are_refused():
    layers = [nn.BatchEnsembleLinear(nnx.Linear(5, 5, rngs=nnx.Rngs(0)), 0, n) for n in (2, 3)]
    taps = tapax.capture(lambda x: layers[1](layers[0](x)))(jnp.ones((6, 5)))[1]
    with pytest.raises(ValueError, match=r"layers of \[2, 3\] members"):
        nn.members(taps)
