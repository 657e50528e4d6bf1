"""Costs of a network: parameters, floating-point operations, and how long a forward takes."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from intertwine.features.batches import fresh
from intertwine.features.capture import evaluating
from intertwine.fold.crosstalk import Example


@dataclass(frozen=True)
class Change:
    """A number before and after folding."""

    before: float | int
    after: float | int

    @property
    def share(self) -> float:
        """What is left, as a share; 1 where there was nothing."""
        return self.after / self.before if self.before else 1.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share}

    def __repr__(self) -> str:
        return f"{self.before:,} → {self.after:,} ({self.share:.1%})"


def count_parameters(model: nn.Module) -> int:
    """The number of parameters; tied ones count once."""
    return sum(p.numel() for p in model.parameters())


def count_flops(model: nn.Module, example: Example) -> int:
    """Floating-point operations of one forward on the example: those of matrix products and convolutions."""
    args, kwargs = fresh(example)
    with evaluating(model), FlopCounterMode(display=False) as counter:
        model(*args, **kwargs)
    return counter.get_total_flops()


def seconds(model: nn.Module, example: Example, repeats: int) -> float:
    """The median time of a forward on the example, after one to warm up."""
    times = []
    with evaluating(model):
        for _ in range(repeats + 1):
            args, kwargs = fresh(example)
            start = time.perf_counter()
            model(*args, **kwargs)
            if torch.cuda.is_available():  # a forward there has only been queued so far
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return median(times[1:])
