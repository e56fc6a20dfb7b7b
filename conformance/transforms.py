"""JAX's transformations of one call, `run(m, x, p) -> (y, aux)`.

`m` is the model or its weights and `x` the input. Some libraries pass values into a program and out
of it as extra arguments and results: these are `p` and `aux`, and either may be None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from conformance.problem import RATE, SOLVE, STEPS, WIDTH, Case

Run = Callable[[Any, Any, Any], tuple[Any, Any]]


def jit(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    return jax.jit(run)(m, x, p)


def vmap(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    return jax.vmap(run, in_axes=(None, 0, 0))(m, x, p)


def map(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    return lax.map(lambda inputs: run(m, *inputs), (x, p))


def remat(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    return jax.checkpoint(run)(m, x, p)


def custom_vjp(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    """Keep the arguments alone for the backward pass, which evaluates `run` once more."""
    call = jax.custom_vjp(run)

    def backward(kept: Any, cotangent: Any) -> Any:
        return jax.vjp(run, *kept)[1](cotangent)

    call.defvjp(lambda *inputs: (call(*inputs), inputs), backward)
    return call(m, x, p)


def scan(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    def body(carry: Any, inputs: Any) -> Any:
        m, state = carry
        row, p = inputs
        out, aux = run(m, state + row, p)
        state = jnp.tanh(out)
        return (m, state), (state, aux)

    return lax.scan(body, (m, jnp.zeros(WIDTH)), (x, p))[1]


def shard_map(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    specs = {"in_specs": (P(), P("d"), P("d")), "out_specs": P("d")}
    if not hasattr(jax, "shard_map"):  # the old JAX that oryx needs
        from jax.experimental.shard_map import shard_map as old_shard_map

        mesh = jax.sharding.Mesh(jax.devices()[:2], ("d",))
        return jax.jit(old_shard_map(run, mesh=mesh, **specs))(m, x, p)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(jax.shard_map(run, mesh=mesh, **specs))(m, x, p)


def cond(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    return lax.cond(x[0] > -9.0, lambda m, x: run(m, x, p)[0], lambda m, x: x, m, x), None


def vmap_cond(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    return vmap(_if_positive(run, 0), m, x, p)


def vmap_cond_cond(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    return vmap(_if_positive(_if_positive(run, -1), 0), m, x, p)


def _if_positive(run: Run, place: int) -> Run:
    """Return a function that calls `run` if the input is positive at `place`."""

    def one(m: Any, x: Any, p: Any) -> Any:
        aux = jax.tree.map(jnp.zeros_like, jax.eval_shape(run, m, x, p)[1])
        return lax.cond(x[place] > 0, run, lambda m, x, p: (x, aux), m, x, p)

    return one


def fori_loop(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    def body(_: Any, carry: Any) -> Any:
        m, x = carry
        return m, jnp.tanh(run(m, x, p)[0])

    return lax.fori_loop(0, 3, body, (m, x))[1], None


def while_loop(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    def body(carry: Any) -> Any:
        m, i, x = carry
        return m, i + 1, jnp.tanh(run(m, x, p)[0])

    return lax.while_loop(lambda carry: carry[1] < 3, body, (m, 0, x))[2], None


def while_grad(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    """Run Equinox's loop, which has a gradient: it stores some iterations and repeats the rest."""
    from equinox.internal import while_loop as checkpointed

    def body(carry: Any) -> Any:
        m, i, x = carry
        return m, i + 1, jnp.tanh(run(m, x, p)[0])

    going = lambda carry: carry[1] < 3  # noqa: E731
    return checkpointed(going, body, (m, 0, x), max_steps=8, kind="checkpointed")[2], None


def custom_root(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    """Solve `y = tanh(run(y) + x) / 5`; JAX differentiates the equation, not the solver."""

    def residual(y: Any) -> Any:
        return y - 0.2 * jnp.tanh(run(m, y, p)[0] + x)

    def solve(f: Any, y: Any) -> Any:
        return lax.fori_loop(0, SOLVE, lambda _, y: y - f(y), y)

    def tangent_solve(g: Any, y: Any) -> Any:
        return jnp.linalg.solve(jax.jacobian(g)(y), y)

    return lax.custom_root(residual, x, solve, tangent_solve), None


def stack(run: Run, m: Any, x: Any, p: Any = None) -> Any:
    """A scan over `m`, which contains the weights of all layers."""

    def body(x: Any, inputs: Any) -> Any:
        m, p = inputs
        out, aux = run(m, x, p)
        return jnp.tanh(out), aux

    return lax.scan(body, x, (m, p))


_FUNCTIONS = (jit, vmap, map, remat, custom_vjp, shard_map, scan, fori_loop, while_loop)
_FUNCTIONS += (while_grad, custom_root, cond, vmap_cond, vmap_cond_cond)
RAW: dict[str, Any] = {f.__name__: f for f in _FUNCTIONS} | {"root_forward": custom_root}


def around(case: Case) -> Any:
    """Return the transformation around the model; None if there is none, or if it is `jit`."""
    if case.name == "stack/raw":
        return stack
    return RAW[case.kind] if case.form == "around" and case.kind != "jit" else None


def closed(name: str) -> Any:
    """Return the body of a model whose layer is closed over in a transformed function."""

    def body(net: Any, x: Any) -> Any:
        layer = net.lin
        return RAW[name](lambda m, x, p: (layer(x), None), None, x)[0]

    return body


def argument(name: str) -> Any:
    """Return the body of a model whose layer is an argument of a transformed function."""

    def body(net: Any, x: Any) -> Any:
        return RAW[name](lambda m, x, p: (m(x), None), net.lin, x)[0]

    return body


Step = Callable[[Any], tuple[Any, Any, Any]]


def _updated(step: Step, w: Any) -> tuple[Any, Any]:
    loss, grads, aux = step(w)
    return jax.tree.map(lambda w, g: w - RATE * g, w, grads), (loss, aux)


def train_scan(step: Step, w: Any) -> Any:
    """Train in a scan by `step(w) -> (loss, gradients, aux)`.

    Return the last loss, `aux` of every iteration, and the trained weights.
    """
    w, (losses, aux) = lax.scan(lambda w, _: _updated(step, w), w, None, length=STEPS)
    return losses[-1], aux, w


def train_while(step: Step, w: Any) -> Any:
    """Train in a while loop; `aux` is that of the last iteration."""
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, w))
    going = lambda carry: carry[0] < STEPS  # noqa: E731
    body = lambda carry: (carry[0] + 1, *_updated(step, carry[1]))  # noqa: E731
    _, w, (loss, aux) = lax.while_loop(going, body, (0, w, (empty[0], empty[2])))
    return loss, aux, w


TRAIN: dict[str, Any] = {"train_scan": train_scan, "train_while": train_while}
