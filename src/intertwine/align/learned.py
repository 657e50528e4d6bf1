"""Methods that minimise a task loss between the two networks: `straight-through` (Ainsworth et al. 2023) and `sinkhorn`
(Peña et al. 2023), and the loss on the line that both use.

Both evaluate every permutation they visit on the same held-out batches and return the one with the lowest loss, because
the loss of a relaxed element may be far from that of a permutation. The start is evaluated too, so no result is worse
than it. If an exact alignment exists, it is the result: every network on the line is then a itself.
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
from intertwine.align.state import AlignmentStep, MatchingState, move_of
from intertwine.align.weights import WeightsOptions, solve_weights
from intertwine.argument_types import Float
from intertwine.data.batches import LabelledBatch, copied_arguments, labelled_batches
from intertwine.data.evaluate import Loss, score
from intertwine.data.layers import evaluating, wrapped_by
from intertwine.errors import InputError
from intertwine.graph.model import copy_module
from intertwine.symmetry.blocks import transform_weights
from intertwine.symmetry.element import Element, copies

MIDDLE = 0.5
ADVICE = "Pass options={'loss': …}, a function of (outputs, targets)."

# -- The task loss on the line between two networks --


@dataclass(frozen=True)
class LineOptions:
    """The loss, the point of the line where it is minimised, and how results are evaluated.

    `steps`: the number of training batches; data is read again when it ends. `loss`: of (outputs, targets),
    cross-entropy if None. `at`: the point of the line, from 0 (a) to 1 (b), whose loss is minimised; None draws a point
    for every batch, and results are evaluated in the middle. `held`: the number of batches, the first ones, on which
    every result is evaluated. `batch_statistics`: BatchNorm normalises by each batch; False mixes the running
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

    def check(self, name: str, valid: bool, wanted: str) -> None:
        """Raise an error if an option has an invalid value."""
        if not valid:
            value = getattr(self, name)
            raise InputError(f"The option {name} must be {wanted}, but is {value}. Leave it out for the default.")


class LineLoss:
    """The task loss of networks between a and the present weights of b, as a function of those weights.

    BatchNorm normalises by the statistics of each batch: running statistics mixed from two networks are not those of
    the mixed network, and a loss under them would mislead the search. `network` is a copy of a, into which weights are
    put for one call at a time. `a`: the weights of a that are mixed.
    """

    def __init__(self, task: AlignmentTask, options: LineOptions) -> None:
        self.options, self.data = options, task.data
        self.network = copy_module(task.a).requires_grad_(False)
        self.a, self.statistics = dict(task.problem.a), set[str]()
        for path, norm in self.network.named_modules():
            if isinstance(norm, _BatchNorm) and norm.running_mean is not None:
                names = ("running_mean", "running_var", "num_batches_tracked")
                self.statistics |= {f"{path}.{name}".lstrip(".") for name in names}
                if options.batch_statistics:  # without running statistics a layer uses those of the batch
                    norm.running_mean = norm.running_var = norm.num_batches_tracked = None
                    norm.register_forward_pre_hook(_check_batch)
        if options.batch_statistics:
            self.a = {name: x for name, x in self.a.items() if name not in self.statistics}
        self.held = list(islice(labelled_batches(task.data, self.network), options.held))

    @contextmanager
    def running(self) -> Iterator[None]:
        """The network in evaluation mode, with gradients enabled."""
        with evaluating(self.network), torch.enable_grad():
            for module in self.network.modules():
                if isinstance(module, nn.RNNBase):  # cuDNN gives gradients in training mode only, which is dropout
                    module.training, module.dropout = True, 0.0
            yield

    def of(self, b: Mapping[str, Tensor], batch: LabelledBatch, t: float) -> Tensor:
        """The mean loss of one batch at a point of the line to b."""
        total, weight = self._sums(b, batch, t)
        return total / weight

    def held_out(self, b: Mapping[str, Tensor]) -> float:
        """The mean loss over the held-out batches."""
        at = MIDDLE if self.options.at is None else float(self.options.at)
        with torch.no_grad():
            total, weight = torch.stack([self._sums(b, batch, at) for batch in self.held]).sum(0).tolist()
        if not weight:
            raise InputError(
                "Every target of the held-out batches is marked as ignored (-100), so the loss is undefined. Pass "
                "other data, or hold out more batches: options={'held': …}."
            )
        return total / weight

    def _sums(self, b: Mapping[str, Tensor], batch: LabelledBatch, t: float) -> Tensor:
        args, kwargs = batch.call
        # torch computes no gradients for running statistics
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
    """Floating-point weights are mixed; integers and masks come from a, and so do equal tensors (−∞ in a mask)."""
    if not (a.is_floating_point() or a.is_complex()) or (not b.requires_grad and torch.equal(a, b)):
        return a
    return (1 - t) * a + t * b.to(a.dtype)


