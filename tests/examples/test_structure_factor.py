"""The hypernetted-chain solver of examples/structure_factor, against theory, literature, itself,
and an independent solver.

Lengths are in Wigner-Seitz radii. Sources of published numbers:
[N] K.-C. Ng, J. Chem. Phys. 61, 2680 (1974), abstract: HNC energies of the one-component plasma.
[D] the fit to these energies for Gamma >= 20 that reviews of the plasma quote. The digits are from
    memory, but the energies at four couplings agree with them to 3e-5.
[S] W. L. Slattery, G. D. Doolen, H. E. DeWitt, Phys. Rev. A 21, 2087 (1980): Monte Carlo, fitted;
    the coefficients are also from memory of reviews.
[W] K. Wuensch, thesis, University of Warwick (2011), Fig. 4.12, as read off by the jaxrts project
    (tests/data/Wunsch2011): HNC for C4+ and H+, 2.5e23 per cm^3 each, 2e4 K, screened over 2/3 of
    a Bohr radius (the length that jaxrts finds; the figure does not say).
"""

import doctest
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.structure_factor.hnc import Grid, solve
from examples.structure_factor.plasma import CARBON, POLYSTYRENE, Mixture

pytestmark = pytest.mark.once

GAMMAS = np.array([1.0, 10.0, 50.0, 100.0])
SMALL = {"points": 511, "length": 25.0}
WIDE = {"points": 4095, "length": 160.0}  # for screening lengths of many radii


def only(result, k):
    return result.at(k)[..., 0, 0]


@pytest.fixture(scope="module")
def ocp():
    return solve(GAMMAS)


def plain_hnc(gamma, kappa, points=400, length=20.0, tol=1e-11):
    """Solve one component by damped iteration in NumPy, with other transforms, split and unknowns.

    The separated potential is gamma (exp(-kappa r) - exp(-b r)) / r, whose transform is the
    difference of two Yukawa potentials; the transforms are matrix products on midpoints.
    """
    b, n = 4.0, 3 / (4 * np.pi)
    dr, dk = length / points, np.pi / length
    r, k = dr * (np.arange(points) + 0.5), dk * (np.arange(points) + 0.5)
    wave = np.sin(np.outer(k, r))
    short = gamma * np.exp(-b * r) / r
    long_k = 4 * np.pi * gamma * (1 / (k**2 + kappa**2) - 1 / (k**2 + b**2))
    c = np.zeros(points)
    for _ in range(20000):
        ck = 4 * np.pi * dr * (wave @ (r * c)) / k
        total = ck - long_k
        y = dk / (2 * np.pi**2) * (wave.T @ (k * (total / (1 - n * total) - ck))) / r
        new = np.exp(y - short) - 1 - y
        if np.abs(new - c).max() < tol:
            return k, 1 / (1 - n * total), r, np.exp(y - short)
        c += 0.2 * (new - c)
    raise AssertionError("the plain solver did not converge")


def test_docstrings_of_the_solver_run():
    for name in ("hnc", "plasma"):
        module = importlib.import_module(f"examples.structure_factor.{name}")
        assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(("gamma", "kappa"), [(0.5, 0.0), (5.0, 0.0), (5.0, 1.3), (20.0, 2.0)])
def test_against_a_plain_solver(gamma, kappa):
    k, S, r, g = plain_hnc(gamma, kappa)
    ours = solve(gamma, kappa=kappa)
    np.testing.assert_allclose(only(ours, k[:120]), S[:120], atol=3e-5)
    np.testing.assert_allclose(np.interp(r[10:100], ours.r, ours.g[0, 0]), g[10:100], atol=2e-3)


def test_small_wavenumbers_show_perfect_screening(ocp):
    """S goes to k^2 / (3 Gamma)."""
    k = np.array([1e-4, 1e-3])
    np.testing.assert_allclose(only(ocp, k) / k**2 * 3 * GAMMAS[:, None], 1, rtol=1e-5)
    assert (only(ocp, np.zeros(1)) == 0).all()


@pytest.mark.parametrize("gamma", [0.01, 0.03])
def test_compressibility_of_a_weakly_coupled_plasma(gamma):
    """k^2/S = 3 Gamma + k^2 d(beta p)/dn: Debye and Hueckel give 1 - (3^0.5/4) Gamma^1.5 for it."""
    k = np.array([0.02])
    ours = solve(gamma, **WIDE)
    stiffness = 1 / only(ours, k) - 3 * gamma / k**2
    assert stiffness == pytest.approx(1 - 3**0.5 / 4 * gamma**1.5, abs=gamma**2)


