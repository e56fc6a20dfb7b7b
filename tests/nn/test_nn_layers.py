"""BatchEnsemble layers, against a loop over members with dense weights."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from tapax import nn
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

E, B = 3, 2


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def close(a, b, tolerance=1e-5):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    assert_close(a, b, tolerance)


def biased(layer):
    """Give every member of the layer a different bias."""
    if getattr(layer, "bias", None) is not None:
        layer.bias[...] = normal(*layer.bias.shape, seed=9, dtype=layer.bias.dtype)
    return layer


def parts(layer, weight="kernel"):
    """Return the parameters of a layer as one dict of arrays."""
    found = {"w": getattr(layer, weight)[...], "r": layer.r[...], "s": layer.s[...]}
    return found | ({} if getattr(layer, "bias", None) is None else {"b": layer.bias[...]})


def by_member(one, p, x):
    """Apply `one(weight, bias, rows)` to one member after the other."""
    lib = np if isinstance(x, np.ndarray) else jnp
    members, rows = len(p["r"]), lib.split(x, len(p["r"]))
    dense = [outer(p["w"], p["r"][k], p["s"][k]) for k in range(members)]
    biases = p.get("b", [0.0] * members)
    return lib.concatenate([one(dense[k], biases[k], rows[k]) for k in range(members)])


def check(layer, one, x, weight="kernel"):
    """Compare a layer with the loop, which runs in NumPy or compiled."""
    p = jax.tree.map(np.asarray, parts(layer, weight))
    close(jax.jit(layer)(x), by_member(one, p, np.asarray(x)))


def outer(w, r, s):
    """Compute the weight of a member, for kernels `[..., in, out]`."""
    return w * r[:, None] * s[None, :]


def set_parts(layer, p, weight="kernel"):
    graphdef, state = nnx.split(layer)
    names = {"w": weight, "r": "r", "s": "s", "b": "bias"}
    for key, value in p.items():
        state[names[key]][...] = value
    return nnx.merge(graphdef, state)


def linear(bias=True, ins=5, outs=4, **options):
    base = nnx.Linear(ins, outs, use_bias=bias, rngs=nnx.Rngs(0), **options)
    return biased(nn.BatchEnsembleLinear(base, rngs=nnx.Rngs(1), num_members=E))


def dense(w, b, x):
    return x @ w + b


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(E * B, 5), (E * B, 3, 5), (E * B, 2, 3, 5), (E, 5), (0, 5)])
def test_linear_layer_for_each_member(bias, shape):
    layer, x = linear(bias), normal(*shape)
    check(layer, dense, x)


def test_linear_is_as_documented():
    base = nnx.Linear(5, 4, rngs=nnx.Rngs(0))
    layer = nn.BatchEnsembleLinear(
        base_layer=base, rngs=nnx.Rngs(1), num_members=E, use_base_weights=True, init="normal",
        r_mean=1.0, r_std=0.5, s_mean=1.0, s_std=0.5,
    )  # fmt: skip
    assert isinstance(layer, nnx.Linear)
    assert (layer.in_features, layer.out_features, layer.use_bias, layer.num_members) == (
        5,
        4,
        True,
        E,
    )
    assert layer.kernel is base.kernel
    assert (layer.r.shape, layer.s.shape, layer.bias.shape) == ((E, 5), (E, 4), (E, 4))
    assert all(isinstance(v, nnx.Param) for v in (layer.kernel, layer.bias, layer.r, layer.s))
    assert layer(jnp.ones((E * B, 5)), out_sharding=None).shape == (E * B, 4)
    plain = nn.BatchEnsembleLinear(nnx.Linear(5, 4, use_bias=False, rngs=nnx.Rngs(0)))
    assert plain.bias is None and plain.num_members == 1
    layer.eval(), layer.train()


def test_members_cost_little():
    count = lambda layer: sum(x.size for x in jax.tree.leaves(nnx.state(layer)))
    base = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
    ensemble = nn.BatchEnsembleLinear(base, rngs=0, num_members=4)
    assert round(count(ensemble) / count(base), 3) == 1.043


def test_a_new_kernel_or_that_of_the_base_layer():
    base = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
    before = np.asarray(base.kernel[...])
    new = nn.BatchEnsembleLinear(base, rngs=1, num_members=2)
    assert not np.allclose(new.kernel[...], before) and new.kernel is not base.kernel
    assert abs(float(new.kernel[...].std()) * 16 - 1) < 0.05  # 1 / sqrt(256)
    np.testing.assert_array_equal(base.kernel[...], before)
    bias = nn.BatchEnsembleLinear(base, rngs=1, num_members=2).bias[...]
    np.testing.assert_array_equal(bias, jnp.stack([base.bias[...]] * 2))


def test_factors_have_the_requested_distribution():
    base = nnx.Linear(2000, 3000, rngs=nnx.Rngs(0))
    given = {"r_mean": 2.0, "r_std": 0.1, "s_mean": -1.0, "s_std": 0.0}
    layer = nn.BatchEnsembleLinear(base, rngs=0, num_members=2, use_base_weights=True, **given)
    assert abs(float(layer.r[...].mean()) - 2) < 0.01
    assert abs(float(layer.r[...].std()) - 0.1) < 0.01
    assert (layer.s[...] == -1).all()
    plain = nn.BatchEnsembleLinear(base, rngs=0, num_members=2, use_base_weights=True)
    assert (
        abs(float(plain.s[...].mean()) - 1) < 0.05 and abs(float(plain.s[...].std()) - 0.5) < 0.02
    )
    signs = nn.BatchEnsembleLinear(base, 0, 2, use_base_weights=True, init="random_sign", r_std=9.0)
    assert set(np.unique(signs.r[...])) == {-1.0, 1.0}
    assert abs(float(signs.s[...].mean())) < 0.1


def squares(layer, x):
    return jnp.sum(layer(x) ** 2)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_gradients_for_each_member(kind):
    """Gradients by parameters and inputs agree, closed over or split, with NNX or JAX."""
    layer, x = ALL[kind]()
    p, one = parts(layer), {"linear": dense, "conv": convolved()}[kind]
    want = jax.jit(jax.grad(lambda p, x: jnp.sum(by_member(one, p, x) ** 2), (0, 1)))(p, x)
    names = {"w": "kernel", "r": "r", "s": "s", "b": "bias"}

    def right(state):
        for key, name in names.items():
            close(state[name][...], want[0][key], 1e-4)

    right(nnx.jit(nnx.grad(squares))(layer, x))
    right(nnx.jit(nnx.grad(nnx.remat(squares)))(layer, x))
    graphdef, state = nnx.split(layer)
    right(jax.jit(jax.grad(lambda s: squares(nnx.merge(graphdef, s), x)))(state))
    close(jax.jit(jax.grad(lambda x: squares(layer, x)))(x), want[1], 1e-4)


@pytest.mark.parametrize("kind", ["linear", "conv", "general", "einsum", "embed"])
def test_calls_are_pure(kind):
    """Other libraries' convolutions mutate themselves in a call and fail under `jax.jit`."""
    layer, x = ALL[kind]()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer)))
    own = lambda: {k: v for k, v in vars(layer).items() if not k.startswith("_pytree__")}
    attributes = own()
    want = layer(x)
    close(jax.jit(layer)(x), want)
    close(nnx.jit(lambda m, x: m(x))(layer, x), want)
    close(jax.vmap(layer)(jnp.stack([x, x]))[1], want)
    close(nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(layer, jnp.stack([x, x]))[0], want)
    close(lax.scan(lambda c, x: (c, jax.checkpoint(layer)(x)), None, x[None])[1][0], want)
    after = own()
    assert after.keys() == attributes.keys()
    for name, value in attributes.items():
        assert after[name] is value or after[name] == value, name
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(layer)), before)