def _check_batch(_norm: nn.Module, args: tuple[Any, ...]) -> None:
    if args[0].numel() == args[0].shape[1]:
        raise InputError(
            "A batch gives a BatchNorm layer one value per channel, which has no variance. Use larger batches, or "
            "options={'batch_statistics': False}, which mixes the running statistics of the two networks."
        )


# -- The search --


@dataclass
class LossSearch:
    """Elements evaluated one by one. `start`: where the search begins; `b`: the weights moved by it."""

    task: AlignmentTask
    loss: LineLoss
    history: list[AlignmentStep] = field(default_factory=list)
    _evaluated: dict[bytes, tuple[float, float]] = field(default_factory=dict)
    _best: tuple[float, Element] | None = None

    def __post_init__(self) -> None:
        task = self.task
        self.evaluate(task.problem.symmetry.identity(), "identity")
        self.evaluate(solve_weights(task, WeightsOptions())[0], "weights")
        self.start = self.best
        self.b = transform_weights(task.problem.symmetry, self.start, task.problem.b)

    @property
    def best(self) -> Element:
        assert self._best is not None
        return self._best[1]

    @property
    def permuting(self) -> list[int]:
        """The wires to be ordered."""
        state = self.task.state
        return [w for w in sorted(state.movable) if state.wire_specs[w].permutes and state.slots[w]]

    @property
    def exact(self) -> bool:
        """Whether b is already identical to a, so that there is nothing to gain."""
        return self.history[-1].objective == self.task.state.unmoved

    def evaluate(self, element: Element, name: str, step: int = 0) -> None:
        """Evaluate an element once, and add it to the history if it differs from the last one."""
        parts = [part for move in element.moves.values() for _, part in move.items()]
        key = b"".join(part.contiguous().numpy().tobytes() for part in parts)
        if key not in self._evaluated:
            self._evaluated[key] = self._evaluate(element)
            objective, loss = self._evaluated[key]
            if self._best is None or loss < self._best[0] or objective == self.task.state.unmoved:
                self._best = loss, element
        objective, loss = self._evaluated[key]
        last = self.history[-1] if self.history else None
        if last is None or (last.objective, last.own) != (objective, loss):
            self.history.append(AlignmentStep(name, step, "", objective, loss))

    def _evaluate(self, element: Element) -> tuple[float, float]:
        """The objective, and the task loss."""
        self.task.state.start_at(element)
        loss = self.loss.held_out(transform_weights(self.task.problem.symmetry, element, self.task.problem.b))
        if not isfinite(loss):
            raise InputError(
                f"The task loss between the two networks is {loss} on the held-out batches. Look for inputs, targets "
                "or weights that are not finite; 'weights' needs no loss."
            )
        return self.task.state.objective, loss


def search_by_loss(task: AlignmentTask, options: LineOptions, learn: Callable[[LossSearch], None]) -> Solution:
    """The element with the lowest task loss that `learn` evaluates, and every element it evaluates.

    The matching state ends at that element.
    """
    loss = LineLoss(task, options)
    with loss.running():
        search = LossSearch(task, loss)
        if not search.exact:
            learn(search)
    task.state.start_at(search.best)
    return search.best, search.history


def check_loss(value: Tensor, step: int) -> None:
    """Raise an error if a loss is not finite."""
    loss = float(value.detach())
    if not isfinite(loss):
        raise InputError(
            f"The task loss became {loss} at step {step}. Lower the rate: options={{'rate': …}}; or look for "
            "batches with values that are not finite."
        )


# -- straight-through --


