"""Plots of a capture, by depth and by role, of two compared, and of a monitor's log over training.

>>> import jax, jax.numpy as jnp, tapax
>>> def loss(x):
...     layer = lambda x, _: (tapax.sow(jnp.tanh(2 * x), "h"), None)
...     return jnp.sum(jax.lax.scan(layer, x, length=3)[0])
>>> _, taps = tapax.capture(jax.grad(loss))(jnp.ones(5))
>>> figure = tapax.plot.taps(taps)  # also taps.plot()
>>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
['h[0]', 'h[1]', 'h[2]']

- `taps`: a row for each site, from the input down.
- `roles`: depth from left to right, a line for each kind of module; for deep models, and to compare
  captures, such as before and after training.
- `history`: a monitor's log over training.

All return a `matplotlib.figure.Figure`, which a notebook shows and `figure.savefig` saves. pyplot
does not know it: it need not be closed, and `plt.show` does not show it. They need matplotlib:
`pip install tapax[plot]`.

Colours mean the same in every plot. A hue is a role, `attn` or `mlp`, in the panels of values and
of gradients; the scale from dark to bright is depth or time in lines, and size in heat maps; red is
what is not finite; grey is what has no role.

Numbers with an order of magnitude are on a log axis. Numbers that have no place on it are marked at
its edge: NaN and Inf in red, zero by a circle.
"""

from tapax.plot._difference import difference
from tapax.plot._figures import history, roles, taps

__all__ = ["difference", "history", "roles", "taps"]
