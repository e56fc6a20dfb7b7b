"""Predicates on modules: by the package that defines them, or by their depth in the model.

>>> without("flowjax")
without('flowjax')
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tapax._sites.site import Site

MACHINERY = {
    "diffrax": "terms, solvers and controllers, which run the vector field that the user wrote",
    "optimistix": "solvers, searches and descents, which run the function that the user wrote",
    "lineax": "operators and solvers of linear systems, which diffrax and optimistix use",
    "paramax": "wrappers in which a model keeps its parameters until they are unwrapped",
}
"""Packages whose modules run the user's model without being part of it, and their modules.

These modules are sites only if a selection names them, and do not appear in the paths of others.
"""


def is_machinery(cls: Any) -> bool:
    """Return whether a class comes from a package in `MACHINERY`."""
    return _package(cls) in MACHINERY


def _package(cls: Any) -> str:
    # `__module__` of a callable object may be None.
    return str(getattr(cls, "__module__", "")).partition(".")[0]


@dataclasses.dataclass(frozen=True, repr=False)
class ModulesWithout:
    """All modules except those of some packages: see `without`."""

    packages: tuple[str, ...]

    def __call__(self, site: Site) -> bool:
        return _package(site.module) not in self.packages

    def __repr__(self) -> str:
        return f"without({', '.join(map(repr, self.packages))})"


def without(*packages: str) -> ModulesWithout:
    """Select every module except those of some packages, for the argument `modules`.

    The modules of diffrax, optimistix, lineax and paramax are never sites, unless a selection names
    them.

    Args:
        *packages: Names of packages as one imports them, such as `"flowjax"`. A module belongs to
            the package that defines its class.

    Returns:
        A filter for the argument `modules` of `tapax.capture` and other functions.

    Raises:
        TypeError: If there are no names, or one is not the name of a package.

    Example:
        >>> import jax, jax.numpy as jnp, equinox as eqx, tapax
        >>> class Net(eqx.Module):
        ...     linear: eqx.nn.Linear
        ...
        ...     def __call__(self, x):
        ...         return jnp.tanh(self.linear(x))
        >>> net = Net(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
        >>> _, taps = tapax.capture(net, modules=tapax.without("equinox"))(jnp.ones(2))
        >>> list(taps.values)
        ['Net']
    """
    names: tuple[Any, ...] = packages
    if not names or not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise TypeError(
            "`without` takes names of packages as one imports them, such as 'flowjax', but was "
            f"given {', '.join(map(repr, packages)) or 'no names'}."
        )
    return ModulesWithout(packages)


@dataclasses.dataclass(frozen=True)
class ModuleDepth:
    """The modules at most `depth` attributes below the root of their model.

    >>> paths = ["GPT", "GPT/blocks/3", "GPT/blocks/3/attn", "GPT/blocks/3.cache:keys"]
    >>> [ModuleDepth(1)(Site(path)) for path in paths]
    [True, True, False, True]
    """

    depth: int

    def __call__(self, site: Site) -> bool:
        _, *below = site.path.partition(":")[0].split("/")
        # An index belongs to the attribute of its container, and does not count.
        return sum(not part.partition(".")[0].isdigit() for part in below) <= self.depth