def test_threads_may_call_one_layer():
    layer, x = conv(), normal(E * B, 6, 6, 4)
    want, found = layer(x), []
    threads = [threading.Thread(target=lambda: found.append(jax.jit(layer)(x))) for _ in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert len(found) == 4
    for y in found:
        close(y, want)


def test_vmap_over_stacked_layers():
    """Layers can be split, stacked and mapped like any module."""
    layers = [linear() for _ in range(2)]
    for i, layer in enumerate(layers):
        layer.r[...] = normal(E, 5, seed=i)
    graphdef, _ = nnx.split(layers[0])
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(nnx.state(layer) for layer in layers))
    x = normal(E * B, 5)
    got = jax.vmap(lambda state: nnx.merge(graphdef, state)(x))(stacked)
    for y, layer in zip(got, layers, strict=True):
        close(y, by_member(dense, parts(layer), x))


DTYPES = [
    ({"dtype": jnp.bfloat16}, jnp.float32, jnp.bfloat16),
    ({"dtype": jnp.bfloat16}, jnp.bfloat16, jnp.bfloat16),
    ({"param_dtype": jnp.bfloat16}, jnp.bfloat16, jnp.bfloat16),
    ({"param_dtype": jnp.bfloat16}, jnp.float32, jnp.float32),
    ({}, jnp.bfloat16, jnp.float32),
    ({"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32}, jnp.bfloat16, jnp.float32),
    ({"dtype": jnp.float16, "param_dtype": jnp.float16}, jnp.float32, jnp.float16),
]


@pytest.mark.parametrize(("options", "given", "result"), DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["Linear", "Conv", "LinearGeneral", "Einsum"])
def test_bf16_stays_bf16(kind, options, given, result):
    """The result stays bfloat16 as in the base layer; in other libraries it becomes float32."""
    args = {"Linear": (5, 4), "Conv": (5, 4, 3), "LinearGeneral": (5, 4)}.get(
        kind, ("na,ab->nb", (5, 4))
    )
    base = getattr(nnx, kind)(*args, rngs=nnx.Rngs(0), **options)
    x = normal(E * B, *((6,) if kind == "Conv" else ()), 5).astype(given)
    layer = getattr(nn, f"BatchEnsemble{kind}")(base, rngs=1, num_members=E)
    y = jax.jit(layer)(x)
    assert y.dtype == jax.eval_shape(base, x).dtype == result
    assert layer.r.dtype == layer.s.dtype == layer.kernel.dtype == base.param_dtype
    wide = getattr(nnx, kind)(*args, rngs=nnx.Rngs(0))
    exact = set_parts(getattr(nn, f"BatchEnsemble{kind}")(wide, 1, E), parts(layer))
    close(y, jax.jit(exact)(x.astype(jnp.float32)), 0.1)


def test_the_options_of_the_base_layer_are_kept():
    calls = []

    def dot_general(*args, **kwargs):
        calls.append(kwargs)
        return lax.dot_general(*args, **kwargs)

    def promote(arrays, *, dtype):
        inputs, kernel, bias = arrays  # three, as Flax says
        return nnx.nn.dtypes.promote_dtype((inputs, kernel, bias), dtype=dtype)

    base = nnx.Linear(
        5, 4, rngs=nnx.Rngs(0), dot_general=dot_general, promote_dtype=promote,
        precision=lax.Precision.HIGHEST, kernel_metadata={"note": 1}, bias_metadata={"note": 2},
    )  # fmt: skip
    layer = biased(nn.BatchEnsembleLinear(base, rngs=0, num_members=E))
    x = normal(E * B, 5)
    check(layer, dense, x)
    assert calls[0]["precision"] == lax.Precision.HIGHEST
    assert layer.kernel.get_metadata("note") == 1 and layer.bias.get_metadata("note") == 2


def conv(*args, **options):
    base = nnx.Conv(*(args or (4, 6, (3, 3))), rngs=nnx.Rngs(0), **options)
    return biased(nn.BatchEnsembleConv(base, rngs=nnx.Rngs(1), num_members=E))


def convolved(strides=1, padding="SAME", groups=1, lhs=1, rhs=1, mask=None):
    def one(w, b, x):
        n = x.ndim - 2
        spatial = "HWD"[:n]
        numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
        w = w if mask is None else w * mask
        times = lambda k: (k,) * n
        return b + lax.conv_general_dilated(
            x, w, times(strides), padding, times(lhs), times(rhs), numbers, groups
        )

    return jax.jit(one)


CONVS = {
    "1d": ((4, 6, 3), {}, (9, 4), convolved()),
    "2d": ((4, 6, (3, 2)), {}, (5, 6, 4), convolved()),
    "3d": ((4, 6, (2, 2, 2)), {}, (4, 5, 3, 4), convolved()),
    "strides": ((4, 6, (3, 3)), {"strides": 2}, (7, 7, 4), convolved(strides=2)),
    "valid": ((4, 6, (3, 3)), {"padding": "VALID"}, (7, 7, 4), convolved(padding="VALID")),
    "pairs": (
        (4, 6, (3, 3)), {"padding": ((1, 2), (0, 1))}, (7, 7, 4),
        convolved(padding=((1, 2), (0, 1))),
    ),
    "int": ((4, 6, (3, 3)), {"padding": 2}, (7, 7, 4), convolved(padding=((2, 2), (2, 2)))),
    "dilated": ((4, 6, (3, 3)), {"kernel_dilation": 2}, (7, 7, 4), convolved(rhs=2)),
    "input dilated": (
        (4, 6, (3, 3)), {"input_dilation": 2, "padding": 0}, (5, 5, 4),
        convolved(lhs=2, padding=((0, 0), (0, 0))),
    ),
    "no bias": ((4, 6, (3, 3)), {"use_bias": False}, (5, 5, 4), convolved()),
}  # fmt: skip


@pytest.mark.parametrize("case", CONVS)
def test_convolution_for_each_member(case):
    args, options, shape, one = CONVS[case]
    layer, x = conv(*args, **options), normal(E * B, *shape)
    check(layer, one, x)


@pytest.mark.parametrize(("padding", "mode"), [("CIRCULAR", "wrap"), ("REFLECT", "reflect")])
def test_padding_other_than_zero(padding, mode):
    layer, x = conv(4, 6, (3, 3), padding=padding), normal(E * B, 5, 6, 4)
    valid = convolved(padding="VALID")
    wide = lambda x: np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)], mode=mode)
    check(layer, lambda w, b, x: valid(w, b, wide(x)), x)


