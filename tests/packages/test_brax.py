"""Policies in rollouts through the physics of brax, and the updates of its PPO."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tapax
from tests.oracles import by_hand
from tests.oracles.closeness import assert_close

with warnings.catch_warnings():  # of JAXopt, at the import
    warnings.simplefilter("ignore", DeprecationWarning)
    from brax import envs
    from brax.training import acting, gradients
    from brax.training.agents.ppo import losses, networks

KEY = jax.random.PRNGKey(0)  # brax takes only keys of this kind
STEPS = 4
pytestmark = [
    pytest.mark.filterwarnings("ignore:Brax System"),
    pytest.mark.filterwarnings("ignore:Accessing `.*` directly from:DeprecationWarning"),
]


class Policy(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(4, 3, rngs=rngs, param_dtype=jnp.float64)
        self.head = nnx.Linear(3, 1, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, observation, mark=by_hand.unmarked):
        h = mark(self.hidden(observation), "before")
        return mark(jnp.tanh(self.head(jnp.tanh(h))), "action")


@functools.cache
def pendulum(backend):
    """Make an environment and a state in it, far from the rest position of the pendulum."""
    with jax.enable_x64(True):
        environment = envs.get_environment("inverted_pendulum", backend=backend, n_frames=1)
        state = jax.jit(environment.reset)(KEY)
        q, qd = jnp.array([0.1, 0.4]), jnp.array([-0.3, 0.8])
        physics = jax.jit(environment.pipeline_init)(q, qd)
        return environment, state.replace(pipeline_state=physics, obs=jnp.concatenate([q, qd]))


@pytest.fixture
def wide():
    with jax.enable_x64(True):
        yield


def loss_of(mark=by_hand.unmarked, backend="spring"):
    """Make a function of the policy: the distance from rest in a rollout, and observations."""
    environment, start = pendulum(backend)

    def run(policy):
        def step(state, _):
            state = environment.step(state, policy(state.obs, mark))
            return state.replace(reward=jnp.asarray(state.reward)), state.obs

        _, seen = jax.lax.scan(step, start.replace(reward=jnp.asarray(1.0)), length=STEPS)
        return jnp.sum(seen**2), seen

    return run


class Steps:
    """The rollout in NumPy, step by step, with the environment of brax.

    `change` is a function of the action and the number of the step.
    """

    def __init__(self, policy, change=lambda action, i: action, backend="spring"):
        weights = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(policy)))
        weigh = lambda layer, x: x @ weights[layer]["kernel"] + weights[layer]["bias"]
        _, state = pendulum(backend)
        self.hidden, self.action, self.seen = [], [], []
        for i in range(STEPS):
            self.hidden.append(weigh("hidden", np.asarray(state.obs)))
            self.action.append(np.tanh(weigh("head", np.tanh(self.hidden[-1]))))
            state = moved(backend)(state, change(self.action[-1], i))
            self.seen.append(np.asarray(state.obs))
        self.loss = np.sum(np.square(self.seen))


@functools.cache
def moved(backend):
    return jax.jit(pendulum(backend)[0].step)


@pytest.mark.many
@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("backend", ["spring", "positional"])
def test_rollout_through_physics_agrees_with_its_steps_and_differences(backend):
    policy = Policy()
    step = nnx.jit(nnx.value_and_grad(loss_of(tapax.sow, backend), has_aux=True))
    ((loss, seen), _), taps = tapax.capture(step)(policy)
    steps = Steps(policy, backend=backend)
    assert_close(seen, np.array(steps.seen), 1e-8)
    assert_close(loss, steps.loss, 1e-8)
    assert_close(taps.values["Policy/hidden"], np.array(steps.hidden), 1e-8)
    assert_close(taps.values["Policy/action"], np.array(steps.action), 1e-8)
    shifted = lambda shift: Steps(policy, lambda a, i: a + shift[i], backend).loss
    expected = by_hand.differences(shifted, np.zeros((STEPS, 1)))
    assert_close(taps.grads["Policy/action"], expected, 1e-6)
    assert np.abs(expected).min() > 1e-4
    slope = (1 - np.square(steps.action)) * np.asarray(policy.head.kernel[...]).T
    back = expected * slope * (1 - np.tanh(steps.hidden) ** 2)
    assert_close(taps.grads["Policy/hidden"], back, 1e-6)


@pytest.mark.usefixtures("wide")
def test_edited_action_of_one_step_changes_the_rollout():
    policy = Policy()
    still = {tapax.at("Policy/action", step=1): jnp.zeros_like}
    loss, seen = tapax.edit(loss_of(tapax.sow), values=still)(policy)
    steps = Steps(policy, lambda action, i: action * (i != 1))
    assert_close(seen, np.array(steps.seen), 1e-8)
    assert_close(loss, steps.loss, 1e-8)
    assert not np.allclose(steps.seen, Steps(policy).seen)


@pytest.mark.usefixtures("wide")
def test_search_finds_the_step_of_a_nan_in_a_rollout():
    policy = Policy()
    third = float(Steps(policy).hidden[2][0])

    def broken(x, name):
        if name != "before":
            return x
        return x * jnp.sqrt(jnp.where(jnp.abs(x[0] - third) < 1e-6, -1.0, 1.0))

    found = tapax.find_nonfinite(loss_of(broken))(policy)
    assert (found.path, found.operation, found.phase) == ("Policy", "sqrt", "forward")
    assert found.iterations == (2,)


ENVIRONMENTS, UNROLL = 3, 6
OPTIMIZER = optax.sgd(0.1)


@functools.cache
def agent():
    """Make an environment wrapped for training, its networks and their parameters."""
    environment = envs.training.wrap(envs.get_environment("fast"), episode_length=4)
    made = networks.make_ppo_networks(
        environment.observation_size,
        environment.action_size,
        policy_hidden_layer_sizes=(4,),
        value_hidden_layer_sizes=(5,),
    )
    keys = jax.random.split(KEY)
    params = losses.PPONetworkParams(
        made.policy_network.init(keys[0]), made.value_network.init(keys[1])
    )
    return environment, made, jax.tree.map(lambda x: 3 * x + 0.1, params)


def unroll(params, key):
    environment, made, _ = agent()
    policy = networks.make_inference_fn(made)((None, params.policy))
    state = environment.reset(jax.random.split(key, ENVIRONMENTS))
    return acting.generate_unroll(
        environment, state, policy, key, UNROLL, extra_fields=("truncation",)
    )[1]


@functools.cache
def transitions():
    """Make the transitions of another policy, with observations of order one."""
    seen = jax.jit(unroll)(jax.tree.map(lambda x: 0.9 * x, agent()[2]), KEY)
    scale = lambda x: 1000 * x
    seen = seen._replace(
        observation=scale(seen.observation),
        next_observation=scale(seen.next_observation),
        reward=scale(seen.reward),
    )
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), seen)


def update():
    """Make brax's training step."""
    loss = functools.partial(losses.compute_ppo_loss, ppo_network=agent()[1], entropy_cost=0.0)
    step = gradients.gradient_update_fn(loss, OPTIMIZER, pmap_axis_name=None, has_aux=True)
    return jax.jit(step)


