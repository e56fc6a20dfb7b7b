"""Random programs, against a reference that shares no code with the engine.

The tests compare captured values and statistics, of whole values and of parts; `edit` and
`perturbed`, against the same change made by hand in the source; cuts, which compose to
the function; and the search for a NaN.

The seeds are fixed, so every run draws the same programs; `python -m tests.fuzz` draws more. The
tests are split into parts for the workers of xdist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tests.fuzz.compare import (
    Mismatch,
    check,
    check_perturbations,
    check_reference,
    compare,
    expected,
)
from tests.fuzz.cuts import check_cuts
from tests.fuzz.drive import Failure, sweep
from tests.fuzz.edits import check_edits, check_no_edit
from tests.fuzz.generate import edited, losses, programs, selected
from tests.fuzz.nonfinite import check_nonfinite
from tests.fuzz.perturb import check_perturbed
from tests.fuzz.program import (
    Both,
    Cond,
    Do,
    Edit,
    Glob,
    Grad,
    Not,
    Pick,
    Program,
    Rule,
    Scan,
    Scope,
    Twice,
    Vmap,
    While,
)
from tests.fuzz.readings import readings
from tests.fuzz.reductions import STATISTICS, check_reductions
from tests.fuzz.reference import run
from tests.fuzz.selections import check_selections
from tests.fuzz.shrink import shrink, well_formed
from tests.fuzz.sites import sites

pytestmark = pytest.mark.filterwarnings("ignore:The function has no sites")

PARTS = 28
PROGRAMS = 364


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(0, marks=pytest.mark.once),
        *(pytest.param(i, marks=pytest.mark.many) for i in range(1, PARTS)),
    ],
)
def test_random_programs_agree_with_reference(part: int) -> None:
    strategy = programs(devices=jax.device_count())
    sweep(check, strategy, examples=PROGRAMS // PARTS, seed=part)


@pytest.mark.many
@pytest.mark.parametrize("part", range(4))
def test_reference_agrees_with_jax(part: int) -> None:
    strategy = programs(devices=jax.device_count())
    sweep(check_reference, strategy, examples=25, seed=100 + part)


@pytest.mark.many
@pytest.mark.parametrize("part", range(2))
def test_reference_gradients_agree_with_perturbations(part: int) -> None:
    strategy = losses(devices=jax.device_count())
    sweep(check_perturbations, strategy, examples=20, seed=200 + part)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(i, marks=pytest.mark.many) for i in range(1, 3))]
)
def test_edits_agree_with_the_source_changed_by_hand(part: int) -> None:
    sweep(check_edits, edited(devices=jax.device_count()), examples=8, seed=300 + part)


@pytest.mark.once
def test_edits_of_nothing_change_nothing() -> None:
    sweep(check_no_edit, programs(devices=jax.device_count()), examples=8, seed=400)


@pytest.mark.once
def test_perturbations_agree_with_additions_by_hand() -> None:
    sweep(check_perturbed, losses(devices=jax.device_count()), examples=8, seed=500)


@pytest.mark.once
def test_a_cut_function_put_together_is_the_function() -> None:
    sweep(check_cuts, programs(devices=jax.device_count()), examples=8, seed=600)


@pytest.mark.once
def test_statistics_agree_with_those_of_every_execution() -> None:
    sweep(check_reductions, programs(devices=jax.device_count()), examples=5, seed=700)


@pytest.mark.once
def test_a_planted_nan_is_found_where_it_was_planted() -> None:
    sweep(check_nonfinite, programs(devices=jax.device_count()), examples=5, seed=800)


@pytest.mark.once
def test_selections_and_parts_agree_with_the_records_of_their_sites() -> None:
    sweep(check_selections, selected(devices=jax.device_count()), examples=8, seed=900)


@pytest.mark.once
def test_edits_of_parts_agree_with_the_source_changed_by_hand() -> None:
    strategy = edited(devices=jax.device_count(), parts=True)
    sweep(check_edits, strategy, examples=8, seed=1000)


LOOPED = Program((Scan((Vmap((Do("sin", "a"),)), Do("tanh", "b")), length=3),), seed=1)


def test_statistics_of_other_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_reductions(LOOPED)
    monkeypatch.setitem(STATISTICS, "moments", lambda x: (x.mean(), x.var(ddof=1)))
    with pytest.raises(Mismatch, match="moments"):
        check_reductions(LOOPED)


@pytest.mark.parametrize(
    "fault",
    [
        lambda found: None,
        lambda found: found and replace(found, iterations=(7,)),
        lambda found: found and replace(found, index=(1,)),
        lambda found: found and replace(found, operation="sin"),
    ],
)
def test_another_finding_is_refused(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_nonfinite(LOOPED)
    right = tapax.find_nonfinite
    monkeypatch.setattr(tapax, "find_nonfinite", lambda fn: lambda *args: fault(right(fn)(*args)))
    with pytest.raises(Mismatch):
        check_nonfinite(LOOPED)


EDITED = Program(
    (
        Scan((Do("sin", "a"),), length=3),
        Vmap((Do("tanh", "c"), Do("mix"), Do("sin")), outer=0),
        Grad((Do("sin", "b"), Do("tanh", "b"))),
    ),
    how="jit inside",
    edits=(Edit("a", "sin", step=1), Edit("b@1", "turn", "grad"), Edit("c", "array", axes=True)),
)


def _other(change: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `tapax.edit` to change the pairs that it gets."""
    right = tapax.edit
    return lambda fn, values, grads: right(fn, *map(list, change(values, grads)))


