"""Scores of stitched networks: loss, accuracy, and how they stand to the network whose back they have.

Sums stay on the device of the outputs, so that a pass over the data never waits for a number; they are read at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf, isfinite, nan
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from intertwine.errors import InputError
from intertwine.features.scoring import ADVICE, IGNORED, Loss, classes_second, mean_loss, no_classes
from intertwine.shapes import Float, Int

#: The agreement table: the first letter is the back network right or wrong, the second the stitched one.
TABLE = ("rr", "rw", "wr", "ww")


@dataclass(frozen=True)
class Scores:
    """How one network did on some data.

    Attributes:
        samples: how many. accuracy: share of right answers; None where the targets are no classes.
        loss: mean over targets (cross-entropy), or over samples (any other loss); not a number where there is none.
        cross_entropy: to the back network, −Σ p_back log p_stitched: summed over classes, mean over samples. One path
            of the printed code also averages over classes, which is ten times smaller for ten of them.
        rr, rw, wr, ww: answers by whether the back network (first letter) and the stitched one are right or wrong.
        unscored: why nothing is known but the number of samples; None where something is.
    """

    samples: int
    accuracy: float | None
    loss: float
    cross_entropy: float | None
    rr: int | None
    rw: int | None
    wr: int | None
    ww: int | None
    unscored: str | None = None

    @property
    def back_accuracy(self) -> float | None:
        """Of the back network on the same samples."""
        if self.rr is None or self.rw is None or self.wr is None or self.ww is None:
            return None
        return (self.rr + self.rw) / (self.rr + self.rw + self.wr + self.ww)

    @property
    def agreement(self) -> dict[str, float] | None:
        """The table as shares of all answers, which sum to 1; None where there are no classes."""
        counts = {name: getattr(self, name) for name in TABLE}
        answers = None if None in counts.values() else sum(counts.values())
        return None if answers is None else {name: count / answers for name, count in counts.items()}

    def to_dict(self) -> dict[str, Any]:
        """As plain data; a number that is not finite becomes None."""
        return {
            name: None if isinstance(value, float) and not isfinite(value) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Scores:
        """What `to_dict` gave.

        >>> Scores.from_dict(Scores(2, None, 0.5, None, None, None, None, None).to_dict()).loss
        0.5
        """
        known = dict(found)
        return cls(**known | {"loss": nan if known["loss"] is None else known["loss"]})

    @property
    def rank(self) -> float:
        """Larger is better: the accuracy, or the loss with the other sign where there are no classes."""
        value = -self.loss if self.accuracy is None else self.accuracy
        return value if isfinite(value) else -inf


class Scorer:
    """Scores of one or many stitched networks over batches.

    Args:
        copies: how many stitches are scored at once. loss: of (outputs, targets), one number or one per sample;
            cross-entropy where None. must: refuse what has no cross-entropy; else the scores say why they are empty.

    Example:
        >>> import torch
        >>> scorer = Scorer(copies=2)
        >>> back = torch.tensor([[4.0, 0.0], [4.0, 0.0]])
        >>> scorer.add(torch.cat([back, -back]), back, torch.tensor([0, 1]))
        >>> [(scores.accuracy, scores.rr, scores.rw, scores.wr, scores.ww) for scores in scorer.scores()]
        [(0.5, 1, 0, 0, 1), (0.5, 0, 1, 1, 0)]
    """

    def __init__(self, copies: int = 1, loss: Loss | None = None, must: bool = True) -> None:
        if copies < 1:
            raise InputError(f"A scorer was asked for {copies} stitches. Give copies=1 or more.")
        self.copies, self.loss, self.must, self.samples = copies, loss, must, 0
        self.unscored: str | None = None
        self.classes: bool | None = None  # whether the targets are classes; known from the first batch on
        self._sums: Tensor | None = None
        self._seen: Tensor | None = None  # the smallest and the largest class of the targets, on their device
        self._known = 0

    @torch.no_grad()
    def add(self, outputs: Any, back: Any, targets: Any, samples: int | None = None) -> None:
        """Take in a batch.

        Args:
            outputs: of the stitched networks, all samples of the first one, then all of the second (copies·n, ...); a
                tensor or an object with `.logits`. back: the back network's own outputs on the same n samples.
            targets: of the n samples. samples: n, where it cannot be read off the targets or the outputs.
        """
        outputs, back = (getattr(value, "logits", value) for value in (outputs, back))
        own = classes_second(back, targets)
        if self.classes is None:
            self.classes = own is not None
        if self.classes is not (own is not None):
            raise InputError("Some batches have classes as targets and some have not. Give targets of one kind.")
        if own is None and self.loss is None:
            self.unscored = f"{no_classes(back, targets)} {ADVICE}"
            if self.must:
                raise InputError(self.unscored)
        if samples is None:
            samples = len(targets) if isinstance(targets, Tensor) else len(back)
        sums = torch.zeros(self.copies, 7, dtype=torch.float64, device=_device(outputs))
        if own is not None:
            sums[:, 1:] = self._classified(outputs, own, targets)
        sums[:, 0] = self._losses(outputs, targets, samples, sums)
        self._sums = sums if self._sums is None else self._sums.add_(sums)
        self.samples += samples

    def _classified(self, outputs: Tensor, own: Tensor, targets: Tensor) -> Float[Tensor, "copies 6"]:
        """Cross-entropy to the targets, cross-entropy to the back network, and the agreement table, as sums."""
        targets = targets.long()
        many = targets.repeat(self.copies, *[1] * (targets.dim() - 1))
        given = classes_second(outputs, many)
        if given is None or given.shape[1:] != own.shape[1:]:
            raise InputError(
                f"The outputs of {self.copies} stitched networks were to be {self.copies} times the back network's, "
                f"{tuple(own.shape)}, one after another; found {tuple(outputs.shape)}."
            )
        self._note(targets, own.shape[1])
        shape = (self.copies, *own.shape)
        stitched = _log_probabilities(given).reshape(shape)
        expected = _log_probabilities(own).exp()
        kept, wanted = targets != IGNORED, targets.clamp(0, own.shape[1] - 1)
        loss = -stitched.gather(2, wanted.expand(self.copies, *wanted.shape).unsqueeze(2)).squeeze(2)
        # a class that the back network gives no chance at all adds nothing, whatever the stitched one says of it
        distance = -torch.where(expected > 0, expected * stitched, 0.0).sum(2)
        right = _right(given, many).reshape(loss.shape)
        own_right = _right(own, targets)
        cells = (own_right & right, own_right & ~right, ~own_right & right, ~own_right & ~right)
        each = torch.stack([loss, distance, *(cell.double() for cell in cells)], -1)
        return torch.where(kept.unsqueeze(-1), each, 0.0).flatten(1, -2).sum(1)

    def _losses(self, outputs: Any, targets: Any, samples: int, sums: Tensor) -> Tensor:
        """The sum of the loss that was asked for, per stitch."""
        if self.loss is None:
            return sums[:, 1]
        return samples * losses_of(self.loss, outputs, targets, self.copies)

    def _note(self, targets: Tensor, classes: int) -> None:
        """Remember the range of the targets; it is looked at when the scores are read, so that nothing waits here."""
        self._known = classes
        seen = _range(targets)
        if targets.device.type == "cpu":
            _refuse(seen, classes)
        elif self._seen is None:
            self._seen = seen
        else:
            self._seen = torch.stack([torch.minimum(self._seen[0], seen[0]), torch.maximum(self._seen[1], seen[1])])

    def scores(self) -> list[Scores]:
        """The scores of every stitch, over all batches so far."""
        if self._sums is None:
            raise InputError("Scores were asked for before any batch was scored. Give data with at least one sample.")
        if self._seen is not None:
            _refuse(self._seen, self._known)
        return [self._one(row) for row in self._sums.tolist()]

    def _one(self, row: list[float]) -> Scores:
        total, _, distance, *cells = row
        if self.unscored is not None:
            return Scores(self.samples, None, nan, None, None, None, None, None, self.unscored)
        if not self.classes:
            return Scores(self.samples, None, total / self.samples, None, None, None, None, None)
        answers = sum(cells)
        if not answers:
            raise InputError("Every target of the data is marked as ignored (-100), so there is nothing to score.")
        rr, rw, wr, ww = map(round, cells)
        weight = answers if self.loss is None else self.samples
        return Scores(self.samples, (rr + wr) / answers, total / weight, distance / answers, rr, rw, wr, ww)


def check_classes(outputs: Any, targets: Any) -> None:
    """Refuse targets that are classes the network does not have; waits for the device.

    >>> import torch
    >>> check_classes(torch.zeros(2, 10), torch.tensor([3, 12]))
    Traceback (most recent call last):
    intertwine.errors.InputError: The data has the class 12, but the back network tells 10 classes apart, 0 to 9. ...
    """
    classes = classes_second(getattr(outputs, "logits", outputs), targets)
    if classes is not None and targets.numel():
        _refuse(_range(targets.long()), classes.shape[1])


def _range(targets: Tensor) -> Int[Tensor, " 2"]:
    """The smallest and the largest class."""
    kept = torch.where(targets == IGNORED, 0, targets)
    return torch.stack([kept.amin(), kept.amax()])


def _refuse(seen: Int[Tensor, " 2"], classes: int) -> None:
    """An error where the smallest or the largest target is not among the classes of the back network."""
    low, high = seen.tolist()
    if low >= 0 and high < classes:
        return
    raise InputError(
        f"The data has the class {high if high >= classes else low}, but the back network tells {classes} classes "
        f"apart, 0 to {classes - 1}. Give data with the classes of the back network, or stitch into a network that was "
        "trained on these."
    )


def _log_probabilities(classes: Tensor) -> Tensor:
    return torch.log_softmax(classes.to(torch.promote_types(classes.dtype, torch.float32)), 1).double()


def _right(classes: Tensor, targets: Tensor) -> Tensor:
    """Whether answers are right; one that is not a number is wrong, whichever class it would be counted as."""
    return (classes.argmax(1) == targets) & ~classes.isnan().any(1)


def _device(outputs: Any) -> torch.device:
    return next((leaf.device for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)), torch.device("cpu"))


def losses_of(loss: Loss, outputs: Any, targets: Any, copies: int) -> Float[Tensor, " copies"]:
    """A loss of one's own for each of several networks whose samples stand one after another.

    >>> losses_of(lambda outputs, targets: outputs - targets, torch.tensor([1.0, 2.0, 5.0, 7.0]), torch.ones(2), 2)
    tensor([0.5000, 5.0000], dtype=torch.float64)
    """
    outputs = getattr(outputs, "logits", outputs)

    def part(number: int) -> Any:
        """The samples of one network."""
        return tree_map(lambda x: x.chunk(copies)[number] if isinstance(x, Tensor) and x.dim() else x, outputs)

    parts = [outputs] if copies == 1 else map(part, range(copies))
    return torch.stack([mean_loss(loss, one, targets) for one in parts])
