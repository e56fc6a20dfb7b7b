"""The primitive `tap`: the identity, under a name. Its rules are the whole mechanism.

A mark in the user's code becomes one equation `y, token = tap[kind=value](x)`. What JAX does to
the program, it does to that equation through the rules below:

================  =============================  =================================================
kind              operands -> results            what it stands for
================  =============================  =================================================
`value`           x, [live] -> x, token          the marked value
`tangent`         t, token, [live] -> t          its tangent, in a derivative
`grad`            ct, token, [live] -> ct        its cotangent: a transposed `tangent`
`again`           x, token, [live] -> x          the value, computed once more by remat
`copy`            x, [live] -> x, token          the same in a while loop, which keeps no residuals
`tangent again`   as `tangent`                   the tangent of that copy, in a second derivative
`grad again`      as `grad`                      and its cotangent: a part of that of the value
================  =============================  =================================================

So when the user's own code takes a gradient, the backward program carries the cotangent of every
marked value, and nothing was added to the program to get it.

*Tokens* say which call of a site a gradient belongs to. A token is an array without elements that
the derivative needs from the forward pass; JAX carries it as it carries every residual, through
jit, scan, cond, remat and shard_map, however often one traced body is used. Following it from the
`value` to the `grad` pairs the two by data flow. It costs nothing: it has no bytes.

A gradient that is to be compared with its value has that as an operand too, after the token, if the
mark says that it `pairs` them. JAX keeps it for the backward pass, or computes it once more, as it
does with everything that a derivative needs.

*Live* is a boolean with the outermost mapped axes of the value. It is there where `vmap` made the
predicate of a conditional or of a loop differ from example to example, or a library made its loop
go on for examples that are done, so that branches and bodies run for examples that they do not
count for. It says for which they do: see `_walk.mapped_predicates` and `_marks.liveness`. One
without axes says nothing. `branches` says which branches of such conditionals the tap was in, and
`shift` by how much the number of its call is off, where branches run in another order than they
were written in.

`level` says how many times the value had been differentiated before: a tangent and a gradient have
that of the derivative that they belong to, from the innermost on.

`axes` are the positions of the mapped axes in the operand, outermost first. The operand itself is
left as it lies, so that a marked program has the operations of the plain one.

`value` and `grad` carry an effect, which keeps them alive where nothing uses their result.

Where an edit may change what a tap carries, the tangent goes through a `change` as well: see
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
from tapax._marks.change import change_p, with_axis
from tapax._marks.liveness import live_operands
from tapax._marks.scopes import Scopes, path_in
from tapax._sites import Site


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a mark in the source says: the static half of a site.

    `path` is without the scopes around the mark until the walk adds them. `uid` is new for every
    mark that is traced; bodies that JAX traces once and uses several times share it. `admitted` are
    the policies of the captures by which a module's result is a site, `members` those of an
    ensemble that share its batch. `changing` if the value, or its gradient, may be edited: then its
    derivatives are those of an edit that is not known yet. `replacing` if another value may come in
    its place, whose derivatives are those of the value. It `pairs` the gradient with the value
    if a reducer compares them. `structure` is that of the value whose arrays are marked, of which
    this is number `leaf`; a value without arrays has a mark all the same.
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
    structure: ValueStructure | None = None
    leaf: int = 0

    @property
    def value_path(self) -> str:
        """The path of the whole value, which is reduced as one."""
        return self.path if self.structure is None else self.path.partition(":")[0]

    @property
    def is_last_leaf(self) -> bool:
        return self.structure is None or self.leaf + 1 >= self.structure.count

    def join(self, arrays: Sequence[Value]) -> Any:
        """The whole value, made of its arrays."""
        return arrays[0] if self.structure is None else self.structure.join(arrays)

    def site(self, **found: Any) -> Site:
        """The site that it marks, with what was `found` out about it."""
        shared = ("path", "kind", "source", "op", "module", "method", "members", "collection")
        return Site(**{name: getattr(self, name) for name in shared}, **found)

    @property
    def described(self) -> str:
        """The words by which messages tell the user which site it is."""
        return self.site().described

    def within(self, scopes: Scopes) -> Mark:
        """The mark with the names of the scopes around it."""
        return dataclasses.replace(self, path=path_in(scopes, self.path)) if scopes else self

    def __repr__(self) -> str:
        return repr(self.path)


class TapEffect(_jax.Effect):
    """Keeps taps alive."""

    def __repr__(self) -> str:
        return "Tap"


tap_effect = TapEffect()
tap_p = _jax.Primitive("tap")
tap_p.multiple_results = True


def tap(x: Value, mark: Mark) -> Any:
    """Marks an array; returns it."""
    params: dict[str, Any] = {"axes": (), "branches": (), "shift": 0, "level": 0}
    # Operations of a library's loop may count its iterations, which are those of all examples.
    live = [] if mark.kind in ("op", "name") else live_operands()
    return tap_p.bind(x, *live, mark=mark, kind="value", **params)[0]


MAKES_TOKEN = ("value", "copy")


def _impl(x: Value, *rest: Any, kind: str, **params: Any) -> list[Any]:
    del rest, params
    return [x, typed.zeros((0,), bool)] if kind in MAKES_TOKEN else [x]


def _abstract_eval(x: Value, *rest: Any, kind: str, **params: Any) -> Any:
    del rest, params
    # On the mesh of the value, as JAX may have to divide both alike.
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
    """The sizes of the mapped axes of what a tap carries, and the shape of the value itself."""
    axes, shape = eqn.params["axes"], eqn.invars[0].aval.shape
    return tuple(shape[a] for a in axes), tuple(n for i, n in enumerate(shape) if i not in axes)


def operands(kind: str, mark: Mark) -> int:
    """How many operands a tap has before `live`: a plain value has no token."""
    if kind in MAKES_TOKEN:
        return 1
    return 3 if mark.pairs and kind != "again" else 2


def _batch(axis_data: Any, args: Args, dims: Any, *, axes: Any, **params: Any) -> Any:
    own = operands(params["kind"], params["mark"])
    (x, *token), live = args[:own], args[own:]
    live_dims = dims[own:]
    # A gradient and its value have their axes in the same places.
    pair, pair_dim = (token.pop(), dims[2]) if own == 3 else (None, None)
    dim = pair_dim if dims[0] is None else dims[0]
    if live and live_dims[0] is None and live[0].ndim == 0:
        # The predicate is the same for all examples: the branch runs only where it counts.
        live, live_dims = (), ()
    if dim is None and not any(d is not None for d in live_dims):
        out = tap_p.bind(*args[:own], *live, axes=axes, **params)
        return out, [None] * len(out)
    dim = 0 if dim is None else dim
    x = with_axis(x, dims[0], dim, axis_data.size)
    if own == 3:
        token.append(with_axis(pair, pair_dim, dim, axis_data.size))
    # `live` leads with the mapped axes, outermost first, and this one is the outermost yet. What
    # axis a token was given means nothing.
    live = [typed.bdim_at_front(v, d, axis_data.size) for v, d in zip(live, live_dims, strict=True)]
    axes = (dim, *(a + (a >= dim) for a in axes))
    out = tap_p.bind(x, *token, *live, axes=axes, **params)
    return out, [dim, None][: len(out)]


def _zero(primal: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


_TANGENTS = {"value": "tangent", "again": "tangent again", "copy": "tangent again"}


def _jvp(primals: PyTree, tangents: PyTree, *, kind: str, **params: Any) -> Any:
    x, *rest = primals
    t = tangents[0]
    deeper = params["level"] + (kind in _TANGENTS)
    out = tap_p.bind(x, *rest, kind=kind, **(params | {"level": deeper}))
    if type(t) is ad.Zero:
        t_out = _zero(out[0])
    elif kind in _TANGENTS:
        token, *live = [*out[1:], *rest]
        t = _slope(token, x, t, "value", params)
        value = [out[0]] if params["mark"].pairs else []
        (t_out,) = tap_p.bind(t, token, *value, *live, kind=_TANGENTS[kind], **params)
    elif kind.startswith("grad"):
        t_out = _slope(rest[0], x, t, "grad", params)
    else:
        # The derivative of a tangent is no tangent of the marked value.
        t_out = t
    return out, [t_out, *(_zero(o) for o in out[1:])]


def _slope(token: Value, x: Value, t: Value, of: str, params: dict[str, Any]) -> Any:
    """The tangent of what an edit makes of `x`."""
    if not params["mark"].changing:
        return t
    kept = {name: params[name] for name in ("mark", "axes", "branches", "level")}
    own = (True,) * len(params["axes"])
    return change_p.bind(token, x, t, of=of, order=1, transposed=False, own=own, **kept)


def _transpose(cts: PyTree, t: Value, *rest: Any, kind: str, **params: Any) -> Any:
    del t
    ct = cts[0]
    if type(ct) is not ad.Zero and kind in _TANGENTS.values():
        (ct,) = tap_p.bind(ct, *rest, kind=kind.replace("tangent", "grad"), **params)
    return [ct, *(None for _ in rest)]


def _partial_eval_custom(saveable: Any, unknown: Any, known: Any, eqn: Equation) -> Any:
    """How remat splits a tap: forward the value and its token, backward the value once more.

    Left to itself, JAX would save the result of an effectful equation, and so lose the memory that
    remat saves.
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
    x, *live = eqn.invars
    if _jax.is_splitting_while():
        copy = eqn.replace(params=dict(eqn.params, kind="copy"), effects=frozenset[Any]())
        return eqn, copy, [False, False], [True, True], needed
    again = eqn.replace(
        invars=[x, token, *live],
        outvars=[value],
        params=dict(eqn.params, kind="again"),
        effects=frozenset[Any](),
    )
    return eqn, again, [False, False], [True, False], [*needed, token]


def _remat(x: Value, *rest: Any, kind: str, **params: Any) -> Any:
    """The same for JAX's newer remat: results, residuals, and how to make the results again."""
    out = tap_p.bind(x, *rest, kind=kind, **params)

    def again(token: Value, x: Value, *rest: Any) -> Any:
        if kind != "value":
            return tap_p.bind(x, *rest, kind=kind, **params)
        return [*tap_p.bind(x, token, *rest, kind="again", **params), token]

    return out, out[1] if kind == "value" else None, again


def _hoist(stage: Any, tracers: Any, params: PyTree) -> Any:
    """What JAX takes out of a loop goes on as it is; the tap stays in, for every iteration.

    The token stays with it: one for each iteration is none too many, as it has no bytes.
    """
    mark = params["mark"]
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
