"""Checking: the smaller module computes what the merged network computes at full width, to the last digits."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch import nn

from intertwine.errors import InputError
from intertwine.fold.crosstalk import TOLERANCE, Example, outputs_in_float64
from intertwine.graph.copies import copied
from intertwine.symmetry.certify import relative_error

_TORCH = Path(torch.__file__).parent


def compare(wide: nn.Module, small: nn.Module, example: Example) -> float:
    """The largest difference of two networks on the example in double precision, relative to the outputs.

    Raises:
        InputError: the small one does not run, or computes something else; it names the line or the module.
    """
    expected = outputs_in_float64(copied(wide).double(), example)
    running = _Running(small)
    try:
        found = outputs_in_float64(running.model, example)
    except Exception as error:
        raise InputError(
            f"The network was cut to fewer features, and its forward fails {_place(error, running.inside)}: {error}. "
            "A width is written into the forward there; read it off a tensor or a module (x.shape[1], "
            "self.fc.in_features, nn.Flatten) instead, or give no beta for the wires that meet there."
        ) from error
    pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a.is_floating_point()]
    for a, b in pairs:
        if a.shape != b.shape:
            raise InputError(
                f"The network was cut to fewer features, and its output changed shape from {tuple(a.shape)} to "
                f"{tuple(b.shape)}. Its forward returns hidden features; they cannot be folded."
            )
    worst = max((relative_error(a, b) for a, b in pairs), default=0.0)
    if not worst <= TOLERANCE:
        raise InputError(
            f"The network was cut to fewer features, and its outputs differ by {worst:.1e} from those of the same "
            "network at full width. Its forward uses a width without failing: a slice such as x[:, :64], a division "
            "by a number of features. Read the width off a tensor or a module instead."
        )
    return worst


class _Running:
    """A copy in double precision that knows which modules it is in."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copied(model).double()
        self.inside: list[str] = []
        for path, module in self.model.named_modules():
            module.register_forward_pre_hook(lambda *_, path=path: self.inside.append(path))
            module.register_forward_hook(lambda *_: self._leave())

    def _leave(self) -> None:
        self.inside.pop()


def _place(error: Exception, inside: list[str]) -> str:
    """Where a forward failed: its innermost line that is not torch's own, else the module."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.name == "forward" and _TORCH not in Path(f.filename).parents]
    near = f"in the module {inside[-1]!r}" if inside and inside[-1] else "in the model's own forward"
    return f"at {Path(own[-1].filename).name}:{own[-1].lineno} ({own[-1].line}), {near}" if own else near
