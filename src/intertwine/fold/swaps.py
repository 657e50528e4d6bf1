"""`swap_barrier`: the barrier between a network and itself with equivalent features swapped, or with random ones.

Both swaps are elements of the symmetry, so both ends are the same function. Half-way every swapped feature is the mean
of two, which changes nothing where the two are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from intertwine.connect.barrier import Barrier, barrier
from intertwine.data.evaluate import Loss
from intertwine.errors import InputError
from intertwine.figures import legend_below, new_figure
from intertwine.fold.complexity import DEAD, dead_features
from intertwine.fold.prepare import FoldableWire, prepare
from intertwine.fold.result import Fold
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Pairs = Sequence[tuple[int, int]]
KINDS = ("equivalent", "random")


@dataclass(frozen=True, eq=False)
class SwapBarrier:
    """The result of `swap_barrier`.

    Attributes:
        equivalent, random: the line with features of one group swapped, and with random ones; one per seed.
        pairs: wire → number of swapped pairs. dead: wire → number of dead features, which are not swapped.
        seeds: those of the pairs.
    """

    equivalent: tuple[Barrier, ...]
    random: tuple[Barrier, ...]
    pairs: Mapping[str, int]
    dead: Mapping[str, int]
    seeds: tuple[int, ...]

    @property
    def loss_barriers(self) -> dict[str, float]:
        """The loss barrier of both kinds of swaps, the mean over seeds."""
        return {kind: _mean([found.loss_barrier for found in getattr(self, kind)]) for kind in KINDS}

    @property
    def error_barriers(self) -> dict[str, float] | None:
        """The same for the error, as a fraction; None where the targets are not classes."""
        if self.equivalent[0].error is None:
            return None
        return {kind: _mean([found.error_barrier for found in getattr(self, kind)]) for kind in KINDS}

    def to_dict(self) -> dict[str, Any]:
        return {
            "pairs": dict(self.pairs),
            "dead": dict(self.dead),
            "seeds": list(self.seeds),
            "loss_barriers": self.loss_barriers,
            "error_barriers": self.error_barriers,
            **{kind: [found.to_dict() for found in getattr(self, kind)] for kind in KINDS},
        }

    def __repr__(self) -> str:
        what, found = ("loss", self.loss_barriers) if self.error_barriers is None else ("error", self.error_barriers)
        return (
            f"SwapBarrier({sum(self.pairs.values())} pairs in {len(self.pairs)} wires, {len(self.seeds)} seeds; {what} "
            f"barrier {found['equivalent']:.4f} with equivalent features swapped, {found['random']:.4f} with random)"
        )

    def plot(self) -> Figure:
        """The accuracy, or the loss where there are no classes, along both lines: every seed, and their mean."""
        figure = new_figure(5.2, 3.4)
        axes = figure.add_subplot()
        named = {"equivalent": "equivalent features swapped", "random": "as many random features swapped"}
        for kind, style, colour in (("equivalent", "-", "#2b6cb0"), ("random", "--", "#c2410c")):
            lines = [_shown(found) for found in getattr(self, kind)]
            for line in lines if len(lines) > 1 else ():
                thin = {"alpha": 0.25, "linewidth": 1, "label": f"thin: each of {len(lines)} draws of pairs"}
                axes.plot(self.equivalent[0].ts, line, style, color=colour, **thin)
            mean = [_mean(values) for values in zip(*lines, strict=True)]
            axes.plot(self.equivalent[0].ts, mean, style, color=colour, label=named[kind])
        axes.set_xlabel("t: from the network (0) to itself, features swapped (1)")
        axes.set_ylabel("loss" if self.error_barriers is None else "accuracy")
        axes.spines[["top", "right"]].set_visible(False)
        legend_below(figure)
        return figure


def swap_barrier(
    folded: Fold,
    data: Any,
    points: int = 11,
    reset_statistics: Any = None,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    dead: float | None = DEAD,
    loss: Loss | None = None,
) -> SwapBarrier:
    """Interpolate a folded network's original with itself, with features of one group swapped, and with random ones.

    In every group, features are paired at random and the pairs swapped; for comparison, as many random pairs of the
    same wire are. All wires are swapped at once; fold with a beta for one wire alone to see that wire.

    Args:
        folded: the result of `fold` or of another folding; its groups define which features are equivalent.
        data, points, reset_statistics, loss: as for `intertwine.barrier`.
        seeds: one draw of pairs for each.
        dead: features whose rows or columns are shorter than this share of the longest are not swapped, since swapping
            dead features proves nothing. None swaps them too, as the paper does.

    Returns:
        A `SwapBarrier`: `.equivalent` and `.random`, a `Barrier` per seed; `.loss_barriers`, `.error_barriers`,
        `.plot()`.

    Raises:
        InputError: no seed is given, or no group has two live features.

    Example:
        >>> import torch
        >>> from intertwine.fold.fold import fold
        >>> from intertwine.fold.swaps import swap_barrier
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> with torch.no_grad():
        ...     model[0].weight[5], model[0].bias[5] = model[0].weight[2], model[0].bias[2]
        >>> data = [(torch.randn(64, 3), torch.randint(2, (64,)))]
        >>> found = swap_barrier(fold(model, torch.zeros(1, 3), beta=1e-6), data)
        >>> found.pairs, abs(found.loss_barriers["equivalent"]) < 1e-6
        ({'0': 1}, True)

    Reference: Chen, Zhou and Yan, Going Beyond Neural Network Feature Similarity, 2024, Figure 1b.
    """
    if not seeds:
        raise InputError("seeds is empty. Give one or more to draw pairs of features with, such as seeds=(0, 1, 2).")
    if any(iter(given) is given for given in (data, reset_statistics) if given is not None):
        raise InputError("The data is read once per line, but a generator can be read once. Pass a list or DataLoader.")
    prepared = prepare(folded._original, folded._example)
    wires = [_Swappable.of(w, folded.groups[w.name], dead) for w in prepared.wires if w.name in folded.groups]
    if not any(wire.count for wire in wires):
        raise InputError(
            f"No group of the {len(wires)} folded wires has two live features, so there is nothing to swap. Fold with "
            "a larger beta" + ("." if dead is None else ", or pass dead=None to swap dead features too.")
        )

    def line(pairs: Callable[[_Swappable, torch.Generator], Pairs], seed: int) -> Barrier:
        generator = torch.Generator().manual_seed(seed)
        element = swap_element(prepared.symmetry, {wire.index: pairs(wire, generator) for wire in wires})
        swapped = prepared.symmetry.act(element, folded._original)
        return barrier(folded._original, swapped, data, points, reset_statistics, loss=loss)

    return SwapBarrier(
        tuple(line(_Swappable.within_groups, seed) for seed in seeds),
        tuple(line(_Swappable.anywhere, seed) for seed in seeds),
        {wire.name: wire.count for wire in wires if wire.count},
        {wire.name: wire.dead for wire in wires if wire.dead},
        tuple(seeds),
    )


@dataclass(frozen=True)
class _Swappable:
    """The live features of a wire, by group and all together; `dead`: the number of others."""

    name: str
    index: int
    groups: list[list[int]]
    live: list[int]
    dead: int

    @classmethod
    def of(cls, wire: FoldableWire, groups: Sequence[Sequence[int]], dead: float | None) -> _Swappable:
        gone = set() if dead is None else set(dead_features(wire, dead).nonzero().flatten().tolist())
        live = [i for i in range(wire.size) if i not in gone]
        return cls(wire.name, wire.index, [[i for i in g if i not in gone] for g in groups], live, len(gone))

    @property
    def count(self) -> int:
        """The number of pairs in its groups."""
        return sum(len(group) // 2 for group in self.groups)

    def within_groups(self, generator: torch.Generator) -> Pairs:
        return [pair for group in self.groups for pair in _drawn(group, len(group) // 2, generator)]

    def anywhere(self, generator: torch.Generator) -> Pairs:
        return _drawn(self.live, self.count, generator)


def swap_element(symmetry: Symmetry, pairs: Mapping[int, Pairs]) -> Element:
    """The element that swaps pairs of features; `pairs`: index of a wire → disjoint pairs.

    >>> import torch, intertwine
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> swap_element(intertwine.symmetry(model, torch.zeros(1, 3)), {0: [(1, 3)]}).moves[0].permutation
    tensor([0, 3, 2, 1])
    """
    identity = symmetry.identity()
    moves = dict(identity.moves)
    for wire, swapped in pairs.items():
        order = torch.arange(identity.wire_specs[wire].size)
        for m, n in swapped:
            order[m], order[n] = n, m
        moves[wire] = replace(moves[wire], permutation=order)
    return replace(identity, moves=moves)


def _drawn(features: Sequence[int], count: int, generator: torch.Generator) -> Pairs:
    """Some disjoint pairs of features."""
    order = [features[i] for i in torch.randperm(len(features), generator=generator).tolist()]
    return [(order[2 * k], order[2 * k + 1]) for k in range(count)]


def _shown(found: Barrier) -> list[float]:
    return list(found.loss) if found.error is None else [1 - e for e in found.error]


def _mean(values: Sequence[Any]) -> float:
    return sum(values) / len(values)
