"""The graph of modules draws the flow of data of a program, in a real browser."""

import jax.numpy as jnp
import pytest
from jax import lax

import tapax
from tapax import sow
from tapax._results.flow import LIMIT
from tapax.viewer._page import make_page

pytestmark = pytest.mark.once

X, WS = jnp.ones((2, 3)), jnp.ones((4, 3, 3))


def network(x, ws):
    """A network with residual connections, scanned layers, a conditional and a while loop."""
    with tapax.scope("Net"):
        x = sow(2 * x, "embed")

        def layer(x, w):
            with tapax.scope("layers"):
                h = sow(jnp.tanh(x @ w), "up")
                return x + sow(h @ w.T, "down"), None

        x, _ = lax.scan(layer, x, ws)
        gate = sow(x.sum(), "gate")
        x = lax.cond(gate > 0, lambda x: sow(jnp.sin(x), "yes"), lambda x: sow(jnp.cos(x), "no"), x)
        x = lax.while_loop(lambda x: x.sum() > 1, lambda x: sow(x / 2, "halve"), x)
        return sow(x.sum(), "head")


def drawn_edges(tab):
    return {(e["from"], e["to"]): e for e in tab.drawn["edges"]}


@pytest.fixture(scope="module")
def tab(chromium, tmp_path_factory):
    _, taps = tapax.capture(network)(X, WS)
    path = tmp_path_factory.mktemp("graph") / "net.html"
    make_page(taps).save(path)
    tab = chromium.open(path, "#view=modules")
    yield tab
    tab.check_quiet()
    tab.close()


def test_lines_are_the_flow_of_data_with_types(tab):
    tab.show("modules", "drawn.edges.length == 17", more={"open": "Net|Net/layers"})
    edges = drawn_edges(tab)
    up, down = "Net/layers/up", "Net/layers/down"
    assert edges.keys() == {
        ("Net/embed", up),
        (up, down),
        (down, up),
        ("Net/embed", "Net/gate"),
        (down, "Net/gate"),
        *((source, branch) for source in ("Net/embed", down) for branch in ("Net/yes", "Net/no")),
        *((source, "Net/halve") for source in ("Net/yes", "Net/no", "Net/gate", "Net/halve")),
        *((source, "Net/head") for source in ("Net/yes", "Net/no", "Net/gate", "Net/halve")),
    }
    assert {pair for pair, edge in edges.items() if edge["isBack"]} == {
        (down, up),
        ("Net/halve", "Net/halve"),
    }
    assert edges[up, down]["label"] == "float32[2, 3]"
    assert edges["Net/gate", "Net/head"]["label"] == "float32[]"
    assert "float32[2, 3]" in tab.text(".graph")
    assert "Lines show the flow of data, dashed through the carry of a loop." in tab.text(
        ".legend-row"
    )
    boxes = {box["path"]: box for box in tab.drawn["boxes"]}
    assert boxes["Net/embed"]["y"] < boxes[up]["y"] < boxes[down]["y"] < boxes["Net/head"]["y"]
    assert tab.evaluate("root.querySelectorAll('.flow.back').length") == 2


def test_a_closed_module_has_the_edges_of_the_sites_in_it(tab):
    tab.show("modules", "drawn.boxes.length == 8", more={"open": "Net"})
    edges = drawn_edges(tab)
    assert ("Net/embed", "Net/layers") in edges and ("Net/layers", "Net/gate") in edges
    assert ("Net/layers", "Net/layers") not in edges


def test_a_filter_joins_sites_through_those_that_it_hides(tab):
    tab.show(
        "modules", "drawn.boxes.length == 3", filter="Net/embed, Net/head", more={"open": "Net"}
    )
    assert drawn_edges(tab).keys() == {("Net/embed", "Net/head")}
    tab.set(filter="")


def test_lines_say_that_they_are_the_order_if_the_flow_is_not_known(chromium, tmp_path):
    write = tapax.sink.jsonl(tmp_path / "run.jsonl")
    write(0, {f"net/{name}/value_rms": 1.0 for name in "abc"})
    make_page(tmp_path / "run.jsonl").save(tmp_path / "run.html")
    tab = chromium.open(tmp_path / "run.html", "#view=modules")
    tab.wait("drawn.edges.length == 2")
    assert all(edge["isOrder"] for edge in tab.drawn["edges"])
    assert "The flow of data is not known here" in tab.text(".legend-row")
    tab.close()


def test_thousands_of_modules_with_limited_sets_are_drawn(chromium, tmp_path):
    def add(x):
        total = x
        for i in range(1000):
            with tapax.scope(f"net/{i // 100}/{i % 100}"):
                total = total + sow(sow(total * i, "a") + 1, "b")
        return sow(total, "net/total")

    page = make_page(tapax.sites(add)(1.0))
    page.save(tmp_path / "many.html")
    (subject,) = page.header["subjects"]
    assert len(subject["edges"]) <= LIMIT * len(subject["sites"]["name"])
    tab = chromium.open(tmp_path / "many.html", "#view=modules")
    tab.wait("drawn.edges.length >= 10")
    assert "sites receive data of more sites" in tab.text(".legend-row")
    tab.check_quiet()
    tab.close()
