"""Reducers under vmap: mapped values, mapped predicates, mapped captures."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapax
from tests.reduce.test_reduce_programs import (
    ALL,
    REDUCERS,
    R,
    X,
    _count,
    captured,
    check,
    close,
    scanned,
)

M = np.linspace(-1, 2, 12).reshape(4, 3)


@pytest.mark.parametrize("order", ["vmap of scan", "scan of vmap", "vmap of vmap"])
def test_examples_are_combined(order):
    body = lambda c, t: (tapax.sow(jnp.sin(c) * t, "h"), None)
    times = jnp.arange(1.0, 4.0)
    one = lambda x: lax.scan(body, x, times)[0]
    both = lambda m: lax.scan(lambda c, t: (jax.vmap(lambda c: body(c, t)[0])(c), None), m, times)
    fn = {
        "vmap of scan": jax.vmap(one),
        "scan of vmap": lambda m: both(m)[0],
        "vmap of vmap": jax.vmap(jax.vmap(one, in_axes=1), in_axes=2),
    }[order]
    m = jnp.asarray(M if order != "vmap of vmap" else M.reshape(2, 2, 3))
    h, every = np.asarray(m, np.float64), []
    for t in (1, 2, 3):
        h = np.sin(h) * t
        every.append(h)
    _, taps = captured(fn, m, values={"h": ALL})
    check(taps.values, "h", every)
    loss = lambda m: sum(map(jnp.sum, jax.tree.leaves(fn(m))))
    _, taps = captured(jax.grad(loss), m, grads={"h": [R.sum, R.norm.total]})
    gs = [np.ones_like(h)]
    for t in (3, 2):
        gs.insert(0, gs[0] * np.cos(every[t - 2]) * t)
    close(taps.grads["h:sum"], [g.sum() for g in gs])
    close(taps.grads["h:norm.total"], np.linalg.norm(gs))


def test_a_value_that_does_not_depend_on_the_example_counts_once():
    f = jax.vmap(lambda x, y: tapax.sow(jnp.sin(y), "h") + tapax.sow(x, "x"), in_axes=(0, None))
    _, taps = captured(f, jnp.asarray(M), jnp.asarray(X), values={"**": R.sum})
    close(taps.values["h"], np.sin(X).sum())
    close(taps.values["x"], M.sum())


PICKED = np.array([0, 2, 1, 2])


def switched(sow, i, x):
    return lax.switch(i, [lambda x: sow(2 * x, "a"), lambda x: x, lambda x: sow(x**2, "b")], x)


@pytest.mark.parametrize("values", [True, False])
def test_reductions_under_mapped_predicates(values):
    one = lambda i, x: jnp.sum(switched(tapax.sow, i, x) ** 2)
    if values:
        step = jax.vmap(functools.partial(switched, tapax.sow))
    else:
        step = jax.grad(lambda i, m: jnp.sum(jax.vmap(one)(i, m)), argnums=1)
    asked = {"values": {"**": ALL}} if values else {"grads": {"**": ALL}}
    _, taps = captured(step, jnp.asarray(PICKED), jnp.asarray(M), **asked)
    found = taps.values if values else taps.grads
    for name, number, value, slope in (("a", 0, 2 * M, 4 * M), ("b", 2, M**2, 2 * M**2)):
        check(found, name, [(value if values else slope)[number == PICKED]], ())


def test_mapped_predicate_that_none_fulfils():
    f = jax.vmap(functools.partial(switched, tapax.sow))
    _, taps = captured(f, jnp.ones(4, int), jnp.asarray(M), values={"**": [R.minmax, R.var.total]})
    for name in ("a", "b"):
        assert taps.values[f"{name}:minmax"].tolist() == [0, 0]
        assert taps.values[f"{name}:var.total"] == 0
        assert not taps.valid[f"{name}:minmax"]


COUNTS = np.array([0, 1, 3, 2])


def test_reductions_in_a_mapped_while_loop():
    f = jax.vmap(functools.partial(_count, tapax.sow))
    _, taps = captured(f, jnp.asarray(COUNTS), jnp.asarray(M), values={"h": ALL})
    h, every = M, []
    for i in range(3):
        h = np.sin(h) + i
        every.append(h[i < COUNTS])
    check(taps.values, "h", [every], ())
    _, taps = captured(f, jnp.asarray(COUNTS), jnp.asarray(M), values={"h": R.sum}, steps=4)
    close(taps.values["h"], [*(e.sum() for e in every), 0])
    assert taps.valid["h"].tolist() == [True] * 3 + [False]


@pytest.mark.parametrize("total", [False, True])
def test_mapped_while_in_a_scan(total):
    ns = np.array([[0, 1], [2, 0], [1, 1]])

    def one(ns, x):
        return lax.scan(lambda c, n: (_count(tapax.sow, n, c), None), x, ns)[0]

    reducer = R.moments.total if total else R.moments
    _, taps = captured(
        jax.vmap(one, (1, 0)), jnp.asarray(ns), jnp.asarray(M[:2]), values={"h": reducer}
    )
    h, every = M[:2], []
    for row in ns:
        every.append([])
        for i in range(row.max()):
            new = np.sin(h) + i
            h = np.where((row > i)[:, None], new, h)
            every[-1] += new[row > i].ravel().tolist()
    if total:
        flat = np.concatenate(every)
        close(taps.values["h"], [flat.mean(), flat.var()])
    else:
        close(taps.values["h"], [[np.mean(e), np.var(e)] for e in every])


def test_mapped_cond_in_a_scan():
    def one(ps, x):
        body = lambda c, p: (lax.cond(p, lambda c: tapax.sow(c * 2, "h"), lambda c: c, c), None)
        return lax.scan(body, x, ps)[0]

    ps = np.array([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]], bool)
    _, taps = captured(jax.vmap(one, (1, 0)), jnp.asarray(ps), jnp.asarray(M), values={"h": ALL})
    h, every = M, []
    for p in ps:
        h = np.where(p[:, None], 2 * h, h)
        every.append(h[p])
    kept = [e for e in every if e.size]
    for r, statistic in REDUCERS.items():
        found = np.asarray(taps.values[f"h:{r}"])
        close(found[[0, 2]], np.stack([statistic(e) for e in kept]))
        assert not found[1].any()
        close(taps.values[f"h:{r}.total"], statistic(np.concatenate(kept)))
    assert taps.valid["h:minmax"].tolist() == [True, False, True]


def test_capture_mapped_gives_one_result_for_each_example():
    def one(n, x):
        return scanned(x) + _count(lambda x, _: tapax.sow(x, "w"), n, x)

    fn = tapax.capture(one, values={"**": [R.rms, R.sum.total]})
    _, taps = jax.vmap(fn)(jnp.asarray(COUNTS), jnp.asarray(M))
    h = np.stack([M * f for f in (1, 2, 6, 24, 120)], 1)
    close(taps.values["h:rms"], np.sqrt((h**2).mean(-1)))
    close(taps.values["h:sum.total"], h.sum((1, 2)))
    for i, n in enumerate(COUNTS):
        w, every = M[i], []
        for k in range(n):
            w = np.sin(w) + k
            every.append(w)
        close(taps.values["w:sum.total"][i], np.sum(every))
