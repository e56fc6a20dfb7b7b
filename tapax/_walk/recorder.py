"""What a walk does with a tap that it meets: whether the plan wants it, and what is kept of it."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tapax import _jax
from tapax._jax import Equation, Value, pytrees, typed
from tapax._jax.pytrees import split_arrays
from tapax._jaxpr.leading_axes import where
from tapax._marks.closed_reducers import ClosedReducer
from tapax._marks.fingerprints import fingerprint
from tapax._marks.sow import SownValue, has_dtype, is_array, leaf_name
from tapax._marks.tap import Mark, split_shape
from tapax._sites import Site, SiteError
from tapax._walk.calls import Call, Calls
from tapax._walk.changes import Around
from tapax._walk.entries import Entry
from tapax._walk.folds import Folds
from tapax._walk.plan import Choice, Plan
from tapax._walk.reductions import reduce, refusal
from tapax.reduce import Reducer


class MetTap(NamedTuple):
    """A tap that a walk has met: the value or gradient of one call, and its value if it is paired.

    `live` is the condition under which it counts; None if it always does.
    """

    eqn: Equation
    values: list[Value]
    live: Value | None
    call: Call
    grad: bool


class Recorder:
    """What is recorded and folded in the body that a walk is in, and which sites it has met."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.entries: list[Entry] = []
        self.folds = Folds(plan)
        self.sites: list[Site] = []
        self.refused: list[tuple[Site, Reducer, str]] = []
        self.around: tuple[Around, ...] = ()
        self._calls = Calls()
        self._reducing: dict[str, Mark] = {}

    def _site(self, call: Call, eqn: Equation, *, grad: bool, pullback: int = 0) -> Site:
        """The site as a predicate sees it: with the loops that it is known to be in."""
        mapped, own = split_shape(eqn)
        folded = call.mark.reduce is not None and not grad
        loops = [] if folded else [a for a in self.around if a.is_loop]
        lengths = [a.size for a in loops if a.size is not None]
        return call.mark.site(
            shape=(*lengths, *mapped, *own),
            dtype=eqn.invars[0].aval.dtype,
            loops=tuple(map(str, loops)),
            rank=len(own),
            call=0 if folded else call.number,
            pullback=pullback,
        )

    def chosen(
        self, eqn: Equation, call: Call, *, grad: bool, whole: bool = False
    ) -> tuple[Site, Choice] | None:
        """Notes a site, or that of the `whole` value; how the plan chooses it, if it does."""
        again = eqn.params["kind"] == "grad again"
        number = self._calls.pullback(call, again=again) if grad else 0
        site = self._site(call, eqn, grad=grad, pullback=number)
        if whole:
            site = dataclasses.replace(site, path=call.mark.value_path)
        if not self.plan.sees(site, call.mark):
            return None
        self.sites.append(dataclasses.replace(site, kind="grad") if grad else site)
        choice = self.plan.choose(site, grad)
        return None if choice is None else (site, choice)

    def record(self, tap: MetTap) -> None:
        """Records a value, or a gradient and perhaps its value."""
        mark, axes = tap.call.mark, tap.eqn.params["axes"]
        folded = mark.reduce is not None and not tap.grad
        # Which values are folded is asked for the first of their arrays.
        is_part = folded and self.folds.is_waiting
        chosen = None
        if not is_part:
            chosen = self.chosen(tap.eqn, tap.call, grad=tap.grad, whole=folded)
            if chosen is None:
                return
        x, *pair = (_mapped_first(x, axes) for x in tap.values)
        if not tap.grad:
            self._check_reducer(mark)
        if folded:
            self.folds.add(mark, x, len(axes), tap.live)
            return
        assert chosen is not None
        again = tap.eqn.params["kind"] == "grad again"
        for entry in self._entries(chosen, tap.call, [x, *pair], tap.live, len(axes)):
            self.entries.append(entry._replace(grad=tap.grad, again=again))

    def _check_reducer(self, mark: Mark) -> None:
        """Raises if a value is sown in two ways that cannot be one site.

        The reducer of a framework's mark is for the call alone, so that there may be several.
        """
        first = self._reducing.setdefault(mark.value_path, mark)
        both = first.reduce is not None and mark.reduce is not None
        if (both and mark.collection is not None) or _reducer(first) == _reducer(mark):
            return
        raise SiteError(
            f"The site {mark.value_path!r} is sown at {first.source} and at {mark.source} with "
            "reducers that differ, so its calls cannot be folded into one. Give both the same "
            "`reduce` and `init`, or another name to one of them."
        )

    def _entries(
        self, chosen: tuple[Site, Choice], call: Call, xs: list[Any], live: Value, mapped: int
    ) -> Iterator[Entry]:
        """What is written down of a value: itself, and what reducers make of it."""
        (site, choice), x = chosen, xs[0]
        several = choice.whole + len(choice.reducers) > 1
        for reducer, step in choice.reducers:
            why = refusal(site, reducer, jax.ShapeDtypeStruct(x.shape[mapped:], x.dtype))
            if why is not None:
                self.refused.append((site, reducer, why))
                continue
            label = f":{reducer.label}" if several else ""
            operands = xs if reducer.paired else xs[:1]
            found, state, valid = reduce(site, reducer, label, operands, mapped, live)
            yield Entry(site, call, False, tuple(state), valid, step=step, reduction=found)
        if choice.whole:
            if live is not None:
                x = where(live, x, _jax.zeros(jax.typeof(x)))
            yield Entry(site, call, False, x, live, step=choice.step)

    def fold_entries(self) -> list[Entry]:
        """The folds as entries; a structured one has one for each array in it."""
        entries: list[Entry] = []
        for path, fold in self.folds.items.items():
            site = next(s for s in self.sites if s.path == path)
            seen = None if fold.seen is True else fold.seen
            sown = site.collection if isinstance(site.collection, SownValue) else None
            is_leaf = is_array if sown is None else has_dtype
            keyed = [(k, x) for k, x in pytrees.leaves_with_path(fold.state) if is_leaf(x)]
            if sown is not None:
                _, structure = split_arrays(fold.state, is_leaf)
                whole = dataclasses.replace(sown, structure=structure)
                site = dataclasses.replace(site, collection=whole)
                keyed = keyed or [((), typed.zeros((0,), bool))]
            for keys, leaf in keyed:
                name = path + (f":{leaf_name(keys)}" if keys else "")
                here = dataclasses.replace(site, path=name)
                chosen = here, self.plan.choose(site, False) or Choice()
                call = self._calls.first(fold.mark.path)
                mapped = fold.mapped if has_dtype(leaf) else 0
                made = self._entries(chosen, call, [typed.asarray(leaf)], seen, mapped)
                entries += [e._replace(folded=True) for e in made]
        return entries


def _reducer(mark: Mark) -> Any:
    """What a mark folds by, as a value to compare; None if it keeps every call."""
    closed = getattr(mark.reduce, "__self__", None)
    if isinstance(closed, ClosedReducer):
        return closed.code
    return None if mark.reduce is None else fingerprint((mark.reduce, mark.init))


def _mapped_first(x: Value, axes: tuple[int, ...]) -> Any:
    order = tuple(range(len(axes)))
    x = x if axes == order else jnp.moveaxis(x, axes, order)
    return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x
