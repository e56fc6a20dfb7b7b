"""Ensembles of one model without new layers: `dropout`, `noise`, `weight_noise`, `subensemble`.

>>> import jax, jax.numpy as jnp, tapax
>>> def model(params, x):
...     h = tapax.sow(jnp.tanh(x @ params["up"]), "h")
...     return h @ params["out"]
>>> params = {"up": jnp.ones((3, 8)), "out": jnp.ones((8, 2))}
>>> noisy = dropout(weight_noise(model, 0.1), at="h", rate=0.5)
>>> noisy(jax.random.key(0), params, jnp.ones((5, 3))).shape  # one member
(5, 2)
>>> noisy.sample(jax.random.key(0), 4, params, jnp.ones((5, 3))).shape  # four, in one program
(4, 5, 2)
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tapax._api.cut import prefix
from tapax._calling.transform import check_function
from tapax._jax import Value
from tapax._sites import Selection, wrong_type
from tapax.nn._compilation import compiled
from tapax.nn._perturbations import Dropout, Noise, Perturbation, WeightNoise
from tapax.nn._random import RandomFunction


def dropout(
    fn: Callable[..., Any], at: Selection, rate: float, *, broadcast_dims: Sequence[int] = ()
) -> RandomFunction:
    """A function of a random key that drops elements of the values of some sites of `fn`.

    Monte-Carlo dropout (Gal and Ghahramani, 2016) needs no dropout layer in the model, and no
    training mode. Where the model has dropout layers, they are sites like others: in evaluation
    mode they return what they are given, so that `at` may select them.

    Args:
        fn: a function or a model of any framework; or a `RandomFunction`, which is perturbed
            further.
        at: the sites: a glob such as `"**/mlp"`, or any other selection; or a part of their values,
            or some iterations of a loop, by `tapax.at`.
        rate: the probability that an element is set to zero, in [0, 1); the others are divided by
            `1 - rate`.
        broadcast_dims: axes of a value, or of the part of it, along which elements are dropped
            together. With the axis of the rows, a member is one network for all rows.

    Returns:
        A `RandomFunction`: call it with a key and the arguments of `fn`, or give it to `predict`.

    Raises:
        SiteError: when it is called, if `at` selects no site, or one of integers.
        ValueError: `rate` is outside of [0, 1).

    >>> import jax, jax.numpy as jnp, tapax
    >>> f = lambda x: tapax.sow(x, "h").sum()
    >>> dropped = dropout(f, at="h", rate=0.5)
    >>> key, x = jax.random.key(0), jnp.ones(8)
    >>> bool(
    ...     dropped(key, x)
    ...     == (2 * jax.random.bernoulli(jax.random.fold_in(key, 0), 0.5, (8,))).sum()
    ... )
    True
    """
    return _perturbed(fn, Dropout(at, rate, tuple(broadcast_dims)), "dropout")


def noise(
    fn: Callable[..., Any], at: Selection, std: float, *, relative: bool = False
) -> RandomFunction:
    """A function of a random key that adds normal noise to the values of some sites of `fn`.

    Args:
        fn: a function or a model of any framework, or a `RandomFunction`.
        at: the sites: a glob such as `"**/mlp"`, or any other selection; or a part of their values,
            or some iterations of a loop, by `tapax.at`.
        std: the standard deviation of the noise.
        relative: whether `std` is in units of the root mean square of the value, or of the part.

    Returns:
        A `RandomFunction`: call it with a key and the arguments of `fn`, or give it to `predict`.

    Raises:
        SiteError: when it is called, if `at` selects no site, or one of integers.
        ValueError: `std` is negative.

    >>> import jax, jax.numpy as jnp, tapax
    >>> noisy = noise(lambda x: tapax.sow(x, "h"), at="h", std=2.0)
    >>> out = noisy.sample(jax.random.key(0), 1000, jnp.zeros(1000))
    >>> round(float(out.std()), 1)
    2.0
    """
    return _perturbed(fn, Noise(at, std, bool(relative)), "noise")


def weight_noise(
    fn: Callable[..., Any],
    std: float,
    *,
    at: Selection = "**",
    relative: bool = False,
    params: int | None = None,
) -> RandomFunction:
    """A function of a random key that adds normal noise to the weights that `fn` runs with.

    The weights are the `Param`s of a model of NNX, the collection `params` of variables of Linen,
    the trainable variables of a Keras layer, and the real or complex arrays of any other pytree: a
    module of Equinox, the parameters of Haiku or of a plain function.

    Args:
        fn: a model, or a function that takes one, or its parameters, as an argument; or a
            `RandomFunction`.
        std: the standard deviation of the noise.
        at: the weights, by path: a glob such as `"**/kernel"`, or a predicate on the `path`.
        relative: whether `std` is in units of the root mean square of each weight.
        params: which positional argument of `fn` holds the weights. By default they are those of
            `fn`, if it is a model or a method of one, and else of the first argument.

    Returns:
        A `RandomFunction`: call it with a key and the arguments of `fn`, or give it to `predict`.

    Raises:
        SiteError: when it is called, if `at` matches no weight.
        TypeError: when it is called, if `fn` is a function whose first argument is an array, which
            may be data, and `params` does not say so.
        ValueError: `std` is negative, or there are no weights.

    >>> import jax, jax.numpy as jnp
    >>> noisy = weight_noise(lambda w, x: x @ w["kernel"], 0.1)
    >>> key, w, x = jax.random.key(0), {"kernel": jnp.ones((3, 2))}, jnp.ones((1, 3))
    >>> drawn = 0.1 * jax.random.normal(jax.random.fold_in(key, 0), (3, 2))
    >>> bool(jnp.allclose(noisy(key, w, x), x @ (w["kernel"] + drawn)))
    True
    """
    return _perturbed(fn, WeightNoise(at, std, bool(relative), params), "weight_noise")


def _perturbed(fn: Callable[..., Any], perturbation: Perturbation, function: str) -> RandomFunction:
    if isinstance(fn, RandomFunction):
        return fn.extend(perturbation)
    check_function(fn, f"nn.{function}")
    return RandomFunction(fn, (perturbation,))


class Subensemble:
    """Several heads on one trunk: a function that returns what each of them does, stacked."""

    def __init__(self, fn: Callable[..., Any], at: Selection, heads: Sequence[Any]):
        self.fn = fn
        self.trunk = at
        self.heads = tuple(heads)
        self._run = compiled(self._run_heads)

    @property
    def num_members(self) -> int:
        return len(self.heads)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What each head returns for the arguments of `fn`, stacked."""
        return self._run(self.heads, args, kwargs)

    def _run_heads(
        self, heads: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        value = prefix(self.fn, self.trunk)(*args, **kwargs)
        outs = [head(value) for head in heads]
        kinds = [jax.tree.map(jnp.shape, out) for out in outs]
        for i, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise ValueError(
                    f"All heads must return the same shapes, but head 0 returned {kinds[0]} and "
                    f"head {i} {kind}."
                )
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


def subensemble(
    fn: Callable[..., Any], at: Selection, heads: Sequence[Callable[[Value], Any]] | None = None
) -> RandomFunction | Subensemble:
    """An ensemble whose members share the trunk of `fn`: all that leads to the site `at`.

    The trunk runs once, without perturbations; each member starts from its value. So a member
    costs what comes after the trunk (Valdenegro-Toro, Deep Sub-Ensembles, 2019).

    Args:
        fn: a `RandomFunction`, whose perturbations make the members; or, with `heads`, any function
            or model.
        at: the site, one alone, at which the trunk ends: its name, or `tapax.at(name, step=3)` for
            an iteration of a scan.
        heads: functions of the value at the site, such as modules, one for each member.

    Returns:
        A `RandomFunction` without `heads`; with them a `Subensemble`, a function of the arguments
        of `fn`. Both are for `predict`.

    Raises:
        SiteError: when it is called, if `at` is not one site that the function can be cut at.
        TypeError: `fn` is not random and there are no heads, or both.
        ValueError: there are no heads in `heads`; or, when it is called, they return different
            shapes.

    >>> import jax, jax.numpy as jnp, tapax
    >>> def f(x):
    ...     trunk = tapax.sow(jnp.sin(x), "trunk")
    ...     return tapax.sow(jnp.exp(trunk), "branch").sum()
    >>> members = subensemble(dropout(f, at="branch", rate=0.1), at="trunk")
    >>> members.sample(jax.random.key(0), 4, jnp.ones(3)).shape
    (4,)
    >>> subensemble(f, at="trunk", heads=[jnp.sum, jnp.max])(jnp.zeros(3)).tolist()
    [0.0, 0.0]
    """
    if heads is None:
        if not isinstance(fn, RandomFunction):
            raise TypeError(
                "`fn` of `subensemble` must be random, as tapax.nn.dropout(fn, ...) is, or have "
                "`heads`, but neither is so."
            )
        return RandomFunction(fn.fn, fn.perturbations, at)
    if isinstance(fn, RandomFunction):
        raise TypeError(
            "`subensemble` takes a random function or `heads`, but was given both. Give it the "
            "plain function."
        )
    check_function(fn, "nn.subensemble")
    members = tuple(heads)
    if not members:
        raise ValueError("`heads` must have one head or more, but is empty.")
    for head in members:
        if not callable(head):
            raise wrong_type("`heads` must be functions of the value at the site, but has", head)
    return Subensemble(fn, at, members)
