"""`barrier`: loss and error along the straight line between two networks, and how far they rise above both ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from intertwine.argument_types import finite_float
from intertwine.connect.repair import corrected_along
from intertwine.data.batches import Fingerprint, calls, check_batches, on_device_of
from intertwine.data.batchnorm import reset_statistics_along
from intertwine.data.evaluate import Loss, evaluate
from intertwine.data.weights import path_between
from intertwine.errors import InputError
from intertwine.figures import new_figure
from intertwine.lazy import data_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Barrier:
    """The result of `barrier`.

    Attributes:
        ts: the points; 0 is the first network and 1 the second. loss: the mean loss at each.
        error: the fraction of wrong answers at each; None if the targets are not classes.
        data: fingerprint of the data. reset_data: of the data for the statistics, if any.
        without_reset: the same line with mixed instead of re-estimated statistics, if statistics are reset.
        with_scales: the same line with scales corrected without data, if `scales=True`.
    """

    ts: tuple[float, ...]
    loss: tuple[float, ...]
    error: tuple[float, ...] | None
    data: Fingerprint
    reset_data: Fingerprint | None = None
    without_reset: Barrier | None = field(default=None, repr=False)
    with_scales: Barrier | None = field(default=None, repr=False)

    @property
    def loss_barrier(self) -> float:
        """max over t of L(t) − ((1 − t)·L(0) + t·L(1)).

        The ends are left out: they are 0 by definition and would hide a line that lies below throughout.
        """
        return max(self.excess(self.loss)[1:-1])

    @property
    def error_barrier(self) -> float | None:
        """The same for the error, as a fraction: 0.16 is sixteen points of accuracy."""
        return None if self.error is None else max(self.excess(self.error)[1:-1])

    @property
    def worst(self) -> float:
        """The t between the ends at which the loss rises most above the line between the ends."""
        between = self.excess(self.loss)[1:-1]
        return self.ts[1 + between.index(max(between))]

    def excess(self, values: Sequence[float]) -> tuple[float, ...]:
        """How far each value lies above the straight line from the first to the last; negative below it."""
        first, last = values[0], values[-1]
        return tuple(value - ((1 - t) * first + t * last) for t, value in zip(self.ts, values, strict=True))

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per point, as plain data; with columns for the lines without reset and with scales, if any."""
        columns = self._columns()
        return [
            {"t": t} | {name: values[i] if values is not None else None for name, values in columns.items()}
            for i, t in enumerate(self.ts)
        ]

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return data_frame(self.to_rows())

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "ts": list(self.ts),
            "loss": list(self.loss),
            "error": None if self.error is None else list(self.error),
            "loss_barrier": self.loss_barrier,
            "error_barrier": self.error_barrier,
            "data": self.data.to_dict(),
            "reset_data": None if self.reset_data is None else self.reset_data.to_dict(),
            "without_reset": None if self.without_reset is None else self.without_reset.to_dict(),
            "with_scales": None if self.with_scales is None else self.with_scales.to_dict(),
        }

    def plot(self) -> Figure:
        """The loss, and the error if there is one, along the line."""
        kinds = ["loss"] if self.error is None else ["loss", "error"]
        figure = new_figure(4.2 * len(kinds), 3.2)
        for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
            for name, values in self._columns().items():
                if name.startswith(kind) and values is not None:
                    style = "--" if name.endswith("without_reset") else ":" if name.endswith("with_scales") else "-"
                    axes.plot(self.ts, values, style, label=self._label(name))
            axes.set_xlabel("t: from the first network (0) to the second (1)", fontsize=8)
            axes.set_title(f"{kind}, {self.data.samples:,} samples", fontsize=9)
            axes.legend(fontsize=7)
        return figure

    def __repr__(self) -> str:
        found = [f"{len(self.ts)} points on {self.data.samples:,} samples", self._summary()]
        if self.without_reset is not None and self.reset_data is not None:
            found[1] += f" with statistics reset on {self.reset_data.samples:,} samples"
            found.append(f"without reset {self.without_reset._summary()}")
        if self.with_scales is not None:
            found.append(f"with scales corrected {self.with_scales._summary()}")
        return f"Barrier({'; '.join(found)})"

    def _summary(self) -> str:
        error = "" if self.error_barrier is None else f", error barrier {self.error_barrier:.4f}"
        return f"loss barrier {self.loss_barrier:.4g} at t = {self.worst:.3g}{error}"

    def _label(self, column: str) -> str:
        if column.endswith("with_scales"):
            return "scales corrected, without data"
        if self.without_reset is None:
            return column if self.with_scales is None else "as mixed"
        return "mixed statistics" if column.endswith("without_reset") else "statistics reset"

    def _columns(self) -> dict[str, tuple[float, ...] | None]:
        lines = {"": self, "_without_reset": self.without_reset, "_with_scales": self.with_scales}
        columns: dict[str, tuple[float, ...] | None] = {}
        for suffix, line in lines.items():
            if line is not None:
                columns |= {f"loss{suffix}": line.loss, f"error{suffix}": line.error}
        return columns


