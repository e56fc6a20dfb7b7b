"""Convert temperatures, densities and charges to the units of the solver.

Units: T in eV, the mass density rho in g/cm^3, charges Z in elementary charges, k in 1/Angstrom.
The ions of a `Mixture` repel each other by a potential that the electrons screen, with a wave
number kappa between Debye's (hot) and Thomas and Fermi's (dense):

    kappa^2 = 4 pi e^2 n_e / sqrt(T^2 + (2 E_F / 3)^2),    n_e = sum of Z_a n_a.

    >>> from examples.structure_factor.plasma import CARBON, POLYSTYRENE
    >>> gamma, kappa, a = CARBON.dimensionless(T=10.0, rho=3.5, Z=[4.0])
    >>> f"{gamma * 4**2:.1f} {kappa:.2f} {a:.3f}"  # of two ions; in 1/a; in Angstrom
    '20.8 2.68 1.108'
    >>> S = POLYSTYRENE.structure_factors(T=10.0, rho=1.05, Z=[4.0, 1.0], k=[1.0, 4.0])
    >>> S.shape  # k, species, species
    (2, 2, 2)

The functions take NumPy arrays and JAX arrays; for traced values, they return traced values.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .hnc import Result, solve

E2 = 14.399645478  # e^2 / (4 pi eps0), eV Angstrom
HBAR2_2M = 3.8099821161  # hbar^2 / (2 m_e), eV Angstrom^2
AVOGADRO = 0.602214076  # atomic mass units in 1e-24 g, inverted: rho / mass in 1/Angstrom^3


@dataclass(frozen=True)
class Mixture:
    """Ion species with their masses (in u) and number fractions."""

    names: tuple[str, ...]
    masses: tuple[float, ...]
    fractions: tuple[float, ...]
    screened: bool = True

    def dimensionless(self, T: Any, rho: Any, Z: Any) -> tuple[Any, Any, Any]:
        """Compute `gamma` and `kappa` of `solve`, and the Wigner-Seitz radius a in Angstrom."""
        if np.shape(Z)[-1:] != (len(self.names),):
            raise ValueError(
                f"Z has the shape {np.shape(Z)}; its last axis must be the {len(self.names)} "
                f"species {', '.join(self.names)}."
            )
        Z, fractions = (Z if hasattr(Z, "shape") else np.asarray(Z)), np.asarray(self.fractions)
        n = AVOGADRO * rho / (fractions @ np.asarray(self.masses))
        a = (3 / (4 * np.pi * n)) ** (1 / 3)
        n_e = n * (Z * fractions).sum(-1)
        fermi = HBAR2_2M * (3 * np.pi**2 * n_e) ** (2 / 3)
        kappa = a * (4 * np.pi * E2 * n_e) ** 0.5 / (T**2 + (2 / 3 * fermi) ** 2) ** 0.25
        return E2 / (a * T), kappa * self.screened, a

    def solve(self, T: Any, rho: Any, Z: Any, **grid: Any) -> Result:
        gamma, kappa, _ = self.dimensionless(T, rho, Z)
        return solve(gamma, Z, self.fractions, kappa, **grid)

    def structure_factors(self, T: Any, rho: Any, Z: Any, k: Any, **grid: Any) -> Any:
        """Compute S_ab at k in 1/Angstrom, `[..., K, a, b]`; NaN if a state does not converge."""
        with jax.enable_x64(True):
            a = jnp.asarray(self.dimensionless(T, rho, Z)[2])
            k = jnp.asarray(k, jnp.float64) * a[..., None]
        return self.solve(T, rho, Z, **grid).at(k)


CARBON = Mixture(("C",), (12.011,), (1.0,))
POLYSTYRENE = Mixture(("C", "H"), (12.011, 1.008), (0.5, 0.5))
