"""`tapax.compat.nnx.capture` matches `nnx.capture` where that is right, and is always right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import tapax
from tapax.compat.nnx import capture
from tests.oracles.closeness import assert_close

X = jnp.arange(12, dtype=jnp.float32).reshape(4, 3) / 10
CAPTURES = {"flax": nnx.capture, "tapax": capture}
both = pytest.mark.parametrize("capture", CAPTURES.values(), ids=CAPTURES)


def same(a, b, tol=1e-6):
    a, b = (nnx.to_pure_dict(s) if isinstance(s, nnx.State) else s for s in (a, b))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: assert_close(x, y, tol), a, b)


class Other(nnx.Variable):
    pass


class Finer(nnx.Intermediate):
    pass


class Foo(nnx.Module):
    """A layer that sows and perturbs its result."""

    def __init__(self, rngs=None):
        self.lin = nnx.Linear(3, 3, rngs=rngs or nnx.Rngs(0))

    def hidden(self, x):
        return self.lin(x)

    def __call__(self, x):
        h = self.perturb("p", self.hidden(x))
        self.sow(nnx.Intermediate, "h", h)
        return jnp.tanh(h)


class Stack(nnx.Module):
    def __init__(self, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.layers = nnx.List([Foo(rngs), Foo(rngs)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        self.sow(Other, "out", x)
        return x


class Total(nnx.Module):
    """A running sum, with its reducer."""

    def __init__(self):
        self.w = nnx.Param(jnp.array(2.0))

    def __call__(self, x):
        self.sow(
            nnx.Intermediate,
            "sum",
            x,
            init_fn=lambda: jnp.zeros(()),
            reduce_fn=lambda a, b: a + jnp.sum(b),
        )
        return x * self.w


def hand(model, x):
    """Compute by hand the values that a `Foo` or a `Stack` sows."""
    layers = model.layers if isinstance(model, Stack) else [model]
    values = []
    for layer in layers:
        values.append(x @ layer.lin.kernel[...] + layer.lin.bias[...])
        x = jnp.tanh(values[-1])
    return values


@both
@pytest.mark.parametrize("form", ["module", "method", "function", "decorator"])
def test_capture_of_a_module_a_method_or_a_function(capture, form):
    model = Foo()
    if form == "module":
        run = capture(model, nnx.Intermediate)
    elif form == "method":
        run = capture(model.__call__, nnx.Intermediate)
    elif form == "function":
        f = capture(lambda m, x: m(x), nnx.Intermediate)
        run = lambda x: f(model, x)
    else:

        @capture(nnx.Intermediate)
        def forward(m, x):
            return m(x)

        run = lambda x: forward(model, x)
    out, state = run(X)
    assert isinstance(state, nnx.State) and isinstance(state["h"], nnx.Intermediate)
    same(state, {"h": tuple(hand(model, X))})
    same(out, jnp.tanh(hand(model, X)[0]))
    assert not hasattr(model, "h") and not hasattr(model, "__captures__")


@both
def test_no_types_give_the_result_alone(capture):
    same(capture(Foo())(X), jnp.tanh(hand(Foo(), X)[0]))


@both
def test_paths_are_those_of_the_modules(capture):
    model = Stack()
    _, state = capture(model, nnx.Intermediate)(X)
    first, second = hand(model, X)
    same(state, {"layers": {0: {"h": (first,)}, 1: {"h": (second,)}}})
    assert nnx.to_flat_state(state)[0][0] == ("layers", 0, "h")


@both
def test_nothing_sown_is_an_empty_state(capture):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    _, state = capture(model, nnx.Intermediate)(X)
    assert len(state) == 0 and isinstance(state, nnx.State)


@both
def test_each_type_has_a_separate_state(capture):
    model = Stack()
    out, hidden, other = capture(model, nnx.Intermediate, Other)(X)
    assert set(hidden) == {"layers"}
    same(other, {"out": (out,)})


@both
def test_values_of_all_calls_are_in_one_tuple(capture):
    model = Foo()
    _, state = capture(lambda m, x: m(m(x)), nnx.Intermediate)(model, X)
    first = hand(model, X)[0]
    same(state, {"h": (first, hand(model, jnp.tanh(first))[0])})


@both
@pytest.mark.parametrize(
    ("reduce", "init", "expected"),
    [
        (lambda a, b: a + b, lambda: 0, lambda xs: sum(xs)),
        (lambda a, b: a * b, lambda: 1, lambda xs: xs[0] * xs[1]),
        (lambda a, b: b, lambda: None, lambda xs: xs[1]),
        (lambda a, b: [*a, b], list, lambda xs: xs),
        (lambda a, b: (*a, b), tuple, tuple),
        (
            lambda a, b: {"n": a["n"] + 1, "s": a["s"] + b},
            lambda: {"n": 0, "s": 0.0},
            lambda xs: {"n": 2, "s": sum(xs)},
        ),
    ],
    ids=["sum", "product", "last", "list", "tuple", "dict"],
)
def test_sow_with_any_reducer(capture, reduce, init, expected):
    class Net(nnx.Module):
        def __call__(self, x):
            for y in (x, 2 * x + 1):
                self.sow(nnx.Intermediate, "r", y, reduce_fn=reduce, init_fn=init)
            return x

    _, state = capture(Net(), nnx.Intermediate)(X)
    same(state, {"r": expected([X, 2 * X + 1])})


@both
def test_a_reducer_of_structures(capture):
    class Net(nnx.Module):
        def __call__(self, x):
            for y in (x, x + 1):
                self.sow(
                    nnx.Intermediate,
                    "d",
                    {"a": y, "b": 2 * y},
                    init_fn=lambda: {"a": 0.0, "b": 0.0},
                    reduce_fn=lambda p, c: {k: p[k] + c[k] for k in c},
                )
            return x

    _, state = capture(Net(), nnx.Intermediate)(X)
    same(state, {"d": {"a": 2 * X + 1, "b": 4 * X + 2}})
    if capture is not nnx.capture:
        loop = lambda m, x: lax.scan(lambda c, _: (m(c), None), x, length=2)[0]
        _, state = capture(loop, nnx.Intermediate)(Net(), X)
        same(state, {"d": {"a": 4 * X + 2, "b": 8 * X + 4}})
        _, taps = tapax.capture(loop)(Net(), X)
        same(taps.values["Net/d:b"], 8 * X + 4)


@both
@pytest.mark.parametrize("value", [(X, {"a": 2 * X}), {"a": X, "b": [X + 1]}])
def test_structures_are_sown_whole(capture, value):
    class Net(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "t", value)
            return x

    _, state = capture(Net(), nnx.Intermediate)(X)
    same(state, {"t": (value,)})


@both
def test_a_string_is_a_variable_type(capture):
    class Net(nnx.Module):
        def __call__(self, x):
            self.sow("probe", "t", x)
            return x

    _, state = capture(Net(), nnx.variable_type_from_name("probe", allow_register=True))(X)
    same(state, {"t": (X,)})


@both
def test_method_outputs_are_kept_by_path(capture):
    model = Stack()
    out, state = capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(X)
    first, second = hand(model, X)

    def layer(h):
        lin = {"__call__": (h,)}
        return {"__call__": (jnp.tanh(h),), "h": (h,), "hidden": (h,), "lin": lin}

    same(state, {"__call__": (out,), "layers": {0: layer(first), 1: layer(second)}})


@both
def test_methods_of_a_structure(capture):
    cell = nnx.LSTMCell(3, 2, rngs=nnx.Rngs(0))
    carry = (jnp.ones((4, 2)), jnp.zeros((4, 2)))
    out, state = capture(cell, nnx.Intermediate, method_outputs=nnx.Intermediate)(carry, X)
    same(state["__call__"].get_value(), (out,))


@both
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_the_four_documented_steps_give_gradients(capture, wrap):
    model = Stack()
    _, zeros = capture(model, nnx.Perturbation)(X)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(zeros))

    @wrap
    def train_step(model, zeros, x):
        def loss(model, zeros, x):
            out, sown = capture(model, nnx.Intermediate, init=zeros)(x)
            return jnp.sum(out**2), sown

        (grads, at_marks), sown = nnx.grad(loss, argnums=(0, 1), has_aux=True)(model, zeros, x)
        return grads, nnx.merge_state(at_marks, sown)

    grads, metrics = train_step(model, zeros, X)
    first, second = hand(model, X)

    def by_hand(p, q):
        h = X @ model.layers[0].lin.kernel[...] + model.layers[0].lin.bias[...] + p
        h = jnp.tanh(h) @ model.layers[1].lin.kernel[...] + model.layers[1].lin.bias[...] + q
        return jnp.sum(jnp.tanh(h) ** 2)

    p, q = jax.grad(by_hand, argnums=(0, 1))(jnp.zeros((4, 3)), jnp.zeros((4, 3)))
    same(metrics, {"layers": {0: {"h": (first,), "p": p}, 1: {"h": (second,), "p": q}}}, 1e-5)
    plain = nnx.grad(lambda m: jnp.sum(capture(m)(X) ** 2))(model)
    same(grads, plain, 1e-5)


@both
def test_perturbations_are_added(capture):
    model = Foo()
    init = nnx.State({"p": nnx.Perturbation(jnp.full((4, 3), 0.5))})
    out, state = capture(model, nnx.Perturbation, init=init)(X)
    same(out, jnp.tanh(hand(model, X)[0] + 0.5))
    same(state, {"p": jnp.full((4, 3), 0.5)})


@both
def test_a_state_that_is_changed_stays_changed(capture):
    class Net(nnx.Module):
        def __init__(self):
            self.n = nnx.Variable(jnp.array(0))
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            self.n[...] += 1
            self.sow(nnx.Intermediate, "n", self.n[...])
            return self.drop(x)

    model, plain = Net(), Net()
    run = capture(model, nnx.Intermediate)
    for i in range(3):
        out, state = run(X)
        same(state, {"n": (i + 1,)})
        same(out, nnx.capture(plain, nnx.Intermediate)(X)[0])
    assert int(model.n[...]) == 3 == int(model.drop.rngs.count[...])
