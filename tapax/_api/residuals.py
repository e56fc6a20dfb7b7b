"""`residuals`: list the values that a function keeps for its backward pass."""

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
    """Make a function that lists the values that `fn` keeps for its backward pass.

    Args:
        fn: A loss, or a step that takes gradients itself. A loss returns a real number or
            `(loss, aux)`: the table lists the values that JAX keeps to differentiate it with
            respect to all arguments with real or complex numbers. For a step, the table lists the
            values that the step keeps for its gradients. A function that returns a number computed
            from a gradient, such as a gradient penalty, is a loss.
        policy: A policy of `jax.checkpoint`, such as `jax.checkpoint_policies.dots_saveable`. The
            table then shows the effect of wrapping the differentiated function in `jax.checkpoint`
            with this policy: which values it keeps, and which it recomputes instead.

    Returns:
        A function of the arguments of `fn`, which may be `jax.ShapeDtypeStruct`s. It returns a
        `ResidualTable` of the values that `fn` computes and keeps, largest first;
        `table.arguments` lists the arguments and constants that the backward pass reads as well. It
        traces `fn`, and computes and changes nothing.

    Raises:
        TypeError: If `fn` or `policy` is not a function. When the returned function is called: if
            `fn` neither returns a loss nor takes a gradient, if it has no argument with real or
            complex numbers, or if it closes over a value of a trace that has ended.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> def loss(w, x):
        ...     h = tapax.sow(jnp.exp(x @ w), "h")
        ...     return jnp.sum(jnp.sin(h))
        >>> w, x = jax.ShapeDtypeStruct((3, 2), "float32"), jax.ShapeDtypeStruct((8, 3), "float32")
        >>> for residual in tapax.residuals(loss)(w, x):
        ...     print(residual.site, residual.operation, residual.shape, residual.nbytes)
        h exp (8, 2) 64
         cos (8, 2) 64
        >>> dots = jax.checkpoint_policies.dots_saveable
        >>> table = tapax.residuals(loss, policy=dots)(w, x)
        >>> table.nbytes, table.policy_nbytes
        (128, 64)
        >>> [(residual.operation, residual.change) for residual in table]
        [('exp', 'recomputed'), ('cos', 'recomputed'), ('dot_general', 'kept instead')]
    """
    check_function(fn, "residuals")
    if policy is not None and not callable(policy):
        raise wrong_type(
            "`policy` must be a function, such as jax.checkpoint_policies.dots_saveable, but is",
            policy,
        )

    @functools.wraps(fn, updated=())
    def listed(*args: P.args, **kwargs: P.kwargs) -> ResidualTable:
        plain = _list_residuals(fn, args, kwargs, None)
        if policy is None:
            return _table(plain, None)
        return _table(_compare(plain, _list_residuals(fn, args, kwargs, policy)), policy)

    return listed


@dataclasses.dataclass(frozen=True)
class _ResidualsTransform(Transform):
    """The transform whose trace marks every site; it never runs."""

    plan: Plan


_policy = ContextVariable[RematPolicy | None](None)
"""The policy under which this thread takes gradients."""


def _remat(fn: Function) -> Function:
    return fn if _policy.value is None else typed.checkpoint(fn, policy=_policy.value)


@contextlib.contextmanager
def _rematted_gradients(policy: RematPolicy | None) -> Iterator[None]:
    """Wrap every function that this thread differentiates in `jax.checkpoint`."""
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
        f"{name} captured a traced value of a function that JAX has finished tracing. Pass the "
        "value as an argument, or return it from the function that computes it."
    )


def _compare(plain: Sequence[Residual], rematted: Sequence[Residual]) -> list[Residual]:
    """Mark the residuals that the policy keeps, and add those that it alone keeps."""
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
    """Return the name of a policy, or of the function or class that made it."""
    known = (name for name, p in vars(jax.checkpoint_policies).items() if p is policy)
    name = next(known, None) or getattr(policy, "__qualname__", type(policy).__name__)
    *outer, last = name.split(".<locals>.")
    return outer[-1] if outer else last
