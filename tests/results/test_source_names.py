"""Source lines have short names, also those of the cells of a notebook."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import tapax
from tapax._results.source_names import name_cell, name_line

CELL = "/tmp/ipykernel_4711/3253142056.py"


@pytest.fixture
def shell(monkeypatch):
    """Pretend to be in a notebook whose third cell has the name `CELL`."""
    names = {CELL: ("Cell", "In[3]")}
    compiler = SimpleNamespace(format_code_name=names.get)
    module = SimpleNamespace(get_ipython=lambda: SimpleNamespace(compile=compiler))
    monkeypatch.setitem(sys.modules, "IPython", module)


def test_files_have_their_name():
    assert name_line("/home/me/model.py:12") == "model.py:12"
    assert name_line("") == "" and name_cell("/home/me/model.py") is None


def test_cells_have_the_number_of_their_input(shell):
    assert name_line(f"{CELL}:16") == "In [3]:16"
    assert name_line("/tmp/ipykernel_4711/99.py:2") == "<cell>:2"


def test_cells_of_another_session_have_no_number():
    assert (
        name_line("/tmp/ipykernel_1/5.py:16") == name_line("<ipython-input-3-ab>:16") == "<cell>:16"
    )


def test_ipython_tells_the_number():
    pytest.importorskip("IPython")
    code = "import tapax\nprint(tapax.sites(lambda x: tapax.sow(x, 'h'))(1.0))"
    script = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "from ipykernel.compiler import XCachingCompiler\n"
        "shell = InteractiveShell.instance()\nshell.compile = XCachingCompiler()\n"
        f"shell.run_cell('1', store_history=True)\nshell.run_cell({code!r}, store_history=True)\n"
    )
    pytest.importorskip("ipykernel")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "In [2]:2" in done.stdout


def test_a_table_names_cells(shell):
    table = tapax.SiteTable([tapax.Site("h", source=f"{CELL}:16")])
    assert "In [3]:16" in str(table)
