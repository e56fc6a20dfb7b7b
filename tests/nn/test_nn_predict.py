"""Batches of members, predictions with uncertainty, and members over a mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tapax import nn
from tests.nn.test_nn_models import GPT, ResNet, no_places, normal
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

E, B = 4, 3


def close(a, b, tolerance=1e-5):
    assert_close(a, b, tolerance)


@functools.lru_cache
def net(outs=5, members=E):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(3, 7, rngs=rngs), nnx.tanh, nnx.Linear(7, outs, rngs=rngs))
    return nn.batch_ensemble(model, members, rngs=0)


def test_fold_unfold_and_tile_convert_batches():
    x = {"a": normal(E, B, 5), "b": [normal(E, B)]}
    rows = nn.fold(x)
    assert rows["a"].shape == (E * B, 5) and rows["b"][0].shape == (E * B,)
    np.testing.assert_array_equal(rows["a"], np.concatenate(list(np.asarray(x["a"]))))
    jax.tree.map(np.testing.assert_array_equal, nn.unfold(rows, E), x)
    tiled = nn.tile(x["a"][0], E)
    np.testing.assert_array_equal(tiled, np.concatenate([np.asarray(x["a"][0])] * E))
    close(jax.jit(lambda x: nn.fold(nn.unfold(x, E)))(tiled), tiled)
    assert nn.tile(np.arange(B), E).dtype == np.asarray(jnp.arange(B)).dtype


WRONG = {
    "a batch that the members do not divide": (
        lambda: nn.unfold(jnp.ones((7, 2)), 4),
        r"`x` of `unfold` has the shape \[7, 2\], but its first axis must be a multiple of "
        "num_members=4.",
    ),
    "no members": (lambda: nn.unfold(jnp.ones(4), 0), "`num_members` must be 1 or more, but is 0."),
    "tiles of no members": (lambda: nn.tile(jnp.ones(4), -1), "must be 1 or more, but is -1."),
    "a number": (lambda: nn.tile(1.0, 4), r"must have an axis of rows, but has the shape \[\]"),
    "no axis of rows": (lambda: nn.fold(jnp.ones(4)), r"an axis of rows, but has the shape \[4\]"),
    "another kind": (
        lambda: nn.predict(net(), jnp.ones((B, 3)), kind="ranking"),
        "`kind` must be 'classification' or 'regression', but is 'ranking'.",
    ),
    "one class": (
        lambda: nn.predict(net(1), jnp.ones((B, 3))),
        r"logits of 2 classes or more .* but each member returned the shape \[3, 1\].",
    ),
    "a plain model": (
        lambda: nn.predict(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.ones((B, 3))),
        "`num_members` must be given for a model with no BatchEnsemble layer, of type Linear.",
    ),
    "several numbers of members": (
        lambda: nn.predict(nnx.Sequential(net(members=2), net(members=3)), jnp.ones((B, 3))),
        r"a model with layers of \[2, 3\] members",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_of_batch_functions(case):
    call, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("out", "kind", "message"),
    [
        (lambda x: {"logits": x}, "classification", "but returned a dict"),
        (lambda x: (x, x), "classification", "but returned a tuple"),
        (lambda x: x.astype(int), "regression", "but returned one of the dtype int32"),
        (lambda x: (x, x, x), "regression", "or a pair of them, means and variances for kind="),
    ],
)
def test_results_that_do_not_fit_a_prediction(out, kind, message):
    with jax.enable_x64(False), pytest.raises(TypeError, match=message):
        nn.predict(out, jnp.ones((B, 3), jnp.float32), kind=kind, num_members=2)


def entropy(p):
    return -np.sum(np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0), -1)


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_predicted_classes_and_their_uncertainty(scale, compiled):
    model, x = net(), scale * normal(B, 3)
    run = nnx.jit(nn.predict) if compiled else nn.predict
    got = run(model, x)
    logits = np.stack([np.asarray(model(nn.tile(x, E)))[k * B : (k + 1) * B] for k in range(E)])
    close(got.members, logits)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    close(got.mean, p.mean(0))
    close(got.total, entropy(p.mean(0)))
    close(got.aleatoric, entropy(p).mean(0))
    close(got.epistemic, entropy(p.mean(0)) - entropy(p).mean(0))
    assert (np.asarray(got.epistemic) >= 0).all()


def test_logits_that_are_extreme():
    """Nothing overflows, and impossible classes contribute nothing."""
    logits = jnp.array([[1e4, -1e4, 0], [-1e4, 1e4, 0], [0, -jnp.inf, 0]], jnp.float32)
    fixed = lambda x: jnp.tile(logits, (2, 1)).at[3:].set(logits[::-1])
    predict = lambda f: jax.jit(lambda x: nn.predict(f, x, num_members=2))(jnp.ones((3, 1)))
    got = predict(fixed)
    close(got.total, [entropy(np.array([0.75, 0, 0.25])), 0, entropy(np.array([0.75, 0, 0.25]))])
    close(got.epistemic + got.aleatoric, got.total)
    same = predict(lambda x: jnp.tile(logits, (2, 1)))
    close(same.epistemic, np.zeros(3))
    gradient = jax.grad(
        lambda z: nn.predict(lambda x: z, jnp.ones((2, 1)), num_members=2).total.sum()
    )
    assert np.isfinite(gradient(jnp.tile(logits[:2], (2, 1)))).all()


def test_bf16_logits_are_counted_in_float32():
    got = nn.predict(lambda x: x.astype(jnp.bfloat16), normal(B, 3), num_members=2)
    assert got.members.dtype == jnp.bfloat16 and got.mean.dtype == got.total.dtype == jnp.float32


def test_a_classification_may_have_an_axis_of_positions():
    got = nnx.jit(nn.predict)(net(), normal(B, 6, 3))
    assert got.members.shape == (E, B, 6, 5) and got.epistemic.shape == (B, 6)


@pytest.mark.parametrize("compiled", [False, True])
def test_predicted_numbers_and_their_uncertainty(compiled):
    model, x = net(2), normal(B, 3)
    predict = lambda f: nn.predict(f, x, kind="regression", num_members=E)
    run = (lambda f: jax.jit(lambda: predict(f))()) if compiled else predict
    got, members = run(model), np.asarray(model(nn.tile(x, E)), np.float64).reshape(E, B, 2)
    close(got.members, members)
    close(got.mean, members.mean(0))
    close(got.epistemic, members.var(0))
    close(got.total, members.var(0))
    assert got.aleatoric is None
    pair = run(lambda x: (model(x)[:, 0], jnp.exp(model(x)[:, 1])))
    means, variances = members[..., 0], np.exp(members[..., 1])
    close(pair.members[1], variances)
    close(pair.epistemic, means.var(0))
    close(pair.aleatoric, variances.mean(0))
    close(pair.total, means.var(0) + variances.mean(0))


def test_predictions_are_pytrees():
    model, x = net(), normal(6, 3)
    rows = jax.jit(jax.vmap(lambda x: nn.predict(model, x[None])))(x)
    close(rows.mean[:, 0], nnx.jit(nn.predict)(model, x).mean)


COLLECTIVES = r"all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter"


def over_devices(count):
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((count,), ("members",), axis_types=auto, devices=jax.devices()[:count])


MODELS = {
    "linear": lambda: (net(), normal(B, 3)),
    "conv": lambda: (nn.batch_ensemble(ResNet(nnx.Rngs(0)), E, rngs=0), normal(B, 6, 6, 3)),
    "gpt": lambda: (
        nn.batch_ensemble(GPT(nnx.Rngs(0)), E, rngs=0, where=no_places),
        jnp.arange(B * 6).reshape(B, 6) % 11,
    ),
}


@pytest.mark.parametrize(("kind", "devices"), [("linear", 2), ("conv", 4), ("gpt", 4)])
def test_members_on_several_devices_need_no_communication(kind, devices):
    """Each device has different members, without communication."""
    model, x = MODELS[kind]()
    model.eval()
    mesh = over_devices(devices)
    spread = nn.shard(model, mesh, "members")
    rows = jax.device_put(nn.tile(x, E), NamedSharding(mesh, PartitionSpec("members")))
    graphdef, state = nnx.split(spread)
    run = jax.jit(lambda state, rows: nnx.merge(graphdef, state)(rows))
    compiled = run.lower(state, rows).compile()
    assert not re.search(COLLECTIVES, compiled.as_text())
    got = run(state, rows)
    assert got.sharding.spec[0] == "members"
    close(got, jax.jit(model)(nn.tile(x, E)), 1e-4)


def test_only_members_are_sharded():
    rngs = nnx.Rngs(0)
    make = nnx.vmap(lambda rngs: nnx.Linear(3, 3, rngs=rngs))
    model = nnx.Sequential(nnx.Linear(3, 3, rngs=rngs), nnx.LayerNorm(3, rngs=rngs))
    model.stack = make(rngs.split(2))
    ensemble = nn.batch_ensemble(model, 8, rngs=0)
    spread = nn.shard(ensemble, over_devices(4), "members")
    first, norm = spread.layers[0], spread.layers[1]
    for factor in (first.r, first.s, first.bias):
        assert factor[...].sharding.spec == PartitionSpec("members", None)
        assert factor[...].addressable_shards[0].data.shape == (2, 3)
    assert spread.stack.r[...].sharding.spec == PartitionSpec(None, "members", None)
    for shared in (first.kernel, norm.scale, spread.stack.kernel):
        assert shared[...].sharding.is_fully_replicated
    assert len(ensemble.layers[0].r[...].sharding.device_set) == 1


def test_gradients_of_factors_stay_on_the_devices_of_their_members():
    """Gradients of factors stay on the devices of their members; those of the kernel are summed."""
    mesh = over_devices(4)
    model, x = net(), normal(B, 3)
    spread = nn.shard(model, mesh, "members")
    rows = jax.device_put(nn.tile(x, E), NamedSharding(mesh, PartitionSpec("members")))
    loss = lambda m, x: jnp.mean(m(x) ** 2)
    got = nnx.jit(nnx.grad(loss))(spread, rows)
    want = nnx.jit(nnx.grad(loss))(model, nn.tile(x, E))
    jax.tree.map(close, got, want)
    assert got["layers"][0]["r"][...].sharding.spec[0] == "members"


def test_predictions_on_several_devices_are_those_on_one():
    model, x = net(), normal(B, 3)
    spread = nn.shard(model, over_devices(2), "members")
    jax.tree.map(close, nnx.jit(nn.predict)(spread, x), nn.predict(model, x))


EXPLICIT = {
    "Linear": (lambda rngs: nnx.Linear(5, 4, rngs=rngs), (5,)),
    "Conv": (lambda rngs: nnx.Conv(5, 4, 3, rngs=rngs), (6, 5)),
    "LinearGeneral": (lambda rngs: nnx.LinearGeneral(5, (2, 2), rngs=rngs), (5,)),
    "Einsum": (lambda rngs: nnx.Einsum("na,ab->nb", (5, 4), rngs=rngs), (5,)),
    "Embed": (lambda rngs: nnx.Embed(5, 4, rngs=rngs), (6,)),
}


@pytest.mark.parametrize("kind", EXPLICIT)
@pytest.mark.parametrize("spread", [False, True])
def test_layers_with_explicit_sharding(kind, spread):
    """With explicit sharding, the result has the sharding of the rows or the requested one."""
    base, shape = EXPLICIT[kind]
    layer = getattr(nn, f"BatchEnsemble{kind}")(base(nnx.Rngs(0)), 0, E)
    x = normal(E * B, *shape) if kind != "Embed" else jnp.arange(E * B * 6).reshape(-1, 6) % 5
    want = np.asarray(jax.jit(layer)(x))
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("members",), axis_types=explicit, devices=jax.devices()[:4])
    if spread:
        layer = nn.shard(layer, mesh, "members")
    graphdef, state = nnx.split(layer)
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, NamedSharding(mesh, PartitionSpec("members")))
        spec = PartitionSpec("members", *(None,) * (want.ndim - 1))
        # The embedding of Flax also needs the sharding.
        for given in [spec] if kind == "Embed" else [None, spec]:
            got = jax.jit(lambda s, x, g=given: nnx.merge(graphdef, s)(x, out_sharding=g))(
                state, rows
            )
            assert jax.typeof(got).sharding.spec == spec
            close(got, want)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (lambda: (net(members=3), over_devices(2), "members"), ValueError,
         "has 2 devices, which do not divide the 3 members of `model`."),
        (lambda: (net(), over_devices(2), "rows"), ValueError, "must be an axis of the mesh"),
        (lambda: (net(), 2, "members"), TypeError, "`mesh` must be a jax.sharding.Mesh, but is 2"),
        (lambda: (nnx.Linear(3, 2, rngs=nnx.Rngs(0)), over_devices(2), "members"), ValueError,
         "no BatchEnsemble layer"),
    ],
)  # fmt: skip
def test_bad_meshes_are_refused(args, error, message):
    with pytest.raises(error, match=message):
        nn.shard(*args())
