"""Unmodified models from PyPI, with random weights.

Every module that runs has a site under its path, the outputs equal those of the plain step, and
values and gradients agree with hooks that share no code with tapax: see `hooks`.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tests.oracles import hooks
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

KEY = jax.random.key(0)
TOKENS = jnp.arange(12).reshape(2, 6) % 11


@pytest.fixture(autouse=True)
def quiet():
    """Ignore the warnings of the packages and of their dependencies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check(step, args, values, grads):
    """Compare a captured step that takes a gradient with the records of hooks."""
    plain = jax.jit(step)(*args)
    out, taps = tapax.capture(jax.jit(step))(*args)
    assert_close(out, plain, 1e-4)
    called = {s.name for s in taps.sites if s.kind == "module" and s.method == "__call__"}
    assert called == set(values)
    scale = max(float(jnp.abs(g).max()) for g in grads.values())
    known = {name: value for name, value in values.items() if value is not None}
    for name, value in known.items():
        assert_close(taps.values[name], value, 1e-4, err_msg=name)
    assert len(known) > len(values) // 4
    for name, grad in grads.items():
        got = taps.grads.get(name, np.zeros_like(grad))
        terms = scale + 10 * float(jnp.abs(grad).max())
        assert_close(got, grad, scale=terms, err_msg=name)
    assert len(set(taps.grads) & called) > len(called) // 2


def attnax():
    from attnax import TransformerConfig, TransformerDecoder
    from flax import nnx

    config = TransformerConfig(
        vocab_size=11, d_model=16, num_heads=2, d_ff=32, num_layers=2, max_len=8, dropout_rate=0.0
    )
    return TransformerDecoder(nnx.Rngs(0), config), lambda m: m(TOKENS, deterministic=True)


def vae():
    from cax.nn.vae import VAE
    from flax import nnx

    image = jax.random.uniform(KEY, (2, 16, 16, 1))
    net = VAE(spatial_dims=(16, 16), features=(1, 4, 8), latent_size=4, rngs=nnx.Rngs(0))
    return net, lambda vae: vae.decoder(vae.encoder(image)[0])


@pytest.mark.parametrize("make", [attnax, pytest.param(vae, marks=pytest.mark.many)])
def test_published_models_of_nnx_agree_with_hooks(make):
    from flax import nnx

    model, run = make()
    loss = lambda model: jnp.mean(run(model) ** 2)
    root = type(model).__name__
    paths = {
        id(module): (module, "/".join((root, *map(str, path))))
        for path, module in nnx.iter_graph(model)
        if isinstance(module, nnx.Module)
    }
    values, grads = hooks.of_objects(paths).grads(lambda: loss(model))
    listed = dict(tapax.modules(model))
    assert {path: type(m) for m, path in paths.values() if callable(m)} == listed
    assert {name.partition("@")[0].partition(":")[0] for name in values} <= set(listed)

    graph, params, rest = nnx.split(model, nnx.Param, ...)
    step = jax.grad(lambda params: loss(nnx.merge(graph, params, rest)))
    check(step, (params,), values, grads)
    _, taps = tapax.capture(nnx.jit(nnx.grad(loss)))(model)
    assert {s.name for s in taps.sites if s.method == "__call__"} == set(values)


def moe():
    from nano_moe.config import NanoMoEConfig
    from nano_moe.model import NanoMoE

    sizes = {"n_layers": 2, "n_heads": 2, "d_model": 16, "d_ff": 32, "block_size": 8}
    model = NanoMoE(NanoMoEConfig(vocab_size=11, **sizes, n_experts=2, top_k=1))
    return model, model.init(KEY, TOKENS), lambda v: model.apply(v, TOKENS)[0]


def resnet():
    import jax_resnet

    model = jax_resnet.ResNet18(n_classes=5)
    x = jax.random.uniform(KEY, (2, 16, 16, 3))
    variables = model.init(KEY, x)
    return model, variables, lambda v: model.apply(v, x)


@pytest.mark.parametrize("make", [moe, pytest.param(resnet, marks=pytest.mark.many)])
def test_published_models_of_linen_agree_with_hooks(make):
    model, variables, run = make()
    loss = lambda params: jnp.mean(run({**variables, "params": params}) ** 2)
    params = variables["params"]
    hook = hooks.of_linen(type(model).__name__)
    values, grads = hook.grads(lambda: loss(params))
    check(jax.grad(loss), (params,), values, grads)


def vit():
    try:
        from equimo.vision.models import VisionTransformer
    except ImportError:  # version 2.0 needs Python 3.12
        from equimo.models import VisionTransformer

    sizes = {"img_size": 8, "patch_size": 4, "dim": 16, "num_heads": [2], "depths": [2]}
    net = VisionTransformer(**sizes, in_channels=3, num_classes=5, key=KEY)
    x = jax.random.normal(KEY, (3, 8, 8))
    return net, lambda net: net(x, key=KEY, inference=True)


def unet():
    import pdequinox

    net = pdequinox.arch.ClassicUNet(2, 3, 1, hidden_channels=4, num_levels=2, key=KEY)
    return net, lambda net: net(jax.random.normal(KEY, (3, 16, 16)))


