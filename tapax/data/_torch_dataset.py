"""A dataset of activations for the loaders of PyTorch. This module imports PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

from tapax.data._row_source import RowReader

_BITS = {"bfloat16": np.int16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}
"""Dtypes that PyTorch does not accept from NumPy, with integer dtypes of equal width."""


class TorchDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """A dataset whose rows are dicts of tensors; the tensors of a single row are views of files."""

    def __init__(self, acts: RowReader, names: Sequence[str]):
        self._acts, self._names = acts, list(names)
        with warnings.catch_warnings():
            # PyTorch warns once that the tensors are not writable, which is intended.
            warnings.simplefilter("ignore")
            frozen = np.zeros(1)
            frozen.flags.writeable = False
            torch.from_numpy(frozen)

    def __len__(self) -> int:
        return len(self._acts)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: as_tensor(self._acts[name][number]) for name in self._names}

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Read several rows at once, as a loader does for a batch."""
        found = {name: as_tensor(self._acts[name][list(numbers)]) for name in self._names}
        return [{name: x[i] for name, x in found.items()} for i in range(len(numbers))]


def as_tensor(x: np.ndarray) -> Any:
    """Convert an array to a tensor that shares its memory."""
    x = np.asarray(x)
    bits = _BITS.get(x.dtype.name)
    if bits is None:
        return torch.from_numpy(x)
    return torch.from_numpy(x.view(bits)).view(getattr(torch, x.dtype.name))
