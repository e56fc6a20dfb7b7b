"""`sow`, `reap`, `plant`, `harvest` and `nest`, as `oryx.core.interpreters.harvest` documents them.

`sow` names a value; by itself it is the identity. `harvest` converts a function `f(x)` to
`g(plants, x) -> (out, reaps)`: it replaces a sown value whose name is in `plants` by the plant, and
returns all others in `reaps`.

>>> from tapax.compat.oryx import harvest, nest, plant, reap, sow
>>> def f(x):
...     y = sow(x + 1.0, tag="intermediate", name="y")
...     return y + 1.0
>>> out, reaps = harvest(f, tag="intermediate")({}, 1.0)
>>> float(out), float(reaps["y"])
(3.0, 2.0)
>>> float(plant(f, tag="intermediate")({"y": 0.0}, 5.0))
1.0
>>> nested = reap(nest(f, scope="a"), tag="intermediate")(1.0)
>>> float(nested["a"]["y"])
2.0

A *tag* is a namespace, any hashable. A harvest touches only the sows of its tag; with `exclusive`
it removes the others. `allowlist` and `blocklist` contain names. After a harvest, no sows of its
tag remain for another harvest around it. A sown value may be a pytree, which is reaped and planted
as one value. The *mode* decides the treatment of a name that is sown more than once:

==============  =========================  ========================  ==============================
mode            in straight code           in a scan                 in a while loop
==============  =========================  ========================  ==============================
`strict`        raises                     raises                    raises
`clobber`       the last                   the last; planted in      the last; planted in every
                                           every iteration           iteration
`append`        stacked, if more than one  stacked, iteration        raises
                                           first; planted so too
==============  =========================  ========================  ==============================

`sow_cond(value, pred, ...)` clobbers if `pred` is true, and gives zeros if it never was. All
branches of a conditional must sow the same names, with values of one type; otherwise a harvest
raises. `tapax.capture` accepts branches that differ, and has masks for them. It also returns
gradients, which a harvest does not reap: a sown value is a site `tag/name`.

Types are those of oryx: the reaped value of a Python number, or of any weak type, is weak. You may
plant a number for a number of another kind, such as a float for an integer; then the program
continues with the float. A harvest ignores a name in `plants` that the function does not sow, with
a warning. Errors about modes and branches start with the words of oryx.

It differs from oryx where oryx loses or ignores something:

- A harvest reaps values sown in `shard_map`, `pmap` and linear solves, with the values of devices
  along a new leading axis. It raises for values in a kernel or in the predicate of a while loop.
- A plant with another structure, shape or dtype than the value raises. So do derivatives with
  respect to a plant inside `jax.custom_jvp` and `jax.custom_vjp`.
- Several sows can append to one name, and a program can enter a scope more than once, in a loop,
  too. A harvest can reap names that a `plant` inside leaves alone, and names in a scope that is not
  in the `allowlist` itself.
- A barrier that the compiler cannot remove ties `key` to the value.

The axes of a reaped value are those of loops and meshes, outermost first, then those of `vmap`, and
then those of the value. If `vmap` turns two conditionals that sow one name into selections, they
count as one; for examples in which both ran, the value is NaN.

For a function with a custom derivative rule, a harvest reaps the values that the function sows. If
the harvest is differentiated, the rule runs instead, and the harvest reaps and plants the values of
the rule; inside a loop, a branch or a function under `jax.jit`, it reaps those of the function.

A harvest traces the function, as `jax.jit` does; the work is linear in the depth of nesting. The
first call compiles it: make a harvest once, and call it often.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from tapax._calling.transform import TransformedFunction, check_function
from tapax._jax import Value
from tapax._marks.context import active_policy
from tapax._marks.tap import tap_p as sow_p  # noqa: F401  (oryx has it, outside of `__all__`)
from tapax._walk.plan import Plan
from tapax.compat._oryx_harvest import OryxHarvest
from tapax.compat._oryx_marks import SownLeaf, check_string, find_caller, mark_sow, nesting, tie

__all__ = ["call_and_reap", "harvest", "nest", "plant", "reap", "sow", "sow_cond"]

T = TypeVar("T")
Fn: TypeAlias = Callable[..., Any]
Names: TypeAlias = Iterable[str] | None


def sow(value: T, *, tag: Hashable, name: str, mode: str = "strict", key: Value = None) -> T:
    """Name a value, and return it, or the value that a harvest plants instead.

    Args:
        value: An array, or a pytree of arrays.
        tag: The namespace of the name; any hashable.
        name: The name.
        mode: `"strict"`, `"clobber"` or `"append"`: the treatment of a name that is sown more than
            once; see `tapax.compat.oryx`.
        key: Any JAX value, on which the returned value then also depends; None for none.

    Returns:
        `value`, or the plant.

    Raises:
        ValueError: If `mode` is not one of these three strings.
        TypeError: If `name` is not a string, or `tag` not hashable.

    Example:
        >>> from tapax.compat import oryx
        >>> f = lambda x: oryx.sow(x + 1.0, tag="intermediate", name="y") * 2.0
        >>> float(f(1.0)), float(oryx.reap(f, tag="intermediate")(1.0)["y"])
        (4.0, 2.0)
    """
    if mode == "cond_clobber":
        raise ValueError(
            f"For 'cond_clobber' mode, use `sow_cond`: `sow` of {name!r} takes no condition."
        )
    if mode not in ("strict", "clobber", "append"):
        raise ValueError(
            f"Invalid mode: {mode}. `sow` of {name!r} takes 'strict', 'clobber' or 'append'."
        )
    return mark_sow(tie(value, key), SownLeaf(tag, (name,), mode))


def sow_cond(
    value: T, pred: Any, *, tag: Hashable, name: str, mode: str = "cond_clobber", key: Value = None
) -> T:
    """Name a value that replaces the earlier value of that name if `pred` is true.

    Args:
        value: An array, or a pytree of arrays.
        pred: A boolean, which may be traced.
        tag: The namespace of the name; any hashable.
        name: The name.
        mode: `"cond_clobber"`, the only mode.
        key: Any JAX value, on which the returned value then also depends; None for none.

    Returns:
        `value`, or the plant.

    Raises:
        ValueError: If `mode` is another string.
        TypeError: If `name` is not a string, or `tag` not hashable.

    Example:
        >>> from tapax.compat import oryx
        >>> def f(x):
        ...     x = oryx.sow_cond(x, x > 0, tag="t", name="positive")
        ...     return oryx.sow_cond(x - 2.0, x > 2, tag="t", name="positive")
        >>> reap = oryx.reap(f, tag="t")
        >>> float(reap(5.0)["positive"]), float(reap(1.0)["positive"])
        (3.0, 1.0)
    """
    if mode != "cond_clobber":
        raise ValueError(
            f"`sow_cond` only supports 'cond_clobber' mode, but for {name!r} `mode` is {mode!r}."
        )
    sown = SownLeaf(tag, (name,), mode, only="plant")
    value = mark_sow(tie(value, key), sown)
    if active_policy() is not None:
        source, reaped = find_caller(), dataclasses.replace(sown, only="reap")
        jax.lax.cond(pred, lambda x: mark_sow(x, reaped, source), lambda x: x, value)
    return value


def nest(f: Callable[..., T], *, scope: str) -> Callable[..., T]:
    """Make a function like `f` whose sown values are in a nested dict under the name `scope`.

    Args:
        f: The function that sows values.
        scope: The name of the nested dict.

    Returns:
        A function with the arguments and the results of `f`.

    Raises:
        TypeError: If `f` is not a function, or `scope` not a string.

    Example:
        >>> from tapax.compat import oryx
        >>> f = lambda x: oryx.sow(x + 1.0, tag="t", name="y")
        >>> nested = oryx.reap(oryx.nest(f, scope="a"), tag="t")(1.0)
        >>> float(nested["a"]["y"])
        2.0
    """
    check_function(f, "nest")
    check_string("scope", scope)

    @functools.wraps(f, updated=())
    def nested(*args: Any, **kwargs: Any) -> T:
        if active_policy() is None:
            return f(*args, **kwargs)
        # The scope is a part of the key of every JAX cache, so that no trace serves two scopes.
        with nesting((*nesting.value, scope)):
            return f(*args, **kwargs)

    return nested


def harvest(
    f: Fn, *, tag: Hashable, allowlist: Names = None, blocklist: Names = (), exclusive: bool = False
) -> Fn:
    """Make a function that plants some sown values of `f`, and reaps the others.

    Args:
        f: The function that sows values, jitted or not.
        tag: The tag of the values to harvest; any hashable.
        allowlist: The names to harvest; None for all of them.
        blocklist: Names not to harvest, and scopes not to enter.
        exclusive: Whether to remove the `sow`s of other tags.

    Returns:
        A function `g(plants, *args, **kwargs)` that returns `(out, reaps)`. It replaces a sown
        value whose name is in the dict `plants` by the plant; the dict `reaps` contains all others.

    Raises:
        TypeError: If `f` is not a function, or a list of names is a string.
        SiteError: When the returned function is called, if a mode or the branches of a conditional
            do not allow the harvest, or if a plant differs in structure, shape or dtype from the
            sown value.

    Example:
        >>> from tapax.compat import oryx
        >>> def f(x):
        ...     y = oryx.sow(x + 1.0, tag="t", name="y")
        ...     return oryx.sow(y * 2.0, tag="t", name="z")
        >>> out, reaps = oryx.harvest(f, tag="t")({"y": 10.0}, 1.0)
        >>> float(out), {name: float(x) for name, x in reaps.items()}
        (20.0, {'z': 20.0})
    """
    return _make("harvest", f, tag, allowlist, blocklist, exclusive)


def plant(
    f: Fn, *, tag: Hashable, allowlist: Names = None, blocklist: Names = (), exclusive: bool = False
) -> Fn:
    """Make a function that replaces some sown values of `f`.

    Args:
        f: The function that sows values, jitted or not.
        tag: The tag of the values to plant; any hashable.
        allowlist: The names to plant; None for all of them.
        blocklist: Names not to plant, and scopes not to enter.
        exclusive: Whether to remove the `sow`s of other tags.

    Returns:
        A function `g(plants, *args, **kwargs)` that returns the result of `f`, with the values in
        the dict `plants` in place of the sown values of these names.

    Raises:
        TypeError: If `f` is not a function, or a list of names is a string.
        SiteError: When the returned function is called, if a plant differs in structure, shape or
            dtype from the sown value.

    Example:
        >>> from tapax.compat import oryx
        >>> f = lambda x: oryx.sow(x + 1.0, tag="t", name="y") * 2.0
        >>> float(oryx.plant(f, tag="t")({"y": 10.0}, 1.0))
        20.0
    """
    return _make("plant", f, tag, allowlist, blocklist, exclusive)


def call_and_reap(
    f: Fn, *, tag: Hashable, allowlist: Names = None, blocklist: Names = (), exclusive: bool = False
) -> Fn:
    """Make a function that returns the result and the sown values of `f`.

    Args:
        f: The function that sows values, jitted or not.
        tag: The tag of the values to reap; any hashable.
        allowlist: The names to reap; None for all of them.
        blocklist: Names not to reap, and scopes not to enter.
        exclusive: Whether to remove the `sow`s of other tags.

    Returns:
        A function of the arguments of `f` that returns `(out, reaps)`: the result of `f`, and a
        dict of its sown values.

    Raises:
        TypeError: If `f` is not a function, or a list of names is a string.
        SiteError: When the returned function is called, if a mode or the branches of a conditional
            do not allow the harvest.

    Example:
        >>> from tapax.compat import oryx
        >>> f = lambda x: oryx.sow(x + 1.0, tag="t", name="y") * 2.0
        >>> out, reaps = oryx.call_and_reap(f, tag="t")(1.0)
        >>> float(out), float(reaps["y"])
        (4.0, 2.0)
    """
    return _make("call_and_reap", f, tag, allowlist, blocklist, exclusive)


def reap(
    f: Fn, *, tag: Hashable, allowlist: Names = None, blocklist: Names = (), exclusive: bool = False
) -> Fn:
    """Make a function that returns the sown values of `f`.

    Args:
        f: The function that sows values, jitted or not.
        tag: The tag of the values to reap; any hashable.
        allowlist: The names to reap; None for all of them.
        blocklist: Names not to reap, and scopes not to enter.
        exclusive: Whether to remove the `sow`s of other tags.

    Returns:
        A function of the arguments of `f` that returns a dict of its sown values.

    Raises:
        TypeError: If `f` is not a function, or a list of names is a string.
        SiteError: When the returned function is called, if a mode or the branches of a conditional
            do not allow the harvest.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from tapax.compat import oryx
        >>> def cumulate(xs):
        ...     step = lambda s, x: (oryx.sow(s + x, tag="t", name="s", mode="append"), None)
        ...     return jax.lax.scan(step, 0.0, xs)[0]
        >>> oryx.reap(cumulate, tag="t")(jnp.array([1.0, 2.0, 4.0]))["s"].tolist()
        [1.0, 3.0, 7.0]
    """
    return _make("reap", f, tag, allowlist, blocklist, exclusive)


def _make(function: str, f: Fn, tag: Hashable, allowed: Any, blocked: Any, exclusive: bool) -> Fn:
    check_function(f, function)
    hash(tag)
    for argument, names in (("allowlist", allowed), ("blocklist", blocked)):
        if isinstance(names, str):
            raise TypeError(
                f"`{argument}` of `{function}` must be a sequence of names, but is the string "
                f"{names!r}. Write [{names!r}]."
            )
    plants = function in ("harvest", "plant")
    plan = Plan(None, None, policy=None, changing=plants)
    lists = None if allowed is None else frozenset(allowed), frozenset(blocked or ())
    transform = OryxHarvest(plan, function, plants, tag, *lists, exclusive)
    call = TransformedFunction(f, transform)

    def run(plants: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with transform.set_weak_plants(plants):
            return call(plants, args, kwargs)

    @functools.wraps(f, updated=())
    def reaped(*args: Any, **kwargs: Any) -> Any:
        return run({}, args, kwargs)

    @functools.wraps(f, updated=())
    def planted(plants: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not isinstance(plants, Mapping):
            raise TypeError(
                f"The first argument of a function made by `{function}` must be a dict of values "
                f"by name, but is of type {type(plants).__name__}."
            )
        return run(jax.tree.map(jnp.asarray, dict(plants)), args, kwargs)

    return planted if plants else reaped
