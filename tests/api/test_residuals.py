"""Residuals of losses: JAX's list, sites, lines, policies and errors."""

import threading

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_policies as policies

import tapax
from tests.models import losses
from tests.models.losses import LOSSES, arrays
from tests.oracles.saved_residuals import jax_residuals, policy_types, table_types

W, X = (6, 6), (8, 6)
POLICIES = ["dots_saveable", "nothing_saveable"]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_loss_keeps_the_residuals_that_jax_reports(loss):
    args = LOSSES[loss]
    table = tapax.residuals(loss)(*args)
    assert table_types(table) == jax_residuals(loss, *args)
    assert all(r.kind == "computed" for r in table)
    assert all(r.kind != "computed" for r in table.arguments)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_policy_keeps_the_residuals_that_jax_reports(loss, policy):
    args, policy = LOSSES[loss], getattr(policies, policy)
    wanted = jax_residuals(jax.checkpoint(loss, policy=policy), *args)
    compared = tapax.residuals(loss, policy=policy)(*args)
    assert policy_types(compared) == wanted
    assert table_types(compared) == jax_residuals(loss, *args)
    assert table_types(tapax.residuals(jax.checkpoint(loss, policy=policy))(*args)) == wanted


def test_names_choose_the_values_that_a_policy_keeps():
    policy = policies.save_only_these_names("ffn")
    table = tapax.residuals(losses.named, policy=policy)(*arrays(W, X))
    kept = [r for r in table if r.kept_by_policy]
    assert [(r.name, r.operation) for r in kept] == [("ffn", "sin")]
    assert table.policy in ("save_only_these_names", "SaveOnlyTheseNames")


