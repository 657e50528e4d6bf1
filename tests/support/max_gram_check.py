"""Runs the kernel for maxima of Gram matrices in triton's interpreter; see test_measure_kernels.py.

The variable TRITON_INTERPRET=1 must be set before triton is imported, so this is a program of its own. It writes the
largest error of every case, relative to the largest entry, as JSON.
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

#: channels, samples, positions, precision
CASES: dict[str, tuple[int, int, int, str]] = {
    "one tile": (3, 64, 32, "ieee"),
    "several tiles, the last not full": (3, 150, 32, "ieee"),
    "more rows of tiles than a group has": (2, 600, 1, "ieee"),
    "positions that fill no step": (4, 70, 50, "ieee"),
    "fewer positions than a step": (4, 40, 20, "ieee"),
    "one channel": (1, 30, 64, "ieee"),
    "no positions": (5, 130, 1, "ieee"),
    "few positions": (5, 70, 9, "ieee"),
    "large tiles": (2, 150, 40, "tf32"),
    "three products": (2, 70, 40, "tf32x3"),
}


def expected(x: Tensor) -> Tensor:
    return torch.einsum("cip,cjp->cij", x.double(), x.double()).amax(0)


def error(channels: int, samples: int, positions: int, precision: str) -> float:
    from intertwine.measure.kernels.max_gram import max_gram

    x = torch.randn(channels, samples, positions)
    found, exact = max_gram(x, precision), expected(x)
    return float((found - exact).abs().max() / exact.abs().max())


def negative() -> float:
    """All products of different samples are negative in every channel: the maximum must not begin at zero."""
    from intertwine.measure.kernels.max_gram import max_gram

    x = torch.tensor([1.0, -1.0]).reshape(1, 2, 1).expand(3, 2, 16).contiguous()
    return float((max_gram(x) - torch.tensor([[16.0, -16.0], [-16.0, 16.0]])).abs().max())


def refused(x: Tensor) -> float:
    """0 where the kernel does not take it."""
    from intertwine.measure.kernels.max_gram import max_gram

    try:
        max_gram(x)
    except AssertionError:
        return 0.0
    return 1.0


OTHERS: dict[str, Callable[[], float]] = {
    "negative everywhere": negative,
    "refuses other strides": lambda: refused(torch.randn(4, 4, 16).transpose(0, 1)),
    "refuses double precision": lambda: refused(torch.randn(4, 4, 16, dtype=torch.float64)),
}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    errors = {name: error(*case) for name, case in CASES.items()} | {name: case() for name, case in OTHERS.items()}
    json.dump(errors, sys.stdout)


if __name__ == "__main__":
    main()
