"""What the solvers that follow a task loss share: where they begin, and the best element they have seen.

Such a solver asks how well a network between A and g·B does its task. The answer of a relaxed g may be far from that of
a permutation, so every permutation on the way is judged on the same held batches, and the one with the lowest loss is
the result. The start is judged too: no result is worse than it. Where b can be laid on a exactly, that is the result:
every network between them is then a itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite

from torch import Tensor

from intertwine.align.descent import Step
from intertwine.align.line_loss import LineLoss, LineOptions
from intertwine.align.task import Found, Task
from intertwine.align.weights import WeightsOptions, solve_weights
from intertwine.canonical.blocks import moved
from intertwine.errors import InputError
from intertwine.symmetry.element import Element


@dataclass
class Search:
    """Elements judged one by one. `start`: where the search begins; `b`: the weights it has moved."""

    task: Task
    loss: LineLoss
    history: list[Step] = field(default_factory=list)
    _judged: dict[bytes, tuple[float, float]] = field(default_factory=dict)
    _best: tuple[float, Element] | None = None

    def __post_init__(self) -> None:
        task = self.task
        self.look_at(task.problem.symmetry.identity(), "identity")
        self.look_at(solve_weights(task, WeightsOptions())[0], "weights")
        self.start = self.best
        self.b = moved(task.problem.symmetry, self.start, task.problem.b)

    @property
    def best(self) -> Element:
        assert self._best is not None
        return self._best[1]

    @property
    def strands(self) -> list[int]:
        """The strands to be ordered."""
        pair = self.task.pair
        return [s for s in sorted(pair.movable) if pair.strands[s].permutes and pair.places[s]]

    @property
    def over(self) -> bool:
        """Whether b already lies on a, so that there is nothing to gain."""
        return self.history[-1].objective == self.task.pair.unmoved

    def look_at(self, element: Element, name: str, step: int = 0) -> None:
        """Judge an element, and write it down if the last one was another."""
        key = _key(element)
        if key not in self._judged:
            self._judged[key] = self._judge(element)
            objective, loss = self._judged[key]
            if self._best is None or loss < self._best[0] or objective == self.task.pair.unmoved:
                self._best = loss, element
        objective, loss = self._judged[key]
        last = self.history[-1] if self.history else None
        if last is None or (last.objective, last.own) != (objective, loss):
            self.history.append(Step(name, step, "", objective, loss))

    def _judge(self, element: Element) -> tuple[float, float]:
        """The objective, and the task loss."""
        self.task.pair.start_at(element)
        loss = self.loss.judged(moved(self.task.problem.symmetry, element, self.task.problem.b))
        if not isfinite(loss):
            raise InputError(
                f"The task loss between the two networks is {loss} on the held batches, so there is nothing to lower. "
                "Look for inputs, targets or weights that are not finite; 'weights' needs no loss."
            )
        return self.task.pair.objective, loss

    def found(self) -> Found:
        """The best element, at which the pair is left, and the steps."""
        self.task.pair.start_at(self.best)
        return self.best, self.history


def search(task: Task, options: LineOptions, learn: Callable[[Search], None]) -> Found:
    """The element with the lowest task loss that `learn` comes by, and every element on the way."""
    loss = LineLoss(task, options)
    with loss.running():
        found = Search(task, loss)
        if not found.over:
            learn(found)
    return found.found()


def _key(element: Element) -> bytes:
    parts = [part for move in element.moves.values() for _, part in move.items()]
    return b"".join(part.contiguous().numpy().tobytes() for part in parts)


def check_loss(value: Tensor, step: int) -> None:
    """Refuse a loss that is not a number."""
    loss = float(value.detach())
    if not isfinite(loss):
        raise InputError(
            f"The task loss became {loss} at step {step}. Lower the rate: options={{'rate': …}}; or look for "
            "batches with values that are not finite."
        )