WRONG: dict[str, Callable[..., Any]] = {
    "nothing is changed": lambda values, grads: ([("a", lambda x: x)], ()),
    "a lost edit of a gradient": lambda values, grads: (values, ()),
    "an edit of every iteration": lambda values, grads: (
        [(getattr(name, "selection", name), what) for name, what in values],
        grads,
    ),
    "another iteration": lambda values, grads: (
        [(tapax.at("a", step=2), jnp.sin), values[1]],
        grads,
    ),
    "another call": lambda values, grads: (values, [("b@0", grads[0][1])]),
    "every call": lambda values, grads: (values, [("b", grads[0][1])]),
    "examples swapped": lambda values, grads: ([values[0], ("c", values[1][1][::-1])], grads),
}


def test_edits_by_hand_agree() -> None:
    check_edits(EDITED)


@pytest.mark.parametrize("fault", WRONG)
def test_comparison_refuses_edits(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tapax, "edit", _other(WRONG[fault]))
    with pytest.raises(Mismatch):
        check_edits(EDITED)


EDITED_PARTS = Program(
    (Scan((Do("sin", "a"), Do("tanh"), Do("mix")), length=3), Grad((Do("sin", "b"),))),
    edits=(Edit("a", "scale", step=1, index="last"), Edit("b", "scale", "grad", index="first")),
)

WRONG_PARTS: dict[str, Callable[..., Any]] = {
    "the whole value": lambda values, grads: ([(tapax.at("a", step=1), values[0][1])], grads),
    "another part": lambda values, grads: ([(tapax.at("a", step=1, index=0), values[0][1])], grads),
    "another iteration": lambda values, grads: (
        [(tapax.at("a", step=2, index=-1), values[0][1])],
        grads,
    ),
    "the whole gradient": lambda values, grads: (values, [("b", grads[0][1])]),
}


