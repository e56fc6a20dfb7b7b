"""Iterative solvers of optimistix with implicit derivatives, on lineax."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

import tapax
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:The site '.*' is not captured")

A = np.array([[0.3, 0.1], [0.1, 0.2]], np.float32)
TOLERANCES = {"rtol": 1e-5, "atol": 1e-5}
START = np.zeros(2, np.float32)


def root(a, solver=None, adjoint=None):
    """Find the y for which `tanh(a y) + y = 1`."""
    fn = lambda y, a: tapax.sow(jnp.tanh(a @ y), "f") + y - 1.0
    solver = solver or optx.Newton(**TOLERANCES)
    adjoint = adjoint or optx.ImplicitAdjoint()
    return optx.root_find(fn, solver, START, args=a, adjoint=adjoint).value


def minimum(a):
    """Find the y that minimises `|a y - 1|^2 + |y|^2`."""
    fn = lambda y, a: jnp.sum((tapax.sow(a @ y, "f") - 1) ** 2) + jnp.sum(y**2)
    return optx.minimise(fn, optx.BFGS(**TOLERANCES), START, args=a).value


def least_squares(a):
    fn = lambda y, a: jnp.concatenate([tapax.sow(a @ y, "f") - 1, y])
    solver = optx.LevenbergMarquardt(**TOLERANCES)
    return optx.least_squares(fn, solver, START, args=a).value


def fixed_point(a):
    """Find the y for which `y = 1 - tanh(a y)`."""
    fn = lambda y, a: 1.0 - tapax.sow(jnp.tanh(a @ y), "f")
    return optx.fixed_point(fn, optx.FixedPointIteration(**TOLERANCES), START, args=a).value


def root_by_hand(a):
    """Run Newton's method unrolled, so that JAX differentiates every step."""
    y = jnp.zeros(2)
    residual = lambda y: jnp.tanh(a @ y) + y - 1.0
    for _ in range(8):
        y = y - jnp.linalg.solve(jax.jacfwd(residual)(y), residual(y))
    return y


def minimum_by_hand(a):
    return jnp.linalg.solve(a.T @ a + jnp.eye(2), a.T @ jnp.ones(2))


SOLVERS = {
    "root": (root, root_by_hand),
    "direct": (lambda a: root(a, adjoint=optx.RecursiveCheckpointAdjoint()), root_by_hand),
    "minimum": (minimum, minimum_by_hand),
    "least squares": (least_squares, minimum_by_hand),
    "fixed point": (fixed_point, root_by_hand),
}


@pytest.fixture(params=SOLVERS)
def solver(request):
    solve, by_hand = SOLVERS[request.param]
    loss = lambda a: jnp.sum(tapax.sow(solve(a), "y") ** 2)
    return loss, by_hand


def test_solutions_and_their_gradients_agree_with_a_solver_by_hand(solver):
    loss, by_hand = solver
    grad, taps = tapax.capture(jax.grad(loss))(A)
    y = by_hand(A)
    assert_close(taps.values["y"], y, 1e-3)
    assert_close(taps.grads["y"], 2 * y, 1e-3)
    assert_close(grad, jax.grad(lambda a: jnp.sum(by_hand(a) ** 2))(A), 1e-3)
    assert_close(tapax.grad(loss, "y")(A)["y"], 2 * y, 1e-3)


def test_values_inside_the_iteration_are_captured(solver):
    loss, by_hand = solver
    _, taps = tapax.capture(loss, values="**/f*")(A)
    y = by_hand(A)
    expected = A @ y if "minim" in by_hand.__name__ else jnp.tanh(A @ y)
    last = [value for name, value in taps.values.items() if name not in taps.valid or value.any()]
    assert any(np.allclose(value, expected, atol=1e-3) for value in last)


def test_edits_of_a_solution_are_differentiated(solver):
    loss, _ = solver
    tripled = tapax.edit(loss, values={"y": lambda y: 3 * y})
    assert_close(jax.grad(tripled)(A), 9 * jax.grad(loss)(A), 1e-4)


def test_the_first_nan_of_a_solver_that_raises_is_found(solver):
    loss, _ = solver
    found = tapax.find_nonfinite(lambda a: loss(jnp.log(a - 0.15)))(A)
    assert (found.operation, found.index) == ("log", (0, 1))


class Cell(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, y, x):
        return jnp.tanh(self.linear(y)) + x


class Equilibrium(eqx.Module):
    cell: Cell

    def __call__(self, x):
        solve = optx.Newton(**TOLERANCES)
        fn = lambda y, args: args[0](y, args[1]) - y
        return optx.root_find(fn, solve, jnp.zeros(2), args=(self.cell, x)).value


def test_modules_that_a_solver_runs_are_named_from_the_users_root():
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    model = Equilibrium(Cell(eqx.tree_at(lambda m: m.weight, linear, A)))
    step = eqx.filter_grad(lambda model, x: jnp.sum(model(x) ** 2))
    _, taps = tapax.capture(step)(model, jnp.ones(2))
    names = {"Equilibrium", "Equilibrium/cell", "Equilibrium/cell/linear"}
    assert {name.partition("@")[0] for name in taps.values} == names
    # The solution is a fixed point of the cell.
    assert_close(taps.values["Equilibrium"], model.cell(taps.values["Equilibrium"], 1.0), 1e-3)
