"""Batches in the forms that loaders give them: reused buffers, text, labels, errors."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax


def same(batch):
    return tapax.sow(batch * 1, "h")


def reused_iterable():
    buffer = np.empty((2, 3, 4), np.float32)
    for i in range(4):
        buffer[...] = i
        yield buffer


class ReusedSequence:
    buffer = np.empty((2, 3), np.int32)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        self.buffer[...] = i
        return self.buffer


def test_an_iterable_that_reuses_its_buffer(tmp_path):
    acts = tapax.harvest(same, reused_iterable(), to=tmp_path)
    assert acts["h"][::6, 0].tolist() == [0, 1, 2, 3]


def test_a_sequence_that_reuses_its_buffer(tmp_path):
    acts = tapax.harvest(
        lambda tokens: tapax.sow(jnp.stack([tokens, tokens], -1), "h"),
        ReusedSequence(),
        to=tmp_path,
        units=1,
        beside=lambda tokens: {"view": tokens, "first": tokens[:, 0]},
    )
    for name in ("token", "view", "first"):
        assert acts[name][::6].tolist() == [0, 1, 2, 3]
    assert acts["h"][::6, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "wrap", [lambda x: (x, {"x": x}), lambda x: [x, {"x": x}]], ids=["tuple", "list"]
)
def test_reused_buffers_inside_of_containers(tmp_path, wrap):
    acts = tapax.harvest(
        lambda batch: tapax.sow(batch[0] + batch[1]["x"], "h"),
        map(wrap, reused_iterable()),
        to=tmp_path,
    )
    assert acts["h"][::6, 0].tolist() == [0, 2, 4, 6]


def test_batches_before_one_that_raises_are_stored(tmp_path):
    def batches():
        for i in range(3):
            yield np.full((2, 4), i, np.float32)
        raise OSError("the disk of the loader is gone")

    with pytest.raises(OSError, match="the disk of the loader is gone"):
        tapax.harvest(same, batches(), to=tmp_path, shard_bytes=1)
    with pytest.warns(UserWarning, match="3 units. Its batches came from an iterable"):
        acts = tapax.open(tmp_path)
    assert acts["batch"][:].tolist() == [0, 0, 1, 1, 2, 2]


def test_text_that_differs_between_batches_is_warned_of_once(tmp_path):
    def batches(text):
        return [{"x": np.ones((2, 4), np.float32), "text": [text(i)] * 2} for i in range(4)]

    def fn(batch):
        return same(batch["x"])

    with pytest.warns(UserWarning, match="different text: 'text/0'. Text is static") as caught:
        tapax.harvest(fn, batches(str), to=tmp_path / "different")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tapax.harvest(fn, batches(lambda i: "same"), to=tmp_path / "same")


def test_an_array_of_text_is_refused(tmp_path):
    batch = {"x": np.ones((2, 4), np.float32), "id": np.array(["a", "b"])}
    with pytest.raises(TypeError, match="an array of type <U1, which JAX does not take"):
        tapax.harvest(lambda batch: same(batch["x"]), [batch], to=tmp_path)


def test_a_function_is_traced_as_often_for_many_batches_of_two_shapes_as_for_few(tmp_path):
    def count_traces(batches, name):
        traced = []

        def fn(x):
            traced.append(x.shape)
            return tapax.sow(2 * x, "h")

        acts = tapax.harvest(fn, batches, to=tmp_path / name)
        np.testing.assert_array_equal(acts["h"], 2 * np.concatenate(batches))
        return len(traced)

    pair = [np.ones((3, 4), np.float32), np.full((5, 4), 2, np.float32)]
    assert count_traces(pair, "few") == count_traces(pair * 6, "many")


def test_batches_of_a_memory_map_are_read_one_by_one(tmp_path):
    numbers = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    np.save(tmp_path / "batches.npy", numbers)
    mapped = np.load(tmp_path / "batches.npy", mmap_mode="r")
    acts = tapax.harvest(same, mapped, to=tmp_path / "acts", units=2)
    np.testing.assert_array_equal(acts["h"], numbers.reshape(12, 2))
    assert acts.progress == "2 of 2 units"


class Source:
    """A source as Grain has them: not a sequence of Python, but with `len` and `[]`."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return np.full((2, 3), number, np.float32)


def test_a_source_with_len_and_items_is_resumable(tmp_path):
    options = {"to": tmp_path, "units": 4}
    part = tapax.harvest(same, Source(), **options, worker=(1, 2), take_over=False)
    assert part["h"][:, 0].tolist() == [1, 1, 3, 3]
    acts = tapax.harvest(same, Source(), **options)
    assert acts["h"][:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and acts.is_complete


def test_labels_of_examples_are_not_tokens(tmp_path):
    batch = {"x": np.ones((2, 4), np.float32), "label": np.array([3, 1])}
    acts = tapax.harvest(lambda b: same(b["x"]), [batch], to=tmp_path, rows="examples")
    assert acts.columns == ["batch", "example"]


@pytest.mark.parametrize("name", ["attention_mask", "labels", "targets", "token_type_ids"])
def test_other_integers_of_each_position_are_not_tokens(tmp_path, name):
    ids = np.arange(6, dtype=np.int32).reshape(2, 3)
    batch = {"x": np.ones((2, 3, 4), np.float32), name: ids + 40}
    one = tapax.harvest(lambda b: same(b["x"]), [batch], to=tmp_path / "one")
    assert one.columns == ["batch", "example", "position"]
    both = tapax.harvest(lambda b: same(b["x"]), [{**batch, "words": ids}], to=tmp_path / "both")
    np.testing.assert_array_equal(both["token"], ids.ravel())


@pytest.mark.parametrize(
    ("name", "activation", "rows"),
    [
        ("gelu", jax.nn.gelu, "tokens"),
        ("tanh", jnp.tanh, "tokens"),
        ("tanh", jnp.tanh, (0, 1, 2)),
        ("silu", jax.nn.silu, "examples"),
    ],
)
def test_rows_have_the_bits_of_a_capture(tmp_path, name, activation, rows):
    weights = jax.random.normal(jax.random.key(1), (8, 2, 4))
    batches = [jax.random.normal(jax.random.key(i), (4, 6, 8)) for i in range(3)]

    def heads(x):
        return tapax.sow(activation(jnp.einsum("btd,dhk->bthk", x, weights)), "q")

    acts = tapax.harvest(heads, batches, to=tmp_path, rows=rows)
    captured = [np.asarray(tapax.capture(heads)(x)[1].values["q"]) for x in batches]
    expected = np.concatenate(captured).reshape(-1, *acts["q"].shape[1:])
    np.testing.assert_array_equal(acts["q"][:], expected)
