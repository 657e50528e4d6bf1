"""The verbs: `stitch` fits one stitch between two networks, `stitches` fits many in one run (stitch points x families
x fits x seeds x options), `cross_validate` chooses among families on held-out samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.argument_types import Int
from intertwine.checkpoints.weights import digest
from intertwine.data.batches import calls, on_device_of
from intertwine.data.evaluate import Loss
from intertwine.errors import InputError
from intertwine.stitch.collection import Stitches
from intertwine.stitch.direct import PairMoments
from intertwine.stitch.families.base import DirectFit, MapFamily
from intertwine.stitch.families.names import find_family
from intertwine.stitch.fitting import (
    FitData,
    FitResults,
    TrainingCheckpoints,
    check_readable_again,
    fit_group,
    moments_of,
)
from intertwine.stitch.network import StitchedNetwork
from intertwine.stitch.result import Stitch
from intertwine.stitch.scores import accuracy_of
from intertwine.stitch.split import At, SplitPair
from intertwine.stitch.training import SHARED, ProgressCallback, StitchJob, device_of, recipe_settings

FITS = ("direct", "task")
#: The share of the progress that the pass for moments counts as.
MOMENTS_SHARE = 0.1
#: A batch of (inputs, targets).
Batch = tuple[Tensor, Tensor]


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
    """Join the front of one network to the back of another by a map of features, and score the stitched network.

    Args:
        front, back: the networks; both stay unchanged. at: the stitch point, a module path or one path per network.
        family: identity, linear, affine, orthogonal, permutation, relu (permutations with positive scales),
            "lowrank:4", "sparse:0.01", softsort and more, see `intertwine.stitch.families.names`.
        fit: "direct", in closed form from one pass over the data, or "task", trained on the task's loss.
        data: batches of (inputs, targets) to fit on. test: to score on; `data` by default. seed: of a random start.
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
        raise InputError(f"stitch() fits in one way, but fit={fit!r}. Use stitches() for several.")
    return stitches(front, back, at, family, data=data, test=test, fit=fit, seeds=(seed,), **options)[0]


