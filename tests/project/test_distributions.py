"""The contents of the sdist and the wheel, and the features that need only jax."""

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import tapax

pytestmark = pytest.mark.once

CORE = {"jax", "jaxlib", "numpy", "rich", "safetensors", "treescope", "tapax"}
FRAMEWORKS = ("brainstate", "equinox", "flax", "haiku", "keras", "matplotlib", "pyarrow", "ray")

PLAIN_JAX = """
import json, sys
import jax, jax.numpy as jnp
import tapax

def net(params, x):
    for i, w in enumerate(params):
        with tapax.scope(f"layer{i}"):
            x = tapax.sow(jnp.tanh(x @ w), "out")
    return x

@jax.jit
def step(params, x, y):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((net(p, x) - y) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

keys = jax.random.split(jax.random.key(0), 4)
params = [jax.random.normal(key, (4, 4)) for key in keys[:2]]
x, y = jax.random.normal(keys[2], (8, 4)), jax.random.normal(keys[3], (8, 4))
(_, loss), taps = tapax.capture(step)(params, x, y)
assert loss == step(params, x, y)[1]
assert "layer1/out" in str(taps)
tapax.view(taps).save("page.html")
imported = {name.partition(".")[0] for name in sys.modules}
print(json.dumps([sorted(taps.values), sorted(taps.grads), sorted(imported)]))
"""

NEEDS = {
    "tapax.nn.batch_ensemble": "flax",
    "tapax.compat.nnx": "flax",
    "tapax.compat.linen": "flax",
    "tapax.compat.braintrace": "brainstate",
    "tapax.data.ray": "ray",
    "tapax.plot.taps(taps)": "plot",
    "tapax.sink.tensorboard('log')": "tensorboard",
    "tapax.sink.parquet('log.parquet')": "parquet",
    "acts.export('acts.parquet')": "parquet",
    "acts.export('acts.lance')": "lance",
}

MISSING = f"""
import json
import jax.numpy as jnp, tapax
f = lambda x: tapax.sow(jnp.sin(x), "h")
_, taps = tapax.capture(f)(jnp.ones((2, 3)))
acts = tapax.harvest(f, [jnp.ones((2, 3))], to="acts", values="h")
errors = {{}}
for use in {list(NEEDS)!r}:
    try:
        eval(use)
    except ImportError as error:
        errors[use] = str(error)
print(json.dumps(errors))
"""


def test_the_distributions_have_no_faults(distributions):
    from distributions import find_faults

    assert find_faults(distributions) == []


def test_the_sdist_builds_the_wheel_of_the_checkout(distributions, tmp_path):
    """The wheel built from the sdist equals one built from the checkout."""
    from distributions import ROOT

    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    command += ["--skip-dependency-check", "--outdir", tmp_path, ROOT]
    subprocess.run(command, capture_output=True, check=True)
    (direct,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(direct) as one, zipfile.ZipFile(distributions.wheel) as other:
        sums = [{file.filename: file.CRC for file in each.infolist()} for each in (one, other)]
    assert sums[0] == sums[1]


def test_a_build_from_the_sdist_needs_no_node(distributions, tmp_path, monkeypatch):
    import page

    with tarfile.open(distributions.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    monkeypatch.setattr(page, "ASSETS", unpacked / "tapax" / "viewer" / "assets")
    monkeypatch.setattr(page, "WEB", unpacked / "web")
    assert page.is_built()
    (unpacked / "web" / "build.mjs").write_text("changed")
    assert not page.is_built()


def test_faults_of_distributions_are_found(distributions, tmp_path):
    from distributions import IN_SDIST, find_sdist_faults, find_wheel_faults

    wheel = shutil.copy(distributions.wheel, tmp_path)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tests/test_it.py", "")
        archive.writestr("tapax/viewer/page.ts", "")
    found = find_wheel_faults(tmp_path / distributions.wheel.name)
    assert "The wheel contains tests/test_it.py." in found
    assert "The wheel contains tapax/viewer/page.ts." in found
    other = shutil.copy(distributions.wheel, tmp_path / "tapax-9.9-py3-none-any.whl")
    (fault,) = find_wheel_faults(other)
    assert fault.endswith(f"but the version of tapax is {tapax.__version__}.")
    with tarfile.open(tmp_path / "empty.tar.gz", "w:gz"):
        pass
    assert len(find_sdist_faults(tmp_path / "empty.tar.gz")) == len(IN_SDIST)


def test_relative_links_in_the_description_are_found():
    from distributions import find_relative_links

    text = (
        "[a](docs/a.md) [b](https://b) [c](#c) ![d](d.png) "
        '<img src="e.png"> <img src="https://e">\n```\n[f](f)\n```\n'
    )
    assert find_relative_links(text) == ["docs/a.md", "d.png", "e.png"]


def test_an_installation_with_jax_alone_captures(distributions, environment):
    environment.install(distributions.wheel)
    packages = environment.list_packages()
    assert packages >= CORE and packages.isdisjoint(FRAMEWORKS)

    values, grads, imported = json.loads(environment.run("python", "-I", "-c", PLAIN_JAX))
    assert values == grads == ["layer0/out", "layer1/out"]
    assert set(imported).isdisjoint(FRAMEWORKS)
    assert "<!doctype html>" in (environment.folder / "page.html").read_text().lower()

    lines = environment.run("tapax", "--version").splitlines()
    assert lines[0] == f"tapax {tapax.__version__}"
    assert not any(line.startswith("flax") for line in lines)

    errors = json.loads(environment.run("python", "-I", "-c", MISSING))
    assert errors.keys() == NEEDS.keys()
    for use, extra in NEEDS.items():
        assert f"pip install 'tapax[{extra}]'" in errors[use]
