"""`tapax --version` prints what a bug report needs, and imports no framework."""

import importlib.metadata
import json
import platform
import subprocess
import sys

import pytest

import tapax
from tapax.__main__ import FRAMEWORKS, main


def test_the_first_line_is_the_version_of_tapax(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    lines = capsys.readouterr().out.splitlines()
    assert stopped.value.code == 0
    assert lines[0] == f"tapax {tapax.__version__}"
    assert f"jax {importlib.metadata.version('jax')}" in lines
    assert f"jaxlib {importlib.metadata.version('jaxlib')}" in lines
    assert f"flax {importlib.metadata.version('flax')}" in lines
    assert f"Python {platform.python_version()}" in lines


def test_packages_that_are_not_installed_have_no_line(capsys, monkeypatch):
    versions = {"jax": "1.2.3"}

    def find_version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", find_version)
    with pytest.raises(SystemExit):
        main(["--version"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "jax 1.2.3"
    assert [line.partition(" ")[0] for line in lines[2:]] == ["Python", platform.system()]


def test_no_framework_is_imported():
    code = f"""
import json, sys
from tapax.__main__ import main
try:
    main(["--version"])
except SystemExit:
    imports = {{name.partition(".")[0] for name in sys.modules}}
    print(json.dumps([name for name in {(*FRAMEWORKS, "haiku")!r} if name in imports]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
