"""Perturbations, groups and loops of `tapax.compat.braintrace`, against numbers by hand.

`tests/hidden/test_hidden_braintrace.py` compares with braintrace itself.
"""

import warnings

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brainstate import HiddenState, nn

import tapax
from tapax.compat import braintrace
from tapax.hidden import HiddenError
from tests.oracles.closeness import assert_close

X = jnp.array([0.3, -0.5, 0.8], jnp.float32)
ONES = np.ones(3, np.float32)


class Recurrent(nn.Module):
    """A module with hidden states `a` and `b`, which a function updates; returns their sum."""

    def __init__(self, step, b=True):
        super().__init__()
        self.step = step
        self.a = HiddenState(X)
        if b:
            self.b = HiddenState(2 * X)

    def update(self, x):
        return self.step(self, x)


def perturb(model, *args):
    nn.init_all_states(model)
    return braintrace.add_hidden_perturbation_in_module(model, *args)


def groups_of(model, *args, **options):
    nn.init_all_states(model)
    return braintrace.find_hidden_groups_from_module(model, *args, **options)[0]


def paths_of(groups):
    return [group.hidden_paths for group in groups]


def write_twice(m, x):
    m.a.value = 3 * x
    m.b.value = 2 * m.a.value
    m.a.value = m.a.value * m.b.value
    return m.a.value + m.b.value


def test_a_state_that_is_written_twice_has_one_perturbation_at_its_last_write():
    model = Recurrent(write_twice)
    p = perturb(model, X)
    assert p.perturb_hidden_paths == [("a",), ("b",)]
    assert len(p.init_perturb_data()) == len(brainstate.graph.states(model, HiddenState))
    grads = jax.grad(lambda d: p.eval_jaxpr([X, X, 2 * X], d)[0].sum())(p.init_perturb_data())
    # out = a + b, a = 3 x b + p_a, b = 6 x + p_b
    jax.tree.map(assert_close, grads, [ONES, 1 + 3 * np.asarray(X)])
    assert len(tapax.hidden.add_hidden_perturbation(model, X).perturb_vars) == 3


def test_states_are_perturbed_in_the_order_in_which_they_are_read():
    def step(m, x):
        b = 0.5 * m.b.value
        m.a.value = 0.5 * m.a.value + x
        m.b.value = b
        return m.a.value

    assert perturb(Recurrent(step), X).perturb_hidden_paths == [("b",), ("a",)]


def test_a_state_that_is_only_read_has_a_perturbation():
    def step(m, x):
        m.a.value = m.b.value * x
        return m.a.value

    p = perturb(Recurrent(step), X)
    index = p.perturb_hidden_paths.index(("b",))
    data = p.init_perturb_data()
    data[index] = data[index] + 1
    inputs = {("a",): X, ("b",): 2 * X}
    out, *states = p.eval_jaxpr([X, *(inputs[path] for path in p.perturb_hidden_paths)], data)
    assert_close(out, 2 * X * X)
    assert_close(states[index], 2 * X + 1)


def test_only_modules_of_brainstate_are_taken():
    equinox = pytest.importorskip("equinox")
    cell = equinox.nn.GRUCell(3, 3, key=jax.random.key(0))
    for function in (
        braintrace.add_hidden_perturbation_in_module,
        braintrace.find_hidden_groups_from_module,
    ):
        with pytest.raises(HiddenError, match=r"tapax\.hidden takes others"):
            function(cell, X)


def test_perturb_data_that_does_not_fit_is_refused_in_the_words_of_braintrace():
    model = braintrace.nn.GRUCell(3, 4)
    p = perturb(model, X)
    groups = groups_of(model, X)
    with pytest.raises(ValueError, match=r"length of the perturb data is not correct: .* has 2"):
        p.perturb_data_to_hidden_group_data([*p.init_perturb_data(), X], groups)
    other = p._replace(perturb_hidden_paths=[("k",)])
    with pytest.raises(
        ValueError, match=r"at the path \('h',\), which has no perturbation.* are 'k'"
    ):
        other.perturb_data_to_hidden_group_data(p.init_perturb_data(), groups)


