"""Prune a checkpoint with torch-pruning, in its environment; the last line is the time as JSON.

python bench/fold_peer.py ARCHITECTURE OPTIONS_AS_JSON SIDE KEPT_SHARE model.safetensors pruned.pt
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
import torch_pruning  # pyrefly: ignore  (of another environment)
from safetensors.torch import load_file
from torch import nn

from intertwine.lab.zoo.networks.registry import build


def main(name: str, options: str, side: str, share: str, *files: str) -> None:
    """Prune every layer but the last to a share of its channels, by the default score of the library."""
    model = build(name, **json.loads(options)).eval()
    model.load_state_dict(load_file(files[0]))
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    example = torch.zeros(1, first.in_channels, int(side), int(side))
    start = time.perf_counter()
    pruner = torch_pruning.pruner.BasePruner(
        model, example, importance=torch_pruning.importance.GroupMagnitudeImportance(),
        pruning_ratio=1 - float(share), ignored_layers=[last],
    )  # fmt: skip
    pruner.step()
    seconds = time.perf_counter() - start
    model(example)  # check that it runs
    torch.save(model, files[1])
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
