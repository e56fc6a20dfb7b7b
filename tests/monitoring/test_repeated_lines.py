"""Lines with the names of an earlier line are parsed as `json` would parse them."""

import json

import numpy as np
import pytest

from tapax import sink
from tapax.monitoring._log_tail import LogTail
from tapax.monitoring._repeated_lines import NumberRecord, RepeatedLineParser

NAMES = [f"GPT/blocks/{i}/value_rms" for i in range(100)]


def line(step, record):
    return json.dumps({"tapax": 1, "step": step, "record": record}).encode() + b"\n"


@pytest.fixture
def parser():
    made = RepeatedLineParser()
    record = dict.fromkeys(NAMES, 0.5)
    made.learn(line(0, record), record)
    return made


def test_numbers_of_every_form_are_those_of_json(parser):
    rng = np.random.default_rng(0)
    drawn = [
        rng.normal(size=100),
        10.0 ** rng.uniform(-300, 300, 100),
        10.0 ** rng.uniform(-5, 18, 100),
        -(10.0 ** rng.uniform(-5, 5, 100)),
        rng.normal(size=100).astype(np.float32).astype(float),
        rng.integers(-50, 50, 100).astype(float),
        np.full(100, -0.0),
        np.full(100, 5e-324),
        np.full(100, -1.7976931348623157e308),
    ]
    for step, numbers in enumerate(drawn):
        found = parser.parse(line(step, dict(zip(NAMES, numbers.tolist(), strict=True))))
        assert found is not None and found[0] == step
        np.testing.assert_allclose(found[1].numbers, numbers, rtol=4e-15)
        assert list(found[1]) == NAMES and dict(found[1]) == dict(found[1].items())
    single = drawn[4]
    found = parser.parse(line(0, dict(zip(NAMES, single.tolist(), strict=True))))
    assert (found[1].numbers.astype(np.float32) == single).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text[:-2] + b"\n",
        lambda text: text.replace(b'"tapax": 1', b'"tapax": 2'),
        lambda text: text.replace(b'"step": 7', b'"step": -7'),
        lambda text: text.replace(b'"step": 7', b'"step": "7"'),
        lambda text: text.replace(b"0.5", b'"NaN"', 1),
        lambda text: text.replace(b"0.5", b"[0.5]", 1),
        lambda text: text.replace(b"0.5", b"0.5.5", 1),
        lambda text: text.replace(b"0.5", b"null", 1),
        lambda text: text.replace(b"0.5", b"0.5 1.5", 1),
        lambda text: text.replace(b"0.5", b"0." + 40 * b"5", 1),
        lambda text: text.replace(b"blocks/1/", b"blocks/x/"),
        lambda text: text.replace(b"0.5, ", b"", 1),
        lambda text: text.replace(b"}}\n", b', "more": 0.5}}\n'),
    ],
)
def test_lines_of_another_form_are_left_to_json(parser, change):
    text = line(7, dict.fromkeys(NAMES, 0.5))
    assert parser.parse(text) is not None
    assert parser.parse(change(text)) is None


def test_a_log_is_read_to_the_end_whatever_its_lines(tmp_path):
    write = sink.jsonl(tmp_path / "run.jsonl")
    records = [
        dict.fromkeys(NAMES, 0.25),
        dict.fromkeys(NAMES, 1e-7),
        {"loss": 3.0},
        {**dict.fromkeys(NAMES, 2.5), "loss": 1.0},
        {**dict.fromkeys(NAMES, 3.5), "loss": float("inf")},
        dict.fromkeys(reversed(NAMES), 4.5),
        dict.fromkeys(NAMES, 5.5),
    ]
    for step, record in enumerate(records):
        write(step, record)
    exact, rounded = (list(LogTail(write.path, exact=exact).read()) for exact in (True, False))
    assert [(step, dict(record)) for step, record in rounded] == exact
    assert exact == list(enumerate(records))
    assert [type(record) for _, record in rounded].count(NumberRecord) >= 1
