"""Tests of the command `tapax harvest`."""

import re

import pytest

import tapax
from tapax.__main__ import main
from tests.models import harvested

SCRIPT = """
from tests.models.harvested import make_batches, model

assert __name__ == "script"


def make():
    sites = ["net/embed", "net/hidden"]
    return {"fn": model, "batches": make_batches(), "to": "acts", "values": sites, "units": 4}


def share():
    return {**make(), "worker": (0, 2), "take_over": False}


def other():
    return {**make(), "dtype": "float16"}


def unknown():
    return {**make(), "values": "net/hiden"}


def homeless():
    arguments = make()
    del arguments["to"]
    return arguments


def misspelt():
    return {**make(), "shard_byte": 9}


def nothing():
    return None


number = 3
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    return "script.py:make"


def test_workers_of_an_array_job_write_the_dataset_of_one_process(script, tmp_path, capsys):
    for worker in ("2/3", "0/3", "1/3"):
        last = worker == "1/3"
        assert main(["harvest", script, "--worker", worker, "--no-take-over"]) == 0
        assert ("4 of 4 units" in capsys.readouterr().out) == last
    harvested.harvest(tmp_path / "alone")
    assert harvested.read_files(tmp_path / "acts") == harvested.read_files(tmp_path / "alone")


def test_one_worker_is_enough_to_complete_the_dataset(script, tmp_path, capsys):
    assert main(["harvest", script, "--worker", "2/3", "--to", "there"]) == 0
    assert tapax.open(tmp_path / "there").is_complete
    assert capsys.readouterr().out == "there: 65 rows, 4 of 4 units\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["script.py"], "The command takes SCRIPT:FUNCTION, such as script.py:make"),
        (["other.py:make"], "There is no script 'other.py'."),
        (["script.py:number"], "The script 'script.py' has no function 'number'."),
        (["script.py:nothing"], "should return a dict with the arguments of tapax.harvest"),
        (
            ["script.py:homeless"],
            "'homeless' should return the arguments of tapax.harvest: missing",
        ),
        (["script.py:misspelt"], "unexpected keyword argument 'shard_byte'"),
        (["script.py:make", "--worker", "3"], "--worker takes I/N"),
        (["script.py:make", "--worker", "3/3"], "counted from 0, not '3/3'"),
    ],
)
def test_commands_that_make_no_sense_are_refused(script, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(["harvest", *arguments])
    assert message in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_the_function_may_leave_the_units_of_others_alone(script, capsys):
    assert main(["harvest", "script.py:share"]) == 0
    assert "2 of 4 units" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [("other", "contains another dataset: `dtype` was None"), ("unknown", "net/hiden")],
)
def test_errors_of_a_harvest_are_one_sentence(script, capsys, name, message):
    main(["harvest", script])
    with pytest.raises(SystemExit, match="2"):
        main(["harvest", f"script.py:{name}"])
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_sentence(script, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["harvest", script, "--to", "file"]) == 1
    assert "The dataset 'file' cannot be written" in capsys.readouterr().err