@pytest.mark.parametrize("gamma", [1e-3, 1e-2])
def test_weak_coupling_gives_the_formula_of_debye_and_hueckel(gamma):
    k = np.linspace(0.02, 3, 40)
    S = only(solve(gamma, **WIDE), k)
    np.testing.assert_allclose(S, k**2 / (k**2 + 3 * gamma), atol=gamma**1.5)


def test_energies_are_those_of_the_literature():
    """[D]: -0.900470 G + 0.2688263 G^0.5 + 0.0719925 ln G + 0.0537919."""
    gamma = np.array([20.0, 50.0, 100.0, 160.0])
    fit = -0.900470 * gamma + 0.2688263 * gamma**0.5 + 0.0719925 * np.log(gamma) + 0.0537919
    np.testing.assert_allclose(solve(gamma).energy(), fit, atol=5e-5)


def test_published_monte_carlo_energies():
    """Compare with [S]; [N] says that HNC is off by less than 0.8% from 20 to 160, here 0.4%."""
    gamma = np.array([1.0, 20.0, 100.0, 160.0])
    exact = -0.897744 * gamma + 0.95043 * gamma**0.25 + 0.18956 * gamma**-0.25 - 0.81487
    off = solve(gamma).energy() / exact - 1
    assert (np.abs(off) < 0.008).all() and (np.abs(off[1:]) > 0.004).all()


def test_energy_from_structure_factor(ocp):
    """u = Gamma/pi int (S - 1) dk, by Parseval's theorem; so S has the published energies."""
    total = (ocp.S[:, 0, 0] - 1).sum(-1) * ocp.k[0] - ocp.k[0] / 2
    np.testing.assert_allclose(GAMMAS / np.pi * total, ocp.energy(), rtol=3e-4)


def test_order_grows_with_coupling(ocp):
    """The first peak comes near the first reciprocal vector of the bcc crystal, k = 4.37, and is
    below the 2.85 of a liquid that freezes (Hansen and Verlet)."""
    k = np.linspace(3.5, 5.5, 401)
    S = only(ocp, k)
    peak, place = S.max(-1), k[S.argmax(-1)]
    assert peak[0] < 1.001 and (np.diff(peak) > 0).all()
    np.testing.assert_allclose(place[2:], 4.37, atol=0.15)
    assert 1.5 < peak[3] < 2.85
    assert (ocp.S[:, 0, 0] > 0).all() and (ocp.g > -1e-12).all()


def test_published_two_component_structure_factors():
    """Compare with [W], whose lines and screening are known to about 0.005."""
    lines = {
        (0, 0): [
            (0.835, 0.9456),
            (2.079, 0.8958),
            (3.219, 0.8209),
            (4.048, 0.8969),
            (5.207, 1.0022),
        ],
        (0, 1): [
            (0.191, -0.3137),
            (2.264, -0.3596),
            (3.192, -0.2454),
            (4.668, 0.0941),
            (6.015, 0.0217),
        ],
        (1, 1): [
            (0.192, 0.1562),
            (2.059, 0.3574),
            (3.054, 0.8816),
            (3.851, 1.2601),
            (5.819, 0.9286),
        ],
    }
    a = (3 / (4 * np.pi * 0.5)) ** (1 / 3)
    gamma, kappa = 14.3996 / (a * 2e4 * 8.617333e-5), a / (2 / 3 * 0.529177)
    ours = solve(gamma, charges=[1.0, 4.0], kappa=kappa, **SMALL)
    for (i, j), points in lines.items():
        k, S = np.array(points).T
        np.testing.assert_allclose(ours.at(k)[:, i, j], S, atol=0.015)


@pytest.mark.parametrize(
    "case",
    [
        {"kappa": 1.0},
        pytest.param({}, marks=pytest.mark.many),
        pytest.param({"charges": [1.0, 3.0], "fractions": [0.7, 0.3]}, marks=pytest.mark.many),
    ],
)
def test_finer_and_longer_grid(case):
    k = np.linspace(0, 8, 60)
    gamma = np.array([1.0, 2.0, 4.0, 8.0])
    coarse, usual = solve(gamma, **SMALL, **case), solve(gamma, **case)
    fine = solve(gamma, points=2047, length=60.0, **case)
    assert np.abs(usual.at(k) - fine.at(k)).max() < 2e-6
    assert np.abs(coarse.at(k) - fine.at(k)).max() < 2e-5