def arguments():
    params = agent()[2]
    return (params, None, transitions(), KEY), {"optimizer_state": OPTIMIZER.init(params)}


def layers(params, x):
    """Compute the two layers of a network in NumPy."""
    weights = jax.tree.map(np.asarray, params["params"])
    hidden = x @ weights["hidden_0"]["kernel"] + weights["hidden_0"]["bias"]
    swish = hidden / (1 + np.exp(-hidden))
    return hidden, swish @ weights["hidden_1"]["kernel"] + weights["hidden_1"]["bias"]


def test_unroll_by_brax_has_the_values_of_every_step():
    seen, taps = tapax.capture(unroll)(agent()[2], KEY)
    assert_close(seen, jax.jit(unroll)(agent()[2], KEY))
    assert seen.extras["state_extras"][
        "truncation"
    ].any()  # an episode ended, and the next one began
    hidden, logits = layers(agent()[2].policy, np.asarray(seen.observation))
    assert_close(taps.values["MLP/hidden_0"], hidden)
    assert_close(taps.values["MLP"], logits)
    assert_close(taps.values["MLP"], seen.extras["policy_extras"]["distribution_params"])


def advantages_of(seen, values, last, discount=0.9, decay=0.95):
    """Compute the value targets and the advantages by generalized advantage estimation."""
    going = 1 - seen.extras["state_extras"]["truncation"]
    ended = (1 - seen.discount) * going
    following = np.concatenate([values[1:], last[None]])
    delta = (seen.reward + discount * (1 - ended) * following - values) * going
    rest, sums = np.zeros(ENVIRONMENTS), []
    for i in reversed(range(UNROLL)):
        rest = delta[i] + discount * (1 - ended[i]) * going[i] * decay * rest
        sums.insert(0, rest)
    targets = np.array(sums) + values
    following = np.concatenate([targets[1:], last[None]])
    return targets, (seen.reward + discount * (1 - ended) * following - values) * going


