"""Ensembles of one model without new layers: `dropout`, `noise`, `weight_noise`, `subensemble`."""

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
    """Make a function of a random key that drops elements of the values of some sites of `fn`.

    Monte-Carlo dropout (Gal and Ghahramani, 2016) needs neither dropout layers nor training mode.
    If the model has dropout layers, `at` may select them: in evaluation mode they return their
    input.

    Args:
        fn: A function or a model of any framework; or a `RandomFunction`, to perturb it further.
        at: Selects the sites: a glob such as `"**/mlp"`, or any other selection. `tapax.at` selects
            a part of their values, or some iterations of a loop.
        rate: The probability of setting an element to zero, in [0, 1). The other elements are
            divided by `1 - rate`.
        broadcast_dims: The axes of a value, or of the selected part, along which elements are
            dropped together. Include the axis of the rows to drop the same elements in all rows, so
            that a member is one network.

    Returns:
        A `RandomFunction`: call it with a key and the arguments of `fn`, or pass it to `predict`.

    Raises:
        ValueError: If `rate` is not in [0, 1).
        TypeError: If `fn` is not a function, or `rate` not a number.
        SiteError: When the result is called, if `at` selects no site, or a site of integers.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(x, "h")
        >>> dropped = tapax.nn.dropout(f, at="h", rate=0.5)
        >>> out = dropped(jax.random.key(0), jnp.full(1000, 3.0))
        >>> sorted(set(out.tolist())), bool(abs(out.mean() - 3) < 0.5)
        ([0.0, 6.0], True)
    """
    return _perturbed(fn, Dropout(at, rate, tuple(broadcast_dims)), "dropout")


