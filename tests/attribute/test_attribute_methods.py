"""Gradients, lenses, interventions and probes, each against a few lines of plain JAX or NumPy."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tapax
from tapax import attribute
from tests.attribute.test_patching import (
    CLEAN,
    CORRUPT,
    LAYERS,
    LENGTH,
    WIDTH,
    P,
    close,
    difference,
    logits,
    marked,
    normed,
    scanned,
    sow,
    values_of,
)

pytestmark = pytest.mark.once

RESIDS = [f"{i}/resid" for i in range(LAYERS)]
TOKENS = jnp.array([[1, 2, 3, 4], [6, 5, 4, 0], [0, 0, 2, 1]])


@functools.partial(jax.jit, static_argnums=0)
def replaced(name, value, tokens=CLEAN):
    """Compute the metric with another value at a site, without tapax."""
    return difference(logits(P, tokens, lambda n, v: value if n == name else v))


def test_saliency_is_the_gradient_at_a_site():
    here = values_of(P, CLEAN)
    want = {n: jax.grad(lambda v, n=n: replaced(n, v))(here[n]) for n in RESIDS}
    close(attribute.saliency(marked, "1/resid")(P, CLEAN), want["1/resid"])
    several = attribute.saliency(marked, "*/resid", times_value=True)(P, CLEAN)
    assert list(several) == RESIDS
    for n in RESIDS:
        close(several[n], want[n] * here[n])
    close(attribute.saliency(scanned, "resid")(P, CLEAN), jnp.stack(list(want.values())))
    one = attribute.saliency(scanned, tapax.at("resid", step=1), times_value=True)(P, CLEAN)
    close(one, several["1/resid"])


def test_saliency_of_an_argument():
    f = lambda w, x: jnp.sum(jnp.sin(w * x["a"]))
    x = {"a": jnp.array([1.0, 2.0])}
    close(attribute.saliency(f, argnum=1)(3.0, x)["a"], 3 * jnp.cos(3 * x["a"]))
    close(
        attribute.saliency(f, times_value=True)(3.0, x), 3 * jnp.sum(x["a"] * jnp.cos(3 * x["a"]))
    )
    with pytest.raises(ValueError, match="`argnum` is 2, but the function was called with 2"):
        attribute.saliency(f, argnum=2)(3.0, x)


def test_integrated_gradients_are_complete():
    """They sum to the difference of the metric, and converge to the integral with many steps."""
    here, base = values_of(P, CLEAN)["1/mlp"], values_of(P, CORRUPT)["1/mlp"]
    run = attribute.integrated_gradients(marked, "1/mlp", baseline=base, batch_size=3)
    got = run(P, CLEAN)
    close(got.sum(), replaced("1/mlp", here) - replaced("1/mlp", base))
    along = (jnp.arange(1000) + 0.5) / 1000
    grad = jax.grad(lambda v: replaced("1/mlp", v))
    want = jax.lax.map(lambda a: grad(base + a * (here - base)), along, batch_size=100).mean(0)
    close(got, want * (here - base))


def test_integrated_gradients_of_an_argument_and_an_iteration():
    f = lambda x: jnp.sum(x**3)
    close(attribute.integrated_gradients(f)(jnp.array([1.0, 2.0])), [1.0, 8.0])
    got = attribute.integrated_gradients(f, baseline=jnp.array([1.0, 1.0]))(jnp.array([1.0, 2.0]))
    close(got, [0.0, 7.0])
    got = attribute.integrated_gradients(scanned, tapax.at("mlp", step=1))(P, CLEAN)
    close(got, attribute.integrated_gradients(marked, "1/mlp")(P, CLEAN))


def image_net(x, hook=sow):
    """Map [batch, height, width, channel] to [batch, class]."""
    w = jnp.asarray(np.random.default_rng(0).standard_normal((3, 3, 2, 4)), x.dtype)
    dims = ("NHWC", "HWIO", "NHWC")
    h = hook("conv", jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims))
    return jnp.tanh(h).mean((1, 2)) @ jnp.asarray(np.eye(4)[:, :3] - 0.2, x.dtype)


IMAGES = jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 6, 2)), jnp.float32)


def cam_by_hand(classes):
    kept = {}
    image_net(IMAGES, lambda n, v: kept.setdefault(n, v))
    value = np.asarray(kept["conv"])
    score = lambda v: sum(image_net(IMAGES, lambda n, _: v)[i, c] for i, c in enumerate(classes))
    grad = np.asarray(jax.grad(score)(kept["conv"]))
    maps = np.zeros(value.shape[:3])
    for i in range(2):
        for c in range(4):
            maps[i] += grad[i, :, :, c].mean() * value[i, :, :, c]
    return np.maximum(maps, 0)


def test_grad_cam_of_one_class_for_each_image():
    close(attribute.grad_cam(image_net, "conv", 1)(IMAGES), cam_by_hand([1, 1]))
    close(attribute.grad_cam(image_net, "conv", jnp.array([2, 0]))(IMAGES), cam_by_hand([2, 0]))
    close(attribute.grad_cam(image_net, "conv", lambda x: x[:, 1])(IMAGES), cam_by_hand([1, 1]))
    score = lambda x: image_net(x)[:, 2]
    close(attribute.grad_cam(score, "conv")(IMAGES), cam_by_hand([2, 2]))

    def channels_first(x):
        hook = lambda n, v: jnp.moveaxis(tapax.sow(jnp.moveaxis(v, -1, 1), n), 1, -1)
        return image_net(x, hook)

    got = attribute.grad_cam(channels_first, "conv", 1, axis=(-2, -1), channel=-3)(IMAGES)
    close(got, cam_by_hand([1, 1]))
    assert jnp.isnan(attribute.grad_cam(image_net, "conv", 3)(IMAGES)).all()


def logits_of(p, tokens):
    return logits(p, tokens, sow)


def test_logit_lens_unembeds_every_layer():
    here = values_of(P, CLEAN)
    want = [normed(here[n]) @ P["embed"].T for n in RESIDS]
    close(attribute.logit_lens(logits_of, "*/resid")(P, CLEAN), want)
    unembed = lambda x: x @ P["embed"].T
    got = attribute.logit_lens(logits_of, ["0/resid", "1/resid"], unembed)(P, CLEAN)
    close(got, [here[n] @ P["embed"].T for n in RESIDS[:2]])
    close(attribute.logit_lens(scanned, "resid")(P, CLEAN), [difference(x) for x in want])


def test_direct_logit_attributions_sum_to_the_logits():
    """With a frozen norm scale, the contributions are linear and sum to the logits."""
    here = values_of(P, CLEAN)
    parts = ["embed", *(f"{i}/{p}" for i in range(LAYERS) for p in ("attn", "mlp"))]
    last = here[RESIDS[-1]]
    scale = jax.lax.rsqrt(jnp.var(last, -1, keepdims=True) + 1e-3)
    want = [(here[n] - here[n].mean(-1, keepdims=True)) * scale @ P["embed"].T for n in parts]
    share = attribute.direct_logit_attribution(
        logits_of, parts, RESIDS[-1], frozen=tapax.ops("rsqrt")
    )
    got = share(P, CLEAN)
    close(got, want)
    close(got.sum(0), logits(P, CLEAN))
    _, slope = jax.jvp(lambda x: normed(x) @ P["embed"].T, (last,), (here["1/mlp"],))
    linear = attribute.direct_logit_attribution(logits_of, ["1/mlp"], RESIDS[-1])
    close(linear(P, CLEAN)[0], slope)


def test_steering_adds_a_scaled_vector():
    vector = jnp.arange(1.0, WIDTH + 1)
    hand = lambda s: difference(
        logits(P, CLEAN, lambda n, v: v + s * vector if n == "1/resid" else v)
    )
    close(attribute.steer(marked, {"1/resid": vector}, 2.0)(P, CLEAN), hand(2.0))
    strengths = jnp.array([-1.0, 0.0, 3.0])
    sweep = jax.jit(jax.vmap(lambda s: attribute.steer(marked, {"1/resid": vector}, s)(P, CLEAN)))
    close(sweep(strengths), [hand(s) for s in strengths])
    at = lambda s: attribute.steer(scanned, {tapax.at("resid", step=1): vector}, s)(P, CLEAN)
    close(jax.vmap(at)(strengths), [hand(s) for s in strengths])
    close(jax.grad(at)(1.0), jax.grad(hand)(1.0))


def hand_ablated(new, tokens):
    return logits(P, tokens, lambda n, v: new.get(n, v))


def test_ablation_by_zero_mean_or_resampling():
    names = ["0/mlp", "1/attn"]
    here, other = values_of(P, TOKENS), values_of(P, TOKENS[:2] + 1)
    check = lambda new, **how: close(
        attribute.ablate(logits_of, names, **how)(P, TOKENS), hand_ablated(new, TOKENS)
    )
    check({n: jnp.zeros_like(here[n]) for n in names})
    means = lambda values: {n: jnp.broadcast_to(values[n].mean(0), here[n].shape) for n in names}
    check(means(here), how="mean")
    check(means(other), how="mean", reference=(P, TOKENS[:2] + 1))
    check({n: here[n][::-1] for n in names}, how="resample", reference=(P, TOKENS[::-1]))
    close(
        attribute.ablate(scanned, "mlp", "mean", axis=1)(P, CLEAN),
        difference(hand_ablated({f"{i}/mlp": jnp.broadcast_to(
            values_of(P, CLEAN)[f"{i}/mlp"].mean(1, keepdims=True), (1, LENGTH, WIDTH)
        ) for i in range(LAYERS)}, CLEAN)),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_resampled_examples_are_others(seed):
    f = lambda x: tapax.sow(x, "h")
    x = jnp.arange(5.0)
    got = attribute.ablate(f, "h", "resample", key=jax.random.key(seed))(x)
    assert sorted(got.tolist()) == x.tolist() and not (got == x).any()
    drawn = attribute.ablate(f, "h", "resample", key=jax.random.key(seed), reference=x[:2] + 9)(x)
    assert set(drawn.tolist()) <= {9.0, 10.0}


def features(x):
    return tapax.sow(jnp.stack([x[:, 0], x[:, 1], x[:, 0] * x[:, 1]], -1), "h").sum()


def test_ridge_probe_solves_the_normal_equations():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 2)).astype(np.float32)
    y = (3 * x[:, 0] - x[:, 0] * x[:, 1] + 0.1 * rng.standard_normal(50) + 7).astype(np.float32)
    probe = attribute.linear_probe(features, "h", jnp.asarray(x), y, ridge=0.5)
    h = np.stack([x[:, 0], x[:, 1], x[:, 0] * x[:, 1], np.ones(50)], -1).astype(np.float64)
    want = np.linalg.solve(h.T @ h + np.diag([0.5, 0.5, 0.5, 0.0]), h.T @ y)
    close(probe.weights, want[:3])
    close(probe.bias, want[3])
    close(probe.predict(jnp.asarray(x)), h @ want)
    r2 = 1 - np.sum((y - h @ want) ** 2) / np.sum((y - y.mean()) ** 2)
    close(probe.score(jnp.asarray(x), y), r2)


@pytest.mark.parametrize("classes", [2, 3])
def test_logistic_probe_reaches_the_optimum(classes):
    """At the optimum the slope of the penalised cross entropy is zero."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((80, 2)).astype(np.float32)
    y = np.clip((x[:, 0] * x[:, 1] + 0.7).astype(int), 0, classes - 1)
    probe = attribute.linear_probe(features, "h", jnp.asarray(x), y, ridge=0.5)
    h = np.stack([x[:, 0], x[:, 1], x[:, 0] * x[:, 1]], -1)
    out = h @ np.asarray(probe.weights) + np.asarray(probe.bias)
    p = np.exp(out) / np.exp(out).sum(-1, keepdims=True)
    wrong = p - np.eye(classes)[y]
    np.testing.assert_allclose(h.T @ wrong + 0.5 * np.asarray(probe.weights), 0, atol=1e-3)
    np.testing.assert_allclose(wrong.sum(0), 0, atol=1e-3)
    assert (probe.predict(jnp.asarray(x)) == out.argmax(-1)).all()
    close(probe.score(jnp.asarray(x), y), (out.argmax(-1) == y).mean())


