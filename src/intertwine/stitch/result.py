"""`Stitch`, the result of one fit: accuracies and penalty; rank and sparsity of its matrix, and its distance to known
groups; and plots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import cycle
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from intertwine.argument_types import Float, Int
from intertwine.errors import InputError
from intertwine.figures import legend_below, new_figure, panels_in_rows
from intertwine.stitch.direct import LinearMap
from intertwine.stitch.scores import StitchScores
from intertwine.stitch.split import StitchPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Singular values below this share of the largest count as zero.
RANK_TOLERANCE = 1e-5
#: Entries up to this size count as zero, as in Godfrey et al.; Csiszárik et al. have 1e-4.
SPARSE = 1e-3


@dataclass(frozen=True)
class Closeness:
    """The distance of a matrix to the nearest member of some groups, as a share of its own Frobenius norm.

    0 for a member, exactly for permutations and scaled permutations. All are None for a matrix of zeros. Where widths
    differ, members have one entry in every row or column of the shorter side, or orthonormal rows or columns.

    Attributes:
        relu: to a permutation times positive scales, the group of ReLU. permutation: to a permutation.
        orthogonal: to a rotation or reflection; not exactly 0 for members, because of rounding.
        largest: the mean over rows of the largest entry, after columns and then rows of |M| are scaled to sum to 1.
            That removes the scales: for M = P·D with P doubly stochastic it is the mean largest entry of a row of P,
            and 1 for a member of the group.
    """

    relu: float | None
    permutation: float | None
    orthogonal: float | None
    largest: float | None

    def to_dict(self) -> dict[str, float | None]:
        """As plain data."""
        return asdict(self)


def closeness(matrix: Float[Tensor, "out in"]) -> Closeness:
    """The distances of a matrix to the groups of the families.

    >>> import torch
    >>> found = closeness(torch.tensor([[0.0, 3.0], [0.5, 0.0]]))
    >>> found.relu, found.largest, round(found.permutation, 3)
    (0.0, 1.0, 0.678)
    """
    m = _finite(matrix)
    norm = torch.linalg.matrix_norm(m)
    if not norm:
        return Closeness(None, None, None, None)

    def share(rest: Tensor) -> float:
        return float(torch.linalg.matrix_norm(rest) / norm)

    rows, columns = _assigned(m.clamp(min=0).square())
    scaled, plain = m.clone(), m.clone()
    scaled[rows, columns] -= m[rows, columns].clamp(min=0)
    rows, columns = _assigned(m)
    plain[rows, columns] -= 1
    ones = torch.linalg.svdvals(m) - 1
    size = m.abs()
    for axis in (0, 1):
        sums = size.sum(axis, keepdim=True)
        size = torch.where(sums > 0, size / sums, 0.0)
    return Closeness(
        share(scaled), share(plain), float(torch.linalg.vector_norm(ones) / norm), float(size.amax(1).mean())
    )


def rank(matrix: Float[Tensor, "out in"], tolerance: float = RANK_TOLERANCE) -> int:
    """The number of singular values above `tolerance` times the largest.

    >>> import torch
    >>> rank(torch.ones(3, 5)), rank(torch.diag(torch.tensor([1.0, 1e-3, 1e-8]))), rank(torch.zeros(2, 2))
    (1, 2, 0)
    """
    values = torch.linalg.svdvals(_finite(matrix))
    return int((values > tolerance * values.max()).sum())


def sparsity(matrix: Float[Tensor, "out in"], threshold: float = SPARSE) -> float:
    """The share of entries whose size is at most `threshold`.

    >>> import torch
    >>> sparsity(torch.eye(4)), sparsity(torch.tensor([[1.0, -1e-3], [2e-3, 0.0]]))
    (0.75, 0.5)
    """
    # in the precision of the matrix, so that an entry equal to the threshold counts
    return float((matrix.detach().abs() <= torch.tensor(threshold, dtype=matrix.dtype)).double().mean())


def display_order(matrix: Float[Tensor, "out in"]) -> tuple[Int[Tensor, " out"], Int[Tensor, " in"]]:
    """Orders of rows and columns that put matched entries on the diagonal, largest first.

    >>> import torch
    >>> rows, columns = display_order(torch.tensor([[0.0, 3.0, 0.1], [5.0, 0.0, 0.0]]))
    >>> rows.tolist(), columns.tolist()
    ([1, 0], [0, 1, 2])
    """
    squares = _finite(matrix).square()
    rows, columns = _assigned(squares)
    first = squares[rows, columns].argsort(descending=True, stable=True)

    def rest(size: int, taken: Tensor) -> Tensor:
        free = torch.ones(size, dtype=torch.bool)
        free[taken] = False
        return free.nonzero().flatten()

    return (
        torch.cat([rows[first], rest(matrix.shape[0], rows)]),
        torch.cat([columns[first], rest(matrix.shape[1], columns)]),
    )


def _assigned(gain: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = linear_sum_assignment(gain.numpy(), maximize=True)
    return torch.from_numpy(rows), torch.from_numpy(columns)


def _finite(matrix: Tensor) -> Tensor:
    m = matrix.detach().double().cpu()
    if not bool(m.isfinite().all()):
        raise InputError(
            "The matrix of the stitch has NaN or infinite entries, so it has no rank and no nearest member of a "
            "group. The training diverged: see .diverged, and lower the rate or the penalty."
        )
    return m


#: The horizontal axis of a record: the first of these that it has.
CLOCKS = ("step", "epoch")
#: Lines of a panel, thinner and thinner, so that equal ones remain visible.
LINES = (("-", 3.0), ("--", 1.5), (":", 1.5), ("-.", 1.5))
#: Panel → words in the names of its lines.
PANELS = {"accuracy": ("accuracy",), "loss": ("loss", "cross_entropy"), "similarity": ("cka", "r2", "cca")}


def draw_stitch(
    matrix: Float[Tensor, "out in"], title: str, history: Sequence[Mapping[str, Any]] = ()
) -> Figure:  # fmt: skip
    """A heat map of a matrix, and one panel per kind of number that occurs repeatedly in the history.

    >>> import torch
    >>> figure = draw_stitch(torch.eye(3), "identity", [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.4}])
    >>> [axes.get_title() for axes in figure.axes[:2]]
    ['identity', 'loss']
    """
    panels = {
        key: lines for key, lines in curves(history).items() if any(len(times) > 1 for times, _ in lines.values())
    }
    figure, (first, *others) = panels_in_rows(1 + len(panels), 4.1, 3.2, 2)
    _heat_map(first, matrix, title)
    for axes, ((name, clock), lines) in zip(others, panels.items(), strict=True):
        for (label, (times, values)), (style, width) in zip(lines.items(), cycle(LINES), strict=False):
            dot = "." if len(times) < 30 else None
            axes.plot(times, values, style, label=label, linewidth=width if len(lines) > 1 else 1.5, marker=dot)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel(clock, fontsize=8)
        if list(lines) != [name]:
            axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _heat_map(axes: Axes, matrix: Tensor, title: str) -> None:
    values = matrix.detach().double().cpu()
    if bool(values.isfinite().all()):
        rows, columns = display_order(values)
        values = values[rows][:, columns]
    strongest = values.abs().nan_to_num(0.0, 0.0, 0.0).amax(1) if values.numel() else torch.zeros(1)
    most = float(strongest.max())
    edge = float(strongest.median()) or most or 1.0  # outliers beyond a typical row would pale the rest
    picture = axes.imshow(values.numpy(), cmap="RdBu_r", vmin=-edge, vmax=edge, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("front channels, in the order of their partners", fontsize=8)
    axes.set_ylabel("back channels, strongest first", fontsize=8)
    bar = axes.get_figure()
    assert bar is not None
    bar.colorbar(picture, ax=axes, shrink=0.8, extend="both" if most > edge else "neither")


def curves(history: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, tuple[list[float], list[float]]]]:
    """(Panel, clock) → line → (times, values) of a history; its records may have different names.

    >>> curves([{"step": 0, "r2": 0.1}, {"epoch": 1, "loss": 2.0}, {"step": 9, "r2": 0.3}])["similarity", "step"]
    {'r2': ([0.0, 9.0], [0.1, 0.3])}
    """
    found: dict[tuple[str, str], dict[str, tuple[list[float], list[float]]]] = {}
    for i, record in enumerate(history):
        clock = next((name for name in CLOCKS if name in record), None)
        for name, value in record.items():
            panel = next((panel for panel, words in PANELS.items() if any(word in name for word in words)), None)
            if panel is None or isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
                continue
            times, values = found.setdefault((panel, clock or "record"), {}).setdefault(name, ([], []))
            times.append(float(i if clock is None else record[clock]))
            values.append(float(value))
    return dict(sorted(found.items(), key=lambda item: list(PANELS).index(item[0][0])))


def draw_penalties(table: Mapping[tuple[str, str], Sequence[float]], what: str) -> Figure:
    """One line per family over the stitch points; whiskers are one standard deviation to each side.

    Args:
        table: (place, family) → one value per stitch. what: the label of the vertical axis.

    >>> figure = draw_penalties({("layer1", "relu"): [0.1, 0.2], ("layer2", "relu"): [0.3]}, "penalty")
    >>> figure.axes[0].get_ylabel()
    'penalty'
    """
    places, families = (list(dict.fromkeys(key[i] for key in table)) for i in (0, 1))
    figure = new_figure(3.6 + 0.9 * max(3, len(places)), 3.6)
    axes = figure.subplots()
    for i, family in enumerate(families):
        held = [(x, summary(table[place, family])) for x, place in enumerate(places) if table.get((place, family))]
        beside = 0.06 * (i - (len(families) - 1) / 2)  # so that whiskers of two families do not overlap
        axes.errorbar(
            [x + beside for x, _ in held], [mean for _, (mean, _) in held], [spread for _, (_, spread) in held],
            label=family, marker="o", markersize=4, capsize=3, linewidth=1.2,
        )  # fmt: skip
    axes.set_xticks(range(len(places)), places, rotation=30 if max(map(len, places), default=0) > 8 else 0, fontsize=8)
    several = any(len(values) > 1 for values in table.values())
    axes.set_xlabel("stitch point" + ("; whiskers: one standard deviation" if several else ""), fontsize=9)
    axes.set_ylabel(what, fontsize=9)
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    legend_below(figure)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def summary(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (with n − 1); 0 for a single value.

    >>> summary([1.0, 3.0])
    (2.0, 1.414...)
    """
    numbers = torch.tensor(list(values), dtype=torch.float64)
    return float(numbers.mean()), float(numbers.std()) if len(numbers) > 1 else 0.0


