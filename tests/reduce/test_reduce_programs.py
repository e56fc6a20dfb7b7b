"""Reducers inside programs: loops, branches, maps, meshes; values and gradients.

The oracle runs the program one operation at a time, writes down every value in the order of
execution, and NumPy reduces them in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import tapax
from tests.models.programs import CASES
from tests.oracles import eager

R = tapax.reduce
X = np.array([0.3, -0.7, 1.2])
EDGES = (-1.0, -0.2, 0.1, 0.5, 4.0)
TOL = 1e-11 if jax.config.jax_enable_x64 else 3e-5
REDUCERS = {
    "moments": lambda x: np.stack([x.mean(), x.var()]),
    "minmax": lambda x: np.stack([x.min(), x.max()]),  # it would see a zero that was filled in
}
COMPLEX = ("moments",)
EACH = [getattr(R, name) for name in REDUCERS]
TOTALS = [r.total for r in EACH]
ALL = [*EACH, *TOTALS]


def close(found, expected, tol=TOL):
    found = np.asarray(found)
    assert found.shape == np.shape(expected)
    np.testing.assert_allclose(found, np.asarray(expected), rtol=tol, atol=tol)


def exact(x):
    return np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)


def names(x):
    return COMPLEX if np.iscomplexobj(x) else list(REDUCERS)


def check(found, name, every, shape=None, tol=TOL):
    """That results are those of the values of every iteration, and of all of them together.

    `every` is a list of values in the order of execution, or of lists of them: the values that one
    result stands for. `shape` is that of the loops.
    """
    every = [v if isinstance(v, list) else [v] for v in every]
    groups = [np.concatenate([exact(x).ravel() for x in v]) for v in every]
    for r in names(groups[0]):
        each = np.stack([REDUCERS[r](g) for g in groups])
        shape = (len(groups),) if shape is None else shape
        close(found[f"{name}:{r}"], each.reshape((*shape, *each.shape[1:])), tol)
        close(found[f"{name}:{r}.total"], REDUCERS[r](np.concatenate(groups)), tol)


def captured(fn, *args, values=None, grads=None, **options):
    return tapax.capture(fn, values=values, grads=grads, **options)(*args)


# --- every program of the table -----------------------------------------------------------------


WRAPPERS = {
    "capture": lambda f, **k: tapax.capture(f, **k),
    "jit of capture": lambda f, **k: jax.jit(tapax.capture(f, **k)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_values(name):
    case = CASES[name]
    expected_out, expected = eager.values(case.program, jnp.asarray(X))
    how = WRAPPERS[list(WRAPPERS)[len(name) % 2]]
    asked = [r for r in ALL if name != "complex_values" or r.name in COMPLEX]
    out, taps = how(case.program(tapax.sow), values={"**": asked})(jnp.asarray(X))
    close(out, expected_out)
    assert {n.split(":")[0] for n in taps.values} == set(case.loops)
    for site, loops in case.loops.items():
        if site == "n":  # integers
            assert taps.values["n:minmax"].tolist() == [0, 2]
            assert "n:moments" not in taps.values
        elif name == "while_loop":
            check(taps.values, site, [expected[site]], ())
            assert int(taps.valid[f"{site}:moments"]) == 4
        else:
            shape = taps.values[f"{site}:moments"].shape[:-1]
            assert len(shape) == loops
            check(taps.values, site, expected[site], shape)


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.differentiable])
def test_gradients(name):
    case = CASES[name]
    if name.startswith("dropped"):
        return
    expected = eager.grads(case.program, jnp.asarray(X))
    _, seen = eager.values(case.program, jnp.asarray(X))
    step = jax.value_and_grad(case.program(tapax.sow))
    how = WRAPPERS[list(WRAPPERS)[len(name) % 2]]
    pairs = [R.cosine, R.update_ratio.total]
    asked = [r for r in ALL if name != "complex_values" or r.name in COMPLEX]
    grads = {"**": [*asked, *pairs]}
    out, taps = how(step, values=None, grads=grads)(jnp.asarray(X))
    jax.tree.map(close, out, step(jnp.asarray(X)))
    assert not taps.values
    for site in set(case.loops) & set(expected):
        check(taps.grads, site, expected[site], taps.grads[f"{site}:moments"].shape[:-1])
        gs, vs = ([exact(x).ravel() for x in xs] for xs in (expected[site], seen[site]))
        norm = np.linalg.norm
        cosine = [np.vdot(g, v).real / norm(g) / norm(v) for g, v in zip(gs, vs, strict=True)]
        if name != "complex_values":  # whose gradient is conjugated by convention
            shape = taps.grads[f"{site}:cosine"].shape
            close(taps.grads[f"{site}:cosine"], np.reshape(cosine, shape), 10 * TOL)
        ratio = norm(np.concatenate(gs)) / norm(np.concatenate(vs))
        close(taps.grads[f"{site}:update_ratio.total"], ratio, 10 * TOL)


# --- loops and branches -------------------------------------------------------------------------


def _count(sow, n, x):
    body = lambda c: (c[0] + 1, sow(jnp.sin(c[1]) + c[0], "h"))
    return lax.while_loop(lambda c: c[0] < n, body, (0, x))[1]


def while_in_scan(sow):
    return lambda x: lax.scan(lambda c, n: (_count(sow, n, c), None), x, jnp.array([2, 0, 3]))[0]


def scan_in_while(sow):
    inner = lambda c: lax.scan(lambda c, t: (sow(c * t, "h"), None), c, jnp.array([0.5, 1.5]))[0]
    return lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, inner(c[1])), (0, x))[
        1
    ]


def while_in_while(sow):
    return lambda x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, _count(sow, c[0], c[1])), (0, x)
    )[1]


def cond_in_scan(sow):
    def body(c, i):
        return lax.cond(i % 2 == 0, lambda c: sow(jnp.cos(c) + i, "h"), lambda c: c, c), None

    return lambda x: lax.scan(body, x, jnp.arange(4))[0]


def cond_in_while(sow):
    def body(c):
        return c[0] + 1, lax.cond(c[0] % 3 == 1, lambda c: sow(c * 2, "h"), lambda c: c, c[1])

    return lambda x: lax.while_loop(lambda c: c[0] < 6, body, (0, x))[1]


def scan_in_cond_in_scan(sow):
    inner = lambda c: lax.scan(lambda c, t: (sow(c + t, "h"), None), c, jnp.arange(3.0))[0]

    def body(c, i):
        return lax.switch(i, [inner, lambda c: c, lambda c: inner(2 * c)], c), None

    return lambda x: lax.scan(body, x, jnp.array([0, 1, 0]))[0]


def cond_never(sow):
    return lambda x: lax.cond(x.sum() > 1e9, lambda x: sow(x, "h"), lambda x: x, x)


def fori_traced(sow):
    return lambda x: jax.jit(
        lambda n, x: lax.fori_loop(0, n, lambda i, c: sow(jnp.sin(c) + i, "h"), x)
    )(4, x)


NESTED = {  # for each place in the loops that are stacked: which of the values it stands for
    while_in_scan: [[0, 1], [], [2, 3, 4]],
    scan_in_while: [[0, 2, 4], [1, 3, 5]],
    while_in_while: [0, 1, 2],
    cond_in_scan: [[0], [], [1], []],
    cond_in_while: [0, 1],
    fori_traced: [0, 1, 2, 3],
    cond_never: [],
}


@pytest.mark.parametrize(
    ("program", "eager"),
    [*((p, False) for p in NESTED), (while_in_scan, True), (cond_in_scan, True)],
    ids=lambda p: getattr(p, "__name__", p),
)
def test_loops_and_branches(program, eager):
    _, seen = eager.values(program, jnp.asarray(X))
    every, places = seen.get("h", []), NESTED[program]
    with jax.disable_jit(eager):
        out, taps = captured(program(tapax.sow), jnp.asarray(X), values={"h": ALL})
    close(out, program(eager.plain)(jnp.asarray(X)))
    stacked = bool(places) and isinstance(places[0], list)
    for r, statistic in REDUCERS.items():
        zero = np.zeros_like(statistic(X))
        reduce = lambda which: (
            statistic(np.concatenate([exact(every[i]).ravel() for i in which]))  # noqa: B023
            if which
            else zero  # noqa: B023
        )
        expected = np.stack([reduce(p) for p in places]) if stacked else reduce(places)
        close(taps.values[f"h:{r}"], expected)
        close(taps.values[f"h:{r}.total"], reduce(range(len(every))))
        ran = np.array([bool(p) for p in places]) if stacked else bool(places)
        np.testing.assert_array_equal(np.asarray(taps.valid[f"h:{r}"]).astype(bool), ran)
        assert bool(taps.valid[f"h:{r}.total"]) == bool(every)


def test_a_total_counts_how_often_there_was_a_value():
    _, taps = captured(while_in_scan(tapax.sow), jnp.asarray(X), values={"h": [R.rms, R.rms.total]})
    assert taps.valid["h:rms"].tolist() == [2, 0, 3]
    assert int(taps.valid["h:rms.total"]) == 5
    _, taps = captured(cond_in_scan(tapax.sow), jnp.asarray(X), values={"h": R.rms.total})
    assert int(taps.valid["h"]) == 2
    _, taps = captured(
        CASES["scanned"].program(tapax.sow), jnp.asarray(X), values={"h": R.rms.total}
    )
    assert taps.valid == {}


def test_branches_with_scans_in_a_scan():
    _, seen = eager.values(scan_in_cond_in_scan, jnp.asarray(X))
    _, taps = captured(
        scan_in_cond_in_scan(tapax.sow), jnp.asarray(X), values={"**": [R.sum, R.sum.total]}
    )
    sums = [v.sum() for v in seen["h"]]
    close(taps.values["h:sum"], [sums[:3], [0] * 3, sums[3:]])
    close(taps.values["h:sum.total"], np.sum(sums))
    close(taps.values["h:sum@1"], np.zeros((3, 3)))  # the other branch, which never ran
    assert not np.any(taps.valid["h:sum@1"])


def test_gradients_in_branches():
    program = lambda sow: lambda x: jnp.sum(cond_in_scan(sow)(x) ** 2)
    every = eager.grads(program, jnp.asarray(X))["h"]
    _, taps = captured(
        jax.grad(program(tapax.sow)), jnp.asarray(X), grads={"h": [*ALL, R.cosine.total]}
    )
    for r, statistic in REDUCERS.items():
        found = np.asarray(taps.grads[f"h:{r}"])
        close(found[0], statistic(exact(every[0])))
        close(found[2], statistic(exact(every[1])))
        assert not found[[1, 3]].any()
        close(taps.grads[f"h:{r}.total"], statistic(exact(every).ravel()))


# --- iterations ---------------------------------------------------------------------------------


def scanned(x):
    return lax.scan(lambda c, t: (tapax.sow(c * t, "h"), None), x, jnp.arange(1.0, 6.0))[0]


@pytest.mark.parametrize("step", [0, 3, -1, slice(1, 4), slice(None, None, 2), slice(-2, None)])
def test_some_iterations_of_a_scan(step):
    whole = exact(captured(scanned, jnp.asarray(X), values="h")[1].values["h"])
    at = tapax.at("h", step=step)
    _, taps = captured(scanned, jnp.asarray(X), values={at: [R.rms, R.minmax]})
    close(taps.values["h:rms"], np.sqrt((whole**2).mean(1))[step])
    close(taps.values["h:minmax"], np.stack([whole.min(1), whole.max(1)], -1)[step])
    _, taps = captured(
        jax.grad(lambda x: jnp.sum(scanned(x) ** 2)), jnp.asarray(X), grads={at: R.norm}
    )
    every = eager.grads(
        lambda sow: (
            lambda x: jnp.sum(
                lax.scan(lambda c, t: (sow(c * t, "h"), None), x, jnp.arange(1.0, 6.0))[0] ** 2
            )
        ),
        jnp.asarray(X),
    )["h"]
    close(taps.grads["h"], np.linalg.norm(exact(every), axis=1)[step])


def test_a_total_of_some_iterations():
    whole = exact(captured(scanned, jnp.asarray(X), values="h")[1].values["h"])
    _, taps = captured(
        scanned, jnp.asarray(X), values={tapax.at("h", step=slice(1, 4)): R.sum.total}
    )
    close(taps.values["h"], whole[1:4].sum())


def test_steps_of_a_while_loop():
    f = functools.partial(_count, tapax.sow, 3)
    _, seen = eager.values(lambda sow: functools.partial(_count, sow, 3), jnp.asarray(X))
    each = np.array([v.sum() for v in seen["h"]])
    _, taps = captured(f, jnp.asarray(X), values={"h": R.sum}, steps=5)
    close(taps.values["h"], [*each, 0, 0])
    assert taps.valid["h"].tolist() == [True] * 3 + [False] * 2
    _, taps = captured(f, jnp.asarray(X), values={"h": R.sum}, steps=2)
    close(taps.values["h"], each[:2])
    _, taps = captured(f, jnp.asarray(X), values={"h": [R.minmax, R.sum.total]}, steps=5)
    close(taps.values["h:sum.total"], each.sum())
    close(taps.values["h:minmax"][1], [seen["h"][1].min(), seen["h"][1].max()])
    assert not np.any(taps.values["h:minmax"][3:])
    _, taps = captured(f, jnp.asarray(X), values={tapax.at("h", step=slice(0, 4, 2)): R.sum})
    close(taps.values["h"], each[[0, 2]])
    _, taps = captured(f, jnp.asarray(X), values={tapax.at("h", step=7): R.sum})
    assert taps.values["h"] == 0
    assert not taps.valid["h"]


def test_steps_of_a_while_loop_in_a_scan():
    _, seen = eager.values(while_in_scan, jnp.asarray(X))
    sums = [v.sum() for v in seen["h"]]
    _, taps = captured(while_in_scan(tapax.sow), jnp.asarray(X), values={"h": R.sum}, steps=2)
    close(taps.values["h"], [sums[:2], [0, 0], sums[2:4]])


def test_the_predicate_of_a_while_loop():
    f = lambda x: lax.while_loop(lambda c: tapax.sow(c, "p").sum() < 30, lambda c: c * 2, x)
    x = jnp.array([1.0, 2.0, 3.0])
    for reducer in (R.sum, R.sum.total):
        with pytest.raises(
            tapax.SiteError, match=r"'p'.* predicate of a while loop, .* no reducer can"
        ):
            captured(f, x, values={"p": reducer})


def test_a_mark_that_folds_by_itself():
    add = {"reduce": lambda a, b: a + b, "init": lambda: jnp.zeros(3)}

    def f(x):
        return lax.scan(lambda c, t: (tapax.sow(c * t, "h", **add), None), x, jnp.arange(1.0, 3.0))[
            0
        ]

    _, taps = captured(f, jnp.asarray(X), values={"h": R.sum})
    close(taps.values["h"], 3 * X.sum())


# --- maps ---------------------------------------------------------------------------------------


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


def test_what_does_not_depend_on_the_example_counts_once():
    f = jax.vmap(lambda x, y: tapax.sow(jnp.sin(y), "h") + tapax.sow(x, "x"), in_axes=(0, None))
    _, taps = captured(f, jnp.asarray(M), jnp.asarray(X), values={"**": R.sum})
    close(taps.values["h"], np.sin(X).sum())
    close(taps.values["x"], M.sum())


PICKED = np.array([0, 2, 1, 2])


def switched(sow, i, x):
    return lax.switch(i, [lambda x: sow(2 * x, "a"), lambda x: x, lambda x: sow(x**2, "b")], x)


@pytest.mark.parametrize("values", [True, False])
def test_mapped_predicates(values):
    one = lambda i, x: jnp.sum(switched(tapax.sow, i, x) ** 2)
    if values:
        step = jax.vmap(functools.partial(switched, tapax.sow))
    else:
        step = jax.grad(lambda i, m: jnp.sum(jax.vmap(one)(i, m)), argnums=1)
    asked = {"values": {"**": ALL}} if values else {"grads": {"**": ALL}}
    _, taps = captured(step, jnp.asarray(PICKED), jnp.asarray(M), **asked)
    found = taps.values if values else taps.grads
    for name, number, value, slope in (
        ("a", 0, 2 * M, 4 * M),
        ("b", 2, M**2, 2 * M**2),
    ):
        check(found, name, [(value if values else slope)[number == PICKED]], ())


def test_mapped_predicate_that_none_fulfils():
    f = jax.vmap(functools.partial(switched, tapax.sow))
    _, taps = captured(f, jnp.ones(4, int), jnp.asarray(M), values={"**": [R.minmax, R.var.total]})
    for name in ("a", "b"):
        assert taps.values[f"{name}:minmax"].tolist() == [0, 0]
        assert taps.values[f"{name}:var.total"] == 0
        assert not taps.valid[f"{name}:minmax"]


COUNTS = np.array([0, 1, 3, 2])


def test_mapped_while():
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


# --- meshes -------------------------------------------------------------------------------------


@pytest.fixture
def wide():
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(auto, auto))


S = np.linspace(-1, 2, 32).reshape(4, 8)
CROWD = [
    R.sum,
    R.var.total,
    R.zeros,
    R.histogram(EDGES),
    R.topk(3),
    R.quantiles([0.1, 0.9]),
    R.nonfinite,
]


def test_a_sharded_run_gives_the_numbers_of_one_device(wide):
    def loss(sow, sum_a=lambda x: x.sum(0, keepdims=True), sum_b=lambda x: x.sum(1, keepdims=True)):
        def local(x):
            body = lambda c, t: (sow(jnp.sin(c) * t, "both"), None)
            y = lax.scan(body, x, jnp.arange(1.0, 4.0))[0]
            z = sow(sum_a(y), "one")
            return jnp.sum(sow(sum_b(z), "none") ** 2)

        return local

    def over(axis, dim):
        return lambda x: lax.psum(x.sum(dim, keepdims=True), axis)

    mesh_loss = jax.shard_map(
        loss(tapax.sow, over("a", 0), over("b", 1)), mesh=wide, in_specs=P("a", "b"), out_specs=P()
    )
    few = [R.sum, R.minmax]
    asked = {
        "values": {"both": CROWD, ("one", "none"): few},
        "grads": {"**": [R.var.total, R.cosine, R.minmax]},
    }
    one = tapax.capture(jax.jit(jax.value_and_grad(loss(tapax.sow))), **asked)(jnp.asarray(S))
    many = tapax.capture(jax.jit(jax.value_and_grad(mesh_loss)), **asked)(jnp.asarray(S))
    jax.tree.map(close, many[0], one[0])
    assert set(many[1].values) == set(one[1].values)
    assert set(many[1].grads) == set(one[1].grads)
    for kind in ("values", "grads"):
        for name, value in getattr(one[1], kind).items():
            close(getattr(many[1], kind)[name], value, 10 * TOL)
    assert many[1].sites["both:sum"].loops == ("scan[3]",)
    h = np.sin(S)
    close(many[1].values["both:sum"][0], h.sum())


def test_last_is_not_combined_over_devices(wide):
    f = jax.shard_map(
        lambda x: tapax.sow(2 * x, "h"), mesh=wide, in_specs=P("a", "b"), out_specs=P("a", "b")
    )
    _, taps = captured(f, jnp.asarray(S), values={"h": R.last})
    close(taps.values["h"], 2 * S.reshape(2, 2, 4, 2).transpose(0, 2, 1, 3))


def test_units_over_a_mesh(wide):
    f = jax.shard_map(
        lambda x: tapax.sow(2 * x, "h"), mesh=wide, in_specs=P(("a", "b")), out_specs=P(("a", "b"))
    )
    x = np.arange(48.0).reshape(16, 3)
    _, taps = captured(f, jnp.asarray(x), values={"h": [R.mean(axis=-1), R.minmax(axis=-1)]})
    close(taps.values["h:mean"], 2 * x.mean(0))
    close(taps.values["h:minmax"], 2 * np.stack([x.min(0), x.max(0)], -1))


def parts(x):
    return np.asarray(x).reshape(2, 2, 4, 2).transpose(0, 2, 1, 3)


BOUNDS = (0.0, -3.0, -6.0, 1e9)


def test_branches_that_some_devices_take(wide):
    def local(x):
        def body(c, t):
            return lax.cond(c.sum() > t, lambda c: tapax.sow(c - 1, "h"), lambda c: c, c), None

        return lax.scan(body, x, jnp.array(BOUNDS))[0]

    f = jax.shard_map(local, mesh=wide, in_specs=P("a", "b"), out_specs=P("a", "b"))
    _, taps = captured(f, jnp.asarray(S), values={"h": ALL})
    c, every = parts(S), []
    for t in BOUNDS:
        ran = c.sum((2, 3)) > t
        c = np.where(ran[..., None, None], c - 1, c)
        every.append(c[ran])
    assert [e.size // 4 for e in every] == [5, 7, 7, 0]
    for r, statistic in REDUCERS.items():
        close(taps.values[f"h:{r}"][:3], np.stack([statistic(e) for e in every[:3]]))
        assert not np.any(taps.values[f"h:{r}"][3])
        flat = np.concatenate([e.ravel() for e in every])
        close(taps.values[f"h:{r}.total"], statistic(flat))
    assert taps.valid["h:minmax"].tolist() == [True] * 3 + [False]


@pytest.mark.parametrize("varying", [True, False])
@pytest.mark.parametrize("how", ["scan", "while"])
def test_devices_that_run_a_different_number_of_times(wide, varying, how):
    """Each value counts as often as it was there, also if it is the same on all devices."""

    def local(x):
        value = lambda: tapax.sow(x if varying else jnp.ones((2, 2)), "h").sum() + 0 * x.sum()
        n = jnp.where(x.sum() > 0, 3, 1)
        start = 0 * x.sum()
        if how == "scan":
            body = lambda c, i: (lax.cond(i < n, lambda: c + value(), lambda: c), None)
            return lax.scan(body, start, jnp.arange(4))[0][None, None]
        test, body = lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + value())
        return lax.while_loop(test, body, (0 * n, start))[1][None, None]

    f = jax.shard_map(local, mesh=wide, in_specs=P("a", "b"), out_specs=P("a", "b"))
    _, taps = captured(f, jnp.asarray(S), values={"h": [R.sum.total, R.moments.total, R.mean]})
    times = np.where(parts(S).sum((2, 3)) > 0, 3, 1)
    seen = parts(S) if varying else np.ones((2, 4, 2, 2))
    every = np.concatenate([np.repeat(seen[i], times[i], axis=0) for i in range(2)])
    close(taps.values["h:sum.total"], every.sum())
    close(taps.values["h:moments.total"], [every.mean(), every.var()])
    if how == "while":
        close(taps.values["h:mean"], every.mean())


def test_a_mesh_in_a_scan_with_remat_and_vmap(wide):
    def layer(x):
        local = jax.vmap(lambda x: tapax.sow(jnp.sin(x), "h"))
        return jax.shard_map(local, mesh=wide, in_specs=P("a", "b"), out_specs=P("a", "b"))(x)

    def loss(x):
        return jnp.sum(
            lax.scan(lambda c, _: (jax.checkpoint(layer)(c), None), x, None, length=3)[0]
        )

    _, taps = captured(jax.jit(jax.grad(loss)), jnp.asarray(S), values={"h": ALL}, grads={"h": ALL})
    h = [np.sin(S)]
    for _ in range(2):
        h.append(np.sin(h[-1]))
    g = [np.ones_like(S)]
    for v in reversed(h[:-1]):
        g.insert(0, g[0] * np.cos(v))
    check(taps.values, "h", h)
    check(taps.grads, "h", g)


def test_leaves_that_vary_over_different_axes(wide):
    """A combination may have more to do with the device than its parts."""
    ties = R.Reducer(
        lambda x: (jnp.full((), -jnp.inf, x.dtype), jnp.zeros((), jnp.int32)),
        lambda s, x: (x.max(), jnp.asarray(1, jnp.int32)),
        lambda a, b: (
            jnp.maximum(a[0], b[0]),
            jnp.where(a[0] >= b[0], a[1], 0) + jnp.where(b[0] >= a[0], b[1], 0),
        ),
        name="ties",
    )

    def local(x):
        body = lambda c, t: (c + tapax.sow(x * t, "h").sum(), None)
        return lax.scan(body, 0 * x.sum(), jnp.array([1.0, 2.0, 2.0]))[0][None, None]

    f = jax.shard_map(local, mesh=wide, in_specs=P("a", "b"), out_specs=P("a", "b"))
    _, taps = captured(f, jnp.asarray(S), values={"h": ties.total})
    close(taps.values["h:0"], 2 * S.max())
    assert int(taps.values["h:1"]) == 2


# --- one's own reducers -------------------------------------------------------------------------


def affine(**options):
    """Composes maps y -> a y + b, given as [a, b]: the order matters."""
    return R.Reducer(
        init=lambda: {"a": 1.0, "b": 0.0},
        update=lambda s, x: {"a": x[0] * s["a"], "b": x[0] * s["b"] + x[1]},
        combine=lambda p, q: {"a": q["a"] * p["a"], "b": q["a"] * p["b"] + q["b"]},
        name="affine",
        **options,
    )


MAPS = np.array(
    [[1.5, -1.0], [0.5, 2.0], [-2.0, 0.25], [1.25, 1.0], [0.75, -3.0], [3.0, 0.5], [-1, 4]]
)


def composed(maps):
    a, b = 1.0, 0.0
    for x in np.asarray(maps, np.float64).reshape(-1, 2):
        a, b = x[0] * a, x[0] * b + x[1]
    return a, b


def follow(maps, reverse=False):
    return lax.scan(lambda c, m: (c, tapax.sow(m, "h")), 0.0, maps, reverse=reverse)[1]


def check_affine(taps, maps, name="h", each=None):
    for i, leaf in enumerate("ab"):
        expected = composed(maps)[i] if each is None else [composed(m)[i] for m in maps]
        close(taps.values[f"{name}{leaf}"], expected)


OVER = ["scan", "reversed scan", "while", "vmap", "vmap of vmap"]


@pytest.mark.parametrize(
    ("over", "count"), [*((o, n) for o in OVER for n in (1, 2, 7)), ("mesh", 8)]
)
def test_states_are_combined_in_order(over, count, wide):
    """In the order of iterations, by their number; of examples and devices as they lie."""
    maps = MAPS[:count]
    if over == "vmap of vmap":
        maps = np.concatenate([maps, maps[::-1] + 0.5]).reshape(2, count, 2)
    if over == "mesh":
        maps = np.concatenate([MAPS, MAPS[:1] + 0.5])
    each = lambda m: tapax.sow(m, "h")

    def loop(maps):
        body = lambda i: (each(maps[i]), i + 1)[1]
        return lax.while_loop(lambda i: i < len(maps), body, 0)

    fn = {
        "scan": follow,
        "reversed scan": functools.partial(follow, reverse=True),
        "while": loop,
        "vmap": jax.vmap(each),
        "vmap of vmap": jax.vmap(jax.vmap(each)),
        "mesh": jax.shard_map(
            lambda m: each(m[0])[None], mesh=wide, in_specs=P(("a", "b")), out_specs=P(("a", "b"))
        ),
    }[over]
    reducer = affine()
    reducer = reducer if over in ("while", "mesh") or "vmap" in over else reducer.total
    _, taps = captured(fn, jnp.asarray(maps), values={"h": reducer})
    check_affine(taps, maps, "h:")


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_are_combined_in_the_order_of_iterations(reverse):
    """A backward pass runs the other way; the order is that of the iterations all the same."""

    def loss(xs):
        body = lambda c, xm: (c + jnp.sum(tapax.sow(xm[0], "h") * xm[1]), None)
        return lax.scan(body, 0.0, (xs, jnp.asarray(MAPS)), reverse=reverse)[0]

    step = jax.grad(loss)
    _, taps = captured(step, jnp.zeros((7, 2)), grads={"h": [affine().total, R.last.total]})
    close(taps.grads["h:affine.total.a"], composed(MAPS)[0])
    close(taps.grads["h:affine.total.b"], composed(MAPS)[1])
    close(taps.grads["h:last.total"], MAPS[-1])


@pytest.mark.parametrize("reverse", [False, True])
def test_the_last_iteration_is_that_of_the_highest_number(reverse):
    fn = functools.partial(follow, reverse=reverse)
    _, taps = captured(fn, jnp.asarray(MAPS), values={"h": R.last.total})
    close(taps.values["h"], MAPS[-1])


def test_order_in_nested_loops():
    maps = np.concatenate([MAPS, MAPS[:5] - 0.5]).reshape(2, 3, 2, 2)

    def f(maps):
        inner = lambda m: jax.vmap(lambda m: tapax.sow(m, "h"))(m)
        middle = lambda ms: lax.scan(lambda c, m: (c, inner(m)), 0, ms)[1]
        return lax.scan(lambda c, ms: (c, middle(ms)), 0, maps)[1]

    _, taps = captured(f, jnp.asarray(maps), values={"h": [affine().total, affine()]})
    check_affine(taps, maps, "h:affine.total.")
    for i, leaf in enumerate("ab"):
        expected = [[composed(m)[i] for m in ms] for ms in maps]
        close(taps.values[f"h:affine.{leaf}"], expected)


def test_order_where_some_iterations_do_not_count():
    p = np.array([0, 1, 1, 0, 1, 0, 1], bool)

    def f(maps):
        body = lambda c, x: (
            lax.cond(x[0], lambda m: tapax.sow(m, "h")[0], lambda m: m[0], x[1]),
            None,
        )
        return lax.scan(body, 0.0, (jnp.asarray(p), maps))[0]

    _, taps = captured(f, jnp.asarray(MAPS, jnp.float32), values={"h": affine().total})
    check_affine(taps, MAPS[p], "h:")
    mapped = jax.vmap(lambda p, m: lax.cond(p, lambda m: tapax.sow(m, "h"), lambda m: m, m))
    _, taps = captured(mapped, jnp.asarray(p), jnp.asarray(MAPS), values={"h": affine()})
    check_affine(taps, MAPS[p], "h:")


def test_what_init_may_return():
    """A state of Python numbers has the types of one that has seen something."""
    add = lambda state, x: state + x.sum(dtype=x.dtype)
    total = lambda init: R.Reducer(init, add, lambda a, b: a + b)
    for init in (lambda: 0, lambda: 0.0, lambda x: jnp.zeros((), x.dtype), lambda x: 0):
        for dtype in ("float32", "bfloat16", "int32"):
            x = jnp.asarray([1, 2, 3], dtype)
            if dtype == "int32" and isinstance(init.__code__.co_consts[-1], float):
                continue
            _, taps = captured(lambda x: tapax.sow(x, "h"), x, values={"h": total(init)})
            assert taps.values["h"] == 6
            assert taps.values["h"].dtype == dtype
            assert taps.sites["h"].reducer.name == "reduced"


def test_state_types_follow_the_setting_of_64_bits():
    total = R.Reducer(lambda: 0, lambda s, x: s + x.sum(), lambda a, b: a + b)
    x = np.arange(4, dtype=np.int32)
    for wide in (True, False, True):
        with jax.enable_x64(wide):
            fn = jax.jit(lambda xs: lax.scan(lambda c, x: (c, tapax.sow(x, "h")), 0, xs)[1])
            _, taps = captured(fn, jnp.asarray(x.reshape(2, 2)), values={"h": total.total})
            assert taps.values["h"] == 6
            assert taps.values["h"].dtype == (np.int64 if wide else np.int32)


def test_names_of_structured_results():
    two = R.Reducer(
        lambda: (0.0, 0.0),
        lambda s, x: (s[0] + x.sum(), s[1] + (x**2).sum()),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        lambda s: {"mean": s[0] / 3, "all": [s[0], s[1]]},
        name="two",
    )
    f = lambda x: tapax.sow({"u": x, "v": 2 * x}, "h")["u"]
    _, taps = captured(f, jnp.asarray(X), values={"h:u": two, "h:v": [two, R.sum]})
    assert set(taps.values) == {
        *("h:u:mean", "h:u:all.0", "h:u:all.1"),
        *("h:v:two.mean", "h:v:two.all.0", "h:v:two.all.1", "h:v:sum"),
    }
    close(taps.values["h:v:two.all.1"], (4 * X**2).sum())
    assert taps.sites["h:u:all.0"].reducer == two


# --- several at once ----------------------------------------------------------------------------


def test_several_keys_for_one_site():
    asked = {"h": R.sum, "**": [R.norm, R.sum], (lambda s: s.path == "h"): R.sum.total}
    _, taps = captured(scanned, jnp.asarray(X), values=asked)
    h = np.stack([X * f for f in (1, 2, 6, 24, 120)])
    assert set(taps.values) == {"h:sum", "h:norm", "h:sum.total"}
    close(taps.values["h:sum"], h.sum(1))
    close(taps.values["h:norm"], np.linalg.norm(h, axis=1))
    close(taps.values["h:sum.total"], h.sum())


def test_a_whole_value_beside_a_reduced_one():
    h = np.stack([X * f for f in (1, 2, 6, 24, 120)])
    _, taps = captured(scanned, jnp.asarray(X), values=["h", {"h": R.sum}])
    close(taps.values["h"], h)
    close(taps.values["h:sum"], h.sum(1))
    assert taps.sites["h"].reducer is None
    assert taps.sites["h:sum"].reducer == R.sum
    _, taps = captured(scanned, jnp.asarray(X), values=[tapax.at("h", step=2), {"h": R.sum.total}])
    close(taps.values["h"], h[2])
    close(taps.values["h:sum.total"], h.sum())
    step = jax.grad(lambda x: jnp.sum(scanned(x)))
    _, taps = captured(step, jnp.asarray(X), values="h", grads=["h", {"h": R.sum}])
    close(taps.values["h"], h)
    close(taps.grads["h:sum"], np.asarray(taps.grads["h"]).sum(1))
    close(taps.grads["h"][-1], np.ones(3))


def test_values_by_one_reducer_and_gradients_by_another():
    step = jax.grad(lambda x: jnp.sum(scanned(x) ** 2))
    _, taps = captured(step, jnp.asarray(X), values={"h": R.minmax}, grads={"h": R.sum.total})
    assert taps.values["h"].shape == (5, 2)
    assert taps.grads["h"].shape == ()
    close(taps.grads["h"], sum(2 * 120 * X.sum() * 120 / f for f in (1, 2, 6, 24, 120)))


def test_calls_of_one_function_are_kept_apart():
    block = jax.jit(lambda x: tapax.sow(jnp.sin(x), "h"))
    step = jax.grad(lambda x: jnp.sum(block(block(x)) ** 2))
    asked = {"h": [R.sum, R.cosine], "h@1": R.norm}
    _, taps = captured(step, jnp.asarray(X), values={"h": R.sum}, grads=asked)
    first, second = np.sin(X), np.sin(np.sin(X))
    g = {"": 2 * second * np.cos(first), "@1": 2 * second}
    v = {"": first, "@1": second}
    for call in g:
        close(taps.values[f"h{call}"], v[call].sum())
        close(taps.grads[f"h:sum{call}"], g[call].sum())
        cosine = g[call] @ v[call] / np.linalg.norm(g[call]) / np.linalg.norm(v[call])
        close(taps.grads[f"h:cosine{call}"], cosine)
    close(taps.grads["h:norm@1"], np.linalg.norm(g["@1"]))
    assert "h:norm" not in taps.grads


def test_custom_rules():
    @jax.custom_vjp
    def f(x):
        return tapax.sow(2 * x, "primal")

    f.defvjp(lambda x: (tapax.sow(2 * x, "fwd"), x), lambda x, ct: (tapax.sow(3 * ct * x, "bwd"),))
    _, taps = captured(f, jnp.asarray(X), values={"**": R.sum})
    close(taps.values["primal"], 2 * X.sum())
    loss = lambda x: jnp.sum(lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0])
    _, taps = captured(jax.grad(loss), jnp.asarray(X), values={"**": [R.sum, R.sum.total]})
    close(taps.values["fwd:sum"], [2 * X.sum(), 4 * X.sum()])
    close(taps.values["bwd:sum"], [(3 * X * 6 * X).sum(), 6 * X.sum()])
    close(taps.values["bwd:sum.total"], (3 * X * 6 * X).sum() + 6 * X.sum())


def test_results_are_differentiable_and_captures_nest():
    def rms(x):
        out, taps = tapax.capture(scanned, values={"h": [R.rms.total, R.rms]})(x)
        return taps.values["h:rms.total"], out

    scale = np.sqrt(np.mean([f**2 for f in (1, 2, 6, 24, 120)]))
    value, slope = jax.value_and_grad(lambda x: rms(x)[0])(jnp.asarray(X))
    close(value, scale * np.sqrt((X**2).mean()))
    close(slope, scale * X / 3 / np.sqrt((X**2).mean()))
    _, taps = captured(lambda x: rms(x)[1], jnp.asarray(X), values={"h": [R.sum, R.sum.total]})
    close(taps.values["h:sum.total"], 153 * X.sum())


def test_nothing_is_traced_again():
    traced = []

    def step(x):
        traced.append(1)
        return jnp.sum(scanned(x))

    asked = lambda: {"h": [R.rms.total, R.histogram(list(EDGES)), R.rms(axis=-1).named("units")]}
    for fn in (step, jax.jit(step)):
        for wrap in (lambda f: f, jax.jit):
            again = wrap(tapax.capture(fn, values=asked()))
            again(jnp.asarray(X))
            count = len(traced)
            again(jnp.asarray(X) + 1)
            assert len(traced) == count
    jitted = jax.jit(step)
    tapax.capture(jitted, values=asked())(jnp.asarray(X))
    count = len(traced)
    tapax.capture(jitted, values=asked())(jnp.asarray(X))
    assert len(traced) == count


# --- memory -------------------------------------------------------------------------------------


WIDTH, LAYERS, BATCH = 64, 12, 256


def deep(remat):
    def layer(c, w):
        a = tapax.sow(c @ w, "a")
        return tapax.sow(jnp.tanh(a), "b"), None

    layer = jax.checkpoint(layer) if remat else layer

    def loss(ws, x):
        return jnp.mean(lax.scan(layer, x, ws)[0] ** 2)

    return jax.value_and_grad(loss), (
        jnp.ones((LAYERS, WIDTH, WIDTH)) / WIDTH,
        jnp.ones((BATCH, WIDTH)),
    )


def scans(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from scans(inner)


EVERYTHING = {
    "rms": R.rms,
    "totals": [R.rms.total, R.moments.total, R.minmax],
    "distributions": [R.histogram(EDGES), R.topk(4).total, R.rms(axis=-1)],
}


@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("which", list(EVERYTHING))
def test_no_value_is_stored(which, remat):
    step, args = deep(remat)
    asked = {"**": EVERYTHING[which]}
    watched = tapax.capture(step, values=asked, grads=asked)
    full = sorted(
        v.aval.shape for eqn in scans(jax.make_jaxpr(step)(*args).jaxpr) for v in eqn.outvars
    )
    found = sorted(
        v.aval.shape for eqn in scans(jax.make_jaxpr(watched)(*args).jaxpr) for v in eqn.outvars
    )
    large = lambda shapes: [s for s in shapes if np.prod(s) >= BATCH * WIDTH]
    assert large(found) == large(full)
    if remat and which == "rms":
        memory = [
            jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes
            for f in (step, watched)
        ]
        # No more than one value beside it, however many layers and sites there are.
        assert memory[1] <= memory[0] + args[1].nbytes + 8192


# --- frameworks ---------------------------------------------------------------------------------


FRAMEWORKS = ["nnx", "nnx scan", "linen", "equinox"]


def model_of(name):
    """A step that takes a gradient, of a framework, and its arguments."""
    x = jnp.sin(jnp.arange(12, dtype=jnp.float32)).reshape(4, 3)
    if name.startswith("nnx"):
        from flax import nnx

        from tests.models.nnx_models import Net, loss

        if name == "nnx":
            return nnx.jit(nnx.grad(loss)), (Net(), x)

        class Stacked(nnx.Module):
            def __init__(self):
                make = nnx.vmap(lambda key: nnx.Linear(3, 3, rngs=nnx.Rngs(key)))
                self.layers = make(jax.random.split(jax.random.key(0), 3))

            def __call__(self, x):
                step = lambda x, layer: jnp.tanh(layer(x))
                return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

        return nnx.jit(nnx.grad(loss)), (Stacked(), x)
    if name == "linen":
        from tests.models.linen_models import KEY, MLP

        model = MLP(3)
        params = model.init(KEY, x)
        return jax.jit(jax.grad(lambda p, x: jnp.sum(model.apply(p, x) ** 2))), (params, x)
    import equinox as eqx

    net = eqx.nn.MLP(3, 3, 4, 2, key=jax.random.key(0))
    loss = lambda net, x: jnp.sum(jax.vmap(net)(x) ** 2)
    return eqx.filter_jit(eqx.filter_grad(loss)), (net, x)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_modules_of_frameworks(name):
    """The statistics of what a plain capture returns."""
    step, args = model_of(name)
    _, whole = tapax.capture(step)(*args)
    grads = {"**": [R.rms, R.minmax]}
    out, taps = tapax.capture(step, values={"**": R.rms}, grads=grads)(*args)
    assert set(taps.values) == set(whole.values)
    assert len(whole.values) >= 1
    for n, value in whole.values.items():
        lead = sum(loop.startswith("scan") for loop in whole.sites[n].loops)
        axes = tuple(range(lead, value.ndim))
        close(taps.values[n], np.sqrt((exact(value) ** 2).mean(axes)), 1e-5)
    for n, value in whole.grads.items():
        axes = tuple(range(taps.grads[f"{n}:rms"].ndim, value.ndim))
        close(taps.grads[f"{n}:rms"], np.sqrt((exact(value) ** 2).mean(axes)), 1e-5)
        expected = np.stack([exact(value).min(axes), exact(value).max(axes)], -1)
        close(taps.grads[f"{n}:minmax"], expected)
