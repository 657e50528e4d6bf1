"""`merge`: one network made of several, each first moved into a common frame; the result is scored beside the plain
mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import nn

from intertwine.align.align import SOLVERS
from intertwine.align.many import CommonFrame, align_many, check_list
from intertwine.canonical.equivalence import common_symmetry
from intertwine.canonical.form import canonical_element
from intertwine.connect.repair import correct_scales
from intertwine.connect.repair import repair as repair_two
from intertwine.data.batches import Call, calls, on_device_of
from intertwine.data.batchnorm import batch_norms, reset_statistics
from intertwine.data.evaluate import Loss, evaluate
from intertwine.data.weights import check_same_architecture, mean_network, path_between
from intertwine.errors import InputError, unknown_name
from intertwine.graph.model import refuse_scripted
from intertwine.lazy import data_frame
from intertwine.symmetry.blocks import weights_of
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry

#: Names in the scores: the mean of the given networks, and the same mean after the same repair.
PLAIN_MEAN, REPAIRED_MEAN = "plain mean", "plain mean, same repair"
REPAIRS = ("reset", "repair", "scales")
#: Methods without a search: the plain mean, and the mean of NodeSort forms.
WITHOUT_SEARCH = ("none", "sorted")


@dataclass(frozen=True)
class NetworkScore:
    """The scores of one network on the data; error is None if the targets are not classes."""

    name: str
    loss: float
    error: float | None


@dataclass(frozen=True, eq=False)
class Merged:
    """One network made of several.

    Attributes:
        model: the merged network, an ordinary module that trains and saves.
        elements: what moved each network before the mean; empty for method "none".
        before, after: Σᵢ ‖θᵢ − mean‖² over all parameters, of the networks as given and as moved.
        frame: the result of `align_many`, for the methods that align.
        scores: on the data, if given: the merged network ("merged"), the mean of the given networks ("plain mean"),
            that mean after the same repair, if any ("plain mean, same repair"), and every given network ("network 0",
            …).
        notes: what the user should know before trusting the result.
    """

    model: nn.Module = field(repr=False)
    method: str
    repair: str | None
    weights: tuple[float, ...]
    elements: tuple[Element, ...] = field(repr=False)
    before: float
    after: float
    frame: CommonFrame | None = field(repr=False)
    scores: tuple[NetworkScore, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All but the network and the elements, as plain values."""
        return {
            "method": self.method,
            "repair": self.repair,
            "weights": list(self.weights),
            "before": self.before,
            "after": self.after,
            "frame": None if self.frame is None else self.frame.to_dict(),
            "scores": self.to_rows(),
            "notes": list(self.notes),
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per scored network, as plain data."""
        return [asdict(score) for score in self.scores]

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return data_frame(self.to_rows())

    def __repr__(self) -> str:
        repair = f", repair {self.repair}" if self.repair else ""
        head = f"Merged({len(self.weights)} networks, {self.method}{repair}: squared distances to the mean "
        lines = [f"{head}{self.before:.4g} → {self.after:.4g})", *(f"note: {note}" for note in self.notes)]
        return "\n  ".join(lines)


def scored(networks: Mapping[str, nn.Module], data: Any, loss: Loss | None) -> tuple[NetworkScore, ...]:
    """The scores of some networks, read in one pass over the data."""
    found = evaluate([path_between(m, m, [0.0]) for m in networks.values()], data, loss)
    return tuple(
        NetworkScore(name, s.loss[0], None if s.error is None else s.error[0])
        for name, s in zip(networks, found, strict=True)
    )


# -- Notes -------------------------------------------------------------------------------------------------------------


def _batch_norm_notes(model: nn.Module, repair: str | None) -> list[str]:
    if not batch_norms(model) or repair in ("reset", "repair"):
        return []
    if repair == "scales":
        return ["The BatchNorm variances are estimated from weights, not on data; repair='reset' with data is better."]
    return [
        "The running statistics of BatchNorm are the mean of the given ones, not those of the merged network, so it "
        "may do far worse than its weights can. Pass data= with repair='reset', or repair='scales' without data."
    ]


def score_notes(scores: Sequence[NetworkScore]) -> list[str]:
    """Notes if the first score, that of the merged network, has a larger loss than the plain mean or all given ones.

    >>> values = {"merged": 0.19, "network 0": 0.14, "network 1": 0.18}
    >>> found = [NetworkScore(name, loss, 0.06) for name, loss in values.items()]
    >>> print(*score_notes(found)[0].split(". "), sep=".\\n")
    The loss of the merged network is larger than that of every given one: 0.19 against 0.14 to 0.18.
    Its error is 0.0600, against 0.0600.
    """
    if not scores:
        return []
    notes, (merged, *others) = [], scores
    means = {score.name: score for score in others if score.name in (PLAIN_MEAN, REPAIRED_MEAN)}
    given = [score for score in others if score.name not in means]
    if means:
        mean = means.get(REPAIRED_MEAN) or means[PLAIN_MEAN]
        if merged.loss > mean.loss:
            notes.append(_larger_loss(merged, f"the {mean.name}", [mean]))
    if given and merged.loss > max(score.loss for score in given):
        notes.append(_larger_loss(merged, "every given one", given))
    return notes


def _larger_loss(merged: NetworkScore, what: str, others: Sequence[NetworkScore]) -> str:
    def span(values: Sequence[float], form: str) -> str:  # one number if both ends read the same
        return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values))))

    losses, errors = [score.loss for score in others], [score.error for score in others if score.error is not None]
    text = f"The loss of the merged network is larger than that of {what}: {merged.loss:.4g} against "
    text += f"{span(losses, '.4g')}."
    if merged.error is None or not errors:
        return text
    return f"{text} Its error is {merged.error:.4f}, against {span(errors, '.4f')}."


# -- The verb ----------------------------------------------------------------------------------------------------------


def merge(
    models: Iterable[nn.Module],
    *example_args: Any,
    data: Any = None,
    method: str = "weights",
    repair: str | None = None,
    weights: Sequence[float | int] | None = None,
    t: float | int | None = None,
    check: bool = True,
    loss: Loss | None = None,
    symmetry: Symmetry | None = None,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    **example_kwargs: Any,
) -> Merged:
    """Merge networks of one architecture into one: move them into a common frame, take the mean, repair it.

    Args:
        models: two networks or more; none is changed. *example_args, **example_kwargs: inputs, as for
            `intertwine.symmetry`; without any, the first batch of the data serves.
        data: batches of (inputs, targets): for methods that need data, for "reset" and "repair", and to check the
            result. It is read several times.
        method: any method of `intertwine.align`; "none" for the mean of the networks as they are; "sorted" for the mean
            of their NodeSort forms.
        repair: None; "reset" re-estimates BatchNorm statistics on the data; "repair" is REPAIR on the data (two
            networks, or BatchNorm); "scales" corrects the scale of units without data.
        weights: of the mean; none negative, together 1. t: for two networks, the same as weights (1 − t, t).
        check: with data, compare the merged network with the plain mean, with the plain mean after the same repair, if
            any, and with the given networks, and note in `.notes` which of them have a smaller loss.
        loss: of (outputs, targets) for the check; cross-entropy if None.
        symmetry: the symmetry of the architecture, if it is known. options, seed: of the method.

    Returns:
        A `Merged`: `.model`, `.elements`, `.before`, `.after`, `.frame`, `.scores`, `.notes`.

    Raises:
        MismatchError: the networks are of different architectures. InputError: what is missing or unknown.

    Example:
        >>> import torch, intertwine
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
        >>> x = torch.randn(1, 3)
        >>> sym = intertwine.symmetry(model, x)
        >>> merged = intertwine.merge([model, sym.act(sym.random(seed=1), model)], x)
        >>> torch.equal(merged.model(x), model(x)) or torch.equal(merged.model(x), sym.act(sym.random(1), model)(x))
        True
    """
    models = check_list(models, "merge")
    shares = _shares(len(models), weights, t)
    for other in models[1:]:
        check_same_architecture(models[0], other)
    _check_options(models[0], len(models), method, repair, data)
    if options and method in WITHOUT_SEARCH:
        raise InputError(f"The method {method!r} searches for nothing and has no options; found {dict(options)}.")
    found = symmetry
    if found is None and (method != "none" or (repair == "scales" and batch_norms(models[0]))):
        args, kwargs = (example_args, example_kwargs) if example_args or example_kwargs else _first(data, models[0])
        found = common_symmetry(models, None, args, kwargs)
    frame: CommonFrame | None = None
    elements, moved = tuple[Element, ...](), tuple(models)
    if method == "sorted" and found is not None:
        elements = tuple(canonical_element(found, weights_of(found, m), order="nodesort")[0] for m in models)
        moved = tuple(found.act(g, m) for g, m in zip(elements, models, strict=True))
    elif method != "none":
        needed = data if SOLVERS[method].needs_data else None
        frame = align_many(models, method=method, data=needed, seed=seed, symmetry=found, options=options)
        elements, moved = frame.elements, frame.models
    merged = _repaired_mean(moved, shares, repair, data, found)
    scores: tuple[NetworkScore, ...] = ()
    if data is not None and check:
        compared = {"merged": merged}
        compared[PLAIN_MEAN] = merged if method == "none" and repair is None else mean_network(models, shares)
        if repair is not None:
            is_plain = method == "none"
            compared[REPAIRED_MEAN] = merged if is_plain else _repaired_mean(models, shares, repair, data, found)
        scores = scored(compared | {f"network {i}": model for i, model in enumerate(models)}, data, loss)
    notes = (*_batch_norm_notes(models[0], repair), *score_notes(scores))
    before, after = _spread(models), _spread(moved)
    return Merged(merged, method, repair, shares, elements, before, after, frame, scores, notes)


def _shares(count: int, weights: Sequence[float | int] | None, t: float | int | None) -> tuple[float, ...]:
    if count < 2:
        raise InputError(f"Two networks or more are needed to merge them; found {count}.")
    if t is not None:
        if weights is not None or count != 2:
            what = "weights= are given too" if weights is not None else f"there are {count} networks"
            raise InputError(f"t={t} is the position between two networks, but {what}. Pass weights= alone.")
        weights = (1 - t, t)
    if weights is None:
        return (1 / count,) * count
    shares = tuple(float(w) for w in weights)
    if len(shares) != count or not all(isfinite(w) and w >= 0 for w in shares) or abs(sum(shares) - 1) > 1e-6:
        raise InputError(
            f"The weights of a mean must be one per network, none negative, and add up to 1; found {shares} for "
            f"{count} networks. Divide them by their sum, or leave them out for equal ones."
        )
    return shares


def _check_options(model: nn.Module, count: int, method: str, repair: str | None, data: Any) -> None:
    if method not in (known := (*SOLVERS, *WITHOUT_SEARCH)):
        raise InputError(unknown_name("method", method, known))
    if repair is not None and repair not in REPAIRS:
        raise InputError(unknown_name("repair", repair, REPAIRS))
    if isinstance(data, Iterator):
        raise InputError("The data is read several times, but a generator can be read once. Pass a list or DataLoader.")
    if repair in ("reset", "repair") and data is None:
        raise InputError(f"repair={repair!r} measures on data, and none is given. Pass data=, or repair='scales'.")
    if repair is not None:
        refuse_scripted(model)
    has_norms = bool(batch_norms(model))
    if repair == "reset" and not has_norms:
        raise InputError("repair='reset' needs BatchNorm, and the network has none. Use 'repair' or 'scales'.")
    if repair == "repair" and count > 2 and not has_norms:
        raise InputError(
            f"repair='repair' works on the mix of two networks, and {count} are given. Use repair='scales', or merge "
            "two at a time."
        )


def _first(data: Any, model: nn.Module) -> Call:
    """The first batch of the data as example inputs."""
    call = None if data is None else next(calls(data), None)
    if call is None:
        raise InputError(
            "The symmetry of the networks is found from example inputs, and none are given. Pass them after the "
            "models, as in merge(models, torch.zeros(1, 3, 32, 32)), or pass data=; method='none' needs neither."
        )
    return on_device_of(call, model)


def _repaired_mean(
    models: Sequence[nn.Module], shares: Sequence[float], repair: str | None, data: Any, symmetry: Symmetry | None
) -> nn.Module:
    if repair == "scales":
        return correct_scales(models, weights=shares, symmetry=symmetry)
    if repair == "repair" and not batch_norms(models[0]):
        return repair_two(models[0], models[1], shares[1], data)
    mean = mean_network(models, shares)
    return mean if repair is None else reset_statistics(mean, data)


def _spread(models: Sequence[nn.Module]) -> float:
    """Σᵢ ‖θᵢ − mean‖² over all parameters."""
    total = 0.0
    for same in zip(*(m.parameters() for m in models), strict=True):
        stacked = torch.stack([p.detach().to(same[0].device, torch.float64) for p in same])
        if not bool((stacked == stacked[0]).all()):  # equal ones would differ from their mean by rounding
            total += float((stacked - stacked.mean(0)).square().sum())
    return total
