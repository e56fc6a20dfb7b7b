"""Fixtures for the scripts as modules, the built distributions, and empty environments."""

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="session")
def scripts():
    """Let tests import the modules in `scripts/`, which import each other by name."""
    sys.path.append(str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="session")
def distributions(tmp_path_factory, scripts):
    """Build the sdist and the wheel once for all worker processes of pytest-xdist."""
    from distributions import Distributions, build

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "distributions"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            return build(folder)
        (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
        return Distributions(sdist, wheel)


class Environment:
    """An environment with only Python, until `install` installs something."""

    def __init__(self, folder):
        self.folder = folder
        self.python = folder / "bin" / "python"
        # A program in the environment must not find the packages of the environment of the tests.
        self.environ = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("PYTHON", "COV_", "COVERAGE"))
        }
        self.environ |= {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"}
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)

    def install(self, *what):
        """Install packages from PyPI, at the versions of the environment that runs the tests."""
        pins = ROOT / "constraints" / f"jax-{importlib.metadata.version('jax')}.txt"
        command = [sys.executable, "-m", "pip", "--python", self.python, "--no-input", "install"]
        command += ["--quiet", "--disable-pip-version-check", "--no-compile"]
        command += ["--constraint", pins] if pins.exists() else []
        done = subprocess.run(
            [*command, *what], env=self.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def run(self, *command):
        """Run a command of the environment in its folder; return its output."""
        done = subprocess.run(
            [self.folder / "bin" / command[0], *command[1:]],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def list_packages(self):
        """Return the names of the installed packages."""
        code = "import importlib.metadata as m; print(*(d.name for d in m.distributions()))"
        return set(self.run("python", "-c", code).split())


@pytest.fixture
def environment(tmp_path):
    """Make an empty environment, and remove its gigabyte after the test, as pytest would not."""
    yield Environment(tmp_path / "environment")
    shutil.rmtree(tmp_path / "environment")
