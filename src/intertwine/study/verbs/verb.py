"""Verb and Ask: what a study knows of a verb, and what the verb is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from intertwine.study.rows import Row
from intertwine.study.verbs.options import Option
from intertwine.study.workbench import Workbench


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

    def test(self) -> list[tuple[Tensor, Tensor]]:
        return self.bench.batches(self.zoo, "test", self.options.get("images"))

    def train(self) -> list[tuple[Tensor, Tensor]]:
        return self.bench.batches(self.zoo, "train", self.options.get("images"))


@dataclass(frozen=True)
class Verb:
    """`networks`: one or two. `layered`: one task per layer. `takes_layers`: it may be told which to look at."""

    networks: int
    options: Mapping[str, Option]
    run: Callable[[Ask], Iterable[Row]]
    layered: bool = False
    takes_layers: bool = False
