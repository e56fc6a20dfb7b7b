"""Reducers: statistics that are taken inside the program, where the values are.

>>> import jax, jax.numpy as jnp, tapax
>>> def f(x):
...     layer = lambda x, _: (tapax.sow(jnp.tanh(2 * x), "h"), None)
...     return jax.lax.scan(layer, x, length=3)[0]
>>> out, taps = tapax.capture(f, values={"h": tapax.reduce.rms})(jnp.ones(1000))
>>> taps.values["h"].shape  # one number for each iteration; the values themselves are not kept
(3,)
>>> out, taps = tapax.capture(f, values={"h": tapax.reduce.rms.total})(jnp.ones(1000))
>>> taps.values["h"].shape  # one number for all of them
()

================================  =================================================================
reducer                           result
================================  =================================================================
`sum`, `mean`, `var`              of all elements; `var` as NumPy's, without a correction
`moments`                         mean and variance, `[..., 2]`
`norm`, `rms`                     root of the sum, and of the mean, of the squares
`minmax`                          smallest and largest, `[..., 2]`; NaN if there is one
`zeros`                           fraction of zeros
`nonfinite`                       how many NaN and Inf
`histogram(edges)`                counts as `numpy.histogram` has them: outside of the edges, none
`histogram(log2=(lo, hi))`        counts of magnitudes below 2^lo, between powers of 2, from 2^hi on
`histogram(..., sample=1/16)`     counts of one in 16 elements; `quantiles` too
`topk(k)`                         the k largest, in order
`quantiles(q)`                    to a relative error, 1% unless told; see there
`cosine`, `update_ratio`          of a gradient to its value; for `grads`
`last`                            the value itself; `last.total` is that of the last iteration
================================  =================================================================

Given to a capture, `values={"**/mlp": rms}`, a reducer takes the place of the value: one result for
each call and each iteration of a scan, one for all iterations of a while loop. `rms.total` merges
all loops around a site. The examples of a vmap and the devices of a mesh are always combined, in
`last` alone they are not. `rms(axis=-1)` has one result for each unit, each place along that axis
of the value as it was marked; so have the others in the upper half of the table.

Values of less than 32 bits are accumulated in float32, float64 in float64. Counts stop at the
largest number that they can have.

`Reducer(init, update, combine, finish)` makes one's own: see `Reducer`.
"""

from tapax.reduce._distributions import histogram, quantiles, topk
from tapax.reduce._reducer import Reducer
from tapax.reduce._statistics import (
    cosine,
    last,
    mean,
    minmax,
    moments,
    nonfinite,
    norm,
    rms,
    sum,
    update_ratio,
    var,
    zeros,
)
from tapax.reduce._together import see_together as see_together

__all__ = [
    "Reducer",
    "cosine",
    "histogram",
    "last",
    "mean",
    "minmax",
    "moments",
    "nonfinite",
    "norm",
    "quantiles",
    "rms",
    "sum",
    "topk",
    "update_ratio",
    "var",
    "zeros",
]
