"""The autoencoder and the probes of the examples, at a toy size, against NumPy."""

import dataclasses

import numpy as np
import pytest
from rich.console import Console

import tapax
from examples import linear_probe, sparse_autoencoder
from examples.sparse_autoencoder import QUICK, SITE, TOPICS, WORDS, write_text

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse_autoencoder")
    return folder, sparse_autoencoder.run(folder, QUICK, Console(quiet=True))


def test_text_keeps_to_the_topic_of_its_paragraph():
    text = write_text(20, 24, seed=5)
    for place, topic in enumerate(TOPICS):
        words = {WORDS[token] for token in text["tokens"][text["topic"] == place]}
        others = (part for name in TOPICS if name != topic for part in TOPICS[name])
        assert words & set(TOPICS[topic][0].split())
        assert not words & {word for part in others for word in part.split()}


@pytest.mark.many
def test_second_run_reads_the_dataset_of_the_first(first_run):
    folder, first = first_run
    files = [folder / "model.safetensors", *sorted((folder / "acts" / "shards").iterdir())]
    before = [file.stat().st_mtime_ns for file in files]
    again = sparse_autoencoder.run(folder, QUICK, Console(quiet=True))
    assert [file.stat().st_mtime_ns for file in files] == before
    np.testing.assert_allclose(again.explained, first.explained, rtol=1e-4)
    assert {"autoencoder.png", "contexts.txt"} <= {file.name for file in folder.iterdir()}


def encode_by_hand(sae, x):
    scores = (x - sae.center) / sae.scale @ np.asarray(sae.encoder) + sae.bias
    scores = np.maximum(scores, 0)
    dropped = np.argsort(-scores, axis=-1)[..., sae.active :]
    np.put_along_axis(scores, dropped, 0, axis=-1)
    return scores


def test_reported_numbers_are_those_of_the_dataset(first_run):
    folder, _ = first_run
    acts = tapax.open(folder / "acts")
    sae, _ = sparse_autoencoder.train_autoencoder(acts, dataclasses.replace(QUICK, epochs=1))
    model = sparse_autoencoder.load_model(folder / "model.safetensors", QUICK)
    report = sparse_autoencoder.judge(sae, model, acts, QUICK)
    x = np.asarray(acts[SITE][:])
    latents = encode_by_hand(sae, x)
    rebuilt = latents @ np.asarray(sae.decoder) * sae.scale + sae.center
    left = np.sum((x - rebuilt) ** 2) / np.sum((x - x.mean(0)) ** 2)
    np.testing.assert_allclose(report.explained, 1 - left, rtol=1e-3)
    np.testing.assert_allclose(report.l0, (latents > 0).sum(1).mean(), rtol=1e-3)
    assert abs(report.dead - (latents == 0).all(0).sum()) <= 1
    tokens = write_text(128, QUICK.length, seed=3)["tokens"]
    plain = sparse_autoencoder.loss_fn(model, tokens)
    np.testing.assert_allclose(report.losses["plain"], plain, rtol=1e-5)
    blocks = list(model.blocks)
    model.blocks[1] = lambda x, mask: sae(blocks[1](x, mask))
    rebuilt_loss = sparse_autoencoder.loss_fn(model, tokens)
    np.testing.assert_allclose(report.losses["reconstructed"], rebuilt_loss, rtol=1e-4)


def test_contexts_are_where_a_latent_is_largest(first_run):
    folder, _ = first_run
    acts = tapax.open(folder / "acts")
    sae, _ = sparse_autoencoder.train_autoencoder(acts, dataclasses.replace(QUICK, epochs=1))
    latents = encode_by_hand(sae, np.asarray(acts[SITE][:]))
    often = int((latents > 0).sum(0).argmax())
    found = sparse_autoencoder.top_contexts(sae, acts, [often], count=1)[often]
    row = int(latents[:, often].argmax())
    assert found[0].endswith(f"[{WORDS[acts['token'][row]]}]")


def test_probes_read_topics_better_than_chance(first_run):
    folder, _ = first_run
    right = linear_probe.run(folder, QUICK, Console(quiet=True))
    assert list(right) == ["GPT/blocks/0", "GPT/blocks/1"]
    assert all(share > 0.3 for share in right.values())
    assert (folder / "probe.png").exists()