@pytest.mark.parametrize("fault", WRONG_PARTS)
def test_comparison_refuses_edits_of_other_parts(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_edits(EDITED_PARTS)
    monkeypatch.setattr(tapax, "edit", _other(WRONG_PARTS[fault]))
    with pytest.raises(Mismatch):
        check_edits(EDITED_PARTS)


SELECTED = Program(
    (Scan((Scope((Do("sin", "a"), Do("dot", "b"))),), length=3), Grad((Do("tanh", "b"),))),
    picks=(
        Pick((Glob("L/a"),), step=1, stop=3, index="tail"),
        Pick((Glob("L/2/b"),), by="double"),
        Pick((Both((Rule(), Glob("L/**"))),), index="last", by="rms"),
        Pick((Not((Glob("L/**"),)),), "grad", index="some"),
    ),
)

DAMAGED_PARTS: dict[str, Callable[[Any], object]] = {
    "a value": lambda t: t.values.update({"L/a": t.values["L/a"] * 1.0001}),
    "an order of iterations": lambda t: t.values.update({"L/a": t.values["L/a"][::-1]}),
    "another part": lambda t: t.values.update({"L/a": t.values["L/a"][:, ::-1]}),
    "a function left out": lambda t: t.values.update({"L/2/b": t.values["L/2/b"] / 2}),
    "a layer": lambda t: t.values.update({"L/1/b": t.values.pop("L/2/b")}),
    "a statistic": lambda t: t.values.update({"L/dot_general": -t.values["L/dot_general"]}),
    "an extra site": lambda t: t.values.update({"L/b": t.values["L/2/b"]}),
    "an extra gradient": lambda t: t.grads.update({"L/a": t.values["L/a"]}),
    "a part of a gradient": lambda t: t.grads.update(b=t.grads["b"][::-1]),
    "a lost gradient": lambda t: t.grads.clear(),
}


@pytest.mark.parametrize("damage", DAMAGED_PARTS)
def test_comparison_refuses_damaged_parts(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tapax.capture

    def capture(fn: Any, **asked: Any) -> Callable[..., Any]:
        def captured(*args: Any) -> tuple[Any, Any]:
            out, taps = jax.device_get(right(fn, **asked)(*args))
            damaged = SimpleNamespace(
                values=dict(taps.values), grads=dict(taps.grads), valid=dict(taps.valid)
            )
            DAMAGED_PARTS[damage](damaged)
            return out, damaged

        return captured

    check_selections(SELECTED)
    monkeypatch.setattr(tapax, "capture", capture)
    with pytest.raises(Mismatch):
        check_selections(SELECTED)


@pytest.mark.parametrize(
    ("pick", "names"),
    [
        (Pick((Glob("**"),)), ["L/a", "L/b", "b"]),
        (Pick((Glob("*/b"),)), ["L/b"]),
        (Pick((Not((Glob("L/**"),)),)), ["b"]),
        (Pick((Both((Rule(), Glob("L"))),)), ["L/dot_general"]),
        (Pick((Both((Rule(), Not((Glob("L"),)))),)), []),
        (Pick((Glob("L/1/*"),)), ["L/1/a", "L/1/b"]),
    ],
)
def test_selections_are_sets_of_names(pick: Pick, names: list[str]) -> None:
    assert [r.key for r in readings(replace(SELECTED, picks=(pick,)), "value").kept] == names


def test_picks_are_made_small() -> None:
    def has_part_of_a(program: Program) -> bool:
        kept = readings(program, "value").kept
        return any(r.site.name == "L/a" and r.pick.index == "tail" for r in kept)

    small = shrink(SELECTED, has_part_of_a)
    assert small == Program((Scope((Do("sin", "a"),)),), picks=(Pick((Glob(),), index="tail"),))


def taps(program: Program) -> SimpleNamespace:
    """Return the expected capture of the program, with every axis present."""
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
    # `b` is the sine of a value from outside the vmap, so it may lack the mapped axis.
    right.values["b"], right.grads["b"] = right.values["b"][:, 0], right.grads["b"].sum(1)
    compare(reference, right)


@pytest.mark.parametrize("damage", DAMAGE)
def test_comparison_refuses_damaged_results(damage: str) -> None:
    wrong = taps(STRICT)
    DAMAGE[damage](wrong)
    with pytest.raises(Mismatch):
        compare(run(STRICT), wrong)


def test_calls_are_numbered_in_program_order() -> None:
    program = Program((Do("sin", "a"), Twice((Do("tanh", "a"), Do("sin", "b"))), Do("dot", "a")))
    assert [s.label for s in sites(program)] == ["a", "a@1", "b", "a@2", "b@1", "a@3"]


@pytest.mark.many
def test_programs_are_well_formed() -> None:
    def check_form(program: Program) -> None:
        assert well_formed(program)

    sweep(check_form, programs(devices=4), examples=200, seed=0)
    sweep(check_form, edited(devices=4), examples=200, seed=0)
    sweep(check_form, edited(devices=4, parts=True), examples=100, seed=0)
    sweep(check_form, selected(devices=4), examples=100, seed=0)


def test_a_failure_is_reported_as_a_program_that_runs() -> None:
    def refuses_scans(program: Program) -> None:
        assert not any(isinstance(node, Scan) for node in program.body)

    with pytest.raises(Failure) as failure:
        sweep(refuses_scans, programs(), examples=200, seed=0)
    small = failure.value.program
    assert small == Program((Scan((Do("sin"),)),))
    text = failure.value.report().replace("from tests.fuzz.test_fuzz import refuses_scans", "")
    scope: dict[str, Any] = {"refuses_scans": lambda p: None}
    exec(text[text.index("from tests.fuzz.program") :], scope)
    assert scope["program"] == small
