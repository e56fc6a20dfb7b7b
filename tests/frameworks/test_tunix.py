"""Unmodified trainers of Tunix: the features that its wrapper sows, and their gradients."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tapax
from tests.oracles.closeness import assert_close

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("tunix")
    from tunix.distillation import distillation_trainer, strategies
    from tunix.distillation.feature_extraction import sowed_module
    from tunix.models.qwen3 import model as qwen3
    from tunix.sft import peft_trainer

pytestmark = pytest.mark.once

TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, 32, (2, 6)))
BATCH = peft_trainer.TrainingInput(input_tokens=TOKENS, input_mask=jnp.ones_like(TOKENS))


@pytest.fixture(autouse=True)
def quiet():
    """Ignore the warnings of Tunix and of its dependencies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def tiny_model(seed, remat="NONE"):
    config = qwen3.ModelConfig(
        num_layers=2, vocab_size=32, embed_dim=16, hidden_dim=24, num_heads=2, head_dim=8,
        num_kv_heads=1, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
        remat_config=qwen3.RematConfig[remat],
    )  # fmt: skip
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.3, x.dtype)
    nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.Param)))  # some start as zeros
    return model


def model_inputs(batch):
    rows, length = batch.input_tokens.shape
    return {
        "input_tokens": batch.input_tokens,
        "positions": jnp.tile(jnp.arange(length), (rows, 1)),
        "attention_mask": jnp.tril(jnp.ones((rows, length, length), bool)),
    }


def forward(model, input_tokens, positions, attention_mask):
    return model(input_tokens, positions, None, attention_mask)[0]


def labels(input_tokens, positions, attention_mask):
    return jax.nn.one_hot(jnp.roll(input_tokens, -1, axis=1), 32)


def loss(model, input_tokens, positions, attention_mask):
    inputs = input_tokens, positions, attention_mask
    return jnp.mean(optax.softmax_cross_entropy(forward(model, *inputs), labels(*inputs)))


def sown_features(model, layer):
    """Return the values that Tunix's wrapper sows for the layers of a class, in order."""
    sowed_module.wrap_model_with_sowed_modules(model, [layer])
    forward(model, **model_inputs(BATCH))
    found = jax.tree.leaves(sowed_module.pop_sowed_intermediate_outputs(model))
    sowed_module.unwrap_sowed_modules(model)
    return found


class AddedModule(nnx.Module):
    """A layer that adds a parameter to its result, to take a gradient with respect to it."""

    def __init__(self, layer, shape):
        self.layer, self.added = layer, nnx.Param(jnp.zeros(shape))

    def __call__(self, *args):
        return self.layer(*args) + self.added[...]


MLPS = ["Qwen3/layers/0/mlp", "Qwen3/layers/1/mlp"]
CONFIG = {"eval_every_n_steps": 10, "max_steps": 3}


@pytest.mark.parametrize("remat", ["NONE", "BLOCK"])
def test_features_and_gradients_of_a_fine_tuning_step_are_captured(remat):
    config = peft_trainer.TrainingConfig(**CONFIG)
    make = lambda model: peft_trainer.PeftTrainer(model, optax.sgd(0.1), config)
    trainers = [make(tiny_model(0, remat)) for _ in range(2)]
    steps = [
        t.with_loss_fn(loss).with_gen_model_input_fn(model_inputs).jit_train_and_eval_step()[0]
        for t in trainers
    ]
    plain = steps[0](BATCH)
    out, taps = tapax.capture(steps[1])(BATCH)
    assert_close(out, plain)
    states = [nnx.state(t.model, nnx.Param) for t in trainers]
    jax.tree.map(assert_close, *states)

    assert [name for name in taps.values if name.endswith("mlp")] == MLPS
    found = [taps.values[f"Qwen3/layers/{i}:1"] for i in range(2)]
    jax.tree.map(assert_close, found, sown_features(tiny_model(0, remat), qwen3.DecoderLayer))
    found = [taps.values[name] for name in MLPS]
    jax.tree.map(assert_close, found, sown_features(tiny_model(0, remat), qwen3.MLP))
    model = tiny_model(0, remat)
    for block in model.layers:
        block.mlp = AddedModule(block.mlp, (*TOKENS.shape, 16))
    grads = nnx.grad(loss)(model, **model_inputs(BATCH))
    for i in range(2):
        assert_close(taps.grads[f"Qwen3/layers/{i}/mlp"], grads["layers"][i]["mlp"]["added"][...])


@pytest.mark.parametrize("remat", ["NONE", "BLOCK"])
def test_student_and_teacher_in_a_distillation_step_are_captured(remat):
    """The step contains wrappers of Tunix, whose features the trainer uses."""
    config = distillation_trainer.TrainingConfig(**CONFIG)

    def make():
        strategy = strategies.FeaturePoolingStrategy(forward, forward, labels, qwen3.MLP, alpha=0.5)
        pair = tiny_model(0, remat), tiny_model(1, remat)
        trainer = distillation_trainer.DistillationTrainer(
            *pair, strategy, optax.sgd(0.1), config
        ).with_gen_model_input_fn(model_inputs)
        return trainer, trainer.jit_train_and_eval_step()[0]

    (one, plain), (other, step) = make(), make()
    wanted = plain(one._prepare_inputs(BATCH))
    prepared, teacher = tapax.capture(other._prepare_inputs, grads=None)(BATCH)
    assert_close(prepared.teacher_output, one._prepare_inputs(BATCH).teacher_output)
    out, student = tapax.capture(step)(prepared)
    assert_close(out, wanted)
    states = [nnx.state(t.model, nnx.Param) for t in (one, other)]
    jax.tree.map(assert_close, *states)
    for taps, seed in ((student, 0), (teacher, 1)):
        found = [taps.values[name] for name in MLPS]
        jax.tree.map(assert_close, found, sown_features(tiny_model(seed, remat), qwen3.MLP))
    model = tiny_model(0, remat)
    for block in model.layers:
        added = AddedModule(block.mlp, (*TOKENS.shape, 16))
        block.mlp = sowed_module.SowedModule(added)
    given = prepared.teacher_output, model_inputs(BATCH)
    grads = nnx.grad(lambda m: one.strategy.get_train_loss(m, *given))(model)
    for i, name in enumerate(MLPS):
        wanted = grads["layers"][i]["mlp"]["wrapped_model"]["added"][...]
        # The wrapper sows the result of this layer, so the loss depends on it in two ways.
        assert_close(student.grads[f"{name}/wrapped_model"], wanted)
