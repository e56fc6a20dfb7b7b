"""The source of batches: a sequence, whose batches have numbers, or an iterable."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from tapax._frameworks.interface import key_path
from tapax._jax import PyTree
from tapax._marks.user_warning import warn_user
from tapax._sites import wrong_type
from tapax.data._columns import with_native_bytes
from tapax.data._folder import DatasetFolder, is_dataset
from tapax.data._meter import Meter
from tapax.data._pipeline import BatchTask
from tapax.data._units import UnitPlan, Worker

_NEEDS_SEQUENCE = (
    "`batches` is an iterable, whose batches come once and in order. Give a sequence, with `len` "
    "and `[]`: a list, an array, a Grain source or a dataset of Hugging Face"
)


class BatchSource:
    """The batches of a harvest.

    `first` is the first batch. `count` is the number of batches, or None for an iterable, whose
    length is unknown.
    """

    def __init__(self, batches: Iterable[Any]):
        if isinstance(batches, (Mapping, str, bytes)) or not (
            hasattr(batches, "__getitem__") or isinstance(batches, Iterable)
        ):
            raise wrong_type(
                "`batches` takes a sequence or an iterable of batches; for one batch, give [batch]."
                " It is",
                batches,
            )
        self._sequence: Any = None
        self._iterator: Iterator[Any] = iter(())
        self.count: int | None = None
        if hasattr(batches, "__len__") and hasattr(batches, "__getitem__"):
            self._sequence = batches
            self.count = len(self._sequence)
        else:
            self._iterator = iter(batches)
        try:
            self.first = as_arrays(self._sequence[0] if self.count else next(self._iterator))
        except StopIteration:
            raise ValueError("`batches` has no batches, so there is nothing to harvest.") from None
        self._text: dict[str, str] | None = _find_text(self.first)

    def check(self, worker: Worker, seed: int | None) -> None:
        """Raise if several workers or a seed need a sequence, but the source is an iterable."""
        if self.count is None and worker.count > 1:
            raise ValueError(f"Several workers cannot share these batches: {_NEEDS_SEQUENCE}.")
        if self.count is None and seed is not None:
            raise ValueError(f"`seed` cannot shuffle these batches: {_NEEDS_SEQUENCE}.")

    def check_new(self, folder: DatasetFolder) -> None:
        """Raise if the folder contains a dataset that an iterable would have to continue."""
        if self.count is None and is_dataset(folder.path):
            raise ValueError(
                f"The folder {str(folder.path)!r} already contains a dataset, and this "
                f"harvest cannot continue it: {_NEEDS_SEQUENCE}. If it is complete, "
                "`tapax.open` reads it."
            )

    def tasks(
        self,
        plan: UnitPlan,
        units: Iterable[int] | None,
        meter: Meter,
        is_done: Callable[[int], bool],
    ) -> Iterator[BatchTask]:
        """Read the batches of `units` in order; if `units` is None, all batches of the iterable.

        If another worker finishes a unit meanwhile, as `is_done` tells, the rest of its batches is
        skipped.
        """
        if units is None:
            yield from self._iterated(plan, meter)
            return
        read = 0
        for unit in units:
            batch_numbers = plan.batch_numbers(unit)
            meter.expected = max(meter.expected or 0, read + len(batch_numbers))
            for place, number in enumerate(batch_numbers, 1):
                if place > 1 and is_done(unit):
                    break
                read += 1
                with meter.waiting_for("batches"):
                    batch = as_arrays(self._sequence[number])
                self._warn_of_text(batch)
                yield BatchTask(unit, number, batch, place == len(batch_numbers))

    def _iterated(self, plan: UnitPlan, meter: Meter) -> Iterator[BatchTask]:
        batch = self.first
        for number in itertools.count():
            following, error = _END, None
            try:
                with meter.waiting_for("batches"):
                    following = as_arrays(next(self._iterator, _END))
            except Exception as failed:
                error = failed
            self._warn_of_text(batch)
            unit, place = divmod(number, plan.batches_per_unit)
            is_last = following is _END and error is None
            yield BatchTask(unit, number, batch, is_last or place + 1 == plan.batches_per_unit)
            if error is not None:  # after the batch that came before it, which may finish a unit
                raise error
            if is_last:
                return
            batch = following

    def _warn_of_text(self, batch: PyTree) -> None:
        """Warn once if the text of a batch is not that of the first batch."""
        if self._text is None or (found := _find_text(batch)) == self._text:
            return
        name = next(
            name for name in {**found, **self._text} if found.get(name) != self._text.get(name)
        )
        self._text = None
        warn_user(
            f"The batches have different text: {name!r}. Text is static, so the function is traced "
            "and compiled anew for each batch. Leave the text out of the batches if the function "
            "does not need it."
        )


_END = object()


def _find_text(batch: PyTree) -> dict[str, str]:
    """Find the text in a batch, by its path."""
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    return {key_path(keys): leaf for keys, leaf in leaves if isinstance(leaf, str)}


def as_arrays(batch: PyTree) -> PyTree:
    """Convert the lists of numbers in a batch, such as Hugging Face returns, to arrays.

    Arrays of NumPy are copied: a loader may fill one buffer again for each batch.
    """
    if isinstance(batch, dict):
        return {key: as_arrays(value) for key, value in batch.items()}
    if isinstance(batch, np.ndarray):
        if batch.dtype.kind in "OSU":
            raise TypeError(
                f"A batch has an array of type {batch.dtype}, which JAX does not take. Leave it "
                "out of the batches, or convert it to numbers."
            )
        return with_native_bytes(np.array(batch))
    if isinstance(batch, list) and _are_numbers(batch):
        return np.asarray(batch)
    if isinstance(batch, (list, tuple)):
        parts = map(as_arrays, batch)
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    children, structure = jax.tree.flatten(batch, is_leaf=lambda x: x is not batch)
    if len(children) == 1 and children[0] is batch:
        return batch
    return structure.unflatten(map(as_arrays, children))


def _are_numbers(items: list[Any]) -> bool:
    if not items:
        return False
    if all(isinstance(item, list) for item in items):
        alike = len({len(item) for item in items}) == 1
        return alike and all(_are_numbers(item) for item in items)
    return all(isinstance(item, numbers.Number) for item in items)
