"""The experiment sorensen-table1 at its smallest scale, run once per process."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from intertwine.lab.papers.experiments import ExperimentResult, reproduce


@cache
def tiny() -> tuple[ExperimentResult, list[dict[str, np.ndarray]]]:
    """The experiment at scale cpu, run once per process, and the weights of its networks as they lie on the disk."""
    with tempfile.TemporaryDirectory() as folder:
        result = reproduce("sorensen-table1", "cpu", folder=folder)
        return result, [load_file(file) for file in sorted(Path(folder).rglob("nets-*.safetensors"))]


def tiny_rows() -> list[dict[str, Any]]:
    return tiny()[0].rows