def test_a_policy_that_offloads_frees_the_device():
    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["ffn"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    table = tapax.residuals(losses.named, policy=policy)(*arrays(W, X))
    (moved,) = (r for r in table if r.kept_by_policy)
    assert (moved.change, moved.name, moved.operation) == ("offloaded", "ffn", "sin")
    assert (moved.nbytes, table.policy_nbytes) == (8 * 6 * 4, 0)


def test_sites_operations_and_lines_are_those_of_the_source():
    table = tapax.residuals(losses.matmul_chain)(*arrays(W, W, X))
    h = next(r for r in table if r.site == "h")
    line = losses.matmul_chain.__code__.co_firstlineno + 1
    assert (h.operation, h.shape, h.nbytes) == ("tanh", X, 8 * 6 * 4)
    assert h.source == f"{losses.__file__}:{line}"
    assert {r.source for r in table} == {f"{losses.__file__}:{n}" for n in (line, line + 1)}
    assert [r.site for r in table.arguments] == ["x", "w1", "w2"]


def test_values_computed_in_a_scope_belong_to_the_scope():
    table = tapax.residuals(losses.scanned)(*arrays((5, *W), X))
    stacked = {r.site for r in table if r.loops}
    assert stacked == {"layer/h", "layer"}
    assert all(r.loops == ("scan[5]",) and r.shape == (5, *X) for r in table if r.loops)


def test_a_carry_belongs_to_the_operation_of_the_iteration_before():
    table = tapax.residuals(losses.scanned_remat)(*arrays((5, *W), X))
    (carried,) = (r for r in table if r.loops)
    assert (carried.site, carried.operation) == ("layer/h", "tanh")


def test_a_value_in_a_branch_belongs_to_the_branch_that_computes_it():
    table = tapax.residuals(losses.branched)(*arrays(W, X))
    one, other = (losses.branched.__code__.co_firstlineno + n for n in (2, 5))
    # Values of one type share an array, which belongs to the first branch.
    assert {f"{losses.__file__}:{n}" for n in (one, other)} <= set(table.by_line())
    assert "broadcast_in_dim" not in table.by_operation()


def test_a_jitted_block_that_is_called_twice_keeps_its_values_twice():
    one = tapax.residuals(lambda w, x: jnp.sum(losses.block(w, x)))(*arrays(W, X))
    two = tapax.residuals(losses.jitted)(*arrays(W, X))
    inside = [table.by_line() for table in (one, two)]
    line = f"{losses.__file__}:{losses.block.__wrapped__.__code__.co_firstlineno + 2}"
    # The result of the first call is the argument of the second.
    more = 8 * 6 * 4
    assert inside[1][line].nbytes == 2 * inside[0][line].nbytes + more


def test_a_value_read_twice_is_kept_once():
    table = tapax.residuals(losses.shared)(*arrays(W, X))
    assert [r.operation for r in table if r.site == "h"] == ["exp"]


def test_bytes_bracket_the_memory_of_the_compiled_gradient():
    """In a loop the compiler keeps JAX's residuals and a few arrays of one iteration."""
    args = arrays((8, 64, 64), (1024, 64))
    one = 1024 * 64 * 4
    for loss in (losses.scanned, losses.scanned_remat, losses.scanned_policy):
        kept = tapax.residuals(loss)(*args).nbytes
        compiled = jax.jit(jax.grad(loss)).lower(*args).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        assert kept >= 8 * one
        assert kept <= temporary <= kept + 4 * one


def test_the_bytes_that_a_policy_saves_are_saved_by_the_compiler():
    args = arrays((8, 64, 64), (1024, 64))
    sizes, temporary = [], []
    for loss in (losses.scanned, losses.scanned_remat):
        compiled = jax.jit(jax.grad(loss)).lower(*args).compile()
        sizes.append(tapax.residuals(loss)(*args).nbytes)
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[0] - sizes[1] == temporary[0] - temporary[1]


def test_listing_residuals_computes_nothing():
    calls = []

    def loss(w):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.sum(jnp.sin(w))

    tapax.residuals(loss)(jnp.ones(3))
    jax.effects_barrier()
    assert not calls


def test_arrays_give_the_same_table_as_their_types():
    args = arrays(W, W, X)
    zeros = [jnp.zeros(x.shape, x.dtype) for x in args]
    assert tapax.residuals(losses.matmul_chain)(*zeros) == tapax.residuals(losses.matmul_chain)(
        *args
    )


def test_a_loss_inside_of_a_jitted_function_is_listed():
    found = []

    @jax.jit
    def outer(w, x):
        found.append(tapax.residuals(lambda w: losses.shared(w, x))(w))
        return w

    outer(jnp.ones(W, jnp.float32), jnp.ones(X, jnp.float32))
    assert found[0].nbytes == tapax.residuals(losses.shared)(*arrays(W, X)).nbytes
    assert {r.kind for r in found[0].arguments} == {"constant"}


def test_auxiliary_results_keep_nothing():
    def loss(w, x):
        return losses.shared(w, x), jnp.exp(x @ w + 1)

    plain = tapax.residuals(losses.shared)(*arrays(W, X))
    assert [r.nbytes for r in tapax.residuals(loss)(*arrays(W, X))] == [r.nbytes for r in plain]


def test_static_arguments_of_jitted_losses_stay_static():
    @jax.jit(static_argnums=1, static_argnames="activation")
    def loss(w, depth, *, activation):
        x = w
        for _ in range(depth):
            x = getattr(jnp, activation)(x @ w)
        return jnp.sum(x)

    table = tapax.residuals(loss)(*arrays(W), 3, activation="sin")
    assert [r.operation for r in table].count("cos") == 3


def test_nothing_changes_where_jit_is_disabled():
    args = jnp.ones((5, *W)), jnp.ones(X)
    with jax.disable_jit():
        table = tapax.residuals(losses.scanned)(*args)
    assert table == tapax.residuals(losses.scanned)(*args)


def test_an_edited_loss_keeps_the_values_that_the_edit_needs():
    args = arrays(W, X)
    edited = tapax.edit(losses.shared, values={"h": jnp.sin})
    added = tapax.residuals(edited)(*args).nbytes - tapax.residuals(losses.shared)(*args).nbytes
    # The cosine, and the exponential, which later operations no longer read.
    assert added == 2 * 8 * 6 * 4


def test_a_loss_with_a_linear_solve_is_not_a_step():
    def loss(a, b):
        return jnp.sum(jnp.linalg.solve(a, b) ** 2)

    args = arrays(W, (6, 1))
    assert table_types(tapax.residuals(loss)(*args)) == jax_residuals(loss, *args)


def test_a_penalty_on_a_gradient_is_a_loss():
    def loss(w, x):
        slope = jax.vmap(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w))))(x)
        return jnp.mean(slope**2)

    table = tapax.residuals(loss)(*arrays(W, X))
    assert table_types(table) == jax_residuals(loss, *arrays(W, X))


