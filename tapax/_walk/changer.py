"""The changes of values at taps, and the derivatives of edits.

A walk changes the operand of a tap if an edit, or an explicit perturbation, applies to its call.
Where a value is recomputed or differentiated, one tap may stand for several calls of a traced
function: they must share one change.
"""

from collections.abc import Sequence
from typing import Any

from tapax import _jax
from tapax._jax import Equation, Value
from tapax._marks.change import change_p, identity
from tapax._marks.context import active_policy
from tapax._sites import SiteError
from tapax._walk.calls import Call, Token
from tapax._walk.changes import Change, Changes, Key
from tapax._walk.plan import Plan
from tapax._walk.recorder import Recorder


class Changer(Recorder):
    """A recorder that also finds the changes of taps, and evaluates the derivatives of edits.

    It is `nested` if another capture surrounds it, which needs the taps too.
    """

    def __init__(self, plan: Plan, changes: Changes):
        super().__init__(plan)
        self.changes = changes
        self.nested = active_policy() is not None
        self._branches: tuple[int, ...] = ()

    @staticmethod
    def materialize(atoms: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Return the operands, with empty arrays in place of tokens."""
        return [
            a if type(a) is not Token else (_jax.zeros(v.aval) if a.array is None else a.array)
            for v, a in zip(atoms, args, strict=True)
        ]

    def find_change(self, of: str, calls: Sequence[Call], eqn: Equation) -> Change | None:
        """Return the change that all of some calls share; raise if their changes differ."""
        calls = self._calls.narrowed(calls, eqn, self._branches)
        level = eqn.params["level"] if of == "grad" else None
        found = {self.changes.find(Key(of, call.name), level) for call in calls}
        if len(found) > 1:
            raise SiteError(
                f"The site {calls[0].name!r}, marked at {calls[0].mark.source}, is one of "
                f"{len(calls)} calls that share one traced function, but their edits differ. Where "
                "the value is recomputed, tapax cannot tell the calls apart. Edit all of them "
                "alike, or wrap each call in a separate jax.jit or jax.checkpoint."
            )
        return found.pop() if found else None

    def evaluate_derivative(self, eqn: Equation, args: list[Any]) -> Any:
        """Evaluate a `change` equation: the derivative of an edit."""
        params = eqn.params
        token, *operands = args
        calls = self._calls.possible_calls(token, eqn, self._branches)
        self.changes.meet(call.name for call in calls)
        change = self.find_change(params["of"], calls, eqn)
        if change is None and not self.nested:
            return identity(*operands, order=params["order"])
        (array,) = self.materialize(eqn.invars[:1], args[:1])
        if change is None:
            return change_p.bind(array, *operands, **params)

        def then(x: Value) -> Any:
            if not self.nested:
                return x
            fixed = {k: params[k] for k in ("mark", "of", "branches", "level")}
            here: Any = {"order": 0, "transposed": False, "axes": (), "in_value": ()}
            return change_p.bind(array, x, **fixed, **here)

        which = {k: params[k] for k in ("order", "transposed")}
        in_value = params["in_value"]
        return self.changes.apply(change, operands, params["axes"], in_value, then, **which)

    def find_gradient_call(self, eqn: Equation, token: Value) -> Call | None:
        """Return the call of a gradient; None if it may belong to several that the plan ignores."""
        mark, calls = eqn.params["mark"], self._calls.possible_calls(token, eqn, self._branches)
        if len(calls) == 1:
            return calls[0]
        asked = [c for c in calls if self._asks_for_gradient(c, eqn)]
        if not asked and calls:
            return None
        raise SiteError(
            f"The gradient of the {mark.described}, belongs to one of {len(calls)} calls that "
            "share one traced function, and tapax cannot tell to which. Wrap each call in a "
            "separate jax.jit or jax.checkpoint, or leave the site out of `grads`."
        )

    def _asks_for_gradient(self, call: Call, eqn: Equation) -> bool:
        site = self._site(call, eqn, grad=True)
        changed = self.changes.find(Key("grad", call.name), eqn.params["level"])
        return changed is not None or bool(self.plan.choose(site, grad=True))
