"""Seeds and keys of BatchEnsemble layers, and errors for bad arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tapax import nn
from tests.nn.test_nn_layers import ALL, E, close, embed, general

pytestmark = pytest.mark.once


KINDS = {
    "Linear": lambda rngs: nnx.Linear(5, 4, rngs=rngs),
    "Conv": lambda rngs: nnx.Conv(5, 4, 3, rngs=rngs),
    "LinearGeneral": lambda rngs: nnx.LinearGeneral(5, (2, 2), rngs=rngs),
    "Einsum": lambda rngs: nnx.Einsum("na,ab->nb", (5, 4), rngs=rngs),
    "Embed": lambda rngs: nnx.Embed(5, 4, rngs=rngs),
}
SEEDS = {
    "int": lambda: 7,
    "numpy": lambda: np.int64(7),
    "array": lambda: jnp.array(7),
    "key": lambda: jax.random.key(7),
    "raw key": lambda: jax.random.PRNGKey(7),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_seed_for_many_layers(kind, seed):
    """Equal layers with the same integer seed once had identical factors."""
    make = lambda base: getattr(nn, f"BatchEnsemble{kind}")(base, SEEDS[seed](), 4)
    first, second = (KINDS[kind](nnx.Rngs(i)) for i in (0, 1))
    a, b, again = make(first), make(second), make(first)
    weight = "embedding" if kind == "Embed" else "kernel"
    for name in ("r", "s", weight):
        x, y, z = (np.asarray(getattr(layer, name)[...]) for layer in (a, b, again))
        assert not np.isclose(x, y).any()
        np.testing.assert_array_equal(x, z)
    assert len(np.unique(a.r[...])) == a.r.size
    assert not set(np.unique(a.r[...])) & set(np.unique(a.s[...]))


def test_factors_come_from_the_streams_of_flax():
    base = nnx.Linear(5, 4, rngs=nnx.Rngs(0))
    made = lambda rngs: np.asarray(nn.BatchEnsembleLinear(base, rngs, 2).r[...])
    rngs = nnx.Rngs(3)
    first, second = made(rngs), made(rngs)
    assert not np.isclose(first, second).any()
    np.testing.assert_array_equal(first, made(nnx.Rngs(3)))
    np.testing.assert_array_equal(first, made(nnx.Rngs(params=jax.random.key(3))))
    np.testing.assert_array_equal(made(nnx.Rngs(3).params), first)


def test_a_layer_made_under_jit():
    def make(seed):
        base = nnx.Linear(5, 4, rngs=nnx.Rngs(0))
        return nnx.state(nn.BatchEnsembleLinear(base, seed, num_members=E))

    jax.tree.map(close, jax.jit(make)(jnp.array(3)), make(3))
    shapes = nnx.eval_shape(
        lambda: nn.BatchEnsembleLinear(nnx.Linear(5, 4, rngs=nnx.Rngs(0)), 0, E)
    )
    assert shapes.r.shape == (E, 5)


BASE = nnx.Linear(5, 4, rngs=nnx.Rngs(0))
ARGUMENTS = {
    "zero members": ({"num_members": 0}, ValueError, "`num_members` must be 1 or more, but is 0."),
    "negative members": ({"num_members": -2}, ValueError, "must be 1 or more, but is -2."),
    "half a member": (
        {"num_members": 2.5}, TypeError,
        "`num_members` must be an integer, but is 2.5 of type float.",
    ),
    "members that are true": ({"num_members": True}, TypeError, "but is True of type bool"),
    "a negative deviation of r": (
        {"r_std": -1}, ValueError,
        "`r_std` is a standard deviation and cannot be negative, but is -1.",
    ),
    "a negative deviation of s": ({"s_std": -0.5}, ValueError, "`s_std` is .* but is -0.5"),
    "a mean that is not a number": (
        {"r_mean": "1"}, TypeError, "`r_mean` must be a finite number, but is '1' of type str.",
    ),
    "a deviation that is not a number": ({"s_std": np.nan}, TypeError, "`s_std` must be a finite"),
    "an unknown init": (
        {"init": "uniform"}, ValueError,
        "`init` must be 'normal' or 'random_sign', but is 'uniform'.",
    ),
    "another layer": (
        {"base_layer": nnx.Conv(5, 4, 3, rngs=nnx.Rngs(0))}, TypeError,
        "`base_layer` of BatchEnsembleLinear must be a plain nnx.Linear, but is of type flax.Conv.",
    ),
    "no layer": ({"base_layer": 3}, TypeError, "but is of type builtins.int."),
    "a layer of layers": (
        {"base_layer": nnx.LoRALinear(5, 4, lora_rank=2, rngs=nnx.Rngs(0))}, TypeError,
        "of type flax.LoRALinear, which overrides __call__",
    ),
    "an ensemble": (
        {"base_layer": nn.BatchEnsembleLinear(BASE, 0, 2)}, TypeError, "which has members already",
    ),
    "other rngs": (
        {"rngs": "0"}, TypeError,
        "`rngs` must be an nnx.Rngs, an nnx.RngStream, an integer or one random key, but is '0'",
    ),
    "true as rngs": ({"rngs": True}, TypeError, "but is True of type bool"),
    "several keys": ({"rngs": jax.random.split(jax.random.key(0), 3)}, TypeError, "one random key"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_bad_arguments_of_a_layer(case):
    given, error, message = ARGUMENTS[case]
    with pytest.raises(error, match=message):
        nn.BatchEnsembleLinear(**{"base_layer": BASE, "rngs": 0, "num_members": 2} | given)


INPUTS = {
    "a batch that the members do not divide": (
        "linear", (7, 5),
        r"`inputs` of BatchEnsembleLinear has the shape \[7, 5\], 7 rows, but the number of rows "
        "must be a multiple of num_members=3",
    ),
    "another width": (
        "linear", (6, 4),
        r"`inputs` of BatchEnsembleLinear has the shape \[6, 4\], but must have 5 features "
        "along axis 1.",
    ),
    "no rows": ("linear", (5,), r"has the shape \[5\], but must have 5 features along axis 1"),
    "a number": ("linear", (), r"has the shape \[\]"),
    "no rows of images": ("conv", (6, 6, 4), "an axis of rows, 2 spatial axes and one of channels"),
    "other channels": ("conv", (6, 6, 6, 3), "but must have 4 channels along axis 3"),
    "images that the members do not divide": ("conv", (4, 6, 6, 4), "4 rows, but the number"),
    "another width of several": ("general", (6, 4), "but must have 5 features along axis 1"),
    "another width of an einsum": ("einsum", (6, 4), "but must have 5 features along axis 1"),
    "more axes than letters": ("einsum", (6, 2, 5), "has 3 axes, but the equation is 'na,ab->nb'"),
}  # fmt: skip


@pytest.mark.parametrize("case", INPUTS)
@pytest.mark.parametrize("compiled", [False, True])
def test_bad_inputs_of_a_layer(case, compiled):
    kind, shape, message = INPUTS[case]
    layer = ALL[kind]()[0]
    with pytest.raises(ValueError, match=message):
        (jax.jit(layer) if compiled else layer)(jnp.ones(shape))


def test_bad_tokens_of_an_embedding():
    layer = embed()
    with pytest.raises(TypeError, match="must be integer tokens, but has the dtype float32"):
        layer(jnp.ones((E, 2), jnp.float32))
    with pytest.raises(
        ValueError, match=r"the shape \[4, 2\], 4 rows, but the number of rows must be"
    ):
        layer(jnp.ones((4, 2), int))
    with pytest.raises(ValueError, match="but must have 4 features along axis 1"):
        layer.attend(jnp.ones((E, 3)))


def test_positions_are_not_rows():
    """Dividing an embedding of positions would give every member other positions."""
    with pytest.raises(ValueError, match="positions that all rows share"):
        embed()(jnp.arange(2 * E))


@pytest.mark.parametrize(
    "equation", ["na,nab->nb", "na,ab->b", "a,ab->b", "na,...b->nb", "nna,ab->nb"]
)
def test_equations_without_an_axis_of_rows_are_refused(equation):
    kernel = (2,) * len(equation.partition("->")[0].partition(",")[2].replace("...", ""))
    base = nnx.Einsum(equation, kernel, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.zeros)
    with pytest.raises(ValueError, match="BatchEnsembleEinsum cannot take the equation"):
        nn.BatchEnsembleEinsum(base, 0, 2)


def test_general_layers_with_a_weight_for_each_row():
    base = nnx.LinearGeneral(5, 4, batch_axis={0: 6}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"must have no batch_axis, but has \{0: 6\}"):
        nn.BatchEnsembleLinearGeneral(base, 0, 2)
    with pytest.raises(ValueError, match="the first axis must contain the rows of the members"):
        general(E, 4, axis=0)(jnp.ones((E, 5)))
