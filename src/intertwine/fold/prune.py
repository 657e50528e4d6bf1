"""`prune`: removes features by a score instead of merging them: the baselines of folding.

A removed feature loses its rows in every layer that writes it and its columns in every layer that reads it; the other
features stay as they are. The wires are those of folding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.argument_types import Float
from intertwine.errors import InputError
from intertwine.fold.budget import ParameterCount
from intertwine.fold.fold import assemble_fold
from intertwine.fold.merging import feature_slices
from intertwine.fold.options import check_word
from intertwine.fold.prepare import FoldableWire, FoldSlot, PreparedModel, Widths, check_share, prepare, wanted_widths
from intertwine.fold.result import Fold, Reduction

FeatureScores = Float[Tensor, "features"]  # one per feature of a wire; low ones go first


@dataclass(frozen=True, eq=False)
class Pruned(Fold):
    """A pruned network as a `Fold`: every group is one kept feature; `dropped`: wire → the removed features."""

    dropped: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def widths(self) -> dict[str, Reduction]:
        """Wire → its number of features before and after."""
        return {n: Reduction(len(kept) + len(self.dropped[n]), len(kept)) for n, kept in self.groups.items()}

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"dropped": {name: list(gone) for name, gone in self.dropped.items()}}

    def __repr__(self) -> str:
        lines = [f"Pruned(parameters {self.parameters}, FLOPs {self.flops})"]
        long = max(map(len, self.groups), default=0)
        lines += [f"  {name:<{long}}  {width.before:>5} → {width.after}" for name, width in self.widths.items()]
        lines += [f"  {s.what}: not pruned: {s.reason}" for s in self.skipped]
        return "\n".join(lines)


def prune(
    model: nn.Module,
    *example_args: Any,
    widths: Widths,
    score: str = "l1",
    across: bool = False,
    seed: int = 0,
    **example_kwargs: Any,
) -> Pruned:
    """Remove the features of least score from every wire that `fold` can fold. One feature always stays.

    Args:
        model: any network; it is not changed. *example_args, **example_kwargs: inputs it can be called with.
        widths: the share of its features that every wire keeps, above 0 and below 1; or wire → number of features to
            keep; other wires keep all.
        score: "l1", the sum of the absolute weights that write a feature (biases left out); "gamma", the absolute
            scale of its BatchNorm; "random". Where several layers write a wire, or several norms lie on it, as on
            residual wires, their scores are added.
        across: compare features of all wires, their scores divided by the mean of their wire, and remove the lowest
            until the share `widths` of the network's parameters is left.
        seed: of the random scores.

    Returns:
        A `Pruned`: a `Fold` whose groups are the kept features; `.dropped` has the others.

    Raises:
        InputError: an unknown score or wire, a width out of range, or a share that cannot be reached.

    Example:
        >>> import torch
        >>> from intertwine.fold.prune import prune
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> with torch.no_grad():
        ...     model[0].weight[:] = torch.tensor([[4.0, 0, 0], [0, -9, 0], [0, 0, 1], [1, 1, 1]])
        >>> pruned = prune(model, torch.zeros(1, 3), widths=0.5)
        >>> pruned.groups["0"], pruned.dropped["0"], pruned.model[0].out_features
        (((0,), (1,)), (2, 3), 2)

    References: Li et al., Pruning Filters for Efficient ConvNets, 2017 (l1); Liu et al., Learning Efficient
    Convolutional Networks through Network Slimming, 2017 (gamma, across).
    """
    check_word("score", score, SCORES)
    if across and isinstance(widths, Mapping):
        raise InputError(
            "across=True chooses the number of features of each wire itself. Pass the share of the parameters to keep, "
            "such as widths=0.5, or leave across out."
        )
    if across and not isinstance(widths, Mapping) and not 0 < widths < 1:
        raise InputError(
            f"widths must be above 0 and below 1, the share of parameters to keep with across=True, but is {widths}."
        )
    check_share(widths)
    prepared = prepare(model, (example_args, example_kwargs), norm="sum")  # plain tensors, since nothing is merged
    if across and not isinstance(widths, Mapping):
        scores = SCORES[score](prepared.wires, prepared, seed)
        numbers = _across(prepared, scores, widths)
    else:
        numbers = wanted_widths(widths, prepared.wires)
        scores = SCORES[score]([wire for wire in prepared.wires if wire.name in numbers], prepared, seed)
    return _cut(prepared, {wire.name: _best(wire, scores, numbers) for wire in prepared.wires})


def _l1(wires: Sequence[FoldableWire], prepared: PreparedModel, seed: int) -> dict[str, FeatureScores]:
    """The sum of the absolute weights that write each feature."""
    return {w.name: _lengths(w, lambda s: s.role == "write" and s.block.counted == "in") for w in wires}


def _gamma(wires: Sequence[FoldableWire], prepared: PreparedModel, seed: int) -> dict[str, FeatureScores]:
    """The absolute scales of the BatchNorms on a wire."""
    gammas = {norm.weight for norm in prepared.norms}
    for wire in wires:
        if not any(slot.block.parameter in gammas for slot in wire.slots):
            raise InputError(
                f"score='gamma' needs a BatchNorm with a scale on every wire, but {wire.name!r} has none. Use "
                "score='l1', or name in widths only wires that have one."
            )
    return {w.name: _lengths(w, lambda s: s.block.parameter in gammas) for w in wires}


def _random(wires: Sequence[FoldableWire], prepared: PreparedModel, seed: int) -> dict[str, FeatureScores]:
    generator = torch.Generator().manual_seed(seed)
    return {w.name: torch.rand(w.size, generator=generator, dtype=torch.float64) for w in wires}


Score = Callable[[Sequence[FoldableWire], PreparedModel, int], dict[str, FeatureScores]]
SCORES: dict[str, Score] = {"l1": _l1, "random": _random, "gamma": _gamma}


def _lengths(wire: FoldableWire, counts: Callable[[FoldSlot], bool]) -> FeatureScores:
    return torch.stack([feature_slices(s.block.data, s.dim).abs().sum(1) for s in wire.slots if counts(s)]).sum(0)


def _best(wire: FoldableWire, scores: Mapping[str, FeatureScores], numbers: Mapping[str, int]) -> list[int]:
    """The kept features of a wire, in their order; of equal ones the earlier."""
    if wire.name not in numbers:
        return list(range(wire.size))
    return sorted(scores[wire.name].argsort(descending=True, stable=True)[: numbers[wire.name]].tolist())


def _across(prepared: PreparedModel, scores: Mapping[str, FeatureScores], share: float) -> dict[str, int]:
    """Wire → number of features to keep if the lowest of all wires go first, until a share of parameters is left."""
    order = []  # (score, relative position in its wire, wire) of all features but the best of each wire
    for wire in prepared.wires:
        own = scores[wire.name]
        own = own / own.mean().clamp(min=torch.finfo(own.dtype).tiny)
        order += [(value, i / wire.size, wire.name) for i, value in enumerate(own.sort().values[:-1].tolist())]
    order.sort()
    size, indices = ParameterCount(prepared.model, prepared.symmetry), {w.name: w.index for w in prepared.wires}
    total = size({})

    def numbers(removed: int) -> dict[str, int]:
        found = {wire.name: wire.size for wire in prepared.wires}
        for _, _, name in order[:removed]:
            found[name] -= 1
        return found

    def parameters(removed: int) -> int:
        return size({indices[name]: number for name, number in numbers(removed).items()})

    least = parameters(len(order))
    if least > share * total:
        raise InputError(
            f"{share:.1%} of the parameters cannot be reached: with one feature on every wire {least / total:.1%} are "
            "left. Keep a larger share."
        )
    low, high = 0, len(order)  # the least number of removals that is enough, by bisection
    while low < high:
        middle = (low + high) // 2
        if parameters(middle) <= share * total:
            high = middle
        else:
            low = middle + 1
    return numbers(low)


def _cut(prepared: PreparedModel, kept: Mapping[str, list[int]]) -> Pruned:
    """The smaller module, checked against the network at full width in which no layer reads the removed features."""
    dropped = {w.name: sorted(set(range(w.size)) - set(kept[w.name])) for w in prepared.wires}
    for wire in prepared.wires:
        for slot in wire.slots:
            if slot.role == "read":
                slot.block.data.index_fill_(slot.dim, torch.tensor(dropped[wire.name], dtype=torch.long), 0.0)
    stay = {wire.index: kept[wire.name] for wire in prepared.wires}
    groups = {name: tuple((i,) for i in features) for name, features in kept.items()}
    cut = assemble_fold(prepared, prepared.widened(stay), stay, groups, rules={})
    return Pruned(**vars(cut), dropped={name: tuple(gone) for name, gone in dropped.items()})
