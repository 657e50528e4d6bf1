"""Allocation: how many features each wire keeps, so that a network has so many parameters and loses least.

Every wire comes with its costs: one number for each count of features gone. Features go from the wire where the cost
per parameter is least, a few at a time. How many parameters a feature has depends on how wide its neighbours still are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from intertwine.errors import InputError
from intertwine.graph.capture import tied_names
from intertwine.symmetry.layout import Leaf, Plus, Times, Tree
from intertwine.symmetry.symmetry import Symmetry

#: A wire loses one in so many of its features in a step.
STEPS = 50


def axis_size(tree: Tree, widths: Mapping[int, int]) -> int:
    """The size of an axis once some strands have other widths.

    >>> from intertwine.symmetry.layout import Leaf, Plus, Still, Times
    >>> axis_size(Plus((Still(2), Times((Leaf(0, 3), Still(2))))), {0: 1})
    4
    """
    match tree:
        case Leaf():
            return widths.get(tree.strand, tree.size)
        case Times():
            size = 1
            for part in tree.parts:
                size *= axis_size(part, widths)
            return size
        case Plus():
            return sum(axis_size(part, widths) for part in tree.parts)
    return tree.size


class Size:
    """The number of parameters of a network as a function of the widths of its strands."""

    def __init__(self, model: nn.Module, symmetry: Symmetry) -> None:
        tied = tied_names(model)
        self.fixed, self.axes = 0, []
        for name, parameter in model.named_parameters():
            layout = symmetry.layouts.get(tied[name])
            if layout is None or not any(True for _ in layout.leaves()):
                self.fixed += parameter.numel()
            else:
                self.axes.append((layout.axes, {leaf.strand for leaf in layout.leaves()}))

    def meet(self, one: int, other: int) -> bool:
        """Whether two strands have a part in the same parameter."""
        return any(one in strands and other in strands for _, strands in self.axes)

    def __call__(self, widths: Mapping[int, int], strand: int | None = None) -> int:
        """All parameters, or those that a strand has a part in."""
        total = self.fixed if strand is None else 0
        for axes, strands in self.axes:
            if strand is None or strand in strands:
                size = 1
                for tree in axes:
                    size *= axis_size(tree, widths)
                total += size
        return total


def allocate(
    costs: Mapping[int, Sequence[float]], size: Size, parameters: float | int, least: Mapping[int, int] | None = None
) -> dict[int, int]:
    """Widths with which the network has no more than so many parameters.

    Args:
        costs: strand → the cost once 0, 1, … of its features are gone. size: counts parameters.
        parameters: how many there may be. least: strand → the fewest features that it keeps, 1 if not given.

    Raises:
        InputError: there are more even if every strand is as narrow as it may be.
    """
    widths = {strand: len(of) for strand, of in costs.items()}
    least = {strand: max(1, (least or {}).get(strand, 1)) for strand in costs}
    smallest = size(least)
    if smallest > parameters:
        raise InputError(
            f"{_most(parameters)} of {size(widths):,} parameters were asked for, but {smallest:,} are left when "
            "every wire that can be folded is as narrow as it may be. Ask for more."
        )
    left, step = size(widths), {}
    while left > parameters:
        for strand in costs:
            if strand not in step and widths[strand] > least[strand]:
                step[strand] = _step(strand, widths, costs[strand], least[strand], size)
        best = min(step, key=lambda s: step[s][0])
        _, narrower, fewer = step.pop(best)
        widths[best], left = narrower, left - fewer
        step = {s: found for s, found in step.items() if not size.meet(s, best)}
    return widths


def _most(parameters: float | int) -> str:
    return f"At most {parameters:,.0f}" if parameters >= 1 else "Fewer than one"


def _step(
    strand: int, widths: Mapping[int, int], costs: Sequence[float], least: int, size: Size
) -> tuple[float, int, int]:
    """(cost per parameter, new width, parameters fewer) of the next step of a strand."""
    width = widths[strand]
    narrower = max(least, width - max(1, width // STEPS))
    fewer = size(widths, strand) - size({**widths, strand: narrower}, strand)
    gone = len(costs) - narrower
    return (costs[gone] - costs[len(costs) - width]) / max(fewer, 1), narrower, fewer
