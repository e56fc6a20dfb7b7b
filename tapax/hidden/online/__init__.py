"""Online learning of recurrent models: a gradient at every step, without going back in time.

>>> import jax, jax.numpy as jnp
>>> from tapax.hidden import online
>>> def step(params, state, x):
...     state = 0.9 * state + x @ params["w"]
...     return state, state.sum()
>>> def loss(out, target):
...     return (out - target) ** 2
>>> learner = online.d_rtrl(step, loss)
>>> params = {"w": jnp.ones((2, 3))}
>>> memory = learner.init(params, jnp.zeros(3), jnp.zeros(2))
>>> for x in jnp.eye(2):
...     learned, memory = learner.update(memory, params, x, target=1.0)
>>> print(learned.grads["w"].round(2))  # of this step's loss; the first input is remembered
[[8.46 8.46 8.46]
 [9.4  9.4  9.4 ]]

A step is any pure function `(params, state, *inputs) -> (state, out)`, with any pytrees for its
parameters and its state; a rule is made of one and of a `loss(out, target)`. Each is a pair of pure
functions, as in optax, that work under `jit`, `scan` and `vmap`:

- `init(params, state, *inputs)` makes the memory at the start of a sequence.
- `update(memory, params, *inputs, target=...)` takes a step. It returns the `OnlineGradients`,
  `(grads, loss, out)`, and the next memory. `grads` are like the parameters and go into optax, at
  every step or summed over some: their sum over a sequence stands for the gradient of its summed
  loss.

The memory has the same size however long the sequence is. A new sequence begins with another
`init`; `dataclasses.replace(memory, state=...)` puts another state in its place.

==========  =======================================================  ===============================
rule        what it keeps of the past, with n units, p weights       exact
==========  =======================================================  ===============================
`rtrl`      the influence of each parameter on each state: n p       always
`d_rtrl`    that of each weight on the units that it drives: p       if units act on themselves
`e_prop`    the same; filtered, if the read-out leaks                likewise
`pp_prop`   for each matrix two vectors: n                           never
==========  =======================================================  ===============================

With a batch of states, all but `n` and `p` in this table have one for each example.

**What a diagonal rule sees** is read from the traced program, whatever made it. In `x @ w` a weight
meets data. With all such products held fixed, the new states are functions of the old ones and of
the products, mostly unit by unit: of a leaky integrator, an LSTM, a spiking neuron. A column of a
matrix drives one unit then, and its influence passes on by the derivative of that unit by itself:
`eps[t] = D eps[t-1] + dh/dy x`. States of one shape that act on each other so, as an LSTM's two do,
are a group, and `D` is a matrix for each unit. Gates in one matrix, transposed, masked,
concatenated and exponentiated parameters, custom derivatives, `jit`, `remat`, `cond` and `scan` are
all read.

What it does not see: a state acting on others through a matrix. For the parameters of one layer of
several, the ways through the layers above count within a step, not what those remember of it. Where
units act on each other without a matrix of weights (a layer norm, a convolution) `D` is the
diagonal of the Jacobian, at the cost of one pass for each unit in a row.

**Parameters that drive many units** (an encoder before the recurrent layer, a gate whose result is
multiplied by a matrix, a convolution) have their influence on every unit kept, the size of the
state times their own; `indirect="instant"` drops it and learns from what they do within a step;
`indirect="refuse"` raises.

Traces are kept in 32 bits or more. Gradients have the types of the parameters; parameters that are
no floats have zeros. A `while` loop that the state goes through has no derivative backwards: use
`fori_loop` with a fixed count, or `scan`.
"""

from tapax.hidden.online._d_rtrl import d_rtrl
from tapax.hidden.online._e_prop import e_prop
from tapax.hidden.online._learner import OnlineGradients, OnlineMemory, OnlineRule
from tapax.hidden.online._pp_prop import pp_prop
from tapax.hidden.online._rtrl import rtrl

__all__ = ["OnlineGradients", "OnlineMemory", "OnlineRule", "d_rtrl", "e_prop", "pp_prop", "rtrl"]
