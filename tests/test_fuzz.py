"""Random programs: what `capture` returns, against a reference that shares no code with the engine.

The seeds are fixed, so a run is the same everywhere; `python -m tests.fuzz` looks further. The
work is cut into parts for the workers of xdist.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fuzz.compare import (
    Mismatch,
    check,
    check_perturbations,
    check_reference,
    compare,
    expected,
)
from tests.fuzz.drive import Failure, sweep
from tests.fuzz.generate import losses, programs
from tests.fuzz.program import Cond, Do, Grad, Program, Scan, Twice, Vmap, While
from tests.fuzz.reference import run
from tests.fuzz.shrink import well_formed
from tests.fuzz.sites import sites

PARTS = 20
PROGRAMS = 520


@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int) -> None:
    strategy = programs(devices=jax.device_count())
    sweep(check, strategy, examples=PROGRAMS // PARTS, seed=part)


@pytest.mark.parametrize("part", range(4))
def test_reference_agrees_with_jax(part: int) -> None:
    strategy = programs(devices=jax.device_count())
    sweep(check_reference, strategy, examples=25, seed=100 + part)


@pytest.mark.parametrize("part", range(2))
def test_reference_gradients_agree_with_perturbations(part: int) -> None:
    strategy = losses(devices=jax.device_count())
    sweep(check_perturbations, strategy, examples=20, seed=200 + part)


def taps(program: Program) -> SimpleNamespace:
    """What a capture of the program must return, every axis present."""
    reference = run(program)
    out = SimpleNamespace(values={}, grads={}, valid={})
    dtypes = {"float": jnp.result_type(float), "bfloat16": jnp.bfloat16, "int": np.int32}
    for site in reference.sites:
        want = expected(site, reference.records.get(site.path, []), program.steps)
        out.values[site.label] = want.value.array.astype(dtypes[site.dtype])
        if site.conditional:
            out.valid[site.label] = want.valid.array
        for laid, _ in want.grads[:1]:
            out.grads[site.label] = laid.array.astype(dtypes[site.dtype])
    return out


STRICT = Program(
    (
        While((Cond((Do("sin", "c"),), (Do("tanh", "c"),), test="value"),), limit=3, test="value"),
        Grad((Scan((Do("sin", "a"), Vmap((Do("outer", "b"), Do("tanh", "a"))))),)),
        Grad((Do("half", "h"),)),
    ),
    seed=8,
)

DAMAGE: dict[str, Callable[[Any], object]] = {
    "a value": lambda t: t.values.update(a=t.values["a"] * 1.0001),
    "a gradient": lambda t: t.grads.update(a=t.grads["a"] * 1.0001),
    "a swap of axes": lambda t: t.values.update({"a@1": t.values["a@1"].swapaxes(0, 1)}),
    "a swap of calls": lambda t: t.grads.update({"a": t.grads["a@1"][:, 0]}),
    "an order of iterations": lambda t: t.grads.update(a=t.grads["a"][::-1]),
    "a lost site": lambda t: t.values.pop("h"),
    "a lost gradient": lambda t: t.grads.pop("h"),
    "a lost mask": lambda t: t.valid.pop("c"),
    "an extra site": lambda t: t.values.update({"a@2": t.values["a"]}),
    "an extra gradient": lambda t: t.grads.update(c=t.values["c"]),
    "an extra mask": lambda t: t.valid.update(a=np.bool_(True)),
    "a mean for a sum": lambda t: (
        t.values.update(b=t.values["b"][:, 0]),
        t.grads.update(b=t.grads["b"].mean(1)),
    ),
    "a count": lambda t: t.valid.update(c=t.valid["c"] + 1),
    "a mask for a count": lambda t: t.valid.update(c=t.valid["c"] > 0),
    "a dtype": lambda t: t.values.update(h=t.values["h"].astype(np.float32)),
}


def test_comparison_accepts_what_is_right() -> None:
    reference = run(STRICT)
    right = taps(STRICT)
    compare(reference, right)
    # `b` is the sine of a value from outside the vmap: it need not have the mapped axis.
    right.values["b"], right.grads["b"] = right.values["b"][:, 0], right.grads["b"].sum(1)
    compare(reference, right)


@pytest.mark.parametrize("damage", DAMAGE)
def test_comparison_refuses(damage: str) -> None:
    wrong = taps(STRICT)
    DAMAGE[damage](wrong)
    with pytest.raises(Mismatch):
        compare(run(STRICT), wrong)


def test_calls_are_numbered_in_program_order() -> None:
    program = Program((Do("sin", "a"), Twice((Do("tanh", "a"), Do("sin", "b"))), Do("dot", "a")))
    assert [s.label for s in sites(program)] == ["a", "a@1", "b", "a@2", "b@1", "a@3"]


def test_programs_are_well_formed() -> None:
    def check_form(program: Program) -> None:
        assert well_formed(program)

    sweep(check_form, programs(devices=4), examples=200, seed=0)


def test_a_failure_is_reported_as_a_program_that_runs() -> None:
    def refuses_scans(program: Program) -> None:
        assert not any(isinstance(node, Scan) for node in program.body)

    with pytest.raises(Failure) as failure:
        sweep(refuses_scans, programs(), examples=200, seed=0)
    small = failure.value.program
    assert small == Program((Scan((Do("sin"),)),))
    text = failure.value.report().replace("from tests.fuzz.compare import refuses_scans", "")
    scope: dict[str, Any] = {"refuses_scans": lambda p: None}
    exec(text[text.index("from tests.fuzz.program") :], scope)
    assert scope["program"] == small
