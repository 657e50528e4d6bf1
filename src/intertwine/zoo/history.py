"""History: what was measured of a group of networks after every epoch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from torch import Tensor

from intertwine.zoo.trainer import Score

Row = list[float]
#: What is written for a loss that is no number any more: JSON has none for it.
DIVERGED = 1e30


@dataclass
class History:
    """Per epoch one number per network; None where no test was taken."""

    train_loss: list[Row] = field(default_factory=list)
    accuracy: list[Row | None] = field(default_factory=list)
    loss: list[Row | None] = field(default_factory=list)

    def add(self, train_loss: Tensor, score: Score | None) -> None:
        """One more epoch."""
        self.train_loss.append([round(x, 6) for x in train_loss.nan_to_num(DIVERGED, DIVERGED).tolist()])
        self.accuracy.append(None if score is None else score.accuracy.tolist())
        self.loss.append(None if score is None else score.loss.nan_to_num(DIVERGED, DIVERGED).tolist())

    def accuracy_at(self, epoch: int, i: int) -> float:
        """Test accuracy of a network after an epoch, counted from 1."""
        row = self.accuracy[epoch - 1]
        return float("nan") if row is None else row[i]

    def loss_at(self, epoch: int, i: int) -> float:
        """Test loss of a network after an epoch, counted from 1."""
        row = self.loss[epoch - 1]
        return float("nan") if row is None else row[i]

    def best_epoch(self, i: int) -> int:
        """The first epoch, counted from 1, after which a network did best on the test part."""
        rows = [(row[i], -epoch) for epoch, row in enumerate(self.accuracy, 1) if row is not None]
        return -max(rows)[1]

    def of(self, i: int) -> dict[str, list[float | None]]:
        """The history of one network."""
        return {
            "train_loss": [row[i] for row in self.train_loss],
            "accuracy": [None if row is None else round(row[i], 6) for row in self.accuracy],
        }

    def to_json(self) -> str:
        """As text."""
        return json.dumps({"train_loss": self.train_loss, "accuracy": self.accuracy, "loss": self.loss})

    @classmethod
    def from_json(cls, text: str) -> History:
        """From `to_json`."""
        return cls(**json.loads(text))