def test_convolution_with_causal_padding():
    layer, x = conv(4, 6, 3, padding="CAUSAL", kernel_dilation=2), normal(E * B, 8, 4)
    one = convolved(padding=[(4, 0)], rhs=2)
    check(layer, one, x)


@pytest.mark.parametrize("groups", [2, 4])
def test_convolution_with_feature_groups(groups):
    """Every channel has a factor, and the kernel of group g sees only the channels of g."""
    layer, x = conv(4, 8, (3, 3), feature_group_count=groups), normal(E * B, 5, 5, 4)
    p, got = jax.tree.map(np.asarray, parts(layer)), jax.jit(layer)(x)
    per, out = 4 // groups, 8 // groups
    for k in range(E):
        w = np.array(p["w"])
        for g in range(groups):
            r = p["r"][k, g * per : (g + 1) * per]
            s = p["s"][k, g * out : (g + 1) * out]
            w[..., g * out : (g + 1) * out] *= np.outer(r, s)
        rows = slice(k * B, (k + 1) * B)
        close(got[rows], convolved(groups=groups)(jnp.asarray(w), p["b"][k], x[rows]))


def test_convolution_with_a_mask():
    mask = jnp.asarray(np.random.default_rng(0).integers(0, 2, (3, 3, 4, 6)), jnp.float32)
    layer, x = conv(4, 6, (3, 3), mask=mask), normal(E * B, 5, 5, 4)
    check(layer, convolved(mask=mask), x)


