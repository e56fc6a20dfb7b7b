"""The primitive `tap`: the identity, under a name. The whole mechanism consists of its rules.

A mark in the user's code becomes one equation `y, token = tap[kind=value](x)`. Whenever JAX
transforms the program, it transforms that equation by the rules below:

====================  ==========================  =================================================
kind                  operands -> results         meaning
====================  ==========================  =================================================
`value`               x, [active] -> x, token     the marked value
`tangent`             t, token, [active] -> t     its tangent, in a derivative
`grad`                ct, token, [active] -> ct   its cotangent: a transposed `tangent`
`recomputed`          x, token, [active] -> x     the value, recomputed by remat
`copy`                x, [active] -> x, token     the value, recomputed in a while loop, which
                                                  returns no residuals
`tangent recomputed`  as `tangent`                the tangent of the recomputed value, in a second
                                                  derivative
`grad recomputed`     as `grad`                   its cotangent: a part of the value's cotangent
====================  ==========================  =================================================

So when the user's code takes a gradient, the backward program contains the cotangent of every
marked value, although tapax added nothing to the program for it.

A *token* tells to which call of a site a gradient belongs. It is an array without elements that the
derivative needs from the forward pass. JAX passes it on like every residual, through jit, scan,
cond, remat and shard_map, however often one traced body is used. Following the token from the
`value` to the `grad` pairs the two by data flow. It costs nothing, as it has no bytes.

If a mark `pairs` gradients with values, the taps of its tangents and gradients have the value as an
operand too, after the token. JAX keeps the value for the backward pass or recomputes it, like
everything that a derivative needs.

`active` is a boolean with the outermost mapped axes of the value. It says for which examples the
mark counts. Branches and loop bodies also run for other examples if `vmap` makes a predicate differ
from example to example, or if the loop of a library continues for examples that are done: see
`_walk.mapped_predicates` and `_marks.active_examples`. An `active` without axes has no meaning.
`branches` lists the branches of such conditionals around the tap. `shift` corrects the number of
its call if the branches run in another order than they were written.

`level` is the number of times that JAX had differentiated the value before. A tangent and a
gradient have the level of their derivative, counted from the innermost.

`axes` are the positions of the mapped axes in the operand, outermost first. The tap does not move
the axes of the operand, so a marked program has the operations of the plain one.

`value` and `grad` have an effect, which keeps them from being eliminated if nothing uses their
result.

If an edit may change the value of a tap, the tangent also passes through a `change`: see
`_marks.change`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import ad
from jax.sharding import PartitionSpec

from tapax import _jax
from tapax._jax import Args, Equation, PyTree, Value, typed
from tapax._jax.pytrees import ValueStructure
from tapax._marks.active_examples import active_operands
from tapax._marks.change import change_p, taylor, with_axis
from tapax._marks.context import active_policy
from tapax._marks.scopes import Scopes, path_in
from tapax._sites import Site


@dataclasses.dataclass(frozen=True)
class Mark:
    """A mark in the source: the static half of a site.

    - `path`: the name of the mark; the walk adds the scopes around it.
    - `uid`: a number for every traced mark; all uses of a body that JAX traces once share it.
    - `admitted`: the module filters of the captures that make the result of a module a site.
    - `members`: the number of ensemble members that share the batch of a module.
    - `changing`: whether the value or its gradient may be edited; its derivatives are then those of
      an edit that is not known yet.
    - `replacing`: whether another value may replace it, with the derivatives of the original.
    - `pairs`: whether a reducer compares the gradient with the value.
    - `missing`: the reason why the site has no value; the mark is then on an empty array.
    - `structure`: the structure of the sown value, whose array number `leaf` this mark is on. A
      value without arrays has a mark too.
    """

    path: str
    kind: str
    source: str
    uid: int = dataclasses.field(default_factory=itertools.count().__next__)
    reduce: Callable[[Any, Any], Any] | None = None
    init: Callable[[], Any] | None = None
    op: str = ""
    module: type | None = None
    method: str = ""
    members: int | None = None
    collection: Any = None
    admitted: frozenset[Any] = frozenset()
    changing: bool = False
    replacing: bool = False
    pairs: bool = False
    missing: str = ""
    structure: ValueStructure | None = None
    leaf: int = 0

    @property
    def value_path(self) -> str:
        """The path of the whole value, which a reducer takes as one."""
        return self.path if self.structure is None else self.path.partition(":")[0]

    @property
    def is_last_leaf(self) -> bool:
        return self.structure is None or self.leaf + 1 >= self.structure.count

    def join(self, arrays: Sequence[Value]) -> Any:
        """Build the whole value from its arrays."""
        return arrays[0] if self.structure is None else self.structure.join(arrays)

    def site(self, **found: Any) -> Site:
        """Make the site of the mark, with the further fields in `found`."""
        shared = ("path", "kind", "source", "op", "module", "method", "members", "collection")
        return Site(**{name: getattr(self, name) for name in shared}, **found)

    @property
    def described(self) -> str:
        """The site and its source line, as messages name it."""
        return self.site().described

    def within(self, scopes: Scopes) -> Mark:
        """Add the names of the scopes around the mark to its path."""
        return dataclasses.replace(self, path=path_in(scopes, self.path)) if scopes else self

    def __repr__(self) -> str:
        return repr(self.path)


class TapEffect(_jax.Effect):
    """The effect of taps, which keeps them from being eliminated as dead code."""

    def __repr__(self) -> str:
        return "Tap"


tap_effect = TapEffect()
tap_p = _jax.Primitive("tap")
tap_p.multiple_results = True


def tap(x: Value, mark: Mark) -> Any:
    """Mark an array and return it."""
    params: dict[str, Any] = {"axes": (), "branches": (), "turns": (), "level": 0}
    # An operation in the loop of a library may count the iterations of all examples.
    active = [] if mark.kind in ("op", "name") else active_operands()
    return tap_p.bind(x, *active, mark=mark, kind="value", **params)[0]


MAKES_TOKEN = ("value", "copy")


def _impl(x: Value, *rest: Any, kind: str, **params: Any) -> list[Any]:
    del rest, params
    return [x, typed.zeros((0,), bool)] if kind in MAKES_TOKEN else [x]


def _abstract_eval(x: Value, *rest: Any, kind: str, **params: Any) -> Any:
    del rest, params
    # The token is on the mesh of the value, as JAX may have to shard both alike.
    mesh = x.sharding.update(spec=PartitionSpec(None))
    token = [ShapedArray((0,), jnp.dtype(bool), sharding=mesh)] if kind in MAKES_TOKEN else []
    kept = kind == "value" or kind.startswith("grad")
    return [x, *token], ({tap_effect} if kept else set())


def _lowering(ctx: Any, x: Value, *rest: Any, kind: str, **params: Any) -> Any:
    del rest, params
    if kind not in MAKES_TOKEN:
        return [x]
    empty = typed.lower_fun(lambda: typed.zeros((0,), bool), multiple_results=False)
    return [x, *empty(ctx.replace(avals_in=(), avals_out=ctx.avals_out[1:]))]


def split_shape(eqn: Equation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of the mapped axes of a tap's operand, and the shape of the value itself."""
    axes, shape = eqn.params["axes"], eqn.invars[0].aval.shape
    return tuple(shape[a] for a in axes), tuple(n for i, n in enumerate(shape) if i not in axes)