def barrier(
    a: nn.Module,
    b: nn.Module,
    data: Any,
    points: int = 25,
    reset_statistics: Any = None,
    *,
    scales: bool = False,
    loss: Loss | None = None,
    memory: float | int = 1.0,
) -> Barrier:
    """The loss and the error along the straight line from a to b, and how far they rise above the line of the ends.

    Args:
        a, b: two networks of one architecture; neither is changed. They are evaluated in evaluation mode.
        data: batches of (inputs, targets), read once.
        points: how many networks to evaluate, both ends included; an odd number includes the middle.
        reset_statistics: batches on which BatchNorm statistics are re-estimated, at every point and both ends. The
            result then also holds the line without: the two are different experiments.
        scales: also evaluate the line with scales corrected without data (`intertwine.connect.repair`).
        loss: a function of (outputs, targets) that returns one number, or one per sample. Cross-entropy if None, with
            classes on the second axis, as in torch, or on the last.
        memory: GiB of weights and features for points that run at once, on a GPU.

    Returns:
        A `Barrier`: `.loss` and `.error` per point, `.loss_barrier`, `.error_barrier` (fractions), `.plot()`.

    Raises:
        MismatchError: the networks differ in more than their weights. InputError: no data, a batch that is not
            (inputs, targets), a loss that is not finite, statistics to reset in a network without BatchNorm.

    Example:
        >>> import torch, intertwine
        >>> a, b = (torch.nn.Linear(2, 2) for _ in range(2))
        >>> data = [(torch.randn(32, 2), torch.randint(2, (32,)))]
        >>> found = intertwine.barrier(a, b, data, points=5)
        >>> found.loss_barrier < 0  # the loss is convex in the weights of one linear layer
        True
    """
    if isinstance(points, bool) or not isinstance(points, Integral) or points < 3:
        raise InputError(f"points must be at least 3, both ends and one between, but is {points!r}.")
    if finite_float(memory) is None or memory < 0:
        raise InputError(
            f"memory must be a number of GiB, at least 0, but is {memory!r}; at 0 points run one after another."
        )
    path = path_between(a, b, torch.linspace(0, 1, points, dtype=torch.float64).tolist())
    lines, reset_data = {"plain": path}, None
    if scales:
        first, data = _first_batch(data)
        lines["scales"] = corrected_along(path, a, b, on_device_of(next(calls([first])), a))
    if reset_statistics is not None:
        lines["reset"], reset_data = reset_statistics_along(path, reset_statistics)
    scores = dict(zip(lines, evaluate(list(lines.values()), data, loss, memory), strict=True))
    made = {name: Barrier(path.ts, x.loss, x.error, x.data) for name, x in scores.items()}
    if "reset" in made:
        made["plain"] = replace(made["reset"], reset_data=reset_data, without_reset=made["plain"])
    return replace(made["plain"], with_scales=made.get("scales"))


def _first_batch(data: Any) -> tuple[Any, Any]:
    """The first batch, and data that still has it, even if it can be read only once."""
    check_batches(data)
    walk = iter(data)
    first = next(walk, None)
    if first is None:
        raise InputError("The data is empty: there is no first batch. Pass at least one batch (inputs, targets).")
    return first, chain([first], walk) if walk is data else data
