"""Run the weight matching of rebasin on two checkpoints, in its environment; the last line is the time as JSON.

PYTHONPATH=src python bench/align_peer.py ARCHITECTURE a.safetensors b.safetensors moved.safetensors
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from rebasin import PermutationCoordinateDescent  # pyrefly: ignore  (of another environment)
from safetensors.torch import load_file, save_file

from intertwine.lab.zoo.networks.registry import architecture, build


def main(name: str, *files: str) -> None:
    """Align the second checkpoint to the first, write it, print the seconds."""
    models = []
    for file in files[:2]:
        model = build(name).eval()
        model.load_state_dict(load_file(file))
        models.append(model)
    start = time.perf_counter()
    search = PermutationCoordinateDescent(models[0], models[1], architecture(name).example())
    search.calculate_permutations()
    search.apply_permutations()
    seconds = time.perf_counter() - start
    save_file({n: t.contiguous() for n, t in models[1].state_dict().items()}, files[2])
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