def settle(h, x, steps=3):
    """Take three steps towards the input in a loop that JAX cannot differentiate in reverse."""
    body = lambda s: (s[0] + 1, s[1] + 0.5 * (x - s[1]))
    return jax.lax.while_loop(lambda s: s[0] < steps, body, (0, h))[1]


def settle_all(m, x):
    m.a.value = 2 * m.a.value + x
    m.b.value = settle(m.b.value, m.a.value) + x
    return m.a.value + 3 * m.b.value


def jitted(m, x):
    inner = jax.jit(lambda h, a: settle(h, a))
    m.a.value = 2 * m.a.value + x
    m.b.value = inner(m.b.value, m.a.value) + x
    return m.a.value + 3 * m.b.value


@pytest.mark.parametrize("step", [settle_all, jitted], ids=["loop", "jitted"])
def test_gradients_end_at_a_loop_that_a_hidden_state_comes_from_with_a_warning(step):
    model = Recurrent(step)
    with pytest.warns(UserWarning, match="A while loop reaches the hidden states 'b', and JAX can"):
        p = perturb(model, X)
    zeros = p.init_perturb_data()
    assert p.perturb_hidden_paths == [("a",), ("b",)]

    def out(inputs, data):
        return p.eval_jaxpr(inputs, data)[0].sum()

    inputs = [X, X, 2 * X]
    expected = 3 * np.asarray(X)
    b = expected + (2 * np.asarray(X) - expected) / 8 + np.asarray(X)
    assert_close(p.eval_jaxpr(inputs, zeros)[0], expected + 3 * b)
    (by_x, by_a, by_b), data = jax.jit(jax.grad(out, argnums=(0, 1)))(inputs, zeros)
    # out = a + 3 b, b = loop + x + p_b: b affects neither a nor its own previous value.
    assert_close(data[0], ONES)
    assert_close(data[1], 3 * ONES)
    assert_close(by_x, 1 * ONES + 3)
    assert_close(by_a, 2 * ONES)
    assert_close(by_b, 0 * ONES)


