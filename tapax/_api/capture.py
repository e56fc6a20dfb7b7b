"""`capture` and `sites`: trace a function with its marks, and walk its program.

See `_calling.transform` for when a captured function is compiled.
"""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from tapax import _jax
from tapax._calling.free_variables import FreeVariables
from tapax._calling.program import TracedCall
from tapax._calling.transform import Transform, TransformedFunction, check_function
from tapax._frameworks.patches import current
from tapax._jax import Args, Kwargs, PyTree, Value
from tapax._results import SiteTable, Taps
from tapax._sites import Selection, name_of
from tapax._walk.plan import Plan

P = ParamSpec("P")
R = TypeVar("R")


def capture(
    fn: Callable[P, R],
    values: Selection = "**",
    grads: Selection = "**",
    *,
    modules: Any = True,
    steps: int | None = None,
) -> Callable[P, tuple[R, Taps]]:
    """Make a function that runs `fn` and also returns the values and gradients of its sites.

    The sites are the values that `fn` marks with `tapax.sow` and `tapax.perturb`, and the results
    of the modules of Flax, Equinox, Haiku, brainstate and Keras that it calls. The input of a
    module, `GPT/attn.input`, and the weights of an attention layer, `GPT/attn:weights`, are sites
    only if a selection names them.

    Args:
        fn: The function to capture: a train step, a loss, a model. It may be jitted.
        values: Selects the sites whose values to return: a glob such as `"**/attn"`, a predicate on
            `Site`, a rule such as `tapax.ops("dot_general")`, or a sequence of these; None selects
            nothing. A mapping such as `{"**/mlp": tapax.reduce.rms}` returns the result of a
            reducer instead of each value, and the program drops the value; a function of the value,
            or a list of reducers and functions, works too. A reducer alone applies to every site.
        grads: Selects the sites whose gradients to return, as `values` does. `fn` must take these
            gradients itself; see `tapax.grad` for a loss that does not.
        modules: The modules whose results are sites: True for all, False for none, a selection, a
            filter `(module, method_name) -> bool`, a depth (0 for root modules alone, 1 for the
            modules in their attributes too), or `tapax.without("flowjax")` to leave packages out.
            The modules of libraries that run a model, such as diffrax's solvers, are sites only if
            a selection names them, as in `values="**/Tsit5.step"`, or a filter admits them.
        steps: How many of the first iterations of while loops to return. By default a capture
            returns the last iteration.

    Returns:
        A function of the arguments of `fn` that returns `(out, taps)`: the result of `fn`, and the
        `Taps`. It is jitted if `fn` is, with the same options.

    Raises:
        TypeError: If `fn` is not a function or was compiled ahead of time, or if `values` or
            `grads` is not a selection.
        SiteError: When the returned function is called, if a selection names a site exactly but its
            value or gradient cannot be returned. The message says why, and lists the nearest names.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, tapax
        >>> @jax.jit
        ... def step(w, x):
        ...     def loss(w):
        ...         h = tapax.sow(jnp.tanh(x @ w), "h")
        ...         return jnp.sum(h**2)
        ...
        ...     return w - 0.1 * jax.grad(loss)(w)
        >>> w = jax.random.normal(jax.random.key(0), (3, 2))
        >>> new, taps = tapax.capture(step)(w, jnp.array([0.5, -1.0, 2.0]))
        >>> print(np.asarray(taps.values["h"]).round(2))
        [ 0.92 -0.69]
        >>> print(np.asarray(taps.grads["h"]).round(2))  # 2 h: the loss is the sum of h**2
        [ 1.84 -1.39]
    """
    check_function(fn, "capture")
    plan = Plan.make(values, grads, steps, modules, reducing=True)
    if _jax.jit_options(fn) is None:
        return _CapturedFunction(fn, plan)
    read = FreeVariables.of(plan)
    if read.readings or not read.complete:  # a function in it may read something else later
        return _jitted.__wrapped__(fn, plan)
    try:
        return _jitted(fn, plan)
    except TypeError:  # a predicate that cannot be hashed
        return _jitted.__wrapped__(fn, plan)


def sites(fn: Callable[P, Any]) -> Callable[P, SiteTable]:
    """Make a function that lists every site of `fn`. It traces `fn` and computes nothing.

    Args:
        fn: The function whose sites to list, jitted or not.

    Returns:
        A function of the arguments of `fn`, which may be `jax.ShapeDtypeStruct`s. It returns a
        `SiteTable` with the shape, dtype, size and source line of every site.

    Raises:
        TypeError: If `fn` is not a function or was compiled ahead of time.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> def layers(x):
        ...     def layer(x, w):
        ...         return tapax.sow(jnp.tanh(x @ w), "h"), None
        ...
        ...     return jax.lax.scan(layer, x, jnp.ones((12, 4, 4)))[0]
        >>> (site,) = tapax.sites(layers)(jnp.ones(4))
        >>> site.name, site.shape, site.loops
        ('h', (12, 4), ('scan[12]',))
    """
    check_function(fn, "sites")
    captured = capture(fn)

    @functools.wraps(fn)
    def listed(*args: P.args, **kwargs: P.kwargs) -> SiteTable:
        if isinstance(captured, _CapturedFunction):
            return captured.survey(args, kwargs)
        return captured.eval_shape(*args, **kwargs)[1].sites  # pyright: ignore

    return listed


@functools.lru_cache(maxsize=64)
def _jitted(fn: Any, plan: Plan) -> Any:
    """Capture a jitted function as a jitted function with the same options.

    Static, donated and sharded arguments keep their meaning, and calls take JAX's fast path. The
    result is cached, because users write `tapax.capture(step)(...)` inside a loop.
    """
    inner, options = fn.__wrapped__, _jax.jit_options(fn) or {}
    if "out_shardings" in options:
        options["out_shardings"] = (options["out_shardings"], None)

    @functools.wraps(inner)
    def run(*args: Any, **kwargs: Any) -> Any:
        # A framework's adapter replaces this function during a capture.
        return current(inner)(*args, **kwargs)

    call = TransformedFunction(run, _CaptureTransform(plan), jitted=True)

    @functools.wraps(inner)
    def captured(*args: Any, **kwargs: Any) -> Any:
        return call((), args, kwargs)

    return jax.jit(captured, **options)


@dataclasses.dataclass(frozen=True)
class _CaptureTransform(Transform):
    """The transform to the results of a call, and the taps that the plan selects."""

    plan: Plan

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        return call.program.walk(self.plan, call.arrays, warn=True)

    def finish(self, out: PyTree, extra: PyTree) -> Any:
        return out, extra


class _CapturedFunction(Generic[P, R]):
    """A function that returns its result and the taps; it also works as a method of a class."""

    def __init__(self, fn: Callable[P, R], plan: Plan):
        functools.update_wrapper(self, fn, updated=())
        self._plan = plan
        self._call = TransformedFunction(fn, _CaptureTransform(plan))

    def __repr__(self) -> str:
        return f"capture({name_of(self._call.fn)})"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> tuple[R, Taps]:
        return self._call((), args, kwargs)

    def survey(self, args: Args, kwargs: Kwargs) -> SiteTable:
        """List the sites of the function for these arguments."""
        call = self._call.traced_call(args, kwargs)

        def abstract(*arrays: Value) -> Taps:
            return call.program.walk(self._plan, arrays, warn=True)[1]

        return jax.eval_shape(abstract, *call.arrays).sites
