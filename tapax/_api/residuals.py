"""`residuals`: what a function keeps for its backward pass, by site, operation and source line.

>>> import jax, jax.numpy as jnp, tapax
>>> def loss(w, x):
...     h = tapax.sow(jnp.exp(x @ w), "h")
...     return jnp.sum(jnp.sin(h))
>>> table = tapax.residuals(loss)(jnp.ones((3, 2)), jnp.ones((8, 3)))
>>> for residual in table:
...     print(residual.site, residual.operation, residual.shape, residual.nbytes)
h exp (8, 2) 64
 cos (8, 2) 64

Nothing is computed: the function is traced, and arrays may be `jax.ShapeDtypeStruct`s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec

import jax
from jax.core import Tracer

from tapax import _jax
from tapax._api.kept_values import RematPolicy, find_kept
from tapax._api.residual_descriptions import ResidualDescriber
from tapax._calling.source_lines import ArgumentNames
from tapax._calling.transform import Transform, TransformedFunction, check_function
from tapax._jax import Args, Function, Kwargs, typed
from tapax._marks.context import ContextVariable
from tapax._results import Residual, ResidualTable
from tapax._sites import name_of, wrong_type
from tapax._walk.plan import Plan

P = ParamSpec("P")


def residuals(
    fn: Callable[P, Any], *, policy: RematPolicy | None = None
) -> Callable[P, ResidualTable]:
    """A function that lists what `fn` keeps from its forward pass for its backward pass.

    Args:
        fn: A loss, which returns a real number or `(loss, aux)`: the table has what is kept if it
            is differentiated with respect to all arguments of real or complex numbers. Or a step
            that takes gradients itself: the table has what is kept for those. A number that is
            computed from a gradient, such as a penalty on one, is a loss.
        policy: A policy of `jax.checkpoint`, such as `jax.checkpoint_policies.dots_saveable`. The
            table then shows what it changes if the differentiated function is wrapped in
            `jax.checkpoint`: which values are kept, and which are computed again instead.

    Returns:
        A function of the arguments of `fn`. It returns a `ResidualTable` of the values that are
        computed and kept, largest first; `table.arguments` are the arguments and constants that the
        backward pass reads besides. It traces `fn`, and computes and changes nothing.

    Raises:
        TypeError: If `fn` returns no loss and takes no gradient, if it has no argument to be
            differentiated by, or if it captured a value of a trace that has ended.

    >>> import jax, jax.numpy as jnp, tapax
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.sin(x @ w) ** 2)
    >>> dots = jax.checkpoint_policies.dots_saveable
    >>> table = tapax.residuals(loss, policy=dots)(jnp.ones((3, 2)), jnp.ones((8, 3)))
    >>> table.nbytes, table.policy_nbytes
    (128, 64)
    >>> [(residual.operation, residual.change) for residual in table]
    [('cos', 'recomputed'), ('mul', 'recomputed'), ('dot_general', 'kept instead')]
    """
    check_function(fn, "residuals")
    if policy is not None and not callable(policy):
        raise wrong_type("`policy` must be a policy of jax.checkpoint, a function, but is", policy)

    @functools.wraps(fn, updated=())
    def listed(*args: P.args, **kwargs: P.kwargs) -> ResidualTable:
        plain = _list_residuals(fn, args, kwargs, None)
        if policy is None:
            return _table(plain, None)
        return _table(_compare(plain, _list_residuals(fn, args, kwargs, policy)), policy)

    return listed


@dataclasses.dataclass(frozen=True)
class _ResidualsTransform(Transform):
    """Marks every site, and runs nothing."""

    plan: Plan


_policy = ContextVariable[RematPolicy | None](None)
"""The policy under which gradients are taken on this thread."""


def _remat(fn: Function) -> Function:
    return fn if _policy.value is None else typed.checkpoint(fn, policy=_policy.value)


@contextlib.contextmanager
def _rematted_gradients(policy: RematPolicy | None) -> Iterator[None]:
    """Within, functions that are differentiated on this thread are wrapped in `jax.checkpoint`."""
    if policy is None:
        yield
        return
    with _policy(policy), _jax.intercept_vjp(_remat):
        yield


def _list_residuals(
    fn: Function, args: Args, kwargs: Kwargs, policy: RematPolicy | None
) -> list[Residual]:
    name = name_of(fn)
    transformed = TransformedFunction(fn, _ResidualsTransform(Plan.make(None, None)))
    try:
        with _rematted_gradients(policy):
            call = transformed.traced_call(args, kwargs)
        kept = find_kept(call, name, policy)
    except jax.errors.UnexpectedTracerError as error:
        raise _captured_tracer(name) from error
    constants = _jax.jaxpr_consts(call.program.jaxpr)
    if _jax.trace_state_clean() and any(isinstance(x, Tracer) for x in constants):
        raise _captured_tracer(name)
    names = ArgumentNames(fn, args, kwargs)

    def name_argument(number: int) -> str:
        return names.name(call.program.keys[number], call.arrays[number])

    describer = ResidualDescriber(name_argument)
    return [describer.describe(value) for value in kept]


def _captured_tracer(name: str) -> TypeError:
    return TypeError(
        f"{name} captured a traced value of a function that JAX has finished tracing: pass the "
        "value as an argument, or return it from the function that computed it."
    )


def _compare(plain: Sequence[Residual], rematted: Sequence[Residual]) -> list[Residual]:
    """Marks what both functions keep, and adds what only the second one, with a policy, keeps."""
    left = Counter(rematted)
    found: list[Residual] = []
    for residual in plain:
        found.append(dataclasses.replace(residual, kept_by_policy=left[residual] > 0))
        left[residual] -= 1
    added = (residual for residual in rematted if left[residual] > 0)
    for residual in added:
        left[residual] -= 1
        found.append(dataclasses.replace(residual, kept=False, kept_by_policy=True))
    return found


def _table(found: Sequence[Residual], policy: RematPolicy | None) -> ResidualTable:
    computed = [residual for residual in found if residual.kind == "computed"]
    given = [residual for residual in found if residual.kind != "computed"]
    return ResidualTable(computed, given, None if policy is None else _policy_name(policy))


def _policy_name(policy: RematPolicy) -> str:
    """The name of a policy, or of the function or class that made it."""
    known = (name for name, p in vars(jax.checkpoint_policies).items() if p is policy)
    name = next(known, None) or getattr(policy, "__qualname__", type(policy).__name__)
    *outer, last = name.split(".<locals>.")
    return outer[-1] if outer else last
