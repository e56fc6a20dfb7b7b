"""A replacement for `flax.linen`: tapax implements `apply`; all other names are those of Flax.

`apply(module, variables, *args, ...)` replaces `module.apply(variables, *args, ...)`, and
`apply(function, module, ...)` works as in Flax. It differs from Flax where Flax loses something:

- You need not declare collections for `nn.scan`, `nn.vmap` and the others. Values sown in a loop or
  a map are stacked, with the new axis first; a while loop gives the value of the last iteration,
  and a branch that did not run gives zeros. `tapax.capture` has masks for the last two.
- The transformations of JAX may contain modules.
- A `perturb` that is called several times has a tuple of perturbations, and so of gradients; in a
  loop, one for every iteration. `apply(..., mutable="perturbations")` makes them.
- A reducer folds over the iterations of loops, too.
- The result of a method appears once, and not for every class that it calls by `super()`.

`apply` traces the call, as `jax.jit` does.
"""

from typing import TYPE_CHECKING

from flax import linen as _original

from tapax.compat._stand_in import stand_in

if TYPE_CHECKING:
    from flax.linen import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

from tapax.compat._linen_apply import apply as apply

__getattr__, __dir__ = stand_in(__name__, _original, ["apply"])
