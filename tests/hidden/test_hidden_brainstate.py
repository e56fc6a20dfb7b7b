"""Modules of brainstate, which write their hidden states in place, against the modules run."""

import brainevent
import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brainstate import HiddenState, nn, transform

import tapax
from tapax.compat import braintrace
from tapax.hidden import HiddenError, add_hidden_perturbation, functional, hidden_groups
from tests.oracles.closeness import assert_close

X = jnp.array([0.3, -0.5, 0.8], jnp.float32)


def close(a, b):
    assert_close(a, b)


def test_the_documented_example():
    gru = braintrace.nn.GRUCell(3, 4)
    _ = brainstate.nn.init_all_states(gru)
    inputs = brainstate.random.randn(3)
    hidden_perturb = braintrace.add_hidden_perturbation_in_module(gru, inputs)
    assert isinstance(hidden_perturb, braintrace.HiddenPerturbation)
    assert hidden_perturb.perturb_hidden_paths == [("h",)]
    assert hidden_perturb.perturb_hidden_states == [gru.h]


def test_a_perturbation_made_of_its_documented_fields():
    lstm = braintrace.nn.LSTMCell(3, 4)
    _ = brainstate.nn.init_all_states(lstm)
    made = braintrace.add_hidden_perturbation_in_module(lstm, X)
    assert list(made.dict()) == list(made._fields) == list(braintrace.HiddenPerturbation._fields)
    built = braintrace.HiddenPerturbation(**made.dict())
    function = transform.StatefulFunction(lstm, return_only_write=False)
    function.make_jaxpr(X)
    inputs = jax.tree.leaves((X, [s.value for s in function.get_states(X)]))
    data = [value + 1 for value in built.init_perturb_data()]
    jax.tree.map(close, built.eval_jaxpr(inputs, data), made.eval_jaxpr(inputs, data))
    assert built.names == made.names
    with pytest.raises(HiddenError, match="was made of its four fields"):
        built({}, {}, X)


def test_perturbations_are_in_the_order_in_which_states_are_read():
    def run(m, x):
        b, a = m.b.value, m.a.value
        m.a.value = jnp.tanh(a + x)
        m.b.value = jnp.sin(b + x)
        return x

    assert add_hidden_perturbation(Model(run, a=X, b=X), X).names == ("b", "a")


CELLS = [nn.GRUCell, nn.LSTMCell, nn.MGUCell, nn.ValinaRNNCell, nn.URLSTMCell]


@pytest.mark.parametrize("cls", CELLS)
def test_hidden_states_of_brainstate_cells(cls):
    cell = cls(3, 4)
    nn.init_all_states(cell)
    p = add_hidden_perturbation(cell, X)
    paths = {("h",), ("c",)} if "LSTM" in cls.__name__ else {("h",)}
    assert set(p.perturb_hidden_paths) == paths
    new, out = p(p.zeros(), {}, X)
    grads = jax.grad(lambda q: jnp.sum(p(q, {}, X)[1] * jnp.arange(4.0)))(p.zeros())
    # The module puts out its state h.
    close(grads["h"], jnp.arange(4.0))
    before = {n: s.value for n, s in (("h", cell.h),)}
    close(before["h"], np.zeros(4))  # nothing was written by any of this
    close(out, cell(X))
    for name in new:
        close(new[name], getattr(cell, name).value)
    (group,) = hidden_groups(cell, X)
    assert set(group.hidden_paths) == paths
    (joined,) = p.perturb_data_to_hidden_group_data(p.init_perturb_data(), [group])
    assert joined.shape == (4, len(paths))


class Model(nn.Module):
    """States that a function of the module and the input writes."""

    def __init__(self, run, **values):
        super().__init__()
        self.run = run
        for name, value in values.items():
            setattr(self, name, HiddenState(value))

    def update(self, x):
        return self.run(self, x)


def gradients(model, total):
    p = add_hidden_perturbation(model, X)
    return p, jax.grad(lambda q: total(*p(q, {}, X)))(p.zeros())


def test_two_states_given_equal_values():
    def run(m, x):
        v = jnp.tanh(m.a.value + m.b.value + x)
        m.a.value = v
        m.b.value = v
        return v * 2

    model = Model(run, a=X, b=X)
    p, grads = gradients(
        model, lambda new, out: 2 * jnp.sum(new["a"]) + 3 * jnp.sum(new["b"]) + jnp.sum(out)
    )
    assert p.names == ("a", "b")
    assert p.perturb_hidden_states == [model.a, model.b]
    close(grads["a"], np.full(3, 2.0 + 2.0))
    close(grads["b"], np.full(3, 3.0))


def test_a_state_that_is_written_twice():
    def run(m, x):
        m.h.value = jnp.tanh(m.h.value + x)
        out = m.h.value * 2
        m.h.value = m.h.value * 0.5
        return out

    model = Model(run, h=X)
    p, grads = gradients(model, lambda new, out: jnp.sum(new["h"]) + jnp.sum(out))
    assert p.names == ("h", "h@1")
    assert p.perturb_hidden_paths == [("h",), ("h",)]
    close(grads["h"], np.full(3, 2.0 + 0.5))
    close(grads["h@1"], np.ones(3))
    (group,) = hidden_groups(model, X)
    # The last write is what the state is after the step.
    (joined,) = p.by_group({"h": 5 * X, "h@1": 7 * X}, [group])
    close(joined[:, 0], 7 * X)


