"""Keywords of the function may have the names of arguments of the methods."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tapax import attribute
from tests.oracles.closeness import assert_close


def gated(x, *, key=None, axis=1.0, value=1.0, train=True):
    h = tapax.sow(x * value, "h")
    keep = jnp.ones(2) if key is None else jax.random.bernoulli(key, 0.5, (2,))
    return axis * h * keep + (0.0 if train else 1.0)


def total(x, **keywords):
    return gated(x, **keywords).sum()


KEYWORDS = {"key": jax.random.key(3), "axis": 3.0, "value": 2.0, "train": False}
ROWS = np.array([[1.0, 2.0], [3.0, 5.0]], np.float32)
KEEP = np.asarray(jax.random.bernoulli(KEYWORDS["key"], 0.5, (2,)), np.float32)
H = 2 * ROWS
SLOPE = 3 * np.ones((2, 2)) * KEEP

METHODS = {
    "ablate by mean": (
        lambda: attribute.ablate(gated, "h", "mean"),
        3 * np.tile(H.mean(0), (2, 1)) * KEEP + 1,
    ),
    "ablate": (lambda: attribute.ablate(gated, "h"), np.ones((2, 2))),
    "steer": (
        lambda: attribute.steer(gated, {"h": jnp.array([1.0, 2.0])}),
        3 * (H + np.array([1.0, 2.0])) * KEEP + 1,
    ),
    "logit_lens": (lambda: attribute.logit_lens(gated, "h"), (3 * H * KEEP + 1)[None]),
    "direct_logit_attribution": (
        lambda: attribute.direct_logit_attribution(gated, "h", "h"),
        (3 * H * KEEP)[None],
    ),
    "saliency": (lambda: attribute.saliency(total, "h"), SLOPE),
    "saliency of an argument": (lambda: attribute.saliency(total), 2 * SLOPE),
    "integrated_gradients": (lambda: attribute.integrated_gradients(total, "h"), SLOPE * H),
    "integrated_gradients of an argument": (
        lambda: attribute.integrated_gradients(total),
        SLOPE * H,
    ),
    "grad_cam": (
        lambda: attribute.grad_cam(total, "h", axis=(0,), channel=1),
        np.maximum(H @ SLOPE.mean(0), 0),
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_passes_keywords_to_the_function(method):
    make, expected = METHODS[method]
    assert_close(make()(ROWS, **KEYWORDS), expected)
