"""The `linear_solve` primitive of lineax, whose operators hold user code."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import tapax
from tests.oracles.closeness import assert_close

A = np.array([[3.0, 1.0], [1.0, 2.0]], np.float32)
B = np.array([1.0, -1.0], np.float32)


def by_matrix(a, b):
    operator = lx.MatrixLinearOperator(tapax.sow(1.5 * a, "a"))
    x = lx.linear_solve(operator, tapax.sow(2 * b, "b")).value
    return jnp.sum(tapax.sow(x, "x") ** 2)


def by_function(a, b):
    apply = lambda v: tapax.sow(1.5 * a @ v, "product")
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    operator = lx.FunctionLinearOperator(apply, shape, tags=lx.positive_semidefinite_tag)
    solver = lx.CG(rtol=1e-6, atol=1e-6)
    x = lx.linear_solve(operator, tapax.sow(2 * b, "b"), solver=solver).value
    return jnp.sum(tapax.sow(x, "x") ** 2)


X = np.linalg.solve(1.5 * A, 2 * B)
BY_B = np.linalg.solve(1.5 * A, 2 * X)
"""The gradient by the right-hand side, and by the matrix its product with -x."""
SOLVES = [by_matrix, by_function]
pytestmark = pytest.mark.filterwarnings("ignore:The site '.*' is not captured")


@pytest.mark.parametrize("solve", SOLVES)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_values_around_a_solve_are_captured(solve, wrap):
    out, taps = tapax.capture(wrap(solve))(A, B)
    assert_close(out, np.sum(X**2), 1e-4)
    assert_close(taps.values["x"], X, 1e-4)
    assert_close(taps.values["b"], 2 * B)


def test_operators_and_solvers_are_not_sites():
    assert tapax.sites(by_matrix)(A, B).names == ["a", "b", "x"]


@pytest.mark.parametrize("solve", SOLVES)
def test_gradients_around_a_solve_are_those_of_numpy(solve):
    grads, taps = tapax.capture(jax.grad(solve, (0, 1)))(A, B)
    assert_close(taps.grads["b"], BY_B, 1e-4)
    assert_close(grads[0], -1.5 * np.outer(BY_B, X), 1e-4)
    assert_close(grads[1], 2 * BY_B, 1e-4)
    assert_close(tapax.grad(solve)(A, B)["b"], BY_B, 1e-4)


@pytest.mark.parametrize("solve", SOLVES)
def test_edits_around_a_solve_are_differentiated(solve):
    tripled = tapax.edit(solve, values={"b": lambda b: 3 * b})
    assert_close(tripled(A, B), 9 * np.sum(X**2), 1e-4)
    assert_close(jax.grad(tripled)(A, B), -9 * 1.5 * np.outer(BY_B, X), 1e-4)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_values_inside_an_operator_warn(wrap):
    lost = "'product' is not captured: .* inside a call of 'linear_solve', which is opaque"
    with pytest.warns(UserWarning, match=lost):
        tapax.capture(wrap(by_function))(A, B)
    for change in (
        lambda: tapax.edit(by_function, values={"product": lambda v: 2 * v})(A, B),
        lambda: tapax.grad(by_function, "product")(A, B),
    ):
        with pytest.raises(tapax.SiteError, match=r"'product' cannot be captured: .* is opaque"):
            change()
    mapped = jax.vmap(tapax.capture(by_function, values="x"), (None, 0))
    rows = np.stack([B, 2 * B])
    with pytest.warns(UserWarning, match=lost):
        assert_close(mapped(A, rows)[1].values["x"], np.stack([X, 2 * X]), 1e-4)


def test_the_first_nan_before_a_solve_is_found():
    found = tapax.find_nonfinite(lambda a, b: by_matrix(a, jnp.log(b)))(A, B)
    assert (found.operation, found.index) == ("log", (1,))
    found = tapax.find_nonfinite(by_matrix)(A, np.array([np.nan, 1.0], np.float32))
    assert (found.operation, found.path) == ("argument", "b")
