"""Values and gradients of every program in the table, compared with the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tests.models.next_jax import next_flags
from tests.models.programs import CASES
from tests.oracles import eager as oracle
from tests.oracles.closeness import assert_close

X = np.array([0.3, -0.7, 1.2])
TOL = 1e-12 if jax.config.jax_enable_x64 else 2e-5


def x():
    return jnp.asarray(X)


def wrappers():
    return {
        "capture": lambda f: tapax.capture(f),
        "capture of jit": lambda f: tapax.capture(jax.jit(f)),
        "jit of capture": lambda f: jax.jit(tapax.capture(f)),
    }


HOW = [
    how if how == "jit of capture" else pytest.param(how, marks=pytest.mark.once)
    for how in wrappers()
]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", list(CASES))
def test_values_of_every_program_agree_with_the_oracle(name, how):
    case = CASES[name]
    steps = 6 if name == "while_loop" else None
    expected_out, expected = oracle.values(case.program, x())
    captured = (
        wrappers()[how] if steps is None else (lambda f: jax.jit(tapax.capture(f, steps=steps)))
    )
    out, taps = captured(case.program(tapax.sow))(x())
    assert_close(out, expected_out, TOL)
    assert set(taps.values) == set(expected) == set(case.loops)
    assert taps.grads == {}
    for site, loops in case.loops.items():
        found = oracle.unstack(taps.values[site], loops)
        if steps is not None:
            found = [v for v, ok in zip(found, taps.valid[site], strict=True) if ok]
        oracle.close(found, expected[site], TOL)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.differentiable])
def test_gradients_of_every_program_agree_with_the_oracle(name, how):
    case = CASES[name]
    expected = oracle.grads(case.program, x())
    step = jax.value_and_grad(case.program(tapax.sow))
    out, taps = wrappers()[how](step)(x())
    assert_close(out, step(x()), TOL)
    for site, loops in case.loops.items():
        if name.startswith("dropped") or site not in expected:
            assert site not in taps.grads
        else:
            oracle.close(oracle.unstack(taps.grads[site], loops), expected[site], TOL)
    assert set(taps.values) == set(case.loops)


@pytest.mark.once
@pytest.mark.parametrize("name", list(CASES))
def test_every_program_under_the_flags_of_the_next_jax(name):
    case = CASES[name]
    program, steps = case.program(tapax.sow), 6 if name == "while_loop" else None
    _, values = oracle.values(case.program, x())
    grads = oracle.grads(case.program, x()) if case.differentiable else {}
    with next_flags():
        _, taps = tapax.capture(program, steps=steps)(x())
        backward = tapax.capture(jax.grad(program))(x())[1].grads if case.differentiable else {}
    assert set(taps.values) == set(case.loops)
    for site, loops in case.loops.items():
        found = oracle.unstack(taps.values[site], loops)
        if steps is not None:
            found = [v for v, ok in zip(found, taps.valid[site], strict=True) if ok]
        oracle.close(found, values[site], TOL)
        if site in backward:
            oracle.close(oracle.unstack(backward[site], loops), grads[site], TOL)
    assert set(backward) == {site for site in grads if not name.startswith("dropped")}


@pytest.mark.parametrize("name", ["scanned", "nested_scans", "remat_in_scan", "jitted"])
def test_gradients_agree_with_finite_differences(name):
    case = CASES[name]
    with jax.enable_x64(True):
        expected = oracle.finite_differences(case.program, x())
        _, taps = tapax.capture(jax.grad(case.program(tapax.sow)))(x())
        for site, loops in case.loops.items():
            oracle.close(oracle.unstack(taps.grads[site], loops), expected[site], 1e-7)
