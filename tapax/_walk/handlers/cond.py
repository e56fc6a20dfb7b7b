"""The handler of `lax.cond` and `lax.switch`: what a branch records has a mask."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from tapax import _jax
from tapax._walk.calls import Token
from tapax._walk.entries import Slots, refuse_folded
from tapax._walk.interpreter import Interpreter, eager


def walk_cond(walk: Interpreter, eqn: Any, args: list[Any]) -> list[Any]:
    index, *values = args
    branches = eqn.params["branches"]
    threads = walk.enter(*branches)
    # Calls are numbered as they were written.
    order = (1, 0) if walk.of_two else range(len(branches))
    made = {i: walk.stage(branches[i], values, threads, branch=i) for i in order}
    parts = [made[i] for i in range(len(branches))]
    operands = [*parts[0].ins.arrays(values), *walk.handed(threads)]
    nfolds = len(walk.folds.arrays(threads.folds))
    # Residuals of one place may be a token in one branch and an empty filling in another.
    merged = Slots(tuple(map(_merged, *(part.outs.tokens for part in parts))))
    held = [part.types[: len(part.types) - nfolds] for part in parts]

    def padded(chosen: int) -> Any:
        part = parts[chosen]

        def branch(*flat: Any) -> list[Any]:
            results = iter(jaxpr_as_fun(part.jaxpr)(*flat))
            own = part.outs.fill(results)
            rest = list(results)
            inner = rest[: len(rest) - nfolds]
            filled = [
                x
                for i, types in enumerate(held)
                for x in (inner if i == chosen else [_jax.zeros(t) for t in types])
            ]
            return [*merged.arrays(own), *filled, *rest[len(rest) - nfolds :]]

        return branch

    functions = [padded(i) for i in range(len(parts))]
    if eager() and not isinstance(index, Tracer):
        results = functions[int(index)](*operands)
    else:
        jaxprs = tuple(jax.make_jaxpr(f)(*operands) for f in functions)
        results = eqn.primitive.bind(index, *operands, **dict(eqn.params, branches=jaxprs))
    flat = iter(results)
    own = merged.fill(flat)
    entries = [[e.with_arrays(flat) for e in part.entries] for part in parts]
    for i in order:
        ran = jnp.asarray(index) == i
        for entry in entries[i]:
            refuse_folded(entry)
            valid = ran if entry.valid is None else entry.valid
            walk.entries.append(entry._replace(valid=valid))
    certain = [all(seen) for seen in zip(*(part.certain for part in parts), strict=True)]
    walk.folds.restore(threads.folds, list(flat), certain)
    return own


def _merged(*tokens: Token | None) -> Token | None:
    """What a result of several branches stands for, if it is a token in any of them."""
    some = [t for t in tokens if t is not None]
    if not some:
        return None
    return Token(frozenset().union(*(t.calls for t in some)), any(t.array for t in some))
