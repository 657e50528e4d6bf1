"""The max kernel of relu_cka on one GPU: speed against the matrix products of torch, and the error of the result.

    python bench/measure_gpu.py          # one GPU; writes bench/results/measure_gpu.json

Samples, channels and positions are those of hidden layers of image networks. The kernel computes the upper half of a
symmetric matrix: "of the whole" counts the products of the whole matrix, "done" those that it computes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from intertwine.measure.kernel_cka import relu_cka
from intertwine.measure.kernels.max_gram import max_gram

sys.path.insert(0, str(Path(__file__).parent))
from machine import stamped, write_results

RESULTS = Path(__file__).parent / "results" / "measure_gpu.json"
SIZES = ((10_000, 64, 32), (10_000, 512, 8))  # samples, channels, side of the images
PRECISIONS = ("tf32", "tf32x3", "ieee")


def measure(samples: int, channels: int, side: int) -> dict[str, Any]:
    """Every precision on one size, and the products of torch for the same matrices, channel by channel."""
    a, b = _related(samples, channels, side)
    work = 2.0 * samples**2 * channels * side**2
    flat = a.flatten(2).transpose(0, 1).contiguous()  # (channels, samples, positions)
    row: dict[str, Any] = {
        "samples": samples,
        "channels": channels,
        "side": side,
        "device": torch.cuda.get_device_name(),
    }
    exact = float(relu_cka()(a.double(), b.double()))
    row["float64"] = exact
    for precision in PRECISIONS:
        seconds = _seconds(lambda how=precision: max_gram(flat, how))
        found = relu_cka(precision=precision)
        row[precision] = {
            "ms": seconds * 1e3, "tflops_whole": work / seconds / 1e12, "tflops_done": work / seconds / 2e12,
            "value_ms": _seconds(lambda m=found: m(a, b), 2) * 1e3, "error": abs(float(found(a, b)) - exact),
        }  # fmt: skip
    torch.backends.cuda.matmul.allow_tf32 = True
    seconds = _seconds(lambda: _by_torch(flat[:8])) * channels / 8
    torch.backends.cuda.matmul.allow_tf32 = False
    row["torch_tf32"] = {"ms": seconds * 1e3, "tflops_whole": work / seconds / 1e12}
    print(json.dumps(row), flush=True)
    return row


def _related(samples: int, channels: int, side: int) -> tuple[Tensor, Tensor]:
    """Two layers of random ReLU features with common latent factors."""
    generator = torch.Generator("cuda").manual_seed(0)
    causes = torch.randn(samples, 32, device="cuda", generator=generator)

    def layer() -> Tensor:
        maps = torch.randn(32, channels * side**2, device="cuda", generator=generator)
        return torch.relu(causes @ maps).view(samples, channels, side**2)

    return layer(), layer()


def _by_torch(x: Tensor) -> Tensor:
    best = x[0] @ x[0].T
    for channel in x[1:]:
        best = torch.maximum(best, channel @ channel.T)
    return best


def _seconds(call: Callable[[], Any], times: int = 5) -> float:
    call()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(times):
        call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / times / 1e3


def page(results: dict[str, Any]) -> str:
    """The table of the results."""
    lines = [
        "| layer | products | kernel | of the whole | done | whole measure | error of the value |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results["rows"]:
        layer = f"{r['channels']} × {r['side']} × {r['side']}, {r['samples']:,} samples"
        for precision in PRECISIONS:
            p = r[precision]
            rates = f"{p['tflops_whole']:.0f} TFLOP/s | {p['tflops_done']:.0f} TFLOP/s"
            lines.append(
                f"| {layer} | {precision} | {p['ms']:.0f} ms | {rates} | {p['value_ms']:.0f} ms | {p['error']:.0e} |"
            )
        p = r["torch_tf32"]
        lines.append(f"| {layer} | torch, tf32 | {p['ms']:.0f} ms | {p['tflops_whole']:.0f} TFLOP/s | | | |")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--results", type=Path, default=RESULTS)
    chosen = options.parse_args()
    results = stamped({"rows": [measure(*size) for size in SIZES]}, "gpu")
    write_results(chosen.results, results)
    print(page(results))


if __name__ == "__main__":
    main()
