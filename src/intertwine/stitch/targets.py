"""Targets of a task-loss fit: labels of the data, answers of the back network, or both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from intertwine.errors import InputError
from intertwine.features.batches import Call, fresh
from intertwine.features.scoring import ADVICE, IGNORED, Loss, classes_second
from intertwine.shapes import Float
from intertwine.stitch.scores import losses_of


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

    Args:
        loss: of (outputs, targets), in the place of cross-entropy with hard targets.

    >>> targets = Targets(["hard", "soft"], torch.device("cpu"))
    >>> found = targets(torch.zeros(4, 3), torch.tensor([0, 1]), torch.zeros(2, 3))
    >>> [round(float(loss), 4) for loss in found]
    [1.0986, 1.0986]
    """

    def __init__(self, kinds: Sequence[str], device: torch.device, loss: Loss | None = None) -> None:
        weight = {"hard": 1.0, "soft": 0.0, "both": 0.5}
        self.shares = torch.tensor([weight[kind] for kind in kinds], device=device)
        self.hard, self.soft, self.loss = set(kinds) != {"soft"}, set(kinds) != {"hard"}, loss

    def __call__(self, outputs: Any, targets: Any, own: Any | None) -> Float[Tensor, " stitches"]:
        """The mean loss of each stitch.

        Args:
            outputs: of all stitches, those of the first one first. targets: classes, shared by all.
            own: outputs of the back network itself, where soft targets are wanted.
        """
        copies, labelled = len(self.shares), self.hard and self.loss is None
        hard = soft = torch.zeros_like(self.shares)
        if self.hard and self.loss is not None:
            hard = losses_of(self.loss, outputs, targets, copies).float()
        if not labelled and not self.soft:
            return hard
        flat = _rows(logits_of(outputs), targets, copies, labelled)
        if labelled:
            wanted = targets.reshape(-1).long()
            each = F.cross_entropy(flat.flatten(0, 1), wanted.repeat(copies), reduction="none", ignore_index=IGNORED)
            kept = (wanted != IGNORED).sum()
            hard = each.view(copies, -1).sum(1) / kept.clamp(
                min=1
            )  # a batch without targets has no slope, not no number
        if self.soft:
            share = F.softmax(_rows(logits_of(own), targets, 1, labelled), -1)
            soft = -(share * F.log_softmax(flat, -1)).sum(-1).mean(1)
        return self.shares * hard + (1 - self.shares) * soft


def _rows(logits: Tensor, targets: Any, copies: int, hard: bool) -> Float[Tensor, "copies answers classes"]:
    """One row of classes per answer, a sample, a token or a pixel, by the same axis of classes as in scores.

    Targets tell which axis that is; outputs of two axes need none, where the targets are soft alone.
    """
    many = targets.repeat(copies, *[1] * (targets.dim() - 1)) if isinstance(targets, Tensor) and targets.dim() else None
    classes = classes_second(logits, many)
    if classes is None and logits.dim() == 2 and not hard:
        classes = logits
    if classes is None:
        _refuse(logits, targets, copies, hard)
    return classes.movedim(1, -1).reshape(copies, -1, classes.shape[1]).float()


def _refuse(logits: Tensor, targets: Any, copies: int, hard: bool) -> NoReturn:
    """An error where nothing says which axis of the outputs has the classes."""
    found = f"{targets.dtype} {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
    shape = (len(logits) // copies, *logits.shape[1:]) if logits.dim() else ()
    if hard:
        raise InputError(
            "Hard targets are one class, a whole number, per answer of the back network: outputs (N, classes, …) or "
            f"(N, …, classes) with targets (N, …). Found outputs {shape} and targets {found}. Give data with "
            f"classes as targets, or targets='soft'. For other tasks: {ADVICE}"
        )
    raise InputError(
        f"Soft targets are the answers of the back network, but which axis of its outputs {shape} has the classes is "
        f"not known: the targets of the data, which would tell, are {found}. Pass the class of every answer with the "
        "data, one axis less than the outputs, or a network with outputs (samples, classes)."
    )
