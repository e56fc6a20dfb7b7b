"""Look inside the network: sensitivities to the inputs, and values and gradients of every layer.

The functions compute the sensitivities dS/d(T, rho, Z, k) of the network and, for comparison, those
of the solver, which is differentiable. tapax captures the values and gradients of every layer of
the unmodified model, whose `__call__` is under `@nnx.jit`: inside plain `jax.grad` and `jax.vmap`,
inside `nnx.grad`, and inside the train step.

    >>> from flax import nnx
    >>> from examples.structure_factor.model import NNModel
    >>> model = NNModel(species=1, maxima=[100.0, 10.0, 4.0, 8.0], rngs=nnx.Rngs(0))
    >>> x = jnp.array([[10.0, 3.5, 4.0, 4.0], [10.0, 3.5, 4.0, 1.0]])
    >>> dS, taps = under_jax_grad(model, x)
    >>> dS.shape, taps.grads["NNModel/layers/2"].shape
    ((2, 4), (2, 128))

Flax refuses `jax.grad` of a function that closes over such a model, because `nnx.jit` writes the
variables of the model back, and these were created outside of the gradient. Under a capture, the
call works. Without a capture, make a copy of the model inside the function: `nnx.clone(model)`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

import tapax

from .model import NNModel
from .plasma import Mixture
from .train import GRID, Data, train_step

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def rows_of(state: Sequence[float], k: Any) -> np.ndarray:
    """Make the inputs `[K, inputs]` of the network for one state `[T, rho, Z_1, ...]` at many k."""
    k = np.asarray(k, np.float64)
    return np.concatenate([np.broadcast_to(state, (len(k), len(state))), k[:, None]], -1)


def network_sensitivity(model: NNModel, x: Any) -> jax.Array:
    """Compute dS_ab / dx of the network, `[K, pairs, inputs]`, in the units of the inputs."""

    def S(row: jax.Array) -> jax.Array:
        return nnx.clone(model)(row)

    return jax.vmap(jax.jacrev(S))(jnp.asarray(x))


def solver_sensitivity(mixture: Mixture, state: Sequence[float], k: Any) -> np.ndarray:
    """Compute dS_ab / dx of the HNC solution, by the implicit function theorem."""
    with jax.enable_x64(True):
        state, k = jnp.asarray(state, jnp.float64), jnp.asarray(k, jnp.float64)
        return np.asarray(_derivatives(mixture, state, k))


@partial(jax.jit, static_argnums=0)
def _derivatives(mixture: Mixture, state: jax.Array, k: jax.Array) -> jax.Array:
    pairs = np.triu_indices(len(mixture.names))

    def S(state: jax.Array, k: jax.Array) -> jax.Array:
        return mixture.structure_factors(state[0], state[1], state[2:], k, **GRID)[:, *pairs]

    by_state = jax.jacfwd(S)(state, k)
    # Each S depends on one k, so one forward pass computes all derivatives by k.
    by_k = jax.jvp(partial(S, state), (k,), (jnp.ones_like(k),))[1]
    return jnp.concatenate([by_state, by_k[..., None]], -1)


def under_jax_grad(model: NNModel, x: jax.Array) -> tuple[jax.Array, tapax.Taps]:
    """Compute the gradient of the first S by each row of x, and capture every layer."""
    return tapax.capture(jax.vmap(jax.grad(lambda x: model(x)[0])))(x)


def under_nnx_grad(model: NNModel, x: jax.Array) -> tuple[jax.Array, tapax.Taps]:
    """Compute and capture these gradients with `nnx.grad`, which takes the model as an argument."""
    return tapax.capture(nnx.grad(lambda model, x: model(x)[..., 0].sum(), argnums=1))(model, x)


def in_training(
    model: NNModel, optimizer: nnx.Optimizer, data: Data, rows: int = 512
) -> tuple[jax.Array, tapax.Taps]:
    """Take one more step of the training; return its loss and the taps of every layer."""
    return tapax.capture(train_step)(model, optimizer, data.x[:rows], data.y[:rows])


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def layers_table(looks: Mapping[str, tapax.Taps]) -> Table:
    """Make a table of the root mean squares of the value and the gradient of every layer."""
    table = Table(
        title="Layer by layer, root mean square",
        caption="Gradients are those of the first S, and in training of the loss.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("module", style="bold", no_wrap=True)
    for name in looks:
        table.add_column(f"{name}\nvalue", justify="right", style="cyan", no_wrap=True)
        table.add_column("\ngrad", justify="right", style="magenta", no_wrap=True)
    for site in next(iter(looks.values())).sites:
        row = [site.name]
        for taps in looks.values():
            row += [f"{rms(x[site.name]):.1e}" for x in (taps.values, taps.grads)]
        table.add_row(*row)
    return table


def names_of(mixture: Mixture) -> tuple[list[str], list[str]]:
    """Return the names of the inputs and of the pairs, for tables and plots."""
    many = len(mixture.names) > 1
    charges = [f"Z({name})" if many else "Z" for name in mixture.names]
    pairs = zip(*np.triu_indices(len(mixture.names)), strict=True)
    return ["T", "rho", *charges, "k"], [mixture.names[a] + mixture.names[b] for a, b in pairs]


def sensitivity_tables(
    mixture: Mixture, state: Sequence[float], k: Any, network: Any, solver: Any
) -> list[Table]:
    """Make a table for each pair: the change of S for a relative change of an input, at ten k."""
    inputs, pairs = names_of(mixture)
    x = rows_of(state, k)
    digits = 3 if len(inputs) < 5 else 2  # 80 columns
    told = ", ".join(f"{name} = {v:g}" for name, v in zip(inputs[:-1], state, strict=True))
    tables = []
    for i, pair in enumerate(pairs):
        title = f"x dS/dx of S {pair} at {told}: network (solver)"
        table = Table(
            "k", *inputs, title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
        )
        for column in table.columns:
            column.justify, column.no_wrap = "right", True
        for j in range(0, len(x), max(1, len(x) // 10)):
            both = zip(network[j, i] * x[j], solver[j, i] * x[j], strict=True)
            cells = (f"{a:+.{digits}f} [dim]({b:+.{digits}f})[/]" for a, b in both)
            table.add_row(f"{x[j, -1]:.1f}", *cells)
        tables.append(table)
    return tables


def plot(
    mixture: Mixture,
    model: NNModel,
    states: Sequence[Sequence[float]],
    state: Sequence[float],
    k: np.ndarray,
    network: np.ndarray,
    solver: np.ndarray,
) -> Figure:
    """Plot S of the network and the solver above, and the sensitivities for one state below."""
    inputs, pairs = names_of(mixture)
    figure = Figure(figsize=(4 + 3 * len(pairs), 5.6), layout="constrained")
    axes = figure.subplots(2, len(pairs), squeeze=False)
    T, rho, Z = np.asarray(states)[:, 0], np.asarray(states)[:, 1], np.asarray(states)[:, 2:]
    true = mixture.structure_factors(T, rho, Z, k, **GRID)
    true = true[..., *np.triu_indices(len(mixture.names))]
    learned = model(np.stack([rows_of(one, k) for one in states]).astype(np.float32))
    x = rows_of(state, k)
    for i, pair in enumerate(pairs):
        above, below = axes[:, i]
        for j, colour in zip(range(len(states)), COLOURS, strict=False):
            above.plot(k, true[j, :, i], color=colour, lw=1.2, label=f"T = {T[j]:g} eV")
            above.plot(k[::5], learned[j, ::5, i], "o", color=colour, ms=3, mfc="white")
        for j, colour in zip(range(len(inputs)), COLOURS, strict=False):
            of_solver, of_network = (d[:, i, j] * x[:, j] for d in (solver, network))
            below.plot(k, of_solver, color=colour, lw=1.2, label=inputs[j])
            below.plot(k[::5], of_network[::5], "o", color=colour, ms=3, mfc="white")
        above.set(title=f"S {pair}")
        below.set(xlabel="k (1/Å)")
    axes[0, 0].set(ylabel="S(k)")
    axes[1, 0].set(ylabel=f"x dS/dx at {state[0]:g} eV")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.axhline(0, color="0.85", lw=0.8, zorder=0)
    for axis in axes[:, -1]:
        axis.legend(frameon=False, fontsize=8)
    told = zip(inputs[1:-1], state[1:], strict=True)
    told = ", ".join(f"{name} = {value:g}" for name, value in told)
    figure.suptitle(f"Lines: the solver. Circles: the network. {told}", fontsize=10)
    return figure