def test_conv_with_more_axes_of_rows():
    layer, x = conv(4, 6, 3), normal(E * B, 5, 7, 4)
    check(layer, lambda w, b, x: convolved()(w, b, x.reshape(-1, 7, 4)).reshape(-1, 5, 7, 6), x)


def general(*args, **options):
    base = nnx.LinearGeneral(*args, rngs=nnx.Rngs(0), **options)
    return biased(nn.BatchEnsembleLinearGeneral(base, rngs=nnx.Rngs(1), num_members=E))


@pytest.mark.parametrize(
    ("args", "options", "shape", "equation", "rs"),
    [
        ((5, (2, 3)), {}, (7, 5), "bta,ahd->bthd", "a,hd"),
        (((2, 3), 5), {"axis": (-2, -1)}, (7, 2, 3), "bthd,hda->bta", "hd,a"),
        (((2, 3), 5), {"axis": (-1, -2)}, (7, 2, 3), "bthd,hda->bta", "hd,a"),  # Flax sorts them
        (((3, 3), 5), {"axis": (-1, -2)}, (7, 3, 3), "bthd,hda->bta", "hd,a"),
        (((2, 3), (4, 5)), {"axis": (1, -1)}, (2, 7, 3), "bhtd,hdxy->btxy", "hd,xy"),
        ((5, 4), {"use_bias": False}, (5,), "ba,ac->bc", "a,c"),
        ((2, 4), {"axis": 1}, (2, 7), "bat,ac->btc", "a,c"),
    ],
)
def test_linear_general_for_each_member(args, options, shape, equation, rs):
    layer, x = general(*args, **options), normal(E * B, *shape)
    p = jax.tree.map(np.asarray, parts(layer))
    kernel = equation.partition("->")[0].partition(",")[2]
    got = jax.jit(layer)(x)
    for k, rows in enumerate(np.split(np.asarray(x), E)):
        w = np.einsum(f"{kernel},{rs}->{kernel}", p["w"], p["r"][k], p["s"][k])
        want = np.einsum(equation, rows, w) + (p["b"][k] if "b" in p else 0)
        close(got[k * B : (k + 1) * B], want)


