"""A policy gradient over episodes of gymnax, whose environment steps in a scan under vmap."""

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tapax
from tests.oracles import by_hand
from tests.oracles.closeness import assert_close

KEYS = jax.random.split(jax.random.key(0), 3)
STEPS = 20
ENVIRONMENT, PARAMS = gymnax.make("CartPole-v1")


class Policy(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.head = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, observation, mark=by_hand.unmarked):
        h = mark(self.hidden(mark(observation, "observation")), "before")
        return self.head(jnp.tanh(h))


def rollout(policy, key, mark):
    """Take `STEPS` steps of an environment, which restarts when an episode ends."""
    start, key = jax.random.split(key)
    observation, state = ENVIRONMENT.reset(start, PARAMS)

    def step(carry, key):
        observation, state = carry
        logits = policy(observation, mark)
        choose, move = jax.random.split(key)
        action = jax.random.categorical(choose, logits)
        new, state, reward, done, *_ = ENVIRONMENT.step(move, state, action, PARAMS)
        seen = {"observation": observation, "logits": logits, "action": action, "reward": reward}
        return (new, state), seen | {"done": done}

    return jax.lax.scan(step, (observation, state), jax.random.split(key, STEPS))[1]


def returns_of(rewards):
    return jnp.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]


def loss_of(policy, keys, mark=by_hand.unmarked):
    """Compute the loss of REINFORCE, and return it with the rollouts."""
    seen = jax.vmap(lambda key: rollout(policy, key, mark))(keys)
    chosen = jax.nn.one_hot(seen["action"], 2)
    log_probability = jnp.sum(chosen * jax.nn.log_softmax(seen["logits"]), -1)
    return -jnp.mean(log_probability * returns_of(seen["reward"])), seen


def train_step(mark=by_hand.unmarked):
    @nnx.jit
    def step(policy, optimizer, keys):
        loss = lambda policy: loss_of(policy, keys, mark)
        (value, seen), grads = nnx.value_and_grad(loss, has_aux=True)(policy)
        optimizer.update(policy, grads)
        return value, seen

    return step


@pytest.fixture
def start():
    policy = Policy()
    return policy, nnx.Optimizer(policy, optax.adam(1e-2), wrt=nnx.Param), KEYS


@pytest.fixture(scope="module")
def plain():
    """Return the result of a plain step, and the policy after it."""
    policy = Policy()
    optimizer = nnx.Optimizer(policy, optax.adam(1e-2), wrt=nnx.Param)
    return train_step()(policy, optimizer, KEYS), nnx.state(policy)


@pytest.mark.many
def test_captured_rollout_and_update_are_the_plain_ones(start, plain):
    out, taps = tapax.capture(train_step())(*start)
    assert_close(out, plain[0])
    assert_close(nnx.to_pure_dict(nnx.state(start[0])), nnx.to_pure_dict(plain[1]))
    assert {*taps.values} == {*taps.grads} == {"Policy", "Policy/hidden", "Policy/head"}
    assert out[1]["done"].any()  # an episode ended, and the next one began


def test_values_and_gradients_in_a_rollout_are_those_of_the_formula(start):
    weights = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(start[0])))
    (_, seen), taps = tapax.capture(train_step())(*start)
    steps_first = lambda x: np.asarray(x).swapaxes(0, 1)
    weigh = lambda layer, x: x @ layer["kernel"] + layer["bias"]
    before = weigh(weights["hidden"], steps_first(seen["observation"]))
    logits = weigh(weights["head"], np.tanh(before))
    assert_close(taps.values["Policy/hidden"], before)
    assert_close(taps.values["Policy"], logits)
    advantage = steps_first(returns_of(seen["reward"]))[..., None] / seen["reward"].size
    push = np.asarray(jax.nn.softmax(logits)) - np.eye(2)[steps_first(seen["action"])]
    assert_close(taps.grads["Policy"], advantage * push)
    back = (advantage * push) @ weights["head"]["kernel"].T * (1 - np.tanh(before) ** 2)
    assert_close(taps.grads["Policy/hidden"], back)


def test_gradients_in_a_rollout_agree_with_differences():
    """Compare at the actions of one rollout, which a small difference does not change."""
    with jax.enable_x64(True):
        policy = Policy()
        nnx.update(policy, jax.tree.map(lambda x: x.astype(jnp.float64), nnx.state(policy)))
        marked = lambda keys: loss_of(policy, keys, tapax.sow)[0]
        grads = tapax.grad(marked, at="Policy/before")(KEYS)
        shift = lambda delta: lambda x, name: x + delta if name == "before" else x
        loss = jax.jit(lambda delta: loss_of(policy, KEYS, shift(delta))[0])
        expected = by_hand.differences(loss, np.zeros(8))
        assert_close(grads["Policy/before"].sum(axis=(0, 1)), expected, 1e-6)


def test_edited_observation_changes_the_episode(start):
    blind = lambda x: x.at[..., 2:].set(0.0)  # hides the angle and its speed
    out = tapax.edit(train_step(tapax.sow), values={"Policy/observation": blind})(*start)
    policy = Policy()
    optimizer = nnx.Optimizer(policy, optax.adam(1e-2), wrt=nnx.Param)
    assert_close(out, train_step(by_hand.changed({"observation": blind}))(policy, optimizer, KEYS))
    assert_close(nnx.to_pure_dict(nnx.state(start[0])), nnx.to_pure_dict(nnx.state(policy)))


def test_monitored_training_is_the_plain_training(start, tmp_path):
    policy = Policy()
    optimizer = nnx.Optimizer(policy, optax.adam(1e-2), wrt=nnx.Param)
    with tapax.monitor(train_step(), every=1, to=tmp_path / "run.jsonl") as step:
        for _ in range(2):
            step(*start)
            train_step()(policy, optimizer, KEYS)
    got, expected = (jax.tree.leaves(nnx.state(p)) for p in (start[0], policy))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(tapax.open(tmp_path / "run.jsonl")) == 2


def test_search_finds_the_step_and_the_environment_of_a_nan(start):
    assert tapax.find_nonfinite(loss_of)(start[0], KEYS) is None
    _, taps = tapax.capture(loss_of)(start[0], KEYS)
    first = float(taps.values["Policy/hidden"][7, 1, 0])

    def broken(x, name):
        if name != "before":
            return x
        return x * jnp.sqrt(jnp.where(jnp.abs(x[0] - first) < 1e-6, -1.0, 1.0))

    found = tapax.find_nonfinite(train_step(broken))(*start)
    assert (found.path, found.operation, found.phase) == ("Policy", "sqrt", "forward")
    assert (found.iterations, found.mapped, found.examples) == ((7,), (1,), (3,))
