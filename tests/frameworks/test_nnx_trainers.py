"""Plain objects that hold NNX objects, such as trainers, and their state.

The oracle is the plain step: a captured step leaves the trainer in the same state.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import tapax
from tests.oracles.closeness import assert_close

X = jnp.linspace(-1.0, 1.0, 32, dtype=jnp.float32).reshape(8, 4)


class Running:
    """A trainer whose state changes with every step: a key, a count and the last loss."""

    def __init__(self):
        self.model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)
        self.key = jax.random.key(0)
        self.count, self.width, self.last = 0, 4, None

    def step(self, x):
        self.key, key = jax.random.split(self.key)
        x = tapax.sow(x + jax.random.normal(key, (len(x), self.width), x.dtype), "noisy")

        def loss(model):
            return jnp.mean(model(x) ** 2)

        self.last, grads = nnx.value_and_grad(loss)(self.model)
        self.optimizer.update(self.model, grads)
        self.count += 1
        return self.last


def test_captured_steps_change_a_trainer_like_plain_steps():
    plain, seen = Running(), Running()
    captured = tapax.capture(seen.step)
    for number in range(3):
        expected = plain.step(X)
        out, taps = captured(X)
        assert_close(out, expected)
        assert_close(seen.last, plain.last)
        assert (jax.random.key_data(seen.key) == jax.random.key_data(plain.key)).all()
        assert type(seen.count) is int and seen.count == plain.count == number + 1
        assert_close(seen.model.kernel[...], plain.model.kernel[...])
    assert seen.width == 4 and "noisy" in taps.values


def test_a_step_is_traced_once_for_each_structure_of_the_state():
    traces = []

    class Counted(Running):
        def step(self, x):
            traces.append(1)
            return super().step(x)

    captured = tapax.capture(Counted().step)
    for _ in range(4):
        captured(X)
    assert len(traces) == 2  # only before the first step is the last loss None


class Trainer:
    def __init__(self, step):
        self.model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.way = step
        self.count, self.half, self.turn, self.warm, self.mode = 0, 1, 0, False, "a"
        self.last, self.mean, self.log, self.settings = None, 0.0, [], {1: 2, "a": "b"}
        self.params = {"z": {"w": jnp.ones(4, jnp.float32)}, "b": jnp.zeros(4, jnp.float32)}

    def step(self, x):
        return self.way(self, x)

    def __call__(self, x):
        return self.way(self, x)


def count(self, x):
    self.count += self.settings[1]
    return self.model(x) * self.count


def count_in_a_branch(self, x):
    self.count += 1
    return self.model(x) * (2 if self.count % 2 else 3)


def halve_what_was_whole(self, x):
    self.half = self.half / 2
    return self.model(x) * self.half


def take_turns(self, x):
    self.turn = 1 - self.turn
    return self.model(x) * (2 if self.turn else 3)


def flags_and_names(self, x):
    out = self.model(x) * (2 if self.warm else 3) * (4 if self.mode == "a" else 5)
    self.warm, self.mode = True, "b" if self.mode == "a" else "a"
    return out


def keep_the_last(self, x):
    out = self.model(x)
    before, self.last = self.last, out
    return out if before is None else out - before


def a_mean_that_was_a_number(self, x):
    out = self.model(x)
    self.mean = 0.9 * self.mean + 0.1 * jnp.mean(out)
    return out - self.mean


def in_place(self, x):
    self.params["b"] = self.params["b"] + 1
    self.params["z"]["w"] *= 2
    self.log.append(jnp.sum(self.params["b"]))
    return self.model(x) * self.params["z"]["w"] + self.params["b"]


def in_a_gradient(self, x):
    def loss(x):
        self.count += 1
        return jnp.sum(self.model(x) ** 2)

    return jax.grad(loss)(x) * self.count


def in_a_jitted_function(self, x):
    @jax.jit
    def run(x):
        self.count += 1
        return self.model(x)

    return run(x) * self.count


STEPS = [
    count,
    count_in_a_branch,
    halve_what_was_whole,
    take_turns,
    flags_and_names,
    keep_the_last,
    a_mean_that_was_a_number,
    in_place,
    in_a_gradient,
    in_a_jitted_function,
]
WAYS = {
    "method": lambda trainer: trainer.step,
    "object": lambda trainer: trainer,
    "closure": lambda trainer: lambda x: trainer.way(trainer, x),
}


def _state(trainer):
    return {k: v for k, v in vars(trainer).items() if k not in ("model", "way", "settings")}


def _same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert [*map(type, jax.tree.leaves(first))] == [*map(type, jax.tree.leaves(second))]
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize(
    "how",
    [
        *("method", "closure"),
        *(pytest.param(how, marks=pytest.mark.many) for how in ("object", "op by op", "argument")),
    ],
)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_trainer_is_as_after_the_plain_step(step, how):
    plain, seen = Trainer(step), Trainer(step)
    way = WAYS.get(how, WAYS["method"])
    run, held = way(plain), way(seen)
    captured = tapax.capture((lambda held, x: held(x)) if how == "argument" else held)
    log, params, inner = seen.log, seen.params, seen.params["z"]
    for number in range(4):
        x = X + number
        expected = run(x)
        with jax.disable_jit(how == "op by op"):
            out, taps = captured(held, x) if how == "argument" else captured(x)
        assert_close(out, expected)
        assert_close(taps.values["Linear"], plain.model(x))
        _same(_state(seen), _state(plain))
    assert seen.log is log and seen.params is params and params["z"] is inner


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_captured_step_in_a_jitted_function(step):
    """Counts advance when the step is traced, as in the plain step."""
    plain, seen = Trainer(step), Trainer(step)
    captured = tapax.capture(seen.step)
    expected, out = jax.jit(plain.step)(X), jax.jit(lambda x: captured(x)[0])(X)
    assert_close(out, expected)
    kept = lambda trainer: {k: v for k, v in _state(trainer).items() if isinstance(v, (int, str))}
    assert kept(seen) == kept(plain)


class Counter(Trainer):
    def step(self, x):
        self.count += 2
        return self.way(self, x) * self.count


@pytest.mark.parametrize("where", ["method", "function"])
def test_a_count_compiles_nothing_and_listing_counts_nothing(where):
    traces = []

    def step(self, x):
        traces.append(1)
        return count(self, x) if where == "function" else self.model(x)

    trainer = (Trainer if where == "function" else Counter)(step)
    captured = tapax.capture(trainer.step)
    assert tapax.sites(trainer.step)(X).names == ["Linear"]
    assert trainer.count == 0
    traces.clear()
    for number in range(4):
        out, _ = captured(X)
        assert trainer.count == 2 * (number + 1)
        assert_close(out, trainer.model(X) * trainer.count)
    # The assignment is in a function, not in a method, so only tracing finds it.
    assert len(traces) == (2 if where == "function" else 1)


def test_a_leaked_tracer_stays_unusable():
    """A leaked traced value stays unusable, as without a capture."""

    def step(self, x):
        def loss(x):
            self.last = jnp.sum(self.model(x) ** 2)
            return self.last

        return jax.grad(loss)(x)

    plain, seen = Trainer(step), Trainer(step)
    captured = tapax.capture(seen.step)
    for _ in range(3):
        assert_close(captured(X)[0], plain.step(X))


def test_state_that_was_changed_from_outside():
    trainer = Trainer(in_place)
    captured = tapax.capture(trainer.step)
    for number in range(3):
        trainer.params["b"] = jnp.full(4, number, jnp.float32)
        trainer.params["z"]["w"] = jnp.ones(4, jnp.float32)
        out = captured(X)[0]
        assert_close(out, trainer.model(X) * 2 + number + 1)
        trainer.log.clear()
