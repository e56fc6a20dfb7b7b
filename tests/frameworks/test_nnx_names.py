"""Module names and updates of Flax NNX models, wherever a program keeps them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tapax
from tests.models.nnx_models import (
    SITES,
    Block,
    Net,
    X,
    affine,
    arrays,
    by_hand,
    check,
    close,
    loss,
    values,
)

GLOBAL = Net()


def helper(x):
    return GLOBAL(x)


class Trainer:
    """A plain object that holds a module."""

    def __init__(self):
        self.model, self.count, self.calls = Net(), nnx.Variable(jnp.array(0)), 0

    def step(self, x):
        self.calls += 1
        self.count[...] += 1
        return self.model(x)

    def __call__(self, x):
        return self.step(x)


def _calls():
    model, trainer = Net(), Trainer()

    def local(x):
        return model(x)

    def default(x, m=model):
        return m(x)

    return {
        "argument": lambda: tapax.capture(lambda m, x: m(x))(model, X),
        "keyword": lambda: tapax.capture(lambda x, *, m: m(x))(X, m=model),
        "tuple": lambda: tapax.capture(lambda t: t[0](t[1]["x"]))((model, {"x": X})),
        "dict": lambda: tapax.capture(lambda d: d["m"](d["x"]))({"m": model, "x": X}),
        "closure": lambda: tapax.capture(lambda x: model(x))(X),
        "helper's closure": lambda: tapax.capture(lambda x: local(x))(X),
        "default": lambda: tapax.capture(default)(X),
        "global": lambda: tapax.capture(lambda x: GLOBAL(x))(X),
        "helper's global": lambda: tapax.capture(lambda x: helper(x))(X),
        "partial": lambda: tapax.capture(functools.partial(lambda m, x: m(x), model))(X),
        "partial by name": lambda: tapax.capture(functools.partial(lambda x, m: m(x), m=model))(X),
        "itself": lambda: tapax.capture(model)(X),
        "method": lambda: tapax.capture(model.__call__)(X),
        "method of an object": lambda: tapax.capture(trainer.step)(X),
        "object": lambda: tapax.capture(trainer)(X),
        "closed-over object": lambda: tapax.capture(lambda x: trainer.step(x))(X),
        "built inside": lambda: tapax.capture(lambda x: Net()(x))(X),
        "list in a closure": lambda nets=(model,): tapax.capture(lambda x: nets[0](x))(X),
        "cached_partial": lambda: tapax.capture(
            nnx.cached_partial(nnx.jit(lambda m, x: m(x)), Net())
        )(X),
        "deep copy": lambda: tapax.capture(lambda m, x: nnx.clone(m)(x))(model, X),
    }


@pytest.mark.parametrize("name", _calls())
def test_models_are_found_wherever_they_are(name):
    out, taps = _calls()[name]()
    check(taps.values, values(Net(), X))
    close(out, by_hand(Net(), X)[0])


@pytest.mark.parametrize("where", ["closure", "helper", "trainer", "global"])
def test_closed_over_parameters_are_current(where):
    """A call uses the current parameters of a closed-over model, and updates its state."""
    model, trainer = Net(), Trainer()
    inner = lambda x: model(x)
    fn = {
        "closure": lambda x: model(x),
        "helper": lambda x: inner(x),
        "trainer": trainer.step,
        "global": lambda x: helper(x),
    }[where]
    net = {"trainer": trainer.model, "global": GLOBAL}.get(where, model)
    captured = tapax.capture(fn)
    bias = net.head.bias[...]
    try:
        for i in range(3):
            net.head.bias[...] = bias + i
            out, taps = captured(X)
            close(out, by_hand(net, X)[0])
            check(taps.values, values(net, X))
    finally:
        net.head.bias[...] = bias
    if where == "trainer":
        assert int(trainer.count[...]) == 3
        assert type(trainer.calls) is int and trainer.calls == 3


def test_assignments_of_a_function_with_a_model():
    """tapax rebuilds a function around its model, and keeps the assignments of the function."""
    model, n = Net(), 0

    def run(x):
        nonlocal n
        global LAST
        n += 1
        LAST = "run"
        return model(x) + GLOBAL(x)

    tapax.capture(run)(X)
    assert n == 1 and LAST == "run"


def test_a_model_of_an_outer_transformation():
    model = Net()
    f = lambda x: jnp.sum(tapax.capture(model)(x)[0] ** 2)
    close(jax.grad(f)(X), jax.grad(lambda x: jnp.sum(by_hand(model, x)[0] ** 2))(X))
    close(jax.vmap(lambda x: tapax.capture(model)(x)[0])(X), by_hand(model, X)[0])


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_two_models_have_separate_names(wrap):
    class Teacher(Net):
        pass

    student, teacher, twin = Net(), Teacher(nnx.Rngs(1)), Net(nnx.Rngs(2))
    run = wrap(lambda a, b, x: a(x) + b(x))
    _, taps = tapax.capture(run)(student, teacher, X)
    for net, root in ((student, "Net"), (teacher, "Teacher")):
        part = {k: v for k, v in taps.values.items() if k.split("/")[0] == root}
        check(part, values(net, X), root)
    _, taps = tapax.capture(run)(student, twin, X)
    for net, root in ((student, "a"), (twin, "b")):
        part = {k: v for k, v in taps.values.items() if k.split("/")[0] == root}
        check(part, values(net, X), root)


def test_modules_in_containers_have_paths():
    class Holder(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            lin = lambda: nnx.Linear(3, 3, rngs=rngs)
            self.table = nnx.Dict(p=lin(), q=lin())
            self.pair = nnx.data((lin(), lin()))
            self.mixed = nnx.List([nnx.Dict(z=lin())])
            self.plain = nnx.data({"w/o": [lin()]})
            self.seq = nnx.Sequential(lin(), jnp.tanh, Block(rngs))

        def __call__(self, x):
            parts = [self.table.p, self.table["q"], *self.pair, self.mixed[0]["z"]]
            for part in [*parts, self.plain["w/o"][0], self.seq]:
                x = part(x)
            return x

    names = ["table/p", "table/q", "pair/0", "pair/1", "mixed/0/z", "plain/w%2Fo/0", "seq"]
    names += ["seq/layers/0", "seq/layers/2", "seq/layers/2/lin"]
    model = Holder()
    _, taps = tapax.capture(nnx.jit(nnx.grad(loss)))(model, X)
    assert set(taps.grads) == {"Holder", *(f"Holder/{name}" for name in names)}
    x = affine(X, model.table.p)
    close(taps.values["Holder/table/p"], x)
    for lin in (model.table.q, *model.pair, model.mixed[0].z, model.plain["w/o"][0]):
        x = affine(x, lin)
    close(taps.values["Holder/plain/w%2Fo/0"], x)


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_shared_modules_have_one_path(wrap):
    class Shared(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
            self.b = self.a

        def __call__(self, x):
            return self.b(self.a(x))

    model = Shared()
    _, taps = tapax.capture(wrap(nnx.grad(loss)))(model, X)
    first = affine(X, model.a)
    assert set(taps.values) == {"Shared", "Shared/a", "Shared/a@1"}
    close(taps.values["Shared/a"], first)
    close(taps.values["Shared/a@1"], affine(first, model.a))
    close(taps.grads["Shared/a"], 2 * affine(first, model.a) @ model.a.kernel[...].T)
    assert model.a is model.b


def test_methods_of_a_module_are_sites():
    out, taps = tapax.capture(Net().encode)(X)
    assert set(taps.values) == {f"Net/{s}" for s in SITES if "blocks" in s} | {"Net.encode"}
    close(out, values(Net(), X)["blocks/1"])
    site = taps.sites["Net.encode"]
    assert (site.module, site.method, site.kind) == (Net, "encode", "module")
    assert site.source.startswith(__file__)


def test_super_is_part_of_the_method():
    class Derived(Net):
        def __call__(self, x):
            return 2 * super().__call__(x)

    out, taps = tapax.capture(Derived())(X)
    assert "Derived@1" not in taps.values
    close(taps.values["Derived"], 2 * by_hand(Net(), X)[0])


@pytest.mark.many
def test_cells_of_recurrent_networks_have_paths():
    class Recurrent(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.rnn = nnx.RNN(nnx.GRUCell(3, 5, rngs=rngs))
            ways = (nnx.LSTMCell(5, 4, rngs=rngs), nnx.GRUCell(5, 4, rngs=rngs))
            self.both = nnx.Bidirectional(*map(nnx.RNN, ways))

        def __call__(self, x):
            return self.both(self.rnn(x))

    model, x = Recurrent(), jnp.stack([X, X + 1])
    plain = model(x)
    _, taps = tapax.capture(nnx.jit(nnx.grad(loss)))(model, x)
    close(taps.values["Recurrent"], plain)
    cell, carry, hidden = model.rnn.cell, jnp.zeros((2, 5), x.dtype), []
    for t in range(4):
        carry, _ = cell(carry, x[:, t])
        hidden.append(carry)
    close(taps.values["Recurrent/rnn/cell:0"], jnp.stack(hidden))
    close(taps.values["Recurrent/rnn"], jnp.stack(hidden, 1))
    below = nnx.grad(lambda h, m: jnp.sum(m(h) ** 2))
    close(taps.grads["Recurrent/rnn"], below(jnp.stack(hidden, 1), model.both), 1e-4)
    assert taps.values["Recurrent/both/forward_rnn/cell:0.0"].shape == (4, 2, 4)
    assert taps.grads["Recurrent/both/backward_rnn/cell/dense_h"].shape == (4, 2, 12)


def test_attention_with_a_cache():
    make = lambda: nnx.MultiHeadAttention(2, 4, 8, decode=True, rngs=nnx.Rngs(0))
    plain, ours = make(), make()
    for model in (plain, ours):
        model.init_cache((2, 5, 4))
    captured = tapax.capture(lambda m, x: m(x))
    for i in range(3):
        x = jnp.sin(jnp.arange(8, dtype=jnp.float32) + i).reshape(2, 1, 4)
        out, taps = captured(ours, x)
        close(out, plain(x))
        for a, b in zip(arrays(plain), arrays(ours), strict=True):
            close(a, b)
    assert int(ours.cache_index[...]) == 3
    names = {"query", "key", "value", "out"}
    assert set(taps.values) == {"MultiHeadAttention", *(f"MultiHeadAttention/{n}" for n in names)}


def test_a_captured_function_changes_its_objects_as_the_plain_one_does():
    def change(m, x):
        m.extra = nnx.Param(jnp.ones(3))
        m.alias = m.head
        m.blocks.append(Block(nnx.Rngs(5)))
        m.tag = "new"
        del m.blocks[0]
        return m, m.head, m(x)

    plain, ours = Net(), Net()
    change(plain, X)
    (same, head, _), taps = tapax.capture(change)(ours, X)
    assert same is ours and head is ours.head is ours.alias and ours.tag == "new"
    assert nnx.graphdef(plain) == nnx.graphdef(ours)
    assert {"Net/blocks/0", "Net/blocks/1"} <= set(taps.values)
    for a, b in zip(arrays(plain), arrays(ours), strict=True):
        close(a, b)


def test_a_module_made_inside_is_returned():
    net, taps = tapax.capture(lambda x: (lambda m: (m, m(x))[0])(Net()))(X)
    assert isinstance(net, Net)
    close(net(X), by_hand(Net(), X)[0])


def test_metrics_and_random_streams_are_updated():
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    rngs = nnx.Rngs(0, dropout=1)

    @nnx.jit
    def step(model, metrics, rngs, x):
        out = model(x) + rngs.dropout.normal((2,), jnp.float32)
        metrics.update(loss=jnp.sum(out))
        return out

    out, _ = tapax.capture(step)(Net(), metrics, rngs, X)
    close(metrics.compute()["loss"], jnp.sum(out))
    assert int(rngs.dropout.count[...]) == 1


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_equal_calls_are_traced_once(wrap):
    traces = []

    @wrap
    def step(m, i, x):
        traces.append(1)
        m.head.bias[...] += 1.0
        return m(x) * i

    model = Net()
    captured = tapax.capture(step)
    for i in range(4):
        captured(model, i, X)
    assert len(traces) == 1


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_listing_changes_nothing(wrap):
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    before = arrays((model, optimizer)), nnx.graphdef((model, optimizer))

    @wrap
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(loss)(model, x))
        model.new = nnx.Param(x)

    names = tapax.sites(step)(model, optimizer, X).names
    assert "Net/blocks/1/lin" in names
    assert nnx.graphdef((model, optimizer)) == before[1]
    for a, b in zip(arrays((model, optimizer)), before[0], strict=True):
        assert np.array_equal(a, b)
