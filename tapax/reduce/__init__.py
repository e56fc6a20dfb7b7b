"""Reducers: statistics that a program computes itself, where its values are.

>>> import jax, jax.numpy as jnp, tapax
>>> def f(x):
...     layer = lambda x, _: (tapax.sow(jnp.tanh(2 * x), "h"), None)
...     return jax.lax.scan(layer, x, length=3)[0]
>>> out, taps = tapax.capture(f, values={"h": tapax.reduce.rms})(jnp.ones(1000))
>>> taps.values["h"].shape  # one number for each iteration; the program drops the values
(3,)
>>> out, taps = tapax.capture(f, values={"h": tapax.reduce.rms.total})(jnp.ones(1000))
>>> taps.values["h"].shape  # one number for all iterations
()

================================  =================================================================
reducer                           result
================================  =================================================================
`sum`, `mean`, `var`              of all elements; `var` as in NumPy, without a correction
`moments`                         mean and variance, `[..., 2]`
`norm`, `rms`                     root of the sum, and of the mean, of the squares
`minmax`                          smallest and largest, `[..., 2]`; NaN if an element is NaN
`zeros`                           fraction of the elements that are zero
`nonfinite`                       number of elements that are NaN or infinite
`histogram(edges)`                counts as in `numpy.histogram`: nothing outside the edges
`histogram(log2=(lo, hi))`        counts of magnitudes below 2^lo, between powers of 2, from 2^hi on
`histogram(..., sample=1/16)`     counts of one in 16 elements; `quantiles` takes `sample` too
`topk(k)`                         the k largest, in descending order
`quantiles(q)`                    to a relative error, 1% by default; see its docstring
`cosine`, `update_ratio`          of a gradient to the value of its site; for `grads`
`last`                            the value itself; `last.total` is that of the last iteration
================================  =================================================================

In a capture, `values={"**/mlp": rms}`, the results of a reducer replace the values: one result for
each call and each iteration of a scan, one for all iterations of a while loop. `rms.total` has one
result for all iterations of all loops around a site. Every reducer except `last` combines the
examples of a vmap and the devices of a mesh. `rms(axis=-1)` has one result for each unit, that is,
for each index along that axis of the value as it was marked; `axis` also works for the other
reducers in the upper part of the table, up to `nonfinite`, and for `cosine` and `update_ratio`.

Reducers accumulate values of less than 32 bits in float32 or a 32-bit integer, and float64 in
float64. A count that reaches the largest number of its dtype stays there.

`Reducer(init, update, combine, finish)` makes a new reducer: see `Reducer`.
"""

from typing import TYPE_CHECKING

from tapax._lazy import load_lazily
from tapax.reduce._reducer import Reducer

if TYPE_CHECKING:
    from tapax.reduce._distributions import histogram, quantiles, topk
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

# Models import tapax for their marks alone, and a selection only has to know `Reducer`.
__getattr__, __dir__ = load_lazily(
    __name__,
    __all__,
    {
        "tapax.reduce._distributions": ("histogram", "quantiles", "topk"),
        "tapax.reduce._statistics": (
            "cosine",
            "last",
            "mean",
            "minmax",
            "moments",
            "nonfinite",
            "norm",
            "rms",
            "sum",
            "update_ratio",
            "var",
            "zeros",
        ),
    },
)
