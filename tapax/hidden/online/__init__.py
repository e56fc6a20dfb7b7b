"""Online learning of recurrent models: a gradient at every step, without backpropagation in time.

>>> import jax, jax.numpy as jnp
>>> from tapax.hidden import online
>>> def step(params, state, x):
...     state = 0.9 * state + x @ params["w"]
...     return state, state.sum()
>>> def loss(out, target):
...     return (out - target) ** 2
>>> learner = online.d_rtrl(step, loss)
>>> params = {"w": jnp.array([[0.5, 1.0, 1.5], [1.5, 1.0, 0.5]])}
>>> memory = learner.init(params, jnp.zeros(3), jnp.zeros(2))
>>> for x in jnp.eye(2):
...     learned, memory = learner.update(memory, params, x, target=1.0)
>>> print(learned.grads["w"].round(2))  # the gradient of the last loss; it remembers the first x
[[8.46 8.46 8.46]
 [9.4  9.4  9.4 ]]

A step is any pure function `(params, state, *inputs) -> (state, out)`, whose parameters and state
are any pytrees; a rule combines a step with a `loss(out, target)`. As in optax, a rule is a pair of
pure functions, which work under `jit`, `scan` and `vmap`:

- `init(params, state, *inputs)` makes the memory at the start of a sequence.
- `update(memory, params, *inputs, target=...)` takes a step. It returns the `OnlineGradients`,
  `(grads, loss, out)`, and the next memory. Pass `grads`, which are like the parameters, to optax,
  at every step or summed over some steps: their sum over a sequence estimates the gradient of the
  summed loss.

The size of the memory does not depend on the length of the sequence. Begin a new sequence with
another `init`; `dataclasses.replace(memory, state=...)` replaces the state.

==========  =======================================================  ===============================
rule        memory of the past, with n units and p weights           exact
==========  =======================================================  ===============================
`rtrl`      the influence of each parameter on each state: n p       always
`d_rtrl`    the influence of each weight on its units: p             if units act on themselves
`e_prop`    like `d_rtrl`; filtered, if the read-out leaks           if units act on themselves
`pp_prop`   two vectors for each matrix: n                           never
==========  =======================================================  ===============================

With a batch of states, the memory contains all of this for each example.

**What a diagonal rule sees.** It reads the traced program, whatever made it. In `x @ w` a weight
meets data. With all such products held fixed, the new states are functions of the old states and of
the products, mostly unit by unit: in a leaky integrator, an LSTM, a spiking neuron. Then a column
of a matrix drives one unit, and its influence decays with the derivative of that unit with respect
to itself: `eps[t] = D eps[t-1] + dh/dy x`. States of one shape that act on each other in this way,
such as the two of an LSTM, are a group, and `D` is a matrix for each unit. The rule understands
gates in one matrix, transposed, masked, concatenated and exponentiated parameters, custom
derivatives, `jit`, `remat`, `cond` and `scan`.

It does not see a state that acts on others through a matrix. For the parameters of one layer of
several, it counts the paths through the layers above within a step, but not their memory of it. If
units act on each other without a matrix of weights (a layer norm, a convolution), `D` is the
diagonal of the Jacobian, at the cost of one pass for each unit in a row.

**Parameters that drive many units**, such as an encoder before the recurrent layer, a gate whose
result is multiplied by a matrix, or a convolution, need a trace of their influence on every unit,
with the size of the state times the size of the parameter. `indirect="instant"` drops the trace,
and learns from the influence within a step; `indirect="refuse"` raises an error.

Traces have 32 bits or more. Gradients have the dtypes of the parameters, and are zero for
parameters that are not floats. A `while` loop in the path of the state has no reverse derivative:
use `fori_loop` with a fixed count, or `scan`.
"""

from tapax.hidden.online._d_rtrl import d_rtrl
from tapax.hidden.online._e_prop import e_prop
from tapax.hidden.online._learner import OnlineGradients, OnlineMemory, OnlineRule
from tapax.hidden.online._pp_prop import pp_prop
from tapax.hidden.online._rtrl import rtrl

__all__ = ["OnlineGradients", "OnlineMemory", "OnlineRule", "d_rtrl", "e_prop", "pp_prop", "rtrl"]
