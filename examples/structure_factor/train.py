"""Make the data, and train the network on them.

The data are rows `[T, rho, Z_1, ..., k]`, and the upper triangle of S_ab for each row, from the
solver. States are uniform in log T, log rho and Z. Each state has one random k from each of several
equal intervals. The test data are whole states, not rows, because rows of one state resemble each
other.

    >>> from examples.structure_factor.plasma import CARBON
    >>> data = make_data(CARBON, states=20, points=8, quiet=True)
    >>> learned, held_out = split(data, held_out=0.25)
    >>> learned.x.shape, held_out.y.shape
    ((120, 4), (40, 1))

The train step is an ordinary one. Neither it nor the model mentions tapax.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from .model import NNModel
from .plasma import Mixture

GRID = {"points": 511, "length": 25.0}
CHUNK = 256  # states to solve together; all take as long as the slowest


@dataclass(frozen=True)
class Range:
    T: tuple[float, float] = (2.0, 100.0)
    rho: tuple[float, float] = (0.5, 10.0)
    Z: tuple[float, float] = (1.0, 4.0)
    k: tuple[float, float] = (0.0, 8.0)


RANGE = Range()


class Data(NamedTuple):
    x: np.ndarray  # [states * points, inputs]
    y: np.ndarray  # [states * points, pairs]
    points: int


def bar(what: str, unit: str, quiet: bool) -> Progress:
    parts = (what, BarColumn(), MofNCompleteColumn(), unit, TimeElapsedColumn())
    return Progress(*parts, disable=quiet)


def charges(mixture: Mixture, within: Range, rng: np.random.Generator, states: int) -> np.ndarray:
    """Draw a charge for each state and species, for hydrogen between a half and one."""
    limits = [(0.5, 1.0) if name == "H" else within.Z for name in mixture.names]
    return np.stack([rng.uniform(*limit, states) for limit in limits], -1)


def make_data(
    mixture: Mixture,
    states: int,
    points: int = 64,
    within: Range = RANGE,
    *,
    seed: int = 0,
    quiet: bool = False,
) -> Data:
    """Solve `states` random states; raise if one does not converge."""
    rng = np.random.default_rng(seed)
    T, rho = (np.exp(rng.uniform(*np.log(x), states)) for x in (within.T, within.rho))
    Z = charges(mixture, within, rng, states)
    edges = np.linspace(*within.k, points + 1)
    k = edges[:-1] + rng.uniform(size=(states, points)) * (edges[1] - edges[0])
    rows, columns = np.triu_indices(len(mixture.names))
    S = np.empty((states, points, len(rows)))
    with bar("solving", "states", quiet) as progress:
        task = progress.add_task("", total=states)
        for start in range(0, states, CHUNK):
            # The last chunk overlaps the one before, so that all have one size and compile once.
            part = slice(max(0, min(start, states - CHUNK)), min(start + CHUNK, states))
            found = mixture.structure_factors(T[part], rho[part], Z[part], k[part], **GRID)
            S[part] = found[..., rows, columns]
            progress.update(task, completed=part.stop)
    lost = np.isnan(S).any((1, 2))
    if lost.any():
        i = int(lost.argmax())
        raise RuntimeError(
            f"The solver did not converge for {lost.sum()} of {states} states, among them "
            f"T = {T[i]:.4g} eV, rho = {rho[i]:.4g} g/cm^3, Z = {Z[i]}."
        )
    state = np.repeat(np.concatenate([T[:, None], rho[:, None], Z], -1), points, 0)
    x = np.concatenate([state, k.reshape(-1, 1)], -1)
    return Data(x.astype(np.float32), S.reshape(len(x), -1).astype(np.float32), points)


def split(data: Data, held_out: float = 0.1) -> tuple[Data, Data]:
    """Split off the last states as test data; states are independent of each other."""
    states = len(data.x) // data.points
    rows = (states - round(held_out * states)) * data.points
    x, y, points = data
    return Data(x[:rows], y[:rows], points), Data(x[rows:], y[rows:], points)


@nnx.jit
def train_step(model: NNModel, optimizer: nnx.Optimizer, x: Any, y: Any) -> jax.Array:
    def loss_fn(model: NNModel) -> jax.Array:
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def new_optimizer(model: NNModel, steps: int, rate: float = 1e-2) -> nnx.Optimizer:
    schedule = optax.warmup_cosine_decay_schedule(0, rate, min(200, steps // 10), steps, rate / 1e3)
    return nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)


def train(
    data: Data, steps: int, batch: int = 512, *, seed: int = 0, quiet: bool = False
) -> tuple[NNModel, nnx.Optimizer]:
    """Train a model on `steps` batches, in epochs without repetition."""
    species = data.x.shape[1] - 3
    model = NNModel(species, data.x.max(0), rngs=nnx.Rngs(seed))
    optimizer = new_optimizer(model, steps)
    rng, order = np.random.default_rng(seed), np.empty(0, int)
    with bar("training", "steps  rms error {task.fields[error]:.1e}", quiet) as progress:
        task, recent = progress.add_task("", total=steps, error=np.nan), []
        for i in range(steps):
            if len(order) < batch:
                order = np.concatenate([order, rng.permutation(len(data.x))])
            now, order = order[:batch], order[batch:]
            recent.append(train_step(model, optimizer, data.x[now], data.y[now]))
            if (i + 1) % 100 == 0 or i + 1 == steps:  # fetching numbers waits for the device
                error = float(np.sqrt(np.mean(jax.device_get(recent))))
                progress.update(task, completed=i + 1, error=error)
                recent = []
    return model, optimizer


def errors(model: NNModel, data: Data) -> tuple[float, float]:
    """Return the root mean square error and the largest error of S over the data."""
    off = np.asarray(model(data.x), np.float64) - data.y
    return float(np.sqrt(np.mean(off**2))), float(np.abs(off).max())