@pytest.mark.parametrize("make", [vit, pytest.param(unet, marks=pytest.mark.many)])
def test_published_models_of_equinox_agree_with_hooks(make):
    import equinox as eqx

    model, run = make()
    # Flatten and rebuild, like every transformation, so that no two attributes are one object.
    params, static = eqx.partition(model, eqx.is_inexact_array)
    model = eqx.combine(params, static)
    loss = lambda model: jnp.mean(run(model) ** 2)
    paths = {}

    def visit(value, path):
        if isinstance(value, eqx.Module):
            paths.setdefault(id(value), (value, "/".join(path)))
            for name, part in vars(value).items():
                visit(part, (*path, name))
        elif isinstance(value, (list, tuple)):
            for i, part in enumerate(value):
                visit(part, (*path, str(i)))
        elif isinstance(value, dict):
            for key, part in value.items():
                visit(part, (*path, str(key)))

    visit(model, (type(model).__name__,))
    values, grads = hooks.of_objects(paths).grads(lambda: loss(model))
    listed = dict(tapax.modules(model))
    assert {name.partition("@")[0].partition(":")[0] for name in values} <= set(listed)
    step = jax.grad(lambda params: loss(eqx.combine(params, static)))
    check(step, (params,), values, grads)
    _, taps = tapax.capture(eqx.filter_jit(eqx.filter_grad(loss)))(model)
    assert {s.name for s in taps.sites if s.method == "__call__"} == set(values)


@pytest.mark.many
def test_published_equinox_model_with_scanned_layers_agrees_with_a_loop():
    """ESM2 stacks its layers and scans over them."""
    import equinox as eqx
    import esm2quinox

    model = esm2quinox.ESM2(num_layers=3, embed_size=16, num_heads=2, token_dropout=True, key=KEY)
    tokens = jnp.asarray(esm2quinox.tokenise(["SPIDERMAN", "FOO"], length=8, key=KEY))
    loss = lambda model: jnp.mean(jax.vmap(model)(tokens).logits ** 2)
    plain = eqx.filter_grad(loss)(model)
    out, taps = tapax.capture(eqx.filter_jit(eqx.filter_grad(loss)))(model)
    pairs = zip(jax.tree.leaves(out), jax.tree.leaves(plain), strict=True)
    for got, expected in pairs:
        assert_close(got, expected, 1e-3, scale=float(jnp.abs(expected).max()))
    inside = [name for name in taps.grads if name.startswith("ESM2/layers/")]
    assert inside and all(taps.grads[name].shape[:2] == (3, 2) for name in inside)


def tracr():
    import haiku as hk
    from tracr.transformer.model import Transformer, TransformerConfig

    sizes = {"num_heads": 2, "num_layers": 2, "key_size": 8, "mlp_hidden_size": 32}
    config = TransformerConfig(**sizes, dropout_rate=0.0, causal=True)

    def forward(tokens):
        out = Transformer(config)(
            hk.Embed(11, 16)(tokens), jnp.ones(tokens.shape), use_dropout=False
        )
        return hk.Linear(11)(out.output)

    return forward, (TOKENS,)


def alphazero():
    from pgx._src.baseline import _create_az_model_v0

    def forward(x):
        net = _create_az_model_v0(num_actions=7, num_channels=8, num_layers=2, resnet_v2=True)
        policy, value = net(x, is_training=True, test_local_stats=False)
        return jnp.concatenate([policy.reshape(-1), value.reshape(-1)])

    return forward, (jax.random.normal(KEY, (2, 5, 5, 4)),)


@pytest.mark.parametrize("make", [tracr, pytest.param(alphazero, marks=pytest.mark.many)])
def test_published_models_of_haiku_agree_with_hooks(make):
    import haiku as hk

    forward, args = make()
    model = hk.without_apply_rng(hk.transform_with_state(forward))
    params, state = model.init(KEY, *args)
    loss = lambda params: jnp.mean(model.apply(params, state, *args)[0] ** 2)
    values, grads = hooks.of_haiku().grads(lambda: loss(params))
    names = {"/".join(p for p in key.split("/") if not p.startswith("~")) for key in params}
    assert names <= {name.partition("@")[0].partition(":")[0] for name in values}
    check(jax.grad(loss), (params,), values, grads)


def test_published_models_of_brainstate_agree_with_hooks():
    """PyPI has no transformer or convolutional network in brainstate, so test a dense one."""
    import brainstate
    import pinnx

    brainstate.random.seed(0)
    net = pinnx.nn.FNN([2, 8, 8, 1], "tanh")
    x = jax.random.normal(KEY, (5, 2))
    weights = net.states(brainstate.ParamState)
    step = brainstate.transform.grad(lambda: jnp.mean(net(x) ** 2), weights)
    paths = {
        id(module): (module, "/".join(("FNN", *map(str, path))))
        for path, module in brainstate.graph.nodes(net).items()
        if isinstance(module, brainstate.nn.Module)
    }
    values, grads = hooks.of_objects(paths).grads(lambda: jnp.mean(net(x) ** 2))
    plain = step()
    out, taps = tapax.capture(brainstate.transform.jit(lambda: step()))()
    assert_close(out, plain)
    assert set(values) == {s.name for s in taps.sites if s.kind == "module"}
    for name, value in values.items():
        assert_close(taps.values[name], value)
        assert_close(taps.grads[name], grads[name], 1e-4)
