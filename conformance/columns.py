"""The columns of the table: each takes a case, and says what became of value and gradient."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

from conformance import framework
from conformance.problem import Case, Found, fault, right


@dataclasses.dataclass(frozen=True)
class Verdict:
    mark: str
    why: str = ""

    @property
    def bad(self) -> bool:
        return self.mark in ("error", "silently wrong")


NONE = Verdict("none")
NO_GRADIENT = Verdict("–")
Column = Callable[[Case], tuple[Verdict, Verdict]]


def _verdict(case: Case, what: str, run: Callable[[], tuple[Found, Any]]) -> Verdict:
    try:
        found, reference = run()
        wrong = found.changed if case.refused else fault(case, found, right(case, reference), what)
    except Exception as error:
        # Where there is nothing to give, an error is what is wanted.
        return Verdict("works") if case.refused else Verdict("error", _sentence(error))
    return Verdict("silently wrong", wrong) if wrong else Verdict("works")


def _sentence(error: Exception) -> str:
    """The kind of an error and what it says first, without the objects and paths in it."""
    text = re.sub(r"\(label=.*?metadata=\{\}\)", "(…)", str(error).strip(), flags=re.DOTALL)
    while "<" in text and (less := re.sub(r"<[^<>]*>", "…", text)) != text:
        text = less
    text = re.split(r"\n|\. | at /|, but they differ", text)[0]
    text = re.sub(r"\s+", " ", text)
    return f"{type(error).__name__}: {text[:110]}{'…' if len(text) > 110 else ''}"


def _tapax(name: str, case: Case) -> tuple[Verdict, Verdict]:
    models = importlib.import_module(f"conformance.models_{name}").FRAMEWORK
    if not models.has(case):
        return NONE, NONE
    measured: list[Any] = []

    def run(part: int) -> Any:
        if not measured:
            measured.append((framework.measure(models, case), models.build(case).reference))
        found, reference = measured[0]
        return found[part], reference

    value = _verdict(case, "value", lambda: run(0))
    if not case.backward:
        return value, NO_GRADIENT
    return value, _verdict(case, "gradient", lambda: run(1))


def _own(name: str, case: Case) -> tuple[Verdict, Verdict]:
    own = importlib.import_module(f"conformance.own_{name}").OWN
    verdicts = []
    for what in ("value", "gradient"):
        if what == "gradient" and not case.backward:
            verdicts.append(NO_GRADIENT)
        elif own.none(case, what):
            verdicts.append(NONE)
        else:
            measure = getattr(own, what)
            verdicts.append(_verdict(case, what, lambda measure=measure: (measure(case), None)))
    return verdicts[0], verdicts[1]


COLUMNS: dict[str, Column] = {
    "tapax, NNX": functools.partial(_tapax, "nnx"),
    "tapax, Linen": functools.partial(_tapax, "linen"),
    "tapax, Equinox": functools.partial(_tapax, "equinox"),
    "tapax, Haiku": functools.partial(_tapax, "haiku"),
    "tapax, brainstate": functools.partial(_tapax, "brainstate"),
    "tapax, Keras": functools.partial(_tapax, "keras"),
    "Flax NNX": functools.partial(_own, "nnx"),
    "Flax Linen": functools.partial(_own, "linen"),
    "penzai": functools.partial(_own, "penzai"),
}
