"""Training stitches on a GPU: recorded steps and parallel streams give the same as plain steps. Skipped elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import intertwine as it
from intertwine.lab.zoo.networks.registry import build
from intertwine.stitch import training

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FAMILIES = ["linear", "lowrank:2", "relu:birkhoff", "relu", "relu:annealed"]


def trained(*, before: int, side_by_side: bool) -> list[Tensor]:
    """The matrices of stitches at two cuts after a few steps; `before`: plain steps until one is recorded."""
    torch.manual_seed(0)
    a, b = (build("myrtle").cuda().eval() for _ in range(2))
    data = [(torch.randn(16, 3, 32, 32, device="cuda"), torch.randint(10, (16,), device="cuda")) for _ in range(12)]
    plain = training.ParallelStreams.__init__

    def alone(self: training.ParallelStreams, keys: object, device: torch.device) -> None:
        self.streams = {}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "WARMUP_STEPS", before)
        patched.setattr(training.ParallelStreams, "__init__", plain if side_by_side else alone)
        patched.setattr(torch.backends.cudnn, "deterministic", True)
        found = it.stitches(a, b, ["2", "5"], FAMILIES, data=data, test=data, norm="adapt", epochs=2, rate=1e-3)
    return [one.matrix for one in found]


def test_side_by_side_and_recorded_steps_are_the_plain_ones() -> None:
    plain = trained(before=10**9, side_by_side=False)
    for before in (10**9, 3):
        for one, other in zip(trained(before=before, side_by_side=True), plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
