"""Neural differential equations under the adjoints of diffrax, with fixed or adaptive steps."""

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
    """Take four steps of Euler's method."""
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
    assert set(tapax.grad(loss)(field(), Y0)) == {"ys"}
    with pytest.raises(tapax.SiteError, match="There is no derivative with respect to any site"):
        tapax.grad(loss, "Field/**")(field(), Y0)


def test_edits_inside_the_solve_change_the_result_or_are_refused():
    halved = {"Field": lambda v: 0.5 * v}
    half = lambda field: lambda t, y, args: 0.5 * field(t, y, args)
    assert_close(tapax.edit(loss, values=halved)(field(), Y0), by_hand(half(field()), Y0), 1e-4)
    step = lambda y: jax.grad(lambda y: loss(field(), y))(y)
    expected = jax.grad(lambda y: by_hand(half(field()), y))(Y0)
    assert_close(tapax.edit(step, values=halved)(Y0), expected, 1e-3)
    with pytest.raises(
        tapax.SiteError, match="edited inside a function with a custom derivative rule"
    ):
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
    assert found.path == "Field/mlp"


class NODE(eqx.Module):
    func: Field
    solver: diffrax.AbstractSolver = diffrax.Euler()

    def __call__(self, y0, controller=FIXED, adjoint=ADJOINTS["checkpointed"]):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(self.func), self.solver, 0.0, 0.4, 0.1, y0,
            stepsize_controller=controller, adjoint=adjoint, max_steps=16,
        )  # fmt: skip
        return solution.ys[-1]


INSIDE = ["func/mlp/layers/0", "func/mlp/layers/1", "func/mlp", "func"]
NAMES = [*(f"NODE/{path}" for path in INSIDE), "NODE"]


def node(solver=None, seed=0):
    mlp = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(seed))
    return NODE(Field(mlp), solver or diffrax.Euler())


def node_loss(node, y0, *options):
    return jnp.sum(node(y0, *options) ** 2)


def unrolled(node, y0, count=4):
    """Compute values and gradients of the vector field in every step of Euler's method."""

    def run(zeros):
        y, values = y0, []
        for i in range(count):
            values.append(node.func.mlp(y) + zeros[i])
            y = y + 0.1 * values[-1]
        return jnp.sum(y**2), jnp.stack(values)

    grads, values = jax.grad(run, has_aux=True)(jnp.zeros((count, *y0.shape)))
    return values, grads


@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit], ids=["plain", "jit"])
def test_modules_are_named_from_the_users_root_under_every_adjoint(adjoint, wrap):
    step = wrap(eqx.filter_grad(node_loss))
    _, taps = tapax.capture(step)(node(), Y0, FIXED, ADJOINTS[adjoint])
    assert {name.partition("@")[0] for name in taps.values} == set(NAMES)
    assert list(taps.values)[: len(NAMES)] == NAMES
    if adjoint != "backsolve":
        assert list(taps.grads) == NAMES
        return
    # It also evaluates the field backward in time, which adds separate calls.
    again = [f"{name}@1" for name in NAMES[:-1]]
    assert [name for name in taps.grads if name != "NODE"] == again
    assert list(taps.values)[len(NAMES) :] == again


def test_modules_in_forward_mode_are_named_from_the_users_root():
    run = lambda node, y: node(y, FIXED, diffrax.ForwardMode())
    both = lambda node, y: jax.jvp(lambda y: run(node, y), (y,), (y,))
    _, taps = tapax.capture(both)(node(), Y0)
    assert list(taps.values) == NAMES


@pytest.mark.parametrize("adjoint", ["checkpointed", "direct"])
def test_values_and_gradients_of_every_step_agree_with_euler_by_hand(adjoint):
    step = lambda node, y0: eqx.filter_grad(node_loss)(node, y0, FIXED, ADJOINTS[adjoint])
    steps = {"steps": 4} if adjoint == "checkpointed" else {}
    _, taps = tapax.capture(step, values="NODE/func", grads="NODE/func", **steps)(node(), Y0)
    values, grads = unrolled(node(), Y0)
    assert_close(taps.values["NODE/func"][:4], values, 1e-4)
    assert_close(taps.grads["NODE/func"][:4], grads, 1e-4)
    assert taps.valid["NODE/func"].sum() == 4


