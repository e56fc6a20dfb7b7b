"""Reducers inside programs: loops, branches, maps, meshes; values and gradients.

The oracle runs the program one operation at a time and records every value in the order of
execution; NumPy reduces them in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapax
from tests.models.programs import CASES
from tests.oracles import eager as oracle
from tests.oracles.closeness import assert_close

R = tapax.reduce
X = np.array([0.3, -0.7, 1.2])
EDGES = (-1.0, -0.2, 0.1, 0.5, 4.0)
TOL = 1e-11 if jax.config.jax_enable_x64 else 3e-5
REDUCERS = {
    "moments": lambda x: np.stack([x.mean(), x.var()]),
    "minmax": lambda x: np.stack([x.min(), x.max()]),  # it would count a zero that tapax filled in
}
COMPLEX = ("moments",)
EACH = [getattr(R, name) for name in REDUCERS]
TOTALS = [r.total for r in EACH]
ALL = [*EACH, *TOTALS]


def close(found, expected, tol=TOL):
    found = np.asarray(found)
    assert found.shape == np.shape(expected)
    assert_close(found, np.asarray(expected), tol)


def exact(x):
    return np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)


def names(x):
    return COMPLEX if np.iscomplexobj(x) else list(REDUCERS)


def check(found, name, every, shape=None, tol=TOL):
    """Check the results for every iteration, and for all iterations together.

    `every` lists the values in the order of execution, or a list of values for each result.
    `shape` is the shape of the loops.
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


WRAPPERS = {
    "capture": lambda f, **k: tapax.capture(f, **k),
    "jit of capture": lambda f, **k: jax.jit(tapax.capture(f, **k)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_reduced_values_of_every_program(name):
    case = CASES[name]
    expected_out, expected = oracle.values(case.program, jnp.asarray(X))
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
def test_reduced_gradients_of_every_program(name):
    case = CASES[name]
    if name.startswith("dropped"):
        return
    expected = oracle.grads(case.program, jnp.asarray(X))
    _, seen = oracle.values(case.program, jnp.asarray(X))
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
        if name != "complex_values":  # JAX conjugates their gradients by convention
            shape = taps.grads[f"{site}:cosine"].shape
            close(taps.grads[f"{site}:cosine"], np.reshape(cosine, shape), 10 * TOL)
        ratio = norm(np.concatenate(gs)) / norm(np.concatenate(vs))
        close(taps.grads[f"{site}:update_ratio.total"], ratio, 10 * TOL)


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


NESTED = {  # for each index of the stacked loops: the values that it reduces
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
def test_statistics_in_loops_and_branches_agree_with_numpy(program, eager):
    _, seen = oracle.values(program, jnp.asarray(X))
    every, places = seen.get("h", []), NESTED[program]
    with jax.disable_jit(eager):
        out, taps = captured(program(tapax.sow), jnp.asarray(X), values={"h": ALL})
    close(out, program(oracle.plain)(jnp.asarray(X)))
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
    _, seen = oracle.values(scan_in_cond_in_scan, jnp.asarray(X))
    _, taps = captured(
        scan_in_cond_in_scan(tapax.sow), jnp.asarray(X), values={"**": [R.sum, R.sum.total]}
    )
    sums = [v.sum() for v in seen["h"]]
    close(taps.values["h:sum"], [sums[:3], [0] * 3, sums[3:]])
    close(taps.values["h:sum.total"], np.sum(sums))
    close(taps.values["h:sum@1"], np.zeros((3, 3)))  # the other branch, which never ran
    assert not np.any(taps.valid["h:sum@1"])


def test_gradients_in_branches_are_reduced_where_they_ran():
    program = lambda sow: lambda x: jnp.sum(cond_in_scan(sow)(x) ** 2)
    every = oracle.grads(program, jnp.asarray(X))["h"]
    _, taps = captured(
        jax.grad(program(tapax.sow)), jnp.asarray(X), grads={"h": [*ALL, R.cosine.total]}
    )
    for r, statistic in REDUCERS.items():
        found = np.asarray(taps.grads[f"h:{r}"])
        close(found[0], statistic(exact(every[0])))
        close(found[2], statistic(exact(every[1])))
        assert not found[[1, 3]].any()
        close(taps.grads[f"h:{r}.total"], statistic(exact(every).ravel()))


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
    every = oracle.grads(
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
    _, seen = oracle.values(lambda sow: functools.partial(_count, sow, 3), jnp.asarray(X))
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
    _, seen = oracle.values(while_in_scan, jnp.asarray(X))
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


def test_several_keys_for_one_site():
    asked = {"h": R.sum, "**": [R.norm, R.sum], (lambda s: s.path == "h"): R.sum.total}
    _, taps = captured(scanned, jnp.asarray(X), values=asked)
    h = np.stack([X * f for f in (1, 2, 6, 24, 120)])
    assert set(taps.values) == {"h:sum", "h:norm", "h:sum.total"}
    close(taps.values["h:sum"], h.sum(1))
    close(taps.values["h:norm"], np.linalg.norm(h, axis=1))
    close(taps.values["h:sum.total"], h.sum())


def test_a_whole_value_and_a_reduced_one():
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


def test_reductions_inside_custom_rules():
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
