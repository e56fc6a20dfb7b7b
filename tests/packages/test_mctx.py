"""Monte Carlo tree search of mctx, with a network inside it and a step that trains on it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import mctx
import numpy as np
import optax
import pytest

import tapax
from tests.oracles import by_hand
from tests.oracles.closeness import assert_close

KEY = jax.random.key(0)
BATCH, ACTIONS, WIDTH, SIMULATIONS = 2, 3, 4, 5


class Model(nn.Module):
    """The dynamics of MuZero, which return a new state, its reward, policy and value."""

    @nn.compact
    def __call__(self, state, action):
        h = jnp.concatenate([state, jax.nn.one_hot(action, ACTIONS)], -1)
        h = jnp.tanh(nn.Dense(WIDTH, name="state")(h))
        reward = nn.Dense(1, name="reward")(h)[:, 0]
        return h, reward, *self.predict(h)

    @nn.compact
    def predict(self, h):
        return nn.Dense(ACTIONS, name="policy")(h), nn.Dense(1, name="value")(h)[:, 0]


def search(params, state, mark=by_hand.unmarked, loop=jax.lax.fori_loop):
    def recurrent(params, key, action, state):
        new, reward, logits, value = Model().apply(params, state, action)
        new = mark(new, "dynamics")
        step = {"reward": reward, "discount": jnp.full_like(reward, 0.9)}
        return mctx.RecurrentFnOutput(**step, prior_logits=logits, value=value), new

    _, _, logits, value = Model().apply(params, state, jnp.zeros(BATCH, int))
    root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=state)
    key = jax.random.key(1)
    return mctx.gumbel_muzero_policy(params, key, root, recurrent, SIMULATIONS, loop_fn=loop)


@pytest.fixture(scope="module")
def start():
    state = jax.random.normal(KEY, (BATCH, WIDTH))
    return Model().init(KEY, state, jnp.zeros(BATCH, int)), state


def test_values_inside_the_search_are_those_of_its_nodes(start):
    params, state = start
    out, taps = tapax.capture(jax.jit(lambda p, s: search(p, s, tapax.sow)))(*start)
    assert_close(out, jax.jit(search)(params, state))
    tree = jax.tree.map(np.asarray, out.search_tree)
    assert_close(taps.values["dynamics"], tree.embeddings[:, 1:].swapaxes(0, 1))
    assert_close(taps.values["Model:3@1"], tree.raw_values[:, 1:].T)
    weights = params["params"]["state"]
    for i in range(SIMULATIONS):  # each simulation adds one node
        for b in range(BATCH):
            parent, action = tree.parents[b, i + 1], tree.action_from_parent[b, i + 1]
            x = np.concatenate([tree.embeddings[b, parent], np.eye(ACTIONS)[action]])
            assert_close(
                taps.values["Model/state@1"][i, b], x @ weights["kernel"] + weights["bias"]
            )


def test_derivatives_inside_the_search_agree_with_differences(start):
    """The while loops of mctx have forward derivatives but no backward ones."""
    with jax.enable_x64(True):
        params, state = jax.tree.map(lambda x: x.astype(jnp.float64), start)
        marked = lambda params, state: search(params, state, tapax.sow).action_weights
        perturbed = lambda zeros: tapax.perturbed(marked)(zeros, params, state)
        zeros = tapax.perturbations(marked, at="dynamics")(params, state)
        towards = jax.random.normal(KEY, zeros["dynamics"].shape, jnp.float64)
        tangent = jax.jvp(perturbed, (zeros,), (jax.tree.map(lambda _: towards, zeros),))[1]
        calls = []

        def shifted(amount):
            def mark(x, name):  # the loop runs as Python, one simulation after the other
                calls.append(name)
                return x + amount * towards[(len(calls) - 1) % SIMULATIONS]

            def loop(start, stop, body, carry):
                for i in range(start, stop):
                    carry = body(i, carry)
                return carry

            return np.asarray(search(params, state, mark, loop).action_weights)

        expected = (shifted(1e-5) - shifted(-1e-5)) / 2e-5
        assert len(calls) == 2 * SIMULATIONS
        assert_close(tangent, expected, 1e-6)
        assert np.abs(expected).max() > 1e-4


def test_edit_inside_the_search_changes_the_tree(start):
    half = lambda x: 0.5 * x
    marked = lambda params, state: search(params, state, tapax.sow)
    edited = tapax.edit(jax.jit(marked), values={"dynamics": half})(*start)
    by = by_hand.changed({"dynamics": half})
    assert_close(edited, jax.jit(lambda params, state: search(params, state, by))(*start))
    third = {tapax.at("dynamics", step=2): jnp.zeros_like}
    tree = tapax.edit(marked, values=third)(*start).search_tree
    assert (jnp.abs(tree.embeddings).max(axis=(0, 2)) == 0).tolist() == [False] * 3 + [True] + [
        False
    ] * 2


def test_search_for_nan_names_the_simulation(start):
    assert tapax.find_nonfinite(search)(*start) is None
    _, taps = tapax.capture(lambda params, state: search(params, state, tapax.sow))(*start)
    second = taps.values["dynamics"][2, 1, 0]  # of the second example, in the third simulation
    broken = lambda x, name: x * jnp.sqrt(jnp.where(jnp.abs(x[:, :1] - second) < 1e-5, -1.0, 1.0))
    found = tapax.find_nonfinite(lambda params, state: search(params, state, broken))(*start)
    assert (found.operation, found.kind, found.index) == ("sqrt", "nan", (1, 0))
    assert found.iterations == (2,)


def train_step(mark=by_hand.unmarked):
    """Train as MuZero does: run the model twice, towards the policy and value of the search."""

    def loss_of(params, state, targets):
        def step(state, action):
            new, _, logits, value = Model().apply(params, state, action)
            return mark(new, "unrolled"), (logits, value)

        _, (logits, values) = jax.lax.scan(
            step, state, targets.action[None] * jnp.ones((2, 1), int)
        )
        goal = targets.search_tree.summary().value
        policy = optax.losses.softmax_cross_entropy(logits, targets.action_weights)
        return jnp.mean(policy) + jnp.mean((values - goal) ** 2)

    def step(params, state):
        targets = jax.lax.stop_gradient(search(params, state, mark))
        loss, grads = jax.value_and_grad(loss_of)(params, state, targets)
        return optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    return jax.jit(step)


def test_gradients_of_a_train_step_agree_with_the_unrolled_model(start):
    params, state = start
    out, taps = tapax.capture(train_step(tapax.sow))(*start)
    assert_close(out, train_step()(*start))
    targets = search(params, state)
    goal = targets.search_tree.summary().value

    def unrolled(zeros):
        h, losses = state, []
        for i in range(2):
            h, _, logits, value = Model().apply(params, h, targets.action)
            h = h + zeros[i]
            policy = -jnp.sum(targets.action_weights * jax.nn.log_softmax(logits), -1)
            losses.append(jnp.mean(policy) + jnp.mean((value - goal) ** 2))
        return jnp.mean(jnp.stack(losses))

    assert_close(taps.grads["unrolled"], jax.grad(unrolled)(jnp.zeros((2, BATCH, WIDTH))))
    assert "dynamics" in taps.values and "dynamics" not in taps.grads
