"""Verb and Ask: what a study knows of a verb, and what the verb is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from intertwine.study.rows import Row
from intertwine.study.verbs.options import Option
from intertwine.study.workbench import Workbench
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.feeding import TrainingBatches, shuffled

BATCH = 250


@dataclass(frozen=True)
class Ask:
    """What a verb is asked: the networks, a layer, options with defaults filled in, and a seed for what is random."""

    bench: Workbench
    zoo: str
    a: nn.Module
    b: nn.Module | None
    layer: str | None
    options: Mapping[str, Any]
    seed: int

    @property
    def other(self) -> nn.Module:
        assert self.b is not None  # verbs of two networks are only asked with two
        return self.b

    @property
    def at(self) -> str:
        assert self.layer is not None  # layered verbs are only asked with a layer
        return self.layer

    @property
    def x(self) -> Tensor:
        return self.bench.example(self.zoo, self.a)

    @property
    def images(self) -> Dataset:
        return self.bench.images(self.zoo, self.options.get("images"))

    def test(self) -> list[tuple[Tensor, Tensor]]:
        return list(self.images.batches("test", BATCH))

    def train(self) -> list[tuple[Tensor, Tensor]]:
        return list(self.images.batches("train", BATCH))

    def shuffled(self) -> TrainingBatches:
        """The training images, in another order in every epoch."""
        return shuffled(self.images, BATCH)


@dataclass(frozen=True)
class Verb:
    """`networks`: one or two. `layered`: one task per layer. `takes_layers`: it may be told which to look at."""

    networks: int
    options: Mapping[str, Option]
    run: Callable[[Ask], Iterable[Row]]
    layered: bool = False
    takes_layers: bool = False
