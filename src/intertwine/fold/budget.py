"""`fold_to` folds a network to a number of parameters or to a minimum accuracy; widths are allocated where they cost
least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from intertwine.argument_types import Float
from intertwine.data.batches import Call, check_batches, check_readable_again, labelled_batches
from intertwine.data.batchnorm import reset_statistics
from intertwine.errors import InputError
from intertwine.fold.compensation import Compensation, variance_cost
from intertwine.fold.fold import build_fold
from intertwine.fold.merging import MergeState
from intertwine.fold.options import Options, check_statistics, check_word
from intertwine.fold.prepare import PreparedModel, prepare
from intertwine.fold.result import Fold
from intertwine.graph.model import tied_names
from intertwine.stitch.scores import accuracy_of
from intertwine.symmetry.geometry import LayoutAxis, ProductAxis, SumAxis, WireAxis
from intertwine.symmetry.symmetry import Symmetry

# ----------------------------------------------------------------------------------------------------
# Allocation: how many features each wire keeps, so that a network has so many parameters and loses least.
#
# Every wire comes with its costs: one number for each count of features gone. Features go from the wire where the cost
# per parameter is least, a few at a time. How many parameters a feature has depends on how wide its neighbours still are.


#: A wire loses one in so many of its features in a step.
ALLOCATION_STEPS = 50


def axis_size(tree: LayoutAxis, widths: Mapping[int, int]) -> int:
    """The size of an axis once some strands have other widths.

    >>> from intertwine.symmetry.geometry import WireAxis, SumAxis, FixedAxis, ProductAxis
    >>> axis_size(SumAxis((FixedAxis(2), ProductAxis((WireAxis(0, 3), FixedAxis(2))))), {0: 1})
    4
    """
    match tree:
        case WireAxis():
            return widths.get(tree.wire, tree.size)
        case ProductAxis():
            size = 1
            for part in tree.parts:
                size *= axis_size(part, widths)
            return size
        case SumAxis():
            return sum(axis_size(part, widths) for part in tree.parts)
    return tree.size


class ParameterCount:
    """The number of parameters of a network as a function of the widths of its strands."""

    def __init__(self, model: nn.Module, symmetry: Symmetry) -> None:
        tied = tied_names(model)
        self.fixed, self.axes = 0, []
        for name, parameter in model.named_parameters():
            layout = symmetry.layouts.get(tied[name])
            if layout is None or not layout.moves:
                self.fixed += parameter.numel()
            else:
                self.axes.append((layout.axes, layout.wires))

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
    costs: Mapping[int, Sequence[float]],
    size: ParameterCount,
    parameters: float | int,
    least: Mapping[int, int] | None = None,
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
    strand: int, widths: Mapping[int, int], costs: Sequence[float], least: int, size: ParameterCount
) -> tuple[float, int, int]:
    """(cost per parameter, new width, parameters fewer) of the next step of a strand."""
    width = widths[strand]
    narrower = max(least, width - max(1, width // ALLOCATION_STEPS))
    fewer = size(widths, strand) - size({**widths, strand: narrower}, strand)
    gone = len(costs) - narrower
    return (costs[gone] - costs[len(costs) - width]) / max(fewer, 1), narrower, fewer


# ----------------------------------------------------------------------------------------------------
# Merge traces: for every wire on its own, which pairs of features are merged one after the other, and what that costs.
#
# Each wire is merged down to one feature while the others stay as they are. The cost is the share of the variance of its
# rows, weighted as `intertwine.fold.merging` says, that lies inside the groups, as in Ward's clustering. Beside it stands
# the β at which `fold` would merge so far.


@dataclass(frozen=True)
class MergeTrace:
    """One wire. `costs` and `betas` start with 0: those of no merge."""

    pairs: tuple[tuple[int, int], ...]
    costs: tuple[float, ...]
    betas: tuple[float, ...]


def merge_trace(prepared: PreparedModel, w: int) -> MergeTrace:
    """Merge one wire to its end; the working tensors are as before afterwards."""
    wire = prepared.wires[w]
    merging = MergeState(prepared.wires, Options())
    before = [site.piece.data.clone() for site in wire.sites]
    distances = merging.distances(w)
    by, inside = distances.typical, 0.0
    weights = merging.counts[w]
    total = float((distances.table * (weights[:, None] + weights[None, :])).sum()) / 4 / weights.sum()
    pairs, costs, betas = [], [0.0], [0.0]
    for _ in range(wire.size - 1):
        distances = merging.distances(w)
        m, n = distances.pair()
        smallest = max(distances.smallest, 0.0)
        inside += smallest / 2  # what a merge adds to the squares inside groups is half of Ward's distance
        merging.merge(w, m, n)
        pairs.append((m, n))
        costs.append(max(costs[-1], variance_cost(inside / total if total > 0 else 0.0)))
        betas.append(max(betas[-1], smallest / by if by > 0 else 0.0))
    for site, data in zip(wire.sites, before, strict=True):
        site.piece.data.copy_(data)
    return MergeTrace(tuple(pairs), tuple(costs), tuple(betas))


class MergeToWidths:
    """A network whose wires can be merged to any widths."""

    def __init__(self, prepared: PreparedModel) -> None:
        self.prepared = prepared
        self.traces = {wire.strand: merge_trace(prepared, w) for w, wire in enumerate(prepared.wires)}

    @property
    def costs(self) -> dict[int, tuple[float, ...]]:
        """Strand → what it costs once 0, 1, … of its features are gone."""
        return {strand: trace.costs for strand, trace in self.traces.items()}

    def built(self, widths: Mapping[int, int]) -> Fold:
        """The network with so many features left in each wire."""
        prepared = prepare(self.prepared.model, self.prepared.example)  # merging writes into it
        merging = MergeState(prepared.wires, Options())
        betas = {}
        for w, wire in enumerate(prepared.wires):
            trace = self.traces[wire.strand]
            gone = wire.size - widths[wire.strand]
            for pair in trace.pairs[:gone]:
                merging.merge(w, *pair)
            betas[wire.name] = trace.betas[gone]
        return build_fold(prepared, merging, betas)


# ----------------------------------------------------------------------------------------------------
# Noise: inputs drawn at random that look like an example, for what would need data where there is none.
#
# Images are drawn with the power spectrum of photographs, whose amplitude falls with the frequency, and with channels
# that vary together. They say little about classes and much about which features of a network go together.


#: Shorter sides than this are no picture.
SMALLEST_IMAGE = 8
#: How much the channels of a picture have in common: of its variance.
SHARED_VARIANCE = 0.8


def random_inputs_like(example: Call, batches: int = 4, size: int = 128, seed: int = 0) -> list[Call]:
    """Batches of random inputs of the example's shapes, of mean 0 and variance 1.

    Args:
        example: positional and keyword arguments; the first axis of every tensor holds the samples.

    Raises:
        InputError: the example holds tensors of whole numbers, such as tokens, or none at all.

    Example:
        >>> import torch
        >>> from intertwine.fold.budget import random_inputs_like
        >>> [args[0].shape for args, _ in random_inputs_like(((torch.zeros(1, 3, 16, 16),), {}), batches=2, size=5)]
        [torch.Size([5, 3, 16, 16]), torch.Size([5, 3, 16, 16])]
    """
    leaves, structure = tree_flatten(example)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or not all(tensor.is_floating_point() and tensor.ndim > 1 for tensor in tensors):
        found = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors) or "no tensor"
        raise InputError(
            f"Random inputs were to be drawn for a network whose example inputs are {found}. They can be drawn for "
            "real-valued tensors whose first axis holds the samples; pass batches of real inputs as data instead."
        )
    generator = torch.Generator().manual_seed(seed)

    def drawn(leaf: Any) -> Any:
        return _draw((size, *leaf.shape[1:]), generator).to(leaf) if isinstance(leaf, Tensor) else leaf

    return [tree_unflatten([drawn(leaf) for leaf in leaves], structure) for _ in range(batches)]


def _draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(shape) < 4 or min(shape[-2:]) < SMALLEST_IMAGE:
        return torch.randn(shape, generator=generator)
    own, common = (torch.randn(s, generator=generator) for s in (shape, (shape[0], 1, *shape[2:])))
    return pink_noise(SHARED_VARIANCE**0.5 * common + (1 - SHARED_VARIANCE) ** 0.5 * own)


def pink_noise(x: Float[Tensor, "*batch height width"]) -> Float[Tensor, "*batch height width"]:
    """White noise filtered so that its amplitude falls with the frequency, and of variance 1 again."""
    sides = (torch.fft.fftfreq(n).to(x) for n in x.shape[-2:])
    across, down = torch.meshgrid(*sides, indexing="ij")
    frequency = (across.square() + down.square()).sqrt()
    lowest = 0.5 / max(x.shape[-2:])  # the mean of a picture varies too, twice as much as its slowest wave
    y = torch.fft.ifft2(torch.fft.fft2(x) / frequency.clamp(min=lowest)).real
    return y / y.std()


# ----------------------------------------------------------------------------------------------------
# `fold_to`: a network folded to a number of parameters, or as far as an accuracy on held-out data allows.


#: How often the range of sizes is halved in the search for an accuracy.
HALVINGS = 8
METHODS = ("absorb", "merge")
ProgressCallback = Callable[[str, float], None]


def fold_to(
    model: nn.Module,
    *example_args: Any,
    parameters: float | int | None = None,
    floor: float | int | None = None,
    held_out: Any = None,
    how: str = "absorb",
    data: Any = None,
    statistics: str = "keep",
    progress: ProgressCallback | None = None,
    **example_kwargs: Any,
) -> Fold:
    """Fold a network to a number of parameters, each wire as far as costs least; without labels and training.

    Args:
        model: any network; it is not changed. *example_args, **example_kwargs: inputs it can be called with.
        parameters: how many may be left: a share in (0, 1), or a number from 1 on.
        floor: instead of it, the least accuracy on `held_out`, batches of (inputs, classes): the smallest network that
            a search over sizes finds to have it.
        how: "absorb": features that the others can express are taken out, and the layers that read them read those
            instead (see `intertwine.fold.compensation`). "merge": pairs of features are merged as `fold` does, each wire
            with a beta of its own, which the result names.
        data: batches of (inputs, anything) on which "absorb" sees how features vary together; some hundred samples do.
            Without them it looks at random inputs (see `intertwine.fold.budget`), each BatchNorm with their statistics.
        statistics: "reset" estimates those of BatchNorm again on `data` in the smaller network; "keep" does not.
        progress: called with what is being done and which part of all work is behind.

    Returns:
        A `Fold`, as `fold` does.

    Raises:
        InputError: a budget that cannot be met, a floor above the accuracy of the network itself, nothing to fold.

    Example:
        >>> import torch
        >>> from intertwine.fold.budget import fold_to
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.ReLU(), torch.nn.Linear(40, 2))
        >>> folded = fold_to(model, torch.zeros(1, 3), parameters=0.5)
        >>> folded.parameters
        242 → 116 (47.9%)

    Reference: the cost of a feature is that of Hassibi and Stork, Optimal Brain Surgeon, 1993, for all of its columns.
    """
    _check(parameters, floor, held_out, how, data, statistics)
    tell = progress or (lambda doing, part: None)
    tell("finding the symmetry", 0.0)
    prepared = prepare(model, (example_args, example_kwargs))
    if not prepared.wires:
        why = "; ".join(f"{what}: {reason}" for what, reason in prepared.skipped[:3])
        raise InputError(f"No wire of this network can be folded: {why or 'it has none'}.")
    tell("looking at every feature", 0.2)
    plan = _absorbing(prepared, data) if how == "absorb" else MergeToWidths(prepared)
    size = ParameterCount(model, prepared.symmetry)

    def folded(most: float | int) -> Fold:
        found = plan.built(allocate(plan.costs, size, most))
        return replace(found, model=reset_statistics(found.model, data)) if statistics == "reset" else found

    if parameters is not None:
        tell("building the smaller network", 0.8)
        return folded(parameters * size({}) if parameters < 1 else parameters)
    return _smallest(folded, model, size, plan, floor or 0.0, held_out, tell)


def _smallest(
    folded: Callable[[float], Fold],
    model: nn.Module,
    size: ParameterCount,
    plan: Compensation | MergeToWidths,
    floor: float,
    held_out: Any,
    tell: ProgressCallback,
) -> Fold:
    """Halve the range of sizes until the smallest network with the accuracy is found."""
    full = size({})
    own = _accuracy(model, held_out)
    if own < floor:
        raise InputError(
            f"An accuracy of at least {floor:.4g} was asked for, but the network itself has {own:.4g} on the held-out "
            "data. Ask for less, or check the data and its normalisation."
        )
    low, high = size(dict.fromkeys(plan.costs, 1)), full
    best = folded(full)
    for step in range(HALVINGS):
        middle = (low + high) / 2
        tell(f"trying {middle / full:.1%} of the parameters", 0.3 + 0.7 * step / HALVINGS)
        trial = folded(middle)
        if _accuracy(trial.model, held_out) >= floor:
            best, high = trial, middle
        else:
            low = middle
    return best


def _accuracy(model: nn.Module, held_out: Any) -> float:
    found = accuracy_of(model, held_out)
    if found is None:
        next(
            labelled_batches(held_out, model, purpose="held-out data")
        )  # where it holds no samples, that is what is told
        raise InputError(
            "The held-out data has no classes, so there is no accuracy to keep. Pass batches of (inputs, classes)."
        )
    return found


def _absorbing(prepared: PreparedModel, data: Any) -> Compensation:
    model = prepared.model
    if data is not None:
        return Compensation(prepared, model, (batch.given for batch in labelled_batches(data, model)))
    batches = random_inputs_like(prepared.example)
    if any(isinstance(module, _BatchNorm) and module.running_mean is not None for module in model.modules()):
        # features then vary as much as they do on real inputs, wherever BatchNorm says how much that is
        model = reset_statistics(model, [(kwargs or args, None) for args, kwargs in batches])
    return Compensation(prepared, model, batches)


def _check(
    parameters: float | int | None, floor: float | int | None, held_out: Any, how: str, data: Any, statistics: str
) -> None:
    check_word("how", how, METHODS)
    check_statistics(statistics)
    if (parameters is None) == (floor is None):
        found = "neither was given" if floor is None else f"both were given, parameters={parameters} and floor={floor}"
        raise InputError(
            f"Either parameters (how many may be left) or floor (the least accuracy) says how far to fold; {found}. "
            "Pass one of them, such as parameters=0.5."
        )
    if parameters is not None and not (isinstance(parameters, Real) and isfinite(parameters) and parameters > 0):
        raise InputError(
            f"parameters={parameters!r} was asked for. It is a share of the parameters, above 0 and below 1, or a "
            "number of them."
        )
    if floor is not None and not (isinstance(floor, Real) and 0 < floor <= 1):
        raise InputError(f"floor={floor!r} was asked for. It is an accuracy, above 0 and at most 1.")
    if floor is not None and held_out is None:
        raise InputError("An accuracy was asked for without data to measure it on. Pass held_out, labelled batches.")
    if statistics == "reset" and data is None:
        raise InputError("statistics='reset' estimates them on real inputs. Pass some as data, or keep the statistics.")
    _check_data(parameters, held_out, how, data, statistics)


def _check_data(parameters: float | int | None, held_out: Any, how: str, data: Any, statistics: str) -> None:
    """Refuse data that would be gone when it is needed, and data that nothing would look at."""
    if parameters is not None and held_out is not None:
        raise InputError(
            f"held_out was given, but parameters={parameters} says how far to fold, whatever the accuracy is. Leave it "
            "out, or pass floor, the least accuracy, instead of parameters."
        )
    if data is not None and how == "merge" and statistics == "keep":
        raise InputError("data was given, but how='merge' compares weights alone. Leave it out, or pass how='absorb'.")
    if held_out is not None:
        check_batches(held_out)
        check_readable_again(held_out, "The held-out data is read for every size that is tried")
    if statistics == "reset":
        check_readable_again(data, "With statistics='reset' the data is read more than once")