@pytest.mark.parametrize(
    ("equation", "kernel", "bias", "shape", "r", "s"),
    [
        ("nta,hab->nthb", (2, 5, 3), (2, 3), (7, 5), "a", "hb"),
        ("nha,hab->nhb", (2, 5, 3), (2, 3), (2, 5), "ha", "hb"),
        ("...a,ab->...b", (5, 3), (3,), (7, 5), "a", "b"),
        ("...a,ab->...b", (5, 3), None, (5,), "a", "b"),
        ("nta,ab->tnb", (5, 3), (3,), (7, 5), "a", "b"),
        ("n t b a, b a c -> n c t", (4, 5, 3), (3, 1), (7, 4, 5), "ba", "c"),
        ("nab,ba->n", (4, 5), None, (5, 4), "ab", ""),
    ],
)
def test_einsum_for_each_member(equation, kernel, bias, shape, r, s):
    base = nnx.Einsum(equation, kernel, bias, rngs=nnx.Rngs(0))
    layer = biased(nn.BatchEnsembleEinsum(base, rngs=nnx.Rngs(1), num_members=E))
    x, p = normal(E * B, *shape), jax.tree.map(np.asarray, parts(layer))
    equation = equation.replace(" ", "")
    operands, _, result = equation.partition("->")
    letters = operands.partition(",")[2]
    axis = result.replace("...", "n").index("n")
    got = np.split(np.asarray(jax.jit(layer)(x)), E, axis)
    for k, rows in enumerate(np.split(np.asarray(x), E)):
        w = np.einsum(f"{letters},{r},{s}->{letters}", p["w"], p["r"][k], p["s"][k])
        want = np.einsum(equation, rows, w)
        # In Flax a bias has the axes of the kernel that are in the result.
        named = result.replace("...", "." * (want.ndim - len(result.replace("...", ""))))
        on = [n if c in letters else 1 for n, c in zip(want.shape, named, strict=True)]
        close(got[k], want + (p["b"][k].reshape(on) if bias else 0))


def test_einsum_of_the_call():
    base = nnx.Einsum("na,ab->nb", (5, 3), (3,), rngs=nnx.Rngs(0))
    layer = nn.BatchEnsembleEinsum(base, rngs=0, num_members=E)
    x = normal(E * B, 7, 5)
    run = jax.jit(layer, static_argnums=1)
    close(run(x[:, 0], "xa,ab->xb"), run(x[:, 0]))
    close(run(x, "nta,ab->ntb"), by_member(dense, parts(layer), x))


