"""The conformance tables: how a mark is decided, and what the page says about tapax."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from conformance import report
from conformance.cases import CASES
from conformance.columns import COLUMNS
from conformance.library import (
    ERROR,
    MISSING,
    REFUSES,
    UNDEFINED,
    WORKS,
    WRONG,
    Library,
    judge,
    load,
)
from conformance.measure import measure
from conformance.problem import Found, expected

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"
DATA = ROOT / "docs" / "conformance.json"
OURS = [column for column in COLUMNS if column.group == "tapax"]
SOME = ["train", "jit/ran", "vmap/lifted", "scan/closed", "remat/argument", "stack/raw"]
SOME += ["while_loop/closed", "train_while", "vmap_cond/closed", "map/closed"]
SOME += ["twice", "nested", "exception", "mutated", "unknown"]
SHORT = {"custom_vjp/around", "custom_vjp/argument"}
"""The cases that tapax gets wrong; the page explains each."""


def case(name):
    return next(case for case in CASES if case.name == name)


@pytest.mark.many
@pytest.mark.parametrize("column", OURS, ids=lambda column: column.name)
@pytest.mark.parametrize("name", SOME)
def test_tapax_is_right_in_a_sample_of_the_cases(name, column):
    value, gradient = judge(load(column.library), case(name))
    assert value.mark in (WORKS, MISSING), value.why
    assert gradient.mark in (WORKS, MISSING, UNDEFINED), gradient.why
    assert value.mark == WORKS or name in ("remat/argument", "stack/raw")


def test_tapax_sees_inside_custom_root_or_says_that_it_cannot():
    """In jax 0.12, unlike in 0.10, `custom_root` is an opaque call."""
    value, _ = judge(load("conformance.library_tapax:EQUINOX"), case("root_forward/closed"))
    assert value.mark == WORKS or (value.mark == REFUSES and "is not captured" in value.why)


class Fake(Library):
    """A library that returns the right value, after calling `act`."""

    name = "fake"
    modules = (__name__.partition(".")[0],)

    def __init__(self, act=lambda found: found):
        self.act = act

    def missing(self, case, what):
        return what == "gradient"

    def value(self, case):
        answer = expected(case)
        return self.act(Found(answer.loss, answer.values))


def refuse(found):
    raise ValueError("fake cannot do this. Do that.")


def fail(found):
    return json.loads("")


def warn(found):
    warnings.warn("fake left something out", stacklevel=1)
    return Found(found.loss, {})


@pytest.mark.parametrize(
    ("act", "mark", "why"),
    [
        (lambda found: found, WORKS, ""),
        (refuse, REFUSES, "ValueError: fake cannot do this"),
        (fail, ERROR, "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        (warn, REFUSES, "0 values instead of 1, with a warning: fake left something out"),
        (lambda found: Found(found.loss, {}), WRONG, "0 values instead of 1"),
        (lambda found: Found(found.loss + 1, found.arrays), WRONG, "the loss changed"),
        (
            lambda found: Found(found.loss, {"lin": [2 * x for x in found.arrays["lin"]]}),
            WRONG,
            "the value differs",
        ),
        (
            lambda found: Found(
                found.loss, {"lin": [x.astype("bfloat16") for x in found.arrays["lin"]]}
            ),
            WRONG,
            "bfloat16 instead of float32",
        ),
        (lambda found: Found(found.loss, found.arrays, "a mess"), WRONG, "a mess"),
    ],
)
def test_a_mark_is_decided_by_what_the_library_does(act, mark, why):
    value, gradient = judge(Fake(act), case("straight"))
    assert (value.mark, value.why) == (mark, why or value.why)
    assert gradient.mark == MISSING


def test_a_warning_of_other_code_is_not_a_refusal():
    fake = Fake(warn)
    fake.modules = ("elsewhere",)
    value, _ = judge(fake, case("straight"))
    assert (value.mark, value.why) == (WRONG, "0 values instead of 1")


def test_a_site_that_does_not_exist_has_to_raise():
    value, _ = judge(Fake(refuse), case("unknown"))
    assert value.mark == WORKS
    value, _ = judge(Fake(lambda found: Found(None, {}, "no error")), case("unknown"))
    assert (value.mark, value.why) == (WRONG, "no error")


def test_a_summed_gradient_is_called_summed():
    _, gradient = judge(load("conformance.library_linen"), case("twice"))
    assert (gradient.mark, gradient.why) == (WRONG, "1 gradient instead of 2, summed")


def test_the_example_of_the_page_runs():
    names = ["straight", "twice", "scan/closed", "vmap_cond/closed"]
    verdicts = measure("conformance.example:Callback", names)["verdicts"]
    assert [verdicts[name][0][0] for name in names] == [WORKS, WORKS, WORKS, WRONG]
    assert verdicts["straight"][1] == [MISSING]


def test_a_library_of_another_project_is_judged_by_a_command(tmp_path):
    (tmp_path / "mymodule.py").write_text(
        "from conformance.example import Callback\n\n\nclass Mine(Callback):\n    name = 'mine'\n"
    )
    command = [sys.executable, "-m", "conformance.run", "--library", "mymodule:Mine"]
    done = subprocess.run(
        [*command, "--case", "straight"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "mine" in done.stdout and "works / missing" in done.stdout


def test_the_page_shows_the_data():
    data = json.loads(DATA.read_text())
    assert report.dump(data) == DATA.read_text()
    page = PAGE.read_text()
    assert report.render(page, data) == page, "Run python -m conformance.run --render."


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="The page has no lines '<!-- begin versions -->'"):
        report.render("# Conformance\n", json.loads(DATA.read_text()))


def test_the_data_has_every_case_of_every_column():
    data = json.loads(DATA.read_text())
    assert list(data) == [column.name for column in COLUMNS]
    for column in data.values():
        assert set(column["verdicts"]) == {case.name for case in CASES}


@pytest.mark.parametrize("column", OURS, ids=lambda column: column.name)
def test_the_page_says_where_tapax_falls_short(column):
    verdicts = json.loads(DATA.read_text())[column.name]["verdicts"]
    marks = {name: {mark for mark, *_ in pair} for name, pair in verdicts.items()}
    assert {name for name, seen in marks.items() if WRONG in seen} <= SHORT
    assert {name for name, seen in marks.items() if REFUSES in seen} <= {"root_forward/closed"}
    assert not any(ERROR in seen for seen in marks.values())


def test_names_and_titles_are_unique():
    assert len({case.name for case in CASES}) == len({case.title for case in CASES}) == len(CASES)
