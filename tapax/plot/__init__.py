"""Plots of one capture, of the difference of two captures, and of a monitor's log over training.

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
- `difference`: the errors between two captures, by depth.
- `history`: a monitor's log over training.

Every function returns a `matplotlib.figure.Figure`, which a notebook shows and `figure.savefig`
saves. The figure is unknown to pyplot: you need not close it, and `plt.show` does not show it. The
functions need matplotlib: `pip install 'tapax[plot]'`.

Colours have one meaning in all plots. A hue marks a role, such as `attn` or `mlp`, in the panels of
values and of gradients. The scale from dark to bright shows depth or time in lines, and magnitude
in heat maps. Red marks numbers that are not finite, and grey sites without a role.

Numbers that differ by orders of magnitude are on a log axis. A mark at the edge shows a number that
a log axis cannot show: red for NaN and Inf, a circle for zero.
"""

from tapax.plot._difference import difference
from tapax.plot._figures import history, roles, taps

__all__ = ["difference", "history", "roles", "taps"]
