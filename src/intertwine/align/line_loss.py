"""The task loss on the line between two networks, as a function of the weights of the second.

BatchNorm normalises by the statistics of each batch here: running statistics that were mixed from two networks are not
those of the mixed network, and a loss under them would lead a search astray.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from intertwine.align.task import Task
from intertwine.errors import InputError
from intertwine.features.batches import fresh
from intertwine.features.capture import evaluating, wrapped_by
from intertwine.features.labelled import Labelled, labelled
from intertwine.features.scoring import Loss, score
from intertwine.graph.copies import copied

MIDDLE = 0.5
ADVICE = "Pass options={'loss': …}, a function of (outputs, targets)."


@dataclass(frozen=True)
class LineOptions:
    """Which loss is lowered, where, and how results are judged.

    `steps`: how many batches are learnt from; data begins anew where it ends. `loss`: of (outputs, targets),
    cross-entropy where None. `at`: the point of the line, from 0 (a) to 1 (b), whose loss is lowered; None draws it
    anew for every batch, and results are then judged in the middle. `held`: the first so many batches are kept, and
    every result is judged on them. `batch_statistics`: BatchNorm normalises by each batch; False mixes the running
    statistics of the two networks.
    """

    steps: int = 200
    loss: Loss | None = None
    at: float | int | None = MIDDLE
    held: int = 8
    batch_statistics: bool = True

    def __post_init__(self) -> None:
        for name in ("steps", "held"):
            self.check(name, getattr(self, name) >= 1, "at least 1")
        self.check("at", self.at is None or 0 < self.at <= 1, "above 0, where b counts, and at most 1, or None")

    def check(self, name: str, fine: bool, wanted: str) -> None:
        """Refuse the value of an option, and say what it must be."""
        if not fine:
            raise InputError(
                f"The option {name}={getattr(self, name)} was given; it must be {wanted}. Leave it out for the default."
            )


class LineLoss:
    """The task loss of networks between a and whatever b has become.

    `network` is a copy of a, into which weights are put for one call at a time. `a`: the weights of a that are mixed.
    """

    def __init__(self, task: Task, options: LineOptions) -> None:
        self.options, self.data = options, task.data
        self.network = copied(task.a).requires_grad_(False)
        self.statistics = _statistics(self.network)
        if options.batch_statistics:
            _forget_statistics(self.network)
        left_out = self.statistics if options.batch_statistics else set()
        self.a = {name: x for name, x in task.problem.a.items() if name not in left_out}
        self.held = list(islice(labelled(task.data, self.network), options.held))

    @contextmanager
    def running(self) -> Iterator[None]:
        """The network in evaluation mode, gradients on."""
        with evaluating(self.network), torch.enable_grad():
            for module in self.network.modules():
                if isinstance(module, nn.RNNBase):  # cuDNN gives gradients in training mode only, which is dropout
                    module.training, module.dropout = True, 0.0
            yield

    def of(self, b: Mapping[str, Tensor], batch: Labelled, t: float) -> Tensor:
        """The mean loss of one batch at a point of the line to b."""
        total, weight = self._sums(b, batch, t)
        return total / weight

    def judged(self, b: Mapping[str, Tensor]) -> float:
        """The mean loss over the held batches."""
        at = MIDDLE if self.options.at is None else float(self.options.at)
        with torch.no_grad():
            total, weight = torch.stack([self._sums(b, batch, at) for batch in self.held]).sum(0).tolist()
        if not weight:
            raise InputError(
                "Every target of the held batches is marked as ignored (-100), so there is no loss to judge by. Pass "
                "other data, or hold more batches: options={'held': …}."
            )
        return total / weight

    def _sums(self, b: Mapping[str, Tensor], batch: Labelled, t: float) -> Tensor:
        args, kwargs = batch.call
        # torch has no slope in running statistics
        used = {name: b[name].detach() if name in self.statistics else b[name] for name in self.a}
        inner, prefix = wrapped_by(self.network)
        state = {name.removeprefix(prefix): _between(x, used[name].to(x.device), t) for name, x in self.a.items()}
        outputs = functional_call(inner, state, args, kwargs)
        return score(outputs, fresh(batch.targets), batch.samples, self.options.loss, ADVICE)[:2]

    def batches(self, generator: torch.Generator) -> Iterator[tuple[int, Labelled, float]]:
        """(step, batch, point of the line) for every step."""
        step = 0
        while True:
            for batch in labelled(self.data, self.network):
                step += 1
                drawn = float(torch.rand((), generator=generator))
                yield step, batch, drawn if self.options.at is None else float(self.options.at)
                if step == self.options.steps:
                    return


def _between(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Numbers are mixed; whole numbers and masks come from a, and so does what is equal in both (−∞ in a mask)."""
    if not (a.is_floating_point() or a.is_complex()) or (not b.requires_grad and torch.equal(a, b)):
        return a
    return (1 - t) * a + t * b.to(a.dtype)


def _norms(network: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers that keep running statistics."""
    named = network.named_modules()
    return {path: norm for path, norm in named if isinstance(norm, _BatchNorm) and norm.running_mean is not None}


def _statistics(network: nn.Module) -> set[str]:
    """The names of all running statistics."""
    kept = ("running_mean", "running_var", "num_batches_tracked")
    return {f"{path}.{name}".lstrip(".") for path in _norms(network) for name in kept}


def _forget_statistics(network: nn.Module) -> None:
    """Take the running statistics from every BatchNorm, which then uses those of the batch."""
    for norm in _norms(network).values():
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
        norm.register_forward_pre_hook(_check_batch)


def _check_batch(_norm: nn.Module, args: tuple[Any, ...]) -> None:
    if args[0].numel() == args[0].shape[1]:
        raise InputError(
            "A batch gives a BatchNorm layer one value per channel, which has no variance. Use larger batches, or "
            "options={'batch_statistics': False}, which mixes the running statistics of the two networks."
        )
