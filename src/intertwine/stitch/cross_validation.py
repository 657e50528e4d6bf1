"""Cross-validation: which of several families or settings does best on samples it was not fitted on.

The samples are cut by one permutation into a part to fit on and a part to choose by, so that the two never overlap.
(The published code of Godfrey et al. 2022, who choose their α this way, draws two permutations, and its parts do.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.errors import InputError
from intertwine.shapes import Int
from intertwine.stitch.cut import At
from intertwine.stitch.family import Family, find_family
from intertwine.stitch.many import stitches
from intertwine.stitch.outcome import Stitch

#: Samples behind a batch, as (inputs, targets).
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Candidate:
    """A family and the settings it is tried with."""

    family: Family
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.settings.items()]
        return ", ".join([repr(self.family), *words])


@dataclass(frozen=True, eq=False)
class Choice:
    """What was chosen at one place.

    Attributes:
        candidates: all that were tried. accuracies: of each on the samples held back.
        chosen: the number of the best one, the first of several. stitch: it, fitted on all samples.
    """

    candidates: tuple[Candidate, ...]
    accuracies: tuple[float, ...]
    chosen: int
    stitch: Stitch

    @property
    def candidate(self) -> Candidate:
        """The one that was chosen."""
        return self.candidates[self.chosen]

    def to_dict(self) -> dict[str, Any]:
        """All candidates, and the stitch of the best, as plain data."""
        tried = [{"candidate": str(c), "accuracy": a} for c, a in zip(self.candidates, self.accuracies, strict=True)]
        return {"chosen": str(self.candidate), "tried": tried, "stitch": self.stitch.to_dict()}

    def __repr__(self) -> str:
        held = f"{self.accuracies[self.chosen]:.4f} of the samples held back"
        return f"Choice({self.stitch.place}: {self.candidate}, {held}, of {len(self.candidates)} candidates)"


def cross_validate(
    front: nn.Module,
    back: nn.Module,
    at: At,
    families: Sequence[str | Family],
    *,
    data: Any,
    parts: tuple[Any, Any] | None = None,
    direct_data: Any | None = None,
    test: Any | None = None,
    variants: Sequence[Mapping[str, Any]] = ({},),
    trial: Mapping[str, Any] | None = None,
    share: float = 0.8,
    seed: int = 0,
    out: str | Path | None = None,
    **options: Any,
) -> tuple[Choice, ...]:
    """Try every family with every variant on one part of the samples, and fit the best at each place on all of them.

    Args:
        front, back, at: as in `stitches`. families, variants: each family with each variant is one candidate.
        data: batches of (inputs, targets) the chosen one is fitted on. It is read once to cut it in two.
        parts: the two parts, where they are to be cut otherwise: data that is augmented, or whose inputs are not one
            tensor. `split` gives the samples of each.
        direct_data, test: as in `stitches`, for the final fit.
        trial: settings of the trials alone, such as fewer epochs; {"epochs": 5} where None is given, as in paper 0.
        share: of the samples in the first part. seed: of the permutation, and of random starts.
        options: as in `stitches`, for the trials and the final fit alike.

    Returns:
        One choice per place.

    Raises:
        InputError: fewer than two candidates, a share that leaves a part empty, or batches that cannot be cut.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))
        >>> x = torch.randn(500, 3)
        >>> data = [(x, net(x).argmax(1))]
        >>> (found,) = cross_validate(net, net, "1", ["lowrank:1", "identity"], data=data, epochs=1, rate=1e-6)
        >>> found.candidate.family.name, found.accuracies[1], found.stitch.accuracy
        ('identity', 1.0, 1.0)
    """
    candidates = tuple(Candidate(find_family(one), dict(two)) for one, two in product(families, variants))
    _check(candidates, options)
    fitted_on, held_back = parts if parts is not None else cut_samples(data, share, seed)
    tried: dict[str, Any] = {"seeds": (seed,), **options}
    shorter: dict[str, Any] = {**tried, **({"epochs": 5} if trial is None else trial)}
    trials = stitches(
        front, back, at, [find_family(one) for one in families], data=fitted_on, test=held_back, variants=variants,
        out=_inside(out, "trials"), **shorter,
    )  # fmt: skip
    places = [trials[i : i + len(candidates)] for i in range(0, len(trials), len(candidates))]
    cuts = [(place[0].cut.front, place[0].cut.back) for place in places]
    accuracies = [tuple(map(_accuracy, place)) for place in places]
    chosen = [max(range(len(candidates)), key=lambda i: (row[i], -i)) for row in accuracies]
    final: dict[int, Stitch] = {}
    for number in sorted(set(chosen)):
        here = [i for i, one in enumerate(chosen) if one == number]
        candidate = candidates[number]
        found = stitches(
            front, back, [cuts[i] for i in here], candidate.family, data=data, direct_data=direct_data, test=test,
            variants=[candidate.settings], out=_inside(out, f"candidate{number}"), **tried,
        )  # fmt: skip
        final |= dict(zip(here, found, strict=True))
    return tuple(Choice(candidates, accuracies[i], chosen[i], final[i]) for i in range(len(places)))


def _check(candidates: Sequence[Candidate], options: Mapping[str, Any]) -> None:
    """Refuse what leaves nothing to choose, or fits a candidate more than once."""
    if len(candidates) < 2:
        raise InputError(
            f"Cross-validation was asked for with {len(candidates)} candidates, so there is nothing to choose. Give "
            "two or more families or variants, or use stitch()."
        )
    if "seeds" in options or not isinstance(options.get("fit", "task"), str):
        raise InputError(
            "Cross-validation fits every candidate once, in one way: give seed=, a number, in place of seeds=, and one "
            'fit, "task" or "direct".'
        )


def split(samples: int, share: float = 0.8, seed: int = 0) -> tuple[Int[Tensor, " first"], Int[Tensor, " second"]]:
    """The numbers of the samples of two parts: one permutation, cut once.

    Example:
        >>> first, second = split(10, 0.8, seed=0)
        >>> len(first), len(second), sorted((first.tolist() + second.tolist()))
        (8, 2, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    size = round(share * samples)
    if not 0 < size < samples:
        raise InputError(
            f"{samples} samples were to be cut with a share of {share} in the first part, which leaves {size} there "
            f"and {samples - size} in the second. Both need at least one: give another share, or more samples."
        )
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    return order[:size], order[size:]


def cut_samples(data: Any, share: float = 0.8, seed: int = 0) -> tuple[list[Batch], list[Batch]]:
    """The samples of some batches in two parts, in batches of the first one's size.

    Example:
        >>> import torch
        >>> first, second = cut_samples([(torch.arange(10.0)[:, None], torch.arange(10))], 0.7)
        >>> [len(part[0][1]) for part in (first, second)]
        [7, 3]
    """
    read = [(batch[0], batch[1]) for batch in data]
    wrong = next((x for batch in read for x in batch if not isinstance(x, Tensor)), None)
    if wrong is not None or not read:
        found = "no batch" if wrong is None else f"a {type(wrong).__name__} among them"
        raise InputError(
            f"Data was to be cut in two for cross-validation, which needs batches of two tensors; found {found}. Cut "
            "it yourself with split(), and pass parts=(first, second)."
        )
    inputs, targets = (torch.cat([batch[i] for batch in read]) for i in (0, 1))
    size = len(read[0][1])
    first, second = (
        [(inputs[some], targets[some]) for some in part.to(inputs.device).split(size)]
        for part in split(len(targets), share, seed)
    )
    return first, second


def _accuracy(stitch: Stitch) -> float:
    if stitch.accuracy is None:
        raise InputError(
            "Cross-validation chooses by accuracy, but the targets are no classes. Fit the candidates with stitches(), "
            "and choose with Stitches.best('loss')."
        )
    return stitch.accuracy


def _inside(folder: str | Path | None, name: str) -> Path | None:
    return None if folder is None else Path(folder) / name
