"""`fold_to`: a network folded to a number of parameters, or as far as an accuracy on held-out data allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from numbers import Real
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from intertwine.connect.statistics import reset_statistics
from intertwine.errors import InputError
from intertwine.features.batches import check_batches, check_readable_again
from intertwine.features.labelled import labelled
from intertwine.fold.absorbed import Absorbing
from intertwine.fold.allocation import Size, allocate
from intertwine.fold.folded import Fold
from intertwine.fold.merge_traces import MergingTo
from intertwine.fold.noise import noise_like
from intertwine.fold.options import check_statistics, check_word
from intertwine.fold.prepared import Prepared, prepare
from intertwine.stitch.passes import accuracy_of

#: How often the range of sizes is halved in the search for an accuracy.
HALVINGS = 8
HOW = ("absorb", "merge")
Progress = Callable[[str, float], None]


def fold_to(
    model: nn.Module,
    *example_args: Any,
    parameters: float | int | None = None,
    floor: float | int | None = None,
    held_out: Any = None,
    how: str = "absorb",
    data: Any = None,
    statistics: str = "keep",
    progress: Progress | None = None,
    **example_kwargs: Any,
) -> Fold:
    """Fold a network to a number of parameters, each wire as far as costs least; without labels and training.

    Args:
        model: any network; it is not changed. *example_args, **example_kwargs: inputs it can be called with.
        parameters: how many may be left: a share in (0, 1), or a number from 1 on.
        floor: instead of it, the least accuracy on `held_out`, batches of (inputs, classes): the smallest network that
            a search over sizes finds to have it.
        how: "absorb": features that the others can express are taken out, and the layers that read them read those
            instead (see `intertwine.fold.absorbing`). "merge": pairs of features are merged as `fold` does, each wire
            with a beta of its own, which the result names.
        data: batches of (inputs, anything) on which "absorb" sees how features vary together; some hundred samples do.
            Without them it looks at random inputs (see `intertwine.fold.noise`), each BatchNorm with their statistics.
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
    plan = _absorbing(prepared, data) if how == "absorb" else MergingTo(prepared)
    size = Size(model, prepared.symmetry)

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
    size: Size,
    plan: Absorbing | MergingTo,
    floor: float,
    held_out: Any,
    tell: Progress,
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
        next(labelled(held_out, model, purpose="held-out data"))  # where it holds no samples, that is what is told
        raise InputError(
            "The held-out data has no classes, so there is no accuracy to keep. Pass batches of (inputs, classes)."
        )
    return found


def _absorbing(prepared: Prepared, data: Any) -> Absorbing:
    model = prepared.model
    if data is not None:
        return Absorbing(prepared, model, (batch.given for batch in labelled(data, model)))
    batches = noise_like(prepared.example)
    if any(isinstance(module, _BatchNorm) and module.running_mean is not None for module in model.modules()):
        # features then vary as much as they do on real inputs, wherever BatchNorm says how much that is
        model = reset_statistics(model, [(kwargs or args, None) for args, kwargs in batches])
    return Absorbing(prepared, model, batches)


def _check(
    parameters: float | int | None, floor: float | int | None, held_out: Any, how: str, data: Any, statistics: str
) -> None:
    check_word("how", how, HOW)
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