def test_a_function_without_loss_and_gradient_is_refused():
    def forward(w, x):
        return x @ w

    with pytest.raises(TypeError) as error:
        tapax.residuals(forward)(*arrays(W, X))
    assert str(error.value).removeprefix(f"{forward.__qualname__} ") == (
        "does not return a loss (a real number, alone or first in a tuple) and does not take a "
        "gradient itself, so it has no backward pass and keeps no values for one. Pass `residuals` "
        "the loss, or the step that takes its gradient."
    )


def test_integers_alone_are_refused():
    def loss(tokens):
        return jnp.mean(tokens * 2.0)

    with pytest.raises(TypeError) as error:
        tapax.residuals(loss)(jnp.arange(3))
    assert str(error.value).replace(loss.__qualname__, "loss") == (
        "No argument of loss contains real or complex numbers, so there is nothing with respect to "
        "which to differentiate the loss. Pass the parameters as arguments."
    )


def test_a_captured_tracer_is_refused():
    leaked = []
    jax.make_jaxpr(leaked.append)(1.0)

    def loss(w):
        return jnp.sum(w * leaked[0])

    with pytest.raises(TypeError) as error:
        tapax.residuals(loss)(*arrays(W))
    assert str(error.value).replace(loss.__qualname__, "loss") == (
        "loss captured a traced value of a function that JAX has finished tracing. Pass the value "
        "as an argument, or return it from the function that computes it."
    )


def test_a_while_loop_is_refused_as_jax_does():
    def loss(x):
        return jax.lax.while_loop(lambda x: x < 3, lambda x: x * 2, x)

    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        tapax.residuals(loss)(1.0)


@pytest.mark.parametrize("policy", ["dots_saveable", 3])
def test_a_policy_must_be_a_function(policy):
    with pytest.raises(TypeError, match="`policy` must be a function, such as"):
        tapax.residuals(losses.shared, policy=policy)


def test_only_a_function_has_residuals():
    with pytest.raises(TypeError, match="residuals"):
        tapax.residuals(3)


def test_jax_is_as_before_after_an_error():
    before = jax.vjp

    def step(w):
        raise RuntimeError("in the step")

    with pytest.raises(RuntimeError):
        tapax.residuals(step, policy=policies.dots_saveable)(*arrays(W))
    assert jax.vjp is before


def test_a_policy_on_one_thread_leaves_the_others_alone():
    inside, outside = threading.Event(), threading.Event()
    found = []

    def step(w):
        inside.set()
        outside.wait(10)
        return jax.grad(lambda w: jnp.sum(jnp.sin(w)))(w)

    def list_with_policy():
        found.append(tapax.residuals(step, policy=policies.nothing_saveable)(*arrays(W)))

    thread = threading.Thread(target=list_with_policy)
    # The first of two traces, without the policy, succeeds.
    outside.set()
    thread.start()
    inside.wait(10)
    plain = jax.make_jaxpr(jax.grad(lambda w: jnp.sum(jnp.sin(w))))(jnp.ones(W))
    thread.join()
    assert "remat" not in str(plain) and "checkpoint" not in str(plain)
    assert (found[0].nbytes, found[0].policy_nbytes) == (6 * 6 * 4, 0)