@dataclass(frozen=True, eq=False)
class Stitch:
    """The front of one network joined to the back of another.

    Attributes:
        model: the stitched network. point: the stitch point. family: the name of the map's family.
        fit: "direct", or "task" if the map was trained. map: from the front's features to the back's.
        scores: of the stitched network, at the last epoch if it was trained.
        front_accuracy, back_accuracy: of the two networks on the same data; None if the targets are not classes, or not
            the classes of the front network.
        history: one mapping per epoch or traced step. settings: every option of the fit.
        best: scores of the best epoch on the same data. Godfrey et al. report these, although the epoch is selected by
            the reported number.
        diverged: how the training diverged and which map is kept; None if it did not.
    """

    model: nn.Module
    point: StitchPoint
    family: str
    fit: str
    map: LinearMap
    scores: StitchScores
    front_accuracy: float | None
    back_accuracy: float | None
    history: tuple[dict[str, Any], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    best: StitchScores | None = None
    diverged: str | None = None

    @property
    def accuracy(self) -> float | None:
        """Of the stitched network, at the last epoch."""
        return self.scores.accuracy

    @property
    def penalty(self) -> float | None:
        """Mean accuracy of the two networks minus that of the stitched one: (Acc f + Acc f̃)/2 − Acc S."""
        return self._penalty(self.scores)

    @property
    def best_accuracy(self) -> float | None:
        """Of the best epoch; None if epochs are not scored."""
        return None if self.best is None else self.best.accuracy

    @property
    def best_penalty(self) -> float | None:
        """Of the best epoch; None if epochs are not scored."""
        return None if self.best is None else self._penalty(self.best)

    @property
    def relative_accuracy(self) -> float | None:
        """Accuracy as a multiple of the back network's; None if that is 0."""
        return self.accuracy / self.back_accuracy if self.accuracy is not None and self.back_accuracy else None

    @property
    def cross_entropy(self) -> float | None:
        """From the predictions of the back network to those of the stitched one, per sample."""
        return self.scores.cross_entropy

    @property
    def agreement(self) -> dict[str, float] | None:
        """Shares of predictions: "rw" is the back network right and the stitched one wrong."""
        return self.scores.agreement

    @property
    def matrix(self) -> Float[Tensor, "out in"]:
        """The map's matrix: back channels × front channels."""
        return self.map.matrix

    @cached_property
    def rank(self) -> int:
        """The number of singular values above `RANK_TOLERANCE` of the largest."""
        return rank(self.matrix)

    @property
    def sparsity(self) -> float:
        """Share of entries whose size is at most the setting "threshold", by default 1e-3."""
        return sparsity(self.matrix, self.settings.get("threshold", SPARSE))

    @cached_property
    def closeness(self) -> Closeness:
        """The distances of the matrix to permutations with positive scales, permutations and rotations."""
        return closeness(self.matrix)

    @property
    def place(self) -> str:
        """The stitch point as text: one path if both are the same, else "layer1 into layer2"."""
        return self.point.front if self.point.front == self.point.back else f"{self.point.front} into {self.point.back}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data, without the map's numbers; NaN and infinity become None."""
        finite = bool(self.matrix.isfinite().all())
        found = {name: getattr(self.point, name) for name in ("front", "back", "skip", "inputs", "outputs")}
        found |= {name: getattr(self, name) for name in ("family", "fit", "accuracy", "penalty", "relative_accuracy")}
        found |= {"loss": self.scores.loss, "cross_entropy": self.cross_entropy, "agreement": self.agreement}
        accuracies = ("best_accuracy", "best_penalty", "front_accuracy", "back_accuracy")
        found |= {name: getattr(self, name) for name in accuracies}
        found |= {"samples": self.scores.samples, "unscored": self.scores.unscored}
        found |= {"rank": self.rank if finite else None, "sparsity": self.sparsity}
        found |= {"closeness": self.closeness.to_dict() if finite else None, "diverged": self.diverged}
        found |= {"settings": dict(self.settings), "history": list(self.history)}
        return plain_data(found)

    def plot(self) -> Figure:
        """The matrix in `display_order`, and the history if there is one."""
        return draw_stitch(self.matrix, f"{self.family} at {self.place}", self.history)

    def __repr__(self) -> str:
        parts = [f"{self.place} by {self.family}, {self.fit}", self._scored()]
        if self.fit == "task" and self.best_accuracy is not None:
            penalty = "" if self.best_penalty is None else f", penalty {self.best_penalty:.4f}"
            parts.append(f"best epoch {self.best_accuracy:.4f}{penalty}")
        parts.append(f"{self.point.inputs} → {self.point.outputs} channels")
        if self.diverged is not None:
            parts.append(f"diverged: {self.diverged}")
        return f"Stitch({'; '.join(parts)})"

    def _scored(self) -> str:
        if self.scores.unscored is not None:
            return f"not scored: {self.scores.unscored}"
        if self.accuracy is None:
            return f"loss {self.scores.loss:.4g}"
        relative = "" if self.relative_accuracy is None else f" ({self.relative_accuracy:.1%} of the back network's)"
        penalty = "" if self.penalty is None else f", penalty {self.penalty:.4f}"
        return f"accuracy {self.accuracy:.4f}{relative}{penalty}"

    def _penalty(self, scores: StitchScores) -> float | None:
        if self.front_accuracy is None or self.back_accuracy is None or scores.accuracy is None:
            return None
        return (self.front_accuracy + self.back_accuracy) / 2 - scores.accuracy


def plain_data(value: Any) -> Any:
    """The same as lists, dictionaries, numbers and strings; NaN and infinity become None.

    >>> plain_data({"loss": float("nan"), "steps": (1, 2.5)})
    {'loss': None, 'steps': [1, 2.5]}
    """
    match value:
        case Mapping():
            return {str(name): plain_data(item) for name, item in value.items()}
        case list() | tuple():
            return [plain_data(item) for item in value]
        case Tensor():
            return plain_data(value.tolist())
        case float():
            return value if isfinite(value) else None
        case bool() | int() | str() | None:
            return value
        case _:
            return str(value)
