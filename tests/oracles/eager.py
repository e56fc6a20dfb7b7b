"""Values and gradients of marked programs, computed without the engine.

A program is a function of the `sow` to use. Under `jax.disable_jit()` scans, loops and conditionals
run in Python, so a `sow` that records its argument sees the value of every iteration. A `sow` that
adds a zero for each call gives every gradient: `jax.grad` differentiates by the zeros.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.oracles.closeness import assert_close

Program = Callable[[Callable[..., Any]], Callable[..., Any]]


def plain(x: Any, name: str) -> Any:
    """Sow nothing and return the value."""
    del name
    return x


def values(program: Program, *args: Any) -> tuple[Any, dict[str, list[np.ndarray]]]:
    """Return the result of the program, and every sown value in the order of execution."""
    seen: dict[str, list[np.ndarray]] = defaultdict(list)

    def record(x: Any, name: str) -> Any:
        seen[name].append(np.asarray(x))
        return x

    record.eager = True
    with jax.disable_jit():
        out = program(record)(*args)
    return out, dict(seen)


def grads(loss: Program, *args: Any) -> dict[str, list[np.ndarray]]:
    """Compute the gradient of a loss by every sown value, in the order of execution."""
    _, seen = values(loss, *args)

    def perturbed(eps: dict[str, list[Any]]) -> Any:
        left = {name: list(e) for name, e in eps.items()}

        def add(x: Any, name: str) -> Any:
            return x + left[name].pop(0) if name in left else x

        add.eager = True
        with jax.disable_jit():
            return loss(add)(*args)

    zeros = {
        name: [jnp.zeros_like(x) for x in xs]
        for name, xs in seen.items()
        if jnp.issubdtype(xs[0].dtype, jnp.inexact)
    }
    found = jax.grad(perturbed)(zeros)
    return {name: [np.asarray(g) for g in gs] for name, gs in found.items()}


def finite_differences(loss: Program, *args: Any, step: float = 1e-6) -> dict[str, list[Any]]:
    """Compute `grads` by central differences, exact to about `step` squared in float64."""
    _, seen = values(loss, *args)

    def shifted(name: str, call: int, index: tuple[int, ...], by: float) -> float:
        count: dict[str, int] = defaultdict(int)

        def add(x: Any, n: str) -> Any:
            here, count[n] = count[n], count[n] + 1
            return x.at[index].add(by) if (n, here) == (name, call) else x

        add.eager = True
        with jax.disable_jit():
            return float(loss(add)(*args))

    found: dict[str, list[Any]] = {}
    for name, xs in seen.items():
        found[name] = []
        for call, x in enumerate(xs):
            g = np.zeros(x.shape)
            for index in np.ndindex(*x.shape):
                up, down = (shifted(name, call, index, s * step) for s in (1, -1))
                g[index] = (up - down) / (2 * step)
            found[name].append(g)
    return found


def unstack(x: Any, loops: int) -> list[np.ndarray]:
    """Split a captured array into its iterations, in the order of the loops."""
    x = np.asarray(x)
    return list(x.reshape(-1, *x.shape[loops:])) if loops else [x]


def close(a: Sequence[Any], b: Sequence[Any], tol: float) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert np.shape(x) == np.shape(y)
        assert_close(np.asarray(x, np.complex128), np.asarray(y, np.complex128), tol)
