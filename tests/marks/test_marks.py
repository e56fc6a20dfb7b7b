"""`sow`, `perturb`, `scope` and rules: names, structures and reducers."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies

import tapax
from tests.oracles.closeness import assert_close

X = jnp.array([1.0, 2.0])


def test_marks_return_their_value_unchanged():
    tree = {"a": X, "b": (None, "text", 3)}
    assert tapax.sow(tree, "t") is tree
    assert tapax.perturb(X, "p") is X


def test_structures_have_a_site_for_each_leaf():
    def f(x):
        tree = tapax.sow({"w": x, "rest": (2 * x, None, "text", {"n": 3 * x})}, "net")
        assert tree["rest"][2] == "text"
        return tree["rest"][3]["n"]

    out, taps = tapax.capture(f)(X)
    assert_close(out, 3 * X)
    assert set(taps.values) == {"net:w", "net:rest.0", "net:rest.3.n"}
    assert_close(taps.values["net:rest.0"], 2 * X)
    _, taps = tapax.capture(f, values="net")(X)
    assert len(taps.values) == 3
    _, taps = tapax.capture(f, values="net:w")(X)
    assert set(taps.values) == {"net:w"}


def test_python_numbers_can_be_sown():
    _, taps = tapax.capture(lambda x: x * tapax.sow(3.0, "factor"))(X)
    assert float(taps.values["factor"]) == 3.0


def test_random_keys_can_be_sown():
    def f(key):
        key = lax.cond(True, lambda k: tapax.sow(jax.random.fold_in(k, 1), "key"), lambda k: k, key)
        return jax.random.normal(key)

    key = jax.random.key(0)
    out, taps = tapax.capture(jax.jit(f))(key)
    assert_close(out, jax.random.normal(jax.random.fold_in(key, 1)))
    assert jnp.issubdtype(taps.values["key"].dtype, jax.dtypes.prng_key)


def test_perturb_marks_a_site():
    _, taps = tapax.capture(jax.grad(lambda x: jnp.sum(tapax.perturb(x, "p") ** 2)))(X)
    assert_close(taps.grads["p"], 2 * X)
    assert taps.sites["p"].kind == "perturb"


def test_calls_are_numbered_in_the_order_of_the_program():
    def f(x):
        for i in range(3):
            x = tapax.sow(x + i, "h")
        return x

    _, taps = tapax.capture(f)(X)
    assert taps.sites.names == ["h", "h@1", "h@2"]
    assert_close(taps.values["h@2"], X + 3)


def test_scopes_prefix_names_of_sites():
    inner = jax.jit(lambda x: tapax.sow(jnp.sin(x), "h"))

    def f(x):
        with tapax.scope("teacher"):
            a = inner(x)
            with tapax.scope("deep/er"):
                a = lax.scan(lambda c, _: (inner(c), None), a, None, length=2)[0]
        with tapax.scope("student"):
            return a + inner(x)

    for wrap in (lambda f: f, jax.jit, jax.vmap):
        _, taps = tapax.capture(wrap(f))(X)
        assert set(taps.values) == {"teacher/h", "teacher/deep/er/h", "student/h"}
    _, taps = tapax.capture(jax.grad(lambda x: jnp.sum(jax.checkpoint(f)(x))))(X)
    assert set(taps.grads) == {"teacher/h", "teacher/deep/er/h", "student/h"}


def test_scope_around_a_capture_does_not_prefix_names():
    captured = tapax.capture(lambda x: tapax.sow(x, "h"))
    with tapax.scope("outer"):
        assert set(captured(X)[1].values) == {"h"}
    assert set(captured(X)[1].values) == {"h"}


def test_scope_is_left_on_an_exception():
    def f(x):
        try:
            with tapax.scope("a"):
                raise KeyError
        except KeyError:
            return tapax.sow(x, "h")

    assert set(tapax.capture(f)(X)[1].values) == {"h"}


@pytest.mark.parametrize("name", ["", "a//b", "/a", "a/", "a*", "a@1", "a:b", "a~1"])
def test_names_with_special_characters_are_refused(name):
    with pytest.raises(tapax.SiteError, match="cannot be the name of a site"):
        tapax.sow(X, name)


def test_name_must_be_a_string():
    with pytest.raises(TypeError, match="takes a string as its name, but was given 3"):
        tapax.sow(X, 3)


total = {"reduce": lambda a, b: a + b, "init": lambda: 0.0}
product = {"reduce": lambda a, b: a * b, "init": lambda: 1.0}


def test_reducers_fold_over_calls():
    def f(x):
        tapax.sow(x, "sum", **total)
        tapax.sow(2 * x, "sum", **total)
        tapax.sow(3 * x, "product", **product)
        return x

    _, taps = tapax.capture(f)(X)
    assert_close(taps.values["sum"], 3 * X)
    assert_close(taps.values["product"], 3 * X)
    assert taps.valid == {}


def test_reducers_fold_over_loops_in_order():
    # The fold is not commutative, so the order of two alternating marks matters.
    fold = {"reduce": lambda a, b: 2 * a + b, "init": lambda: 1.0}

    def f(x):
        def body(c, t):
            tapax.sow(c, "h", **fold)
            tapax.sow(-c, "h", **fold)
            return c + t, None

        tapax.sow(x, "h", **fold)
        y, _ = lax.scan(body, x, jnp.arange(1.0, 4.0))
        tapax.sow(y, "h", **fold)
        return y

    expected, c = 2.0 + X, X
    for t in (1.0, 2.0, 3.0):
        expected = 2 * (2 * expected + c) - c
        c = c + t
    expected = 2 * expected + c
    for wrap in (lambda f: f, jax.jit, lambda f: jax.checkpoint(f)):
        _, taps = tapax.capture(wrap(f))(X)
        assert_close(taps.values["h"], expected)
        assert set(taps.values) == {"h"}


def test_reducers_fold_under_a_gradient():
    def loss(x):
        body = lambda c, _: (jax.checkpoint(lambda c: tapax.sow(2 * c, "h", **total))(c), None)
        return jnp.sum(lax.scan(body, x, None, length=3)[0])

    _, taps = tapax.capture(jax.jit(jax.grad(loss)))(X)
    assert_close(taps.values["h"], 14 * X)
    assert_close(taps.grads["h"], [[4.0] * 2, [2.0] * 2, [1.0] * 2])


def test_reducers_fold_in_while_loops_and_branches():
    def f(n, x):
        def body(c):
            i, y = c
            y = lax.cond(i % 2 == 0, lambda y: tapax.sow(y + 1, "h", **total), lambda y: y, y)
            return i + 1, y

        return lax.while_loop(lambda c: c[0] < n, body, (0, x))[1]

    _, taps = tapax.capture(jax.jit(f))(5, X)
    assert_close(taps.values["h"], (X + 1) + (X + 2) + (X + 3))
    assert bool(taps.valid["h"])
    _, taps = tapax.capture(jax.jit(f))(0, X)
    assert not bool(taps.valid["h"])


def test_reducers_under_vmap_fold_each_example():
    # This reducer would mix examples if it saw all of them at once.
    fold = {"reduce": lambda a, b: a + jnp.sum(b), "init": lambda: 0.0}

    def f(n, x):
        y = lax.fori_loop(0, n, lambda i, c: tapax.sow(c + 1, "h", **fold), x)
        return lax.cond(n > 1, lambda y: tapax.sow(y, "g", **fold), lambda y: y, y)

    m, n = jnp.arange(6.0).reshape(3, 2), jnp.array([0, 1, 2])
    _, taps = tapax.capture(jax.vmap(f))(n, m)
    assert_close(taps.values["h"], [0.0, jnp.sum(m[1] + 1), jnp.sum(m[2] + 1) + jnp.sum(m[2] + 2)])
    assert_close(taps.valid["h"], [False, True, True])
    assert_close(taps.values["g"], [0.0, 0.0, jnp.sum(m[2] + 2)])
    assert_close(taps.valid["g"], [False, False, True])


def test_reducers_may_return_structures():
    fold = {"reduce": lambda a, b: {"n": a["n"] + 1, "x": b}, "init": lambda: {"n": 0, "x": 0.0}}
    f = lambda x: lax.scan(lambda c, _: (tapax.sow(c + 1, "h", **fold), None), x, None, length=3)[0]
    _, taps = tapax.capture(f)(X)
    assert int(taps.values["h:n"]) == 3
    assert_close(taps.values["h:x"], X + 3)


def test_reducers_that_differ_are_refused():
    def f(x):
        tapax.sow(x, "h", **total)
        return tapax.sow(x, "h", **product)

    line = inspect.getsourcelines(f)[1]
    with pytest.raises(tapax.SiteError) as error:
        tapax.capture(f)(X)
    assert "The site 'h' is sown at" in str(error.value)
    assert f"test_marks.py:{line + 1}" in str(error.value)
    assert f"test_marks.py:{line + 2}" in str(error.value)

    def g(x):
        tapax.sow(x, "h")
        return tapax.sow(x, "h", **total)

    with pytest.raises(tapax.SiteError, match="reducers that differ"):
        tapax.capture(g)(X)


def test_equal_lambdas_are_one_reducer():
    def f(x):
        for _ in range(2):
            x = tapax.sow(x, "h", reduce=lambda a, b: a + b, init=lambda: 0.0)
        return tapax.sow(x, "h", reduce=lambda a, b: a + b, init=lambda: 0.0)

    assert_close(tapax.capture(f)(X)[1].values["h"], 3 * X)


def test_reducers_with_equal_cells_are_one_reducer():
    def f(x):
        for _ in range(2):
            decay = float("0.5")
            tapax.sow(x, "cell", reduce=lambda a, b: decay * a + b, init=lambda: 0.0)  # noqa: B023
            partial = functools.partial(lambda d, a, b: d * a + b, decay)
            tapax.sow(x, "partial", reduce=partial, init=float)
        return x

    taps = tapax.capture(f)(X)[1]
    assert_close(taps.values["cell"], 1.5 * X)
    assert_close(taps.values["partial"], 1.5 * X)


def test_reducers_that_differ_do_not_matter_where_nothing_is_captured():
    def f(x):
        tapax.sow(x, "h", **total)
        return tapax.sow(x, "h", **product)

    assert_close(tapax.capture(f, values=None)(X)[0], X)


def test_a_reducer_sees_whole_structured_values():
    add = lambda a, b: {"n": a["n"] + 1, "x": a["x"] + b["x"] * b["y"]}

    def f(x):
        body = lambda c, _: (tapax.sow({"x": c, "y": 2.0 * c}, "h", reduce=add, init=init)["x"], 0)
        return lax.scan(body, x, None, length=3)[0]

    init = lambda: {"n": 0, "x": 0.0}
    _, taps = tapax.capture(f)(X)
    assert int(taps.values["h:n"]) == 3
    assert_close(taps.values["h:x"], 6 * X**2)


def test_an_edit_sees_the_arrays_of_a_folded_value_as_separate_sites():
    add = {"reduce": lambda a, b: a + b["x"] * b["y"], "init": lambda: 0.0}

    def f(x):
        h = tapax.sow({"x": x, "y": 3.0 * x}, "h", **add)
        return h["x"] + h["y"]

    assert_close(tapax.edit(f, values={"h:x": lambda x: 2 * x})(X), 5 * X)
    zeros = tapax.perturbations(f)(X)
    assert set(zeros) == {"h:x", "h:y"}
    grads = tapax.grad(lambda x: f(x).sum(), at="h:*")(X)
    assert set(grads) == {"h:x", "h:y"}
    assert_close(tapax.capture(f)(X)[1].values["h"], 3 * X**2)


def test_a_reducer_that_grows_may_not_close_over_traced_values():
    def f(x, calls):
        scale = jnp.sin(x)
        for _ in range(calls):
            tapax.sow(x, "h", reduce=lambda kept, x: (*kept, scale * x), init=tuple)
        return x

    assert_close(tapax.capture(lambda x: f(x, 1))(X)[1].values["h:0"], X * jnp.sin(X))
    with pytest.raises(tapax.SiteError, match="closes over a traced value must return a state"):
        tapax.capture(lambda x: f(x, 2))(X)
    assert_close(tapax.capture(lambda x: f(x, 2), values=None)(X)[0], X)


@pytest.mark.parametrize("kind", ["straight", "scan", "jit", "remat", "cond", "vmap"])
def test_a_reducer_may_close_over_traced_values(kind):
    def f(w, x):
        def body(x, y):
            decay = jnp.sin(y)
            fold = {"reduce": lambda a, b: w * a + decay * b, "init": lambda: w * 0}
            return tapax.sow(x + y, "h", **fold), None

        ys = jnp.arange(1.0, 4.0)
        if kind == "scan":
            return lax.scan(body, x, ys)[0]
        wrap = {"jit": jax.jit, "remat": jax.checkpoint}.get(kind, lambda f: f)
        if kind == "cond":
            wrap = lambda f: lambda x, y: lax.cond(y > 0, f, f, x, y)
        for y in ys:
            x, _ = wrap(body)(x, y)
        return x

    def by_hand(w, x):
        total = 0.0
        for y in jnp.arange(1.0, 4.0):
            x = x + y
            total = w * total + jnp.sin(y) * x
        return total

    captured = lambda w, x: tapax.capture(f)(w, x)[1].values["h"]
    if kind == "vmap":
        captured, by_hand = (jax.vmap(g, (None, 0)) for g in (captured, by_hand))
    assert_close(captured(0.5, X), by_hand(0.5, X))
    of = lambda g: jax.grad(lambda w: g(w, X).sum())(0.5)
    assert_close(of(captured), of(by_hand), 1e-5)
    out, taps = tapax.capture(jax.grad(lambda w: f(w, X).sum() * w))(0.5)
    assert set(taps.values) <= {"h", "h@1", "h@2"} and set(taps.grads) <= {"h", "h@1", "h@2"}
    assert set(tapax.sites(f)(0.5, X).names) == {"h"}
    with jax.check_tracer_leaks():
        tapax.capture(f)(0.5, X)


def test_a_reducer_that_grows_is_refused_in_a_loop():
    grow = {"reduce": lambda a, b: (*a, b), "init": tuple}
    f = lambda x: lax.scan(lambda c, _: (tapax.sow(c, "h", **grow), None), x, None, length=3)[0]
    with pytest.raises(tapax.SiteError, match="its result must keep its type"):
        tapax.capture(f)(X)
    _, taps = tapax.capture(lambda x: tapax.sow(tapax.sow(x, "h", **grow) + 1, "h", **grow))(X)
    assert_close(taps.values["h:1"], X + 1)


def test_reduce_and_init_go_together():
    with pytest.raises(TypeError, match="was given `reduce` alone"):
        tapax.sow(X, "h", reduce=lambda a, b: a)
    with pytest.raises(TypeError, match="was given `init` alone"):
        tapax.sow(X, "h", init=lambda: 0)


def test_operations_can_be_selected():
    w = jnp.ones((2, 2))

    def loss(x):
        with tapax.scope("net"):
            return jnp.sum(jnp.tanh(x @ w) ** 2)

    step = jax.jit(jax.grad(loss))
    out, taps = tapax.capture(
        step, values=tapax.ops("dot_general", "tanh"), grads=tapax.ops("tanh")
    )(X)
    assert_close(out, step(X))
    assert set(taps.values) == {"net/dot_general", "net/tanh"}
    assert_close(taps.values["net/dot_general"], X @ w)
    assert_close(taps.grads["net/tanh"], 2 * jnp.tanh(X @ w))
    assert "test_marks.py" in taps.sites["net/tanh"].source


def test_rules_ignore_operations_of_backward_passes():
    block = jax.checkpoint(lambda x: jnp.sin(x) * jnp.sin(2 * x))

    def loss(x):
        return jnp.sum(lax.scan(lambda c, _: (block(c), None), x, None, length=3)[0])

    _, taps = tapax.capture(jax.jit(jax.grad(loss)), values=tapax.ops("sin", "mul", "cos"))(X)
    assert set(taps.values) == {"sin", "sin@1", "mul", "mul@1"}
    assert taps.values["sin"].shape == (3, 2)


def test_lines_can_be_selected():
    def f(x):
        y = jnp.sin(x) + 1
        return y * 2

    line = inspect.getsourcelines(f)[1] + 1
    _, taps = tapax.capture(f, values=tapax.lines(f"test_marks.py:{line}"))(X)
    assert set(taps.values) - {"convert_element_type"} == {"sin", "add"}
    assert_close(taps.values["add"], jnp.sin(X) + 1)
    with pytest.raises(tapax.SiteError, match="the program has no such operation"):
        tapax.capture(f, values=tapax.lines("other.py:1"))(X)


def test_checkpoint_names_can_be_selected():
    policy = checkpoint_policies.save_only_these_names("ffn")

    def loss(x):
        block = jax.checkpoint(lambda x: checkpoint_name(jnp.sin(x), "ffn") ** 2, policy=policy)
        return jnp.sum(block(x))

    _, taps = tapax.capture(
        jax.jit(jax.grad(loss)), values=tapax.named("ffn"), grads=tapax.named("ffn")
    )(X)
    assert_close(taps.values["ffn"], jnp.sin(X))
    assert_close(taps.grads["ffn"], 2 * jnp.sin(X))


def test_rules_and_globs_are_captured_together():
    f = lambda x: jnp.cos(tapax.sow(jnp.sin(x), "h"))
    _, taps = tapax.capture(f, values=["h", tapax.ops("cos")])(X)
    assert set(taps.values) == {"h", "cos"}
    _, taps = tapax.capture(f)(X)
    assert set(taps.values) == {"h"}


def test_marks_without_a_capture_cost_no_trace():
    traces = itertools.count()

    @jax.jit
    def f(x):
        next(traces)
        with tapax.scope("s"):
            return tapax.sow(x, "h")

    for _ in range(3):
        f(X)
    assert next(traces) == 1


ANGLES = jnp.array([0.3, -0.7, 1.2])


def test_keys_with_special_characters_are_escaped():
    tree = {"a": ANGLES, "a@1": 2 * ANGLES, "mlp/~/w": 3 * ANGLES}
    _, taps = tapax.capture(lambda x: tapax.sow(tree, "p")["a"] + x)(ANGLES)
    assert set(taps.values) == {"p:a", "p:a%401", "p:mlp/%7E/w"}
    assert set(
        tapax.capture(lambda x: tapax.sow(tree, "p")["a"], values="p:a%401")(ANGLES)[1].values
    ) == {"p:a%401"}


def test_named_values_are_captured_under_the_next_remat():
    if not hasattr(jax.config, "jax_remat3"):
        return
    from jax.ad_checkpoint import checkpoint_name

    jax.config.update("jax_remat3", True)
    try:
        f = jax.checkpoint(lambda x: checkpoint_name(jnp.sin(x), "n") * 2)
        _, taps = tapax.capture(f, values=tapax.named("n"))(ANGLES)
    finally:
        jax.config.update("jax_remat3", False)
    assert_close(taps.values["n"], jnp.sin(ANGLES))


LAST = {"reduce": lambda a, b: b, "init": lambda: 0.0}


def test_fold_in_a_predicate_is_refused():
    f = lambda x: lax.while_loop(lambda c: tapax.sow(c, "p", **LAST) < 5, lambda c: c + 1, x)
    with pytest.raises(tapax.SiteError, match="'p' folds its values, but is in the predicate"):
        tapax.capture(f)(0.0)


def test_fold_that_has_another_type_before_a_loop_is_refused():
    def f(x):
        tapax.sow(jnp.ones(3) * x, "c", **LAST)
        body = lambda c, t: (tapax.sow(c + t, "c", **LAST), None)
        return lax.scan(body, x, jnp.arange(3.0))[0]

    with pytest.raises(tapax.SiteError, match=r"'c', marked at .* has another type before"):
        tapax.capture(f)(1.0)


def test_rules_ignore_operations_evaluated_while_tracing():
    def f(x):
        with jax.ensure_compile_time_eval():
            fixed = tapax.sow(jnp.sin(jnp.arange(3.0)), "fixed") * 2
        return jnp.sin(x * fixed)

    out, taps = tapax.capture(f, values=tapax.ops("sin", "mul", "iota"))(ANGLES)
    twice = 2 * jnp.sin(jnp.arange(3.0))
    assert_close(out, jnp.sin(ANGLES * twice))
    assert_close(taps.values["mul"], ANGLES * twice)
    assert_close(taps.values["sin"], jnp.sin(ANGLES * twice))
    assert tapax.find_nonfinite(lambda x: jnp.log(f(x) - 5))(ANGLES).operation == "log"
