"""Residuals of steps that take one or two gradients, in jit, loops, maps and meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_policies as policies
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tapax
from tests.models import losses
from tests.models.losses import LOSSES, arrays
from tests.models.next_jax import FLAGS, next_flags
from tests.oracles.saved_residuals import jax_residuals, policy_types, table_types

W, X = (6, 6), (8, 6)
BYTES = 8 * 6 * 4
UNREAD = {losses.convolved}
"""Losses for which JAX lists zeros that the backward pass does not read."""


def gradient_of(loss):
    """Take the gradient of a loss with respect to all of its real arguments."""

    def step(*args):
        real = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]
        return jax.value_and_grad(loss, argnums=real)(*args)

    return step


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_step_keeps_the_residuals_that_jax_reports_for_its_loss(loss):
    computed, given = table_types(tapax.residuals(gradient_of(loss))(*LOSSES[loss]))
    wanted = jax_residuals(loss, *LOSSES[loss])
    assert computed <= wanted[0] if loss in UNREAD else computed == wanted[0]
    assert given == wanted[1]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_policy_is_applied_to_the_gradient_of_a_step(loss):
    policy = policies.dots_saveable
    table = tapax.residuals(jax.jit(gradient_of(loss)), policy=policy)(*LOSSES[loss])
    wanted = jax_residuals(jax.checkpoint(loss, policy=policy), *LOSSES[loss])
    assert policy_types(table)[0] == wanted[0]


@pytest.mark.parametrize("loss", [losses.scanned_remat, losses.custom_backward, losses.jitted])
def test_the_flags_of_the_next_jax_change_nothing(loss):
    args = LOSSES[loss]
    with next_flags(FLAGS[:3]):
        wanted = jax_residuals(loss, *args)[0]
        assert table_types(tapax.residuals(loss)(*args))[0] == wanted
        assert table_types(tapax.residuals(gradient_of(loss))(*args))[0] == wanted


def update(params, x):
    """Run a step that prepares a batch, takes a gradient and updates the parameters."""
    x = jnp.cos(x)

    def loss(params):
        return losses.matmul_chain(params["a"], params["b"], x), jnp.sum(x)

    (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * jnp.tanh(g), params, grads), value


PARAMS = dict(zip("ab", arrays(W, W), strict=True))


def test_values_before_and_after_a_gradient_are_not_kept_for_it():
    table = tapax.residuals(update)(PARAMS, *arrays(X))
    x = jnp.ones(X, jnp.float32)
    inside = tapax.residuals(lambda a, b: losses.matmul_chain(a, b, x))(*arrays(W, W))
    assert table_types(table)[0] == table_types(inside)[0]
    given = {r.site or r.operation for r in table.arguments}
    assert given == {"params/b", "cos"}


def test_a_step_that_ran_before_is_listed_afresh():
    step = jax.jit(update)
    step(jax.tree.map(lambda p: jnp.ones(p.shape), PARAMS), jnp.ones(X))
    plain = tapax.residuals(step)(PARAMS, *arrays(X))
    compared = tapax.residuals(step, policy=policies.nothing_saveable)(PARAMS, *arrays(X))
    assert compared.nbytes == plain.nbytes == tapax.residuals(step)(PARAMS, *arrays(X)).nbytes
    assert compared.policy_nbytes == 0
    assert {r.change for r in compared} == {"recomputed"}


def test_a_policy_leaves_no_remat_behind_in_jitted_functions():
    step = jax.jit(gradient_of(losses.shared))
    args = [jnp.ones(W), jnp.ones(X)]
    tapax.residuals(step, policy=policies.nothing_saveable)(*args)
    assert "checkpoint" not in str(jax.make_jaxpr(step)(*args))
    assert "remat" not in str(jax.make_jaxpr(step)(*args))
    assert tapax.capture(step)(*args)[1].grads["h"].shape == X


@pytest.mark.parametrize("train", ["scan", "fori_loop", "while_loop"])
def test_gradients_inside_of_loops_keep_one_iteration(train):
    def scan(params, x):
        return jax.lax.scan(lambda p, _: update(p, x), params, None, length=10)

    def fori_loop(params, x):
        return jax.lax.fori_loop(0, 10, lambda _, p: update(p, x)[0], params)

    def while_loop(params, x):
        def body(state):
            return update(state[0], x)

        return jax.lax.while_loop(lambda state: state[1] > 0, body, (params, 1.0))

    loop = {"scan": scan, "fori_loop": fori_loop, "while_loop": while_loop}[train]
    one = tapax.residuals(update)(PARAMS, *arrays(X))
    table = tapax.residuals(loop)(PARAMS, *arrays(X))
    assert [r.nbytes for r in table] == [r.nbytes for r in one]
    assert "params/b" in {r.site for r in table.arguments}


def test_gradients_over_a_loop_keep_every_iteration():
    table = tapax.residuals(jax.grad(losses.scanned))(*arrays((5, *W), X))
    assert {r.nbytes for r in table if r.loops} == {5 * BYTES}


def test_a_gradient_in_a_branch_is_listed():
    def step(w, x):
        return jax.lax.cond(x[0, 0] > 0, jax.grad(losses.shared), lambda w, x: w, w, x)

    table = tapax.residuals(step)(*arrays(W, X))
    assert table_types(table)[0] == jax_residuals(losses.shared, *arrays(W, X))[0]


def test_gradients_per_example_have_the_axis_of_the_examples():
    def step(w, x):
        return jax.vmap(jax.grad(losses.shared), (None, 0))(w, x[:, None])

    table = tapax.residuals(step)(*arrays(W, X))
    assert {r.shape for r in table} == {(8, 1, 6)}


def test_two_gradients_one_after_the_other_are_both_listed():
    def step(critic, actor, x):
        slope = jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(critic)
        # The second gradient reads the first, which is its argument.
        return slope, jax.grad(lambda w: jnp.sum(slope * jnp.exp(w)))(actor)

    table = tapax.residuals(step)(*arrays(W, W, X))
    assert [(r.operation, r.shape) for r in table] == [("cos", X), ("exp", W)]
    assert [(r.site, r.shape) for r in table.arguments] == [("x", X), ("", W)]


def test_a_gradient_of_a_gradient_keeps_values_for_both():
    def loss(w, x):
        return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.exp(jnp.sin(x @ w))))(x) ** 2)

    table = tapax.residuals(jax.grad(loss))(*arrays(W, X))
    wanted = jax_residuals(loss, *arrays(W, X))[0]
    assert all(table_types(table)[0][key] >= 1 for key in wanted)


def test_the_derivative_of_a_gradient_in_forward_mode_is_listed():
    def step(w, x, v):
        return jax.jvp(jax.grad(lambda w: losses.shared(w, x)), (w,), (v,))

    table = tapax.residuals(step)(*arrays(W, X, W))
    assert len(table) > len(tapax.residuals(jax.grad(losses.shared))(*arrays(W, X)))


def test_cotangents_that_the_user_computes_are_not_kept():
    def step(w, x):
        out, pullback = jax.vjp(lambda w: jnp.sin(x @ w), w)
        return pullback(out - jnp.ones_like(out))

    table = tapax.residuals(step)(*arrays(W, X))
    assert [r.operation for r in table] == ["cos"]
    assert [r.site for r in table.arguments] == ["x"]


def test_a_policy_applies_to_a_pullback_of_the_user():
    def step(w, x):
        out, pullback = jax.vjp(lambda w: jnp.sin(x @ w), w)
        return pullback(2 * out)

    table = tapax.residuals(step, policy=policies.dots_saveable)(*arrays(W, X))
    changes = {r.operation: r.change for r in table}
    assert changes == {"cos": "recomputed", "dot_general": "kept instead"}


def test_a_gradient_inside_of_remat_is_found():
    table = tapax.residuals(jax.checkpoint(gradient_of(losses.shared)))(*arrays(W, X))
    assert table_types(table)[0] == jax_residuals(losses.shared, *arrays(W, X))[0]


def mesh_of(kind):
    return jax.make_mesh((4,), ("d",), axis_types=(kind,))


@pytest.mark.parametrize("check_vma", [True, False])
def test_values_of_a_shard_map_count_on_one_device(check_vma):
    spread = functools.partial(
        jax.shard_map, mesh=mesh_of(AxisType.Auto), in_specs=(P(), P("d")), check_vma=check_vma
    )

    def local(w, x):
        return jnp.sum(tapax.sow(jnp.exp(jnp.sin(x @ w)), "h"))

    def outside(w, x):
        return jnp.sum(spread(lambda w, x: local(w, x)[None], out_specs=P("d"))(w, x))

    def inside(w, x):
        return spread(lambda w, x: jax.grad(local)(w, x)[None], out_specs=P("d"))(w, x)

    args = arrays(W, X)
    table = tapax.residuals(outside)(*args)
    assert table_types(table) == jax_residuals(outside, *args)
    (h,) = (r for r in table if r.site == "h")
    assert (h.shape, h.nbytes) == (X, BYTES // 4)
    for step in (jax.grad(outside), inside):
        assert tapax.residuals(step)(*args).nbytes == 2 * BYTES // 4


def test_values_on_an_explicit_mesh_count_on_one_device():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones(X, np.float32), NamedSharding(mesh, P("d", None)))
        w = jax.device_put(np.ones(W, np.float32), NamedSharding(mesh, P()))
        table = tapax.residuals(losses.shared)(w, x)
        whole = tapax.residuals(losses.shared)(*arrays(W, X))
        assert table_types(table) == jax_residuals(losses.shared, w, x)
    assert 4 * table.nbytes == whole.nbytes
    assert {r.site: r.nbytes for r in table.arguments} == {"w": 144, "x": BYTES // 4}


def test_an_array_that_the_compiler_divides_counts_whole():
    mesh = mesh_of(AxisType.Auto)
    x = jax.device_put(np.ones(X, np.float32), NamedSharding(mesh, P("d", None)))
    table = tapax.residuals(jax.jit(jax.grad(losses.shared)))(jnp.ones(W, x.dtype), x)
    assert {r.nbytes for r in table} == {BYTES}
