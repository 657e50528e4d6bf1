"""`fold_activations`: features merged by what they compute on data, instead of by their weights.

One pass over the data keeps Σ a aᵀ of the features of every wire, positions of images and tokens counted as samples.
From it come all squared distances E|a_i − a_j|², and those of merged features, taken as means of their members.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
from torch import Tensor, nn

from intertwine.align.fits import Features, Moving
from intertwine.align.hidden import watch
from intertwine.connect.statistics import batch_norms, reset_statistics
from intertwine.errors import InputError
from intertwine.features.batches import calls, check_batches, check_readable_again, placed
from intertwine.fold.distances import Array, Distances
from intertwine.fold.folded import Fold
from intertwine.fold.options import Beta, Options, check_statistics
from intertwine.fold.prepared import Prepared, prepare
from intertwine.fold.variances import GroupMerging, check_repair
from intertwine.fold.widths import Widths, check_share, wanted_widths


def fold_activations(
    model: nn.Module,
    data: Any,
    *,
    beta: Beta | None = None,
    widths: Widths | None = None,
    at: str = "post",
    statistics: str = "keep",
    repair: str | None = None,
) -> Fold:
    """Merge the features of a network that compute nearly the same on data; labels play no part.

    All wires are looked at in one pass, before anything is merged. The two nearest features of a wire are merged, then
    the next two, until `fold`'s stop rule or the width is reached.

    Args:
        model: any network; it is not changed.
        data: batches of (inputs, targets), or of inputs alone. Read once; twice with statistics="reset".
        beta: in (0, 1): a wire stops when its smallest distance exceeds beta times its largest at the start.
        widths: instead of beta: the share of its features that every wire keeps, or wire → number of features.
        at: which tensors speak for a wire: "post" (after nonlinearities) or "pre" (before).
        statistics: "reset" estimates those of BatchNorm again on the data, once the network is folded; "keep" does not.
        repair: "variances" gives merged features the mean variance of their members; see `repair_variances`.

    Returns:
        A `Fold`, as `fold` gives it.

    Raises:
        InputError: neither or both of beta and widths, options out of range, no data, or statistics to reset where
            there is no BatchNorm.

    Example:
        >>> import torch
        >>> from intertwine.fold.activations import fold_activations
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> fold_activations(model, [torch.randn(64, 3)], widths=0.5).model[0].out_features
        4
    """
    _check(model, data, beta, widths, statistics)
    check_repair(repair)
    batches = _Batches(data)
    prepared = prepare(model, placed(next(calls(batches.peek())), model))
    limits = _limits(prepared, beta, widths)
    grams = inner_products(prepared, batches, at)
    joint = GroupMerging(prepared, repair)
    joint.merge_named({name: nearest(gram, limits[name]) for name, gram in grams.items() if name in limits})
    folded = joint.finish()
    return replace(folded, model=reset_statistics(folded.model, batches)) if statistics == "reset" else folded


@dataclass(frozen=True)
class Limit:
    """When a wire stops: at so many features, or where the smallest distance exceeds beta times the largest."""

    width: int = 1
    beta: float = 1.0


def nearest(gram: Array, limit: Limit) -> list[list[int]]:
    """Groups of features, from their inner products: the two nearest merged, again and again.

    >>> import numpy as np
    >>> a = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]])
    >>> nearest(a @ a.T, Limit(width=2))
    [[0, 2], [1]]
    """
    groups = [[i] for i in range(len(gram))]
    alive = np.ones(len(gram), bool)
    distances = Distances({"mean": gram.copy()}, np.ones(len(gram)), alive, rows="ward")
    enough = max(limit.beta * distances.largest, distances.rounding)
    while alive.sum() > limit.width and distances.smallest <= enough:
        m, n = distances.pair()
        distances.merge(m, n)
        groups[m] += groups[n]
        groups[n] = []
    return [sorted(group) for group in groups if group]


def inner_products(prepared: Prepared, data: Any, at: str = "post") -> dict[str, Array]:
    """Wire → Σ a aᵀ of its features over all data, for the wires that can be folded."""
    symmetry = prepared.symmetry
    names = {wire.strand: wire.name for wire in prepared.wires}
    heard = Features(Moving(symmetry.strands, frozenset()), frozenset(names), at)
    watch(symmetry, prepared.model, prepared.model, data, [heard])
    # signs and scales are not told apart, so a wire has its products in one piece
    return {names[s]: products.inner().numpy() for s, kinds in heard.products.items() for products in kinds.values()}


def _limits(prepared: Prepared, beta: Beta | None, widths: Widths | None) -> dict[str, Limit]:
    """What stops each wire; those that are not to be folded are left out."""
    if widths is not None:
        return {name: Limit(width=width) for name, width in wanted_widths(widths, prepared.wires).items()}
    assert beta is not None
    options = Options(beta)
    options.check_wires([wire.name for wire in prepared.wires])
    found = {wire.name: options.beta_of(wire.name) for wire in prepared.wires}
    return {name: Limit(beta=value) for name, value in found.items() if value is not None}


def _check(model: nn.Module, data: Any, beta: Beta | None, widths: Widths | None, statistics: str) -> None:
    """What can be refused before any work."""
    if (beta is None) == (widths is None):
        given = "Neither beta nor widths was" if beta is None else "Both beta and widths were"
        raise InputError(f"{given} given. Give one: beta=0.1 for a stop rule, or widths=0.5 for a share to keep.")
    if beta is not None:
        Options(beta)
    if widths is not None:
        check_share(widths)
    check_statistics(statistics)
    if statistics == "reset" and not batch_norms(model):
        raise InputError(
            "statistics='reset' was asked for, but the network has no BatchNorm layer with running statistics. Leave "
            "it out; repair='variances' works on any network."
        )
    if statistics == "reset":
        check_readable_again(data)


class _Batches:
    """Batches of inputs, with or without targets, as pairs; the first can be looked at before the rest is read."""

    def __init__(self, data: Any) -> None:
        check_batches(data)
        self._data = data

    def peek(self) -> list[Any]:
        """The first batch, in a list; a generator still gives it again."""
        source = iter(self._data)
        first = [_pair(batch) for batch in islice(source, 1)]
        if not first:
            raise InputError("The data holds no batches, so there are no features to compare. Pass at least one.")
        if source is self._data:
            self._data = chain(first, source)
        return first

    def __iter__(self) -> Iterator[Any]:
        return map(_pair, self._data)


def _pair(batch: Any) -> Any:
    return (batch, None) if isinstance(batch, Tensor) else batch
