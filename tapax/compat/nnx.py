"""A replacement for `flax.nnx`: tapax implements `capture`; all other names are those of Flax.

`capture` has the signature and the results of `flax.nnx.capture`. It differs from Flax where Flax
loses something:

- It finds modules everywhere: in any argument, closed over, in any transformation of JAX or NNX.
  Values sown in a loop are stacked; a while loop gives the value of the last iteration, and a
  branch that did not run gives zeros. `tapax.capture` has masks for the last two.
- A module outside of the first module has its values under the name of its argument, or under the
  name of its class if it is not an argument.
- A `perturb` that is called several times has a tuple of perturbations, and so of gradients.
- `init` must fit the program: it contains a perturbation of the right shape for every `perturb`
  that runs.
- A reducer folds over the iterations of loops, too.

`capture` traces the function, as `nnx.jit` does.
"""

from typing import TYPE_CHECKING

from flax import nnx as _original

from tapax.compat._stand_in import stand_in

if TYPE_CHECKING:
    from flax.nnx import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

from tapax.compat._nnx_capture import capture as capture

__getattr__, __dir__ = stand_in(__name__, _original, ["capture"])
