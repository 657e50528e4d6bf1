"""How stitched networks are judged: training targets and losses, accuracy and agreement with the back network, and
similarity of stitched and original features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite, nan
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from intertwine.argument_types import Float, Int
from intertwine.data.batches import Call, copied_arguments, labelled_batches
from intertwine.data.evaluate import IGNORE_INDEX, LOSS_ADVICE, Loss, classes_second, mean_loss, no_classes
from intertwine.errors import InputError, MismatchError
from intertwine.measure.measure import find

# ----------------------------------------------------------------------------------------------------
# Scores of stitched networks: loss, accuracy, and how they stand to the network whose back they have.
#
# Sums stay on the device of the outputs, so that a pass over the data never waits for a number; they are read at the end.


#: The agreement table: the first letter is the back network right or wrong, the second the stitched one.
AGREEMENT = ("rr", "rw", "wr", "ww")


@dataclass(frozen=True)
class StitchScores:
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
        counts = {name: getattr(self, name) for name in AGREEMENT}
        answers = None if None in counts.values() else sum(counts.values())
        return None if answers is None else {name: count / answers for name, count in counts.items()}

    def to_dict(self) -> dict[str, Any]:
        """As plain data; a number that is not finite becomes None."""
        return {
            name: None if isinstance(value, float) and not isfinite(value) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> StitchScores:
        """What `to_dict` gave.

        >>> StitchScores.from_dict(StitchScores(2, None, 0.5, None, None, None, None, None).to_dict()).loss
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
            self.unscored = f"{no_classes(back, targets)} {LOSS_ADVICE}"
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
        kept, wanted = targets != IGNORE_INDEX, targets.clamp(0, own.shape[1] - 1)
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

    def scores(self) -> list[StitchScores]:
        """The scores of every stitch, over all batches so far."""
        if self._sums is None:
            raise InputError("Scores were asked for before any batch was scored. Give data with at least one sample.")
        if self._seen is not None:
            _refuse(self._seen, self._known)
        return [self._one(row) for row in self._sums.tolist()]

    def _one(self, row: list[float]) -> StitchScores:
        total, _, distance, *cells = row
        if self.unscored is not None:
            return StitchScores(self.samples, None, nan, None, None, None, None, None, self.unscored)
        if not self.classes:
            return StitchScores(self.samples, None, total / self.samples, None, None, None, None, None)
        answers = sum(cells)
        if not answers:
            raise InputError("Every target of the data is marked as ignored (-100), so there is nothing to score.")
        rr, rw, wr, ww = map(round, cells)
        weight = answers if self.loss is None else self.samples
        return StitchScores(self.samples, (rr + wr) / answers, total / weight, distance / answers, rr, rw, wr, ww)


def _range(targets: Tensor) -> Int[Tensor, " 2"]:
    """The smallest and the largest class."""
    kept = torch.where(targets == IGNORE_INDEX, 0, targets)
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


# ----------------------------------------------------------------------------------------------------
# Targets of a task-loss fit: labels of the data, answers of the back network, or both.


def run_model(model: nn.Module, call: Call) -> Any:
    """What a whole network answers; the batch stays as it is, whatever the network does in place."""
    args, kwargs = copied_arguments(call)
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


