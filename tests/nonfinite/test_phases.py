"""The pass in which `find_nonfinite` finds a fault, against the value of the plain function.

The oracle runs the function itself, without a derivative and without tapax: a fault is of the
forward pass exactly if that value is not finite.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import special

from tapax.nonfinite._search import find_nonfinite


@jax.custom_jvp
def bad_slope(x):
    return jnp.sin(x)


@bad_slope.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return jnp.sin(x), jax.jit(lambda x: 1 / x)(x) * t


@jax.custom_jvp
def bad_value(x):
    return jnp.log(x)


@bad_value.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    value = jnp.log(x)
    return value, value * t


@jax.custom_vjp
def bad_residual(x):
    return jnp.sin(x)


bad_residual.defvjp(lambda x: (jnp.sin(x), 1 / x), lambda slope, ct: (slope * ct,))


@jax.custom_vjp
def bad_rule(x):
    return jnp.sin(x)


bad_rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct / x,))


def ones(x):
    return x * jnp.ones((3, 3), jnp.float32)


def eye(x):
    return x * jnp.eye(3, dtype=jnp.float32)


def huge(x):
    return x * jnp.full(5, 1e20, jnp.float32)


def logs(x):
    return jnp.log(x * jnp.ones(3, jnp.float32))


FUNCTIONS = {
    # The rule of the derivative computes the value.
    "cholesky": (lambda x: jnp.linalg.cholesky(ones(x)).sum(), 1.0),
    "inv": (lambda x: jnp.linalg.inv(ones(x)).sum(), 1.0),
    "solve": (lambda x: jnp.linalg.solve(ones(x), jnp.ones(3)).sum(), 1.0),
    "lu": (lambda x: lax.linalg.lu(eye(jnp.log(x)))[0].sum(), -1.0),
    "slogdet": (lambda x: jnp.linalg.slogdet(eye(jnp.log(x)))[1], -1.0),
    "eigh": (lambda x: jnp.linalg.eigh(eye(jnp.log(x)))[0].sum(), -1.0),
    "qr": (lambda x: jnp.linalg.qr(eye(jnp.log(x)))[1].sum(), -1.0),
    "prod": (lambda x: jnp.prod(huge(x)), 1.0),
    "cumprod": (lambda x: jnp.cumprod(huge(x)).sum(), 1.0),
    "cummax": (lambda x: lax.cummax(logs(x)).sum(), -1.0),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(logs(x)).sum(), -1.0),
    "logsumexp": (lambda x: jax.nn.logsumexp(logs(x)), -1.0),
    "sort": (lambda x: jnp.sort(logs(x)).sum(), -1.0),
    "top_k": (lambda x: lax.top_k(logs(x), 2)[0].sum(), -1.0),
    "erf_inv": (special.erfinv, 2.0),
    "exp": (lambda x: jnp.exp(100 * x), 1.0),
    "log": (jnp.log, -1.0),
    "division": (lambda x: 1 / x, 0.0),
    "relu": (lambda x: jax.nn.relu(jnp.log(x)), -1.0),
    "gelu": (lambda x: jax.nn.gelu(x * x), 1e30),
    "silu": (lambda x: jax.nn.silu(x * x), 1e30),
    "where": (lambda x: jnp.where(x < 0, jnp.log(x), 0.0), -1.0),
    "constant": (lambda x: x * jnp.exp(jnp.float32(200)), 1.0),
    "custom_jvp": (bad_value, -1.0),
    "norm": (lambda x: jnp.linalg.norm(logs(x)), -1.0),
    # The derivative alone is not finite.
    "root": (jnp.sqrt, 0.0),
    "norm at 0": (lambda x: jnp.linalg.norm(x * jnp.ones(3, jnp.float32)), 0.0),
    "masked root": (lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0), 0.0),
    "root of a norm": (lambda x: jnp.sqrt(jnp.sum(ones(x) ** 2)), 0.0),
    "power": (lambda x: x**0.5, 0.0),
    "arccos": (jnp.arccos, 1.0),
    "arcsin": (lambda x: jnp.arcsin(x) ** 2, -1.0),
    "xlogy": (lambda x: special.xlogy(x, x), 0.0),
    "equal eigenvalues": (lambda x: jnp.linalg.eigh(eye(x))[1].sum(), 1.0),
    "equal singular values": (lambda x: jnp.linalg.svd(eye(x))[0].sum(), 1.0),
    "slope of a custom_jvp": (bad_slope, 0.0),
    "residual of a custom_vjp": (bad_residual, 0.0),
    "rule of a custom_vjp": (bad_rule, 0.0),
}


def phase_by_hand(fn, x):
    """Run the plain function, and say in which pass the first value that is not finite is."""
    return "backward" if np.isfinite(np.asarray(fn(x))).all() else "forward"


LIKE_OTHERS = [
    "slogdet",
    "eigh",
    "qr",
    "cummax",
    "cumlogsumexp",
    "sort",
    "top_k",
    "relu",
    "silu",
    "norm",
    "arcsin",
    "xlogy",
]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.many] * (name in LIKE_OTHERS)) for name in FUNCTIONS],
)
def test_fault_is_in_the_forward_pass_if_the_plain_value_is_not_finite(name):
    fn, at = FUNCTIONS[name]
    x = jnp.float32(at)
    want = phase_by_hand(fn, x)
    assert find_nonfinite(jax.value_and_grad(fn))(x).phase == want
    plain = find_nonfinite(fn)(x)
    assert (plain is None) if want == "backward" else plain.phase == "forward"


def test_table_of_functions_has_faults_of_both_passes():
    phases = [phase_by_hand(fn, jnp.float32(at)) for fn, at in FUNCTIONS.values()]
    assert min(phases.count("forward"), phases.count("backward")) > 10


def scanned(fn):
    return lambda x: lax.scan(lambda c, y: (c + fn(x * y), None), 0.0, jnp.ones(2, jnp.float32))[0]


def scanned_constant(fn):
    """Make a loop from which JAX moves `fn`, as its operand is equal in all iterations."""
    return lambda x: lax.scan(lambda c, _: (c + fn(x), None), 0.0, None, length=2)[0]


def branched(fn):
    return lambda x: lax.cond(x < 9, fn, jnp.sin, x)


def mapped(fn):
    return lambda x: jax.vmap(fn)(x * jnp.ones(2, jnp.float32)).sum()


def rematted(fn):
    return jax.checkpoint(lambda x: jnp.sin(fn(x)) * 2)


AROUND = {
    "jit": jax.jit,
    "scan": scanned,
    "constant in a scan": scanned_constant,
    "cond": branched,
    "vmap": mapped,
    "remat": rematted,
    "remat in a scan": lambda fn: scanned(rematted(fn)),
}
DERIVATIVES = {
    "grad": jax.grad,
    "value_and_grad": jax.value_and_grad,
    "grad of the jit": lambda fn: jax.grad(jax.jit(fn)),
    "jvp": lambda fn: lambda x: jax.jvp(fn, (x,), (x + 1,)),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    "name",
    [
        *("cholesky", "root"),
        *(pytest.param(name, marks=pytest.mark.many) for name in ("prod", "slope of a custom_jvp")),
    ],
)
def test_phase_is_that_of_the_plain_value_in_every_transformation(name, around):
    fn, at = FUNCTIONS[name]
    fn, x = AROUND[around](fn), jnp.float32(at)
    want = phase_by_hand(fn, x)
    for how, differentiate in DERIVATIVES.items():
        assert find_nonfinite(differentiate(fn))(x).phase == want, how


def test_value_that_remat_recomputes_is_of_the_forward_pass():
    fn = jax.checkpoint(lambda x: jnp.sin(jnp.log(x)) * 2)
    # The gradient does not return the value, so the fault reaches it by recomputation alone.
    found = find_nonfinite(jax.grad(fn))(jnp.float32(-1))
    assert (found.operation, found.phase) == ("log", "forward")
    found = find_nonfinite(jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sqrt(x)))))(jnp.float32(0))
    assert (found.operation, found.phase) == ("div", "backward")


def test_phases_in_second_derivatives():
    product = lambda x: jnp.prod(huge(x))
    found = find_nonfinite(jax.grad(jax.grad(product)))(jnp.float32(1))
    assert found.phase == "forward"
    curved = lambda x: jnp.where(x > 0, x**1.5, 0.0)
    found = find_nonfinite(jax.jacfwd(jax.grad(curved)))(jnp.float32(0))
    assert found.phase == "backward"


def test_operations_on_a_gradient_keep_faults_of_the_backward_pass_apart():
    norm = lambda x: jnp.linalg.norm(x)
    step = lambda x: x - 0.1 * jnp.tanh(jax.grad(norm)(x))
    assert find_nonfinite(step)(jnp.zeros(3)).phase == "backward"
    step = lambda x: x - 0.1 * jnp.log(jax.grad(norm)(x))
    found = find_nonfinite(step)(-jnp.ones(3))
    assert (found.operation, found.phase) == ("log", "forward")


def test_auxiliary_value_of_a_gradient_is_of_the_forward_pass():
    fn = lambda x: (x**2, jnp.log(jnp.float32(-1) * jnp.ones(2)))
    found = find_nonfinite(jax.grad(fn, has_aux=True))(jnp.float32(1))
    assert (found.operation, found.phase) == ("log", "forward")
