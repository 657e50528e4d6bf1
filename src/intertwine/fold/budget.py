"""`fold_to`: folds a network to a number of parameters or to a minimum accuracy, each wire as far as costs least."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, prod
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
from intertwine.fold.options import STATISTICS, Options, check_word
from intertwine.fold.prepare import PreparedModel, prepare
from intertwine.fold.result import Fold
from intertwine.graph.model import tied_names
from intertwine.stitch.scores import accuracy_of
from intertwine.symmetry.geometry import LayoutAxis, ProductAxis, SumAxis, WireAxis
from intertwine.symmetry.symmetry import Symmetry

#: The share of its features that a wire loses in one step of the allocation is one in this many.
ALLOCATION_STEPS = 50
#: Tensors with shorter sides than this are not drawn as images.
SMALLEST_IMAGE = 8
#: The share of the variance that the channels of a random image have in common.
SHARED_VARIANCE = 0.8
#: How often the search for an accuracy halves the range of sizes.
HALVINGS = 8
METHODS = ("absorb", "merge")
ProgressCallback = Callable[[str, float], None]


# -- Allocation --------------------------------------------------------------------------------------------------------


def axis_size(axis: LayoutAxis, widths: Mapping[int, int]) -> int:
    """The size of an axis after some wires have changed their widths.

    >>> from intertwine.symmetry.geometry import WireAxis, SumAxis, FixedAxis, ProductAxis
    >>> axis_size(SumAxis((FixedAxis(2), ProductAxis((WireAxis(0, 3), FixedAxis(2))))), {0: 1})
    4
    """
    match axis:
        case WireAxis():
            return widths.get(axis.wire, axis.size)
        case ProductAxis():
            return prod(axis_size(part, widths) for part in axis.parts)
        case SumAxis():
            return sum(axis_size(part, widths) for part in axis.parts)
    return axis.size


class ParameterCount:
    """The number of parameters of a network as a function of the widths of its wires, given by their indices."""

    def __init__(self, model: nn.Module, symmetry: Symmetry) -> None:
        tied = tied_names(model)
        self.fixed, self.axes = 0, []
        for name, parameter in model.named_parameters():
            layout = symmetry.layouts.get(tied[name])
            if layout is None or not layout.moves:
                self.fixed += parameter.numel()
            else:
                self.axes.append((layout.axes, layout.wires))

    def share_parameter(self, one: int, other: int) -> bool:
        """Whether two wires occur in the same parameter."""
        return any(one in wires and other in wires for _, wires in self.axes)

    def __call__(self, widths: Mapping[int, int], wire: int | None = None) -> int:
        """The number of all parameters, or of those in which a wire occurs."""
        found = (axes for axes, wires in self.axes if wire is None or wire in wires)
        total = self.fixed if wire is None else 0
        return total + sum(prod(axis_size(axis, widths) for axis in axes) for axes in found)


def allocate(
    costs: Mapping[int, Sequence[float]],
    size: ParameterCount,
    parameters: float | int,
    least: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Wire → width, so that the network has at most some number of parameters and loses least.

    Features are removed, a few at a time, from the wire where the cost per parameter is least. The parameters of a
    feature depend on the current widths of the neighbouring wires.

    Args:
        costs: wire → the cost after removing 0, 1, … of its features. size: counts parameters.
        parameters: the largest number of parameters. least: wire → the fewest features that it keeps, by default 1.

    Raises:
        InputError: the network has more parameters even with every wire at its least width.
    """
    widths = {wire: len(of) for wire, of in costs.items()}
    least = {wire: max(1, (least or {}).get(wire, 1)) for wire in costs}
    smallest, left = size(least), size(widths)
    if smallest > parameters:
        most = f"{parameters:,.0f}" if parameters >= 1 else "Less than one"
        raise InputError(
            f"{most} of {left:,} parameters cannot be reached: {smallest:,} are left when every wire that can be "
            "folded is as narrow as possible. Allow more."
        )
    steps: dict[int, tuple[float, int, int]] = {}  # wire → (cost per parameter, new width, parameters fewer)
    while left > parameters:
        for wire, of in costs.items():
            width = widths[wire]
            if wire not in steps and width > least[wire]:
                narrower = max(least[wire], width - max(1, width // ALLOCATION_STEPS))
                fewer = size(widths, wire) - size({**widths, wire: narrower}, wire)
                cost = of[len(of) - narrower] - of[len(of) - width]
                steps[wire] = cost / max(fewer, 1), narrower, fewer
        best = min(steps, key=lambda wire: steps[wire][0])
        _, narrower, fewer = steps.pop(best)
        widths[best], left = narrower, left - fewer
        steps = {wire: step for wire, step in steps.items() if not size.share_parameter(wire, best)}
    return widths


# -- Merging to any width ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MergeTrace:
    """The merges of one wire down to one feature, the other wires unchanged.

    `costs`: the share of the weighted variance of its rows that lies inside the groups, as in Ward's clustering.
    `betas`: those at which `fold` would merge so far. Both start with 0, for no merge.
    """

    pairs: tuple[tuple[int, int], ...]
    costs: tuple[float, ...]
    betas: tuple[float, ...]


def merge_trace(prepared: PreparedModel, w: int) -> MergeTrace:
    """Merge one wire down to one feature and restore the working tensors."""
    wire = prepared.wires[w]
    merging = MergeState(prepared.wires, Options())
    before = [slot.block.data.clone() for slot in wire.slots]
    distances = merging.distances(w)
    reference, inside = distances.typical, 0.0
    weights = merging.counts[w]
    total = float((distances.table * (weights[:, None] + weights[None, :])).sum()) / 4 / weights.sum()
    pairs, costs, betas = [], [0.0], [0.0]
    for _ in range(wire.size - 1):
        distances = merging.distances(w)
        m, n = distances.pair()
        smallest = max(distances.smallest, 0.0)
        inside += smallest / 2  # a merge adds half of Ward's distance to the squares inside groups
        merging.merge(w, m, n)
        pairs.append((m, n))
        costs.append(max(costs[-1], variance_cost(inside / total if total > 0 else 0.0)))
        betas.append(max(betas[-1], smallest / reference if reference > 0 else 0.0))
    for slot, data in zip(wire.slots, before, strict=True):
        slot.block.data.copy_(data)
    return MergeTrace(tuple(pairs), tuple(costs), tuple(betas))


class MergeToWidths:
    """A network whose wires can be merged to any widths."""

    def __init__(self, prepared: PreparedModel) -> None:
        self.prepared = prepared
        self.traces = {wire.index: merge_trace(prepared, w) for w, wire in enumerate(prepared.wires)}
        self.costs = {index: trace.costs for index, trace in self.traces.items()}

    def build(self, widths: Mapping[int, int]) -> Fold:
        """The network at these widths."""
        prepared = prepare(self.prepared.model, self.prepared.example)  # merging writes into it
        merging = MergeState(prepared.wires, Options())
        betas = {}
        for w, wire in enumerate(prepared.wires):
            trace = self.traces[wire.index]
            gone = wire.size - widths[wire.index]
            for pair in trace.pairs[:gone]:
                merging.merge(w, *pair)
            betas[wire.name] = trace.betas[gone]
        return build_fold(prepared, merging, betas)


# -- Random inputs -----------------------------------------------------------------------------------------------------


def random_inputs_like(example: Call, batches: int = 4, size: int = 128, seed: int = 0) -> list[Call]:
    """Batches of random inputs of the example's shapes, of mean 0 and variance 1.

    Images have the power spectrum of photographs and correlated channels, which shows how features vary together.

    Args:
        example: positional and keyword arguments; the first axis of every tensor holds the samples.
        batches, size: the number of batches, and of samples in each. seed: of the random numbers.

    Raises:
        InputError: the example holds integer tensors, such as tokens, or none at all.

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
            f"Random inputs cannot be drawn for a network whose example inputs are {found}, only for real-valued "
            "tensors whose first axis holds the samples. Pass batches of real inputs as data instead."
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
    """White noise filtered so that its amplitude falls with the frequency, scaled to variance 1."""
    sides = (torch.fft.fftfreq(n).to(x) for n in x.shape[-2:])
    across, down = torch.meshgrid(*sides, indexing="ij")
    frequency = (across.square() + down.square()).sqrt()
    lowest = 0.5 / max(x.shape[-2:])  # the mean of an image varies twice as much as its slowest wave
    y = torch.fft.ifft2(torch.fft.fft2(x) / frequency.clamp(min=lowest)).real
    return y / y.std()


# -- fold_to -----------------------------------------------------------------------------------------------------------


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
        parameters: the largest number of parameters: a share in (0, 1), or a number from 1 on.
        floor: instead of it, the least accuracy on `held_out`, batches of (inputs, classes): the smallest network that
            a search over sizes finds to have it.
        how: "absorb": features that the others can express are removed, and the layers that read them are adjusted by
            least squares (see `intertwine.fold.compensation`). "merge": pairs of features are merged as `fold` does,
            each wire with a beta of its own, which is in the result.
        data: batches of (inputs, anything) on which "absorb" measures how features vary together; some hundred samples
            suffice. Without them it uses random inputs (`random_inputs_like`), with BatchNorm statistics of these.
        statistics: "reset" re-estimates those of BatchNorm on `data` in the smaller network; "keep" does not.
        progress: called with the current step and the finished share of all work.

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

    Reference: Hassibi and Stork, Optimal Brain Surgeon, 1993: the cost of a feature, here for all of its columns.
    """
    _check(parameters, floor, held_out, how, data, statistics)
    progress = progress or (lambda doing, part: None)
    progress("finding the symmetry", 0.0)
    prepared = prepare(model, (example_args, example_kwargs))
    if not prepared.wires:
        why = "; ".join(f"{what}: {reason}" for what, reason in prepared.skipped[:3])
        raise InputError(f"No wire of this network can be folded: {why or 'it has none'}.")
    progress("measuring the cost of every feature", 0.2)
    plan = _compensation(prepared, data) if how == "absorb" else MergeToWidths(prepared)
    size = ParameterCount(model, prepared.symmetry)

    def folded(most: float | int) -> Fold:
        found = plan.build(allocate(plan.costs, size, most))
        return replace(found, model=reset_statistics(found.model, data)) if statistics == "reset" else found

    if parameters is not None:
        progress("building the smaller network", 0.8)
        return folded(parameters * size({}) if parameters < 1 else parameters)
    floor, full, own = floor or 0.0, size({}), _accuracy(model, held_out)
    if own < floor:
        raise InputError(
            f"An accuracy of {floor:.4g} cannot be kept: the network itself has {own:.4g} on the held-out data. Lower "
            "floor, or check the data and its normalisation."
        )
    low, high = size(dict.fromkeys(plan.costs, 1)), full
    best = folded(full)
    for step in range(HALVINGS):  # the smallest size with the accuracy, by bisection
        middle = (low + high) / 2
        progress(f"trying {middle / full:.1%} of the parameters", 0.3 + 0.7 * step / HALVINGS)
        trial = folded(middle)
        if _accuracy(trial.model, held_out) >= floor:
            best, high = trial, middle
        else:
            low = middle
    return best


def _accuracy(model: nn.Module, held_out: Any) -> float:
    found = accuracy_of(model, held_out)
    if found is None:
        next(labelled_batches(held_out, model, purpose="held-out data"))  # raises where there are no samples
        raise InputError("The held-out data has no classes to measure accuracy on. Pass batches of (inputs, classes).")
    return found


def _compensation(prepared: PreparedModel, data: Any) -> Compensation:
    model = prepared.model
    if data is not None:
        return Compensation(prepared, model, (batch.given for batch in labelled_batches(data, model)))
    batches = random_inputs_like(prepared.example)
    if any(isinstance(module, _BatchNorm) and module.running_mean is not None for module in model.modules()):
        # BatchNorm then gives features the variance that they have on real inputs
        model = reset_statistics(model, [(kwargs or args, None) for args, kwargs in batches])
    return Compensation(prepared, model, batches)


def _check(
    parameters: float | int | None, floor: float | int | None, held_out: Any, how: str, data: Any, statistics: str
) -> None:
    check_word("how", how, METHODS)
    check_word("statistics", statistics, STATISTICS)
    if (parameters is None) == (floor is None):
        found = "neither is given" if floor is None else f"both are given, parameters={parameters} and floor={floor}"
        raise InputError(
            f"Either parameters (the largest number) or floor (the least accuracy) decides how far to fold; {found}. "
            "Pass one of them, such as parameters=0.5."
        )
    if parameters is not None and not (isinstance(parameters, Real) and isfinite(parameters) and parameters > 0):
        raise InputError(
            f"parameters must be a share of the parameters, above 0 and below 1, or a number of them, but is "
            f"{parameters!r}."
        )
    if floor is not None and not (isinstance(floor, Real) and 0 < floor <= 1):
        raise InputError(f"floor must be an accuracy, above 0 and at most 1, but is {floor!r}.")
    if floor is not None and held_out is None:
        raise InputError("floor needs data to measure the accuracy on. Pass held_out, labelled batches.")
    if statistics == "reset" and data is None:
        raise InputError("statistics='reset' needs real inputs. Pass some as data, or keep the statistics.")
    if parameters is not None and held_out is not None:
        raise InputError(
            f"held_out has no effect, since parameters={parameters} decides how far to fold. Leave it out, or pass "
            "floor, the least accuracy, instead of parameters."
        )
    if data is not None and how == "merge" and statistics == "keep":
        raise InputError("data has no effect on how='merge', which compares weights alone. Leave it out.")
    if held_out is not None:
        check_batches(held_out)
        check_readable_again(held_out, "The held-out data is read for every size that is tried")
    if statistics == "reset":
        check_readable_again(data, "With statistics='reset' the data is read more than once")
