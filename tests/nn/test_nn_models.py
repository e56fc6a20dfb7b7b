"""Ensembles of whole models: each member equals a plain model with its weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tapax
from tapax import nn
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

E, B = 4, 3


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def close(a, b, tolerance=2e-5):
    assert_close(a, b, tolerance)


# Broadcast the factors to the weight of each layer that can be converted.
WEIGHTS = {
    nnx.Linear: ("kernel", "io,i,o->io"),
    nnx.Conv: ("kernel", "...io,i,o->...io"),
    nnx.Embed: ("embedding", "vf,v,f->vf"),
}


def found(model, path):
    for key in path:
        model = (
            model[key] if isinstance(model, (list, dict, tuple, nnx.List)) else getattr(model, key)
        )
    return model


def layers(model):
    return {path: m for path, m in nnx.iter_graph(model) if hasattr(m, "num_members")}


def member(model, ensemble, k, stacked=False):
    """Make the plain model with the weights of member `k`."""
    plain = nnx.clone(model)
    every = (slice(None),) if stacked else ()
    for path, layer in layers(ensemble).items():
        own = found(plain, path)
        r, s = (np.asarray(f[...])[(*every, k)] for f in (layer.r, layer.s))
        if isinstance(own, nnx.LinearGeneral):
            ins, outs = "ab"[: r.ndim - stacked], "xy"[: s.ndim - stacked]
            name, equation = "kernel", f"{ins}{outs},{ins},{outs}->{ins}{outs}"
        else:
            name, equation = WEIGHTS[type(own)]
        if stacked:
            equation = "l" + equation.replace(",", ",l").replace("->", "->l")
        weight = np.asarray(getattr(layer, name)[...])
        # Layers with tied weights have separate factors.
        setattr(own, name, nnx.Param(jnp.asarray(np.einsum(equation, weight, r, s))))
        if getattr(own, "bias", None) is not None:
            own.bias[...] = layer.bias[(*every, k)]
    return plain


def vary(ensemble):
    """Give every member different biases; they start as the biases of the model."""
    for layer in layers(ensemble).values():
        if getattr(layer, "bias", None) is not None:
            layer.bias[...] = normal(*layer.bias.shape, seed=3)
    return ensemble


def check(model, x, *, stacked=False, **options):
    """Check that every member equals a plain model with its weights."""
    ensemble = vary(nn.batch_ensemble(model, E, rngs=0, **options))
    run = nnx.jit(lambda m, x: m(x))
    got = nn.unfold(run(ensemble, nn.tile(x, E)), E)
    for k in range(E):
        close(got[k], run(member(model, ensemble, k, stacked), x))
    assert not np.isclose(got[0], got[1]).all()
    return ensemble


class Residual(nnx.Module):
    def __init__(self, ins, outs, stride, rngs):
        self.conv1 = nnx.Conv(ins, outs, (3, 3), strides=stride, use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(outs, rngs=rngs)
        self.conv2 = nnx.Conv(outs, outs, (3, 3), feature_group_count=1, rngs=rngs)
        self.norm2 = nnx.GroupNorm(outs, num_groups=2, rngs=rngs)
        self.short = nnx.Conv(ins, outs, (1, 1), strides=stride, rngs=rngs)

    def __call__(self, x):
        y = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(self.norm2(self.conv2(y)) + self.short(x))


class ResNet(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.blocks = nnx.List([Residual(4, 4, 1, rngs), Residual(4, 8, 2, rngs)])
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(8, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(8, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.place = nnx.Embed(6, 8, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])

    def __call__(self, x):
        x = self.embed(x) + self.place(jnp.arange(x.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def no_places(path, layer):
    return not path.endswith("place")


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (B, 6)))


@pytest.mark.many
def test_ensemble_of_a_residual_network():
    model = ResNet(nnx.Rngs(0))
    model.eval()
    ensemble = check(model, normal(B, 6, 6, 3), use_base_weights=False)
    assert not np.isclose(ensemble.stem.kernel[...], model.stem.kernel[...]).any()
    assert type(ensemble.blocks[1].norm1) is nnx.BatchNorm


@pytest.mark.many
def test_transformer_with_tied_embeddings():
    model = GPT(nnx.Rngs(0))
    ensemble = check(model, TOKENS, where=no_places)
    assert type(ensemble.place) is nnx.Embed
    assert type(ensemble.blocks[0].attn.query) is nn.BatchEnsembleLinearGeneral


def test_ensemble_of_attention_layers():
    """Convert the projections of the query, and of other keys and values, by head, without bias."""
    model = nnx.MultiHeadAttention(
        2, 6, 8, out_features=5, decode=False, use_bias=False, rngs=nnx.Rngs(0)
    )
    ensemble = nn.batch_ensemble(model, E, rngs=0, use_base_weights=True)
    q, kv = normal(B, 4, 6), normal(B, 7, 6, seed=1)
    run = nnx.jit(lambda m, q, kv: m(q, kv))
    got = nn.unfold(run(ensemble, nn.tile(q, E), nn.tile(kv, E)), E)
    for k in range(E):
        close(got[k], run(member(model, ensemble, k), q, kv))


@pytest.mark.parametrize("cell", [nnx.OptimizedLSTMCell, nnx.GRUCell])
def test_ensemble_of_recurrent_cells(cell):
    model = nnx.RNN(cell(5, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    check(model, normal(B, 6, 5))


@pytest.mark.parametrize("model", [ResNet, GPT])
def test_members_without_deviation_are_the_model_itself(model):
    model = model(nnx.Rngs(0))
    model.eval()
    x = normal(B, 6, 6, 3) if isinstance(model, ResNet) else TOKENS
    ensemble = nn.batch_ensemble(model, E, rngs=1, r_std=0.0, s_std=0.0, where=no_places)
    for got in nn.unfold(ensemble(nn.tile(x, E)), E):
        close(got, model(x))


def test_the_model_stays_as_it_is():
    model = GPT(nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    before = jax.tree.map(np.asarray, state)
    for base in (True, False):
        ensemble = nn.batch_ensemble(model, E, rngs=0, use_base_weights=base, where=no_places)
        ensemble.blocks[0].up.kernel[...] = normal(8, 16)
        ensemble.blocks[0].norm1.scale[...] = normal(8)
    assert nnx.split(model)[0] == graphdef
    jax.tree.map(np.testing.assert_array_equal, nnx.split(model)[1], before)


class Everywhere(nnx.Module):
    def __init__(self, rngs):
        new = lambda: nnx.Linear(3, 3, rngs=rngs)
        self.own = new()
        self.again = self.own
        self.list = nnx.List([new(), nnx.relu, nnx.List([new()])])
        self.dict = nnx.Dict(a=new(), b=nnx.data({"c": new()}))
        self.plain = nnx.data([new(), {"d": (new(), 3.0)}])
        self.row = nnx.data((nnx.relu, new()))
        self.inner = nnx.Sequential(new(), nnx.tanh, nnx.Sequential(new()))
        self.tied = new()
        self.tied.kernel = self.own.kernel

    def __call__(self, x):
        first = self.list[2][0](self.list[1](self.list[0](self.own(x))))
        second = self.dict["b"]["c"](self.dict["a"](first)) + self.again(first)
        third = self.plain[1]["d"][0](self.plain[0](second)) * self.plain[1]["d"][1]
        return self.tied(self.inner(self.row[1](self.row[0](third))))


def test_layers_wherever_they_are():
    ensemble = check(Everywhere(nnx.Rngs(0)), normal(B, 3), use_base_weights=True)
    assert ensemble.again is ensemble.own and ensemble.tied.kernel is ensemble.own.kernel
    assert len(layers(ensemble)) == 11
    assert not any(type(m) is nnx.Linear for _, m in nnx.iter_graph(ensemble))
    graphdef, state = nnx.split(ensemble)
    again = nnx.merge(graphdef, state)
    assert again.again is again.own


def test_weights_that_are_tied_stay_so_when_they_are_new():
    model = Everywhere(nnx.Rngs(0))
    # The seed of the model.
    ensemble = nn.batch_ensemble(model, E, rngs=0, use_base_weights=False)
    assert ensemble.tied.kernel is ensemble.own.kernel
    assert not np.isclose(ensemble.own.kernel[...], model.own.kernel[...]).any()
    part = nn.batch_ensemble(model, E, rngs=0, use_base_weights=False, where="Everywhere/tied")
    assert part.tied.kernel is part.own.kernel
    assert part(nn.tile(normal(2, 3), E)).shape == (2 * E, 3)


def test_every_layer_has_different_factors():
    """One seed gives different factors even to equal layers."""
    for rngs in (0, jax.random.key(0), nnx.Rngs(0), nnx.Rngs(0).params):
        ensemble = nn.batch_ensemble(Everywhere(nnx.Rngs(0)), E, rngs=rngs)
        factors = [np.asarray(f[...]) for m in layers(ensemble).values() for f in (m.r, m.s)]
        assert len(np.unique(np.stack(factors))) == 2 * 11 * E * 3
    first, again = (nn.batch_ensemble(Everywhere(nnx.Rngs(0)), E, rngs=0) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(first), nnx.state(again))


def test_where_selects_layers_to_convert():
    model = GPT(nnx.Rngs(0))
    converted = lambda where: {
        "/".join(map(str, path))
        for path in layers(nn.batch_ensemble(model, E, rngs=0, where=where))
    }
    assert converted("GPT/blocks/*/up") == {"blocks/0/up", "blocks/1/up"}
    assert converted("**/attn/*") == {
        f"blocks/{i}/attn/{name}" for i in (0, 1) for name in ("query", "key", "value", "out")
    }
    seen = []
    assert converted(lambda path, layer: seen.append(path) or isinstance(layer, nnx.Embed)) == {
        "embed", "place",
    }  # fmt: skip
    captured = tapax.modules(model)
    assert set(seen) <= {path for path, _ in captured}


def test_a_layer_is_a_model():
    ensemble = nn.batch_ensemble(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), rngs=0)
    assert type(ensemble) is nn.BatchEnsembleLinear and ensemble.num_members == 4


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.vmap(lambda rngs: Block(rngs), in_axes=0)(rngs.split(3))
        self.head = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return nnx.remat(lambda block, x: block(x))(block, x)

        return self.head(run(x, self.blocks))


@pytest.mark.many
def test_stacked_layers_under_scan():
    model = Stacked(nnx.Rngs(0))
    ensemble = vary(nn.batch_ensemble(model, E, rngs=0))
    up = ensemble.blocks.up
    assert up.r.shape == (3, E, 8) and up.s.shape == up.bias.shape == (3, E, 16)
    assert len(np.unique(up.r[...])) == up.r.size
    assert abs(float(up.kernel[...].std()) * 8**0.5 - 1) < 0.2
    x = normal(B, 5, 8)
    got = nn.unfold(nnx.jit(lambda m, x: m(x))(ensemble, nn.tile(x, E)), E)
    for k in range(E):
        plain = member(model, only(ensemble, "blocks"), k, stacked=True)
        head = member(model, only(ensemble, "head"), k)
        plain.head = head.head
        close(got[k], nnx.jit(lambda m, x: m(x))(plain, x))


class only:
    """A separate model that consists of one part of a model."""

    def __new__(cls, model, name):
        part = nnx.Module()
        setattr(part, name, getattr(model, name))
        return part


def test_a_stack_is_not_a_layer():
    stack = nnx.vmap(lambda rngs: nnx.Linear(5, 4, rngs=rngs))(nnx.Rngs(0).split(3))
    layer = nn.BatchEnsembleLinear(stack, 0, 2)
    with pytest.raises(ValueError, match=r"has the shape \[3, 2, 5\], but one layer has \[2, 5\]"):
        layer(jnp.ones((4, 5)))


def test_a_stack_along_another_axis():
    axes = nnx.StateAxes({...: 1})
    make = nnx.vmap(lambda rngs: nnx.Linear(5, 4, rngs=rngs), out_axes=axes)
    model = nnx.Sequential(make(nnx.Rngs(0).split(3)))
    message = r"Sequential/layers/0 cannot be converted. .* \[5, 4\], has one of shape \[5, 3, 4\]"
    with pytest.raises(ValueError, match=message):
        nn.batch_ensemble(model, 2, rngs=0)


@pytest.mark.many
@pytest.mark.parametrize("kind", ["resnet", "gpt"])
def test_training_makes_members_differ(kind):
    """The loss falls, and members that began with the same weights become different models."""
    if kind == "resnet":
        model, x = ResNet(nnx.Rngs(0)), normal(4, 6, 6, 3)
        y, where = jnp.arange(4), None
    else:
        x = jnp.asarray(np.random.default_rng(1).integers(0, 11, (4, 6)))
        model, y, where = GPT(nnx.Rngs(0)), jnp.roll(x, -1, 1), no_places
    ensemble = nn.batch_ensemble(model, E, rngs=0, init="random_sign", where=where)
    optimizer = nnx.Optimizer(ensemble, optax.adam(1e-2), wrt=nnx.Param)
    rows, labels = nn.tile(x, E), nn.tile(y, E)
    before = [np.asarray(f[...]) for m in layers(ensemble).values() for f in (m.r, m.s)]

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            logits = model(rows)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(ensemble, optimizer)) for _ in range(25)]
    assert losses[-1] < 0.6 * losses[0]
    after = [np.asarray(f[...]) for m in layers(ensemble).values() for f in (m.r, m.s)]
    assert all((a != b).mean() > 0.9 for a, b in zip(before, after, strict=True))
    ensemble.eval()
    logits = nn.unfold(nnx.jit(lambda m, x: m(x))(ensemble, rows), E)
    apart = [np.abs(logits[i] - logits[j]).max() for i in range(E) for j in range(i)]
    assert min(apart) > 0.05


class Mine(nnx.Linear):
    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs, out_sharding)


def held(layer):
    return nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), layer)


REFUSED = {
    "flax.ConvTranspose": lambda rngs: nnx.ConvTranspose(3, 3, 3, rngs=rngs),
    "flax.LoRALinear": lambda rngs: nnx.LoRALinear(3, 3, lora_rank=2, rngs=rngs),
    "flax.LoRA": lambda rngs: nnx.LoRA(3, 2, 3, base_module=nnx.Linear(3, 3, rngs=rngs), rngs=rngs),
    "flax.WeightNorm": lambda rngs: nnx.WeightNorm(nnx.Linear(3, 3, rngs=rngs), rngs=rngs),
    "flax.SpectralNorm": lambda rngs: nnx.SpectralNorm(nnx.Linear(3, 3, rngs=rngs), rngs=rngs),
    "tests.Mine": lambda rngs: Mine(3, 3, rngs=rngs),
    "tapax.BatchEnsembleLinear": lambda rngs: nn.BatchEnsembleLinear(
        nnx.Linear(3, 3, rngs=rngs), 0, 2
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cannot_be_converted(name):
    model = held(REFUSED[name](nnx.Rngs(0)))
    message = f"Sequential/layers/1 is of type {name}, which cannot be converted. Leave it out with"
    with pytest.raises(TypeError, match=message):
        nn.batch_ensemble(model, 2, rngs=0)
    part = nn.batch_ensemble(model, 2, rngs=0, where="Sequential/layers/0")
    assert type(part.layers[1]) is type(model.layers[1])
    assert type(part.layers[0]) is nn.BatchEnsembleLinear


NET = held(nnx.relu)
WRONG = {
    "no model": (lambda: nn.batch_ensemble(len, 2, rngs=0), TypeError, "must be an nnx.Module"),
    "no layers": (
        lambda: nn.batch_ensemble(nnx.LayerNorm(3, rngs=nnx.Rngs(0)), 2, rngs=0), ValueError,
        "`model`, of type LayerNorm, has no layer that can be converted",
    ),
    "a glob of nothing": (
        lambda: nn.batch_ensemble(NET, 2, rngs=0, where="Net/*"), ValueError,
        r"`where` is 'Net/\*', which picks none of the layers of `model`: 'Sequential/layers/0'.",
    ),
    "where that is neither": (
        lambda: nn.batch_ensemble(NET, 2, rngs=0, where=3), TypeError, "`where` must be a glob",
    ),
    "zero members": (lambda: nn.batch_ensemble(NET, 0, rngs=0), ValueError, "must be 1 or more"),
    "a negative deviation": (
        lambda: nn.batch_ensemble(NET, 2, rngs=0, s_std=-1.0), ValueError, "`s_std` is a standard",
    ),
    "other rngs": (lambda: nn.batch_ensemble(NET, 2, rngs=None), TypeError, "`rngs` must be an"),
    "rows of an embedding": (
        lambda: nn.batch_ensemble(nnx.Embed(E, 2, rngs=nnx.Rngs(0)), E, rngs=0)(jnp.arange(E)),
        ValueError,
        "leave an embedding of positions out of the ensemble",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_of_batch_ensemble(case):
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call()
