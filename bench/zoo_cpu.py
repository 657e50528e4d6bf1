"""Eight digit perceptrons on a CPU, at once and one after another. Part of bench/zoo.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.datasets.loading import data
from intertwine.lab.zoo.group import initial
from intertwine.lab.zoo.networks.registry import build
from intertwine.lab.zoo.precision import precision
from intertwine.lab.zoo.recipe import Recipe, recipe
from intertwine.lab.zoo.trainer import StackTrainer


def measure_cpu() -> dict[str, Any]:
    """8 perceptrons on the digits: at once, one after another with the same trainer, and in a plain loop of torch."""
    sizes = (([64, 128, 10], 32), ([64, 32, 10], 32), ([64, 512, 10], 32), ([64, 512, 10], 128))
    return {"rows": [_row(widths, batch) for widths, batch in sizes], "torch": torch.__version__.split("+")[0]}


def _row(widths: list[int], batch: int) -> dict[str, Any]:
    digits, how, seeds = data("digits"), recipe("plain", batch=batch), list(range(8))

    def make() -> nn.Module:
        return build("mlp", widths=widths)

    _trained(make, seeds, digits, recipe(how, epochs=1))  # a warm-up run, which loads libraries
    at_once, ours = _median(lambda: _trained(make, seeds, digits, how))
    single, _ = _median(lambda: [_trained(make, [s], digits, how) for s in seeds])
    plain, accuracies = _median(lambda: [_plain_loop(make, s, digits, how) for s in seeds])
    row = {
        "widths": widths, "batch": batch, "epochs": how.epochs, "threads": torch.get_num_threads(),
        "at_once_s": at_once, "same_trainer_s": single, "plain_loop_s": plain,
        "accuracy": float(ours.score().accuracy.mean()), "plain_accuracy": statistics.mean(accuracies),
    }  # fmt: skip
    print(row, flush=True)
    return row


def _trained(make: Callable[[], nn.Module], seeds: list[int], images: Dataset, how: Recipe) -> StackTrainer:
    device = torch.device("cpu")
    trainer = StackTrainer([initial(make, s) for s in seeds], seeds, images, how, precision("float32", device))
    for _ in range(how.epochs):
        trainer.run_epoch()
    return trainer


def _plain_loop(make: Callable[[], nn.Module], seed: int, images: Dataset, how: Recipe) -> float:
    """A loop written by hand: the data as one tensor, an optimizer of torch, a loop over batches."""
    model = initial(make, seed)
    inputs, labels = images.inputs(images.images), images.labels
    optimizer = torch.optim.SGD(
        model.parameters(), how.rate, how.momentum, weight_decay=how.weight_decay, nesterov=how.nesterov
    )
    generator, steps = torch.Generator().manual_seed(seed), -(-len(labels) // how.batch)
    for epoch in range(how.epochs):
        for step, batch in enumerate(torch.randperm(len(labels), generator=generator).split(how.batch)):
            optimizer.param_groups[0]["lr"] = how.rate_at(epoch * steps + step, steps)
            optimizer.zero_grad()
            cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return float((model(images.inputs(images.test_images)).argmax(1) == images.test_labels).double().mean())


def _median(call: Callable[[], Any], times: int = 3) -> tuple[float, Any]:
    seconds, value = [], None
    for _ in range(times):
        start = time.perf_counter()
        value = call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), value