class TrainingTargets:
    """What so many stitches are trained towards, each "hard", "soft" or "both".

    Args:
        loss: of (outputs, targets), in the place of cross-entropy with hard targets.

    >>> targets = TrainingTargets(["hard", "soft"], torch.device("cpu"))
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
            each = F.cross_entropy(
                flat.flatten(0, 1), wanted.repeat(copies), reduction="none", ignore_index=IGNORE_INDEX
            )
            kept = (wanted != IGNORE_INDEX).sum()
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
        _refuse_targets(logits, targets, copies, hard)
    return classes.movedim(1, -1).reshape(copies, -1, classes.shape[1]).float()


def _refuse_targets(logits: Tensor, targets: Any, copies: int, hard: bool) -> NoReturn:
    """An error where nothing says which axis of the outputs has the classes."""
    found = f"{targets.dtype} {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
    shape = (len(logits) // copies, *logits.shape[1:]) if logits.dim() else ()
    if hard:
        raise InputError(
            "Hard targets are one class, a whole number, per answer of the back network: outputs (N, classes, …) or "
            f"(N, …, classes) with targets (N, …). Found outputs {shape} and targets {found}. Give data with "
            f"classes as targets, or targets='soft'. For other tasks: {LOSS_ADVICE}"
        )
    raise InputError(
        f"Soft targets are the answers of the back network, but which axis of its outputs {shape} has the classes is "
        f"not known: the targets of the data, which would tell, are {found}. Pass the class of every answer with the "
        "data, one axis less than the outputs, or a network with outputs (samples, classes)."
    )


# ----------------------------------------------------------------------------------------------------
# Traced similarities: how the features a stitch makes stand to the back network's own, from rows or from sums alone.
#
# CKA, R² and CCA can fall while the task loss falls too (Csiszárik et al. 2021, their Figure 4), so they are worth
# following. R² is that of the map as it is: the R² of the best refit could not change under an invertible stitch.


#: Measures of `intertwine.measure` that are traced. The debiased CKA needs rows; the others can be had from sums.
FROM_ROWS = ("linear_cka", "linear_cka_biased", "cca")


def feature_similarities(
    target: Float[Tensor, "*rows features"], mapped: Float[Tensor, "*others width"]
) -> dict[str, float]:
    """How near mapped rows are to those they stand for.

    Args:
        target: rows of the back network at the cut. mapped: the front's rows behind the stitch, in the same order.

    Returns:
        "linear_cka" (debiased), "linear_cka_biased", "cca" (mean correlation), and "r2" of the rows as they are:
        1 − ‖mapped − target‖²/‖target − its mean‖². Not a number where the rows have no such value, as CCA of fewer
        rows than features.

    Example:
        >>> import torch
        >>> rows = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
        >>> {name: round(value, 4) for name, value in feature_similarities(rows, 2 * rows).items() if name != "r2"}
        {'linear_cka': 1.0, 'linear_cka_biased': 1.0, 'cca': 1.0}
    """
    if target.shape != mapped.shape:
        raise MismatchError(
            f"Rows were to be traced that stand for each other, but the back network's are {tuple(target.shape)} and "
            f"the stitched ones {tuple(mapped.shape)}. Trace rows behind the stitch."
        )
    x, y = (rows.detach().flatten(0, -2) for rows in (mapped, target))
    if not bool(x.isfinite().all()):
        return dict.fromkeys((*FROM_ROWS, "r2"), float("nan"))  # the stitch diverged, which its history shall show
    found = {name: find(name)(x, y).value for name in FROM_ROWS}
    y = y.double()
    rest = (x - y).square().sum()
    spread = (y - y.mean(0)).square().sum()
    return found | {"r2": float(1 - rest / spread) if float(spread) else float("nan")}


def differentiable_cka(
    x: Float[Tensor, "*many rows first"], y: Float[Tensor, "*others rows second"]
) -> Float[Tensor, "*found"]:  # fmt: skip
    """Biased linear CKA that gradients flow through: what a stitch can be driven away from while it is trained.

    Args:
        x, y: rows of features, or stacks of such; stacks are compared one by one, and one y with all of a stack x.

    Returns:
        ‖XᵀY‖²/(‖XᵀX‖·‖YᵀY‖) of centred rows; the value that `intertwine.measure(x, y, "linear_cka_biased")` gives.
        Not a number where one side does not vary.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 4, requires_grad=True)
        >>> value = differentiable_cka(x, x.detach().roll(1, 1) * 3)
        >>> value.backward()
        >>> round(float(value.detach()), 4), bool(x.grad.abs().max() < 1e-3)  # at its highest, so without a slope
        (1.0, True)
    """
    x, y = (rows - rows.mean(-2, keepdim=True) for rows in (x, y))
    # at length one, squares of squares stay within the range of single precision
    x, y = (rows / torch.linalg.matrix_norm(rows, keepdim=True) for rows in (x, y))
    cross, first, second = (torch.linalg.matrix_norm(a.mT @ b) for a, b in ((x, y), (x, x), (y, y)))
    return cross.square() / (first * second)


@torch.no_grad()
def accuracy_of(model: nn.Module, data: Any) -> float | None:
    """The accuracy of a whole network; None where its answers are not those classes."""
    scorer = Scorer()
    try:
        for batch in labelled_batches(data, model):
            outputs = run_model(model, batch.call)
            scorer.add(outputs, outputs, batch.targets)
        return scorer.scores()[0].accuracy
    except InputError:
        return None
