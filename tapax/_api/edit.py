"""`edit`: change the values or the gradients of the sites of a function."""

import dataclasses
import functools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax.numpy as jnp
from jax.core import Tracer

from tapax._api.change_builder import ChangeBuilder
from tapax._api.edit_rules import EditOperands, EditRule, make_rule
from tapax._calling.program import TracedCall
from tapax._calling.survey import Spot, survey
from tapax._calling.transform import Transform, check_function, transformed
from tapax._jax import PyTree
from tapax._sites import SiteError, check, flatten, name_of
from tapax._walk.plan import Plan
from tapax.reduce import Reducer

P = ParamSpec("P")
R = TypeVar("R")


def edit(
    fn: Callable[P, R],
    values: Mapping[Any, Any] | Sequence[tuple[Any, Any]] | None = None,
    grads: Mapping[Any, Any] | Sequence[tuple[Any, Any]] | None = None,
    *,
    modules: Any = True,
) -> Callable[P, R]:
    """Make a function like `fn` that changes the values or the gradients of some of its sites.

    An edit is a function `f(x)` or `f(x, site)`, an array, or a number. A function is called on the
    value as `fn` marks it: the value of one call, one iteration, one example of a `vmap`. An array
    replaces that value. It has the shape of the value, or the shape that a capture of the site
    returns, with an axis for each loop and map in front; the axes of outer loops may be left out.
    If the value is the same on all devices of a mesh, the array has no axis for the devices, even
    if a capture has one because the devices run a branch or a loop differently. A number fills the
    value. An edit keeps the shape and the dtype of the value.

    If several edits select one site, they apply in the order in which `values` and `grads` list
    them. A capture of the edited function returns the edited values and gradients.

    `tapax.at(selection, step=i)` edits one iteration of the innermost loop. `i`, an array, and
    everything that a function closes over may be traced, so that a sweep over layers, positions and
    strengths is one program under `jax.vmap`. If a traced `i` is out of range, the values of the
    site become NaN, or stay as they are if they are integers.

    If a call of a site has several gradients, because `fn` differentiates a gradient, the edit
    changes the innermost; the outer ones are derivatives of the edited function. If the backward
    pass of a `jax.custom_vjp` marks a value, the edit changes it only if `fn` itself takes the
    gradient.

    Args:
        fn: The function to edit, jitted or not: a step, a loss, a model.
        values: A mapping from selections of sites to the edits of their values, or a sequence of
            pairs `(selection, edit)`.
        grads: A mapping from selections of sites to the edits of their gradients, or a sequence of
            pairs `(selection, edit)`. `fn` must take the gradients itself. An edited gradient flows
            back to the values from which `fn` computes the site.
        modules: The modules whose results are sites, as in `tapax.capture`.

    Returns:
        A function with the arguments and the results of `fn`. `edit` warns if it was given no edit.

    Raises:
        TypeError: If `fn` is not a function, or an edit is not a function, an array or a number.
        SiteError: If a selection contains `~`, which asks for one of several gradients. When the
            returned function is called: if a selection picks no site, an edit changes the shape or
            the dtype, an edited value never reaches a result, or a step is out of range.

    Example:
        >>> import jax, jax.numpy as jnp, tapax
        >>> def f(x):
        ...     h = tapax.sow(jnp.sin(x), "h")
        ...     return jnp.sum(h * 2)
        >>> x = jnp.array([0.5, 1.5])
        >>> float(tapax.edit(f, values={"h": 0.25})(x))
        1.0
        >>> float(tapax.edit(f, values={"h": lambda h: h + 1})(x) - f(x))
        4.0
        >>> step = jax.jit(jax.grad(f))
        >>> clipped = tapax.edit(step, grads={"h": lambda g: jnp.clip(g, -1.0, 1.0)})
        >>> (clipped(x) / step(x)).tolist()
        [0.5, 0.5]

        Ablate each of three layers in a scan, all in one program:

        >>> def deep(x):
        ...     layer = lambda x, w: (x + tapax.sow(w * x, "h"), None)
        ...     return jax.lax.scan(layer, x, jnp.array([1.0, 2.0, 3.0]))[0]
        >>> ablate = lambda i: tapax.edit(deep, values={tapax.at("h", step=i): 0.0})(1.0)
        >>> float(deep(1.0)), jax.vmap(ablate)(jnp.arange(3)).tolist()
        (24.0, [12.0, 8.0, 6.0])
    """
    check_function(fn, "edit")
    given = [*_rules(values, "values"), *_rules(grads, "grads")]
    if not given:
        warnings.warn(
            f"tapax.edit has no edit for {name_of(fn)}, so the function stays as it is. Pass "
            "`values` or `grads`.",
            stacklevel=2,
        )
    return edited(fn, given, modules)