def test_interpolation_is_the_solution_on_the_grid(ocp):
    np.testing.assert_allclose(only(ocp, ocp.k[::50]), ocp.S[:, 0, 0, ::50], atol=1e-10)


def test_coarse_grid_at_strong_coupling():
    k = np.linspace(0, 8, 60)
    assert np.abs(solve(100.0, **SMALL).at(k) - solve(100.0).at(k)).max() < 5e-4


def test_two_species_that_are_one(ocp):
    two = solve(GAMMAS, charges=[1.0, 1.0], fractions=[0.3, 0.7])
    np.testing.assert_allclose(two.g[:, 0, 0], ocp.g[:, 0, 0], atol=1e-7)
    np.testing.assert_allclose(two.g[:, 0, 1], ocp.g[:, 0, 0], atol=1e-7)
    root = np.sqrt([0.3, 0.7])
    np.testing.assert_allclose(
        np.einsum("sabk,a,b->sk", two.S, root, root), ocp.S[:, 0, 0], atol=1e-7
    )
    np.testing.assert_allclose(two.energy(), ocp.energy(), rtol=1e-8)


def test_species_are_exchanged_and_symmetric():
    k = np.linspace(0, 8, 20)
    ab = solve(2.0, charges=[1.0, 4.0], fractions=[0.8, 0.2], kappa=0.5, **SMALL)
    ba = solve(2.0, charges=[4.0, 1.0], fractions=[0.2, 0.8], kappa=0.5, **SMALL)
    assert (ab.S.swapaxes(0, 1) == ab.S).all()
    np.testing.assert_allclose(ba.at(k), ab.at(k)[:, ::-1, ::-1], atol=1e-8)


@pytest.mark.many
def test_two_equal_species_of_three_act_as_one():
    k = np.linspace(0, 8, 20)
    three = solve(3.0, charges=[1.0, 1.0, 4.0], fractions=[0.2, 0.3, 0.5], kappa=0.5, **SMALL)
    two = solve(3.0, charges=[1.0, 4.0], fractions=[0.5, 0.5], kappa=0.5, **SMALL)
    turn = np.zeros((2, 3))
    turn[0, :2], turn[1, 2] = np.sqrt([0.4, 0.6]), 1
    np.testing.assert_allclose(turn @ three.at(k) @ turn.T, two.at(k), atol=1e-8)


def test_charge_neutrality_of_a_mixture():
    """The charge structure factor of an unscreened mixture vanishes as k^2 / (3 Gamma)."""
    charges, root = np.array([1.0, 4.0]), np.sqrt([0.6, 0.4])
    k = np.array([0.0, 1e-3])
    S = solve(2.0, charges=charges, fractions=root**2, **SMALL).at(k)
    total = np.einsum("kab,a,b->k", S, charges * root, charges * root)
    np.testing.assert_allclose(total, k**2 / 6, atol=1e-12)


def test_the_effect_of_weak_screening_vanishes(ocp):
    k = np.linspace(0.5, 8, 40)
    off = [
        np.abs(only(solve(GAMMAS, kappa=kappa), k) - only(ocp, k)).max() for kappa in (0.02, 0.01)
    ]
    assert off[1] < 1e-4 and off[0] / off[1] == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize(("gamma", "kappa"), [(0.2, 1.0), (20.0, 2.0), (100.0, 3.0)])
def test_compressibility_of_screened_ions(gamma, kappa):
    """S(0) = 1 + n int h: each ion repels others. Correlations soften the mean field."""
    ours = solve(gamma, kappa=kappa)
    S0 = only(ours, np.zeros(1))[0]
    h = ours.g[0, 0] - 1
    assert 0 < S0 < 1
    assert pytest.approx(1 + 3 * (h * ours.r**2).sum() * ours.r[0], abs=1e-6) == S0
    assert 1 < 1 / S0 < 1 + 3 * gamma / kappa**2


