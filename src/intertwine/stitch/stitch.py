"""The verbs: `stitch` fits one stitch between two networks, `stitches` fits many in one run (stitch points x families
x fits x seeds x options), `cross_validate` chooses among families on held-out samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.argument_types import Int
from intertwine.checkpoints.weights import digest
from intertwine.data.batches import Call, calls, on_device_of
from intertwine.data.evaluate import Loss
from intertwine.errors import InputError
from intertwine.stitch.collection import Stitches
from intertwine.stitch.direct import PairMoments
from intertwine.stitch.families.base import DirectFit, MapFamily
from intertwine.stitch.families.names import find_family
from intertwine.stitch.fitting import (
    FitData,
    FitResults,
    FittedMap,
    TrainingCheckpoints,
    check_readable_again,
    fit_group,
    moments_of,
)
from intertwine.stitch.network import StitchedNetwork
from intertwine.stitch.result import Stitch
from intertwine.stitch.scores import accuracy_of
from intertwine.stitch.split import At, SplitPair
from intertwine.stitch.training import SHARED, StitchJob, device_of, recipe_settings

# ----------------------------------------------------------------------------------------------------
# Many stitches of one pair of networks in one run: cuts × families × fits × seeds × options.


FITS = ("direct", "task")
#: The share of all work that the pass for moments is counted as.
MOMENTS_SHARE = 0.1
ProgressCallback = Callable[[str, float], None]  # hears what is being done, and which part of the whole work is behind


def stitches(
    front: nn.Module,
    back: nn.Module,
    at: str | tuple[str, str] | Sequence[str | tuple[str, str]],
    families: str | MapFamily | Sequence[str | MapFamily] = "linear",
    *,
    data: Any,
    direct_data: Any | None = None,
    test: Any | None = None,
    fit: str | Sequence[str] = "task",
    recipe: str = "intertwine",
    seeds: Iterable[int] = (0,),
    variants: Sequence[Mapping[str, Any]] = ({},),
    skip: str | None = None,
    resize: str = "bilinear",
    layouts: Mapping[str, str] | None = None,
    loss: Loss | None = None,
    out: str | Path | None = None,
    progress: ProgressCallback | None = None,
    **options: Any,
) -> Stitches:
    """Stitch two networks at many places, by many families, in one run.

    The front runs once per batch for all cuts, and stitches that share a cut share one run of the back. Both networks
    are frozen and stay as they are.

    Args:
        front, back: the networks whose first and last parts are used. They may be the same one.
        at: a module path, or a pair (path in the front, path in the back), or several. `features.places` explains
            paths: "layer1.0.relu" is behind an activation, "layer1.0.relu:input" before it.
        families: one or several, see `intertwine.stitch.families.names`.
        data: batches of (inputs, targets) to train on, read more than once; where it has `set_epoch`, that is called
            before every pass. direct_data: for direct fits and BatchNorm statistics, usually the same samples without
            augmentation; `data` where None. test: to score on; `data` where None.
        fit: "direct" (closed form), "task" (trained), or both.
        recipe: "intertwine", "godfrey" or "csiszarik"; options and each of `variants` change single settings of it,
            see `intertwine.stitch.training`.
        seeds: of random starts; a direct fit is made once.
        skip: what goes around a cut inside a residual block: the "front" network's values, the "back" network's own;
            None chooses the front's where both have the same program. resize, layouts: how features meet, see
            `intertwine.stitch.resize`.
        loss: of (outputs, targets), one number or one per sample; stitches are trained and scored by it in the place
            of cross-entropy, such as those of networks that tell no classes.
        out: a folder from which a killed run goes on; data must come in the same order then.
        progress: called with what is being done and which part of all work is behind.

    Raises:
        InputError: a path that does not exist, unknown families or options, data that can be read once only.
        MismatchError: features that cannot meet, a family that has no map between so many channels.

    Example:
        >>> import torch
        >>> import intertwine
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> batch = torch.randn(32, 3), torch.randint(2, (32,))
        >>> found = intertwine.stitches(net, net, ["0", "1"], ["identity", "linear"], data=[batch], fit="direct")
        >>> [one.penalty for one in found]
        [0.0, 0.0, 0.0, 0.0]
    """
    check_readable_again(data)
    test, direct_data = (data if one is None else one for one in (test, direct_data))
    check_readable_again(test)
    check_readable_again(direct_data)
    tell = progress or (lambda doing, part: None)
    splice = SplitPair(front, back, at, on_device_of(_example(data), back), skip=skip, resize=resize, layouts=layouts)
    jobs = _jobs(splice, families, fit, recipe, seeds, variants, options)
    moments: tuple[PairMoments, ...] | None = None
    if any(job.settings.start == "direct" or isinstance(job.family, DirectFit) for job in jobs):
        moments = moments_of(splice, direct_data, lambda part: tell("taking moments", MOMENTS_SHARE * part))
    for job in jobs:
        _begin(job, splice, moments)
    store = TrainingCheckpoints(None, {}) if out is None else TrainingCheckpoints(Path(out), _plan(splice, jobs, loss))
    results = _fitted(splice, jobs, FitData(data, direct_data, test, loss), store, tell)
    with splice.running():
        whole = accuracy_of(front, test), accuracy_of(back, test)
    about = {"recipe": recipe, "scored_on": "data" if test is data else "test"}
    if loss is not None:
        about["loss_function"] = _named(loss)
    return Stitches(_outcome(splice, job, results, about, whole) for job in jobs)


def _named(loss: Loss) -> str:
    """What a loss is known by in records."""
    kind = loss if hasattr(loss, "__qualname__") else type(loss)
    return f"{kind.__module__}.{kind.__qualname__}"


def _example(data: Any) -> Call:
    """The first batch, which shows what the networks are called with."""
    example = next(iter(calls(data)), None)
    if example is None:
        raise InputError("Stitching was asked for on data without batches. Pass batches of (inputs, targets).")
    return example


def _fitted(
    splice: SplitPair, jobs: Sequence[StitchJob], sources: FitData, store: TrainingCheckpoints, tell: ProgressCallback
) -> FitResults:
    """Fit all jobs; those that agree in the settings that concern a whole pass are fitted together."""
    groups: dict[tuple[Any, ...], list[StitchJob]] = {}
    for job in jobs:
        groups.setdefault(tuple(getattr(job.settings, name) for name in SHARED), []).append(job)
    results, done = FitResults(), 0
    for number, group in enumerate(groups.values()):
        part = _part_of(tell, done / len(jobs), len(group) / len(jobs))
        found = fit_group(splice, group, sources, store, number, part)
        results.last |= found.last
        results.best |= found.best
        done += len(group)
    return results


def _part_of(tell: ProgressCallback, behind: float, size: float) -> ProgressCallback:
    """What hears of a group, as a part of all groups."""
    return lambda doing, part: tell(doing, MOMENTS_SHARE + (1 - MOMENTS_SHARE) * (behind + part * size))


def _jobs(
    splice: SplitPair,
    families: str | MapFamily | Sequence[str | MapFamily],
    fit: str | Sequence[str],
    recipe: str,
    seeds: Iterable[int],
    variants: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> list[StitchJob]:
    chosen = [find_family(one) for one in ([families] if isinstance(families, (str, MapFamily)) else families)]
    fits = [fit] if isinstance(fit, str) else list(fit)
    for one in fits:
        if one not in FITS:
            raise InputError(f"A stitch was to be fitted by {one!r}; it is fitted by {' or '.join(FITS)}.")
    found: list[StitchJob] = []
    numbers = list(seeds)
    for cut, family, how in product(range(len(splice.cuts)), chosen, fits):
        family.check(splice.cuts[cut].inputs, splice.cuts[cut].outputs)
        if how == "direct":
            settings = recipe_settings(recipe, family.name, dict(options))
            found.append(StitchJob(len(found), cut, DirectFit(family), 0, settings))
            continue
        for variant, seed in product(variants, numbers):
            settings = recipe_settings(recipe, family.name, {**options, **variant})
            found.append(StitchJob(len(found), cut, family, seed, settings))
    if not found:
        raise InputError("No stitch was asked for: give at least one place, one family, one fit and one seed.")
    return found


def _begin(job: StitchJob, splice: SplitPair, moments: Sequence[PairMoments] | None) -> None:
    """The parameters a job starts from, on the device of the back network."""
    cut = splice.cuts[job.cut]
    generator = torch.Generator().manual_seed(job.seed)
    known = None if moments is None else moments[job.cut]
    found = job.family.start(cut.inputs, cut.outputs, job.settings.start, known, generator)
    device, exact = device_of(splice.back_model), any(t.dtype == torch.float64 for t in splice.back_model.parameters())
    dtype = torch.float64 if exact else torch.float32
    job.parameters = {
        name: tensor.detach().to(device, dtype).requires_grad_(tensor.requires_grad) for name, tensor in found.items()
    }


def _outcome(
    splice: SplitPair,
    job: StitchJob,
    results: FitResults,
    about: Mapping[str, str],
    whole: tuple[float | None, float | None],
) -> Stitch:
    best: FittedMap | None = results.best[job.number] if job.settings.score_every else None
    kept = best if best is not None and job.settings.select == "best" else results.last[job.number]
    settings = job.settings.to_dict() | {"seed": job.seed}
    if isinstance(job.family, DirectFit):
        settings = {name: settings[name] for name in ("norm", "precision")}
    settings |= about
    settings |= asdict(job.family.family if isinstance(job.family, DirectFit) else job.family)  # pyrefly: ignore
    return Stitch(
        model=StitchedNetwork(splice, job.cut, kept.map, kept.statistics),
        cut=splice.cuts[job.cut],
        family=job.family.name,
        fit="direct" if isinstance(job.family, DirectFit) else "task",
        map=kept.map,
        scores=kept.scores,
        front_accuracy=whole[0],
        back_accuracy=whole[1],
        history=tuple(job.history),
        settings=settings,
        best=None if best is None else best.scores,
        diverged=job.diverged,
    )


def _plan(splice: SplitPair, jobs: Sequence[StitchJob], loss: Loss | None) -> dict[str, Any]:
    """What must be the same for a run to be taken up again."""
    own = {} if loss is None else {"loss": _named(loss)}
    return own | {
        "front": digest(splice.front_model),
        "back": digest(splice.back_model),
        "cuts": [[cut.front, cut.back, cut.skip] for cut in splice.cuts],
        "jobs": [[job.cut, repr(job.family), job.seed] for job in jobs],
        "settings": [job.settings.to_dict() for job in jobs],
    }


# ----------------------------------------------------------------------------------------------------
# One stitch of two networks: the front of one, a map, the back of the other.


def stitch(
    front: nn.Module,
    back: nn.Module,
    at: str | tuple[str, str],
    family: str | MapFamily = "linear",
    fit: str = "task",
    *,
    data: Any,
    test: Any | None = None,
    seed: int = 0,
    **options: Any,
) -> Stitch:
    """Join the front of one network to the back of another by a map of features, and see how well that works.

    Args:
        front, back: the networks; both stay as they are. at: where to cut, a module path or one in each network.
        family: identity, linear, affine, orthogonal, permutation, relu (permutations with positive scales),
            "lowrank:4", "sparse:0.01", softsort and more, see `intertwine.stitch.families.names`.
        fit: "direct", in closed form from one pass over the data, or "task", trained on the task's loss.
        data: batches of (inputs, targets) to fit on. test: to score on; the same where None.
        options: as in `stitches`: recipe, epochs, targets, start, norm, skip, loss, out, progress and others.

    Example:
        >>> import torch
        >>> import intertwine
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> symmetry = intertwine.symmetry(net, torch.zeros(1, 3))
        >>> moved = symmetry.act(symmetry.random(seed=1), net)
        >>> data = [(torch.randn(64, 3), torch.randint(2, (64,)))]
        >>> found = intertwine.stitch(moved, net, "1", family="relu", fit="direct", data=data)
        >>> found.penalty
        0.0
    """
    if not isinstance(fit, str):
        raise InputError(f"One stitch is fitted in one way, but {fit!r} was asked for. Use stitches() for several.")
    return stitches(front, back, at, family, data=data, test=test, fit=fit, seeds=(seed,), **options)[0]


# ----------------------------------------------------------------------------------------------------
# Cross-validation: which of several families or settings does best on samples it was not fitted on.
#
# The samples are cut by one permutation into a part to fit on and a part to choose by, so that the two never overlap.
# (The published code of Godfrey et al. 2022, who choose their α this way, draws two permutations, and its parts do.)


#: Samples behind a batch, as (inputs, targets).
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Candidate:
    """A family and the settings it is tried with."""

    family: MapFamily
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.settings.items()]
        return ", ".join([repr(self.family), *words])


@dataclass(frozen=True, eq=False)
class CrossValidationResult:
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
    families: Sequence[str | MapFamily],
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
) -> tuple[CrossValidationResult, ...]:
    """Try every family with every variant on one part of the samples, and fit the best at each place on all of them.

    Args:
        front, back, at: as in `stitches`. families, variants: each family with each variant is one candidate.
        data: batches of (inputs, targets) the chosen one is fitted on. It is read once to cut it in two.
        parts: the two parts, where they are to be cut otherwise: data that is augmented, or whose inputs are not one
            tensor. `split_samples` gives the samples of each.
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
    fitted_on, held_back = parts if parts is not None else split_batches(data, share, seed)
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
    return tuple(CrossValidationResult(candidates, accuracies[i], chosen[i], final[i]) for i in range(len(places)))


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


def split_samples(
    samples: int, share: float = 0.8, seed: int = 0
) -> tuple[Int[Tensor, " first"], Int[Tensor, " second"]]:
    """The numbers of the samples of two parts: one permutation, cut once.

    Example:
        >>> first, second = split_samples(10, 0.8, seed=0)
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


def split_batches(data: Any, share: float = 0.8, seed: int = 0) -> tuple[list[Batch], list[Batch]]:
    """The samples of some batches in two parts, in batches of the first one's size.

    Example:
        >>> import torch
        >>> first, second = split_batches([(torch.arange(10.0)[:, None], torch.arange(10))], 0.7)
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
        for part in split_samples(len(targets), share, seed)
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
