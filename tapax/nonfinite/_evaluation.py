"""How both evaluations of a program, `_origins` and `_measurement`, run equations and loops."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from tapax import _jax
from tapax._marks.marked_jaxprs import strip
from tapax._marks.tap import tap_p
from tapax._walk.entries import where

DEBUG_PRIMITIVES = frozenset({"debug_callback", "debug_print"})
"""Debug primitives, skipped when the program is re-run."""


def read(env: Mapping[Any, Any], atoms: Iterable[Any]) -> list[Any]:
    """The values of variables and literals."""
    return [_jax.literal_value(a) if isinstance(a, _jax.Literal) else env[a] for a in atoms]


def bind(eqn: Any, args: list[Any]) -> list[Any]:
    """The results of an equation, with nothing in it changed."""
    if eqn.primitive is tap_p:
        return tap_p.impl(*args, **eqn.params)
    if eqn.primitive.name in DEBUG_PRIMITIVES:
        return []
    return _jax.bind_equation(eqn, args)


def bind_remat(eqn: Any, body: Any, args: Sequence[Any]) -> list[Any]:
    """Bind a remat with another body as a remat, so that it still drops what it should drop.

    The body may have operands before those of the remat.
    """
    jaxpr, consts = _jax.closed(body)
    params = dict(eqn.params, jaxpr=jaxpr)
    if isinstance(params["prevent_cse"], tuple):
        added = len(consts) + len(args) - len(eqn.invars)
        params["prevent_cse"] = (*[False] * added, *params["prevent_cse"])
    return eqn.primitive.bind(*consts, *args, **params)


class Scan:
    """The parts of a scan. `first` is the place of its first operand that the body takes."""

    first = 0

    def __init__(self, eqn: Any, args: Sequence[Any]):
        self._params = eqn.params
        self.body = eqn.params["jaxpr"]
        nconsts, self.ncarry = _jax.scan_split(eqn.params)
        self.consts, self.xs = list(args[:nconsts]), list(args[nconsts + self.ncarry :])
        self.init = [jnp.asarray(x) for x in args[nconsts : nconsts + self.ncarry]]

    def run(self, step: Callable[..., Any], carry: Any) -> Any:
        """Run another step over the inputs, in the order of the scan."""
        options = {name: self._params[name] for name in ("length", "reverse", "unroll")}
        return lax.scan(step, carry, self.xs, **options)


class While:
    """The parts of a while loop. `first` is the place of its first operand that the body takes."""

    def __init__(self, eqn: Any, args: Sequence[Any]):
        self.body, self._test = eqn.params["body_jaxpr"], strip(eqn.params["cond_jaxpr"])
        self.first = eqn.params["cond_nconsts"]
        start = self.first + eqn.params["body_nconsts"]
        self._test_consts, self.consts = args[: self.first], list(args[self.first : start])
        self.init = [jnp.asarray(x) for x in args[start:]]
        self.mapped = bool(_jax.open_jaxpr(self._test).outvars[0].aval.shape)

    def goes_on(self, state: Sequence[Any]) -> Any:
        """Whether the loop goes on; for each example, if it is `mapped`."""
        return jaxpr_as_fun(self._test)(*self._test_consts, *state)[0]

    def any_goes_on(self, state: Sequence[Any]) -> Any:
        go = self.goes_on(state)
        return jnp.any(go) if self.mapped else go

    def keep_done(self, new: Sequence[Any], state: Sequence[Any]) -> list[Any]:
        """The new state; an example that is done keeps its own: so JAX lowers such a loop."""
        new = [jnp.asarray(x) for x in new]
        if not self.mapped:
            return new
        go = self.goes_on(state)
        return [where(go, x, y) for x, y in zip(new, state, strict=True)]


def mesh_axes(eqn: Any) -> list[str]:
    """The axes of the mesh that a shard_map maps over."""
    return [a for a in eqn.params["mesh"].axis_names if a in eqn.params["newly_manual_axes"]]


def shard_map_options(eqn: Any) -> dict[str, Any]:
    """The options for another function that is mapped like a shard_map."""
    options = {name: eqn.params[name] for name in ("mesh", "check_vma")}
    return {**options, "axis_names": frozenset(mesh_axes(eqn))}
