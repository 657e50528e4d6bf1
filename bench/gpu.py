"""The engine on a GPU: certificates with model, elements and inputs on the device, compared with the CPU.

    python bench/gpu.py [--out FILE.json]

Needs torch with CUDA and torchvision; everything else the core needs is torch, numpy, scipy and safetensors.
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import stamped, write_results

RESULTS = Path(__file__).parent / "results" / "gpu.json"


def measure(name: str, device: str, size: int) -> dict[str, Any]:
    import torch
    import torchvision

    from intertwine.graph.capture import capture
    from intertwine.symmetry.symmetry import from_program

    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None).eval().to(device)
    x = torch.randn(2, 3, size, size, device=device)
    program = capture(model, (x,))
    start = time.perf_counter()
    sym = from_program(program)
    found = time.perf_counter()
    g = sym.random(0)
    sym.act(g, model)
    if device == "cuda":
        torch.cuda.synchronize()
    moved = time.perf_counter()
    certificate = sym.certify(model, x, trials=1)
    end = time.perf_counter()
    return {
        "model": name,
        "device": device,
        "error": certificate.max_error,
        "ok": certificate.ok,
        "broken": len(certificate.broken),
        "coverage": sym.coverage(model),
        "discovery_s": found - start,
        "act_s": moved - found,
        "certify_s": end - moved,
    }


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--models", default="resnet50,densenet121,convnext_tiny,vit_b_16,swin_t,vit_l_16,regnet_y_128gf,vit_h_14"
    )
    parser.add_argument("--cpu", default="resnet50,vit_b_16", help="models to run also on the CPU")
    options = parser.parse_args()
    present = {
        p: find_spec(p) is not None
        for p in "numpy scipy safetensors jaxtyping rich sklearn timm transformers matplotlib polars".split()
    }
    print("torch", torch.__version__, "cuda", torch.cuda.is_available(), present)
    rows = []
    for name in options.models.split(","):
        for device in ["cuda", *(["cpu"] if name in options.cpu.split(",") else [])]:
            try:
                row = measure(name, device, 224)
            except (RuntimeError, ValueError) as error:
                row = {"model": name, "device": device, "stopped": str(error)[:200]}
            rows.append(row)
            print(row, flush=True)
            torch.cuda.empty_cache()
    found = stamped({"torch": torch.__version__, "present": present, "rows": rows}, "gpu")
    write_results(options.out, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
