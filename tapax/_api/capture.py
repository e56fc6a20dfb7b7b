"""`capture` and `sites`: trace a function with its marks, walk the program, return what it holds.

>>> import jax, jax.numpy as jnp, tapax
>>> @jax.jit
... def step(w, x):
...     def loss(w):
...         h = tapax.sow(jnp.tanh(x @ w), "h")
...         return jnp.sum(h**2)
...
...     return w - 0.1 * jax.grad(loss)(w)
>>> w, taps = tapax.capture(step)(jnp.ones((3, 2)), jnp.ones(3))
>>> taps.values["h"].shape, taps.grads["h"].shape
((2,), (2,))
>>> tapax.sites(step)(jnp.ones((3, 2)), jnp.ones(3)).names
['h']

See `_calling.transform` for when a captured function is compiled.
"""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from tapax import _jax
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
    """A function that returns what `fn` does, and the `Taps`: what happened inside.

    `values` and `grads` select the sites whose values and whose gradients to return; gradients are
    those that `fn` itself takes. A site that is named exactly is returned, or the call raises
    `SiteError`. A mapping such as `{"**/mlp": tapax.reduce.rms}` returns statistics instead, taken
    inside the program, or what a function makes of each value; a reducer alone is for every site.
    `steps` keeps the first iterations of while loops instead of the last.

    The inputs of modules, `GPT/attn.input`, and the weights of attention, `GPT/attn:weights`, are
    sites where a selection asks for them.

    Every result of a module of Flax, Equinox, Haiku, brainstate or Keras is a site. `modules`
    narrows that: False, a selection, a filter `(module, method_name) -> bool`, a depth (0 for roots
    alone, 1 for the modules in their attributes too), or packages to leave out,
    `tapax.without("flowjax")`. The modules of libraries that run a model, such as diffrax's
    solvers, are sites only where a selection names them, as in `values="**/Tsit5.step"`, or a
    filter admits them.
    """
    check_function(fn, "capture")
    plan = Plan.make(values, grads, steps, modules, reducing=True)
    if _jax.jit_options(fn) is None:
        return _CapturedFunction(fn, plan)
    try:
        return _jitted(fn, plan)
    except TypeError:  # a predicate that cannot be hashed
        return _jitted.__wrapped__(fn, plan)


def sites(fn: Callable[P, Any]) -> Callable[P, SiteTable]:
    """A function that lists every site of `fn` for some arguments. It traces, computes nothing."""
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
    """A jitted function, captured: a jitted function, with the same options.

    So its static, donated and sharded arguments stay so, and calls take JAX's fast path. The same
    capture of the same function is the same function: it may well be written in a loop.
    """
    inner, options = fn.__wrapped__, _jax.jit_options(fn) or {}
    if "out_shardings" in options:
        options["out_shardings"] = (options["out_shardings"], None)

    @functools.wraps(inner)
    def run(*args: Any, **kwargs: Any) -> Any:
        # A framework has another function in the place of this one while it is captured.
        return current(inner)(*args, **kwargs)

    call = TransformedFunction(run, _CaptureTransform(plan), jitted=True)

    @functools.wraps(inner)
    def captured(*args: Any, **kwargs: Any) -> Any:
        return call((), args, kwargs)

    return jax.jit(captured, **options)


@dataclasses.dataclass(frozen=True)
class _CaptureTransform(Transform):
    """Returns what the plan selects besides the results."""

    plan: Plan

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        return call.program.walk(self.plan, call.arrays, warn=True)

    def finish(self, out: PyTree, extra: PyTree) -> Any:
        return out, extra


class _CapturedFunction(Generic[P, R]):
    """A captured function."""

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
        """The sites of the function, for these arguments."""
        call = self._call.traced_call(args, kwargs)

        def abstract(*arrays: Value) -> Taps:
            return call.program.walk(self._plan, arrays, warn=True)[1]

        return jax.eval_shape(abstract, *call.arrays).sites