def test_without_a_gradient_in_reverse_the_hidden_package_goes_through_the_loop():
    model = Recurrent(settle_all)
    nn.init_all_states(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p = tapax.hidden.add_hidden_perturbation(model, X)

    def out(data):
        return p.eval_jaxpr([X, X, 2 * X], [data, 0 * X])[0].sum()

    # a enters the loop with the weight 1 - 1/8.
    assert_close(jax.jvp(out, (0 * X,), (X,))[1], np.sum(X) * (1 + 3 * 7 / 8))
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(out)(0 * X)


def test_a_loop_that_reaches_no_hidden_state_is_left_as_it_is():
    def step(m, x):
        m.a.value = jnp.tanh(m.a.value + x)
        return settle(m.a.value, 0 * x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p = perturb(Recurrent(step, b=False), X)
    assert "stop_gradient" not in str(p.perturb_jaxpr)
    _, tangent = jax.jvp(lambda d: p.eval_jaxpr([X, X], [d])[0], (0 * X,), (X,))
    assert_close(tangent, X / 8)


def test_integers_of_a_loop_are_not_stopped_and_its_values_are():
    with pytest.warns(UserWarning, match="stop_gradient"):
        p = perturb(Recurrent(settle_all), X)
    stopped = [e for e in p.perturb_jaxpr.eqns if e.primitive.name == "stop_gradient"]
    (loop,) = (e for e in p.perturb_jaxpr.eqns if e.primitive.name == "while")
    floats = [v for v in loop.invars if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    assert {e.outvars[0] for e in stopped} == set(floats)


class Chain(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = list(layers)

    def update(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Leak(nn.Module):
    """A leaky unit, driven unit by unit."""

    def __init__(self):
        super().__init__()
        self.v = HiddenState(X)

    def update(self, x):
        self.v.value = 0.9 * self.v.value + x
        return self.v.value


def test_groups_without_dynamics_come_last():
    model = Chain(nn.ValinaRNNCell(3, 4), nn.LSTMCell(4, 4), nn.ValinaRNNCell(4, 4))
    groups = groups_of(model, X)
    at = lambda number, *names: [("layers", number, name) for name in names]
    assert paths_of(groups) == [at(1, "h", "c"), at(0, "h"), at(2, "h")]
    assert [group.index for group in groups] == [0, 1, 2]
    _, of_path = braintrace.find_hidden_groups_from_module(model, X)
    assert list(of_path) == [*at(1, "h", "c"), *at(0, "h"), *at(2, "h")]
    plain = [list(group.hidden_paths) for group in tapax.hidden.hidden_groups(model, X)]
    assert plain == [at(0, "h"), at(1, "h", "c"), at(2, "h")]


def test_states_in_different_items_of_a_list_are_in_different_groups():
    model = Chain(Leak(), Leak())
    assert paths_of(groups_of(model, X)) == [[("layers", 0, "v")], [("layers", 1, "v")]]
    (one,) = tapax.hidden.hidden_groups(model, X)
    assert list(one.hidden_paths) == [("layers", 0, "v"), ("layers", 1, "v")]


def leak(m, x):
    a, b = m.a.value, m.b.value
    m.a.value = 0.9 * a - b + x
    m.b.value = 0.5 * b + 0.25 * m.a.value
    return m.a.value


def test_a_group_has_the_fields_and_methods_of_braintrace():
    model = Recurrent(leak)
    (group,) = groups_of(model, X)
    assert list(group.dict()) == list(group._fields)
    assert group.hidden_paths == [("a",), ("b",)]
    assert group.hidden_states == [model.a, model.b]
    assert group.varshape == (3,) and group.num_state == 2 and group.is_diagonal_recurrence
    (given,) = group.transition_jaxpr_constvars
    assert given.aval.shape == (3,)
    assert list(group.transition_jaxpr.invars) == [given, *group.hidden_invars]
    assert list(group.transition_jaxpr.outvars) == group.hidden_outvars
    a, b = np.asarray(X), 2 * np.asarray(X)
    new = 0.9 * a - b + 1
    jax.tree.map(assert_close, group.transition([X, 2 * X], [ONES]), [new, 0.5 * b + 0.25 * new])
    jacobian = group.diagonal_jacobian([X, 2 * X], [ONES])
    assert_close(jacobian, np.tile([[0.9, -1.0], [0.225, 0.25]], (3, 1, 1)))
    joined = group.concat_hidden([X, 2 * X])
    assert_close(joined, np.stack([a, b], -1))
    jax.tree.map(assert_close, group.split_hidden(joined), [a, b])
    group.check_consistent_varshape()
    assert repr(group) == "HiddenGroup(0: ('a',), ('b',), units of shape (3,))"


W = np.arange(9.0, dtype=np.float32).reshape(3, 3) / 9


def mixed(m, x):
    m.a.value = 0.5 * m.a.value + jnp.tanh(W @ m.a.value) + x
    return m.a.value


def test_a_product_with_a_matrix_is_in_the_transition_only_if_included():
    model = Recurrent(mixed, b=False)
    (apart,) = groups_of(model, X)
    assert "dot_general" not in str(apart.transition_jaxpr) and apart.is_diagonal_recurrence
    given = [0.0 * np.ones(v.aval.shape, v.aval.dtype) for v in apart.transition_jaxpr_constvars]
    assert_close(apart.diagonal_jacobian([X], given), np.full((3, 1, 1), 0.5))
    (whole,) = groups_of(model, X, include_recurrent_mixing=True)
    assert "dot_general" in str(whole.transition_jaxpr) and not whole.is_diagonal_recurrence
    shapes = {v.aval.shape: v for v in whole.transition_jaxpr_constvars}
    given = [W if shape == (3, 3) else np.zeros(3, np.float32) for shape in shapes]
    slope = 1 - np.tanh(W @ np.asarray(X)) ** 2
    expected = 0.5 + slope * np.diag(W)
    assert_close(whole.diagonal_jacobian([X], given)[:, 0, 0], expected)


def test_a_state_that_only_a_matrix_takes_on_has_an_empty_transition():
    (group,) = groups_of(nn.ValinaRNNCell(3, 4), X)
    assert not group.transition_jaxpr.eqns
    assert group.hidden_outvars == group.transition_jaxpr_constvars
    h = jnp.ones(4)
    assert_close(group.transition([h], [2 * h])[0], 2 * h)
    assert_close(group.diagonal_jacobian([h], [2 * h]), np.zeros((4, 1, 1)))


STEPS = {
    "shift register": (
        lambda m, x: _set(m, 0.5 * m.a.value + x, m.a.value),
        [[("a",), ("b",)]],
        [[0.5, 0.0], [1.0, 0.0]],
    ),
    "input only": (
        lambda m, x: _set(m, 0.5 * m.a.value + m.b.value, x),
        [[("a",), ("b",)]],
        [[0.5, 1.0], [0.0, 0.0]],
    ),
    "two states in one operation": (
        lambda m, x: _set(m, m.a.value * m.b.value, x),
        [[("a",), ("b",)]],
        None,
    ),
    "stopped": (
        lambda m, x: _set(m, 0.5 * m.a.value, jax.lax.stop_gradient(m.a.value) * 0.5 * m.b.value),
        [[("a",)], [("b",)]],
        None,
    ),
    "a loop": (
        lambda m, x: _set(m, settle(m.a.value, m.b.value), 0.5 * m.b.value),
        [[("a",), ("b",)]],
        [[0.125, 0.875], [0.0, 0.5]],
    ),
    "units that meet": (
        lambda m, x: _set(m, 0.5 * m.a.value + jnp.sum(m.a.value), 0.5 * m.b.value),
        [[("a",)], [("b",)]],
        [[1.5]],
    ),
}


def _set(m, a, b):
    m.a.value, m.b.value = a, b
    return a


@pytest.mark.parametrize("name", STEPS)
def test_groups_and_jacobians_of_connected_states(name):
    step, paths, jacobian = STEPS[name]
    groups = groups_of(Recurrent(step), X)
    assert paths_of(groups) == paths
    if jacobian is not None:
        group = groups[0]
        given = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in group.transition_jaxpr_constvars]
        hidden = [X for _ in group.hidden_invars]
        found = group.diagonal_jacobian(hidden, given)
        assert_close(found, np.tile(np.array(jacobian), (3, 1, 1)))


def test_states_with_units_and_stacked_states_are_joined():
    class Neurons(nn.Module):
        def __init__(self):
            super().__init__()
            self.v = HiddenState(X * u.mV)
            self.stack = brainstate.HiddenGroupState(jnp.zeros((3, 1)))

        def update(self, x):
            self.v.value = 0.5 * self.v.value + x * u.mV + self.stack.value[..., 0] * u.mV
            self.stack.value = 0.5 * self.stack.value
            return self.v.value

    (group,) = groups_of(Neurons(), X)
    assert group.num_state == 2
    assert group.concat_hidden([X, X[:, None]]).shape == (3, 2)
    p = braintrace.add_hidden_perturbation_in_module(Neurons(), X)
    (joined,) = p.perturb_data_to_hidden_group_data([X, X[:, None]], [group])
    assert_close(joined, np.stack([X, X], -1))


def test_values_that_do_not_fit_a_group_are_refused():
    (group,) = groups_of(Recurrent(leak), X)
    with pytest.raises(ValueError, match=r"has 2 hidden states, .* `concat_hidden` was given 1"):
        group.concat_hidden([X])
    with pytest.raises(ValueError, match=r"has 2 states, .* given an array of shape \(3, 3\)"):
        group.split_hidden(jnp.zeros((3, 3)))
    wrong = group._replace(hidden_states=[group.hidden_states[0], HiddenState(jnp.zeros(4))])
    with pytest.raises(ValueError, match=r"units of different shapes: \(3,\), \(4,\)"):
        wrong.check_consistent_varshape()
