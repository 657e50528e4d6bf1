"""Lets torchvision, and timm with it, be imported where torchvision's compiled operators cannot be loaded.

A torchvision wheel built for a GPU installs beside a CPU build of torch, but its compiled library does not load there,
and the import then stops at `operator torchvision::nms does not exist`. The networks themselves need none of these
operators, so it is enough to declare the two whose absence stops the import. Calling one still fails, as it should.
"""

import functools
import importlib.util
from pathlib import Path

import torch

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@functools.cache
def declare_missing_ops() -> torch.library.Library | None:
    """Declare torchvision's operators unless they exist or the real ones load; None if nothing had to be declared.

    The cache keeps the returned library alive: torch withdraws the declarations of a library that is collected.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return None
    if _loads_compiled_ops(Path(spec.origin).parent):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(name + SIGNATURE)
    return library


def _loads_compiled_ops(folder: Path) -> bool:
    """Whether torchvision's compiled library is in `folder` and loads beside this torch."""
    for file in [*folder.glob("_C*.so"), *folder.glob("_C*.pyd")]:
        try:
            torch.ops.load_library(file)
        except (ImportError, OSError):
            continue
        return True
    return False
