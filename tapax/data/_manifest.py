"""The manifest of a dataset: `manifest.json`, written once before the first shard.

It records the arguments of the harvest, the arrays of a row, and the versions of the libraries. The
configuration has everything that decides the content of the dataset, so a harvest continues a
dataset only if their configurations are equal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tapax.data._units import UnitPlan

FORMAT = "tapax activations"
VERSION = 1
NAME = "manifest.json"


class OtherDatasetError(ValueError):
    """The error of a folder with a dataset of another configuration."""


@dataclasses.dataclass(frozen=True)
class DatasetArray:
    """An array of a dataset: a value or gradient of a site, or a column.

    `shape` and `dtype` describe a stored row; `computed_dtype` is the dtype before the conversion.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    computed_dtype: str
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    `configuration` has a JSON value for everything that decides the content: the arguments of
    `harvest`, the number of batches, and checksums of the first batch and of the weights.
    """

    configuration: Mapping[str, Any]
    arrays: tuple[DatasetArray, ...]
    versions: Mapping[str, str]

    @property
    def hash(self) -> str:
        """A hash of the configuration and the arrays, which the header of every shard repeats."""
        text = json.dumps([self.configuration, self._content], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def _content(self) -> list[Any]:
        """The properties of the arrays that decide the content."""
        return [[a.name, a.kind, a.dtype, list(a.shape)] for a in self.arrays]

    @property
    def unit_plan(self) -> UnitPlan:
        plain = self.configuration
        return UnitPlan(
            plain["batches"], plain["batches_per_unit"], plain["seed"], plain["processes"]
        )

    @property
    def sites(self) -> tuple[DatasetArray, ...]:
        """The arrays that are values and gradients of sites."""
        return tuple(array for array in self.arrays if array.kind != "column")

    @property
    def columns(self) -> tuple[DatasetArray, ...]:
        return tuple(array for array in self.arrays if array.kind == "column")

    @property
    def continuation(self) -> str:
        """How to continue the harvest if it has not finished, as a sentence."""
        if self.configuration["batches"] is None:
            return (
                "Its batches came from an iterable, so it cannot be continued: harvest again into "
                "another folder."
            )
        return "Call `harvest` again with the same arguments to continue."

    def encode(self) -> bytes:
        content = {
            "format": FORMAT,
            "version": VERSION,
            "hash": self.hash,
            "configuration": dict(self.configuration),
            "arrays": [dataclasses.asdict(array) for array in self.arrays],
            "versions": dict(self.versions),
        }
        return (json.dumps(content, indent=1) + "\n").encode()

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a dataset."""
        path = folder / NAME
        try:
            content = json.loads(path.read_bytes())
            if content["format"] != FORMAT:
                raise KeyError("format")
            if content["version"] != VERSION:
                raise RuntimeError(
                    f"The dataset {str(folder)!r} is of version {content['version']} of the "
                    f"format, but this tapax knows version {VERSION}. Use the version of tapax "
                    "that wrote it."
                )
            arrays = [
                DatasetArray(**{**array, "shape": tuple(array["shape"])})
                for array in content["arrays"]
            ]
            manifest = cls(content["configuration"], tuple(arrays), content["versions"])
            is_intact = manifest.hash == content["hash"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{str(path)!r} is not the manifest of a dataset of activations, or was altered "
                f"({error!r})."
            ) from error
        if not is_intact:
            raise ValueError(
                f"{str(path)!r} was altered: its content does not have the hash that it names."
            )
        return manifest


def check_same(folder: Path, there: Manifest, here: Manifest) -> None:
    """Raise if the manifest `here`, of a harvest, differs from the one `there`, in the folder."""
    differences = list(_differences(there, here))
    before, now = there.versions["jax"], here.versions["jax"]
    if differences and before != now:
        differences.append(f"jax was {before} there and is {now} here")
    if differences:
        raise OtherDatasetError(
            f"The folder {str(folder)!r} contains another dataset: {'; '.join(differences)}. "
            "Harvest into another folder, or repeat the call that started this one."
        )


def _differences(there: Manifest, here: Manifest) -> Iterator[str]:
    names = dict.fromkeys([*there.configuration, *here.configuration])
    for name in names:
        old, new = there.configuration.get(name), here.configuration.get(name)
        if old != new:
            what = _EXPLAINED.get(name, f"`{name}`")
            yield f"{what} was {old!r} there and is {new!r} here"
    before, now = ({a.name: a for a in manifest.arrays} for manifest in (there, here))
    for name in dict.fromkeys([*before, *now]):
        old, new = (_describe(found.get(name)) for found in (before, now))
        if old != new:
            yield f"{name!r} is {old} there and {new} here"


def _describe(array: DatasetArray | None) -> str:
    if array is None:
        return "missing"
    return f"a {array.kind} of type {array.dtype}{list(array.shape)}"


_EXPLAINED = {
    "batches": "the number of batches",
    "batches_per_unit": "the number of batches in a unit, which `shard_bytes` and `units` decide,",
    "beside": "the checksum of the columns of `beside` in the first batch",
    "first_batch": "the checksum of the first batch",
    "keep": "the checksum of the mask of `keep` in the first batch",
    "processes": "the number of processes that the function's arrays span",
    "program": "the checksum of the traced function",
    "weights": "the checksum of the function's weights",
}
