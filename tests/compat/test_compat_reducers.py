"""`sow` with any `reduce_fn` and `init_fn` matches Flax, in both replacements."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import tapax
from tapax.compat.linen import apply
from tapax.compat.nnx import capture
from tests.oracles.closeness import assert_close

X = jnp.arange(6.0).reshape(2, 3) / 7


def weighted(weight, a, v):
    return a + weight * v


REDUCERS = {
    "a window": (lambda a, v: (*a, v)[-2:], tuple),
    "a window of a list": (lambda a, v: [*a, v][-3:], list),
    "the first three": (lambda a, v: a if len(a) == 3 else (*a, v), tuple),
    "prepending": (lambda a, v: (v, *a), tuple),
    "appending the mean": (lambda a, v: (*a, v.mean()), tuple),
    "a start that is not empty": (lambda a, v: (*a, v), lambda: (jnp.zeros(2),)),
    "a text to begin with": (lambda a, v: (*a, v), lambda: ("start",)),
    "a dict that grows": (lambda a, v: {**a, f"call {len(a)}": v}, dict),
    "a dict with a count": (
        lambda a, v: {"x": a["x"] + (a["n"] + 1) * v, "n": a["n"] + 1},
        lambda: {"x": 0.0, "n": 0},
    ),
    "a count that is an index": (
        lambda a, v: (a[0] + 1, (1, 2, 4, 8)[a[0]] * v),
        lambda: (0, None),
    ),
    "a list": (lambda a, v: [*a, v], list),
    "a list that is changed": (lambda a, v: a.append(v) or a, list),
    "a tuple": (lambda a, v: (*a, v), tuple),
    "the last": (lambda a, v: v, lambda: None),
    "the first": (lambda a, v: v if a is None else a, lambda: None),
    "a sum": (lambda a, v: a + v, lambda: 0),
    "a maximum": (jnp.maximum, lambda: -jnp.inf),
    "a partial": (functools.partial(weighted, 0.5), lambda: 0.0),
    "a nested structure": (lambda a, v: (v, [a]), lambda: None),
    "a count alone": (lambda a, v: a + 1, lambda: 0),
    "text alone": (lambda a, v: a + "x", str),
    "nothing at all": (lambda a, v: None, lambda: None),
}
VALUES = {
    "arrays": lambda x: [x, 2 * x, x + 1, -x],
    "shapes that differ": lambda x: [x, x[0], x[:, :1], x.sum()],
}
WHOLE = {
    "dicts": (
        lambda x: [{"b": x, "a": 2 * x}, {"b": x + 1, "a": x}],
        lambda p, c: {k: p.get(k, 0) + c[k] for k in c},
        dict,
    ),
    "dicts in order": (lambda x: [{"b": x, "a": x}] * 2, lambda p, c: (*p, *c), tuple),
    "pairs": (
        lambda x: [(x, x.sum()), (2 * x, x.sum())],
        lambda p, c: (p[0] + c[0], c[1]),
        lambda: (0, 0),
    ),
    "with text": (
        lambda x: [{"x": x, "is": "one"}, {"x": x, "is": "two"}],
        lambda p, c: (*p, c["is"]),
        tuple,
    ),
    "last text": (lambda x: ["one", "two"], lambda p, c: c, lambda: None),
    "windows of none": (lambda x: [None, None, None], lambda p, c: (*p, c)[-2:], tuple),
    "a mixture": (lambda x: [None, x, "text", {"a": x}], lambda p, c: (c, *p), tuple),
}
PLAIN = {
    "none": lambda x: [None, None],
    "text": lambda x: ["text", "more"],
    "empty": lambda x: [(), {}, []],
    "dict with text": lambda x: [{"x": x, "of": "a layer", "n": None}],
    "arrays and none": lambda x: [x, None, x + 1],
    "an object": lambda x: [{1, 2}, x],
}


def same(found, expected):
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if isinstance(b, (str, set)):
            assert a == b
        else:
            assert_close(a, b)


def linen_module(values, reducer=None):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = dict(zip(("reduce_fn", "init_fn"), reducer or (), strict=False))
            return x, [self.sow("intermediates", "r", v, **options) for v in values(x)]

    return Net()


def nnx_module(values, reducer=None):
    class Net(nnx.Module):
        def __call__(self, x):
            options = dict(zip(("reduce_fn", "init_fn"), reducer or (), strict=False))
            return x, [self.sow(nnx.Intermediate, "r", v, **options) for v in values(x)]

    return Net()


def compare_linen(values, reducer=None):
    model = linen_module(values, reducer)
    for x in (X, 2 * X):
        (out, stored), state = apply(model, {}, x, mutable=["intermediates"])
        (plain, expected), theirs = model.apply({}, x, mutable=["intermediates"])
        assert stored == expected
        found, expected = state["intermediates"]["r"], theirs["intermediates"]["r"]
        same((out, found), (plain, expected))
        assert str(jax.tree.map(type, found)) == str(jax.tree.map(type, expected))


def compare_nnx(values, reducer=None):
    model = nnx_module(values, reducer)
    for x in (X, 2 * X):
        (out, stored), state = capture(model, nnx.Intermediate)(x)
        (plain, expected), theirs = nnx.capture(model, nnx.Intermediate)(x)
        assert stored == expected
        found, expected = state["r"].get_value(), theirs["r"].get_value()
        same((out, found), (plain, expected))


LIBRARIES = pytest.mark.parametrize("compare", [compare_linen, compare_nnx], ids=["linen", "nnx"])


@LIBRARIES
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("reducer", REDUCERS.values(), ids=REDUCERS)
def test_any_reducer_gives_the_result_of_flax(compare, values, reducer):
    try:
        jax.eval_shape(lambda x: functools.reduce(reducer[0], values(x), reducer[1]()) and 0, X)
    except (TypeError, ValueError):
        return  # it does not take arrays of such shapes
    compare(values, reducer)


@LIBRARIES
@pytest.mark.parametrize(("values", "reduce", "init"), WHOLE.values(), ids=WHOLE)
def test_a_reducer_is_given_whole_values(compare, values, reduce, init):
    compare(values, (reduce, init))


@LIBRARIES
@pytest.mark.parametrize("values", PLAIN.values(), ids=PLAIN)
def test_values_that_are_not_arrays_come_back(compare, values):
    compare(values)


@pytest.mark.once
@pytest.mark.parametrize("wrap", [nn.remat, nn.jit, lambda cls: cls], ids=["remat", "jit", "plain"])
@pytest.mark.parametrize("reducer", REDUCERS.values(), ids=REDUCERS)
def test_reducers_in_lifted_modules_of_linen(wrap, reducer):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            for v in (x, jnp.sin(x)):
                self.sow("intermediates", "r", v, reduce_fn=reducer[0], init_fn=reducer[1])
            return 2 * x

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = wrap(Layer)(name="layer")
            return layer(layer(x))

    # In `nn.jit` and `nn.remat`, Flax itself takes only arrays.
    expected = functools.reduce(reducer[0], [X, jnp.sin(X), 2 * X, jnp.sin(2 * X)], reducer[1]())
    _, state = apply(Net(), {}, X, mutable=["intermediates"])
    same(state["intermediates"]["layer"]["r"], expected)


@pytest.mark.once
@pytest.mark.parametrize("jit", [jax.jit, jax.checkpoint, nnx.jit, nnx.remat, lambda f: f])
@pytest.mark.parametrize("reducer", REDUCERS.values(), ids=REDUCERS)
def test_reducers_in_transformed_modules_of_nnx(jit, reducer):
    model = nnx_module(lambda x: [x, jnp.sin(x)], reducer)
    twice = lambda model, x: jit(lambda x: model(x)[0])(2 * jit(lambda x: model(x)[0])(x))
    if jit in (nnx.jit, nnx.remat):
        twice = lambda model, x: jit(lambda m, x: m(x)[0])(
            model, 2 * jit(lambda m, x: m(x)[0])(model, x)
        )
    expected = functools.reduce(reducer[0], [X, jnp.sin(X), 2 * X, jnp.sin(2 * X)], reducer[1]())
    _, state = capture(twice, nnx.Intermediate)(model, X)
    same(state["r"].get_value(), expected)


@pytest.mark.parametrize("values", ["**", None], ids=["all", "none"])
@pytest.mark.parametrize("kind", ["linen", "remat", "nnx"])
def test_reducers_with_cells_and_defaults_are_captured(kind, values):
    def options(self, i):
        return [
            ("cell", lambda a, v: self.decay * a + v),
            ("partial", functools.partial(weighted, self.decay)),
            ("default", lambda a, v, i=i: a + i * v),
        ]

    class Linen(nn.Module):
        decay: float = 0.5

        @nn.compact
        def __call__(self, x):
            for i in range(3):
                for name, reduce in options(self, i):
                    self.sow(
                        "intermediates", name, (i + 1) * x, reduce_fn=reduce, init_fn=lambda: 0
                    )
            return x.sum()

    class NNX(nnx.Module):
        decay = 0.5

        def __call__(self, x):
            for i in range(3):
                for name, reduce in options(self, i):
                    self.sow(
                        nnx.Intermediate, name, (i + 1) * x, reduce_fn=reduce, init_fn=lambda: 0
                    )
            return x.sum()

    model = {"linen": Linen, "remat": lambda: nn.remat(Linen)(), "nnx": NNX}[kind]()
    run = model if kind == "nnx" else lambda x: model.apply({}, x, mutable="intermediates")[0]
    out, taps = tapax.capture(run, values)(X)
    assert_close(out, X.sum())
    if values is None:
        assert not taps.values
        return
    found = {name.rpartition("/")[2]: x for name, x in taps.values.items() if "/" in name}
    assert_close(found["cell"], (0.25 + 1 + 3) * X)
    assert_close(found["partial"], 0.5 * 6 * X)
    assert_close(found["default"], (0 + 2 + 6) * X)
    names = [name.rpartition("/")[2] for name in tapax.sites(run)(X).names]
    assert {"cell", "partial", "default"} <= set(names)
    tapax.grad(run)(X)


def test_reducers_that_close_over_parameters():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            decay = self.param("decay", lambda key: jnp.array(0.5))
            options = {"reduce_fn": lambda a, v: decay * a + v, "init_fn": lambda: decay}
            for i in range(3):
                self.sow("intermediates", "r", (i + 1) * x, **options)
            return x

    class NNX(nnx.Module):
        def __init__(self):
            self.decay = nnx.Param(jnp.array(0.5))

        def __call__(self, x):
            for i in range(3):
                reduce = lambda a, v: {"x": self.decay[...] * a["x"] + v}
                options = {"reduce_fn": reduce, "init_fn": lambda: {"x": 0.0}}
                self.sow(nnx.Intermediate, "r", (i + 1) * x, **options)
            return x

    variables = {"params": Linen().init(jax.random.key(0), X)["params"]}
    run = lambda apply: lambda v: apply(Linen(), v, X, mutable=["intermediates"])[1]
    same(run(apply)(variables), run(nn.Module.apply)(variables))
    total = lambda run: lambda v: jnp.sum(run(v)["intermediates"]["r"])
    of = [jax.grad(total(run(f)))(variables) for f in (apply, nn.Module.apply)]
    same(*of)
    model = NNX()
    found, expected = (c(model, nnx.Intermediate)(X)[1]["r"] for c in (capture, nnx.capture))
    same(found.get_value(), expected.get_value())


def test_a_loop_refuses_only_reducers_that_it_cannot_carry():
    window = (lambda a, v: (*a, v)[-2:], tuple)
    model = nnx_module(lambda x: [x], window)
    loop = lambda model, x: lax.scan(lambda x, _: (model(x + 1)[0], None), x, length=3)[0]
    with pytest.raises(tapax.SiteError, match="its result must keep its type"):
        capture(loop, nnx.Intermediate)(model, X)
    total = nnx_module(
        lambda x: [{"a": x, "b": 2 * x}],
        (lambda a, v: {k: a[k] + v[k] for k in v}, lambda: {"a": 0, "b": 0}),
    )
    _, state = capture(loop, nnx.Intermediate)(total, X)
    same(state["r"].get_value(), {"a": 3 * X + 6, "b": 6 * X + 12})
    counted = nnx_module(
        lambda x: [x], (lambda a, v: {"n": a["n"] + 1, "of": "x", "k": 7, "x": v}, lambda: {"n": 0})
    )
    _, state = capture(loop, nnx.Intermediate)(counted, X)
    same(state["r"].get_value(), {"n": 3, "of": "x", "k": 7, "x": X + 3})
    _, state = capture(nnx_module(lambda x: [x], (lambda a, v: (*a, v), tuple)), nnx.Intermediate)(
        X
    )
    same(state["r"].get_value(), (X,))


def test_a_fold_goes_on_from_straight_code_into_a_loop():
    model = nnx_module(lambda x: [x], (lambda a, v: (a[0] + 1, a[1] + v), lambda: (0, 0)))

    def run(model, x):
        model(x)
        x = lax.scan(lambda x, _: (model(x + 1)[0], None), x, length=2)[0]
        return model(x)[0]

    _, state = capture(run, nnx.Intermediate)(model, X)
    same(state["r"].get_value(), (4, 4 * X + 1 + 2 + 2))
    _, state = capture(jax.vmap(run, (None, 0)), nnx.Intermediate)(model, X)
    same(state["r"].get_value(), (jnp.full(2, 4), 4 * X + 5))


def test_parts_of_a_value_under_different_vmaps():
    add = (lambda a, v: {"x": a["x"] + v["x"], "n": a["n"] + v["n"]}, lambda: {"x": 0, "n": 0})
    values = lambda x: [{"x": x, "n": jnp.ones(())}, {"x": 2 * x, "n": jnp.ones(())}]
    model = nnx_module(values, add)
    _, state = capture(jax.vmap(lambda m, x: m(x)[0], (None, 0)), nnx.Intermediate)(model, X)
    same(state["r"].get_value(), {"x": 3 * X, "n": jnp.full(2, 2.0)})


def test_a_fold_of_nnx_continues_from_init():
    for reducer in (REDUCERS["a sum"], REDUCERS["a window"], REDUCERS["a dict that grows"]):
        model = nnx_module(VALUES["arrays"], reducer)
        _, given = nnx.capture(model, nnx.Intermediate)(X)
        found = capture(model, nnx.Intermediate, init=given)(X)[1]["r"].get_value()
        expected = nnx.capture(model, nnx.Intermediate, init=given)(X)[1]["r"].get_value()
        same(found, expected)


def test_sow_of_a_type_that_is_not_captured_returns_false():
    class Other(nnx.Variable):
        pass

    class Net(nnx.Module):
        def __call__(self, x):
            return [self.sow(kind, "h", x) for kind in (nnx.Intermediate, Other)]

    for kinds in ((), (nnx.Intermediate,), (Other,), (nnx.Intermediate, Other)):
        found, expected = (c(Net(), *kinds)(X) for c in (capture, nnx.capture))
        found, expected = (x[0] if kinds else x for x in (found, expected))
        assert found == expected == [nnx.Intermediate in kinds, Other in kinds]


def test_a_reducer_of_one_name_may_change_from_call_to_call():
    class Net(nnx.Module):
        def __call__(self, x):
            for reduce in (jnp.add, jnp.multiply):
                self.sow(nnx.Intermediate, "r", x + 1, reduce_fn=reduce, init_fn=lambda: 0.0)
            return x

    _, state = capture(Net(), nnx.Intermediate)(X)
    same(state["r"].get_value(), (X + 1) ** 2)


@LIBRARIES
def test_gradients_go_through_a_fold(compare):
    reducer = (lambda a, v: (*a, v**2)[-2:], tuple)
    if compare is compare_linen:
        model = linen_module(VALUES["arrays"], reducer)
        folded = lambda x: apply(model, {}, x, mutable=True)[1]["intermediates"]["r"]
    else:
        run = capture(nnx_module(VALUES["arrays"], reducer), nnx.Intermediate)
        folded = lambda x: run(x)[1]["r"].get_value()
    assert_close(jax.grad(lambda x: sum(map(jnp.sum, folded(x))))(X), 2 * (X + 1) + 2 * X)


def test_folds_are_in_the_order_of_the_program():
    class Net(nnx.Module):
        def __call__(self, x):
            for name in ("b", "a", "c"):
                options = {} if name == "a" else {"reduce_fn": jnp.add, "init_fn": lambda: 0.0}
                self.sow(nnx.Intermediate, name, x, **options)
            return x

    _, state = capture(Net(), nnx.Intermediate)(X)
    assert list(state) == ["b", "a", "c"]