def test_weakly_coupled_screened_ions():
    """The mean field alone: S = (k^2 + kappa^2) / (k^2 + kappa^2 + 3 Gamma)."""
    k = np.linspace(0, 3, 20)
    S = only(solve(0.01, kappa=1.0), k)
    np.testing.assert_allclose(S, (k**2 + 1) / (k**2 + 1.03), atol=2e-4)


def test_a_solution_that_does_not_converge_says_so():
    few = solve(np.array([0.1, 100.0]), iterations=8, **SMALL)
    assert few.converged.tolist() == [True, False]
    assert few.residual[1] > 1e-9 and few.iterations[1] >= 8
    for x in (few.S, few.g, few.c, few.at([1.0]), few.energy()):
        assert np.isnan(x[1]).all() and np.isfinite(x[0]).all()


@pytest.mark.many
def test_many_states_at_once():
    gamma, kappa = np.linspace(1, 350, 60), np.array([[0.0], [1.0], [4.0]])
    many = solve(gamma, kappa=kappa, **SMALL)
    assert many.converged.all() and many.S.shape == (3, 60, 1, 1, 511)
    one = solve(gamma[17], kappa=1.0, **SMALL)
    np.testing.assert_allclose(many.S[1, 17], one.S, atol=1e-6)


def test_bits_are_a_matter_of_the_call():
    before = jax.config.jax_enable_x64
    ours = solve(1.0, **SMALL)
    assert ours.S.dtype == ours.at([1.0]).dtype == ours.energy().dtype == np.float64
    assert jax.config.jax_enable_x64 == before
    with jax.enable_x64(False), pytest.raises(TypeError, match="gamma is traced as float32"):
        jax.jit(lambda g: solve(g, **SMALL).S)(1.0)
    with jax.enable_x64(True):
        traced = jax.jit(lambda g: solve(g, **SMALL).S)(1.0)
    np.testing.assert_allclose(traced, ours.S, atol=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma": -1.0}, "gamma is -1.0, and must be finite and not negative."),
        ({"gamma": np.nan}, "gamma is nan, and must be finite and not negative."),
        ({"gamma": 0.0}, "gamma is 0.0, and must be greater than zero."),
        ({"gamma": 1.0, "kappa": -1.0}, "kappa is -1.0, and must be finite and not negative."),
        (
            {"gamma": 1.0, "charges": [1.0, 2.0], "fractions": [0.3, 0.3]},
            "fractions is [0.3 0.3], and its sum over the species must be 1.",
        ),
        (
            {"gamma": 1.0, "charges": [1.0, 2.0], "fractions": [1.0]},
            "charges has the shape (2,) and fractions (1,); the last axis of both must be the "
            "species.",
        ),
        (
            {"gamma": 1.0, "charges": 1.0},
            "charges has the shape () and fractions (1,); the last axis of both must be the "
            "species.",
        ),
    ],
)
def test_bad_input_of_the_solver(arguments, message):
    with pytest.raises(ValueError) as error:
        solve(**arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"points": 3}, "points is 3, and must be an integer of at least 16."),
        ({"points": 99.5}, "points is 99.5, and must be an integer of at least 16."),
        ({"length": -1.0}, "length is -1.0, and must be a number of at least 1.0."),
        ({"tolerance": np.nan}, "tolerance is nan, and must be a number of at least 1e-13."),
        ({"iterations": 0}, "iterations is 0, and must be an integer of at least 1."),
    ],
)
def test_bad_numbers_of_a_grid(grid, message):
    with pytest.raises(ValueError) as error:
        solve(1.0, **grid)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("k", "message"),
    [
        (1.0, "k is 1.0, and must have an axis of wave numbers, its last."),
        (
            [-1.0, 2.0],
            "k goes from -1 to 2, and must be within 0 and 64.21, the largest of this grid.",
        ),
        ([99.0], "k goes from 99 to 99, and must be within 0 and 64.21, the largest of this grid."),
        (
            [np.nan],
            "k goes from nan to nan, and must be within 0 and 64.21, the largest of this grid.",
        ),
    ],
)
def test_bad_wave_numbers_are_refused(k, message):
    with pytest.raises(ValueError) as error:
        solve(1.0, **SMALL).at(k)
    assert str(error.value) == message


