"""The flow of data between sites is the flow of values from mark to mark."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import tapax
from tapax import sow
from tapax._calling import collect
from tapax._results.flow import LIMIT, Flow, name_edges
from tapax._results.site_table import flow_of
from tests.models.programs import CASES

X = jnp.ones(3)


def flow(fn, *args):
    found = flow_of(tapax.sites(fn)(*args))
    assert found is not None
    return found


def edges(fn, *args):
    return set(name_edges(flow(fn, *args)))


def back_edges(fn, *args):
    found = flow(fn, *args)
    later = Flow(found.sites, tuple((s, t) for s, t in found.edges if s >= t))
    return set(name_edges(later))


def test_a_site_hides_the_sites_before_it():
    def f(x):
        a = sow(x + 1, "a")
        b = sow(jnp.sin(a), "b")
        return sow(b * 2, "c")

    found = flow(f, X)
    assert name_edges(found) == [("a", "b"), ("b", "c")]
    assert [(s.name, s.shape, s.dtype) for s in found.sites] == [
        (name, (3,), X.dtype.name) for name in "abc"
    ]


def test_a_residual_connection_goes_around_the_block():
    def f(x):
        x = sow(2 * x, "in")
        x = x + sow(jnp.tanh(x), "block")
        return sow(x.sum(), "out")

    assert edges(f, X) == {("in", "block"), ("in", "out"), ("block", "out")}
    assert back_edges(f, X) == set()


def test_results_of_a_call_are_followed_one_by_one():
    @jax.jit
    def both(x, y):
        return sow(x, "left") + 1, y

    def f(x):
        a, b = both(sow(x, "a"), sow(2 * x, "b"))
        return sow(a, "c"), sow(b, "d")

    assert edges(f, X) == {("a", "left"), ("left", "c"), ("b", "d")}


def test_a_shared_module_has_the_edges_of_each_call():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(3, 3, rngs=rngs)
            self.shared = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            x = self.shared(self.first(x))
            return self.shared(jnp.tanh(x))

    found = edges(Twice(nnx.Rngs(0)), X)
    assert found == {
        ("Twice/first", "Twice/shared"),
        ("Twice/shared", "Twice/shared@1"),
        ("Twice/shared@1", "Twice"),
    }


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_scanned_layers_have_an_edge_through_the_carry(wrap):
    def layer(x, w):
        h = sow(jnp.tanh(x @ w), "h")
        return sow(x + h, "y"), h

    def f(x, ws):
        x = sow(x, "in")
        x, hs = lax.scan(wrap(layer), x, ws)
        return sow(x, "out"), sow(hs, "all")

    args = X, jnp.ones((4, 3, 3))
    assert edges(f, *args) == {
        ("in", "h"),
        ("in", "y"),
        ("h", "y"),
        ("y", "h"),
        ("y", "y"),
        ("y", "out"),
        ("h", "all"),
    }
    assert back_edges(f, *args) == {("y", "h"), ("y", "y")}


def test_a_value_that_is_carried_twice_is_followed_until_nothing_changes():
    def delay(carry, x):
        a, b, c = carry
        sow(a, "end")
        return (b, c, sow(x, "start")), None

    def f(x):
        return lax.scan(delay, (x, x, x), jnp.ones((5, 3)))[0]

    assert edges(f, X) == back_edges(f, X) == {("start", "end")}


def test_branches_join_after_a_conditional():
    def f(x):
        x = sow(x, "in")
        gate = sow(x.sum(), "gate")
        x = lax.cond(
            gate > 0, lambda x: sow(jnp.sin(x), "yes"), lambda x: sow(jnp.cos(x), "no") + 1, x
        )
        return sow(x, "out")

    assert edges(f, X) == {
        ("in", "gate"),
        ("in", "yes"),
        ("in", "no"),
        ("yes", "out"),
        ("no", "out"),
        ("gate", "out"),
    }


def test_a_while_loop_may_run_no_iteration():
    def f(x):
        x = sow(x, "in")
        x = lax.while_loop(lambda x: sow(x.sum(), "size") > 1, lambda x: sow(x / 2, "half"), x)
        return sow(x, "out")

    assert edges(f, X) == {
        ("in", "half"),
        ("in", "size"),
        ("in", "out"),
        ("half", "half"),
        ("half", "size"),
        ("half", "out"),
    }
    assert back_edges(f, X) == {("half", "half")}


def test_a_derivative_adds_no_edges_between_values():
    def loss(x):
        a = sow(jnp.sin(x), "a")
        return sow(jnp.sum(sow(a * a, "b") ** 2), "c")

    plain = {("a", "b"), ("b", "c")}
    assert edges(loss, X) == plain
    assert edges(jax.grad(loss), X) == plain
    assert edges(jax.grad(jax.checkpoint(loss)), X) == plain


def test_a_marked_gradient_comes_from_the_gradient_before_it():
    def forces(x):
        energy = lambda x: sow(jnp.sum(sow(jnp.sin(x), "layer") ** 2), "energy")
        return sow(-jax.grad(energy)(x), "forces")

    assert edges(forces, X) == {("layer", "energy"), ("layer", "forces")}


def test_a_loop_that_trains_carries_no_gradients():
    def loss(w, x):
        return sow(jnp.sum(sow(w * x, "a") ** 2), "b")

    def train(w, xs):
        return lax.scan(lambda w, x: (w - jax.grad(loss)(w, x), None), w, xs)[0]

    assert edges(train, X, jnp.ones((4, 3))) == {("a", "b")}


def test_sites_that_are_left_out_pass_data_on():
    def layer(x, w):
        return sow(jnp.tanh(sow(x @ w, "a")), "b"), None

    def f(x, ws):
        x = lax.scan(layer, sow(x, "in"), ws)[0]
        return sow(x, "out")

    found = flow(f, X, jnp.ones((4, 3, 3)))
    without = found.between({"in", "a", "out"})
    assert set(name_edges(without)) == {("in", "a"), ("a", "a"), ("a", "out")}
    assert set(name_edges(found.between({"in", "out"}))) == {("in", "out")}
    assert found.between({"in", "a", "b", "out"}) is found


def test_thousands_of_terms_are_limited_to_the_last():
    def f(x):
        total = 0.0
        for i in range(3 * LIMIT):
            total = total + sow(x * i, f"terms/{i}")
        return sow(total, "total")

    found = flow(f, X)
    last = {(f"terms/{i}", "total") for i in range(2 * LIMIT, 3 * LIMIT)}
    assert set(name_edges(found)) == last
    assert [found.sites[i].name for i in found.limited] == ["total"]
    assert Flow.from_json(found.to_json()) == found
    kept = found.between({"total", f"terms/{3 * LIMIT - 1}"})
    assert name_edges(kept) == [(f"terms/{3 * LIMIT - 1}", "total")] and kept.limited


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.grad])
def test_sites_have_the_names_of_a_capture(name, wrap):
    case = CASES[name]
    if wrap is jax.grad and not case.differentiable:
        pytest.skip("no derivative")
    table = tapax.sites(wrap(case.program(sow)))(X)
    found = flow_of(table)
    assert {site.name for site in found.sites} >= set(table.names)


def test_the_program_is_analysed_once_and_only_on_request(monkeypatch):
    calls = []
    find = collect.find_flow
    monkeypatch.setattr(collect, "find_flow", lambda jaxpr: (calls.append(1), find(jaxpr))[1])
    _, taps = tapax.capture(jax.jit(lambda x: sow(sow(x, "a") + 1, "b")))(X)
    assert not calls
    first = flow_of(taps.select("b").sites)
    assert flow_of(taps.sites) is first and calls == [1]


def test_a_capture_keeps_no_constants_of_the_program_alive():
    weights = [jnp.ones((3, 3)) * 2]
    reference = weakref.ref(weights[0])
    _, taps = tapax.capture(lambda x: sow(x @ weights[0], "h"))(X)
    weights.clear()
    gc.collect()
    assert reference() is None and flow_of(taps.sites) is not None
