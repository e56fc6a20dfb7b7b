"""Results in a notebook are well-formed, escaped HTML without scripts, and text stays text."""

import builtins
import html.parser
import math
import re

import jax
import jax.numpy as jnp
import pytest

import tapax
from tapax.monitoring._records import AlertEvent

VOID = {"br", "hr", "img", "input", "link", "meta"}


class Page(html.parser.HTMLParser):
    """A parser of rows, folders and tags that fails on unclosed tags."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.tags, self.rows, self.folders, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        assert tag not in VOID
        assert not any(name.startswith("on") or name in ("src", "href") for name in attrs)
        self.stack.append(tag)
        self.tags.append(tag)
        if tag == "details":
            self.folders.append("open" in attrs)
        if "row" in attrs.get("class", "").split():
            self.rows.append([])
        if tag == "span" and self.rows:
            self.rows[-1].append(("", attrs))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if "style" not in self.stack:
            self.text += data
        if "span" in self.stack and self.rows:
            cell, attrs = self.rows[-1].pop()
            self.rows[-1].append((cell + data, attrs))

    def cells(self, label):
        """Return the cells of the only row with a label, without the count of a folder."""
        [row] = [row for row in self.rows if re.sub(r" \(\d+\)$", "", row[0][0]) == label]
        return [cell for cell, _ in row[1:]]

    def attributes(self, text):
        [attrs] = [attrs for row in self.rows for cell, attrs in row if cell == text]
        return attrs


def page(what):
    """Return the HTML of a notebook, after the checks for every table."""
    text = what._repr_html_()
    found = Page(text)
    assert "script" not in found.tags
    assert "url(" not in text and "@import" not in text and "http" not in text
    return found


def loss(x):
    for i in range(2):
        with tapax.scope(f"blocks/{i}"):
            x = tapax.sow(jnp.sin(x), "attn")
            x = tapax.sow(jnp.tanh(x), "mlp")
        tapax.sow(x, f"blocks/{i}")
    return jnp.sum(x)


X = jnp.ones(2, jnp.float32)


class ZMQInteractiveShell:
    """A stand-in for the shell of a notebook, which rich recognises by its class name."""


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)


def test_text_stays_text_in_a_notebook(notebook, capsys):
    from flax import nnx

    _, taps = tapax.capture(jax.grad(loss))(X)
    log = tapax.Log()
    log(0, {"a": 1.0})
    modules = tapax.modules(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    for what in (taps, taps.sites, log, modules):
        assert "│" in str(what) and str(what) == repr(what)
    assert "blocks/1/mlp" in repr(taps)
    assert capsys.readouterr() == ("", "")


def test_the_table_of_a_monitor_is_text_in_a_notebook(notebook, capsys):
    sink = tapax.sink.table()
    sink(0, {"Net/h/value_rms": 2.0})
    sink.alert(AlertEvent(0, "Net/h", "value_rms", 2.0, "Net/h is [red]."))
    sink.close()
    out = capsys.readouterr().out
    assert "Net/h is [red]." in out and "step 0" in out and "│" in out


def test_names_are_neither_markup_nor_emoji():
    _, taps = tapax.capture(lambda x: tapax.sow(x, "a[red]b"), grads=None)(X)
    log = tapax.Log()
    log(0, {"a[red]b:smile:": 1.0})
    for what in (taps, taps.sites, log):
        assert "a[red]b" in repr(what) and "a[red]b" in page(what).text
    assert "b:smile:" in repr(log)


def test_taps_are_a_tree_of_modules_that_folds():
    _, taps = tapax.capture(jax.grad(loss))(X)
    found = page(taps)
    labels = [re.sub(r" \(\d+\)$", "", row[0][0]) for row in found.rows]
    assert labels == ["site", "blocks", "0", "attn", "mlp", "1", "attn", "mlp"]
    assert found.folders == [True, True, True]
    assert found.cells("blocks") == []
    assert "6 values, 4 gradients" in found.text
    value = float(jnp.sqrt(jnp.mean(taps.values["blocks/1"] ** 2)))
    assert found.cells("1")[:2] == ["float32[2]", f"{value:.3g}"]
    assert re.fullmatch(r"test_html.py:\d+", found.cells("1")[-1])


def test_a_large_tree_is_folded_and_cut():
    def f(x, count):
        for i in range(count):
            with tapax.scope(f"layers/{i}"):
                x = tapax.sow(x, "a/b") + tapax.sow(x, "a/c")
        return x

    found = page(tapax.sites(lambda x: f(x, 50))(X))
    assert found.folders == [True] + 50 * [False]  # `a` needs no folder
    assert any(row[0][0] == "49/a (2)" for row in found.rows)
    found = page(tapax.sites(lambda x: f(x, 1100))(X))
    assert "The first 2000 of 2200 rows" in found.text and "layers (2000)" in found.text


def test_numbers_are_aligned_and_coloured():
    def f(x):
        a = tapax.sow(x, "a")
        b = tapax.sow(a * 1000, "b")
        c = tapax.sow(b * 0, "c")
        return tapax.sow(c / c, "d")

    _, taps = tapax.capture(f, grads=None)(X)
    found = page(taps)
    assert found.cells("a")[1] == "1" and found.cells("b")[1] == "1e+03"
    small, large, zero, bad = (found.attributes(x) for x in ("1", "1e+03", "0", "nan"))
    assert all("number" in attrs["class"] for attrs in (small, large, zero, bad))
    heat = [float(re.search(r"--heat:(\d+)%", attrs["style"])[1]) for attrs in (small, large)]
    assert heat[0] < heat[1]
    assert "style" not in zero and "zero" in zero["class"] and "bad" in bad["class"]


def test_equal_and_missing_numbers_need_no_colour():
    _, taps = tapax.capture(lambda x: tapax.sow(tapax.sow(x, "a"), "b"), grads=None)(X)
    assert "--heat:" not in taps._repr_html_()
    assert "0 values, 0 gradients" in page(tapax.Taps({}, {}, {}, tapax.SiteTable())).text


def test_html_is_escaped_wherever_it_comes_from():
    evil = '<script>alert("1")</script>&amp;<img src=x onerror=y>'

    def f(x):
        return jnp.log(tapax.sow(x, evil))

    _, taps = tapax.capture(f, grads=None)(X)
    log = tapax.Log()
    log(0, {f"{evil}/value_rms": 1.0})
    log.alert(AlertEvent(0, evil, "value_rms", 1.0, evil))
    with tapax.scope(evil):
        finding = tapax.find_nonfinite(lambda x: f(x - 2))(X)
    for what in (taps, taps.sites, log, finding):
        # `</` separates folders, as every slash does.
        assert '<script>alert("1")<' in page(what).text.replace("\n", "") or what is finding
        assert "<img" not in what._repr_html_() and "<script" not in what._repr_html_()


def test_sites_that_share_a_name_each_have_a_row():
    table = tapax.SiteTable([tapax.Site("a", source="x.py:1"), tapax.Site("a", source="x.py:2")])
    assert [row[-1][0] for row in page(table).rows[1:]] == ["x.py:1", "x.py:2"]


def test_modules_show_their_classes():
    from flax import nnx

    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    found = page(tapax.modules(model))
    assert "2 modules" in found.text
    assert found.cells("Sequential") == ["flax.Sequential"]
    assert found.cells("layers/0") == ["flax.Linear"]


def test_a_log_shows_first_last_and_trend():
    log = tapax.Log()
    for step in range(8):
        log(step, {"Net/mlp[3]/value_rms": 1.0 + step, "Net/mlp[3]/grad_rms": math.nan})
    found = page(log)
    assert "8 records, steps 0 to 7" in found.text
    assert found.cells("value_rms") == ["1", "8", "▁▂▃▄▅▆▇█"]
    assert found.cells("grad_rms")[:2] == ["nan", "nan"]
    many = tapax.Log()
    many(0, {f"site{i}": 1.0 for i in range(1000)})
    assert len(page(many).rows) == 1001


def test_a_finding_shows_operands_and_result():
    finding = tapax.find_nonfinite(lambda x: jnp.log(x - 1.5))(jnp.arange(3.0, dtype=jnp.float32))
    found = page(finding)
    first, *rows = str(finding).splitlines()
    assert first in found.text
    for row in rows:
        for part in re.split(r"\s{2,}", row.strip()):
            assert part in found.text
    assert "bad" in found.attributes(found.cells("result")[1])["class"]


def test_tracers_are_shown_as_such():
    @jax.jit
    def f(x):
        out, taps = tapax.capture(loss, grads=None)(x)
        assert page(taps).cells("1")[1] == "traced"
        return out

    f(X)
