"""The columns of the table: where each library is, and the environment that runs it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Column:
    """A library, as `module:attribute`, and its environment: "" is the current one."""

    name: str
    group: str
    library: str
    environment: str = ""


COLUMNS = [
    Column("tapax, NNX", "tapax", "conformance.library_tapax:NNX"),
    Column("tapax, Linen", "tapax", "conformance.library_tapax:LINEN"),
    Column("tapax, Equinox", "tapax", "conformance.library_tapax:EQUINOX"),
    Column("tapax, Haiku", "tapax", "conformance.library_tapax:HAIKU"),
    Column("tapax, brainstate", "tapax", "conformance.library_tapax:BRAINSTATE"),
    Column("tapax, Keras", "tapax", "conformance.library_tapax:KERAS"),
    Column("Flax NNX", "JAX", "conformance.library_nnx"),
    Column("Flax Linen", "JAX", "conformance.library_linen"),
    Column("penzai", "JAX", "conformance.library_penzai"),
    Column("oryx", "JAX", "conformance.library_oryx", "conformance-oryx"),
    Column("torchlens", "JAX", "conformance.library_torchlens", "conformance"),
    Column("jax-tap", "JAX", "conformance.library_jax_tap", "conformance"),
    Column("TransformerLens", "PyTorch", "conformance.library_transformer_lens", "conformance"),
    Column("nnsight", "PyTorch", "conformance.library_nnsight", "conformance"),
]


def heading(column: Column) -> str:
    """Return the name of a column below the heading of its group."""
    return column.name.removeprefix(f"{column.group}, ")


def python_of(environment: str) -> str:
    """Return the Python of an environment, which scripts/environment.py makes if needed.

    The variable `CONFORMANCE_PYTHON_<ENVIRONMENT>` names another.
    """
    name = "CONFORMANCE_PYTHON_" + environment.upper().replace("-", "_")
    if name in os.environ:
        return os.environ[name]
    command = ["python3", "scripts/environment.py", f"--{environment}"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()
