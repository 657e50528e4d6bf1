"""Methods that minimise a task loss between the two networks: `straight-through` (Ainsworth et al.

2023) and `sinkhorn` (Pena et al. 2023), and the loss on the line that both use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isfinite, log
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from intertwine.align.matching import (
    RelaxedElement,
    RelaxedMove,
    mixed,
    nearest_permutation,
    permutation_step,
    sinkhorn,
)
from intertwine.align.solver import AlignmentTask, Solution, coordinate_descent
from intertwine.align.state import AlignmentStep, MatchingState
from intertwine.align.weights import WeightsOptions, solve_weights
from intertwine.argument_types import Float
from intertwine.data.batches import LabelledBatch, copied_arguments, labelled_batches
from intertwine.data.evaluate import Loss, score
from intertwine.data.layers import evaluating, wrapped_by
from intertwine.errors import InputError
from intertwine.graph.model import copy_module
from intertwine.symmetry.blocks import transform_weights
from intertwine.symmetry.element import Element, copies, identity_move

# ----------------------------------------------------------------------------------------------------
# The task loss on the line between two networks, as a function of the weights of the second.
#
# BatchNorm normalises by the statistics of each batch here: running statistics that were mixed from two networks are not
# those of the mixed network, and a loss under them would lead a search astray.


MIDDLE = 0.5
ADVICE = "Pass options={'loss': …}, a function of (outputs, targets)."


@dataclass(frozen=True)
class LineOptions:
    """Which loss is lowered, where, and how results are judged.

    `steps`: how many batches are learnt from; data begins anew where it ends. `loss`: of (outputs, targets),
    cross-entropy where None. `at`: the point of the line, from 0 (a) to 1 (b), whose loss is lowered; None draws it
    anew for every batch, and results are then judged in the middle. `held`: the first so many batches are kept, and
    every result is judged on them. `batch_statistics`: BatchNorm normalises by each batch; False mixes the running
    statistics of the two networks.
    """

    steps: int = 200
    loss: Loss | None = None
    at: float | int | None = MIDDLE
    held: int = 8
    batch_statistics: bool = True

    def __post_init__(self) -> None:
        for name in ("steps", "held"):
            self.check(name, getattr(self, name) >= 1, "at least 1")
        self.check("at", self.at is None or 0 < self.at <= 1, "above 0, where b counts, and at most 1, or None")

    def check(self, name: str, fine: bool, wanted: str) -> None:
        """Refuse the value of an option, and say what it must be."""
        if not fine:
            raise InputError(
                f"The option {name}={getattr(self, name)} was given; it must be {wanted}. Leave it out for the default."
            )


class LineLoss:
    """The task loss of networks between a and whatever b has become.

    `network` is a copy of a, into which weights are put for one call at a time. `a`: the weights of a that are mixed.
    """

    def __init__(self, task: AlignmentTask, options: LineOptions) -> None:
        self.options, self.data = options, task.data
        self.network = copy_module(task.a).requires_grad_(False)
        self.statistics = _statistics(self.network)
        if options.batch_statistics:
            _forget_statistics(self.network)
        left_out = self.statistics if options.batch_statistics else set()
        self.a = {name: x for name, x in task.problem.a.items() if name not in left_out}
        self.held = list(islice(labelled_batches(task.data, self.network), options.held))

    @contextmanager
    def running(self) -> Iterator[None]:
        """The network in evaluation mode, gradients on."""
        with evaluating(self.network), torch.enable_grad():
            for module in self.network.modules():
                if isinstance(module, nn.RNNBase):  # cuDNN gives gradients in training mode only, which is dropout
                    module.training, module.dropout = True, 0.0
            yield

    def of(self, b: Mapping[str, Tensor], batch: LabelledBatch, t: float) -> Tensor:
        """The mean loss of one batch at a point of the line to b."""
        total, weight = self._sums(b, batch, t)
        return total / weight

    def judged(self, b: Mapping[str, Tensor]) -> float:
        """The mean loss over the held batches."""
        at = MIDDLE if self.options.at is None else float(self.options.at)
        with torch.no_grad():
            total, weight = torch.stack([self._sums(b, batch, at) for batch in self.held]).sum(0).tolist()
        if not weight:
            raise InputError(
                "Every target of the held batches is marked as ignored (-100), so there is no loss to judge by. Pass "
                "other data, or hold more batches: options={'held': …}."
            )
        return total / weight

    def _sums(self, b: Mapping[str, Tensor], batch: LabelledBatch, t: float) -> Tensor:
        args, kwargs = batch.call
        # torch has no slope in running statistics
        used = {name: b[name].detach() if name in self.statistics else b[name] for name in self.a}
        inner, prefix = wrapped_by(self.network)
        state = {name.removeprefix(prefix): _between(x, used[name].to(x.device), t) for name, x in self.a.items()}
        outputs = functional_call(inner, state, args, kwargs)
        return score(outputs, copied_arguments(batch.targets), batch.samples, self.options.loss, ADVICE)[:2]

    def batches(self, generator: torch.Generator) -> Iterator[tuple[int, LabelledBatch, float]]:
        """(step, batch, point of the line) for every step."""
        step = 0
        while True:
            for batch in labelled_batches(self.data, self.network):
                step += 1
                drawn = float(torch.rand((), generator=generator))
                yield step, batch, drawn if self.options.at is None else float(self.options.at)
                if step == self.options.steps:
                    return


def _between(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Numbers are mixed; whole numbers and masks come from a, and so does what is equal in both (−∞ in a mask)."""
    if not (a.is_floating_point() or a.is_complex()) or (not b.requires_grad and torch.equal(a, b)):
        return a
    return (1 - t) * a + t * b.to(a.dtype)


