"""Attribution, patching, steering and probing: the methods of interpretability, each a few lines.

Every one is a composition of `tapax.capture`, `tapax.grad`, `tapax.edit`, `tapax.prefix` and
`tapax.suffix`, so it works for plain functions and for models of every framework,
under `jit`, `vmap` and `grad`.

>>> import jax.numpy as jnp, tapax
>>> from tapax import attribute
>>> def metric(x):  # [position, width] -> a number
...     h = tapax.sow(jnp.tanh(x), "h")
...     return h[-1].sum() - h[0].sum()
>>> clean, corrupt = jnp.ones((3, 2)), jnp.zeros((3, 2))
>>> attribute.activation_patching(metric, clean, corrupt, ["h"], range(3)).round(2).tolist()
[[-1.5199999809265137, 0.0, 1.5199999809265137]]

Which function to use:

- What does the output depend on? `saliency`, `integrated_gradients`, `grad_cam`.
- Which values carry what differs between two inputs? `activation_patching`, its linear estimate
  `attribution_patching`, and `path_patching` for the way from one component to another.
- What does the residual stream say, and who wrote it? `logit_lens`, `direct_logit_attribution`.
- What if it were otherwise? `steer`, `ablate`.
- What can be read from a value? `linear_probe`.

`sites` are selections as everywhere: a name, a glob, a predicate, a sequence of these. Where a
result has an axis of sites, there is a row for every site, in the order given and for a glob in the
order of the program; a site in a scan has one for every iteration, and `tapax.at("h", step=3)` is
one of these. `positions` are indices along `axis` of the value of a site (with no axis for the
loop); the default, the last but one, is that of `[batch, position, width]` and `[position, width]`,
or of the head in `[batch, position, head, width]`.

Models should be in evaluation mode: state that a call changes may change with every run, and
functions with `positions` refuse such a model in the framework's own words.

Functions that return a result at once (`activation_patching`, `linear_probe` ...) compile once per
call. To use one many times, give it a jitted `fn`, or put it into a jitted function.
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
