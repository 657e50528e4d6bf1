"""Passes over data that a fit needs: the moments of every cut, and the scores of stitches and of both networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from intertwine.errors import InputError
from intertwine.features.labelled import labelled
from intertwine.stitch.moments import Moments
from intertwine.stitch.scores import Scorer, Scores
from intertwine.stitch.splice import Splice
from intertwine.stitch.targets import answer
from intertwine.stitch.training import Trainer

Tick = Callable[[float], None]  # hears which part of a pass is done


def check_readable_again(data: Any) -> None:
    """Refuse data that is gone after one pass."""
    if isinstance(data, Iterable) and iter(data) is data:
        raise InputError(
            "Stitching reads its data more than once, but what was given can be read only once, as generators can. "
            "Pass a DataLoader, or list(data)."
        )


def batches_of(data: Any) -> int | None:
    """How many batches there are, where the data tells."""
    return len(data) if hasattr(data, "__len__") else None


@torch.no_grad()
def moments_of(splice: Splice, data: Any, tick: Tick = lambda part: None) -> tuple[Moments, ...]:
    """The moments of the features that meet at every cut: one run of each network per batch."""
    found = tuple(Moments() for _ in splice.cuts)
    size = batches_of(data)
    with splice.running():
        for i, batch in enumerate(labelled(data, splice.back_model), 1):
            arrived, own = splice.front(batch.call), splice.targets(batch.call)
            for moments, here, there in zip(found, arrived, own, strict=True):
                moments.update(here.rows, there)
            tick(i / size if size else 0.0)
    return found


@torch.no_grad()
def scores_of(trainer: Trainer, data: Any) -> dict[int, list[Scores]]:
    """Cut → scores of its stitches, in the order of the trainer's jobs there."""
    scorers = {cut: Scorer(len(group), trainer.loss, must=False) for cut, group in trainer.groups.items()}
    for batch, outputs in trainer.passed(data, "own"):
        own = answer(trainer.splice.back_model, batch.call)
        for cut, scorer in scorers.items():
            scorer.add(outputs[cut], own, batch.targets, batch.samples)
    return {cut: scorer.scores() for cut, scorer in scorers.items()}


@torch.no_grad()
def accuracy_of(model: nn.Module, data: Any) -> float | None:
    """The accuracy of a whole network; None where its answers are not those classes."""
    scorer = Scorer()
    try:
        for batch in labelled(data, model):
            outputs = answer(model, batch.call)
            scorer.add(outputs, outputs, batch.targets)
        return scorer.scores()[0].accuracy
    except InputError:
        return None
