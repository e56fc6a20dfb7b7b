"""`OnlineRule`: a pair of functions that learn online, and the types that they use."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._frameworks.recurrent_cells import HiddenError
from tapax._jax import Function, PyTree
from tapax._sites import name_of
from tapax.hidden.online._flat_step import FlatStep, check_params, check_state, trace_flat_step


class OnlineGradients(NamedTuple):
    """The gradient of the loss of one step, the loss, and the output of the step.

    `OnlineRule.update` returns it.

    Attributes:
        grads: The gradient, a pytree like the parameters.
        loss: The loss of the step, a scalar.
        out: The output of the step, a pytree.

    Example:
        >>> import jax.numpy as jnp
        >>> from tapax.hidden import online
        >>> step = lambda w, h, x: (0.5 * h + w * x, 2 * h)
        >>> rule = online.rtrl(step, lambda out, target: (out - target) ** 2)
        >>> learned, _ = rule.update(rule.init(3.0, 1.0, 1.0), 3.0, 1.0, target=0.0)
        >>> float(learned.grads), float(learned.loss), float(learned.out)
        (0.0, 4.0, 2.0)
    """

    grads: Any
    loss: Any
    out: Any


class OnlineRule(NamedTuple):
    """A rule of online learning: two pure functions.

    `rtrl`, `d_rtrl`, `e_prop` and `pp_prop` return it.

    Attributes:
        init: `init(params, state, *inputs)` makes the `OnlineMemory` of a sequence that begins with
            `state`. It reads only the shapes and dtypes of the parameters and the inputs, so that
            `jax.ShapeDtypeStruct` will do.
        update: `update(memory, params, *inputs, target=None)` takes one step, and returns the
            `OnlineGradients` and the memory for the next step.

    Example:
        >>> import jax.numpy as jnp
        >>> from tapax.hidden import online
        >>> step = lambda w, h, x: (0.5 * h + w * x, h)
        >>> rule = online.rtrl(step, lambda out, target: (out - target) ** 2)
        >>> memory, w = rule.init(3.0, 0.0, 1.0), 3.0
        >>> for x in (1.0, 0.0, 0.0):
        ...     learned, memory = rule.update(memory, w, x, target=0.0)
        >>> float(learned.grads)  # the loss is h**2, with h = w / 2
        1.5
    """

    init: Callable[..., Any]
    update: Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnlineMemory:
    """The memory of a sequence, whose size does not depend on the length of the sequence.

    `OnlineRule.init` makes it.

    Attributes:
        state: The current hidden state. `dataclasses.replace(memory, state=...)` replaces it.
        traces: The influences of the parameters on the state, in the layout of the rule.
        feedback: The fixed random matrices of `e_prop`, if it uses them.
        count: The number of steps so far, if the rule needs it.

    Example:
        >>> import jax.numpy as jnp
        >>> from tapax.hidden import online
        >>> step = lambda w, h, x: (0.5 * h + w * x, h)
        >>> rule = online.rtrl(step, lambda out, target: (out - target) ** 2)
        >>> _, memory = rule.update(rule.init(3.0, 1.0, 1.0), 3.0, 1.0, target=0.0)
        >>> float(memory.state)
        3.5
    """

    state: Any
    traces: Any
    feedback: Any = ()
    count: Any = ()


def widen_dtype(dtype: Any) -> Any:
    """Return the dtype of the traces of values of a dtype: 32 bits or more."""
    return jnp.promote_types(dtype, jnp.float32)


def cache_by_shape(step: Any, make: Callable[[FlatStep], Any]) -> Callable[..., Any]:
    """Make a function of `(params, state, inputs)` that calls `make` on the flat step for these.

    The function caches the result for each kind of arguments.
    """
    if not callable(step):
        raise HiddenError(f"`step` must be a function (params, state, *inputs), but is {step!r}.")
    known: dict[Any, Any] = {}

    def find(params: PyTree, state: PyTree, inputs: Sequence[Any]) -> Any:
        check_params(params)
        check_state(state)
        leaves, tree = jax.tree.flatten((params, state, *inputs))
        avals = tuple(map(_get_type, leaves))
        key = tree, avals, _jax.trace_context()
        if key in known:
            return known[key]
        like = [jax.ShapeDtypeStruct(s, d, weak_type=w) for s, d, w in avals]
        given, old, *rest = tree.unflatten(like)
        program = trace_flat_step(step, given, old, rest)
        made = make(program)
        if program.is_reusable:
            known[key] = made
        return made

    return find


def _get_type(leaf: PyTree) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, bool(leaf.weak_type)
    aval = jax.typeof(leaf)
    return aval.shape, aval.dtype, bool(aval.weak_type)


def compute_loss(loss: Callable[..., Any], out: PyTree, target: PyTree) -> Any:
    """Compute the loss of a step; raise if it is not one real number."""
    value = loss(out, target)
    shape, dtype = jnp.shape(value), getattr(value, "dtype", type(value))
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        raise HiddenError(
            f"`loss` ({name_of(loss)}) returned an array of shape {list(shape)} and type {dtype}, "
            "but must return one real number: take a sum or a mean."
        )
    return value


def check_loss(loss: Function) -> None:
    if not callable(loss):
        raise HiddenError(f"`loss` must be a function (out, target) -> scalar, but is {loss!r}.")


def check_decay(decay: Any) -> None:
    """Refuse a decay that is not a number in [0, 1)."""
    is_number = isinstance(decay, (int, float)) and not isinstance(decay, bool)
    if not is_number or not 0 <= decay < 1:
        raise HiddenError(f"`decay` must be a number in [0, 1), but is {decay!r}.")


def settle_dtypes(state: PyTree) -> Any:
    """Make the dtypes of a state strong, like those of every later state."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), state)


def get_state(memory: PyTree) -> Any:
    """Return the hidden state in a memory; raise if `memory` is not a memory."""
    if not isinstance(memory, OnlineMemory):
        raise HiddenError(
            f"`memory` must come from `init` or `update`, but is a {type(memory).__name__}."
        )
    return memory.state


def check_traces(memory: PyTree, start: Callable[[], Any]) -> None:
    """Refuse a memory that was made for arguments of other shapes; `start` makes its traces."""
    given, expected = (jax.tree.map(jnp.shape, x) for x in (memory.traces, jax.eval_shape(start)))
    if given != expected:
        raise HiddenError(
            f"`memory` has traces of shapes {given}, but these parameters and inputs need "
            f"{expected}. Make the memory with an `init` of these parameters and inputs."
        )


def make_grads(params: PyTree, trained: Sequence[int], grads: Sequence[Any]) -> Any:
    """Make gradients like the parameters, with their dtypes, and zeros for integer parameters."""
    leaves, tree = jax.tree.flatten(params)
    made = [jnp.zeros_like(leaf) for leaf in leaves]
    for i, grad in zip(trained, grads, strict=True):
        made[i] = jnp.asarray(grad, jnp.result_type(leaves[i])).reshape(jnp.shape(leaves[i]))
    return tree.unflatten(made)