def operands(kind: str, mark: Mark) -> int:
    """Return the number of operands of a tap before `active`."""
    if kind in MAKES_TOKEN:
        return 1
    return 3 if mark.pairs and kind != "recomputed" else 2


def _batch(axis_data: Any, args: Args, dims: Any, *, axes: Any, **params: Any) -> Any:
    count = operands(params["kind"], params["mark"])
    (x, *token), active = args[:count], args[count:]
    active_dims = dims[count:]
    # A gradient and its value have their axes in the same positions.
    pair, pair_dim = (token.pop(), dims[2]) if count == 3 else (None, None)
    dim = pair_dim if dims[0] is None else dims[0]
    if active and active_dims[0] is None and active[0].ndim == 0:
        # The predicate is equal for all examples, so the branch runs only if it counts.
        active, active_dims = (), ()
    if dim is None and not any(d is not None for d in active_dims):
        out = tap_p.bind(*args[:count], *active, axes=axes, **params)
        return out, [None] * len(out)
    dim = 0 if dim is None else dim
    x = with_axis(x, dims[0], dim, axis_data.size)
    if count == 3:
        token.append(with_axis(pair, pair_dim, dim, axis_data.size))
    # `active` leads with the mapped axes, outermost first, and this one is the outermost so far.
    # The mapped axis of a token has no meaning.
    active = [
        typed.bdim_at_front(v, d, axis_data.size) for v, d in zip(active, active_dims, strict=True)
    ]
    axes = (dim, *(a + (a >= dim) for a in axes))
    out = tap_p.bind(x, *token, *active, axes=axes, **params)
    return out, [dim, None][: len(out)]


