"""Stands in for `flax.nnx`: `capture` is ours, with Flax's signature and results, the rest Flax's.

>>> from tapax.compat import nnx
>>> import jax, jax.numpy as jnp
>>> class Net(nnx.Module):
...     def __init__(self, rngs):
...         self.a = nnx.Linear(2, 3, rngs=rngs)
...
...     def __call__(self, x):
...         h = self.perturb("grad_of_h", self.a(x))
...         self.sow(nnx.Intermediate, "h", h)
...         return jnp.sum(h**2)
>>> model, x = Net(nnx.Rngs(0)), jnp.ones((4, 2))
>>> _, zeros = nnx.capture(model, nnx.Perturbation)(x)
>>> @nnx.jit
... def step(model, zeros, x):
...     loss = lambda model, zeros, x: nnx.capture(model, nnx.Intermediate, init=zeros)(x)
...     return nnx.grad(loss, argnums=1, has_aux=True)(model, zeros, x)
>>> grads, values = step(model, zeros, x)
>>> bool(jnp.allclose(grads["grad_of_h"][...], 2 * values["h"][0]))
True

Where it differs from Flax's, Flax's loses something:

- Modules are seen wherever they are: as any argument, closed over, in any transformation of JAX or
  of NNX. What is sown in a loop is stacked; in a while loop it is that of the last iteration; in a
  branch that did not run it is zero. `tapax.capture` has masks for the last two.
- What a module sows that is not a part of the first module is under the name of its argument, or of
  its class if it is no argument.
- A `perturb` that is called several times has a tuple of perturbations, and so of gradients.
- `init` must fit the program: every `perturb` that runs has its perturbation there, of its shape.
- A reducer folds over the iterations of loops as well.

The function is traced, as it is under `nnx.jit`.
"""

from typing import TYPE_CHECKING

from flax import nnx as _original

from tapax.compat._stand_in import stand_in

if TYPE_CHECKING:
    from flax.nnx import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

from tapax.compat._nnx_capture import capture as capture

__getattr__, __dir__ = stand_in(__name__, _original, ["capture"])