def stitches(
    front: nn.Module,
    back: nn.Module,
    at: At,
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
    """Stitch two networks at many points, by many families, in one run.

    The front runs once per batch for all stitch points, and stitches at one point share one run of the back. Both
    networks are frozen and stay unchanged.

    Args:
        front, back: the networks whose first and last parts are used. They may be the same one.
        at: a module path, or a pair (path in the front, path in the back), or several. `intertwine.data.layers`
            explains paths: "layer1.0.relu" is the output of an activation, "layer1.0.relu:input" its input.
        families: one or several, see `intertwine.stitch.families.names`.
        data: batches of (inputs, targets) to train on, read more than once; if it has `set_epoch`, that is called
            before every pass. direct_data: for direct fits and BatchNorm statistics, usually the same samples without
            augmentation; `data` by default. test: to score on; `data` by default.
        fit: "direct" (closed form), "task" (trained), or both.
        recipe: "intertwine", "godfrey" or "csiszarik"; options and each of `variants` change single settings of it,
            see `intertwine.stitch.training`.
        seeds: of random starts; a direct fit runs once.
        skip: which network feeds the skip connection at a stitch point inside a residual block: "front" or "back"; None
            chooses the front if both have the same program. resize, layouts: how features of different shapes are
            matched, see `intertwine.stitch.resize`.
        loss: of (outputs, targets), one number or one per sample; replaces cross-entropy in training and scoring, as
            networks that are not classifiers need.
        out: a folder from which a killed run resumes; the data must then come in the same order.
        progress: called with the current activity and the completed share of all work.

    Raises:
        InputError: a path that does not exist, unknown families or options, data that can be read only once.
        MismatchError: features that do not match, a family that has no map between these numbers of channels.

    Example:
        >>> import torch
        >>> import intertwine
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> batch = torch.randn(32, 3), torch.randint(2, (32,))
        >>> found = intertwine.stitches(net, net, ["0", "1"], ["identity", "linear"], data=[batch], fit="direct")
        >>> [one.penalty for one in found]
        [0.0, 0.0, 0.0, 0.0]
    """
    test, direct_data = (data if one is None else one for one in (test, direct_data))
    for one in (data, test, direct_data):
        check_readable_again(one)
    progress = progress or (lambda doing, part: None)
    example = next(iter(calls(data)), None)
    if example is None:
        raise InputError("The data of stitching has no batches. Pass batches of (inputs, targets).")
    split = SplitPair(front, back, at, on_device_of(example, back), skip=skip, resize=resize, layouts=layouts)
    jobs = _jobs(split, families, fit, recipe, seeds, variants, options)
    moments: tuple[PairMoments, ...] | None = None
    if any(job.settings.start == "direct" or isinstance(job.family, DirectFit) for job in jobs):
        moments = moments_of(split, direct_data, lambda part: progress("computing moments", MOMENTS_SHARE * part))
    for job in jobs:
        _start(job, split, moments)
    plan = {} if out is None else _plan(split, jobs, loss)
    store = TrainingCheckpoints(None if out is None else Path(out), plan)
    results = _fit_jobs(split, jobs, FitData(data, direct_data, test, loss), store, progress)
    with split.running():
        accuracies = accuracy_of(front, test), accuracy_of(back, test)
    about = {"recipe": recipe, "scored_on": "data" if test is data else "test"}
    if loss is not None:
        about["loss_function"] = _name_of(loss)
    return Stitches(_stitch_of(split, job, results, about, accuracies) for job in jobs)


def _name_of(loss: Loss) -> str:
    kind = loss if hasattr(loss, "__qualname__") else type(loss)
    return f"{kind.__module__}.{kind.__qualname__}"


def _fit_jobs(
    split: SplitPair, jobs: Sequence[StitchJob], data: FitData, store: TrainingCheckpoints, progress: ProgressCallback
) -> FitResults:
    """Fit all jobs; those with the same settings of a whole pass are fitted together."""
    groups: dict[tuple[Any, ...], list[StitchJob]] = {}
    for job in jobs:
        groups.setdefault(tuple(getattr(job.settings, name) for name in SHARED), []).append(job)
    results, done = FitResults(), 0
    for number, group in enumerate(groups.values()):

        def group_progress(doing: str, part: float, done: int = done, size: int = len(group)) -> None:
            progress(doing, MOMENTS_SHARE + (1 - MOMENTS_SHARE) * (done + part * size) / len(jobs))

        found = fit_group(split, group, data, store, number, group_progress)
        results.last |= found.last
        results.best |= found.best
        done += len(group)
    return results


def _jobs(
    split: SplitPair,
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
            raise InputError(f"Unknown fit {one!r}. Choose one of: {', '.join(FITS)}.")
    jobs: list[StitchJob] = []
    numbers = list(seeds)
    for point, family, how in product(range(len(split.points)), chosen, fits):
        family.check(split.points[point].inputs, split.points[point].outputs)
        if how == "direct":
            settings = recipe_settings(recipe, family.name, options)
            jobs.append(StitchJob(len(jobs), point, DirectFit(family), 0, settings))
            continue
        for variant, seed in product(variants, numbers):
            settings = recipe_settings(recipe, family.name, {**options, **variant})
            jobs.append(StitchJob(len(jobs), point, family, seed, settings))
    if not jobs:
        raise InputError("There is no stitch to fit. Give at least one path, one family, one fit and one seed.")
    return jobs


def _start(job: StitchJob, split: SplitPair, moments: Sequence[PairMoments] | None) -> None:
    """Set the initial parameters of a job, on the device of the back network."""
    point, rng = split.points[job.point], torch.Generator().manual_seed(job.seed)
    known = None if moments is None else moments[job.point]
    found = job.family.start(point.inputs, point.outputs, job.settings.start, known, rng)
    double = any(t.dtype == torch.float64 for t in split.back_model.parameters())
    device, dtype = device_of(split.back_model), torch.float64 if double else torch.float32
    job.parameters = {
        name: tensor.detach().to(device, dtype).requires_grad_(tensor.requires_grad) for name, tensor in found.items()
    }


def _stitch_of(
    split: SplitPair,
    job: StitchJob,
    results: FitResults,
    about: Mapping[str, str],
    accuracies: tuple[float | None, float | None],
) -> Stitch:
    best = results.best[job.number] if job.settings.score_every else None
    kept = best if best is not None and job.settings.select == "best" else results.last[job.number]
    settings, family = job.settings.to_dict() | {"seed": job.seed}, job.family
    if isinstance(family, DirectFit):
        settings, family = {name: settings[name] for name in ("norm", "precision")}, family.family
    return Stitch(
        model=StitchedNetwork(split, job.point, kept.map, kept.statistics),
        point=split.points[job.point],
        family=job.family.name,
        fit="direct" if isinstance(job.family, DirectFit) else "task",
        map=kept.map,
        scores=kept.scores,
        front_accuracy=accuracies[0],
        back_accuracy=accuracies[1],
        history=tuple(job.history),
        settings=settings | about | asdict(family),  # pyrefly: ignore
        best=None if best is None else best.scores,
        diverged=job.diverged,
    )


def _plan(split: SplitPair, jobs: Sequence[StitchJob], loss: Loss | None) -> dict[str, Any]:
    """What must be the same for a run to resume."""
    return ({} if loss is None else {"loss": _name_of(loss)}) | {
        "front": digest(split.front_model),
        "back": digest(split.back_model),
        "cuts": [[point.front, point.back, point.skip] for point in split.points],
        "jobs": [[job.point, repr(job.family), job.seed] for job in jobs],
        "settings": [job.settings.to_dict() for job in jobs],
    }


# -- cross-validation --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A family and the settings it is tried with."""

    family: MapFamily
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join([repr(self.family), *(f"{name}={value}" for name, value in self.settings.items())])


@dataclass(frozen=True, eq=False)
class CrossValidationResult:
    """The choice at one stitch point.

    Attributes:
        candidates: all that were tried. accuracies: of each on the held-out samples.
        chosen: the number of the best one, the first of several. stitch: the best one, fitted on all samples.
    """

    candidates: tuple[Candidate, ...]
    accuracies: tuple[float, ...]
    chosen: int
    stitch: Stitch

    @property
    def candidate(self) -> Candidate:
        """The chosen candidate."""
        return self.candidates[self.chosen]

    def to_dict(self) -> dict[str, Any]:
        """All candidates, and the stitch of the best, as plain data."""
        tried = [{"candidate": str(c), "accuracy": a} for c, a in zip(self.candidates, self.accuracies, strict=True)]
        return {"chosen": str(self.candidate), "tried": tried, "stitch": self.stitch.to_dict()}

    def __repr__(self) -> str:
        accuracy = f"accuracy {self.accuracies[self.chosen]:.4f} on held-out samples"
        count = f"best of {len(self.candidates)} candidates"
        return f"CrossValidationResult({self.stitch.place}: {self.candidate}, {accuracy}, {count})"


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
    """Try every family with every variant on one part of the samples, and fit the best at each point on all of them.

    One permutation divides the samples, so that the parts never overlap. (The published code of Godfrey et al. 2022,
    who choose their α this way, draws two permutations, and its parts overlap.)

    Args:
        front, back, at: as in `stitches`. families, variants: each family with each variant is one candidate.
        data: batches of (inputs, targets) for the final fit. It is read once to divide it.
        parts: the two parts, for data that is augmented, or whose inputs are not one tensor; `split_samples` gives the
            samples of each.
        direct_data, test: as in `stitches`, for the final fit.
        trial: settings of the trials alone, such as fewer epochs; {"epochs": 5} by default, as in Godfrey et al.
        share: of the samples in the first part. seed: of the permutation, and of random starts.
        out: a folder from which a killed run resumes.
        options: as in `stitches`, for the trials and the final fit.

    Returns:
        One choice per stitch point.

    Raises:
        InputError: fewer than two candidates, a share that leaves a part empty, or batches that cannot be divided.

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
    if len(candidates) < 2:
        raise InputError(
            f"Cross-validation needs at least two candidates, but has {len(candidates)}. Give several families or "
            "variants, or use stitch()."
        )
    if "seeds" in options or not isinstance(options.get("fit", "task"), str):
        raise InputError(
            "Cross-validation fits every candidate once, in one way. Give seed=, a number, instead of seeds=, and one "
            'fit, "task" or "direct".'
        )
    first, held_out = parts if parts is not None else split_batches(data, share, seed)
    settings: dict[str, Any] = {"seeds": (seed,), **options}
    shorter: dict[str, Any] = settings | dict({"epochs": 5} if trial is None else trial)
    folder = None if out is None else Path(out)
    trials = stitches(
        front, back, at, [find_family(one) for one in families], data=first, test=held_out, variants=variants,
        out=None if folder is None else folder / "trials", **shorter,
    )  # fmt: skip
    rows = [trials[i : i + len(candidates)] for i in range(0, len(trials), len(candidates))]
    points = [(row[0].point.front, row[0].point.back) for row in rows]
    accuracies = [tuple(map(_accuracy, row)) for row in rows]
    chosen = [max(range(len(candidates)), key=lambda i: (row[i], -i)) for row in accuracies]
    final: dict[int, Stitch] = {}
    for number in sorted(set(chosen)):
        here = [i for i, one in enumerate(chosen) if one == number]
        found = stitches(
            front, back, [points[i] for i in here], candidates[number].family, data=data, direct_data=direct_data,
            test=test, variants=[candidates[number].settings],
            out=None if folder is None else folder / f"candidate{number}", **settings,
        )  # fmt: skip
        final |= dict(zip(here, found, strict=True))
    return tuple(CrossValidationResult(candidates, accuracies[i], chosen[i], final[i]) for i in range(len(rows)))


def split_samples(
    samples: int, share: float = 0.8, seed: int = 0
) -> tuple[Int[Tensor, " first"], Int[Tensor, " second"]]:
    """The indices of the samples of two parts, from one permutation.

    Args:
        samples: how many there are. share: of them in the first part. seed: of the permutation.

    Example:
        >>> first, second = split_samples(10, 0.8, seed=0)
        >>> len(first), len(second), sorted((first.tolist() + second.tolist()))
        (8, 2, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    size = round(share * samples)
    if not 0 < size < samples:
        raise InputError(
            f"A share of {share} divides {samples} samples into {size} and {samples - size}, but both parts need at "
            "least one. Give another share, or more samples."
        )
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    return order[:size], order[size:]


def split_batches(data: Any, share: float = 0.8, seed: int = 0) -> tuple[list[Batch], list[Batch]]:
    """The samples of some batches in two parts, in batches of the first one's size.

    Args:
        data: batches of (inputs, targets), both tensors. share, seed: as in `split_samples`.

    Example:
        >>> import torch
        >>> first, second = split_batches([(torch.arange(10.0)[:, None], torch.arange(10))], 0.7)
        >>> [len(part[0][1]) for part in (first, second)]
        [7, 3]
    """
    read = [(batch[0], batch[1]) for batch in data]
    wrong = next((x for batch in read for x in batch if not isinstance(x, Tensor)), None)
    if wrong is not None or not read:
        found = "has no batch" if wrong is None else f"holds a {type(wrong).__name__}"
        raise InputError(
            f"Cross-validation divides batches of two tensors, but the data {found}. Divide it yourself with "
            "split_samples(), and pass parts=(first, second)."
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
            "Cross-validation chooses by accuracy, but the targets are not classes. Fit the candidates with "
            "stitches(), and choose with Stitches.best('loss')."
        )
    return stitch.accuracy
