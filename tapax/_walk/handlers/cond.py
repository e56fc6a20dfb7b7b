"""The handler of `lax.cond` and `lax.switch`: the entries of a branch get a mask."""

from tapax import _jax
from tapax._jax import Equation, Value, typed
from tapax._jaxpr.restage import Branch, bind_cond, uneven_axes
from tapax._marks.marked_jaxprs import is_of_two
from tapax._walk.calls import Call, Token
from tapax._walk.entries import Slots, StagedBody, refuse_folded
from tapax._walk.interpreter import Interpreter


def walk_cond(walk: Interpreter, eqn: Equation, args: list[Value]) -> list[Value]:
    index, *values = args
    branches = eqn.params["branches"]
    threads = walk.enter(*branches, uneven=uneven_axes(eqn))
    # Number the calls in the order in which the branches were written.
    order = (1, 0) if is_of_two(branches) else range(len(branches))
    made = {i: walk.stage(branches[i], values, threads, branch=i) for i in order}
    parts = [made[i] for i in range(len(branches))]
    operands = [*parts[0].ins.arrays(values), *walk.thread_arrays(threads)]
    nfolds = len(walk.folds.arrays(threads.folds))
    # A residual may be a token in one branch and an empty placeholder in another.
    merged = Slots(tuple(map(_merged, *(part.outs.tokens for part in parts))))

    def branch_of(part: StagedBody) -> Branch:
        def branch(*flat: Value) -> tuple[list[Value], list[Value]]:
            results = iter(_jax.as_function(part.jaxpr)(*flat))
            outs = part.outs.fill(results)
            rest = list(results)
            recorded = len(rest) - nfolds
            return [*merged.arrays(outs), *rest[recorded:]], rest[:recorded]

        return branch

    types = [part.types[: len(part.types) - nfolds] for part in parts]
    common, recorded = bind_cond(eqn, index, operands, [branch_of(p) for p in parts], types)
    flat = iter(common)
    outs = merged.fill(flat)
    entries = [
        [e.with_arrays(arrays) for e in part.entries]
        for part, arrays in zip(parts, map(iter, recorded), strict=True)
    ]
    for i in order:
        ran = typed.asarray(index) == i
        for entry in entries[i]:
            refuse_folded(entry)
            valid = ran if entry.valid is None else entry.valid
            walk.entries.append(entry._replace(valid=valid))
    certain = [all(seen) for seen in zip(*(part.certain for part in parts), strict=True)]
    walk.folds.restore(threads.folds, list(flat), certain)
    return outs


def _merged(*tokens: Token | None) -> Token | None:
    """Merge the tokens that a result is in several branches; None if it is not a token in any."""
    some = [t for t in tokens if t is not None]
    if not some:
        return None
    return Token(frozenset[Call]().union(*(t.calls for t in some)), any(t.array for t in some))