def test_logistic_probe_of_separable_classes_converges():
    """Newton's method does not diverge where a full step overshoots."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((60, 2)) * 30, jnp.float32)
    probe = attribute.linear_probe(features, "h", x, x[:, 0] > 0, ridge=1e-2, steps=30)
    assert jnp.isfinite(probe.weights).all()
    assert probe.score(x, x[:, 0] > 0) == 1


def test_probe_at_every_position_and_traced():
    f = lambda x: tapax.sow(x, "h").sum()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 5, 3)), jnp.float32)
    y = x @ jnp.array([1.0, 2.0, 3.0])
    fit = jax.jit(lambda x, y: attribute.linear_probe(f, "h", x, y, ridge=1e-3).weights)
    np.testing.assert_allclose(fit(x, y), [1, 2, 3], atol=1e-3)
    labels = (y > 0).astype(int)
    probe = attribute.linear_probe(f, "h", x, labels)
    assert probe.predict(x).shape == labels.shape
    classes = jax.jit(lambda x, y: attribute.linear_probe(f, "h", x, y, num_classes=2).weights)
    close(classes(x, labels), probe.weights)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, hook=lambda name, value: value, name=""):
        x = x + hook(f"{name}attn", self.attn(self.norm(x)))
        return x + hook(f"{name}mlp", jnp.tanh(self.mlp(x)))


class NnxGPT(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(7, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])

    def __call__(self, tokens, hook=lambda name, value: value):
        x = hook("embed", self.embed(tokens))
        for i, block in enumerate(self.blocks):
            x = hook(f"blocks/{i}", block(x, hook, f"blocks/{i}/"))
        return x @ self.embed.embedding[...].T


class EqxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    attn: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.attn = eqx.nn.MultiheadAttention(2, WIDTH, key=keys[0])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 8, 1, key=keys[1])

    def __call__(self, x, hook=lambda name, value: value, name=""):
        y = jax.vmap(self.norm)(x)
        x = x + hook(f"{name}attn", self.attn(y, y, y))
        return x + hook(f"{name}mlp", jax.vmap(self.mlp)(x))


class EqxGPT(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(7, WIDTH, key=keys[0])
        self.blocks = [EqxBlock(k) for k in keys[1:]]

    def __call__(self, tokens, hook=lambda name, value: value):
        x = hook("embed", jax.vmap(self.embed)(tokens))
        for i, block in enumerate(self.blocks):
            x = hook(f"blocks/{i}", block(x, hook, f"blocks/{i}/"))
        return x @ self.embed.weight.T


def nnx_metric(model, tokens, hook=None):
    out = model(tokens) if hook is None else model(tokens, hook)
    return out[0, -1, 1] - out[0, -1, 2]


def eqx_metric(model, tokens, hook=None):
    out = model(tokens[0]) if hook is None else model(tokens[0], hook)
    return out[-1, 1] - out[-1, 2]


def frameworks():
    """Return for each framework a metric, a model, its name, and how to compile the metric."""
    return {
        "nnx": (nnx_metric, NnxGPT(nnx.Rngs(0)), "NnxGPT/", nnx.jit),
        "equinox": (eqx_metric, EqxGPT(jax.random.key(0)), "EqxGPT/", eqx.filter_jit),
    }


@pytest.mark.parametrize("name", ["nnx", "equinox"])
@pytest.mark.parametrize(
    "how",
    ["closed over", *(pytest.param(how, marks=pytest.mark.many) for how in ("argument", "jitted"))],
)
def test_attribution_in_models_of_frameworks(name, how):
    """Patch with the model as an argument or closed over, steer, and differentiate."""
    metric, model, root, jitted = frameworks()[name]
    short = ["blocks/0", "blocks/1/attn"]
    sites = [root + s for s in short]
    kept = {}
    metric(model, CLEAN, lambda n, v: kept.setdefault(n, v))

    def hand(site, i):
        new = kept[site]
        put = lambda v: v.at[..., i, :].set(new[..., i, :])
        return metric(model, CORRUPT, lambda n, v: put(v) if n == site else v)

    if how == "closed over":
        fn, clean, corrupt = (lambda tokens: metric(model, tokens)), CLEAN, CORRUPT
    else:
        fn = jitted(metric) if how == "jitted" else metric
        clean, corrupt = (model, CLEAN), (model, CORRUPT)
    got = attribute.activation_patching(fn, clean, corrupt, sites, [0, 3])
    close(got, [[hand(s, i) for i in (0, 3)] for s in short])
    if how != "argument":
        return
    pushed = lambda n, v: v + 0.5 * jnp.ones(WIDTH) if n == "blocks/0" else v
    steered = attribute.steer(fn, {sites[0]: jnp.ones(WIDTH)}, 0.5)
    close(steered(*clean), metric(model, CLEAN, pushed))
    base = metric(model, CORRUPT)
    estimate = attribute.attribution_patching(fn, clean, corrupt, sites)
    value = lambda v: metric(model, CORRUPT, lambda n, u: v if n == "blocks/0" else u)
    kept_corrupt = {}
    metric(model, CORRUPT, lambda n, v: kept_corrupt.setdefault(n, v))
    here = kept_corrupt["blocks/0"]
    close(estimate[0], base + jnp.sum(jax.grad(value)(here) * (kept["blocks/0"] - here)))
    close(attribute.saliency(fn, sites[0])(*corrupt), jax.grad(value)(here))


def test_a_mapped_equinox_model():
    """The first axis of a value indexes the examples of a vmap, as in a batch."""
    model = EqxGPT(jax.random.key(0))
    out = lambda model, tokens: jax.vmap(model)(tokens)
    got = attribute.ablate(out, "EqxGPT/blocks/0", "mean")(model, TOKENS)
    blocks = []

    def keep(name, value):
        if name == "blocks/0":
            blocks.append(value)
        return value

    for tokens in TOKENS:
        model(tokens, keep)
    mean = sum(blocks) / len(blocks)
    hook = lambda n, v: mean if n == "blocks/0" else v
    close(got, jnp.stack([model(tokens, hook) for tokens in TOKENS]))


WRONG = {
    "site": (lambda: attribute.saliency(marked, "1/mpl")(P, CLEAN), "nearest names are '1/mlp'"),
    "several": (
        lambda: attribute.saliency(lambda x: tapax.sow(tapax.sow(x, "h"), "h"), "h")(1.0),
        "h@1",
    ),
    "array": (lambda: attribute.saliency(logits_of, "1/mlp")(P, CLEAN), "one real number"),
    "steps": (lambda: attribute.integrated_gradients(marked, "1/mlp", steps=0), "positive number"),
    "baseline": (
        lambda: attribute.integrated_gradients(marked, "1/mlp", baseline=jnp.ones(3))(P, CLEAN),
        r"`baseline` has the shape \[3\], which cannot be broadcast .* \[1, 4, 4\]",
    ),
    "two sites": (
        lambda: attribute.integrated_gradients(marked, "*/mlp")(P, CLEAN),
        "must pick one value, but .* picks 3: '0/mlp@0', '1/mlp@0'",
    ),
    "a loop": (
        lambda: attribute.integrated_gradients(scanned, "mlp")(P, CLEAN),
        r"picks 3: tapax.at\(",
    ),
    "axes": (lambda: attribute.grad_cam(image_net, "conv", 1, axis=(1, 4))(IMAGES), "no such axis"),
    "channel": (
        lambda: attribute.grad_cam(image_net, "conv", 1, channel=2)(IMAGES),
        "spatial axes",
    ),
    "lens": (
        lambda: attribute.logit_lens(lambda x: tapax.sow(tapax.sow(x, "a").sum(), "b"), ["a", "b"])(
            IMAGES
        ),
        "values of one shape",
    ),
    "stream": (
        lambda: attribute.direct_logit_attribution(
            lambda x: tapax.sow(tapax.sow(x, "a").sum(), "b"), "a", "b"
        )(IMAGES),
        "must have the shape of the stream",
    ),
    "vector": (
        lambda: attribute.steer(marked, {"1/mlp": jnp.ones(3)})(P, CLEAN),
        r"shape \[3\] cannot be broadcast to the .*'1/mlp', marked at .*\[1, 4, 4\]",
    ),
    "vectors": (lambda: attribute.steer(marked, {}), "must map one or more selections"),
    "how": (lambda: attribute.ablate(marked, "1/mlp", "median"), "but is 'median'"),
    "key": (lambda: attribute.ablate(marked, "1/mlp", "resample"), "needs a random key"),
    "alone": (
        lambda: attribute.ablate(marked, "1/mlp", "resample", key=jax.random.key(0))(P, CLEAN),
        "no other example",
    ),
    "reference": (
        lambda: attribute.ablate(marked, "1/mlp", "resample", reference=(P, TOKENS))(P, TOKENS[:2]),
        r"shape \[3, 4, 4\] with `reference`, but \[2, 4, 4\] in this call",
    ),
    "labels": (
        lambda: attribute.linear_probe(features, "h", jnp.ones((4, 2)), jnp.ones(3)),
        r"shape \[3\], and 'h' has \[4, 3\]",
    ),
    "kind": (
        lambda: attribute.linear_probe(
            features, "h", jnp.ones((4, 2)), jnp.ones(4), kind="logistic"
        ),
        "for integer labels",
    ),
    "ridge": (
        lambda: attribute.linear_probe(features, "h", jnp.ones((4, 2)), jnp.ones(4), ridge=0.0),
        "must be positive",
    ),
    "classes": (
        lambda: attribute.linear_probe(features, "h", jnp.ones((2, 2)), jnp.array([0, -1])),
        "from -1 to 0",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_of_attribution_methods(case):
    run, message = WRONG[case]
    with pytest.raises((ValueError, TypeError), match=message):
        run()
