"""`merge`: one network made of several, each first moved into a common frame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import nn

from intertwine.align.align import SOLVERS
from intertwine.align.many import CommonFrame, align_many, check_list, common_symmetry
from intertwine.align.mean import mean_network
from intertwine.canonical.blocks import weights_of
from intertwine.canonical.canonicalize import canonical_element
from intertwine.connect.agreement import check_same
from intertwine.connect.merged import MENDED_MEAN, PLAIN_MEAN, Merged, Score, batch_norm_notes, score_notes, scored
from intertwine.connect.repair import repair as repair_two
from intertwine.connect.scale_correction import correct_scales
from intertwine.connect.statistics import batch_norms, reset_statistics
from intertwine.errors import InputError, did_you_mean
from intertwine.features.batches import calls, placed
from intertwine.features.scoring import Loss
from intertwine.graph.capture import refuse_scripted
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry

REPAIRS = ("reset", "repair", "scales")
#: Ways to merge that search for nothing: the plain mean, and the mean of NodeSort forms.
PLAIN = ("none", "sorted")


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
    """Merge networks of one architecture into one: move them into a common frame, take the mean, mend it.

    Args:
        models: two networks or more; none is changed. *example_args, **example_kwargs: inputs, as for
            `intertwine.symmetry`; where none are given the first batch of the data serves.
        data: batches of (inputs, targets): for methods that look at data, for "reset" and "repair", and to check the
            result. It is read several times.
        method: any method of `intertwine.align`; "none" for the mean of the networks as they are; "sorted" for the mean
            of their NodeSort forms.
        repair: None; "reset" estimates BatchNorm statistics again on the data; "repair" is REPAIR on the data (two
            networks, or BatchNorm); "scales" corrects the size of units without data.
        weights: of the mean; none negative, together 1. t: for two networks, the same as weights (1 − t, t).
        check: where there is data, compare the merged network with the plain mean, with the plain mean mended alike
            where a repair was asked for, and with the given networks, and say in `.notes` where its loss is larger.
            loss: of (outputs, targets) for that; cross-entropy where None.
        symmetry: the symmetry of the architecture where it is known. options, seed: of the method.

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
        check_same(models[0], other)
    _check_ways(models[0], len(models), method, repair, data)
    if options and method in PLAIN:
        raise InputError(f"The method {method!r} searches for nothing and has no options; found {dict(options)}.")
    inputs = (example_args, example_kwargs) if example_args or example_kwargs else _first_call(data, models[0])
    found = symmetry
    if found is None and (method != "none" or (repair == "scales" and batch_norms(models[0]))):
        found = common_symmetry(models, None, *_needed(inputs))
    frame: CommonFrame | None = None
    elements, moved = tuple[Element, ...](), tuple(models)
    if method == "sorted" and found is not None:
        elements, moved = _sorted(models, found)
    elif method != "none":
        looks = data if SOLVERS[method].needs_data else None
        frame = align_many(models, method=method, data=looks, seed=seed, symmetry=found, options=options)
        elements, moved = frame.elements, frame.models
    merged = _mended(moved, shares, repair, data, found)
    scores: tuple[Score, ...] = ()
    if data is not None and check:
        plain = {PLAIN_MEAN: merged if method == "none" and repair is None else mean_network(models, shares)}
        if repair is not None:
            plain[MENDED_MEAN] = merged if method == "none" else _mended(models, shares, repair, data, found)
        scores = scored({"merged": merged} | plain | _numbered(models), data, loss)
    notes = (*batch_norm_notes(models[0], repair), *score_notes(scores))
    return Merged(
        merged, method, repair, shares, elements, _spread(models), _spread(moved), frame, scores, notes
    )  # fmt: skip


def _sorted(models: Sequence[nn.Module], found: Symmetry) -> tuple[tuple[Element, ...], tuple[nn.Module, ...]]:
    """Every network in its NodeSort form, and the elements that take them there."""
    elements = tuple(canonical_element(found, weights_of(found, m), order="nodesort")[0] for m in models)
    return elements, tuple(found.act(g, m) for g, m in zip(elements, models, strict=True))


# -- what was asked ----------------------------------------------------------------------------------------------------


def _shares(count: int, weights: Sequence[float | int] | None, t: float | int | None) -> tuple[float, ...]:
    if count < 2:
        raise InputError(f"Two networks or more are needed to merge them; found {count}.")
    if t is not None:
        if weights is not None or count != 2:
            what = "weights= were given too" if weights is not None else f"there are {count} networks"
            raise InputError(f"t={t} is the place between two networks, but {what}. Pass weights= alone.")
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


def _check_ways(model: nn.Module, count: int, method: str, repair: str | None, data: Any) -> None:
    known = (*SOLVERS, *PLAIN)
    if method not in known:
        raise InputError(
            f"There is no method {method!r}. {did_you_mean(method, known)}Choose one of {', '.join(map(repr, known))}."
        )
    if repair is not None and repair not in REPAIRS:
        raise InputError(
            f"There is no repair {repair!r}. {did_you_mean(repair, REPAIRS)}Choose one of "
            f"{', '.join(map(repr, REPAIRS))}, or None."
        )
    if isinstance(data, Iterator):
        raise InputError("The data is read several times, but a generator can be read once. Pass a list or DataLoader.")
    if repair in ("reset", "repair") and data is None:
        raise InputError(f"repair={repair!r} measures on data, and none was given. Pass data=, or repair='scales'.")
    if repair is not None:
        refuse_scripted(model)
    has_norms = bool(batch_norms(model))
    if repair == "reset" and not has_norms:
        raise InputError("repair='reset' needs BatchNorm, and the network has none. Use 'repair' or 'scales'.")
    if repair == "repair" and count > 2 and not has_norms:
        raise InputError(
            f"repair='repair' mends the mix of two networks, and {count} were given. Use repair='scales', or merge two "
            "at a time."
        )


def _first_call(data: Any, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if data is None:
        return None
    call = next(calls(data), None)
    return None if call is None else placed(call, model)


def _needed(inputs: tuple[tuple[Any, ...], dict[str, Any]] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if inputs is None:
        raise InputError(
            "To find what can be moved, the network is read with example inputs, and none were given. Pass them behind "
            "the models, as in merge(models, torch.zeros(1, 3, 32, 32)), or pass data=; method='none' needs neither."
        )
    return inputs


# -- what was made -----------------------------------------------------------------------------------------------------


def _mended(
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
        if not bool((stacked == stacked[0]).all()):  # equal ones would differ from their mean by a rounding
            total += float((stacked - stacked.mean(0)).square().sum())
    return total


def _numbered(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    return {f"network {i}": model for i, model in enumerate(models)}
