r"""The hypernetted-chain (HNC) closure for plasmas of any number of ion species, in JAX.

Ions of charges Z_a and number fractions x_a repel each other through

    u_ab(r) / kT = Gamma Z_a Z_b exp(-kappa r) / r,    Gamma = e^2 / (4 pi eps0 a kT),

in a background that makes the plasma neutral. Lengths are in units of the Wigner-Seitz radius a of
all ions together, 4 pi n a^3 / 3 = 1; `kappa = 0` is the Coulomb potential, and one species of
charge 1 is then the one-component plasma (OCP). `plasma.py` turns temperatures and densities into
these numbers.

    >>> from examples.structure_factor.hnc import solve
    >>> ocp = solve(10.0)
    >>> bool(ocp.converged), round(float(ocp.energy()), 3)
    (True, -7.935)
    >>> ocp.at([0.0, 4.5])[:, 0, 0].round(3)
    array([0.   , 1.109])

The pair correlations h = g - 1 and the direct correlations c obey

    g = exp(-u/kT + h - c),      S = 1 + n^(1/2) H n^(1/2) = (1 - n^(1/2) C n^(1/2))^(-1),

the closure, and the Ornstein-Zernike equation, a matrix equation for each k. Far away, c behaves
like -u/kT, and its transform like 1/k^2 for small k. So the solver subtracts from both the part of
u that is smooth at the origin (Ng 1974). Its transform is

    4 pi Gamma Z_a Z_b exp(-(k^2 + kappa^2) / 4 alpha^2) / (k^2 + kappa^2),

for kappa = 0 that of Gamma Z_a Z_b erf(alpha r) / r. The remainders c_s = c + u_long/kT and
y = h - c_s are short-ranged, smooth, and small enough at both ends for the sine transforms. The
unknown is r y(r). Anderson acceleration of a damped iteration finds the fixed point of one pass
through both equations.

The solver computes in 64 bits, whatever the setting of JAX: `solve` enables them for the call.
The solution is differentiable in all its parameters, forwards and backwards, by the implicit
function theorem: take gradients under `jax.enable_x64(True)`.

A state that does not converge has NaN in every array, and its `residual` says how far it is from a
solution. A derivative is NaN, too, if its linear equations cannot be solved.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.scipy.special import erfc

ALPHA = 1.0  # the inverse length at which the potential is split, in 1/a
DENSITY = 3 / (4 * np.pi)  # of all ions, in 1/a^3


class Grid(NamedTuple):
    """`points` radii up to `length`, as many wave numbers, and the options of the iteration."""

    points: int = 1023
    length: float = 40.0
    tolerance: float = 1e-9
    iterations: int = 300
    memory: int = 6
    damping: float = 0.5

    @property
    def r(self) -> Array:
        return self.length / (self.points + 1) * jnp.arange(1.0, self.points + 1)

    @property
    def k(self) -> Array:
        return jnp.pi / self.length * jnp.arange(1.0, self.points + 1)


class Parameters(NamedTuple):
    gamma: Array  # []
    charges: Array  # [species]
    fractions: Array  # [species]
    kappa: Array  # []


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["r", "g", "k", "S", "c", "residual", "iterations", "converged", "parameters"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Result:
    """The result of `solve`. The axes of states come first; a and b are species."""

    r: Array  # [N], in units of a
    g: Array  # [..., a, b, N]
    k: Array  # [N], in units of 1/a
    S: Array  # [..., a, b, N]
    c: Array  # [..., a, b, N], the direct correlation without its long-ranged part
    residual: Array  # [...], the largest change of h - c in one more pass
    iterations: Array  # [...]
    converged: Array  # [...]
    parameters: Parameters

    def at(self, k: Any) -> Array:
        """Compute S, [..., K, a, b], at any k >= 0 of shape [K] or [..., K]; exact on this grid."""
        with jax.enable_x64(True):
            _check_traced("k", k)
            if np.ndim(k) == 0:
                raise ValueError(f"k is {k}, and must have an axis of wave numbers, its last.")
            highest = self.k[-1]
            if not isinstance(k, Tracer) and not isinstance(highest, Tracer):
                given = np.asarray(k, float)
                if not ((given >= 0) & (given <= highest)).all():  # NaN is neither
                    raise ValueError(
                        f"k goes from {given.min():g} to {given.max():g}, and must be within 0 and "
                        f"{highest:.4g}, the largest of this grid."
                    )
            k = jnp.asarray(k, jnp.float64)
            k = jnp.broadcast_to(k, (*self.converged.shape, k.shape[-1]))
            return _concrete(_structure_at_all(self.c, self.r, self.parameters, k))

    def energy(self) -> Array:
        """Compute the excess energy per ion over kT; for screened ions, without the mean field."""
        with jax.enable_x64(True):
            r, dr = self.r, self.r[0]
            gamma, charges, fractions, kappa = self.parameters
            weight = fractions * charges
            h = jnp.einsum("...abn,...a,...b->...n", self.g - 1, weight, weight)
            # The trapezoid rule, with its error from r = 0, where r h has the slope -1.
            sums = (h * r * jnp.exp(-kappa[..., None] * r)).sum(-1) * dr
            return _concrete(1.5 * gamma * (sums - weight.sum(-1) ** 2 * dr**2 / 12))


def solve(
    gamma: Any, charges: Any = (1.0,), fractions: Any = None, kappa: Any = 0.0, **grid: Any
) -> Result:
    """Solve the HNC equations for one state or many.

    `gamma` and `kappa` have any shape. `charges` and `fractions` have one more axis, the last, for
    the species. All are broadcast, and all states are solved together. `grid` has fields of `Grid`.
    """
    unknown = set(grid) - set(Grid._fields)
    if unknown:
        raise TypeError(
            f"solve got the argument {sorted(unknown)[0]!r}, and a grid has only "
            f"{', '.join(Grid._fields)}."
        )
    _check_grid(Grid(**grid))
    with jax.enable_x64(True):
        if fractions is None:
            species = (np.shape(charges) or (1,))[-1]
            fractions = np.full(species, 1 / max(1, species))
        given = Parameters(gamma, charges, fractions, kappa)
        _check(given)
        given = Parameters(*(jnp.asarray(x, jnp.float64) for x in given))
        states = jnp.broadcast_shapes(
            given.gamma.shape,
            given.kappa.shape,
            given.charges.shape[:-1],
            given.fractions.shape[:-1],
        )
        species = given.charges.shape[-1]
        shapes = (states, (*states, species), (*states, species), states)
        parameters = Parameters(*map(jnp.broadcast_to, given, shapes))
        return _concrete(_solve_all(parameters, Grid(**grid)))


def _concrete(tree: Any) -> Any:
    """Convert arrays to NumPy, so that they keep 64 bits; leave traced values as they are."""
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))
    return tree if traced else jax.tree.map(np.asarray, tree)


def _check_traced(name: str, value: Any) -> None:
    if isinstance(value, Tracer) and value.dtype != jnp.float64:
        raise TypeError(
            f"{name} is traced as {value.dtype}, and the solver needs float64: make the call that "
            "traces it under `with jax.enable_x64(True):`."
        )


def _check_grid(grid: Grid) -> None:
    least = Grid(16, 1.0, 1e-13, 1, 1, 0.0)
    for name, value in grid._asdict().items():
        low = getattr(least, name)
        if not isinstance(value, (int, type(low))) or not low <= value < np.inf:
            kind = "an integer" if isinstance(low, int) else "a number"
            raise ValueError(f"{name} is {value!r}, and must be {kind} of at least {low}.")


def _check(given: Parameters) -> None:
    for name, value in given._asdict().items():
        _check_traced(name, value)
        if isinstance(value, Tracer):
            continue
        value = np.asarray(value, float)
        if value.size == 0 or not np.isfinite(value).all() or not (value >= 0).all():
            raise ValueError(f"{name} is {value}, and must be finite and not negative.")
        if name != "kappa" and not (value > 0).all():
            raise ValueError(f"{name} is {value}, and must be greater than zero.")
        if name == "fractions" and not np.allclose(value.sum(-1), 1, atol=1e-9):
            raise ValueError(f"fractions is {value}, and its sum over the species must be 1.")
    a, b = np.shape(given.charges), np.shape(given.fractions)
    if not a or not b or a[-1] != b[-1]:
        raise ValueError(
            f"charges has the shape {a} and fractions {b}; the last axis of both must be the "
            "species."
        )


@partial(jax.jit, static_argnums=1)
def _solve_all(parameters: Parameters, grid: Grid) -> Result:
    one = partial(_solve_one, grid=grid)
    for _ in range(parameters.gamma.ndim):
        one = jax.vmap(one)
    g, c, S, residual, iterations = one(parameters)
    converged = residual <= grid.tolerance
    ok = converged[..., None, None, None]
    g, c, S = (jnp.where(ok, x, jnp.nan) for x in (g, c, S))
    return Result(grid.r, g, grid.k, S, c, residual, iterations, converged, parameters)


def _solve_one(parameters: Parameters, grid: Grid) -> tuple[Array, ...]:
    x, residual, iterations = _fixed_point(parameters, grid)
    h, c, _, S = _turn(x, parameters, grid)
    return h + 1, c, S, residual, iterations


def _sine(x: Array) -> Array:
    """sum_j x_j sin(pi i j / (N + 1)), along the last axis: its own inverse, times 2 / (N + 1)."""
    zero = jnp.zeros_like(x[..., :1])
    odd = jnp.concatenate([zero, x, zero, -x[..., ::-1]], -1)
    return -jnp.fft.rfft(odd).imag[..., 1:-1] / 2


def _short(r: Array, kappa: Array) -> Array:
    """Compute exp(-kappa r) / r without its smooth, long-ranged part."""
    low, high = ALPHA * r - kappa / (2 * ALPHA), ALPHA * r + kappa / (2 * ALPHA)
    # erfc is zero beyond 26.6, where the exponential in front of it may be infinite.
    near = high < 26
    rising = jnp.exp(jnp.where(near, kappa * r, 0)) * erfc(jnp.where(near, high, 26))
    return (jnp.exp(-kappa * r) * erfc(low) + jnp.where(near, rising, 0)) / (2 * r)


def _structure(c: Array, parameters: Parameters, k: Array) -> Array:
    """Compute S from n^(1/2) C_s n^(1/2) at one k: the inverse of M = 1 - c + (p/d) v v'.

    d goes to zero with k. So a reflection q turns the axis of v into the first one, and the first
    row is multiplied by d / (d + p). Then nothing is infinite, and nothing is lost to rounding.
    """
    gamma, charges, fractions, kappa = parameters
    v = jnp.sqrt(DENSITY * fractions) * charges
    d = k**2 + kappa**2
    p = 4 * jnp.pi * gamma * jnp.exp(-d / (4 * ALPHA**2))
    norm2, one = v @ v, jnp.eye(len(v))
    w = v / jnp.sqrt(norm2) + one[0]
    q = one - 2 * jnp.outer(w, w) / (w @ w)
    row = jnp.where(jnp.arange(len(v)) == 0, d / (d + p), 1.0)
    scaled = row[:, None] * (q @ (one - c) @ q) + p / (d + p) * norm2 * jnp.outer(one[0], one[0])
    S = q @ (_inverse(scaled) * row) @ q
    return (S + S.T) / 2


def _inverse(m: Array) -> Array:
    """Invert a small matrix. LAPACK takes one at a time, and so is slow for thousands of them."""
    if len(m) == 1:
        return 1 / m
    if len(m) == 2:
        (a, b), (c, d) = m
        return jnp.array([[d, -b], [-c, a]]) / (a * d - b * c)
    return jnp.linalg.inv(m)


def _turn(x: Array, parameters: Parameters, grid: Grid) -> tuple[Array, Array, Array, Array]:
    """Pass once through both equations; return h, c_s, the new r (h - c_s), and S."""
    gamma, charges, fractions, kappa = parameters
    r, k = grid.r, grid.k
    u = gamma * jnp.multiply.outer(jnp.outer(charges, charges), _short(r, kappa))
    # Bad first guesses need the bound, a pair correlation of 22026.
    h = jnp.expm1(jnp.minimum(x / r - u, 10.0))
    c = h - x / r
    root = jnp.sqrt(DENSITY * fractions)
    weight = jnp.outer(root, root)[..., None]
    ck = weight * (4 * jnp.pi * grid.length / (grid.points + 1)) * _sine(r * c) / k
    S = jax.vmap(_structure, in_axes=(-1, None, 0), out_axes=-1)(ck, parameters, k)
    yk = (S - jnp.eye(len(root))[..., None] - ck) / weight
    return h, c, _sine(k * yk) / (2 * jnp.pi * grid.length), S


class _Search(NamedTuple):
    """The state of Anderson acceleration: the last points, and the change of each in one pass."""

    x: Array
    xs: Array
    fs: Array
    filled: Array
    best_x: Array
    best_f: Array
    best: Array
    residual: Array
    iterations: Array


def _search(x: Array, parameters: Parameters, grid: Grid, tolerance: Array) -> _Search:
    r, memory, shape = grid.r, grid.memory, x.shape

    def step(state: _Search) -> _Search:
        x, xs, fs = state.x, state.xs, state.fs
        f = (_turn(x.reshape(shape), parameters, grid)[2]).ravel() - x
        residual = jnp.abs(f.reshape(shape) / r).max()
        # Undo an extrapolation that went astray, and forget the points that led to it.
        astray = ~(residual < 5 * state.best)
        better = residual < state.best
        best_x, best_f = jnp.where(better, x, state.best_x), jnp.where(better, f, state.best_f)
        # Combine the last points such that f would vanish if the pass were linear.
        tried = jnp.arange(memory) < state.filled
        dx = jnp.where(tried[:, None], x - xs, 0)
        df = jnp.where(tried[:, None], f - fs, 0)
        gram = df @ df.T
        gram += jnp.diag(jnp.where(tried, 1e-12 * jnp.trace(gram) + 1e-300, 1.0))
        mix = jnp.linalg.solve(gram, df @ f)
        new = x + grid.damping * f - mix @ (dx + grid.damping * df)
        slot = state.filled % memory
        # Return the point that was found to be a solution, not the next one.
        new = jnp.where(residual <= tolerance, x, new)
        return _Search(
            x=jnp.where(astray, best_x + grid.damping**2 * best_f, new),
            xs=xs.at[slot].set(x),
            fs=fs.at[slot].set(f),
            filled=jnp.where(astray, 0, state.filled + 1),
            best_x=best_x,
            best_f=best_f,
            best=jnp.where(better, residual, jnp.where(astray, 5 * state.best, state.best)),
            residual=residual,
            iterations=state.iterations + 1,
        )

    def going(state: _Search) -> Array:
        return ~(state.residual <= tolerance) & (state.iterations < grid.iterations)

    x, none = x.ravel(), jnp.zeros((memory, x.size))
    count, far = jnp.zeros((), jnp.int32), jnp.array(jnp.inf)
    start = _Search(x, none, none, count, x, jnp.zeros_like(x), far, far, count)
    found = lax.while_loop(going, step, start)
    return found._replace(x=found.x.reshape(shape))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _fixed_point(parameters: Parameters, grid: Grid) -> tuple[Array, Array, Array]:
    """Solve at a quarter of the coupling, from Debye and Hueckel (c_s = 0); then at all of it."""
    weak = parameters._replace(gamma=parameters.gamma / 4)
    species = len(parameters.charges)
    none = jnp.zeros((species, species))
    S = jax.vmap(_structure, in_axes=(None, None, 0), out_axes=-1)(none, weak, grid.k)
    root = jnp.sqrt(DENSITY * parameters.fractions)
    hk = (S - jnp.eye(species)[..., None]) / jnp.outer(root, root)[..., None]
    x = _sine(grid.k * hk) / (2 * jnp.pi * grid.length)

    def stage(x: Array, how: tuple[Array, Array]) -> tuple[Array, tuple[Array, ...]]:
        part, tolerance = how
        found = _search(x, parameters._replace(gamma=part * parameters.gamma), grid, tolerance)
        # h - c_s grows with the coupling, but less than linearly. From twice its value at a quarter
        # of the coupling, all tested states up to Gamma Z^2 = 350 converge. Plasmas crystallise
        # near 175.
        return 2 * found.x, (found.x, found.residual, found.iterations)

    stages = (jnp.array([0.25, 1.0]), jnp.array([0.03, grid.tolerance]))
    _, (xs, residuals, iterations) = lax.scan(stage, x, stages)
    residual = jnp.where(jnp.isnan(residuals[-1]), jnp.inf, residuals[-1])
    return xs[-1], residual, iterations.sum(dtype=jnp.int32)


@_fixed_point.defjvp
def _implicit(grid: Grid, primals: Any, tangents: Any) -> Any:
    """Differentiate x = F(x, p): dx = F_x dx + F_p dp."""
    (parameters,), (change,) = primals, tangents
    x, residual, iterations = _fixed_point(parameters, grid)
    _, moved = jax.jvp(lambda p: _turn(x, p, grid)[2], (parameters,), (change,))
    _, linear = jax.linearize(lambda x: _turn(x, parameters, grid)[2], x)

    def solve_linear(matvec: Any, b: Array) -> Array:
        y, _ = jax.scipy.sparse.linalg.bicgstab(matvec, b, tol=1e-11, maxiter=500)
        off = jnp.linalg.norm(matvec(y) - b) > 1e-7 * jnp.linalg.norm(b)
        return jnp.where(off, jnp.nan, y)

    dx = lax.custom_linear_solve(lambda y: y - linear(y), moved, solve_linear, solve_linear)
    still = np.zeros(jnp.shape(iterations), jax.dtypes.float0)
    return (x, residual, iterations), (dx, jnp.zeros_like(residual), still)


@jax.jit
def _structure_at_all(c: Array, r: Array, parameters: Parameters, k: Array) -> Array:
    one = _structure_at
    for _ in range(k.ndim - 1):
        one = jax.vmap(one, in_axes=(0, None, 0, 0))
    return one(c, r, parameters, k)


def _structure_at(c: Array, r: Array, parameters: Parameters, k: Array) -> Array:
    root = jnp.sqrt(DENSITY * parameters.fractions)
    waves = jnp.sinc(k[:, None] * r / jnp.pi)
    ck = 4 * jnp.pi * r[0] * jnp.einsum("kn,n,abn->kab", waves, r**2, c) * jnp.outer(root, root)
    return jax.vmap(_structure, in_axes=(0, None, 0))(ck, parameters, k)