def test_a_bad_grid_is_refused():
    with pytest.raises(
        TypeError, match="solve got the argument 'point', and a grid has only points"
    ):
        solve(1.0, point=3)
    assert Grid._fields[:2] == ("points", "length")


@pytest.mark.many
def test_derivatives_of_a_mixture():
    """Forward and backward derivatives agree with differences, in every parameter and in k."""

    def S(p):
        state = solve(p[0], charges=p[1:3], fractions=jnp.array([0.4, 0.6]), kappa=p[3], **SMALL)
        return state.at(p[4:]).ravel()

    with jax.enable_x64(True):
        p = jnp.array([15.0, 1.0, 2.0, 0.6, 0.7, 4.1])
        w, t = (np.random.default_rng(i).normal(size=n) for i, n in enumerate((8, 6)))
        backwards = jax.jit(lambda p: jax.vjp(S, p)[1](w)[0])(p)
        forwards = jax.jit(lambda p: jax.jvp(S, (p,), (t,))[1])(p)
        step = 1e-4 * np.eye(len(p))
        differences = np.stack([(S(p + e) - S(p - e)) / 2e-4 for e in step], -1)
    np.testing.assert_allclose(backwards, w @ differences, atol=1e-6)
    np.testing.assert_allclose(forwards, differences @ t, atol=1e-6)


@pytest.mark.many
def test_derivatives_of_many_states():
    """The integral of dS/dGamma gives S."""
    with jax.enable_x64(True):
        nodes, weights = np.polynomial.legendre.leggauss(8)
        gamma = jnp.asarray(20 + 10 * nodes)
        peak = lambda g: solve(g, **SMALL).at(jnp.array([4.3]))[0, 0, 0]
        slope = jax.jit(jax.vmap(jax.grad(peak)))(gamma)
        total = 10 * (slope * weights).sum()
        ends = only(solve(np.array([10.0, 30.0]), **SMALL), np.array([4.3]))[:, 0]
    assert total == pytest.approx(ends[1] - ends[0], abs=1e-8)


def test_units_of_a_carbon_plasma():
    """Carbon of 2.267 g/cm^3 has 1.137e23 atoms per cm^3; at 1 eV and Z = 1 Gamma is 11.3."""
    gamma, kappa, a = CARBON.dimensionless(1.0, 2.267, [1.0])
    n = 2.267 / (12.011 * 1.66053907e-24)
    a_cm = (3 / (4 * np.pi * n)) ** (1 / 3)
    assert a == pytest.approx(a_cm * 1e8, rel=1e-7)
    joule = 1.602176634e-19
    assert gamma == pytest.approx(joule**2 / (4 * np.pi * 8.8541878128e-12 * a_cm * 1e-2 * joule))
    hot = CARBON.dimensionless(1e6, 2.267, [1.0])[1]
    assert hot == pytest.approx((3 * CARBON.dimensionless(1e6, 2.267, [1.0])[0]) ** 0.5, rel=1e-6)
    cold = CARBON.dimensionless(1e-6, 2.267, [1.0])[1] / a
    fermi = (1.054571817e-34 * (3 * np.pi**2 * n * 1e6) ** (1 / 3)) ** 2 / (2 * 9.1093837e-31)
    thomas = (1.5 * n * 1e6 * joule**2 / (8.8541878128e-12 * fermi)) ** 0.5 * 1e-10
    assert cold == pytest.approx(thomas, rel=1e-6)
    bare = Mixture(("C",), (12.011,), (1.0,), screened=False)
    assert bare.dimensionless(1.0, 2.267, [1.0])[1] == 0


@pytest.mark.many
def test_mixture_in_physical_units():
    T, rho, Z = np.array([10.0, 20.0]), np.array([1.0, 2.0]), np.array([[4.0, 1.0], [3.0, 1.0]])
    k = np.array([0.5, 3.0])
    S = POLYSTYRENE.structure_factors(T, rho, Z, k, **SMALL)
    assert S.shape == (2, 2, 2, 2)
    gamma, kappa, a = POLYSTYRENE.dimensionless(T[1], rho[1], Z[1])
    np.testing.assert_allclose(
        S[1], solve(gamma, Z[1], [0.5, 0.5], kappa, **SMALL).at(k * a), atol=1e-8
    )
    with pytest.raises(ValueError, match="its last axis must be the 2 species C, H"):
        POLYSTYRENE.solve(10.0, 1.0, [4.0])
