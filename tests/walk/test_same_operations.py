"""Without its taps, the captured program is the plain program, equation for equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import partial_eval as pe
from jax.extend.core import jaxpr_as_fun

import tapax
from tapax import _jax
from tapax._marks.context import MarkingPolicy
from tapax._marks.operations import with_marks
from tests.models.programs import CASES
from tests.oracles import eager as oracle
from tests.walk.test_values_and_gradients import X


def steps():
    for name, case in CASES.items():
        yield name, case.program
        if case.differentiable:
            yield f"grad of {name}", lambda sow, p=case.program: jax.value_and_grad(p(sow))


STEPS = dict(steps())


def operations(jaxpr):
    """List the operations of a program with their types, nested as its bodies, without taps."""
    found = []
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "tap":
            continue
        inside = [
            operations(part)
            for value in eqn.params.values()
            for part in (value if isinstance(value, (list, tuple)) else (value,))
            if hasattr(_jax.open_jaxpr(part), "eqns")
        ]
        types = [] if inside else [str(v.aval) for v in eqn.outvars]
        found.append((eqn.primitive.name, types, inside))
    return found


def used_alone(jaxpr, count):
    """Keep the equations that the first `count` results of a program need."""
    inner = _jax.open_jaxpr(jaxpr)
    used = [i < count for i in range(len(inner.outvars))]
    return pe.dce_jaxpr(inner, used)[0]


def flat(found):
    for name, _, inside in found:
        yield name
        for part in inside:
            yield from flat(part)


# JAX itself drops from the plain program the values that only an unused mark reads.
@pytest.mark.parametrize("name", [name for name in STEPS if "dropped" not in name])
def test_taps_are_all_that_marks_add(name):
    x = jnp.asarray(X)
    plain = jax.make_jaxpr(STEPS[name](oracle.plain))(x)
    with with_marks(MarkingPolicy()):
        tapped = jax.make_jaxpr(STEPS[name](tapax.sow))(x)
    assert "tap" in list(flat_all(tapped))
    assert operations(tapped) == operations(plain)


def flat_all(jaxpr):
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        yield eqn.primitive.name
        for value in eqn.params.values():
            for part in value if isinstance(value, (list, tuple)) else (value,):
                if hasattr(_jax.open_jaxpr(part), "eqns"):
                    yield from flat_all(part)


@pytest.mark.parametrize("name", list(STEPS))
def test_captured_program_has_the_operations_of_the_plain_one(name):
    x = jnp.asarray(X)
    step = STEPS[name](oracle.plain)
    plain = jax.make_jaxpr(step)(x)
    captured = jax.make_jaxpr(tapax.capture(STEPS[name](tapax.sow)))(x)
    assert "tap" not in list(flat_all(captured))
    count = len(jax.tree.leaves(jax.eval_shape(step, x)))
    ours, theirs = (list(flat(operations(used_alone(j, count)))) for j in (captured, plain))
    if "while" in theirs:
        # JAX does not always see that nothing needs the counter that a while loop carries.
        rest = iter(ours)
        assert all(name in rest for name in theirs)
        assert sorted(set(ours) - set(theirs)) in ([], ["broadcast_in_dim"])
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", list(STEPS))
def test_marks_add_nothing_outside_a_capture(name):
    x = jnp.asarray(X)
    marked_, plain = (str(jax.make_jaxpr(STEPS[name](sow))(x)) for sow in (tapax.sow, oracle.plain))
    assert marked_ == plain


@pytest.mark.parametrize("name", list(STEPS))
def test_outputs_are_equal_bit_for_bit_op_by_op(name):
    x = jnp.asarray(X)
    step = STEPS[name](tapax.sow)
    plain = jaxpr_as_fun(jax.make_jaxpr(step)(x))
    captured = jax.make_jaxpr(lambda x: tapax.capture(step)(x)[0])(x)
    for a, b in zip(plain(x), jaxpr_as_fun(captured)(x), strict=True):
        np.testing.assert_array_equal(a, b)
    with jax.disable_jit():
        expected = step(x)
        out, _ = tapax.capture(step)(x)
    jax.tree.map(np.testing.assert_array_equal, out, expected)


@pytest.mark.once
def test_under_jit_outputs_differ_at_most_in_the_last_bit(record_property):
    largest = 0.0
    for program in STEPS.values():
        step = program(tapax.sow)
        plain = jax.jit(step)(jnp.asarray(X))
        out, _ = tapax.capture(jax.jit(step))(jnp.asarray(X))
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(out), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            ulps = np.abs(a - b).max() / np.spacing(np.abs(a).max())
            largest = max(largest, float(ulps))
    record_property("largest difference in units of the last place", largest)
    assert largest <= 16
