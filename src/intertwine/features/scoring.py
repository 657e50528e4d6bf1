"""Loss and error of one batch of outputs, as sums that can be added up over batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from intertwine.errors import InputError
from intertwine.features.batches import kind_of

Loss = Callable[[Any, Any], Tensor]  # of outputs and targets: one number, or one per sample
IGNORED = -100  # the target that torch's cross-entropy leaves out
ADVICE = "Pass loss=, a function of (outputs, targets)."  # what to do where there is no cross-entropy


def score(outputs: Any, targets: Any, samples: int, loss: Loss | None, advice: str = ADVICE) -> Tensor:
    """Four sums: losses, what to divide them by, wrong answers, and answers (0 where the targets are no classes).

    Cross-entropy is averaged over targets, any other loss over samples. `advice` says how whoever asks takes a loss.

    >>> score(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]), 2, None)[2:]
    tensor([1., 2.], dtype=torch.float64)
    """
    outputs = getattr(outputs, "logits", outputs)
    classes = classes_second(outputs, targets)
    if loss is None:
        if classes is None:
            raise InputError(f"{no_classes(outputs, targets)} {advice}")
        wanted = targets.long()
        kept = (wanted != IGNORED).sum()
        total, weight = functional.cross_entropy(classes, wanted, reduction="none").double().sum(), kept
    else:
        total, weight = mean_loss(loss, outputs, targets) * samples, torch.tensor(samples)
    wrong, answers = _wrong(classes, targets)
    return torch.stack([x.double().to(total.device) for x in (total, weight, wrong, answers)])


def classes_second(outputs: Any, targets: Any) -> Tensor | None:
    """The outputs with classes on the second axis, as torch has them; last axis too, as language models have them."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or outputs.dim() != targets.dim() + 1:
        return None
    if targets.is_floating_point() or targets.is_complex() or targets.dim() == 0:
        return None
    if outputs.shape[0] == targets.shape[0] and outputs.shape[2:] == targets.shape[1:]:
        return outputs
    return outputs.movedim(-1, 1) if outputs.shape[:-1] == targets.shape else None


def no_classes(outputs: Any, targets: Any) -> str:
    """Why there is no cross-entropy.

    >>> no_classes(torch.zeros(2, 3), None)
    'Cross-entropy needs outputs with one axis ...; found outputs float32 (2, 3) and targets NoneType.'
    """
    return (
        "Cross-entropy needs outputs with one axis of classes more than the targets, and targets that are whole "
        f"numbers; found outputs {_kind(outputs)} and targets {_kind(targets)}."
    )


def mean_loss(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """A loss of one's own on one batch, as one number in double precision."""
    value = loss(outputs, targets)
    if not isinstance(value, Tensor):
        raise InputError(f"The loss must give a tensor: one number, or one per sample; found {type(value).__name__}.")
    return value.double().mean()


def _wrong(classes: Tensor | None, targets: Any) -> tuple[Tensor, Tensor]:
    if classes is None:
        return torch.tensor(0), torch.tensor(0)
    kept = targets != IGNORED
    return ((classes.argmax(1) != targets) & kept).sum(), kept.sum()


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return kind_of(value)
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