def test_copied_from_another():
    def run(m, x):
        m.a.value = jnp.tanh(m.a.value + x)
        m.b.value = m.a.value
        return x

    p, grads = gradients(
        Model(run, a=X, b=X), lambda new, out: 2 * jnp.sum(new["a"]) + 3 * jnp.sum(new["b"])
    )
    assert p.names == ("a", "b")
    close(grads["a"], np.full(3, 5.0))
    close(grads["b"], np.full(3, 3.0))


def in_a_jit(m, x):
    @transform.jit
    def inner(x):
        m.h.value = jnp.tanh(m.h.value + x)
        return m.h.value * 2

    return inner(x)


def in_a_loop(m, x):
    """Of more steps than some unroll."""

    def body(i):
        m.h.value = jnp.tanh(m.h.value + x) * 0.9

    transform.for_loop(body, jnp.arange(20))
    return m.h.value * 2


def in_a_while(m, x):
    def body(i):
        m.h.value = jnp.tanh(m.h.value + x) * 0.9
        return i + 1

    transform.while_loop(lambda i: i < 5, body, 0)
    return m.h.value * 2


def in_a_branch(m, x):
    def write(x):
        m.h.value = jnp.tanh(m.h.value + x)
        return m.h.value * 2

    return transform.cond(jnp.sum(x) < 10, write, lambda x: x, x)


def in_a_remat(m, x):
    @transform.checkpoint
    def inner(x):
        m.h.value = jnp.tanh(m.h.value + x)
        return m.h.value * 2

    return inner(x)


@pytest.mark.parametrize(
    "run", [in_a_jit, in_a_loop, in_a_while, in_a_branch, in_a_remat], ids=lambda f: f.__name__
)
def test_states_written_inside_other_operations(run):
    model = Model(run, h=X)
    p, grads = gradients(model, lambda new, out: jnp.sum(new["h"]) + 3 * jnp.sum(out))
    assert p.names == ("h",)
    close(grads["h"], np.full(3, 1.0 + 6.0))
    new, out = p(p.zeros(), {}, X)
    close(out, model(X))
    close(new["h"], model.h.value)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.GRUCell(3, 4), nn.LSTMCell(4, 4)
        self.out = nn.Linear(4, 2)

    def update(self, x):
        return self.out(self.b(self.a(x)))


def test_states_of_several_cells():
    model = Stack()
    nn.init_all_states(model)
    p = add_hidden_perturbation(model, X)
    assert set(p.names) == {"a/h", "b/c", "b/h"}
    groups = hidden_groups(model, X)
    assert [set(g.names) for g in groups] == [{"a/h"}, {"b/c", "b/h"}]
    data = p.perturb_data_to_hidden_group_data(p.init_perturb_data(), groups)
    assert [d.shape for d in data] == [(4, 1), (4, 2)]
    grads = jax.grad(lambda q: jnp.sum(p(q, {}, X)[1]))(p.zeros())
    close(grads["b/h"], model.out.weight.value["weight"].sum(1))
    # As a pure step, in a scan, with a gradient of everything.
    step, params, state = functional(model, X)
    xs = jnp.stack([X, -X, 2 * X])

    def loss(params):
        marked = tapax.hidden.mark_states(lambda s, x: step(params, s, x))
        return jnp.sum(jax.lax.scan(marked, state, xs)[1] ** 2)

    _, taps = tapax.capture(jax.grad(loss), grads=("a/h", "b/h"))(params)
    assert taps.grads["a/h"].shape == (3, 4)
    outs = [model(x) for x in xs]
    close(loss(params), sum(jnp.sum(o**2) for o in outs))
    (group,) = [g for g in groups if g.names == ("a/h",)]
    assert group.diagonal_jacobian(state, X).shape == (4, 1, 1)


@pytest.mark.parametrize("events", [False, True])
def test_sparse_matrices_are_between_two_groups(events):
    matrix = brainevent.CSR.fromdense(jnp.ones((3, 3)))

    def run(m, x):
        m.a.value = 0.9 * m.a.value + x
        sent = brainevent.BinaryArray(m.a.value > 0) if events else m.a.value
        m.b.value = 0.9 * m.b.value + sent @ matrix
        return m.b.value

    found = hidden_groups(Model(run, a=X, b=X), X)
    assert [group.names for group in found] == [("a",), ("b",)]


def test_the_order_of_the_program():
    """Inputs, then the values of all states; what is put out, then these."""
    model = Stack()
    nn.init_all_states(model)
    p = add_hidden_perturbation(model, X)
    function = transform.StatefulFunction(model, return_only_write=False)
    function.make_jaxpr(X)
    values = [s.value for s in function.get_states(X)]
    results = p.eval_jaxpr(jax.tree.leaves(((X,), values)), p.init_perturb_data())
    out = model(X)
    close(results[0], out)
    after = jax.tree.leaves([s.value for s in function.get_states(X)])
    for got, wanted in zip(results[1:], after, strict=True):
        close(got, wanted)


def test_what_is_refused():
    with pytest.raises(HiddenError, match="has no hidden states: they come to be with"):
        add_hidden_perturbation(nn.GRUCell(3, 4), X)

    def run(m, x):
        m.n.value = m.n.value + 1
        return x

    with pytest.raises(HiddenError, match="The hidden state 'n' is of type int32, but a hidden"):
        add_hidden_perturbation(Model(run, n=jnp.arange(3, dtype=jnp.int32)), X)
    model = Stack()
    nn.init_all_states(model)
    p = add_hidden_perturbation(model, X)
    with pytest.raises(HiddenError, match="There is no hidden state 'a/c'"):
        p({}, {"a": {"c": X}}, X)