@pytest.mark.parametrize("solver", [diffrax.Tsit5(), diffrax.Heun()])
@pytest.mark.parametrize("mapped", [False, True])
def test_gradients_of_adaptive_steps_add_up_to_that_of_a_bias(solver, mapped):
    """The last bias only adds to every value of the last layer."""
    tight = diffrax.PIDController(rtol=1e-4, atol=1e-6)
    run = lambda node, y: node_loss(node, y, tight)
    many = lambda node, ys: jnp.sum(jax.vmap(lambda y: run(node, y))(ys))
    args = (many, jnp.stack([Y0, 20 * Y0, 3 * Y0])) if mapped else (run, Y0)
    total = {"NODE/func/mlp/layers/1": tapax.reduce.sum(axis=-1)}
    step = eqx.filter_grad(args[0])
    grad, taps = tapax.capture(step, values=None, grads=total)(node(solver), args[1])
    assert_close(taps.grads["NODE/func/mlp/layers/1"], grad.func.mlp.layers[1].bias, 1e-3)


def test_a_field_that_is_given_to_the_solver_in_other_ways():
    solve = lambda term, y0, args=None: jnp.sum(
        diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, 0.4, 0.1, y0, args, max_steps=16).ys
    )
    by_part = lambda node, y0: solve(diffrax.ODETerm(node.func), y0)
    by_closure = lambda node, y0: solve(diffrax.ODETerm(lambda t, y, _: node.func(t, y, None)), y0)
    by_args = lambda node, y0: solve(diffrax.ODETerm(lambda t, y, f: f(t, y, None)), y0, node.func)
    for fn in (by_part, by_closure, by_args):
        _, taps = tapax.capture(eqx.filter_grad(fn))(node(), Y0)
        assert list(taps.values) == list(taps.grads) == NAMES[:-1]


def test_terms_and_solvers_are_sites_only_where_they_are_named():
    run = tapax.capture(node_loss, values="**/Euler.step:0", grads=None)
    _, taps = run(node(), Y0)
    assert_close(taps.values["NODE/Euler.step:0"], node()(Y0), 1e-5)
    _, taps = tapax.capture(node_loss, modules=["NODE", "**/ODETerm.vf"])(node(), Y0)
    assert list(taps.values) == ["NODE/ODETerm.vf", "NODE"]
    assert_close(taps.values["NODE/ODETerm.vf"], unrolled(node(), Y0)[0][-1], 1e-4)
    _, taps = tapax.capture(node_loss, modules=lambda module, method: True)(node(), Y0)
    assert {"NODE/ODETerm.vf", "NODE/func/mlp"} <= set(taps.values)
    _, taps = tapax.capture(node_loss, modules="NODE/**")(node(), Y0)
    assert list(taps.values) == NAMES
    _, taps = tapax.capture(node_loss, modules=1)(node(), Y0)
    assert list(taps.values) == ["NODE/func", "NODE"]
    _, taps = tapax.capture(node_loss, modules=tapax.without("equinox"))(node(), Y0)
    assert list(taps.values) == ["NODE/func", "NODE"]


def test_two_models_that_one_traced_solve_runs():
    fn = lambda a, b, y0: jnp.sum(a(y0) * b(y0))
    _, taps = tapax.capture(lambda a, b, y0: jax.grad(fn, 2)(a, b, y0))(node(), node(seed=1), Y0)
    values = unrolled(node(), Y0)[0], unrolled(node(seed=1), Y0)[0]
    for name, other, value in zip("ab", "ba", values, strict=True):
        assert_close(taps.values[f"{name}/func"], value[-1], 1e-4)
        # The last step adds a tenth of the field, multiplied by the result of the other model.
        assert_close(taps.grads[f"{name}/func"], 0.1 * taps.values[other], 1e-4)


@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_checkpoint], ids=["plain", "remat"])
def test_a_solve_within_a_scan_and_a_checkpoint(wrap):
    twice = wrap(lambda node, y0: jax.lax.scan(lambda y, _: (node(y), None), y0, length=2)[0])
    step = eqx.filter_grad(lambda node, y0: jnp.sum(twice(node, y0) ** 2))
    _, taps = tapax.capture(step, steps=4, values="NODE/func", grads="NODE/func")(node(), Y0)
    values, grads = unrolled(node(), Y0, 8)
    assert_close(taps.values["NODE/func"], values.reshape(2, 4, 2), 1e-4)
    assert_close(taps.grads["NODE/func"], grads.reshape(2, 4, 2), 1e-4)
