"""Perturbations of hidden states, against eager steps perturbed by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapax
from tapax.hidden import HiddenError, HiddenPerturbation, add_hidden_perturbation

N = 3
W = np.random.default_rng(0).normal(size=(4, N, N)) * 0.6
X = np.linspace(-1.0, 1.0, N)
STATE = {"c": np.linspace(0.1, 0.5, N), "h": np.linspace(-0.4, 0.3, N)}


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


def cell(state, x, c_added=0.0, h_added=0.0):
    """Update two states, one from the other, and read an output from both."""
    c = 0.9 * state["c"] + jnp.tanh(W[0] @ state["h"] + x) + c_added
    h = jax.nn.sigmoid(W[1] @ x) * jnp.tanh(c) + h_added
    return {"c": c, "h": h}, {"y": W[2] @ h, "z": jnp.sum(c**2)}


def looped(state, x):
    """Run `cell`, with a matrix product in a loop that is too long to unroll."""
    h, _ = lax.scan(lambda a, w: (a + w @ state["h"], None), x, jnp.tile(W[0] / 40, (40, 1, 1)))
    c = 0.9 * state["c"] + jnp.tanh(h)
    h = jax.nn.sigmoid(W[1] @ x) * jnp.tanh(c)
    return {"c": c, "h": h}, {"y": W[2] @ h, "z": jnp.sum(c**2)}


def waiting(state, x):
    def body(carry):
        i, a = carry
        return i + 1, a + W[0] @ state["h"] / 8

    c = 0.9 * state["c"] + jnp.tanh(lax.while_loop(lambda c: c[0] < 8, body, (0, x))[1])
    h = jax.nn.sigmoid(W[1] @ x) * jnp.tanh(c)
    return {"c": c, "h": h}, {"y": W[2] @ h, "z": jnp.sum(c**2)}


def branching(state, x):
    return lax.cond(jnp.sum(x) < 10, cell, lambda s, x: cell(s, 2 * x), state, x)


@jax.custom_vjp
def squash(x):
    return jnp.tanh(x)


squash.defvjp(lambda x: (jnp.tanh(x), x), lambda x, ct: (ct * (1 - jnp.tanh(x) ** 2),))


def custom(state, x):
    c = 0.9 * state["c"] + squash(W[0] @ state["h"] + x)
    h = jax.nn.sigmoid(W[1] @ x) * squash(c)
    return {"c": c, "h": h}, {"y": W[2] @ h, "z": jnp.sum(c**2)}


def copied(state, x):
    new, out = cell(state, x)
    return lax.optimization_barrier(jax.tree.map(jnp.copy, new)), out


def branch_of(fn):
    return lambda x: lax.cond(jnp.sum(x) < 10, fn, fn, x)


STEPS = {
    "plain": cell,
    "jit": jax.jit(cell),
    "nested jit": jax.jit(jax.jit(cell)),
    "remat": jax.checkpoint(cell),
    "jit of remat": jax.jit(jax.checkpoint(cell)),
    "remat with a policy": jax.checkpoint(cell, policy=jax.checkpoint_policies.dots_saveable),
    "scan": looped,
    "while": waiting,
    "cond": branching,
    "jit of cond": jax.jit(branching),
    "custom_vjp": custom,
    "copied": copied,
    "vmap": lambda s, x: jax.tree.map(
        lambda v: v[0], jax.vmap(cell)(*jax.tree.map(lambda v: jnp.asarray(v)[None], (s, x)))
    ),
}


def by_hand(p):
    new, out = cell(STATE, X, p.get("c", 0.0), p.get("h", 0.0))
    return loss(new, out)


def loss(new, out):
    weights = jnp.arange(1.0, N + 1)
    return (
        jnp.sum(weights * jnp.sin(new["h"]))
        + jnp.sum(new["c"] ** 3)
        + jnp.sum(out["y"] ** 2) * (1 + out["z"])
    )


def differences(fn, p, step=1e-6):
    """Compute the gradient of a function of named arrays by central differences."""
    out = {}
    for name, x in p.items():
        x, flat = np.asarray(x), []
        for i in range(x.size):
            nudge = np.zeros(x.size)
            nudge[i] = step
            nudge = nudge.reshape(x.shape)
            flat.append((fn({**p, name: x + nudge}) - fn({**p, name: x - nudge})) / (2 * step))
        out[name] = np.reshape(flat, x.shape)
    return out


@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_those_by_the_hidden_states(name):
    p = add_hidden_perturbation(STEPS[name], STATE, X)
    assert isinstance(p, HiddenPerturbation)
    assert p.names == ("c", "h")
    assert p.perturb_hidden_paths == [("c",), ("h",)]
    new, out = p(p.zeros(), STATE, X)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-12), (new, out), cell(STATE, X)
    )
    zeros = p.zeros()
    grads = jax.grad(lambda q: loss(*p(q, STATE, X)))(zeros)
    wanted = differences(by_hand, zeros)
    for key in ("c", "h"):
        np.testing.assert_allclose(grads[key], wanted[key], atol=1e-7)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, branch_of], ids="pjrc")
def test_equal_values_made_in_a_body(wrap):
    """The states are independent of each other, whatever operation defines the value."""

    def made(x):
        v = jnp.tanh(x)
        return v, v.reshape(1, -1), v * 2

    def step(state, x):
        v, row, out = wrap(made)(x + state["a"])
        return {"a": v, "b": row[0], "c": v}, (out, v)

    state = dict.fromkeys("abc", X)
    p = add_hidden_perturbation(step, state, X)
    q = {"a": 1 + X, "b": 2 + X, "c": 3 + X}
    new, (out, again) = p(q, state, X)
    v = np.tanh(2 * X)
    for key in q:
        np.testing.assert_allclose(new[key], v + q[key])
    np.testing.assert_allclose(out, 2 * (v + q["a"]))
    np.testing.assert_allclose(again, v + q["a"])


@pytest.mark.parametrize(
    ("there", "back"),
    [
        (jnp.ravel, lambda h: h.reshape(2, 3)),
        (jnp.transpose, jnp.transpose),
        (lambda h: h.T.reshape(-1, 1), lambda h: h.reshape(3, 2).T),
        (lambda h: h[None], lambda h: h[0]),
        (lambda h: jnp.expand_dims(h.ravel(), (0, 2)), lambda h: h[0, :, 0].reshape(2, 3)),
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_states_that_are_kept_in_another_shape(there, back, wrap):
    x = np.arange(6.0).reshape(2, 3) / 6

    def step(state, x):
        h = jnp.tanh(back(state) + x)
        return there(h), h**2

    state = there(jnp.asarray(x))
    added = jnp.asarray(np.linspace(0.1, 0.7, 6).reshape(state.shape))
    p = add_hidden_perturbation(wrap(step), state, x)
    new, out = p({"h": added}, state, x)
    h = np.tanh(2 * x) + back(added)
    np.testing.assert_allclose(new, there(jnp.asarray(h)))
    np.testing.assert_allclose(out, h**2)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_a_state_that_a_scan_returns_with_values_computed_from_it(length, reverse):
    """The state of the last iteration is perturbed, and the loop body reads the perturbed state."""
    ws = np.linspace(0.5, 1.5, length)

    def body(carry, w):
        h, c = carry
        c = 0.5 * c + w * h
        h = jnp.tanh(c + X)
        return (h, c), h**2

    def step(state, x):
        (h, c), ys = lax.scan(body, (state["h"], state["c"]), ws, reverse=reverse)
        return {"c": c, "h": h}, (ys, x)

    def by_hand(p):
        (h, c), ys = (STATE["h"], STATE["c"]), []
        for i, w in enumerate(ws[::-1] if reverse else ws):
            last = i == length - 1
            c = 0.5 * c + w * h + (p["c"] if last else 0)
            h = jnp.tanh(c + X) + (p["h"] if last else 0)
            ys.append(h**2)
        return {"c": c, "h": h}, (jnp.stack(ys[::-1] if reverse else ys), X)

    p = add_hidden_perturbation(step, STATE, X)
    q = {"c": X + 0.3, "h": 0.2 - X}
    close = functools.partial(np.testing.assert_allclose, atol=1e-12)
    jax.tree.map(close, p(q, STATE, X), by_hand(q))
    total = lambda f: lambda q: sum(jnp.sum(v**3) for v in jax.tree.leaves(f(q)))
    jax.tree.map(close, jax.grad(total(lambda q: p(q, STATE, X)))(q), jax.grad(total(by_hand))(q))


def test_a_warning_tells_of_paths_that_a_derivative_misses():
    @jax.custom_vjp
    def both(h):
        v = jnp.tanh(h)
        return v, v * 3

    both.defvjp(lambda h: (both(h), h), lambda h, ct: (ct[0] + ct[1],))

    def waiting(h, x):
        body = lambda c: (c[0] + 1, jnp.tanh(c[1] + x), jnp.tanh(c[1] + x) * 2)
        _, h, out = lax.while_loop(lambda c: c[0] < 3, body, (0, h, h))
        return h, out

    with pytest.warns(
        UserWarning, match=r"'h' is a result of a [cC]ustom\w+, which computes other"
    ):
        add_hidden_perturbation(lambda h, x: both(h + x), X, X)

    def reading(h, x):
        def body(c):
            h = jnp.tanh(c[1] + x)
            return c[0] + 1, h, h * 2

        _, h, out = lax.while_loop(lambda c: c[0] < 3, body, (0, h, h))
        return h, out

    with pytest.warns(UserWarning, match="'h' is a result of a while, which computes other"):
        add_hidden_perturbation(reading, X, X)

    def rounding(h, x):
        v = jnp.tanh(h.astype(jnp.float64) + x)
        return v.astype(jnp.float32), v

    with pytest.warns(UserWarning, match="'h' is rounded from float64 to float32, and other"):
        add_hidden_perturbation(rounding, X.astype(np.float32), X)
    # Computed from the old state, not from the new one.
    add_hidden_perturbation(waiting, X, X)


@pytest.mark.parametrize("name", STEPS)
def test_perturbations_are_added(name):
    p = add_hidden_perturbation(STEPS[name], STATE, X)
    q = {"c": np.array([0.1, -0.2, 0.3]), "h": np.array([0.5, 0.0, -0.1])}
    wanted = cell(STATE, X, q["c"], q["h"])
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-12), p(q, STATE, X), wanted)


def test_the_methods_of_braintrace_work_as_documented():
    p = add_hidden_perturbation(cell, STATE, X)
    data = p.init_perturb_data()
    assert [(d.shape, d.dtype) for d in data] == [((N,), jnp.float64)] * 2
    inputs = jax.tree.leaves((STATE, X))
    results = p.eval_jaxpr(inputs, data)
    for got, wanted in zip(results, jax.tree.leaves(cell(STATE, X)), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-12)
    assert list(p.dict()) == [
        "perturb_vars", "perturb_hidden_paths", "perturb_hidden_states", "perturb_jaxpr",
    ]  # fmt: skip
    assert p.dict()["perturb_jaxpr"] is p.perturb_jaxpr is p[3]
    variables, *_, jaxpr = p
    assert list(variables) == list(getattr(jaxpr, "jaxpr", jaxpr).invars[-2:])
    (group,) = tapax.hidden.hidden_groups(cell, STATE, X)
    assert group.names == ("c", "h")
    (joined,) = p.perturb_data_to_hidden_group_data([jnp.zeros(N), jnp.ones(N)], [group])
    np.testing.assert_array_equal(joined, np.tile([0.0, 1.0], (N, 1)))
    (same,) = p.by_group({"h": jnp.ones(N)}, [group])
    np.testing.assert_array_equal(same, joined)


def test_inputs_of_a_step_given_by_keyword():
    def step(state, x, *, scale, shift=0.0):
        return cell(state, scale * x + shift)

    p = add_hidden_perturbation(step, STATE, X, scale=2.0)
    (group,) = tapax.hidden.hidden_groups(step, STATE, X, scale=2.0)
    wanted = cell(STATE, 3.0 * X)
    equal = functools.partial(np.testing.assert_allclose, atol=1e-12)
    jax.tree.map(equal, p({}, STATE, X, scale=3.0), wanted)
    jax.tree.map(equal, jax.jit(p.__call__)({}, STATE, X, scale=3.0), wanted)
    jax.tree.map(equal, group.transition(STATE, X, scale=3.0), list(wanted[0].values()))
    with pytest.raises(HiddenError, match="was traced for a state and inputs of the structure"):
        p({}, STATE, X)


def test_states_with_equal_values_have_one_perturbation_each():
    def step(state, x):
        v = jnp.tanh(W[0] @ state["a"] + state["b"] + x)
        return {"a": v, "b": v, "late": jnp.copy(v)}, v * 2

    state = dict.fromkeys(("a", "b", "late"), X)
    p = add_hidden_perturbation(step, state, X)
    assert p.names == ("a", "b", "late")

    def total(q):
        new, out = p(q, state, X)
        return sum((i + 2) * jnp.sum(v) for i, v in enumerate(new.values())) + 10 * jnp.sum(out)

    grads = jax.grad(total)(p.zeros())
    # Later operations read the first state that has this value.
    np.testing.assert_allclose(grads["a"], np.full(N, 2.0 + 20.0))
    np.testing.assert_allclose(grads["b"], np.full(N, 3.0))
    np.testing.assert_allclose(grads["late"], np.full(N, 4.0))


def test_a_state_that_is_passed_on_or_constant():
    def step(state, x):
        return {"kept": state["kept"], "old": state["kept"], "zero": jnp.zeros(N)}, x

    state = dict.fromkeys(("kept", "old", "zero"), X)
    p = add_hidden_perturbation(step, state, X)
    new, _ = p({"kept": X, "old": 2 * X, "zero": 3 * X}, state, X)
    np.testing.assert_allclose(new["kept"], 2 * X)
    np.testing.assert_allclose(new["old"], 3 * X)
    np.testing.assert_allclose(new["zero"], 3 * X)


def test_a_state_may_be_any_structure():
    class Pair(tuple):
        pass

    for state, names in (
        (X, ("h",)),
        ((X, [X]), ("0", "1/0")),
        ({"l1": {"h": X}, "l0": (X, X)}, ("l0/0", "l0/1", "l1/h")),
        ({3: {"a/b": X}}, ("3/a%2Fb",)),
    ):
        p = add_hidden_perturbation(lambda s, x: (jax.tree.map(jnp.sin, s), x), state, X)
        assert p.names == names
        new, _ = p({names[-1]: X}, state, X)
        np.testing.assert_allclose(jax.tree.leaves(new)[-1], np.sin(X) + X)
    assert p.perturb_hidden_paths == [(3, "a/b")]


def test_perturbed_steps_compose_with_transformations():
    p = add_hidden_perturbation(jax.jit(cell), STATE, X)
    total = lambda q, s, x: loss(*p(q, s, x))
    batch = jax.tree.map(lambda v: jnp.stack([v, 2 * v]), (STATE, X))
    many = jax.vmap(jax.jit(jax.grad(total)), in_axes=(None, 0, 0))(p.zeros(), *batch)
    first = jax.grad(total)(p.zeros(), STATE, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, atol=1e-12), many, first)
    # Second derivatives, and a tracer that the step closes over.
    hessian = jax.hessian(lambda q: total(q, STATE, X))(p.zeros())
    forward = jax.jacfwd(jax.grad(by_hand))({k: jnp.zeros(N) for k in "ch"})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), hessian, forward)

    def closing(scale):
        inner = add_hidden_perturbation(lambda s, x: cell(s, scale * x), STATE, X)
        return loss(*inner(inner.zeros(), STATE, X))

    wanted = jax.grad(lambda a: loss(*cell(STATE, a * X)))(1.5)
    np.testing.assert_allclose(jax.jit(jax.grad(closing))(1.5), wanted, atol=1e-12)


def test_perturbations_stay_in_bfloat16():
    state, x = jax.tree.map(lambda v: jnp.asarray(v, jnp.bfloat16), (STATE, X))
    step = lambda s, x: ({"c": s["c"] + x, "h": jnp.tanh(s["c"] + x)}, x)
    p = add_hidden_perturbation(step, state, x)
    assert {v.dtype for v in p.zeros().values()} == {jnp.dtype(jnp.bfloat16)}
    assert {v.dtype for v in jax.tree.leaves(p(p.zeros(), state, x))} == {jnp.dtype(jnp.bfloat16)}


def test_a_complex_state():
    step = lambda h, x: (jnp.exp(0.3j) * h + x, jnp.real(h))
    h = jnp.array([1.0 + 1.0j])
    p = add_hidden_perturbation(step, h, jnp.ones(1))
    new, _ = p({"h": jnp.array([1j])}, h, jnp.ones(1))
    np.testing.assert_allclose(new, np.exp(0.3j) * h + 1 + 1j)


def refusal(fn, error=HiddenError):
    with pytest.raises(error) as info:
        fn()
    return str(info.value)


def test_steps_that_change_the_state_are_refused():
    shape = refusal(lambda: add_hidden_perturbation(lambda h, x: (h[:2], x), X, X))
    assert "The hidden state 'h' enters " in shape
    assert "with shape [3] and leaves it with shape [2]. A step must return a state like" in shape
    rounding = lambda h, x: (h.astype(jnp.float32), x)
    kind = refusal(lambda: add_hidden_perturbation(rounding, X, X))
    assert "with type float64 and leaves it with type float32" in kind
    tree = refusal(lambda: add_hidden_perturbation(lambda h, x: ({"h": h}, x), X, X))
    assert "takes a state of the structure PyTreeDef(*), but returns one of the" in tree
    assert "structure PyTreeDef({'h': *})" in tree
    one = refusal(lambda: add_hidden_perturbation(lambda h, x: h, X, X))
    assert "but a step must return a pair: the new state and the output." in one


@pytest.mark.parametrize(
    ("value", "kind"), [(np.arange(3), "int64"), (np.ones(2, bool), "bool"), (3, "int64")]
)
def test_states_that_are_not_floats_are_refused(value, kind):
    state = {"h": X, "t": value}
    for fn in (add_hidden_perturbation, tapax.hidden.hidden_groups):
        assert refusal(lambda fn=fn: fn(lambda s, x: (s, x), state, X)) == (
            f"The hidden state 't' is of type {kind}, but a hidden state must have a "
            "floating-point type, because it is differentiated. Close over the value, or pass it "
            "to the step as an input."
        )
    assert "contains no arrays" in refusal(
        lambda: add_hidden_perturbation(lambda s, x: (s, x), {}, X)
    )


def test_perturbations_that_do_not_fit_are_refused():
    p = add_hidden_perturbation(cell, STATE, X)
    assert refusal(lambda: p({"hh": X}, STATE, X)) == (
        "There is no hidden state 'hh'. The nearest names are 'h'."
    )
    wrong = (
        "The length of the perturb data is not correct: `perturb_data` has 1 arrays, but there are "
        "2 perturbation variables, one for each of "
    )
    assert refusal(lambda: p.eval_jaxpr([], [X])) == f"{wrong}'c', 'h'."
    assert refusal(lambda: p.perturb_data_to_hidden_group_data([X], [])) == f"{wrong}'c', 'h'."
    # The original raises an AssertionError.
    refusal(lambda: p.perturb_data_to_hidden_group_data([X], []), AssertionError)
    assert refusal(lambda: p({"h": X[:2]}, STATE, X)) == (
        "The perturbation of 'h' has shape [2], but the hidden state has shape [3]."
    )
    assert refusal(lambda: p({"h": X.astype(np.float32)}, STATE, X)) == (
        "The perturbation of 'h' has type float32, but the hidden state has type float64."
    )
    assert refusal(lambda: p.eval_jaxpr([X], p.init_perturb_data())) == (
        "`inputs` has 1 arrays, but the program of the step takes 3."
    )
    assert refusal(lambda: p.eval_jaxpr([X, X[:1], X], p.init_perturb_data())) == (
        "`inputs[1]` has shape [1], but the program of the step takes one of shape [3]."
    )
    for fn in (add_hidden_perturbation, tapax.hidden.hidden_groups):
        assert refusal(lambda fn=fn: fn(3, X, X)) == (
            "`step` must be a function step(state, *inputs) -> (state, out), but is 3 of type int."
        )
    assert "was traced for an argument of shape [3]" in refusal(
        lambda: p({}, jax.tree.map(lambda v: v[:2], STATE), X)
    )
    assert "of the structure" in refusal(lambda: p({}, STATE, X, X))
    assert "of type list" in refusal(lambda: p([X], STATE, X), TypeError)
    (group,) = tapax.hidden.hidden_groups(lambda h, x: (0.5 * h + x, x), X, X)
    other = add_hidden_perturbation(lambda s, x: ({"k": s["k"] + x}, x), {"k": X}, X)
    assert refusal(lambda: other.by_group({}, [group])) == (
        "`hidden_groups` contains the hidden state 'h', at the path ('h',), which has no "
        "perturbation: the perturbed states are 'k'."
    )
