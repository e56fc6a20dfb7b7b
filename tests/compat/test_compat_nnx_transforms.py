"""`tapax.compat.nnx.capture` where `nnx.capture` loses values: loops, maps, repeated calls."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import tapax
from tapax.compat.nnx import capture
from tests.compat.test_compat_nnx import Finer, Foo, Stack, Total, X, hand, same

MESH = lambda: jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
WRAPS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: jax.vmap(f, in_axes=(None, 0)),
    "cond": lambda f: lambda m, x: lax.cond(x[0, 0] < 1, f, f, m, x),
    "one branch": lambda f: lambda m, x: lax.cond(x[0, 0] < 1, f, lambda m, x: x, m, x),
    "nnx.cond": lambda f: lambda m, x: nnx.cond(x[0, 0] < 1, f, lambda m, x: x, m, x),
    "shard_map": lambda f: jax.shard_map(
        f, mesh=MESH(), in_specs=(jax.P(), jax.P("a")), out_specs=jax.P("a")
    ),
    "nnx.jit": nnx.jit,
    "nnx.remat": nnx.remat,
    "nnx.vmap": lambda f: nnx.vmap(f, in_axes=(None, 0)),
}


@pytest.mark.parametrize("closed", [False, True], ids=["argument", "closure"])
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_modules_inside_transformations_are_captured(wrap, closed):
    model = Foo()

    def run(m, x):
        if closed:
            return wrap(lambda _, x: m(x))(jnp.zeros(()), x)
        return wrap(lambda m, x: m(x))(m, x)

    for _ in range(2):  # the second call uses the caches
        out, state = capture(run, nnx.Intermediate)(model, X)
        same(out, jnp.tanh(hand(model, X)[0]))
        calls = state["h"].get_value()
        # Each of the two branches has a call, with zeros for the branch that did not run.
        assert len(calls) == (2 if wrap is WRAPS["cond"] else 1)
        value = sum(calls).reshape(4, 3)
        same(value, hand(model, X)[0])
    assert not hasattr(model, "h")


LOOPS = {
    "lax.scan": lambda f, x: lax.scan(lambda c, _: (f(c), None), x, length=3)[0],
    "fori_loop": lambda f, x: lax.fori_loop(0, 3, lambda i, c: f(c), x),
    "while_loop": lambda f, x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1])), (0, x)
    )[1],
}
NNX_LOOPS = {
    "nnx.scan": lambda m, x: nnx.scan(
        lambda m, c: (m(c), None), length=3, in_axes=(None, nnx.Carry), out_axes=(nnx.Carry, 0)
    )(m, x)[0],
    "nnx.fori_loop": lambda m, x: nnx.fori_loop(0, 3, lambda i, c: (c[0], c[0](c[1])), (m, x))[1],
    "nnx.while_loop": lambda m, x: nnx.while_loop(
        lambda c: c[2] < 3, lambda c: (c[0], c[0](c[1]), c[2] + 1), (m, x, 0)
    )[1],
}
RUNS = {k: (lambda m, x, loop=v: loop(lambda c: m(c), x)) for k, v in LOOPS.items()} | NNX_LOOPS


@pytest.mark.parametrize("name", RUNS)
def test_sow_in_loops_keeps_every_iteration(name):
    model, values, x = Foo(), [], X
    for _ in range(3):
        values += hand(model, x)
        x = jnp.tanh(values[-1])
    out, state = capture(RUNS[name], nnx.Intermediate)(model, X)
    same(out, x)
    same(state["h"].get_value(), (values[-1] if "while" in name else jnp.stack(values),))


@pytest.mark.parametrize("name", RUNS)
def test_a_sum_over_a_loop_is_the_total(name):
    _, state = capture(RUNS[name], nnx.Intermediate)(Total(), X)
    same(state, {"sum": jnp.sum(X) * 7})


def test_sow_in_a_recurrent_cell():
    class Cell(nnx.GRUCell):
        def __call__(self, carry, x):
            carry, out = super().__call__(carry, x)
            self.sow(nnx.Intermediate, "out", out)
            return carry, out

    rnn = nnx.RNN(Cell(3, 2, rngs=nnx.Rngs(0)))
    x = jnp.stack([X, X + 1])
    out, state = capture(rnn, nnx.Intermediate)(x)
    same(state, {"cell": {"out": (jnp.swapaxes(out, 0, 1),)}})


def test_called_twice_there_is_a_gradient_for_each_call():
    model = Foo()
    twice = lambda m, x: m(m(x))
    _, zeros = capture(twice, nnx.Perturbation)(model, X)
    loss = lambda zeros: jnp.sum(capture(twice, init=zeros)(model, X) ** 2)
    grads = nnx.grad(loss)(zeros)

    def by_hand(p, q):
        layer = lambda x: x @ model.lin.kernel[...] + model.lin.bias[...]
        return jnp.sum(jnp.tanh(layer(jnp.tanh(layer(X) + p)) + q) ** 2)

    expected = jax.grad(by_hand, argnums=(0, 1))(jnp.zeros((4, 3)), jnp.zeros((4, 3)))
    same(grads, {"p": expected}, 1e-5)


def test_broadcastable_calls_leave_the_value_alone():
    model = Foo()
    twice = lambda m, x: m(x) + m(x[:1])
    expected = jnp.tanh(hand(model, X)[0]) + jnp.tanh(hand(model, X[:1])[0])
    out, zeros = capture(twice, nnx.Perturbation)(model, X)
    same(out, expected)
    same(zeros, {"p": (jnp.zeros((4, 3)), jnp.zeros((1, 3)))})
    same(capture(twice, init=zeros)(model, X), expected)


def test_init_of_another_batch_size():
    model = Foo()
    _, zeros = capture(model, nnx.Perturbation)(X[:1])
    with pytest.raises(
        tapax.SiteError, match=r"shape \[1, 3\] .*perturb\('p'\) of a Foo.*\[4, 3\]"
    ):
        capture(model, init=zeros)(X)


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ({"nowhere": {"p": X}}, "no module at 'nowhere'"),
        ({"layers": {0: {"p": X}, 1: {"p": X, "q": X}}}, "'layers/1/q', but the program did not"),
        ({"layers": {0: {"p": X}}}, r"no perturbation for perturb\('p'\) of a Foo"),
        ({}, r"no perturbation for perturb\('p'\) of a Foo"),
    ],
)
def test_init_that_does_not_fit(init, message):
    wrap = lambda tree: {
        k: nnx.Perturbation(v) if isinstance(v, jax.Array) else wrap(v) for k, v in tree.items()
    }
    model = Stack()
    before = nnx.graphdef(model)
    with pytest.raises(tapax.SiteError, match=message):
        capture(model, init=nnx.State(wrap(init)))(X)
    assert nnx.graphdef(model) == before


def test_a_perturbation_shared_by_calls_is_refused():
    """A traced function called twice has one perturbation, so its gradient would be a sum."""
    layer = jax.jit(lambda m, x: m(x))
    twice = lambda m, x: layer(m, layer(m, x))
    model = Foo()
    _, zeros = capture(twice, nnx.Perturbation)(model, X)
    with pytest.raises(tapax.SiteError, match="The perturbation at 'p' was added to more than one"):
        capture(twice, init=zeros)(model, X)
    loop = lambda m, x: lax.scan(lambda c, _: (m(c), None), x, length=3)[0]
    whole = nnx.State({"p": nnx.Perturbation(jnp.zeros((4, 3)))})
    with pytest.raises(tapax.SiteError, match="The perturbation at 'p' was added to more than one"):
        capture(loop, init=whole)(model, X)


def test_perturbations_of_stacked_layers():
    """Perturbations pass through `nnx.scan` with the layers, so that each layer has one."""

    class Net(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda r: Foo(r), in_axes=0, out_axes=0)
            self.layers = nnx.split_rngs(splits=3)(make)(nnx.Rngs(0))

        def __call__(self, x):
            return nnx.scan(lambda x, b: b(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )

    model = Net()
    _, zeros = capture(model, nnx.Perturbation)(X)
    loss = lambda zeros: jnp.sum(capture(model, init=zeros)(X) ** 2)
    grads = nnx.grad(loss)(zeros)
    w, b = model.layers.lin.kernel[...], model.layers.lin.bias[...]

    def by_hand(ps):
        x = X
        for i in range(3):
            x = jnp.tanh(x @ w[i] + b[i] + ps[i])
        return jnp.sum(x**2)

    same(grads, {"layers": {"p": jax.grad(by_hand)(jnp.zeros((3, 4, 3)))}}, 1e-5)


def test_an_exception_leaves_the_model_alone():
    class Net(Foo):
        def __call__(self, x):
            super().__call__(x)
            raise KeyError("halfway")

    model = Net()
    before = nnx.graphdef(model), set(vars(model))
    zeros = nnx.State({"p": nnx.Perturbation(jnp.zeros((4, 3)))})
    for init in (None, zeros):
        with pytest.raises(KeyError, match="halfway"):
            capture(model, nnx.Intermediate, init=init)(X)
        assert (nnx.graphdef(model), set(vars(model))) == before


def test_nested_captures_have_both():
    model = Foo()

    def outer(m, x):
        return capture(lambda m, x: m(x), nnx.Intermediate)(m, x)

    (out, inner), state = capture(outer, nnx.Intermediate)(model, X)
    same(inner, {"h": tuple(hand(model, X))})
    same(state, inner)


def test_a_module_in_a_keyword_argument_is_captured():
    model = Foo()
    _, state = capture(lambda x, *, net: net(x), nnx.Intermediate)(X, net=model)
    same(state, {"h": tuple(hand(model, X))})


def test_module_that_is_closed_over():
    model = Stack()
    _, state = capture(lambda x: model(x), nnx.Intermediate)(X)
    first, second = hand(model, X)
    same(state, {"layers": {0: {"h": (first,)}, 1: {"h": (second,)}}})


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("cls", [Foo, Stack], ids=["one class", "two classes"])
def test_sow_in_a_second_module(wrap, cls):
    student, teacher = Foo(), cls(nnx.Rngs(1))

    def run(student, teacher, x):
        return wrap(lambda a, b, x: a(x) - b(x))(student, teacher, x)

    _, state = capture(run, nnx.Intermediate)(student, teacher, X)
    other = hand(teacher, X)
    nested = {"h": (other[0],)}
    if cls is Stack:
        nested = {"layers": {i: {"h": (h,)} for i, h in enumerate(other)}}
    same(state, {"h": tuple(hand(student, X)), "teacher": nested})
    assert not any("tapax" in name for name in vars(teacher))


def test_perturbations_and_derived_types_have_separate_states():
    class Net(Foo):
        def __call__(self, x):
            self.sow(Finer, "x", x)
            return super().__call__(x)

    _, values, zeros, finer = capture(Net(), nnx.Intermediate, nnx.Perturbation, Finer)(X)
    assert set(values) == {"h"} and set(zeros) == {"p"} and set(finer) == {"x"}


@pytest.mark.parametrize("kind", [tuple, dict])
def test_perturb_of_a_structure(kind):
    class Net(nnx.Module):
        def __call__(self, x):
            both = (x, 2 * x) if kind is tuple else {"a": x, "b": 2 * x}
            both = self.perturb("p", both)
            a, b = both if kind is tuple else both.values()
            return jnp.sum(a * b)

    model = Net()
    out, zeros = capture(model, nnx.Perturbation)(X)
    same(out, jnp.sum(2 * X**2))
    grads = nnx.grad(lambda zeros: capture(model, init=zeros)(X))(zeros)
    expected = (2 * X, X)
    same(
        grads["p"].get_value(),
        expected if kind is tuple else dict(zip("ab", expected, strict=True)),
    )


def test_captured_values_stay_in_bfloat16():
    model = Foo()
    x = X.astype(jnp.bfloat16)
    model.lin.kernel.set_value(model.lin.kernel[...].astype(jnp.bfloat16))
    model.lin.bias.set_value(model.lin.bias[...].astype(jnp.bfloat16))
    model.lin.dtype = jnp.bfloat16
    single = nnx.State({"p": nnx.Perturbation(jnp.zeros((4, 3)))})
    out, state = capture(model, nnx.Intermediate, init=single)(x)
    assert out.dtype == state["h"][0].dtype == jnp.bfloat16
    _, zeros = capture(model, nnx.Perturbation)(x)
    assert zeros["p"].dtype == jnp.bfloat16


def test_gradients_of_layers_nobody_edited():
    model = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), jnp.tanh)
    step = nnx.jit(nnx.grad(lambda m, x: jnp.sum(m(x) ** 2)))
    _, taps = tapax.capture(step)(model, X)
    h = model.layers[0](X)
    same(taps.grads["Sequential/layers/0"], jax.grad(lambda h: jnp.sum(jnp.tanh(h) ** 2))(h), 1e-5)


def test_inherited_methods_are_outputs_too():
    class Derived(Foo):
        pass

    _, state = capture(Derived(), nnx.Intermediate, method_outputs=nnx.Intermediate)(X)
    assert {"__call__", "hidden", "h", "lin"} == set(state)


def test_shared_modules_have_the_path_that_nnx_gives_them():
    class Net(nnx.Module):
        def __init__(self):
            self.second = Foo()
            self.first = self.second

        def __call__(self, x):
            return self.first(self.second(x))

    flax, ours = (c(Net(), nnx.Intermediate)(X)[1] for c in (nnx.capture, capture))
    same(ours, flax)


def test_it_is_compiled_once():
    traces = []

    def run(m, x):
        traces.append(1)
        return m(x)

    captured = capture(run, nnx.Intermediate)
    model = Foo()
    for i in range(3):
        out, state = captured(model, X + i)
        same(state, {"h": tuple(hand(model, X + i))}, 1e-5)
        model.lin.bias[...] += 1.0
    assert len(traces) == 1
