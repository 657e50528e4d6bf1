"""Targets of a task-loss fit: labels of the data, answers of the back network, or both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from intertwine.errors import InputError
from intertwine.features.batches import Call, fresh
from intertwine.features.scoring import IGNORED
from intertwine.shapes import Float


def answer(model: nn.Module, call: Call) -> Any:
    """What a whole network answers; the batch stays as it is, whatever the network does in place."""
    args, kwargs = fresh(call)
    return model(*args, **kwargs)


def logits_of(outputs: Any) -> Tensor:
    """The logits among a network's outputs."""
    found = getattr(outputs, "logits", outputs)
    if not isinstance(found, Tensor):
        raise InputError(
            f"Stitches are trained and scored by the logits of the back network, but its output is a "
            f"{type(found).__name__}. Wrap it in a module that returns its logits."
        )
    return found


class Targets:
    """What so many stitches are trained towards, each "hard", "soft" or "both".

    >>> targets = Targets(["hard", "soft"], torch.device("cpu"))
    >>> found = targets(torch.zeros(4, 3), torch.tensor([0, 1]), torch.zeros(2, 3))
    >>> [round(float(loss), 4) for loss in found]
    [1.0986, 1.0986]
    """

    def __init__(self, kinds: Sequence[str], device: torch.device) -> None:
        weight = {"hard": 1.0, "soft": 0.0, "both": 0.5}
        self.shares = torch.tensor([weight[kind] for kind in kinds], device=device)
        self.hard, self.soft = set(kinds) != {"soft"}, set(kinds) != {"hard"}

    def __call__(self, outputs: Any, targets: Any, own: Any | None) -> Float[Tensor, " stitches"]:
        """The mean loss of each stitch.

        Args:
            outputs: of all stitches, those of the first one first. targets: classes, shared by all.
            own: outputs of the back network itself, where soft targets are wanted.
        """
        logits, copies = logits_of(outputs), len(self.shares)
        flat = logits.reshape(copies, -1, logits.shape[-1]).float()  # every token or sample is one answer
        answers = flat.shape[1]
        hard = soft = flat.new_zeros(copies)
        if self.hard:
            wanted = _classes(targets, answers, flat.shape[-1])
            each = F.cross_entropy(flat.flatten(0, 1), wanted.repeat(copies), reduction="none", ignore_index=IGNORED)
            hard = each.view(copies, -1).sum(1) / (wanted != IGNORED).sum()
        if self.soft:
            share = F.softmax(logits_of(own).reshape(answers, -1).float(), -1)
            soft = -(share * F.log_softmax(flat, -1)).sum(-1).mean(1)
        return self.shares * hard + (1 - self.shares) * soft


def _classes(targets: Any, answers: int, classes: int) -> Tensor:
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.numel() != answers:
        found = f"{targets.dtype} {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
        raise InputError(
            f"Hard targets are one class per answer of the back network, of {classes} classes; found {found} for "
            f"{answers} answers. Pass classes as targets, or targets='soft'."
        )
    return targets.reshape(-1).long()
