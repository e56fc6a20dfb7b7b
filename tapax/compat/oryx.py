"""`sow`, `reap`, `plant`, `harvest` and `nest`, as `oryx.core.interpreters.harvest` documents them.

`sow` names a value; alone it is the identity. `harvest` makes a function `f(x)` into
`g(plants, x) -> (out, reaps)`: a sown value whose name is in `plants` is replaced by what is there,
every other is in `reaps`.

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

A *tag* is a namespace, any hashable: only sows of the tag are touched, unless `exclusive`, which
takes the others out. `allowlist` and `blocklist` are of names. After a harvest there are no sows of
its tag left for another one around it. A sown value may be a pytree; it is reaped and planted as
one. The *mode* says what is done with a name that is sown more than once:

==============  =========================  ========================  ==============================
mode            in straight code           in a scan                 in a while loop
==============  =========================  ========================  ==============================
`strict`        raises                     raises                    raises
`clobber`       the last                   the last; planted in      the last; planted in every
                                           every iteration           iteration
`append`        stacked, if more than one  stacked, iteration        raises
                                           first; planted so too
==============  =========================  ========================  ==============================

`sow_cond(value, pred, ...)` clobbers where `pred` is true, and gives zeros if it never was. The
branches of a conditional sow the same names, with values of one type; otherwise that raises.
`tapax.capture` takes branches that differ, and has masks for them. It also has gradients, which are
not reaped: to it, a sown value is a site `tag/name`.

Types are those of oryx: what is reaped of a Python number, or of anything else of a weak type, is
weak. A number may be planted where a number of another kind is sown: a float for an integer, and
the program goes on with the float. A name in `plants` that nothing sows is ignored, with a warning.
Errors of the modes and the branches start with the words of oryx.

Where it differs from oryx, oryx loses or ignores something:

- Values sown in `shard_map`, `pmap` and linear solves are reaped, each device's along a new leading
  axis; where they cannot be, in a kernel or in the predicate of a while loop, that raises.
- A plant of another structure or shape than the value raises, and so does an array of another
  dtype. So do derivatives by a plant inside `jax.custom_jvp` and `jax.custom_vjp`.
- A name can be appended by several sows, and a scope entered more than once, also in a loop. What
  `plant` is told to leave alone can still be reaped, and so can names in a scope that is not in the
  `allowlist` itself.
- `key` is tied to the value by a barrier that the compiler cannot remove.

The axes of a reaped value are those of loops and meshes, outermost first, those of `vmap`, and its
own. If two conditionals that `vmap` has made selections sow one name, they are taken for one; where
both ran, the value is not a number.

A function with a derivative rule of its own gives what it sows, or, where a derivative is taken of
the harvest, what its rule sows instead, as that is what runs; plants go into the rule too. Inside a
loop, a branch or a function under `jax.jit`, it gives what it sows itself.

Functions are traced, as they are under `jax.jit`; work is linear in the depth of nesting. One is
compiled when it is first called: make it once, and call it often.
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
    """Names a value, an array or a pytree of arrays; returns it, or what is planted instead.

    With a `key`, any JAX value, what is returned depends on that too.
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
    """Names a value that replaces what was sown before under that name, where `pred` is true."""
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
    """A function like `f`, whose sown values are in a dict of their own under the name `scope`."""
    check_function(f, "nest")
    check_string("scope", scope)

    @functools.wraps(f, updated=())
    def nested(*args: Any, **kwargs: Any) -> T:
        if active_policy() is None:
            return f(*args, **kwargs)
        # A part of the key of every cache: what is traced in one scope is not used in another.
        with nesting((*nesting.value, scope)):
            return f(*args, **kwargs)

    return nested


def harvest(
    f: Fn, *, tag: Hashable, allowlist: Names = None, blocklist: Names = (), exclusive: bool = False
) -> Fn:
    """A function `g(plants, *args)` that returns what `f` does, and a dict of what it sows.

    A value whose name is in `plants` is replaced by what is there, and not returned.
    """
    return _make("harvest", f, tag, allowlist, blocklist, exclusive)


def plant(
    f: Fn, *, tag: Hashable, allowlist: Names = None, blocklist: Names = (), exclusive: bool = False
) -> Fn:
    """A function `g(plants, *args)` that returns what `f` does, with the plants sown instead."""
    return _make("plant", f, tag, allowlist, blocklist, exclusive)


def call_and_reap(
    f: Fn, *, tag: Hashable, allowlist: Names = None, blocklist: Names = (), exclusive: bool = False
) -> Fn:
    """A function that returns what `f` does, and a dict of the values that it sows."""
    return _make("call_and_reap", f, tag, allowlist, blocklist, exclusive)


def reap(
    f: Fn, *, tag: Hashable, allowlist: Names = None, blocklist: Names = (), exclusive: bool = False
) -> Fn:
    """A function that returns a dict of the values that `f` sows."""
    return _make("reap", f, tag, allowlist, blocklist, exclusive)


def _make(function: str, f: Fn, tag: Hashable, allowed: Any, blocked: Any, exclusive: bool) -> Fn:
    check_function(f, function)
    hash(tag)
    for argument, names in (("allowlist", allowed), ("blocklist", blocked)):
        if isinstance(names, str):
            raise TypeError(
                f"`{argument}` of `{function}` is a sequence of names, but is the string "
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
                f"The first argument of a function made by `{function}` is a dict of values by "
                f"name, but it is of type {type(plants).__name__}."
            )
        return run(jax.tree.map(jnp.asarray, dict(plants)), args, kwargs)

    return planted if plants else reaped
