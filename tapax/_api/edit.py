"""`edit`: a function with other values, or other gradients, at some of its sites.

>>> import jax, jax.numpy as jnp, tapax
>>> def f(x):
...     h = tapax.sow(jnp.sin(x), "h")
...     return jnp.sum(h * 2)
>>> float(tapax.edit(f, values={"h": 0.0})(1.0))
0.0
>>> float(tapax.edit(f, values={"h": lambda h: h + 1})(0.0))
2.0
>>> @jax.jit
... def step(w, x):
...     return w - jax.grad(lambda w: f(w * x))(w)
>>> clipped = tapax.edit(step, grads={"h": lambda g: jnp.clip(g, -1.0, 1.0)})
>>> float(step(0.0, 1.0)), float(clipped(0.0, 1.0))
(-2.0, -1.0)

An edit is a function `f(x)` or `f(x, site)` of the value as it was marked: of one call, one
iteration, one example of a `vmap`; or it is an array in its place. An array may have the shape of
that value, or of everything that a capture of the site returns, with an axis for each loop and map,
or anything between: missing axes are the outermost. A number fills the value.

Of a call that has several gradients, one around the other, the innermost is edited: the one around
is that of the edited function. A value that the backward pass of a `jax.custom_vjp` marks is edited
where `fn` itself takes the gradient.

Where several edits pick one site, they are done in the order that they are given in. What a capture
shows of an edited site, value and gradient, is what goes on from there.

`tapax.at(selection, step=i)` edits one iteration of the innermost loop. What an edit is given may
be traced: `i`, an array, whatever a function closes over. So a sweep over layers, positions and
strengths is one program, under `jax.vmap`:

>>> def deep(x):
...     layer = lambda x, w: (tapax.sow(jnp.tanh(w * x), "h"), None)
...     return jax.lax.scan(layer, x, jnp.ones(3))[0]
>>> ablate = lambda i: tapax.edit(deep, values={tapax.at("h", step=i): 0.0})(1.0)
>>> jax.vmap(ablate)(jnp.arange(3)).tolist()
[0.0, 0.0, 0.0]

A step that is out of range raises, where its value is known; where it is traced, the values of the
site are not a number (or, if they are integers, unchanged).
"""

import dataclasses
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax.numpy as jnp
from jax.core import Tracer

from tapax._api.change_builder import ChangeBuilder, EditOperands, EditRule, make_rule
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
    """A function like `fn`, with the values and the gradients of some of its sites changed.

    Both map selections to edits, or are pairs of these. Gradients are those that `fn` itself takes;
    a changed one goes on to what lies before the site.
    """
    check_function(fn, "edit")
    given = [*_rules(values, "values"), *_rules(grads, "grads")]
    if not given:
        warnings.warn(
            f"tapax.edit was given nothing to edit in {name_of(fn)}, which stays as it is.",
            stacklevel=2,
        )
    return edited(fn, given, modules)


def edited(
    fn: Callable[P, R], given: Sequence[tuple[EditRule, EditOperands]] = (), modules: Any = True
) -> Callable[P, R]:
    """A function like `fn` with some edits, each a rule and what it is given."""
    rules, operands = [rule for rule, _ in given], [operand for _, operand in given]
    picked = [tuple(r.selection for r in rules if r.of == of) for of in ("value", "grad")]
    plan = Plan.make(*picked, modules=modules, changing=True)
    return transformed(fn, _EditTransform(plan, tuple(rules)), tuple(operands))


def _rules(edits: Any, argument: str) -> Iterator[tuple[EditRule, EditOperands]]:
    """Each edit as a rule, and what it is given: an array, the number of an iteration."""
    pairs = edits.items() if isinstance(edits, Mapping) else () if edits is None else edits
    for pair in pairs if isinstance(pairs, Iterable) else [pairs]:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                f"`{argument}` maps selections of sites to edits, or is a sequence of pairs of "
                f"these. There is {pair!r} in it, of type {type(pair).__name__}."
            )
        selection, what = pair
        if isinstance(what, Reducer):
            raise TypeError(
                f"{argument}[{selection!r}] is the reducer {what}, which is no edit: an edit is an "
                "array, a number, or a function of the value. Reducers are for tapax.capture and "
                "tapax.monitor."
            )
        fn = what if callable(what) else None
        array = None if fn else _as_array(what, argument, selection)
        for part in flatten(check(selection, argument)):
            of = "value" if argument == "values" else "grad"
            if isinstance(part, str) and "~" in part:
                raise SiteError(
                    f"{argument}={part!r} was given, but which gradient of a call is edited is not "
                    "to be chosen: it is the innermost, and those around are derivatives of what "
                    f"is edited. Leave {part[part.index('~') :]!r} out."
                )
            yield make_rule(of, part, fn, array)


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
    """Does some edits."""

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
    """Raises for an edit that would do nothing."""
    picked = [spot for spot in spots if rule.picks(spot)]
    if not picked:
        raise SiteError(f"{rule} is edited, but it matches no site.")
    if picked and not any(spot.reaches for spot in picked):
        site = picked[0].site
        what = "value" if rule.of == "value" else "gradient"
        raise SiteError(
            f"The {what} of the {site.described}, is edited, but never reaches a result of the "
            "function, so the edit would do nothing. Use what tapax.sow returned in the place of "
            "the value that it was given."
        )