def by_formula(params, seen):
    """Compute the gradients of the loss by the results of the policy and the value network."""
    _, logits = layers(params.policy, seen.observation)
    values = layers(params.value, seen.observation)[1][..., 0]
    last = layers(params.value, seen.next_observation[-1])[1][..., 0]
    targets, advantages = advantages_of(seen, values, last)
    advantages = (advantages - advantages.mean()) / advantages.std()
    did = seen.extras["policy_extras"]
    away = did["raw_action"] - logits[..., :1]
    spread = np.log1p(np.exp(logits[..., 1:])) + 0.001
    old, others = did["distribution_params"], np.log1p(np.exp(did["distribution_params"][..., 1:]))
    density = lambda x, s: -0.5 * (x / s) ** 2 - np.log(s)
    before = density(did["raw_action"] - old[..., :1], others + 0.001)
    ratio = np.exp(density(away, spread) - before)[..., 0]
    clipped = np.where(advantages > 0, ratio > 1.3, ratio < 0.7)
    push = (-advantages * ratio * ~clipped / ratio.size)[..., None]
    slopes = away / spread**2, (away**2 / spread**3 - 1 / spread) / (1 + np.exp(-logits[..., 1:]))
    return push * np.concatenate(slopes, -1), -0.5 * (targets - values)[..., None] / ratio.size


def test_update_of_brax_has_the_gradients_of_the_formula():
    args, kwargs = arguments()
    out, taps = tapax.capture(update())(*args, **kwargs)
    assert_close(out, update()(*args, **kwargs))
    steps_first = jax.tree.map(lambda x: np.asarray(x, np.float64).swapaxes(0, 1), transitions())
    by_logits, by_values = by_formula(args[0], steps_first)
    assert_close(taps.grads["policy_module"], by_logits, 1e-4)
    assert_close(taps.grads["value_module"], by_values, 1e-4)
    assert min(np.abs(by_logits).max(), np.abs(by_values).max()) > 1e-2
    assert "value_module@1" not in taps.grads  # of the final observation


def test_edited_gradient_of_one_network_leaves_it_untrained():
    args, kwargs = arguments()
    frozen = tapax.edit(update(), grads={"value_module": jnp.zeros_like})
    _, params, _ = frozen(*args, **kwargs)
    _, plain, _ = update()(*args, **kwargs)
    assert_close(params.policy, plain.policy)
    assert_close(params.value, args[0].value)
    assert not np.allclose(*(x.value["params"]["hidden_1"]["bias"] for x in (params, plain)))


def test_search_finds_the_ratio_that_overflows():
    args, kwargs = arguments()
    assert tapax.find_nonfinite(update())(*args, **kwargs) is None
    seen = transitions()
    did = seen.extras["policy_extras"]
    never = did | {"log_prob": did["log_prob"].at[1, 4].set(-200.0)}
    bad = seen._replace(extras=seen.extras | {"policy_extras": never})
    found = tapax.find_nonfinite(update())(args[0], None, bad, KEY, **kwargs)
    assert (found.operation, found.kind, found.phase) == ("exp", "inf", "forward")
    assert found.index == (4, 1) and "losses.py" in found.source