def edited(
    fn: Callable[P, R], given: Sequence[tuple[EditRule, EditOperands]] = (), modules: Any = True
) -> Callable[P, R]:
    """Make a function like `fn` with some edits, each a rule and its operands."""
    rules, operands = [rule for rule, _ in given], [operand for _, operand in given]
    picked = [tuple(r.selection for r in rules if r.of == of) for of in ("value", "grad")]
    plan = Plan.make(*picked, modules=modules, changing=True)
    return transformed(fn, _EditTransform(plan, tuple(rules)), tuple(operands))


def _rules(edits: Any, argument: str) -> Iterator[tuple[EditRule, EditOperands]]:
    """Convert each edit to a rule and its operands: an array, the number of an iteration."""
    pairs = edits.items() if isinstance(edits, Mapping) else () if edits is None else edits
    for pair in pairs if isinstance(pairs, Iterable) else [pairs]:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                f"`{argument}` must map selections of sites to edits, or be a sequence of pairs of "
                f"a selection and an edit, but it contains {pair!r} of type {type(pair).__name__}."
            )
        selection, what = pair
        if isinstance(what, Reducer):
            raise TypeError(
                f"{argument}[{selection!r}] is the reducer {what}, but an edit must be an array, a "
                "number, or a function of the value. Pass reducers to tapax.capture or "
                "tapax.monitor."
            )
        fn = _as_hashable(what) if callable(what) else None
        array = None if fn else _as_array(what, argument, selection)
        for part in flatten(check(selection, argument)):
            of = "value" if argument == "values" else "grad"
            if isinstance(part, str) and "~" in part:
                raise SiteError(
                    f"{argument}={part!r} selects one of several gradients of a call, but an edit "
                    "always changes the innermost one; the outer ones are derivatives of the "
                    f"edited function. Leave {part[part.index('~') :]!r} out."
                )
            yield make_rule(of, part, fn, array)


def _as_hashable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function without a hash, such as a frozen dataclass of arrays, in one that has it."""
    try:
        hash(fn)
    except TypeError:
        return functools.partial(fn)
    return fn


def _as_array(what: Any, argument: str, selection: Any) -> Any:
    try:
        return what if isinstance(what, (bool, int, float, complex)) else jnp.asarray(what)
    except (TypeError, ValueError):
        raise TypeError(
            f"{argument}[{selection!r}] must be an array, a number, or a function of the value, "
            f"but is {what!r} of type {type(what).__name__}."
        ) from None


@dataclasses.dataclass(frozen=True)
class _EditTransform(Transform):
    """Applies the edits of some rules."""

    plan: Plan
    rules: tuple[EditRule, ...]

    @property
    def is_reusable(self) -> bool:
        functions = (types.FunctionType, types.BuiltinFunctionType)
        return all(rule.fn is None or isinstance(rule.fn, functions) for rule in self.rules)

    def prepare(self, call: TracedCall) -> Any:
        spots = survey(call, self.plan)
        for rule in self.rules:
            _check_reached(rule, spots)
        return spots

    def check(self, prepared: PyTree, operands: PyTree) -> None:
        for rule, given in zip(self.rules, operands, strict=True):
            if rule.step is True and not isinstance(given.step, Tracer):
                for target in (target for spot in prepared for target in rule.targets(spot)):
                    target.spot.check_step(int(given.step), target.loop)

    def run(self, call: TracedCall, prepared: PyTree) -> Any:
        builder = ChangeBuilder(call.checked)
        for spot in prepared:
            for rule, given in zip(self.rules, call.operands, strict=True):
                for target in rule.targets(spot):
                    builder.add(rule, target, given)
        return call.run_changed(builder.changes()), ()


def _check_reached(rule: EditRule, spots: Sequence[Spot]) -> None:
    """Raise if an edit would do nothing."""
    picked = [spot for spot in spots if rule.picks(spot)]
    if not picked:
        raise SiteError(
            f"`edit` was given {rule}, which matches no site. tapax.sites(fn)(*args) lists them."
        )
    if picked and not any(spot.reaches for spot in picked):
        site = picked[0].site
        what = "value" if rule.of == "value" else "gradient"
        raise SiteError(
            f"The edit of the {what} of the {site.described}, would do nothing, because the {what} "
            "never reaches a result of the function. Use the value that tapax.sow returns, instead "
            "of the value passed to it."
        )
