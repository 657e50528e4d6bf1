"""The trainer of a stack: epochs, optimizer and its state, CUDA graphs, and test scores.

An epoch depends only on the weights, the optimizer's state, the seeds and the number of the epoch, so a resumed run
ends with the same weights as one without a break.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from intertwine.argument_types import Float
from intertwine.lab.zoo.augment import BatchMaker, draw
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.precision import Precision
from intertwine.lab.zoo.randomness import Purpose, keyed
from intertwine.lab.zoo.recipe import Recipe
from intertwine.lab.zoo.stacking.stack import Stack


def make_optimizer(recipe: Recipe, parameters: Mapping[str, Tensor], rate: float | Tensor) -> torch.optim.Optimizer:
    """The recipe's optimizer on stacked parameters (networks, …); it acts on every entry separately.

    A rate in a tensor can change between the replays of a recorded step.
    """
    weights = [p for p in parameters.values() if p.dim() > 2 or recipe.decay == "all"]
    others = [p for p in parameters.values() if p.dim() <= 2 and recipe.decay != "all"]
    decays = ((weights, recipe.weight_decay), (others, 0.0))
    groups = [{"params": group, "weight_decay": decay} for group, decay in decays if group]
    recorded: dict[str, Any] = {"capturable": True} if isinstance(rate, Tensor) else {}
    match recipe.optimizer:
        case "sgd":
            momentum: dict[str, Any] = {"momentum": recipe.momentum, "nesterov": recipe.nesterov}
            return torch.optim.SGD(groups, lr=rate, fused=True, **momentum)  # pyrefly: ignore
        case "adam":
            return torch.optim.Adam(groups, lr=rate, fused=True, **recorded)
        case _:
            return torch.optim.AdamW(groups, lr=rate, fused=True, **recorded)


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of the optimizer, by the names of the parameter and the entry."""
    return {
        f"{name}:{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Restore the state of an optimizer, in the memory layout of its parameters."""
    for entry, value in state.items():
        name, _, key = entry.rpartition(":")
        parameter = parameters[name]
        own = torch.empty_like(parameter).copy_(value) if value.dim() else value.to(parameter.device, copy=True)
        optimizer.state[parameter][key] = own.detach()


#: Number of eager steps before one is recorded, which create the optimizer's state.
BEFORE_RECORDING = 3
#: Test images in one batch, over all networks of a stack.
TEST_IMAGES = 8192


@dataclass(frozen=True)
class StackScore:
    """Accuracy (a fraction) and mean loss of every network."""

    accuracy: Float[Tensor, " networks"]
    loss: Float[Tensor, " networks"]


class StackTrainer:
    """Trains a stack of networks, one epoch at a time.

    Args:
        models: one network per seed, with its initial weights.
        seeds: of data order, augmentation and dropout.
        data: on any device; it is moved to the device of the training.
        recipe: how to train. precision: of the training, with its device.
    """

    def __init__(
        self, models: Sequence[nn.Module], seeds: Sequence[int], data: Dataset, recipe: Recipe, precision: Precision
    ) -> None:
        self.recipe, self.precision, self.device = recipe, precision, precision.device
        self.data = data.to(self.device)
        self.stack = Stack(models, self.device, precision.dtype, precision.fast)
        self.seeds = torch.tensor(list(seeds), dtype=torch.int64, device=self.device)
        self.batches = BatchMaker(recipe, self.data, precision.features)
        self.samples = len(data.labels)
        self.steps = -(-self.samples // recipe.batch)
        self.recorded = self.device.type == "cuda"
        rates = [recipe.rate_at(step, self.steps) for step in range(self.steps * recipe.epochs)]
        self.rates = torch.tensor(rates, dtype=torch.float32, device=self.device) if self.recorded else rates
        self.rate = torch.tensor(rates[0], dtype=torch.float32, device=self.device) if self.recorded else rates[0]
        self.optimizer = make_optimizer(recipe, self.stack.parameters, self.rate)
        self.draws = draw(recipe, self.seeds, 0, self.samples)
        self.epoch = 0
        self._counter = torch.zeros(2, dtype=torch.int64, device=self.device)  # step of the training, of the epoch
        self._loss = torch.zeros(len(models), dtype=precision.dtype, device=self.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager = 0

    def run_epoch(self, progress: Callable[[float], None] = lambda share: None) -> Float[Tensor, " networks"]:
        """Train one epoch and return the mean training loss of every network.

        Args:
            progress: called after every step with the finished share of the epoch.
        """
        self.draws.copy_(draw(self.recipe, self.seeds, self.epoch, self.samples))
        self._counter.copy_(torch.tensor([self.epoch * self.steps, 0]))
        self._loss.zero_()
        self.stack.train()
        full = self.samples // self.recipe.batch
        with self.precision.flags():
            for step in range(self.steps):
                self._run_step(step, self.recipe.batch if step < full else self.samples % self.recipe.batch)
                progress((step + 1) / self.steps)
        self.epoch += 1
        return (self._loss / self.samples).cpu()

    def _run_step(self, step: int, size: int) -> None:
        if not self.recorded:
            start = step * self.recipe.batch
            for group in self.optimizer.param_groups:
                group["lr"] = self.rates[self.epoch * self.steps + step]
            self._train(slice(start, start + size), slice(step, step + 1), self.epoch * self.steps + step)
        elif size == self.recipe.batch and self._graph is not None:
            self._graph.replay()
        elif size == self.recipe.batch and self._eager >= BEFORE_RECORDING:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._train_counted(size)
            self._graph = graph
            graph.replay()
        else:  # on a side stream, as in a recording, so that autograd is not bound to the default stream
            self._eager += 1
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._train_counted(size)
            torch.cuda.current_stream().wait_stream(stream)

    def _train_counted(self, size: int) -> None:
        """One step that reads its number on the device."""
        total, step = self._counter[:1], self._counter[1:]
        at = step * self.recipe.batch + torch.arange(size, device=self.device)
        self.rate.copy_(self.rates[total][0])  # pyrefly: ignore
        self._train(at, step, total)
        self._counter += 1

    def _train(self, at: slice | Tensor, step: slice | Tensor, total: int | Tensor) -> None:
        batch = self.batches(self.draws, at, step)
        self.stack.keys = keyed(self.seeds, int(Purpose.DROPOUT), total) if self.stack.draws else None
        with self.precision.cast():
            logits = self.stack(batch.inputs)
        loss = self._mean_loss(logits, batch.labels)
        if self.recipe.mixup or self.recipe.cutmix:  # mixed images have two labels
            loss = loss + batch.share * (self._mean_loss(logits, batch.partners) - loss)
        loss.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._loss += loss.detach() * batch.labels.shape[1]

    def _mean_loss(self, logits: Tensor, labels: Tensor) -> Float[Tensor, " networks"]:
        flat, smooth = logits.flatten(0, 1).to(self.precision.dtype), self.recipe.label_smoothing
        each = cross_entropy(flat, labels.flatten(), reduction="none", label_smoothing=smooth)
        return each.view(labels.shape).mean(1)

    @torch.no_grad()
    def score(self) -> StackScore:
        """Accuracy and loss of every network on the test split."""
        return score(self.stack, self.data, self.precision)

    def state(self) -> dict[str, Tensor]:
        """Everything that the rest of the training depends on, except the number of the epoch."""
        tensors = {f"network:{name}": t for name, t in self.stack.tensors.items()}
        optimizer = optimizer_state(self.optimizer, self.stack.parameters)
        return tensors | {f"optimizer:{name}": t for name, t in optimizer.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], epoch: int) -> None:
        """Continue from a state after `epoch` epochs."""
        for name, t in self.stack.tensors.items():
            t.copy_(state[f"network:{name}"])
        optimizer = {n.removeprefix("optimizer:"): t for n, t in state.items() if n.startswith("optimizer:")}
        restore_optimizer(self.optimizer, self.stack.parameters, optimizer)
        self.epoch = epoch


@torch.no_grad()
def score(stack: Stack, data: Dataset, precision: Precision) -> StackScore:
    """Accuracy and loss of every network of a stack on the test split, which is on its device."""
    training = stack.training
    stack.train(False)
    correct = torch.zeros(len(stack), dtype=torch.float64, device=precision.device)
    loss = torch.zeros_like(correct)
    for inputs, labels in data.batches("test", max(1, TEST_IMAGES // len(stack)), precision.features):
        with precision.flags(), precision.cast():
            logits = stack(inputs.expand(len(stack), *inputs.shape)).double()
        correct += (logits.argmax(-1) == labels).sum(1)
        each = cross_entropy(logits.flatten(0, 1), labels.repeat(len(stack)), reduction="none")
        loss += each.view(len(stack), -1).sum(1)
    stack.train(training)
    count = len(data.test_labels)
    return StackScore((correct / count).cpu(), (loss / count).cpu())
