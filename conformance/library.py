"""The interface of a column of the table, and the verdict on each of its answers.

To add a library, write a class with the methods of `Library`; `conformance/example.py` has one in
40 lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import linecache
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from conformance.problem import WIDTH, Case, Expected, Found, expected

WORKS, REFUSES, ERROR, WRONG = "works", "refuses", "error", "silently wrong"
MISSING, UNDEFINED = "missing", "undefined"
MARKS = (WORKS, REFUSES, ERROR, WRONG, MISSING)
PARTS = ("value", "gradient")


class Library:
    """One column: the answers of a library in every case.

    Set `name`, the heading of the column; `packages`, the distributions whose versions the page
    prints; and `modules`, the import packages of the library. An exception that code in `modules`
    raises on purpose counts as a refusal rather than as an error. A library that finds values and
    gradients in one call sets `together`, and defines `both` in place of `value` and `gradient`.
    """

    name = ""
    packages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    together = False

    def missing(self, case: Case, what: str) -> bool:
        """Return whether the library has no function for this `what`, "value" or "gradient"."""
        return False

    def value(self, case: Case) -> Found:
        """Run the case; return the loss and the values of its layers, in the order of the calls."""
        raise NotImplementedError

    def gradient(self, case: Case) -> Found:
        """Run the case; return the loss and the gradients with respect to the layers' values."""
        raise NotImplementedError

    def both(self, case: Case) -> tuple[Found, Found]:
        """Run the case once; return the answers of `value` and of `gradient`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A mark, and the reason for it if the library did not give the right answer."""

    mark: str
    why: str = ""


def load(where: str) -> Library:
    """Import a library from `module:attribute`; a class is called without arguments."""
    module, _, attribute = where.partition(":")
    found = getattr(importlib.import_module(module), attribute or "LIBRARY")
    return found() if isinstance(found, type) else found


def judge(library: Library, case: Case) -> list[Verdict]:
    """Ask a library for the value and the gradient of a case; compare its answers."""
    verdicts, asked = {}, []
    for what in PARTS:
        if library.missing(case, what):
            verdicts[what] = Verdict(MISSING)
        elif what == "gradient" and not case.backward:
            verdicts[what] = Verdict(UNDEFINED)
        else:
            asked.append(what)
    for parts in [asked] if library.together else [[what] for what in asked]:
        verdicts |= _ask(library, case, parts)
    return [verdicts[what] for what in PARTS]


def _ask(library: Library, case: Case, parts: list[str]) -> dict[str, Verdict]:
    if not parts:
        return {}
    with _warnings_of(library) as warned:
        try:
            with case.context():
                if library.together:
                    found = dict(zip(PARTS, library.both(case), strict=True))
                else:
                    found = {what: getattr(library, what)(case) for what in parts}
                return {what: _compare(case, what, found[what], warned) for what in parts}
        except Exception as error:
            verdict = Verdict(REFUSES if _is_raised_by(library, error) else ERROR, _sentence(error))
            return dict.fromkeys(parts, Verdict(WORKS) if case.refused else verdict)


def _compare(case: Case, what: str, found: Found, warned: list[str]) -> Verdict:
    if case.refused:
        wrong = found.changed
    else:
        wrong = fault(case, found, expected(case, found.reference), what)
    if not wrong:
        return Verdict(WORKS)
    if warned:
        return Verdict(REFUSES, f"{wrong}, with a warning: {_shorten(warned[0])}")
    return Verdict(WRONG, wrong)


def fault(case: Case, found: Found, answer: Expected, what: str) -> str:
    """Describe what is wrong with an answer; return "" if nothing is."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((found.loss, found.arrays))):
        return "a tracer leaks"
    if found.changed:
        return found.changed
    low = case.dtype == jnp.bfloat16
    near: Any = {"rtol": 3e-2, "atol": 3e-2} if low else {"rtol": 1e-4, "atol": 1e-5}
    if not np.allclose(found.loss, answer.loss, **near):
        return "the loss changed"
    wanted = answer.values if what == "value" else answer.grads
    for layer, calls in wanted.items():
        got, want = rows(found.arrays.get(layer, ())), rows(calls)
        if case.masked and len(got) == len(case.x):
            got = _without_skipped(case, got)
        if case.total:
            want = want.sum(0, keepdims=True)
        if case.implicit and what == "gradient" and len(got):
            got, want = got.sum(0, keepdims=True), want.sum(0, keepdims=True)
        if got.dtype != want.dtype and len(got):
            return f"{got.dtype} instead of {want.dtype}"
        summed = len(got) == 1 < len(want) and np.allclose(got, want.sum(0), **near)
        if case.last and len(got) == 1 and not summed:
            want = want[-1:]
        if len(got) != len(want):
            things = what if len(got) == 1 else f"{what}s"
            return f"{len(got)} {things} instead of {len(want)}" + (", summed" if summed else "")
        if not np.allclose(got.astype(np.float32), want.astype(np.float32), **near):
            return f"the {what} differs"
    return ""


def rows(arrays: Any) -> Any:
    """Return one row for every call and iteration, whatever the structure of `arrays`."""
    leaves = jax.tree.leaves(arrays)
    if not leaves:
        return np.zeros((0, WIDTH), np.float32)
    return np.concatenate([np.asarray(leaf).reshape(-1, WIDTH) for leaf in leaves])


def _without_skipped(case: Case, got: Any) -> Any:
    """Drop the rows that skipped the layer, if they are zeros."""
    ran = np.asarray(case.x[:, 0] > 0)
    return got if np.any(got[~ran]) else got[ran]


def _is_raised_by(library: Library, error: Exception) -> bool:
    """Return whether a `raise` statement in the code of the library raised `error`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code.co_filename
    line = linecache.getline(code, trace.tb_lineno).strip()
    return _package(trace.tb_frame) in library.modules and line.startswith("raise")


@contextlib.contextmanager
def _warnings_of(library: Library) -> Iterator[list[str]]:
    """Collect the warnings that code of the library gives; drop all others."""
    found: list[str] = []

    def note(message: Any, category: type[Warning], *_: Any) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and _package(frame) == "warnings":
            frame = frame.f_back
        if issubclass(category, UserWarning) and _package(frame) in library.modules:
            found.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        yield found


def _package(frame: Any) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


def _sentence(error: Exception) -> str:
    """Return the type of an error and its first sentence, without the objects and paths in it."""
    return f"{type(error).__name__}: {_shorten(str(error))}"


def _shorten(text: str) -> str:
    text = re.sub(r"\(label=.*?metadata=\{\}\)", "(…)", text.strip(), flags=re.DOTALL)
    while "<" in text and (less := re.sub(r"<[^<>]*>", "…", text)) != text:
        text = less
    text = re.sub(r"(?<![\w'])(?:/[\w.~-]+){2,}(?::\d+)?", "…", text)
    text = re.sub(r"0x[0-9a-f]+", "…", text)
    text = re.split(r"\n|\. | at /|, but they differ", text)[0]
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= 110 else text[:110].rpartition(" ")[0] + " …"
