"""Modules of brainstate, which write their hidden states in place, against plain runs."""

import copy

import brainevent
import brainstate
import brainunit as u
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


def test_the_example_of_braintraces_documentation_runs():
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
    jax.tree.map(close, built({}, {}, X), made({}, {}, X))
    program = jax.make_jaxpr(lambda x, *added: [x.sum() + y for y in added])(X, *data)
    other = braintrace.HiddenPerturbation(built[0], built[1], built[2], program)
    jax.tree.map(close, other.eval_jaxpr([X], data), [X.sum() + y for y in data])
    with pytest.raises(HiddenError, match=r"`perturb_jaxpr` .* does not come from add_hidden_pert"):
        other({}, {}, X)


COPIES = {
    "fields": lambda p: type(p)(*p),
    "_replace": lambda p: p._replace(perturb_hidden_paths=list(p.perturb_hidden_paths)),
    "_make": lambda p: p._make(p),
    "jax.tree.map": lambda p: jax.tree.map(lambda x: x, p),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_a_perturbation_run_like_it(how):
    lstm = nn.LSTMCell(3, 4)
    nn.init_all_states(lstm)
    made = add_hidden_perturbation(lstm, X)
    copied = COPIES[how](made)
    assert type(copied) is type(made) and copied is not made and copied == made
    p = {"h": jnp.arange(4, dtype=lstm.h.value.dtype)}
    jax.tree.map(close, copied(p, {}, X), made(p, {}, X))
    groups = hidden_groups(lstm, X)
    jax.tree.map(close, copied.by_group(p, copy.deepcopy(groups)), made.by_group(p, groups))


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
    # The output of the module is its state h.
    close(grads["h"], jnp.arange(4.0))
    before = {n: s.value for n, s in (("h", cell.h),)}
    close(before["h"], np.zeros(4))  # none of this wrote a state
    close(out, cell(X))
    for name in new:
        close(new[name], getattr(cell, name).value)
    (group,) = hidden_groups(cell, X)
    assert set(group.hidden_paths) == paths
    (joined,) = p.perturb_data_to_hidden_group_data(p.init_perturb_data(), [group])
    assert joined.shape == (4, len(paths))


class Model(nn.Module):
    """A module whose states a function of the module and the input writes."""

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
    # The last write determines the state after the step.
    (joined,) = p.by_group({"h": 5 * X, "h@1": 7 * X}, [group])
    close(joined[:, 0], 7 * X)


def test_a_state_that_copies_another_has_a_separate_gradient():
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
    """Run a loop that is too long to unroll."""

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
    # As a pure step in a scan, with the gradient of the whole sequence.
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
    matrix = brainevent.CSR.fromdense(jnp.ones((3, 3), X.dtype))

    def run(m, x):
        m.a.value = 0.9 * m.a.value + x
        sent = brainevent.BinaryArray(m.a.value > 0) if events else m.a.value
        m.b.value = 0.9 * m.b.value + sent @ matrix
        return m.b.value

    found = hidden_groups(Model(run, a=X, b=X), X)
    assert [group.names for group in found] == [("a",), ("b",)]


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.LSTMCell(3, 4), nn.LSTMCell(4, 4)]

    def update(self, x, scale=1.0, *, shift=0.0):
        x = x * scale + shift
        for layer in self.layers:
            x = layer(x)
        return x


def test_paths_and_order_are_those_of_the_module():
    """States have the names of brainstate, in the order in which a cell reads them."""
    model = Layers()
    nn.init_all_states(model)
    p = braintrace.add_hidden_perturbation_in_module(model, X)
    wanted = [("layers", i, name) for i in (0, 1) for name in ("h", "c")]
    assert p.perturb_hidden_paths == wanted
    assert p.names == ("layers/0/h", "layers/0/c", "layers/1/h", "layers/1/c")
    groups, of_path = braintrace.find_hidden_groups_from_module(model, X)
    assert [g.hidden_paths for g in groups] == [wanted[:2], wanted[2:]]
    assert [g.index for g in groups] == [0, 1]
    assert [of_path[path].index for path in wanted] == [0, 0, 1, 1]
    assert groups[1].hidden_states == [model.layers[1].h, model.layers[1].c]
    data = [float(i) * jnp.ones(4) for i in range(4)]
    for i, joined in enumerate(p.perturb_data_to_hidden_group_data(data, groups)):
        close(joined, np.tile([2.0 * i, 2.0 * i + 1], (4, 1)))
    state = {"layers": {"0": {"h": jnp.ones(4)}}}
    model.layers[0].h.value = jnp.ones(4)
    jax.tree.map(close, p({}, state, X)[1], model(X))
    new = hidden_groups(model, X)[0].transition(functional(model, X).state, X)
    model(X)
    jax.tree.map(close, new, [model.layers[0].h.value, model.layers[0].c.value])