def noise(
    fn: Callable[..., Any], at: Selection, std: float, *, relative: bool = False
) -> RandomFunction:
    """Make a function of a random key that adds normal noise to the values of some sites of `fn`.

    Args:
        fn: A function or a model of any framework; or a `RandomFunction`, to perturb it further.
        at: Selects the sites: a glob such as `"**/mlp"`, or any other selection. `tapax.at` selects
            a part of their values, or some iterations of a loop.
        std: The standard deviation of the noise.
        relative: Whether `std` is relative to the root mean square of the value, or of the part.

    Returns:
        A `RandomFunction`: call it with a key and the arguments of `fn`, or pass it to `predict`.

    Raises:
        ValueError: If `std` is negative.
        TypeError: If `fn` is not a function, or `std` not a number.
        SiteError: When the result is called, if `at` selects no site, or a site of integers.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> noisy = tapax.nn.noise(lambda x: tapax.sow(x, "h"), at="h", std=2.0)
        >>> out = noisy.sample(jax.random.key(0), 1000, jnp.full(1000, 5.0))
        >>> round(float(out.mean()), 1), round(float(out.std()), 1)
        (5.0, 2.0)
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
    """Make a function of a random key that adds normal noise to the weights of `fn`.

    The weights are the `Param`s of an NNX model, the collection `params` of Linen variables, the
    trainable variables of a Keras layer, and the real or complex arrays of any other pytree: an
    Equinox module, the parameters of Haiku or of a plain function.

    Args:
        fn: A model, or a function that takes a model or its parameters as an argument; or a
            `RandomFunction`, to perturb it further.
        std: The standard deviation of the noise.
        at: Selects the weights by path: a glob such as `"**/kernel"`, or a predicate on a `Site`
            with that `path`.
        relative: Whether `std` is relative to the root mean square of each weight.
        params: The position of the argument of `fn` that contains the weights. By default it is the
            first argument, unless `fn` is a model or a method of a model.

    Returns:
        A `RandomFunction`: call it with a key and the arguments of `fn`, or pass it to `predict`.

    Raises:
        TypeError: If `fn` is not a function, or `std` not a number. When the result is called: if
            `fn` has no argument at the position `params`; or if `params` is not given and the first
            argument of a plain function is an array, which may be data.
        ValueError: If `std` is negative; when the result is called, if there are no weights.
        SiteError: When the result is called, if `at` matches no weight.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> noisy = tapax.nn.weight_noise(lambda w, x: x @ w["kernel"], 0.1)
        >>> key, w, x = (
        ...     jax.random.key(0),
        ...     {"kernel": jnp.ones((3, 2))},
        ...     jnp.array([[1.0, 2.0, 3.0]]),
        ... )
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
    """Several heads on one trunk: a function that returns the stacked results of all heads.

    `tapax.nn.subensemble` makes it. Call it with the arguments of `fn`, or pass it to `predict`.

    Args:
        fn: The function that contains the trunk.
        at: Selects the site at the end of the trunk.
        heads: Functions of the value at that site.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(2 * x, "trunk").sum()
        >>> members = tapax.nn.subensemble(f, at="trunk", heads=[jnp.sum, jnp.max])
        >>> members.num_members, members(jnp.array([0.5, 2.0])).tolist()
        (2, [5.0, 4.0])
    """

    def __init__(self, fn: Callable[..., Any], at: Selection, heads: Sequence[Any]):
        self.fn = fn
        self.trunk = at
        self.heads = tuple(heads)
        self._run = compiled(self._run_heads)

    @property
    def num_members(self) -> int:
        """The number of heads."""
        return len(self.heads)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all heads for the arguments of `fn`, and stack their results."""
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
    """Make an ensemble whose members share the trunk of `fn`, everything before the site `at`.

    The trunk runs once, without perturbations, and each member starts from its value. So a member
    costs only the part after the trunk (Valdenegro-Toro, Deep Sub-Ensembles, 2019).

    Args:
        fn: A `RandomFunction`, whose perturbations make the members; or, with `heads`, any function
            or model.
        at: Selects the one site at which the trunk ends: its name, or `tapax.at(name, step=3)` for
            an iteration of a scan.
        heads: Functions of the value at the site, such as modules: one for each member.

    Returns:
        A `RandomFunction`, or, with `heads`, a `Subensemble`, a function of the arguments of `fn`.
        Pass either to `predict`.

    Raises:
        TypeError: If `fn` is not a `RandomFunction` and `heads` is not given, or if `fn` is a
            `RandomFunction` and `heads` is given.
        ValueError: If `heads` is empty; when the result is called, if the heads return different
            shapes.
        SiteError: When the result is called, if the function cannot be cut at `at`.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> def f(x):
        ...     trunk = tapax.sow(jnp.sin(x), "trunk")
        ...     return tapax.sow(jnp.exp(trunk), "branch").sum()
        >>> dropped = tapax.nn.dropout(f, at="branch", rate=0.1)
        >>> members = tapax.nn.subensemble(dropped, at="trunk")
        >>> members.sample(jax.random.key(0), 4, jnp.array([0.5, -1.0])).shape
        (4,)
        >>> heads = tapax.nn.subensemble(f, at="trunk", heads=[jnp.sum, jnp.max])
        >>> heads(jnp.array([0.0, jnp.pi / 2])).tolist()
        [1.0, 1.0]
    """
    if heads is None:
        if not isinstance(fn, RandomFunction):
            raise TypeError(
                "`subensemble` needs a random `fn`, such as tapax.nn.dropout(fn, ...), or `heads`, "
                "but has neither."
            )
        return RandomFunction(fn.fn, fn.perturbations, at)
    if isinstance(fn, RandomFunction):
        raise TypeError(
            "`subensemble` takes a random function or `heads`, but was given both. Pass the plain "
            "function with `heads`."
        )
    check_function(fn, "nn.subensemble")
    members = tuple(heads)
    if not members:
        raise ValueError("`heads` must have one head or more, but is empty.")
    for head in members:
        if not callable(head):
            raise wrong_type("`heads` must be functions of the value at the site, but has", head)
    return Subensemble(fn, at, members)
