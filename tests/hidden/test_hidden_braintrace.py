"""Modules of braintrace, against the results of braintrace itself."""

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import pytest
from brainstate import HiddenState, nn

from tapax import compat
from tapax.hidden import HiddenPerturbation, functional, hidden_groups, online
from tests.oracles.closeness import assert_close

braintrace = pytest.importorskip("braintrace")
pytestmark = pytest.mark.filterwarnings("ignore:core.Jaxpr is missing a DebugInfo object")

X = jnp.array([0.3, -0.5, 0.8], jnp.float32)
CELLS = ["GRUCell", "LSTMCell", "MGUCell", "URLSTMCell", "ValinaRNNCell"]


class Stack(nn.Module):
    """Two cells of equal width, one of which drives the other."""

    def __init__(self, cell):
        super().__init__()
        self.layers = [cell(3, 3), cell(3, 3)]

    def update(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Driven(nn.Module):
    """A state that drives another, through a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.a, self.b = HiddenState(X), HiddenState(X)

    def update(self, x):
        self.a.value = 0.9 * self.a.value + x
        self.b.value = 0.9 * self.b.value + self.layer(self.a.value)
        return self.b.value


def init_states(model):
    """Make the hidden states, and convert all states to one type.

    With 64 bits, braintrace mixes float64 biases and hidden states with float32 weights.
    """
    nn.init_all_states(model)
    cast = lambda x: x if x.dtype == X.dtype else x.astype(X.dtype)
    for state in model.states().values():
        state.value = jax.tree.map(cast, state.value)


def their_groups(model, *inputs, **keywords):
    found, _ = braintrace.find_hidden_groups_from_module(model, *inputs, **keywords)
    return [list(map(tuple, group.hidden_paths)) for group in found]


def our_groups(model, *inputs):
    return [list(group.hidden_paths) for group in hidden_groups(model, *inputs)]


@pytest.mark.parametrize("name", CELLS)
def test_stacked_cells_have_a_group_for_each_layer(name):
    model = Stack(getattr(braintrace.nn, name))
    init_states(model)
    assert our_groups(model, X) == their_groups(model, X)
    assert len(our_groups(model, X)) == 2


class Scaled(nn.Module):
    """A cell whose input is scaled by a keyword."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell(3, 4)

    def update(self, x, scale=1.0, *, shift=0.0):
        return self.cell(x * scale + shift)


class Neurons(nn.Module):
    """Neurons with potentials and currents that have units."""

    def __init__(self, cell):
        super().__init__()
        self.v, self.i = HiddenState(X * u.mV), HiddenState(2 * X * u.mA)

    def update(self, x):
        i, v = self.i.value, self.v.value
        self.v.value = 0.9 * v + x * u.mV - 0.3 * i * u.ohm
        self.i.value = 0.5 * i + 0.1 * v / u.ohm
        return self.v.value


MODELS = {
    **{name: (lambda cell: cell(3, 4), name, {}) for name in CELLS},
    "stacked": (Stack, "LSTMCell", {}),
    "keywords": (Scaled, "LSTMCell", {"scale": 2.0, "shift": -0.5}),
    "units": (Neurons, "LSTMCell", {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_perturbations_groups_and_gradients_are_those_of_braintrace(name):
    make, cell, keywords = MODELS[name]
    model = make(getattr(braintrace.nn, cell))
    init_states(model)
    theirs = braintrace.add_hidden_perturbation_in_module(model, X, **keywords)
    ours = compat.braintrace.add_hidden_perturbation_in_module(model, X, **keywords)
    assert ours.perturb_hidden_paths == list(theirs.perturb_hidden_paths)
    assert ours.perturb_hidden_states == list(theirs.perturb_hidden_states)
    their_groups, _ = braintrace.find_hidden_groups_from_module(model, X, **keywords)
    our_groups, of_path = compat.braintrace.find_hidden_groups_from_module(model, X, **keywords)
    assert [list(g.hidden_paths) for g in our_groups] == [g.hidden_paths for g in their_groups]
    assert all(path in group.hidden_paths for path, group in of_path.items())

    states = braintrace.extract_module_info(model, X, **keywords).compiled_model_states
    inputs = jax.tree.leaves(((X,), keywords, [s.value for s in states]))
    data = [jnp.cos(jnp.arange(x.size, dtype=x.dtype)) for x in ours.init_perturb_data()]
    fields = HiddenPerturbation(*theirs[:4])

    def total(p, data):
        results = p.eval_jaxpr(inputs, data)
        return sum(jnp.sum((i + 1) * x**2) for i, x in enumerate(results)), results

    (_, results), grads = jax.value_and_grad(lambda d: total(theirs, d), has_aux=True)(data)
    joined = theirs.perturb_data_to_hidden_group_data(grads, their_groups)
    for p in (ours, fields):
        (_, found), found_grads = jax.value_and_grad(lambda d: total(p, d), has_aux=True)(data)  # noqa: B023
        jax.tree.map(assert_close, found, list(results))
        jax.tree.map(assert_close, found_grads, grads)
        for groups in (their_groups, our_groups):
            regrouped = p.perturb_data_to_hidden_group_data(found_grads, groups)
            jax.tree.map(assert_close, regrouped, joined)


W = jnp.arange(9, dtype=X.dtype).reshape(3, 3)
LAYERS = {
    "linear": lambda: braintrace.nn.Linear(3, 3),
    "signed": lambda: braintrace.nn.SignedWLinear(3, 3),
    "low rank": lambda: braintrace.nn.LoRA(3, 2, 3),
    "jit": lambda: jax.jit(lambda x: braintrace.matmul(x, W)),
    "vmap": lambda: lambda x: jax.vmap(lambda x: braintrace.matmul(x, W))(x[None])[0],
    "scan": lambda: (
        lambda x: jax.lax.scan(lambda c, _: (braintrace.matmul(c, W), None), x, None, 3)[0]
    ),
    "unit by unit": lambda: lambda x: x * braintrace.element_wise(jnp.ones_like(X)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_between_states_separate_them_as_braintrace_does(layer):
    model = Driven(LAYERS[layer]())
    init_states(model)
    assert our_groups(model, X) == their_groups(model, X)


@pytest.mark.parametrize("rule", [online.d_rtrl, online.e_prop, online.rtrl])
def test_online_rules_learn_a_cell_of_braintrace_like_one_of_brainstate(rule):
    def learn(cell):
        init_states(cell)
        step, params, state = functional(cell, X)
        waves = lambda p: jnp.cos(jnp.arange(p.size, dtype=p.dtype)).reshape(p.shape) / 2
        params = jax.tree.map(waves, params)
        learner = rule(step, lambda out, target: jnp.sum((out - target) ** 2))
        memory = learner.init(params, state, X)
        for _ in range(3):
            learned, memory = learner.update(memory, params, X, target=1.0)
        return learned.grads

    theirs = learn(braintrace.nn.ValinaRNNCell(3, 4))
    jax.tree.map(assert_close, theirs, learn(brainstate.nn.ValinaRNNCell(3, 4)))


class Mixed(nn.Module):
    """A module with and without dynamics in its layers."""

    def __init__(self, cells):
        super().__init__()
        self.layers = [getattr(braintrace.nn, cell)(3, 3) for cell in cells]

    def update(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("mixing", [False, True])
@pytest.mark.parametrize(
    "cells", [("ValinaRNNCell", "LSTMCell"), ("GRUCell", "ValinaRNNCell", "MGUCell")]
)
def test_the_drop_in_has_the_groups_and_jacobians_of_braintrace(cells, mixing):
    model = Mixed(cells)
    nn.init_all_states(model)  # braintrace differentiates only by the default float type
    options = {"include_recurrent_mixing": mixing}
    theirs, _ = braintrace.find_hidden_groups_from_module(model, X, **options)
    ours, of_path = compat.braintrace.find_hidden_groups_from_module(model, X, **options)
    assert [g.hidden_paths for g in ours] == [g.hidden_paths for g in theirs]
    assert [g.index for g in ours] == [g.index for g in theirs]
    assert list(of_path) == [path for g in theirs for path in g.hidden_paths]
    for one, other in zip(ours, theirs, strict=True):
        assert one.hidden_states == other.hidden_states
        assert (one.varshape, one.num_state) == (other.varshape, other.num_state)
        assert one.is_diagonal_recurrence == other.is_diagonal_recurrence
        if not mixing and other.transition_jaxpr.eqns:
            # The arguments have one shape, and equal values would not reveal their order.
            hidden = [jnp.cos(X) for _ in other.hidden_invars]
            given = [jnp.full(v.aval.shape, 0.3) for v in other.transition_jaxpr_constvars]
            expected = other.diagonal_jacobian(hidden, given)
            given = [jnp.full(v.aval.shape, 0.3) for v in one.transition_jaxpr_constvars]
            assert_close(one.diagonal_jacobian(hidden, given), expected)


class Settling(nn.Module):
    """A layer that drives a state, which settles in a while loop."""

    def __init__(self):
        super().__init__()
        self.a, self.b = HiddenState(X), HiddenState(2 * X)

    def update(self, x):
        self.a.value = jnp.tanh(self.a.value + x)
        a = self.a.value
        body = lambda s: (s[0] + 1, s[1] + 0.5 * jnp.tanh(a - s[1]))
        _, self.b.value = jax.lax.while_loop(lambda s: s[0] < 3, body, (0, self.b.value))
        return a * self.b.value


def test_gradients_end_at_a_while_loop_as_in_braintrace():
    model = Settling()
    init_states(model)
    with pytest.warns(UserWarning, match="while loop"):
        theirs = braintrace.add_hidden_perturbation_in_module(model, X)
    with pytest.warns(UserWarning, match="A while loop reaches the hidden states 'b'"):
        ours = compat.braintrace.add_hidden_perturbation_in_module(model, X)
    assert ours.perturb_hidden_paths == list(theirs.perturb_hidden_paths)

    def run(p):
        def total(inputs, data):
            return sum(jnp.sum((i + 1) * x**2) for i, x in enumerate(p.eval_jaxpr(inputs, data)))

        data = [jnp.sin(v) for v in (X, 2 * X)]
        return jax.value_and_grad(total, argnums=(0, 1))([X, X, 2 * X], data)

    jax.tree.map(assert_close, run(ours), run(theirs))
