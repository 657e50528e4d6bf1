"""How stitched networks are scored: accuracy, losses and agreement with the back network; training targets; and the
similarity of stitched and original features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite, nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from intertwine.argument_types import Float, Int
from intertwine.data.batches import Call, copied_arguments, labelled_batches
from intertwine.data.evaluate import IGNORE_INDEX, LOSS_ADVICE, Loss, classes_second, mean_loss, no_classes
from intertwine.errors import InputError, MismatchError
from intertwine.measure.measure import find

#: The agreement table: whether the back network (first letter) and the stitched one are right or wrong.
AGREEMENT = ("rr", "rw", "wr", "ww")


@dataclass(frozen=True)
class StitchScores:
    """The scores of one network on some data.

    Attributes:
        samples: how many. accuracy: share of correct predictions; None if the targets are not classes.
        loss: mean over targets (cross-entropy), or over samples (any other loss); NaN if there is none.
        cross_entropy: to the back network, −Σ p_back log p_stitched: summed over classes, mean over samples. One path
            of the published code also averages over classes, which makes it ten times smaller for ten of them.
        rr, rw, wr, ww: counts by whether the back network (first letter) and the stitched one are right or wrong.
        unscored: why only the number of samples is known; None otherwise.
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
        """The table as shares, which sum to 1; None if there are no classes."""
        counts = {name: getattr(self, name) for name in AGREEMENT}
        answers = None if None in counts.values() else sum(counts.values())
        return None if answers is None else {name: count / answers for name, count in counts.items()}

    def to_dict(self) -> dict[str, Any]:
        """As plain data; NaN and infinity become None."""
        return {n: None if isinstance(v, float) and not isfinite(v) else v for n, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> StitchScores:
        """The scores that `to_dict` turned into plain data.

        >>> StitchScores.from_dict(StitchScores(2, None, 0.5, None, None, None, None, None).to_dict()).loss
        0.5
        """
        known = dict(found)
        return cls(**known | {"loss": nan if known["loss"] is None else known["loss"]})

    @property
    def rank(self) -> float:
        """Larger is better: the accuracy, or the negative loss if there are no classes."""
        value = -self.loss if self.accuracy is None else self.accuracy
        return value if isfinite(value) else -inf


class Scorer:
    """Scores of one or many stitched networks over batches.

    Sums stay on the device of the outputs until the scores are read, so that a pass over the data never waits.

    Args:
        copies: how many stitches are scored at once. loss: of (outputs, targets), one number or one per sample;
            cross-entropy by default. must: raise if there is no loss to compute; else the scores give the reason.

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
            raise InputError(f"copies must be at least 1, but is {copies}.")
        self.copies, self.loss, self.must, self.samples = copies, loss, must, 0
        self.unscored: str | None = None
        self.classes: bool | None = None  # whether the targets are classes; set by the first batch
        self._sums: Tensor | None = None
        self._range: Tensor | None = None  # the smallest and the largest class of the targets, on their device
        self._classes = 0

    @torch.no_grad()
    def add(self, outputs: Any, back: Any, targets: Any, samples: int | None = None) -> None:
        """Add a batch.

        Args:
            outputs: of the stitched networks, all samples of the first one, then all of the second (copies·n, ...); a
                tensor or an object with `.logits`. back: the back network's own outputs on the same n samples.
            targets: of the n samples. samples: n, if neither targets nor outputs show it.
        """
        outputs, back = (getattr(value, "logits", value) for value in (outputs, back))
        own = classes_second(back, targets)
        if self.classes is None:
            self.classes = own is not None
        if self.classes is not (own is not None):
            raise InputError("Some batches have classes as targets, others do not. Give targets of one kind.")
        if own is None and self.loss is None:
            self.unscored = f"{no_classes(back, targets)} {LOSS_ADVICE}"
            if self.must:
                raise InputError(self.unscored)
        if samples is None:
            samples = len(targets) if isinstance(targets, Tensor) else len(back)
        device = next((x.device for x in tree_leaves(outputs) if isinstance(x, Tensor)), torch.device("cpu"))
        sums = torch.zeros(self.copies, 7, dtype=torch.float64, device=device)
        if own is not None:
            sums[:, 1:] = self._classified(outputs, own, targets)
        if self.loss is None:
            sums[:, 0] = sums[:, 1]
        else:
            sums[:, 0] = samples * losses_of(self.loss, outputs, targets, self.copies)
        self._sums = sums if self._sums is None else self._sums.add_(sums)
        self.samples += samples

    def _classified(self, outputs: Tensor, own: Tensor, targets: Tensor) -> Float[Tensor, "copies 6"]:
        """Cross-entropy to the targets, cross-entropy to the back network, and the agreement table, as sums."""
        targets = targets.long()
        many = targets.repeat(self.copies, *[1] * (targets.dim() - 1))
        given = classes_second(outputs, many)
        if given is None or given.shape[1:] != own.shape[1:]:
            raise InputError(
                f"The outputs of {self.copies} stitched networks must be {self.copies} times as many as the back "
                f"network's, {tuple(own.shape)}, one network after another, but are {tuple(outputs.shape)}."
            )
        self._check_range(targets, own.shape[1])
        shape = (self.copies, *own.shape)
        stitched = _log_probabilities(given).reshape(shape)
        expected = _log_probabilities(own).exp()
        kept, wanted = targets != IGNORE_INDEX, targets.clamp(0, own.shape[1] - 1)
        loss = -stitched.gather(2, wanted.expand(self.copies, *wanted.shape).unsqueeze(2)).squeeze(2)
        # a class that the back network rules out adds nothing, whatever the stitched one predicts
        distance = -torch.where(expected > 0, expected * stitched, 0.0).sum(2)
        right = _right(given, many).reshape(loss.shape)
        own_right = _right(own, targets)
        cells = (own_right & right, own_right & ~right, ~own_right & right, ~own_right & ~right)
        each = torch.stack([loss, distance, *(cell.double() for cell in cells)], -1)
        return torch.where(kept.unsqueeze(-1), each, 0.0).flatten(1, -2).sum(1)

    def _check_range(self, targets: Tensor, classes: int) -> None:
        """Check the range of the targets; on a GPU only when the scores are read, so that nothing waits here."""
        self._classes = classes
        kept = torch.where(targets == IGNORE_INDEX, 0, targets)
        found = torch.stack([kept.amin(), kept.amax()])
        if targets.device.type == "cpu":
            _check_classes(found, classes)
        elif self._range is None:
            self._range = found
        else:
            low, high = torch.minimum(self._range[0], found[0]), torch.maximum(self._range[1], found[1])
            self._range = torch.stack([low, high])

    def scores(self) -> list[StitchScores]:
        """The scores of every stitch, over all batches so far."""
        if self._sums is None:
            raise InputError("No batch has been scored. Give data with at least one sample.")
        if self._range is not None:
            _check_classes(self._range, self._classes)
        return [self._one(row) for row in self._sums.tolist()]

    def _one(self, row: list[float]) -> StitchScores:
        total, _, distance, *cells = row
        if self.unscored is not None:
            return StitchScores(self.samples, None, nan, None, None, None, None, None, self.unscored)
        if not self.classes:
            return StitchScores(self.samples, None, total / self.samples, None, None, None, None, None)
        answers = sum(cells)
        if not answers:
            raise InputError("Every target of the data is ignored (-100), so there is nothing to score.")
        rr, rw, wr, ww = map(round, cells)
        weight = answers if self.loss is None else self.samples
        return StitchScores(self.samples, (rr + wr) / answers, total / weight, distance / answers, rr, rw, wr, ww)


def _check_classes(found: Int[Tensor, " 2"], classes: int) -> None:
    """Refuse targets whose smallest or largest class is not a class of the back network."""
    low, high = found.tolist()
    if low < 0 or high >= classes:
        raise InputError(
            f"The data has the class {high if high >= classes else low}, but the back network has {classes} classes, "
            f"0 to {classes - 1}. Give data with its classes, or a back network that was trained on the classes of "
            "the data."
        )


def _log_probabilities(classes: Tensor) -> Tensor:
    return torch.log_softmax(classes.to(torch.promote_types(classes.dtype, torch.float32)), 1).double()


def _right(classes: Tensor, targets: Tensor) -> Tensor:
    """Whether predictions are right; one with NaN is wrong."""
    return (classes.argmax(1) == targets) & ~classes.isnan().any(1)


def losses_of(loss: Loss, outputs: Any, targets: Any, copies: int) -> Float[Tensor, " copies"]:
    """The user's loss for each of several networks whose samples are stacked.

    >>> losses_of(lambda outputs, targets: outputs - targets, torch.tensor([1.0, 2.0, 5.0, 7.0]), torch.ones(2), 2)
    tensor([0.5000, 5.0000], dtype=torch.float64)
    """
    outputs = getattr(outputs, "logits", outputs)

    def part(number: int) -> Any:
        return tree_map(lambda x: x.chunk(copies)[number] if isinstance(x, Tensor) and x.dim() else x, outputs)

    parts = [outputs] if copies == 1 else map(part, range(copies))
    return torch.stack([mean_loss(loss, one, targets) for one in parts])


def run_model(model: nn.Module, call: Call) -> Any:
    """The output of a whole network; the batch is copied, as the network may work in place."""
    args, kwargs = copied_arguments(call)
    return model(*args, **kwargs)


def logits_of(outputs: Any) -> Tensor:
    """The logits among a network's outputs."""
    found = getattr(outputs, "logits", outputs)
    if not isinstance(found, Tensor):
        raise InputError(
            "Stitches are trained and scored by the logits of the back network, but its output is a "
            f"{type(found).__name__}. Wrap it in a module that returns its logits."
        )
    return found


class TrainingTargets:
    """The training loss of several stitches: "hard" labels, "soft" outputs of the back network, or "both".

    Args:
        kinds: one per stitch. device: of the losses. loss: of (outputs, targets), instead of cross-entropy with labels.

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
            own: outputs of the back network itself, if there are soft targets.
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
            hard = each.view(copies, -1).sum(1) / kept.clamp(min=1)  # a batch without targets has loss 0, not NaN
        if self.soft:
            share = F.softmax(_rows(logits_of(own), targets, 1, labelled), -1)
            soft = -(share * F.log_softmax(flat, -1)).sum(-1).mean(1)
        return self.shares * hard + (1 - self.shares) * soft


def _rows(logits: Tensor, targets: Any, copies: int, hard: bool) -> Float[Tensor, "copies answers classes"]:
    """One row of classes per prediction (a sample, a token or a pixel), along the same axis of classes as in scores.

    The targets determine the axis; outputs with two axes need none if all targets are soft.
    """
    many = targets.repeat(copies, *[1] * (targets.dim() - 1)) if isinstance(targets, Tensor) and targets.dim() else None
    classes = classes_second(logits, many)
    if classes is None and logits.dim() == 2 and not hard:
        classes = logits
    if classes is not None:
        return classes.movedim(1, -1).reshape(copies, -1, classes.shape[1]).float()
    found = f"{targets.dtype} {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
    shape = (len(logits) // copies, *logits.shape[1:]) if logits.dim() else ()
    if hard:
        raise InputError(
            "Hard targets are one class, an integer, per prediction of the back network: outputs (N, classes, …) or "
            f"(N, …, classes) with targets (N, …). Found outputs {shape} and targets {found}. Give data with classes "
            f"as targets, or targets='soft'. For other tasks: {LOSS_ADVICE}"
        )
    raise InputError(
        f"Soft targets are the outputs of the back network, but the axis of classes in outputs {shape} is unknown: it "
        f"is inferred from the targets of the data, and these are {found}. Give one class per prediction as targets, "
        "one axis less than the outputs, or a network with outputs (samples, classes)."
    )


#: The traced measures of `intertwine.measure`.
TRACED = ("linear_cka", "linear_cka_biased", "cca")


def feature_similarities(
    target: Float[Tensor, "*rows features"], mapped: Float[Tensor, "*others width"]
) -> dict[str, float]:
    """How similar mapped rows are to the back network's own.

    CKA, R² and CCA can fall while the task loss falls too (Csiszárik et al. 2021, Figure 4). R² is of the map itself:
    the R² of the best refit does not change under an invertible stitch.

    Args:
        target: rows of the back network at the stitch point. mapped: the front's rows after the map, in the same order.

    Returns:
        "linear_cka" (debiased), "linear_cka_biased", "cca" (mean correlation), and "r2" without a refit:
        1 − ‖mapped − target‖²/‖target − its mean‖². NaN where undefined, such as CCA of fewer rows than features.
    Example:
        >>> import torch
        >>> rows = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
        >>> {name: round(value, 4) for name, value in feature_similarities(rows, 2 * rows).items() if name != "r2"}
        {'linear_cka': 1.0, 'linear_cka_biased': 1.0, 'cca': 1.0}
    """
    if target.shape != mapped.shape:
        raise MismatchError(
            f"The rows of the back network are {tuple(target.shape)}, but those of the stitch {tuple(mapped.shape)}. "
            "Compare rows after the map."
        )
    x, y = (rows.detach().flatten(0, -2) for rows in (mapped, target))
    if not bool(x.isfinite().all()):
        return dict.fromkeys((*TRACED, "r2"), float("nan"))  # the stitch diverged, and its history shows it
    found = {name: find(name)(x, y).value for name in TRACED}
    y = y.double()
    rest = (x - y).square().sum()
    spread = (y - y.mean(0)).square().sum()
    return found | {"r2": float(1 - rest / spread) if float(spread) else float("nan")}


def differentiable_cka(
    x: Float[Tensor, "*many rows first"], y: Float[Tensor, "*others rows second"]
) -> Float[Tensor, "*found"]:  # fmt: skip
    """Biased linear CKA with gradients, as a term of a training loss.

    Args:
        x, y: rows of features, or stacks of these; stacks are compared one by one, and one y with all of a stack x.

    Returns:
        ‖XᵀY‖²/(‖XᵀX‖·‖YᵀY‖) of centred rows, as `intertwine.measure(x, y, "linear_cka_biased")`. NaN if one side is
        constant.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 4, requires_grad=True)
        >>> value = differentiable_cka(x, x.detach().roll(1, 1) * 3)
        >>> value.backward()
        >>> round(float(value.detach()), 4), bool(x.grad.abs().max() < 1e-3)  # at its maximum, so without a gradient
        (1.0, True)
    """
    x, y = (rows - rows.mean(-2, keepdim=True) for rows in (x, y))
    # scaled to length one, squares of squares stay within the range of single precision
    x, y = (rows / torch.linalg.matrix_norm(rows, keepdim=True) for rows in (x, y))
    cross, first, second = (torch.linalg.matrix_norm(a.mT @ b) for a, b in ((x, y), (x, x), (y, y)))
    return cross.square() / (first * second)


@torch.no_grad()
def accuracy_of(model: nn.Module, data: Any) -> float | None:
    """The accuracy of a whole network; None if its outputs are not these classes."""
    scorer = Scorer()
    try:
        for batch in labelled_batches(data, model):
            outputs = run_model(model, batch.call)
            scorer.add(outputs, outputs, batch.targets)
        return scorer.scores()[0].accuracy
    except InputError:
        return None
