"""`find_nonfinite` on programs that raise at a bad value, or for another reason."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapax.nonfinite._search import find_nonfinite

X = jnp.array([1.0, 2.0, -1.0])


def checked(x):
    y = jnp.log(x)
    return jnp.sum(eqx.error_if(y, jnp.any(jnp.isnan(y)), "there is a NaN"))


def looped(x):
    return lax.scan(lambda c, x: (c + checked(x), None), 0.0, x[:, None])[0]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, eqx.filter_jit])
def test_a_program_that_raises_at_a_nan_has_a_finding(wrap):
    found = find_nonfinite(wrap(checked))(X)
    assert (found.operation, found.kind, found.index) == ("log", "nan", (2,))
    assert find_nonfinite(wrap(checked))(jnp.abs(X)) is None


def test_a_loop_and_a_map_that_raise_at_a_nan_have_a_finding():
    found = find_nonfinite(looped)(X)
    assert (found.operation, found.iterations) == ("log", (2,))
    found = find_nonfinite(jax.vmap(checked))(X[:, None])
    assert (found.operation, found.mapped) == ("log", (2,))


def test_a_program_that_raises_before_any_bad_value_raises():
    def unlike(x):
        x = eqx.error_if(x, x[0] > 0, "the first is positive")
        return jnp.sum(jnp.log(x))

    with pytest.raises(Exception, match="the first is positive"):
        find_nonfinite(unlike)(X)

    def counted(n):
        n = eqx.error_if(n, n > 3, "too many")
        return 1.0 / (n - 5)

    with pytest.raises(Exception, match="too many"):
        find_nonfinite(counted)(jnp.int32(5))


def test_callbacks_that_work_are_called_as_before():
    double = lambda x: jax.pure_callback(lambda x: 2 * np.asarray(x), jax.typeof(x), x)
    found = find_nonfinite(lambda x: jnp.sum(jnp.log(double(x) - 4)))(jnp.array([3.0, 1.0]))
    assert (found.operation, found.index) == ("log", (1,))
    assert [r.min for r in found.operands] == [-2.0]


@pytest.mark.parametrize("setting", [jax.debug_nans, jax.debug_infs])
def test_settings_that_raise_at_a_bad_value_do_not_hide_it(setting):
    with setting(True):
        found = find_nonfinite(lambda x: jnp.sum(jnp.log(x) / 0.0))(X)
    assert found.operation == "log"