def test_states_and_inputs_are_cast_to_the_types_of_the_module():
    model = Layers()
    nn.init_all_states(model)
    p = add_hidden_perturbation(model, X)
    state = {"layers": {"1": {"h": np.arange(4)}}}
    found = p({}, state, np.asarray(X, np.float64))
    dtype = model.layers[1].h.value.dtype
    model.layers[1].h.value = jnp.arange(4, dtype=dtype)
    close(found[1], model(X))
    assert {x.dtype for x in jax.tree.leaves(found)} == {dtype}
    message = r"Layers was traced for an argument of shape \[4\], but was given one of shape \[5\]"
    with pytest.raises(HiddenError, match=message):
        p({}, {"layers": {"1": {"h": np.arange(5)}}}, X)


def test_inputs_given_by_keyword():
    model = Layers()
    nn.init_all_states(model)
    p = braintrace.add_hidden_perturbation_in_module(model, X, shift=1.0, scale=2.0)
    (group, _) = hidden_groups(model, X, shift=1.0, scale=2.0)
    start = functional(model, X, scale=2.0).state
    after, out = p({}, start, X, scale=3.0, shift=0.5)
    moved = group.transition(start, X, scale=3.0, shift=0.5)
    step, params, state = functional(model, X, scale=2.0)
    close(step(params, state, X, scale=3.0)[1], p({}, start, X, scale=3.0, shift=0.0)[1])
    assert p.perturb_jaxpr.in_avals[:3] == jax.make_jaxpr(lambda *a: a)(X, 2.0, 1.0).in_avals
    close(out, model(X, 3.0, shift=0.5))
    close(after["layers"]["1"]["h"], model.layers[1].h.value)
    close(moved[0], model.layers[0].h.value)
    with pytest.raises(HiddenError, match="was traced for inputs of the structure"):
        p({}, start, X)


class Neurons(nn.Module):
    """Neurons with potentials and currents that have units."""

    def __init__(self):
        super().__init__()
        self.v, self.i = HiddenState(X * u.mV), HiddenState(2 * X * u.mA)

    def update(self, x):
        i, v = self.i.value, self.v.value
        self.v.value = 0.9 * v + x * u.mV - 0.3 * i * u.ohm
        self.i.value = 0.5 * i + 0.1 * v / u.ohm
        return self.v.value


def test_states_with_units_are_their_mantissas():
    model = Neurons()
    (group,) = hidden_groups(model, X)
    assert group.names == ("i", "v") and group.hidden_states == (model.i, model.v)
    state = functional(model, X).state
    jacobian = group.diagonal_jacobian(state, X)
    close(jacobian, np.tile([[0.5, 0.1], [-0.3, 0.9]], (3, 1, 1)))
    p = add_hidden_perturbation(model, X)
    grads = jax.grad(lambda q: jnp.sum(p(q, state, X)[1].mantissa ** 2))(p.zeros())
    close(grads["v"], 2 * (0.9 * X + X - 0.6 * X))
    close(grads["i"], np.zeros(3))
    joined = np.stack([2 * X, X], -1)
    values = [s.value for s in p.perturb_hidden_states]
    close(p.perturb_data_to_hidden_group_data(values, [group])[0], joined)
    with pytest.raises(TypeError, match="The perturbation of 'i' must be an array, but is"):
        p.eval_jaxpr([X, *jax.tree.leaves(values)], values)


@pytest.mark.parametrize("types", [("float16", "float16"), ("float16", "float32")])
def test_data_of_a_group_may_be_of_any_type(types):
    model = Neurons()
    p = add_hidden_perturbation(model, X)
    data = [jnp.full(3, i, dtype) for i, dtype in enumerate(types)]
    (joined,) = p.perturb_data_to_hidden_group_data(data, hidden_groups(model, X))
    assert joined.dtype == types[1]
    close(joined.astype(jnp.float32), np.tile([0.0, 1.0], (3, 1)))
    with pytest.raises(HiddenError, match="has shape"):
        p.perturb_data_to_hidden_group_data([jnp.ones(2), jnp.ones(3)], hidden_groups(model, X))


def test_the_order_of_the_program():
    """The program takes inputs, then all states, and returns the output, then all states."""
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


def test_bad_arguments_are_refused():
    with pytest.raises(HiddenError, match="has no hidden states yet: create them with"):
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