@pytest.mark.parametrize("equation", ["ntba,abc->ntc", "ntab,bac->ntc", "ntab,abc->nct"])
@pytest.mark.parametrize("sizes", [(3, 3, 3), (3, 4, 5)])
def test_einsum_of_the_call_with_another_order_of_axes(equation, sizes):
    """An equation may move the axes of the result, but not exchange those of the factors."""
    base = nnx.Einsum("ntab,abc->ntc", sizes, rngs=nnx.Rngs(0))
    layer = nn.BatchEnsembleEinsum(base, rngs=0, num_members=E)
    x = normal(E * B, 7, *sizes[:2])
    if equation == "ntab,abc->nct":
        close(layer(x, equation), np.swapaxes(layer(x), 1, 2))
        return
    with pytest.raises(ValueError, match="with other axes of the kernel, or another order"):
        layer(x, equation)


def embed(size=10, **options):
    base = nnx.Embed(size, 4, rngs=nnx.Rngs(0), **options)
    return nn.BatchEnsembleEmbed(base, rngs=nnx.Rngs(1), num_members=E)


@pytest.mark.parametrize("shape", [(7,), (1,), (2, 3)])
def test_embed_is_linear_on_one_hot_tokens(shape):
    layer = embed()
    p = jax.tree.map(np.asarray, parts(layer, "embedding"))
    tokens = np.random.default_rng(0).integers(0, 10, (E * B, *shape))
    close(jax.jit(layer)(tokens), by_member(dense, p, np.eye(10)[tokens]))
    query = normal(E * B, *shape, 4)
    want = by_member(lambda w, b, x: x @ w.T, p, np.asarray(query))
    close(jax.jit(layer.attend)(query), want)


def test_tokens_that_are_not_in_the_table():
    """As in the base layer, tokens past the end give NaN, and negative ones count from the end.

    A table with one row gives that row for every token.
    """
    layer = embed()
    got = layer(jnp.tile(jnp.array([[10, -1, 9]]), (E, 1)))
    assert jnp.isnan(got[:, 0]).all()
    close(got[:, 1], got[:, 2])
    one = embed(1)
    close(one(jnp.full((E, 2), 5)), one(jnp.zeros((E, 2), int)))
    close(one(jnp.zeros((E, 1), int))[:, 0], one.embedding[0] * one.r[...] * one.s[...])


def test_embeddings_stay_in_bfloat16():
    layer = embed(dtype=jnp.bfloat16)
    y = layer(jnp.zeros((E, 2), int))
    assert y.dtype == layer.attend(y).dtype == jnp.bfloat16


def test_gradients_of_tied_embeddings():
    layer, tokens = embed(), jnp.arange(E * B * 2).reshape(E * B, 2) % 10
    p = parts(layer, "embedding")

    def by_hand(p):
        x = by_member(dense, p, jax.nn.one_hot(tokens, 10))
        return jnp.sum(by_member(lambda w, b, x: x @ w.T, p, jnp.tanh(x)) ** 2)

    want = jax.jit(jax.grad(by_hand))(p)
    got = nnx.jit(nnx.grad(lambda m: jnp.sum(m.attend(jnp.tanh(m(tokens))) ** 2)))(layer)
    for key, name in {"w": "embedding", "r": "r", "s": "s"}.items():
        close(got[name][...], want[key], 1e-4)


ALL = {
    "linear": lambda: (linear(), normal(E * B, 5)),
    "conv": lambda: (conv(), normal(E * B, 6, 6, 4)),
    "general": lambda: (general(5, (2, 3)), normal(E * B, 5)),
    "einsum": lambda: (
        nn.BatchEnsembleEinsum(nnx.Einsum("na,ab->nb", (5, 4), rngs=nnx.Rngs(0)), 1, E),
        normal(E * B, 5),
    ),
    "embed": lambda: (embed(), jnp.arange(E * B * 2).reshape(E * B, 2)),
}