def _norms(network: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers that keep running statistics."""
    named = network.named_modules()
    return {path: norm for path, norm in named if isinstance(norm, _BatchNorm) and norm.running_mean is not None}


def _statistics(network: nn.Module) -> set[str]:
    """The names of all running statistics."""
    kept = ("running_mean", "running_var", "num_batches_tracked")
    return {f"{path}.{name}".lstrip(".") for path in _norms(network) for name in kept}


def _forget_statistics(network: nn.Module) -> None:
    """Take the running statistics from every BatchNorm, which then uses those of the batch."""
    for norm in _norms(network).values():
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
        norm.register_forward_pre_hook(_check_batch)


def _check_batch(_norm: nn.Module, args: tuple[Any, ...]) -> None:
    if args[0].numel() == args[0].shape[1]:
        raise InputError(
            "A batch gives a BatchNorm layer one value per channel, which has no variance. Use larger batches, or "
            "options={'batch_statistics': False}, which mixes the running statistics of the two networks."
        )


# ----------------------------------------------------------------------------------------------------
# What the solvers that follow a task loss share: where they begin, and the best element they have seen.
#
# Such a solver asks how well a network between A and g·B does its task. The answer of a relaxed g may be far from that of
# a permutation, so every permutation on the way is judged on the same held batches, and the one with the lowest loss is
# the result. The start is judged too: no result is worse than it. Where b can be laid on a exactly, that is the result:
# every network between them is then a itself.


@dataclass
class LossSearch:
    """Elements judged one by one. `start`: where the search begins; `b`: the weights it has moved."""

    task: AlignmentTask
    loss: LineLoss
    history: list[AlignmentStep] = field(default_factory=list)
    _judged: dict[bytes, tuple[float, float]] = field(default_factory=dict)
    _best: tuple[float, Element] | None = None

    def __post_init__(self) -> None:
        task = self.task
        self.look_at(task.problem.symmetry.identity(), "identity")
        self.look_at(solve_weights(task, WeightsOptions())[0], "weights")
        self.start = self.best
        self.b = transform_weights(task.problem.symmetry, self.start, task.problem.b)

    @property
    def best(self) -> Element:
        assert self._best is not None
        return self._best[1]

    @property
    def strands(self) -> list[int]:
        """The strands to be ordered."""
        pair = self.task.pair
        return [s for s in sorted(pair.movable) if pair.wire_specs[s].permutes and pair.places[s]]

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
            self.history.append(AlignmentStep(name, step, "", objective, loss))

    def _judge(self, element: Element) -> tuple[float, float]:
        """The objective, and the task loss."""
        self.task.pair.start_at(element)
        loss = self.loss.judged(transform_weights(self.task.problem.symmetry, element, self.task.problem.b))
        if not isfinite(loss):
            raise InputError(
                f"The task loss between the two networks is {loss} on the held batches, so there is nothing to lower. "
                "Look for inputs, targets or weights that are not finite; 'weights' needs no loss."
            )
        return self.task.pair.objective, loss

    def found(self) -> Solution:
        """The best element, at which the pair is left, and the steps."""
        self.task.pair.start_at(self.best)
        return self.best, self.history


def search_by_loss(task: AlignmentTask, options: LineOptions, learn: Callable[[LossSearch], None]) -> Solution:
    """The element with the lowest task loss that `learn` comes by, and every element on the way."""
    loss = LineLoss(task, options)
    with loss.running():
        found = LossSearch(task, loss)
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


# ----------------------------------------------------------------------------------------------------
# Solver `straight-through`: free weights learn from the task loss, and b follows them (after Ainsworth et al. 2023).
#
# The free weights begin at a and may go anywhere. At every step b is matched to them, one sweep over the wires from the
# order it has, and the loss is taken between a and b so ordered. An order has no slope; so the slope of the loss in the
# ordered weights is given to the free weights, as if they themselves had been used.


@dataclass(frozen=True)
class StraightThroughOptions(LineOptions):
    """Settings of `straight-through`, beside those of the loss (`LineOptions`).

    `rate`: of Adam on the free weights, as a share of the root mean square of each tensor.
    """

    rate: float | int = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("rate", self.rate > 0 and isfinite(self.rate), "a finite number above 0")


def solve_straight_through(task: AlignmentTask, options: StraightThroughOptions) -> Solution:
    """The element with the lowest task loss found, and every element on the way; the pair is left at that element."""
    return search_by_loss(task, options, lambda found: _learn_straight_through(found, options))


def _learn_straight_through(found: LossSearch, options: StraightThroughOptions) -> None:
    symmetry = found.task.problem.symmetry
    free = _free_weights(found)
    optimizer = torch.optim.Adam([{"params": [x], "lr": options.rate * _size(x)} for x in free.values()])
    generator = torch.Generator().manual_seed(found.task.seed)
    element = symmetry.identity()
    for step, batch, t in found.loss.batches(generator):
        pair = MatchingState(symmetry, free, {name: found.b[name] for name in free}, found.strands)
        pair.start_at(element)
        coordinate_descent(pair, permutation_step, "", generator, sweeps=1)
        element = pair.element
        found.look_at(element @ found.start, "straight-through", step)
        b = transform_weights(symmetry, element, found.b)
        used = {name: b[name].clone().requires_grad_(True) for name in free}
        value = found.loss.of({**b, **used}, batch, t)
        check_loss(value, step)
        # a weight that the loss does not depend on stays where it is
        slopes = torch.autograd.grad(value, list(used.values()), allow_unused=True)
        for x, slope in zip(free.values(), slopes, strict=True):
            x.grad = None if slope is None else slope.to(x.device, x.dtype)
        optimizer.step()


def _free_weights(found: LossSearch) -> dict[str, Tensor]:
    """A copy of the weights of a that the objective counts, in single precision or finer."""
    counted = found.task.pair.weights_a
    return {name: x.to(torch.promote_types(x.dtype, torch.float32), copy=True) for name, x in counted.items()}


def _size(x: Tensor) -> float:
    """The root mean square."""
    return float(x.square().mean().sqrt())


# ----------------------------------------------------------------------------------------------------
# Solver `sinkhorn`: orders learnt from the task loss through doubly stochastic matrices (after Peña et al. 2023).
#
# Every strand has a table of scores Z. Scaling the rows and columns of exp(Z / temperature) in turn until they add up to
# one (Sinkhorn) gives shares with which the units of b are mixed. The loss of a network between a and b so mixed has a
# slope in Z. As the temperature falls, the shares come near a permutation.


@dataclass(frozen=True)
class SinkhornOptions(LineOptions):
    """Settings of `sinkhorn`, beside those of the loss (`LineOptions`).

    `rate`: of Adam on the scores. `temperature`, `coolest`: at the first and the last step.
    """

    rate: float | int = 0.1
    temperature: float | int = 1.0
    coolest: float | int = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rate", "temperature"):
            value = getattr(self, name)
            self.check(name, value > 0 and isfinite(value), "a finite number above 0")
        self.check("coolest", 0 < self.coolest <= self.temperature, "above 0 and at most the temperature")

    def temperature_at(self, step: int) -> float:
        """Falls by the same factor at every step."""
        return self.temperature * (self.coolest / self.temperature) ** ((step - 1) / max(self.steps - 1, 1))


def solve_sinkhorn(task: AlignmentTask, options: SinkhornOptions) -> Solution:
    """The element with the lowest task loss found, and every element on the way; the pair is left at that element."""
    return search_by_loss(task, options, lambda found: _learn(found, options))


def _learn(found: LossSearch, options: SinkhornOptions) -> None:
    scores = {s: _first_scores(found, s, float(options.temperature)) for s in found.strands}
    optimizer = torch.optim.Adam(scores.values(), lr=options.rate)
    symmetry = found.task.problem.symmetry
    for step, batch, t in found.loss.batches(torch.Generator().manual_seed(found.task.seed)):
        shares = {s: sinkhorn(z / options.temperature_at(step)) for s, z in scores.items()}
        actor = RelaxedElement(symmetry.wire_specs, {s: RelaxedMove(p) for s, p in shares.items()})
        value = found.loss.of(mixed(symmetry, actor, found.b), batch, t)
        check_loss(value, step)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.look_at(_rounded(found, scores) @ found.start, "sinkhorn", step)


def _first_scores(found: LossSearch, s: int, temperature: float) -> Float[Tensor, "*copies n n"]:
    """At the first temperature every unit has as large a share in itself as in all others together."""
    strands = found.task.pair.wire_specs
    n, many = strands[s].size, copies(strands, s)
    device = found.task.pair.a[0].device
    own = torch.eye(n, device=device) * (temperature * log(max(n - 1, 1)))
    return own.expand(*many, n, n).clone().requires_grad_(True)


def _rounded(found: LossSearch, scores: Mapping[int, Tensor]) -> Element:
    """The orders with the highest scores, which are those that the shares come near to as the temperature falls."""
    identity = found.task.problem.symmetry.identity()
    orders = {s: nearest_permutation(z) for s, z in scores.items()}
    moves = {s: replace(identity_move(identity.wire_specs, s), permutation=order) for s, order in orders.items()}
    return replace(identity, moves={**identity.moves, **moves})
