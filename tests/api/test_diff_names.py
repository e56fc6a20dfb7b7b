"""`tapax.diff` compares captures with different site names, and arrays of other libraries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tapax._api.renaming import rename_names


class Tensor:
    """A stand-in for a PyTorch tensor, which NumPy reads only after `detach` and `cpu`."""

    def __init__(self, array, dtype=None, steps=()):
        self._array, self._steps = np.asarray(array), steps
        self.dtype = f"torch.{dtype or self._array.dtype}"
        self.shape = self._array.shape

    def _after(self, step):
        return Tensor(self._array, self.dtype.removeprefix("torch."), (*self._steps, step))

    def detach(self):
        return self._after("detach")

    def cpu(self):
        return self._after("cpu")

    def float(self):
        return Tensor(self._array.astype(np.float32), None, self._steps)

    def numpy(self):
        if self._steps != ("detach", "cpu"):
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        if self.dtype in ("torch.bfloat16", "torch.float8_e4m3fn"):
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self._array

    def __array__(self, *args, **kwargs):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


class Quantity:
    """An object that NumPy can convert to an array."""

    def __init__(self, number):
        self.number = number

    def __array__(self, dtype=None, copy=None):
        return np.array([self.number], dtype)


LAYERS = 4


def port(ws, x):
    for i, w in enumerate(ws):
        with tapax.scope(f"GPT/blocks/{i}"):
            x = tapax.sow(jnp.tanh(x @ w), "mlp")
    return jnp.sum(x)


def original(ws, x):
    """Compute the model in NumPy, forward and backward, under the names of PyTorch."""
    values, grads = {}, {}
    for i, w in enumerate(ws):
        x = np.tanh(x @ w)
        values[f"model.layers.{i}.mlp"] = x
    g = np.ones_like(x)
    for i in reversed(range(len(ws))):
        grads[f"model.layers.{i}.mlp"] = g
        g = (g * (1 - values[f"model.layers.{i}.mlp"] ** 2)) @ ws[i].T
    return values, grads


RENAME = [("model.layers.*.mlp", "GPT/blocks/*/mlp")]


@pytest.fixture(scope="module")
def models():
    rng = np.random.default_rng(0)
    ws = rng.normal(size=(LAYERS, 6, 6)).astype(np.float32) / 2
    x = rng.normal(size=(3, 6)).astype(np.float32)
    return ws, x, tapax.capture(jax.jit(jax.grad(port)))(jnp.asarray(ws), jnp.asarray(x))[1]


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray, Tensor])
def test_a_port_is_compared_with_its_original(models, make):
    ws, x, taps = models
    values, grads = original(ws, x)
    theirs = {name: make(value) for name, value in values.items()}
    assert tapax.diff(taps, theirs, RENAME, rtol=1e-4).equal
    both = theirs, {name: make(grad) for name, grad in grads.items()}
    difference = tapax.diff(taps, both, RENAME, rtol=1e-4)
    assert difference.equal and len(difference.grads) == LAYERS


@pytest.mark.parametrize("swap", [False, True])
def test_a_wrong_layer_of_a_port_is_found(models, swap):
    ws, x, taps = models
    wrong = ws.copy()
    wrong[2, 1, 1] += 0.5
    values, grads = original(wrong, x)
    theirs = ({n: Tensor(v) for n, v in values.items()}, {n: Tensor(g) for n, g in grads.items()})
    if swap:
        names = [("GPT/blocks/*/mlp", "model.layers.*.mlp")]
        difference = tapax.diff(theirs, taps, names, rtol=1e-3)
    else:
        difference = tapax.diff(taps, theirs, RENAME, rtol=1e-3)
    pair = ("GPT/blocks/2/mlp", "model.layers.2.mlp")
    first = difference.first
    assert (first.name, first.other_name) == (pair[::-1] if swap else pair)
    # Gradients of the last layer are ones; the next depends on the values of the last.
    assert difference.first_grad.name.endswith(("blocks/2/mlp", "layers.2.mlp"))
    expected = "model.layers.{}.mlp" if swap else "GPT/blocks/{}/mlp"
    assert list(difference.values) == [expected.format(i) for i in range(LAYERS)]


def test_taps_give_the_order_of_a_shuffled_dict(models):
    ws, x, taps = models
    values, _ = original(ws, x)
    shuffled = {name: Tensor(values[name]) for name in sorted(values, reverse=True)}
    names = [("GPT/blocks/*/mlp", "model.layers.*.mlp")]
    assert list(tapax.diff(shuffled, taps, names).values) == sorted(values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_tensors_of_types_that_numpy_lacks_keep_them(dtype):
    x = jnp.array([1.0, 1.25, 3.0], dtype)
    _, taps = tapax.capture(lambda x: tapax.sow(x, "h"))(x)
    theirs = Tensor(np.asarray(x).astype(np.float64), dtype)
    found = tapax.diff(taps, {"h": theirs}).values["h"]
    assert found.is_identical and found.types == (f"{dtype}[3]", f"{dtype}[3]")


def test_anything_that_numpy_reads_is_compared():
    difference = tapax.diff(
        {"a": Quantity(1.5), "b": [1, 2], "c": 3.0, "d": np.float32(2)},
        {"a": np.array([1.5]), "b": np.array([1, 2]), "c": 3.0, "d": Tensor(np.float32(2))},
    )
    assert difference.equal and len(difference.values) == 4


NAMES = ["net/layers/0/up", "net/layers/1/up", "net/layers/1/up@2", "net/out:w", "net"]


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        (None, NAMES),
        ({}, NAMES),
        ({"net": "model"}, [*NAMES[:4], "model"]),
        ({"net/**": "model/**"}, [name.replace("net", "model") for name in NAMES]),
        ({"**": "old/**"}, [f"old/{name}" for name in NAMES]),
        (
            [("net/layers/*/up", "net/up/*")],
            ["net/up/0", "net/up/1", "net/up/1@2", *NAMES[3:]],
        ),
        ([("net/*/?/*", "*.?.*")], ["layers.0.up", "layers.1.up", "layers.1.up@2", *NAMES[3:]]),
        ({"net/layers/1/up@2": "second"}, [*NAMES[:2], "second", *NAMES[3:]]),
        ({"net/out": "head"}, [*NAMES[:3], "head:w", "net"]),
        ({"net/out:w": "head"}, [*NAMES[:3], "head", "net"]),
        ({"**/up": "**/down"}, [n.replace("up", "down") for n in NAMES]),
        (
            [("net/layers/0/up", "x"), ("net/**", "y/**")],
            ["x", "y/layers/1/up", "y/layers/1/up@2", "y/out:w", "y"],
        ),
        (lambda name: name.upper(), [name.upper() for name in NAMES]),
        ({"net": "model"}.get, [*NAMES[:4], "model"]),
    ],
)  # fmt: skip
def test_names_are_given_by_dicts_functions_and_globs(rename, expected):
    assert list(rename_names(NAMES, rename).values()) == expected


def test_dots_separate_the_segments_of_other_libraries():
    names = ["model.layers.0.mlp", "model.layers.0.attn.mlp", "model.layers.10.mlp"]
    found = rename_names(names, [("model.layers.*.mlp", "GPT/*/mlp")])
    assert list(found.values()) == ["GPT/0/mlp", names[1], "GPT/10/mlp"]
    deep = rename_names(names, [("model.layers.**.mlp", "GPT/**/mlp")])
    assert list(deep.values()) == ["GPT/0/mlp", "GPT/0.attn/mlp", "GPT/10/mlp"]


@pytest.mark.parametrize(
    ("rename", "error", "message"),
    [
        ({"net/*": "x"}, ValueError, "1 wildcards in the first and 0 in the second"),
        ([("a", "b", "c")], TypeError, "`rename` must contain pairs of strings, from `b` to `a`"),
        ({"a": 3}, TypeError, "`rename` must contain pairs of strings"),
        (3, TypeError, "`rename` must be a dict, a function of a name, or pairs of globs, but is"),
        ("net", TypeError, "`rename` must be a dict, a function of a name, or pairs of globs"),
        (
            lambda name: 3,
            TypeError,
            "`rename` must return a name for 'net/layers/0/up', but returned 3",
        ),
        ({"net/layerz/0/up": "x"}, tapax.SiteError, "matches no site of `b`.*nearest names are"),
        (lambda name: "x", tapax.SiteError, "gives two sites of `b` the name 'x': 'net/layers/0"),
        ({"net/out:w": "net"}, tapax.SiteError, "the name 'net': 'net/out:w' and 'net'. Give"),
    ],
)
def test_names_that_cannot_be_given_raise(rename, error, message):
    with pytest.raises(error, match=message):
        rename_names(NAMES, rename)


def test_two_sites_of_one_name_raise_in_a_difference(models):
    _, _, taps = models
    with pytest.raises(tapax.SiteError, match="gives two sites of `b` the name 'h'"):
        tapax.diff(taps, taps, rename=lambda name: "h")
