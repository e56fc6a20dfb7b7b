"""The rows of a harvest and their contents, and errors for bad arguments."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tapax
from tapax.data._transfer import _select_rows
from tests.models.harvested import embed, harvest, hidden, make_batches, model

BATCHES = make_batches()
TOKENS = np.concatenate([batch.ravel() for batch in BATCHES])


def equal(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


@pytest.fixture(scope="module")
def acts(tmp_path_factory):
    return harvest(tmp_path_factory.mktemp("acts"))


def test_rows_are_the_values_of_every_token_in_order(acts):
    assert len(acts) == len(TOKENS)
    assert acts.sites == ["net/embed", "net/hidden"]
    equal(acts["net/embed"], embed(TOKENS))
    equal(acts["net/hidden"], hidden(TOKENS))


def test_columns_say_where_each_row_comes_from(acts):
    assert acts.columns == ["batch", "example", "position", "token"]
    equal(acts["token"], TOKENS)
    places = [(n, i, j) for n, b in enumerate(BATCHES) for i, j in np.ndindex(b.shape)]
    found = zip(acts["batch"][:], acts["example"][:], acts["position"][:], strict=True)
    assert [tuple(map(int, place)) for place in found] == places


def test_statistics_are_those_of_all_rows(acts):
    rows = hidden(TOKENS).astype(np.float64)
    found = acts.stats["net/hidden"]
    assert (found.rows, found.nonfinite, found.overflowed) == (len(rows), 0, 0)
    np.testing.assert_allclose(found.mean, rows.mean(0), atol=1e-5)
    np.testing.assert_allclose(found.var, rows.var(0), atol=1e-4)
    np.testing.assert_allclose(found.std, rows.std(0), atol=1e-4)
    np.testing.assert_allclose(found.norm, np.linalg.norm(rows, axis=1).mean(), rtol=1e-5)
    assert found.largest == np.abs(rows).max()


def test_examples_become_rows_with_the_other_axes_inside(tmp_path):
    acts = harvest(tmp_path, rows="examples", batches=BATCHES[:3])
    equal(acts["net/embed"], np.concatenate([embed(batch) for batch in BATCHES[:3]]))
    assert acts.columns == ["batch", "example"]


def test_given_axes_become_rows_in_their_order(tmp_path):
    acts = harvest(tmp_path, rows=(1, 0), values="net/embed", batches=BATCHES[:1])
    equal(acts["net/embed"], embed(BATCHES[0].T).reshape(-1, 4))
    equal(acts["position"], np.tile([0, 1], 5).astype(np.int32))


@pytest.mark.parametrize("keep", [lambda b: b % 3 != 0, lambda b: jnp.asarray(b[:, 0] % 2 == 0)])
def test_rows_that_keep_drops_are_in_no_array(tmp_path, keep):
    acts = harvest(tmp_path, keep=keep)
    masks = [np.asarray(keep(batch)) for batch in BATCHES]
    kept = np.concatenate([b[mask].ravel() for b, mask in zip(BATCHES, masks, strict=True)])
    assert len(acts) == len(kept) < len(TOKENS)
    equal(acts["token"], kept)
    equal(acts["net/hidden"], hidden(kept))
    assert acts.stats["net/hidden"].rows == len(kept)
    np.testing.assert_allclose(acts.stats["net/hidden"].mean, hidden(kept).mean(0), atol=1e-5)


def test_other_counts_of_kept_rows_compile_at_most_sixteen_selections(tmp_path):
    counts = list(range(128, 0, -4))
    left = iter([counts[0], *counts])  # the mask of the first batch is also part of the manifest
    traced = []

    def fn(tokens):
        traced.append(tokens.shape)
        return model(tokens)

    def keep(batch):
        return np.arange(128).reshape(8, 16) < next(left)

    batches = make_batches(len(counts) + 1, (8, 16))[:-1]
    before = _select_rows._cache_size()
    acts = tapax.harvest(fn, batches, to=tmp_path, values="net/hidden", keep=keep, units=1)
    assert len(acts) == sum(counts)
    assert len(traced) <= 3  # to describe the first batch, and to compile
    assert _select_rows._cache_size() - before <= 16 < len(counts)


def test_nothing_kept_is_a_dataset_without_rows(tmp_path):
    acts = harvest(tmp_path, keep=lambda batch: np.zeros(batch.shape, bool))
    assert len(acts) == 0 and acts["net/hidden"][:].shape == (0, 4)
    assert acts.stats["net/hidden"].rows == 0
    assert list(acts.batches(3, seed=0)) == [] and acts.verify().is_whole
    assert "0 rows" in repr(tapax.open(tmp_path))


def test_a_batch_without_rows_adds_none(tmp_path):
    batches = [BATCHES[0], BATCHES[0][:0], BATCHES[1]]
    acts = harvest(tmp_path, batches=batches)
    equal(acts["token"], np.concatenate([batch.ravel() for batch in batches]))
    assert np.isfinite(acts.stats["net/hidden"].mean).all()


def test_a_batch_without_rows_adds_none_under_a_mask(tmp_path):
    batches = [BATCHES[0], BATCHES[0][:0], BATCHES[1]]
    acts = harvest(tmp_path, batches=batches, keep=lambda batch: batch > 3)
    tokens = np.concatenate([batch.ravel() for batch in batches])
    equal(acts["token"], tokens[tokens > 3])


def test_beside_adds_columns_and_repeats_those_of_examples(tmp_path):
    acts = harvest(
        tmp_path,
        batches=BATCHES[:2],
        beside=lambda b: {"label": b[:, 0], "token": b + 1, "pair": np.stack([b, -b], -1)},
    )
    equal(acts["label"], np.concatenate([np.repeat(b[:, 0], 5) for b in BATCHES[:2]]))
    equal(acts["token"], np.concatenate([b.ravel() + 1 for b in BATCHES[:2]]))
    assert acts["pair"].shape == (20, 2)


def test_numbers_of_another_byte_order_are_stored_as_numbers(tmp_path):
    labels = np.arange(4, dtype=np.int32)
    swapped = labels.astype(labels.dtype.newbyteorder())
    acts = tapax.harvest(
        lambda x: tapax.sow(2 * x, "h"),
        [swapped.astype(np.float32).astype(np.dtype(np.float32).newbyteorder()).reshape(4, 1)],
        to=tmp_path,
        beside=lambda x: {"label": swapped},
    )
    np.testing.assert_array_equal(acts["label"], labels)
    np.testing.assert_array_equal(acts["h"], 2.0 * labels.reshape(4, 1))


def test_an_array_for_each_example_has_to_be_repeated(tmp_path):
    with pytest.raises(ValueError, match=r"repeat it for its 4 rows\."):
        tapax.harvest(
            lambda x: tapax.sow(x, "h"),
            [jnp.ones((2, 4, 3))],
            to=tmp_path,
            beside=lambda x: {"embedding": np.ones((2, 3))},
        )


def test_rows_of_transposed_axes_have_no_column_of_tokens(tmp_path):
    tokens = np.arange(9).reshape(3, 3)
    acts = tapax.harvest(
        lambda t: tapax.sow(1.0 * t[..., None], "h"), [tokens], to=tmp_path, rows=(1, 0)
    )
    np.testing.assert_array_equal(acts["h"][:, 0], tokens.T.ravel())
    assert acts.columns == ["batch", "example", "position"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_values_are_stored_in_the_type_asked_for(tmp_path, dtype):
    acts = harvest(tmp_path, dtype=dtype, batches=BATCHES[:2])
    expected = hidden(TOKENS[:20]).astype(getattr(ml_dtypes, dtype, dtype))
    equal(acts["net/hidden"], expected)
    assert acts["token"].dtype == np.int32  # not a floating-point number


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16"])
def test_numbers_too_large_for_the_type_are_counted_and_warned_of(tmp_path, dtype):
    limit = float(jnp.finfo(dtype).max)

    def large(x):
        return tapax.sow(x, "h")

    batch = np.array([[limit, 1.0], [limit * 1.2, 1.0], [-limit * 8, 2.0]], np.float32)
    with pytest.warns(UserWarning, match=r"batch 0.*too large.*'h' \(2 rows\)"):
        acts = tapax.harvest(large, [batch], to=tmp_path, dtype=dtype)
    assert acts.stats["h"].overflowed == 2 and acts.stats["h"].nonfinite == 0


def test_rows_that_are_not_finite_are_counted_and_left_out_of_statistics(tmp_path):
    batch = np.array([[1.0, 2.0], [np.nan, 0.0], [3.0, -np.inf], [5.0, 6.0]], np.float32)
    with pytest.warns(UserWarning, match=r"batch 1.*not finite.*'h' \(2 rows\)"):
        acts = tapax.harvest(lambda x: tapax.sow(x, "h"), [batch[:1], batch[1:]], to=tmp_path)
    found = acts.stats["h"]
    assert (found.rows, found.nonfinite) == (2, 2)
    equal(found.mean, [3.0, 4.0])
    equal(acts["h"], batch)


def test_norms_of_huge_numbers_do_not_overflow(tmp_path):
    batch = np.array([[3e38, 3e38], [1e-30, 0], [0, 0]], np.float32)
    acts = tapax.harvest(lambda x: tapax.sow(x, "h"), [batch], to=tmp_path)
    np.testing.assert_allclose(acts.stats["h"].norm, 3e38 * 2**0.5 / 3, rtol=1e-5)


def scanned(tokens):
    """Run three layers in a scan; they are not modules, so tapax does not see layers."""
    x = jnp.asarray(embed(np.arange(13)))[tokens]

    def layer(x, scale):
        x = tapax.sow(x * scale, "layer")
        return x, None

    return jax.lax.scan(layer, x, jnp.array([2.0, 0.5, 4.0], x.dtype))[0]


def test_axes_of_loops_stay_in_the_row(tmp_path):
    acts = tapax.harvest(scanned, BATCHES, to=tmp_path, values="layer")
    x = embed(TOKENS)
    equal(acts["layer"], np.stack([2 * x, x, 4 * x], 1))


@pytest.mark.parametrize(
    ("step", "scales"), [(2, [4]), (slice(1, 3), [1, 4]), (slice(0, 3, 2), [2, 4])]
)
def test_iterations_that_are_picked_are_the_row_or_an_axis_of_it(tmp_path, step, scales):
    acts = tapax.harvest(scanned, BATCHES, to=tmp_path, values=tapax.at("layer", step=step))
    expected = np.stack([scale * embed(TOKENS) for scale in scales], 1)
    equal(acts["layer"], expected if isinstance(step, slice) else expected[:, 0])


def test_gradients_are_stored_with_values(tmp_path):
    def loss(tokens):
        def inner(table):
            h = tapax.sow(table[tokens], "h")
            return (h**2).sum()

        return jax.grad(inner)(jnp.asarray(embed(np.arange(13))))

    acts = tapax.harvest(loss, BATCHES, to=tmp_path, values="h", grads="h")
    assert acts.sites == ["h", "h.grad"]
    equal(acts["h"], embed(TOKENS))
    equal(acts["h.grad"], 2 * embed(TOKENS))


def test_nothing_after_the_last_site_is_computed(tmp_path):
    reached = []

    def observe(x):
        reached.append(x.shape)
        return x

    def fn(tokens):
        h = tapax.sow(jnp.asarray(embed(np.arange(13)))[tokens], "h")
        return tapax.sow(jax.pure_callback(observe, jax.typeof(h), h), "last")

    tapax.harvest(fn, BATCHES[:2], to=tmp_path / "cut", values="h")
    assert reached == []
    tapax.harvest(fn, BATCHES[:2], to=tmp_path / "whole", values="last")
    assert reached == [(2, 5, 4)] * 2


def test_batches_of_an_iterable_come_in_order(tmp_path):
    acts = harvest(tmp_path, batches=iter(BATCHES), units=None, shard_bytes=1000)
    equal(acts["net/hidden"], hidden(TOKENS))
    assert acts.is_complete and len(acts.manifest.arrays) == 6
    with pytest.raises(ValueError, match=r"already contains a dataset.*Give a sequence"):
        harvest(tmp_path, batches=iter(BATCHES), units=None, shard_bytes=1000)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Example:
    x: np.ndarray


def test_a_loader_may_reuse_the_buffer_of_a_dataclass(tmp_path):
    def load():
        memory = np.zeros(64 * 256 * 4 + 64, np.uint8)
        start = -memory.ctypes.data % 64  # JAX takes aligned memory without a copy
        buffer = memory[start : start + 64 * 256 * 4].view(np.float32).reshape(64, 256)
        for number in range(6):
            buffer[:] = number
            yield Example(buffer)

    acts = tapax.harvest(
        lambda batch: tapax.sow(1.0 * batch.x, "h"), load(), to=tmp_path, rows="examples"
    )
    np.testing.assert_array_equal(acts["h"][:, 0], np.repeat(np.arange(6.0), 64))


def test_lists_of_numbers_are_arrays_as_hugging_face_gives_them(tmp_path):
    batches = [{"input_ids": batch.tolist()} for batch in BATCHES]
    acts = tapax.harvest(
        lambda batch: model(batch["input_ids"]), batches, to=tmp_path, values="net/embed"
    )
    assert acts["token"][:].tolist() == TOKENS.tolist()
    equal(acts["net/embed"], embed(TOKENS))


def test_a_seed_deals_batches_out_to_units(tmp_path):
    acts = harvest(tmp_path, seed=3, batches=BATCHES[:-1], units=3)
    numbers = acts["batch"][:]
    assert sorted(set(numbers)) == list(range(6)) and numbers.tolist() != sorted(numbers)
    equal(acts["net/embed"], embed(np.concatenate([BATCHES[n].ravel() for n in numbers[::10]])))


def test_a_partial_function_is_given_its_weights_as_arguments(tmp_path):
    def fn(weights, tokens):
        return tapax.sow(weights[tokens], "h")

    weights = jnp.asarray(embed(np.arange(13)))
    acts = tapax.harvest(functools.partial(fn, weights), BATCHES, to=tmp_path)
    equal(acts["h"], embed(TOKENS))


def branching(x):
    return jax.lax.cond(x.sum() > 0, lambda x: tapax.sow(2 * x, "h"), lambda x: x, x)


def test_a_branch_that_did_not_run_raises_and_names_the_batch(tmp_path):
    ones = np.ones((2, 3), np.float32)
    assert len(tapax.harvest(branching, [ones, ones], to=tmp_path / "all")) == 4
    with pytest.raises(tapax.SiteError, match="'h' is in a branch or a loop that batch 1 did not"):
        tapax.harvest(branching, [ones, -ones], to=tmp_path / "some")


def test_a_batch_that_fails_commits_no_unit_without_it(tmp_path):
    ones = np.ones((2, 3), np.float32)
    with pytest.raises(tapax.SiteError, match="batch 1 did not"):
        tapax.harvest(branching, [ones, -ones, ones, ones], to=tmp_path, units=1)
    assert list((tmp_path / "shards").iterdir()) == []


@pytest.mark.parametrize(
    ("site", "message"),
    [
        (lambda x: x * 1j, "is of type complex64, which a dataset cannot store"),
        (lambda x: jax.random.split(jax.random.key(0), (2, 3)), "contains random keys"),
        (lambda x: x.sum((0, 1)), "has the shape [4], but rows='tokens' needs 2 axes"),
    ],
)
def test_values_that_a_dataset_cannot_hold_are_refused(tmp_path, site, message):
    batches = [np.ones((2, 3, 4), np.float32)]
    with pytest.raises((TypeError, tapax.SiteError), match=re.escape(message)):
        tapax.harvest(lambda x: tapax.sow(site(x), "h"), batches, to=tmp_path)


def test_a_harvest_under_a_transformation_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"cannot be called under jax\.jit"):
        jax.jit(lambda x: len(harvest(tmp_path, batches=[x])))(BATCHES[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": "net/hiden"}, "'net/hidden'"),
        ({"values": "nothing/*"}, "values='nothing/*' picks nothing: tracing the function reached"),
        ({"values": None}, "The harvest has no sites"),
        ({"grads": "**"}, "grads='**' selects no gradient: the function takes none itself"),
        ({"values": ["net/embed", "net/score"]}, "'net/score' of [2]"),
        ({"values": "net/score", "rows": (0, 3)}, "`rows` is (0, 3)"),
        ({"rows": "words"}, "`rows` must be 'tokens', 'examples'"),
        ({"layers": "both"}, "`layers` must be 'sites' or 'axis'"),
        ({"keep": lambda b: b}, "`keep` should give booleans"),
        ({"keep": lambda b: b[:, :3] > 0}, "The mask of `keep` has the shape [2, 3]"),
        ({"beside": lambda b: {"x": b[:, :3]}}, "The column 'x' of `beside` has the shape"),
        ({"beside": lambda b: {"net/embed": b}}, "A site and a column are both called"),
        ({"beside": lambda b: {"x": np.full(b.shape, "a")}}, "which a dataset cannot store"),
        ({"beside": lambda b: [b]}, "`beside` should return a dict"),
        ({"dtype": "int8"}, "`dtype` takes a floating-point type"),
        ({"dtype": "complex64"}, "which a dataset cannot store"),
        ({"units": 0}, "`units` takes an integer, 1 at least"),
        ({"units": None, "shard_bytes": 0}, "`shard_bytes` takes an integer, 1 at least"),
        ({"seed": "a"}, "`seed` takes an integer"),
        ({"worker": (2, 2)}, "the last is 1"),
        ({"worker": 1}, "`worker` takes two integers"),
        ({"batches": []}, "`batches` has no batches"),
        ({"batches": {"tokens": BATCHES[0]}}, "for one batch, give [batch]"),
        ({"batches": iter(BATCHES), "units": None, "worker": (0, 2)}, "Give a sequence"),
        ({"batches": iter(BATCHES), "units": 2}, "`batches` is an iterable"),
        ({"batches": iter(BATCHES), "units": None, "seed": 0}, "Give a sequence"),
        ({"batches": [BATCHES[0], BATCHES[0].astype(np.int8)]}, "in batch 1 a row of 'token' is"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(tmp_path, options, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        harvest(tmp_path, **options)
