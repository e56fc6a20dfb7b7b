"""Attribution, patching, steering and probing: the methods of interpretability.

Each method is a composition of `tapax.capture`, `tapax.grad`, `tapax.edit`, `tapax.prefix` and
`tapax.suffix`, so it works for plain functions and for models of every framework, under `jit`,
`vmap` and `grad`.

>>> import jax.numpy as jnp, numpy as np, tapax
>>> from tapax import attribute
>>> def metric(x):  # [position, width] -> a number
...     h = tapax.sow(jnp.tanh(x), "h")
...     return h[-1].sum() - h[0].sum()
>>> clean, corrupt = jnp.ones((3, 2)), jnp.zeros((3, 2))
>>> patched = attribute.activation_patching(metric, clean, corrupt, ["h"], range(3))
>>> print(np.asarray(patched).round(2))
[[-1.52  0.    1.52]]

Choose a function by your question:

- What does the output depend on? `saliency`, `integrated_gradients`, `grad_cam`.
- Which values carry the difference between two inputs? `activation_patching`, its linear estimate
  `attribution_patching`, and `path_patching` for the path from one component to another.
- What does the residual stream predict, and which components wrote it? `logit_lens`,
  `direct_logit_attribution`.
- How does the output change with another value? `steer`, `ablate`.
- What information does a value contain? `linear_probe`.

`sites` are selections: a name, a glob, a predicate, or a sequence of these. A result with an axis
of sites has a row for every site, in the order of the sequence, and for a glob in the order of the
program. A site in a scan has a row for every iteration; `tapax.at("h", step=3)` selects one of
them. `positions` are indices along `axis` of the value of a site, which does not count the axes of
loops. The default, the last axis but one, is the position in `[batch, position, width]` and
`[position, width]`, and the head in `[batch, position, head, width]`.

Put models in evaluation mode. A call that changes the state of a model would change it with every
run; the framework raises an error for such a model in functions with `positions`.

Functions that return a result at once, such as `activation_patching` and `linear_probe`, compile
once per call. To call one many times, pass a jitted `fn`, or call it in a jitted function.
"""

from tapax.attribute._interventions import ablate, steer
from tapax.attribute._linear_probe import Probe, linear_probe
from tapax.attribute._patching import activation_patching, attribution_patching, path_patching
from tapax.attribute._residual_stream import direct_logit_attribution, logit_lens
from tapax.attribute._saliency import grad_cam, integrated_gradients, saliency

__all__ = [
    "Probe",
    "ablate",
    "activation_patching",
    "attribution_patching",
    "direct_logit_attribution",
    "grad_cam",
    "integrated_gradients",
    "linear_probe",
    "logit_lens",
    "path_patching",
    "saliency",
    "steer",
]
