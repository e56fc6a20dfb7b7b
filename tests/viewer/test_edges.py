"""The page has the flow of data of captures, tables of sites, logs and files."""

import json
import pickle

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapax
from tapax import sow
from tapax._results.flow import Flow, FlowSite
from tapax.viewer._edges import make_edges
from tapax.viewer._page import make_page

X, WS = jnp.ones(3, jnp.float32), jnp.ones((4, 3, 3), jnp.float32)
EDGES = {
    ("in", "net/h", False),
    ("in", "net/y", False),
    ("net/h", "net/y", False),
    ("net/y", "net/h", True),
    ("net/y", "net/y", True),
    ("net/y", "out", False),
}


@jax.jit
def program(x, ws):
    def layer(x, w):
        with tapax.scope("net"):
            h = sow(jnp.tanh(x @ w), "h")
            return sow(x + h, "y"), None

    return sow(lax.scan(layer, sow(x, "in"), ws)[0], "out").sum()


def edges(subject):
    """Return the names of sites, without iterations, that the edges of a subject join."""
    names = [name.partition("[")[0] for name in subject["sites"]["name"]]
    return {(names[e["from"]], names[e["to"]], e["back"]) for e in subject["edges"]}


def subject_of(what):
    return make_page(what).header["subjects"][0]


def test_edges_of_a_capture_and_of_its_sites_join_rows():
    _, taps = tapax.capture(program)(X, WS)
    subject = subject_of(taps)
    assert edges(subject) == edges(subject_of(tapax.sites(program)(X, WS))) == EDGES
    assert {(tuple(e["shape"]), e["dtype"]) for e in subject["edges"]} == {((3,), "float32")}
    names = subject["sites"]["name"]
    assert {names[e["from"]] for e in subject["edges"]} == {"in", "net/h[0]", "net/y[0]"}
    assert subject["limited"] == []


def test_edges_of_a_selection_pass_through_the_other_sites():
    _, taps = tapax.capture(program, values=["in", "net/h", "out"])(X, WS)
    wanted = {("in", "net/h", False), ("in", "out", False), ("net/h", "net/h", True)}
    wanted |= {("net/h", "out", False)}
    assert edges(subject_of(taps)) == wanted | {("in", "out", False)}
    assert edges(subject_of(taps.select(["in", "out"]))) == {("in", "out", False)}


def test_edges_of_single_layers_join_a_layer_and_the_next():
    sites = [FlowSite(name, (3,), "float32") for name in ("in", "S/layers/a", "S/layers/b", "out")]
    flow = Flow(tuple(sites), ((0, 1), (1, 2), (2, 1), (2, 3)))
    names = ["in", *(f"S/layers/{i}/{part}" for i in range(3) for part in "ab"), "out"]
    found = make_edges(flow, names)["edges"]
    assert [(e["from"], e["to"]) for e in sorted(found, key=lambda e: e["from"])] == [
        (i, i + 1) for i in range(7)
    ]
    assert not any(e["back"] for e in found)


def test_a_saved_capture_has_its_edges(tmp_path):
    _, taps = tapax.capture(program)(X, WS)
    taps.save(tmp_path / "taps.safetensors")
    assert edges(subject_of(tmp_path / "taps.safetensors")) == EDGES


def test_a_copied_table_has_no_edges():
    table = pickle.loads(pickle.dumps(tapax.sites(program)(X, WS)))
    assert table == tapax.sites(program)(X, WS)
    assert subject_of(table)["edges"] is None


@pytest.mark.parametrize("format", ["jsonl", "parquet", "safetensors", "memory"])
def test_the_log_of_a_monitor_has_edges(format, tmp_path):
    if format == "parquet":
        pytest.importorskip("pyarrow")
    log = tapax.Log() if format == "memory" else tmp_path / f"run.{format}"
    with tapax.monitor(program, every=1, grads=None, to=log) as watched:
        for _ in range(3):
            watched(X, WS)
    assert edges(subject_of(log)) == EDGES
    if format != "memory":
        assert edges(subject_of(tapax.open(log))) == EDGES
        assert len(tapax.open(log)) == 3


def test_a_log_that_lacks_edges_says_so(tmp_path):
    write = tapax.sink.jsonl(tmp_path / "run.jsonl")
    write(0, {"a/value_rms": 1.0})
    assert subject_of(tmp_path / "run.jsonl")["edges"] is None


def test_edges_follow_a_run(tmp_path):
    path = tmp_path / "run.jsonl"
    write = tapax.sink.jsonl(path)
    write(0, {"a/value_rms": 1.0})
    payload = make_page(path)._payload
    sites = tuple(FlowSite(name, (), "float32") for name in "abc")
    write._write_flow(Flow(sites, ((0, 1), (1, 2))))
    (update,) = payload.read_updates(0)
    assert update["edges"] == []
    write(1, {"a/value_rms": 1.0, "c/value_rms": 1.0})
    (update,) = payload.read_updates(1)
    assert [(e["from"], e["to"]) for e in json.loads(json.dumps(update["edges"]))] == [(0, 1)]
    write(2, {"a/value_rms": 1.0})
    (update,) = payload.read_updates(2)
    assert "edges" not in update
