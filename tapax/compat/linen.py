"""Stands in for `flax.linen`: `apply` is ours, with the results of Flax's, the rest is Flax's.

`apply(module, variables, *args, ...)` is `module.apply(variables, *args, ...)`, and
`apply(function, module, ...)` is as in Flax.

>>> import jax, jax.numpy as jnp
>>> from tapax.compat import linen as nn
>>> class Layer(nn.Module):
...     @nn.compact
...     def __call__(self, x, _):
...         return nn.tanh(nn.Dense(3, name="dense")(x)), None
>>> class Net(nn.Module):
...     @nn.compact
...     def __call__(self, x):
...         lift = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
...         return nn.scan(Layer, length=4, **lift)(name="layers")(x, None)[0]
>>> x = jnp.ones((2, 3))
>>> variables = Net().init(jax.random.key(0), x)
>>> out, state = nn.apply(Net(), variables, x, capture_intermediates=True)
>>> jax.tree.map(jnp.shape, state["intermediates"]["layers"]["dense"])
{'__call__': ((4, 2, 3),)}

Where it differs from Flax's, Flax's loses something:

- No collection has to be declared for `nn.scan`, `nn.vmap` and the others. What is sown in a loop
  is stacked, as is what is mapped, with the new axis first; in a while loop it is that of the last
  iteration; in a branch that did not run it is zero. `tapax.capture` has masks for the last two.
- JAX's own transformations may be around modules.
- A `perturb` that is called several times has a tuple of perturbations, and so of gradients; in a
  loop, one for every iteration. They are found by `apply(..., mutable="perturbations")`.
- A reducer folds over the iterations of loops as well.
- What a method returns is there once, and not for every class that it calls by `super()`.

The call is traced, as it is under `jax.jit`.
"""

from typing import TYPE_CHECKING

from flax import linen as _original

from tapax.compat._stand_in import stand_in

if TYPE_CHECKING:
    from flax.linen import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

from tapax.compat._linen_apply import apply as apply

__getattr__, __dir__ = stand_in(__name__, _original, ["apply"])