def _zero(primal: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


_TANGENTS = {"value": "tangent", "recomputed": "tangent recomputed", "copy": "tangent recomputed"}


def _jvp(primals: PyTree, tangents: PyTree, *, kind: str, **params: Any) -> Any:
    x, *rest = primals
    t = tangents[0]
    if kind in MAKES_TOKEN:
        params["mark"] = _renewed(params["mark"])
    deeper = params["level"] + (kind in _TANGENTS)
    out = tap_p.bind(x, *rest, kind=kind, **(params | {"level": deeper}))
    if type(t) is ad.Zero:
        t_out = _zero(out[0])
    elif kind in _TANGENTS:
        token, *active = [*out[1:], *rest]
        t = _slope(token, x, t, "value", params)
        value = [out[0]] if params["mark"].pairs else []
        (t_out,) = tap_p.bind(t, token, *value, *active, kind=_TANGENTS[kind], **params)
    elif kind.startswith("grad"):
        t_out = _slope(rest[0], x, t, "grad", params)
    else:
        # The derivative of a tangent is not a tangent of the marked value.
        t_out = t
    return out, [t_out, *(_zero(o) for o in out[1:])]


def _renewed(mark: Mark) -> Mark:
    """Return a mark with the settings of the present capture.

    A library may keep a jaxpr that it traced during another one.
    """
    policy = active_policy()
    if policy is None or all(getattr(mark, k) == v for k, v in policy.on_marks.items()):
        return mark
    return dataclasses.replace(mark, **policy.on_marks)


def _slope(token: Value, x: Value, t: Value, of: str, params: dict[str, Any]) -> Any:
    """Return the tangent of the edited `x`."""
    if not params["mark"].changing:
        return t
    return change_p.bind(token, x, t, order=1, **_as_change(of, params))


def _as_change(of: str, params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of the `change` of a tap, without its order."""
    kept = {name: params[name] for name in ("mark", "axes", "branches", "level")}
    return {"of": of, "transposed": False, "in_value": (True,) * len(params["axes"]), **kept}


def _along_curves(primals: Any, series: Any, *, kind: str, **params: Any) -> Any:
    """Evaluate a tap along a curve of values, for `jax.experimental.jet`."""
    x, *rest = primals
    terms = series[0]
    if kind in MAKES_TOKEN:
        params["mark"] = _renewed(params["mark"])
    out = tap_p.bind(x, *rest, kind=kind, **params)
    of = "value" if kind in _TANGENTS else "grad" if kind.startswith("grad") else ""
    if of and params["mark"].changing:
        token = out[1] if kind in MAKES_TOKEN else rest[0]
        change = _as_change(of, params)
        degrees = range(1, len(terms) + 1)
        terms = [taylor(token, [[x, *series[0]]], n, 0, **change) for n in degrees]
    return out, [terms, *(None for _ in out[1:])]


def _transpose(cts: PyTree, t: Value, *rest: Any, kind: str, **params: Any) -> Any:
    del t
    ct = cts[0]
    if type(ct) is not ad.Zero and kind in _TANGENTS.values():
        (ct,) = tap_p.bind(ct, *rest, kind=kind.replace("tangent", "grad"), **params)
    return [ct, *(None for _ in rest)]


def _partial_eval_custom(saveable: Any, unknown: Any, known: Any, eqn: Equation) -> Any:
    """Split a tap for remat: the forward pass keeps the token, the backward pass recomputes x.

    By default JAX would save the result of an effectful equation, and so lose the memory that remat
    saves.
    """
    del saveable
    inputs = [v for v, inst in zip(eqn.invars, known, strict=True) if not inst]
    needed = [v for v in inputs if not isinstance(v, _jax.Literal)]
    if unknown[0] or eqn.params["kind"] != "value":
        if any(unknown):
            true = [True] * len(eqn.outvars)
            return None, eqn, true, true, needed
        false = [False] * len(eqn.outvars)
        return eqn, None, false, false, []
    value, token = eqn.outvars
    x, *active = eqn.invars
    if _jax.is_splitting_while():
        copy = eqn.replace(params=dict(eqn.params, kind="copy"), effects=frozenset[Any]())
        return eqn, copy, [False, False], [True, True], needed
    recomputed = eqn.replace(
        invars=[x, token, *active],
        outvars=[value],
        params=dict(eqn.params, kind="recomputed"),
        effects=frozenset[Any](),
    )
    return eqn, recomputed, [False, False], [True, False], [*needed, token]


def _remat(x: Value, *rest: Any, kind: str, **params: Any) -> Any:
    """Split a tap for `jax_remat3`: return results, a residual, and a function to recompute."""
    out = tap_p.bind(x, *rest, kind=kind, **params)

    def recompute(token: Value, x: Value, *rest: Any) -> Any:
        if kind != "value":
            return tap_p.bind(x, *rest, kind=kind, **params)
        return [*tap_p.bind(x, token, *rest, kind="recomputed", **params), token]

    return out, out[1] if kind == "value" else None, recompute


def _hoist(stage: Any, tracers: Any, params: PyTree) -> Any:
    """Let JAX hoist the value out of a loop, but leave the tap inside, for every iteration.

    The token stays with the tap. A token per iteration costs nothing, as it has no bytes.
    """
    mark = _renewed(params["mark"])
    if params["kind"] != "value" or mark.changing or mark.replacing:
        return stage()
    _, token = stage()
    return [tracers[0], token]


_jax.allow_effect(TapEffect)
_jax.cache_weakly(Mark)
tap_p.def_impl(_impl)
tap_p.def_effectful_abstract_eval(_abstract_eval)
_jax.register_rules(tap_p, _lowering, _batch, _jvp, _transpose)
_jax.register_partial_eval_custom(tap_p, _partial_eval_custom)
_jax.register_partial_eval(tap_p, _hoist)
_jax.register_remat(tap_p, _remat)
_jax.register_jet(tap_p, _along_curves)
