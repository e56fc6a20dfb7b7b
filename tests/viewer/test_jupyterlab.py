"""The page in a real JupyterLab, and in the static page of the saved notebook."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
EVIL = "<img src=x onerror=document.title='hacked'>"
CELLS = [
    f"""
import jax.numpy as jnp, tapax
def net(x):
    for i in range(3):
        x = tapax.sow(jnp.tanh(x + i), f"Net/blocks/{{i}}/mlp")
    return tapax.sow(x, {EVIL!r}).sum()
_, taps = tapax.capture(net, grads=None)(jnp.zeros((2, 8)))
tapax.view(taps)
""",
    """
import os, time
with tapax.monitor(lambda x: tapax.sow(2 * x, "h"), every=1, grads=None, to="page") as step:
    for i in range(1000):
        step(jnp.float32(i))
        time.sleep(0.1)
        if os.path.exists("stop"):
            break
""",
]
FIND = "[...document.querySelectorAll('.jp-OutputArea-output div')].filter((x) => x.tapaxPage)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [
        {
            "cell_type": "code",
            "execution_count": None,
            "id": f"cell-{i}",
            "metadata": {},
            "outputs": [],
            "source": source.strip(),
        }
        for i, source in enumerate(CELLS)
    ]
    content = {
        "cells": cells, "metadata": {"kernelspec": spec}, "nbformat": 4, "nbformat_minor": 5
    }  # fmt: skip
    (folder / "page.ipynb").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def lab(folder):
    """Start a JupyterLab and return the address of the notebook in it."""
    pytest.importorskip("jupyterlab")
    pytest.importorskip("anywidget")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = folder / "home"
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={port}", "--allow-root"]
    command += ["--IdentityProvider.token=t", f"--ServerApp.root_dir={folder}"]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token=t", timeout=5).close()
                break
            except OSError:
                time.sleep(0.3)
        yield f"http://127.0.0.1:{port}/lab/tree/page.ipynb?token=t"
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def notebook(chromium, lab):
    """Open the notebook and run its first cell."""
    tab = chromium.open(lab, wait="document.body?.innerText.includes('(ipykernel) | Idle')")
    tab.click(".jp-Notebook .jp-CodeCell .cm-content")
    tab.press("Shift+Enter")
    wait(tab, f"{FIND}[0]?.tapaxPage.inspect().drawn?.cells")
    yield tab
    tab.close()


def wait(tab, script, seconds=90):
    tab._call("wait", script=script, timeout=1000 * seconds)


def test_the_widget_draws_what_was_captured(notebook):
    cells = notebook._call("evaluate", script=f"{FIND}[0].tapaxPage.inspect().drawn.cells")
    numbers = {name: cell["number"] for cell in cells for name in cell["sites"]}
    assert set(numbers) == {*(f"Net/blocks/{i}/mlp" for i in range(3)), EVIL}
    assert numbers["Net/blocks/0/mlp"] == 0
    assert numbers["Net/blocks/1/mlp"] == pytest.approx(0.76159416)
    assert "hacked" not in notebook._call("evaluate", script="document.title")
    assert notebook._call("evaluate", script=f"{FIND}[0].tapaxPage.inspect().errors") == []


def test_the_widget_follows_a_run_while_its_cell_runs(notebook, folder):
    notebook.click(".jp-Notebook .jp-CodeCell:nth-of-type(2) .cm-content")
    notebook.press("Shift+Enter")
    wait(notebook, f"{FIND}[1]?.tapaxPage.inspect().drawn?.width > 3")
    busy = "document.querySelectorAll('.jp-InputPrompt')[1].textContent"
    assert "*" in notebook._call("evaluate", script=busy), "the cell has ended already"
    drawn = notebook._call("evaluate", script=f"{FIND}[1].tapaxPage.inspect().drawn")
    assert drawn["numbers"][:4] == [0, 2, 4, 6]
    (folder / "stop").touch()


@pytest.mark.many
def test_the_saved_notebook_shows_the_page_without_a_kernel(notebook, chromium, folder):
    exporters = pytest.importorskip("nbconvert")
    notebook.press("Control+s")
    path, deadline = folder / "page.ipynb", time.monotonic() + 30
    while "<iframe" not in path.read_text() and time.monotonic() < deadline:
        time.sleep(0.2)
    text, _ = exporters.HTMLExporter().from_filename(str(path))
    (folder / "page.html").write_text(text)
    tab = chromium.open(folder / "page.html", wait="document.querySelector('iframe')")
    script = "document.getElementById('tapax-page')?.tapaxPage?.inspect().drawn?.cells?.length ?? 0"
    deadline = time.monotonic() + 20
    while not any(found := tab._call("frames", script=script)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert 4 in found
    tab.close()
