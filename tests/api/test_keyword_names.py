"""Keywords of a function may have the names of arguments of tapax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tests.oracles.closeness import assert_close

X = np.array([1.0, -2.0], np.float32)
KEYWORDS = {"value": 2.0, "perturbations": 3.0, "fn": 4.0, "self": 5.0, "args": 6.0}


def scaled(x, *, value, perturbations, fn, self, args):
    return jnp.sum(perturbations * fn * self * args * tapax.sow(value * x, "h"))


FACTOR = 3.0 * 4.0 * 5.0 * 6.0

CALLS = {
    "capture": (lambda: tapax.capture(scaled)(X, **KEYWORDS)[0], 2 * FACTOR * X.sum()),
    "capture of a jitted function": (
        lambda: tapax.capture(jax.jit(scaled))(X, **KEYWORDS)[0],
        2 * FACTOR * X.sum(),
    ),
    "edit": (lambda: tapax.edit(scaled, values={"h": 1.0})(X, **KEYWORDS), 2 * FACTOR),
    "prefix": (lambda: tapax.prefix(scaled, "h")(X, **KEYWORDS), 2 * X),
    "suffix": (lambda: tapax.suffix(scaled, "h")(X, X, **KEYWORDS), FACTOR * X.sum()),
    "perturbations": (lambda: tapax.perturbations(scaled)(X, **KEYWORDS)["h"], 0 * X),
    "perturbed": (lambda: tapax.perturbed(scaled)({"h": X}, X, **KEYWORDS), 3 * FACTOR * X.sum()),
    "grad": (lambda: tapax.grad(scaled)(X, **KEYWORDS)["h"], np.full(2, FACTOR)),
    "jacobian": (lambda: tapax.jacobian(scaled, None, "h")(X, **KEYWORDS), np.full(2, FACTOR)),
    "sites": (lambda: np.array(tapax.sites(scaled)(X, **KEYWORDS)["h"].shape), np.array([2])),
    "residuals": (
        lambda: np.array(len(tapax.residuals(scaled)(X, **KEYWORDS).arguments) > 0),
        np.array(True),
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_passes_keywords_to_the_function(call):
    run, expected = CALLS[call]
    assert_close(run(), expected)
