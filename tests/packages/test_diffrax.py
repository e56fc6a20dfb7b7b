"""diffrax: neural differential equations under its adjoints, with fixed and adaptive steps."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import tapax
from tests.oracles.closeness import assert_close

Y0 = jnp.array([1.0, -0.5])
FIXED, ADAPTIVE = diffrax.ConstantStepSize(), diffrax.PIDController(rtol=1e-3, atol=1e-6)
ADJOINTS = {
    "checkpointed": diffrax.RecursiveCheckpointAdjoint(),
    "direct": diffrax.DirectAdjoint(),
    "backsolve": diffrax.BacksolveAdjoint(),
}


class Field(eqx.Module):
    mlp: eqx.nn.MLP

    def __call__(self, t, y, args):
        return self.mlp(y)


def field():
    return Field(eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)))


def loss(field, y0, controller=FIXED, adjoint="checkpointed", solver=None):
    term, solver = diffrax.ODETerm(field), solver or diffrax.Euler()
    solution = diffrax.diffeqsolve(
        term, solver, 0.0, 0.4, 0.1, y0,
        stepsize_controller=controller, adjoint=ADJOINTS[adjoint], max_steps=16,
    )  # fmt: skip
    return jnp.sum(tapax.sow(solution.ys, "ys") ** 2)


def by_hand(field, y0, scale=1.0):
    """Four steps of Euler's method."""
    for _ in range(4):
        y0 = y0 + 0.1 * field(None, y0, None)
    return jnp.sum((scale * y0) ** 2)


def arrays(tree):
    return eqx.filter(tree, eqx.is_inexact_array)


@pytest.mark.parametrize("adjoint", ["checkpointed", "direct"])
def test_train_steps_agree_with_euler_by_hand(adjoint):
    step = eqx.filter_value_and_grad(lambda field, y0: loss(field, y0, adjoint=adjoint))
    (value, grads), taps = tapax.capture(step)(field(), Y0)
    expected = eqx.filter_value_and_grad(by_hand)(field(), Y0)
    assert_close(value, expected[0], 1e-4)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-3), arrays(grads), arrays(expected[1]))
    assert_close(taps.grads["ys"], 2 * taps.values["ys"], 1e-5)


@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("controller", [FIXED, ADAPTIVE])
def test_a_captured_step_returns_what_the_step_does(adjoint, controller):
    solver = diffrax.Tsit5()
    run = lambda field, y0: loss(field, y0, controller, adjoint, solver)
    step = eqx.filter_value_and_grad(run)
    (value, grads), taps = tapax.capture(step, values="ys", grads="ys")(field(), Y0)
    plain = step(field(), Y0)
    assert_close(value, plain[0], 1e-5)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), arrays(grads), arrays(plain[1]))
    assert_close(taps.grads["ys"], 2 * taps.values["ys"], 1e-5)


@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_gradients_by_values_outside_of_the_solve(adjoint):
    run = lambda field, y0: loss(field, tapax.sow(y0, "start"), adjoint=adjoint)
    grads = tapax.grad(run, ["start", "ys"])(field(), Y0)
    tolerance = 0.3 if adjoint == "backsolve" else 1e-3  # it solves another equation backward
    assert_close(grads["start"], jax.grad(by_hand, 1)(field(), Y0), tolerance)
    edited = tapax.edit(run, values={"ys": lambda y: 3 * y})
    expected = jax.grad(lambda y: by_hand(field(), y, 3.0))(Y0)
    assert_close(jax.grad(lambda y: edited(field(), y))(Y0), expected, tolerance)


def test_the_default_selection_has_what_has_a_gradient():
    grads = tapax.grad(loss)(field(), Y0)
    assert "ys" in grads
    assert not any("vector_field" in name for name in grads)
    with pytest.raises(tapax.SiteError, match="There is no derivative by any site that at="):
        tapax.grad(loss, "**/vector_field/**")(field(), Y0)


def test_edits_inside_the_solve_change_the_result_or_are_refused():
    halved = {"**/vector_field": lambda v: 0.5 * v}
    half = lambda field: lambda t, y, args: 0.5 * field(t, y, args)
    assert_close(tapax.edit(loss, values=halved)(field(), Y0), by_hand(half(field()), Y0), 1e-4)
    step = lambda y: jax.grad(lambda y: loss(field(), y))(y)
    expected = jax.grad(lambda y: by_hand(half(field()), y))(Y0)
    assert_close(tapax.edit(step, values=halved)(Y0), expected, 1e-3)
    with pytest.raises(tapax.SiteError, match="edited inside a function with a derivative rule"):
        jax.grad(lambda y: tapax.edit(loss, values=halved)(field(), y))(Y0)


@pytest.mark.parametrize("controller", [FIXED, ADAPTIVE])
@pytest.mark.parametrize("how", ["value", "gradient", "mapped", "mapped gradient"])
def test_the_first_nan_of_a_solve_is_found(controller, how):
    bad = Field(eqx.nn.Lambda(lambda y: jnp.log(y - 0.99) * y))
    one = lambda y: loss(bad, y, controller, solver=diffrax.Tsit5())
    run = one if "mapped" not in how else lambda ys: jnp.sum(jax.vmap(one)(ys))
    run = jax.grad(run) if "gradient" in how else run
    start = jnp.ones((3, 2) if "mapped" in how else 2)
    found = tapax.find_nonfinite(run)(start)
    assert (found.operation, found.kind) == ("log", "nan")
    assert found.path.endswith("vector_field/mlp")