@dataclass(frozen=True)
class StraightThroughOptions(LineOptions):
    """Settings of `straight-through`, beside those of the loss (`LineOptions`).

    `rate`: the learning rate of Adam on the free weights, as a share of the root mean square of each tensor.
    """

    rate: float | int = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("rate", self.rate > 0 and isfinite(self.rate), "a finite number above 0")


def solve_straight_through(task: AlignmentTask, options: StraightThroughOptions) -> Solution:
    """Train free weights by the task loss, and match b to them (Ainsworth et al. 2023).

    The free weights begin at a. At every step b is matched to them by one sweep over the wires from its present order,
    and the loss is evaluated between a and b in that order. An order has no gradient, so the gradient with respect to
    the reordered weights is applied to the free weights (a straight-through estimator).
    """

    def learn(search: LossSearch) -> None:
        symmetry = task.problem.symmetry
        free = {  # in single precision or finer
            name: x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
            for name, x in task.state.weights_a.items()
        }
        groups = [{"params": [x], "lr": options.rate * float(x.square().mean().sqrt())} for x in free.values()]
        optimizer = torch.optim.Adam(groups)
        generator = torch.Generator().manual_seed(task.seed)
        element = symmetry.identity()
        for step, batch, t in search.loss.batches(generator):
            state = MatchingState(symmetry, free, {name: search.b[name] for name in free}, search.permuting)
            state.start_at(element)
            coordinate_descent(state, permutation_step, "", generator, sweeps=1)
            element = state.element
            search.evaluate(element @ search.start, "straight-through", step)
            b = transform_weights(symmetry, element, search.b)
            used = {name: b[name].clone().requires_grad_(True) for name in free}
            value = search.loss.of({**b, **used}, batch, t)
            check_loss(value, step)
            # a weight that the loss does not depend on keeps its value
            gradients = torch.autograd.grad(value, list(used.values()), allow_unused=True)
            for x, gradient in zip(free.values(), gradients, strict=True):
                x.grad = None if gradient is None else gradient.to(x.device, x.dtype)
            optimizer.step()

    return search_by_loss(task, options, learn)


# -- sinkhorn --


@dataclass(frozen=True)
class SinkhornOptions(LineOptions):
    """Settings of `sinkhorn`, beside those of the loss (`LineOptions`).

    `rate`: the learning rate of Adam on the scores. `temperature`, `coolest`: at the first and at the last step.
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
        """The temperature falls by the same factor at every step."""
        return self.temperature * (self.coolest / self.temperature) ** ((step - 1) / max(self.steps - 1, 1))


def solve_sinkhorn(task: AlignmentTask, options: SinkhornOptions) -> Solution:
    """Train orders by the task loss through doubly stochastic matrices (Peña et al. 2023).

    Every wire has a table of scores Z. Sinkhorn normalisation of exp(Z / temperature) gives shares with which the units
    of b are mixed; the loss of a network between a and b so mixed is differentiable in Z. As the temperature falls, the
    shares converge to a permutation: the order with the highest scores.
    """

    def learn(search: LossSearch) -> None:
        symmetry, device = task.problem.symmetry, task.state.a[0].device
        scores: dict[int, Float[Tensor, "*copies n n"]] = {}
        for w in search.permuting:  # at first, a unit has as large a share in itself as in all others together
            n = symmetry.wire_specs[w].size
            own = torch.eye(n, device=device) * (float(options.temperature) * log(max(n - 1, 1)))
            scores[w] = own.expand(*copies(symmetry.wire_specs, w), n, n).clone().requires_grad_(True)
        optimizer = torch.optim.Adam(scores.values(), lr=options.rate)
        identity = symmetry.identity()
        for step, batch, t in search.loss.batches(torch.Generator().manual_seed(task.seed)):
            shares = {w: RelaxedMove(sinkhorn(z / options.temperature_at(step))) for w, z in scores.items()}
            value = search.loss.of(mixed(symmetry, RelaxedElement(symmetry.wire_specs, shares), search.b), batch, t)
            check_loss(value, step)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            orders = {w: move_of(symmetry.wire_specs, w, permutation=nearest_permutation(z)) for w, z in scores.items()}
            search.evaluate(replace(identity, moves={**identity.moves, **orders}) @ search.start, "sinkhorn", step)

    return search_by_loss(task, options, learn)
