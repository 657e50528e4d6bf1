"""Many stitches of one pair of networks in one run: cuts × families × fits × seeds × options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from intertwine.checkpoint import digest
from intertwine.errors import InputError
from intertwine.features.batches import Call, calls, placed
from intertwine.features.scoring import Loss
from intertwine.stitch.collection import Stitches
from intertwine.stitch.family import Family, find_family
from intertwine.stitch.fitting import Fitted, Results, Sources, fit_group
from intertwine.stitch.fixed import Fixed
from intertwine.stitch.jobs import Job
from intertwine.stitch.moments import Moments
from intertwine.stitch.outcome import Stitch
from intertwine.stitch.passes import accuracy_of, check_readable_again, moments_of
from intertwine.stitch.settings import SHARED, of_recipe
from intertwine.stitch.splice import Splice
from intertwine.stitch.stitched import StitchedNetwork
from intertwine.stitch.store import Store
from intertwine.stitch.training import device_of

FITS = ("direct", "task")
#: The share of all work that the pass for moments is counted as.
MOMENTS = 0.1
Progress = Callable[[str, float], None]  # hears what is being done, and which part of the whole work is behind


def stitches(
    front: nn.Module,
    back: nn.Module,
    at: str | tuple[str, str] | Sequence[str | tuple[str, str]],
    families: str | Family | Sequence[str | Family] = "linear",
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
    progress: Progress | None = None,
    **options: Any,
) -> Stitches:
    """Stitch two networks at many places, by many families, in one run.

    The front runs once per batch for all cuts, and stitches that share a cut share one run of the back. Both networks
    are frozen and stay as they are.

    Args:
        front, back: the networks whose first and last parts are used. They may be the same one.
        at: a module path, or a pair (path in the front, path in the back), or several. `features.places` explains
            paths: "layer1.0.relu" is behind an activation, "layer1.0.relu:input" before it.
        families: one or several, see `intertwine.stitch.family`.
        data: batches of (inputs, targets) to train on, read more than once; where it has `set_epoch`, that is called
            before every pass. direct_data: for direct fits and BatchNorm statistics, usually the same samples without
            augmentation; `data` where None. test: to score on; `data` where None.
        fit: "direct" (closed form), "task" (trained), or both.
        recipe: "intertwine", "godfrey" or "csiszarik"; options and each of `variants` change single settings of it,
            see `intertwine.stitch.settings`.
        seeds: of random starts; a direct fit is made once.
        skip: what goes around a cut inside a residual block: the "front" network's values, the "back" network's own;
            None chooses the front's where both have the same program. resize, layouts: how features meet, see
            `intertwine.stitch.meeting`.
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
    splice = Splice(front, back, at, placed(_example(data), back), skip=skip, resize=resize, layouts=layouts)
    jobs = _jobs(splice, families, fit, recipe, seeds, variants, options)
    moments: tuple[Moments, ...] | None = None
    if any(job.settings.start == "direct" or isinstance(job.family, Fixed) for job in jobs):
        moments = moments_of(splice, direct_data, lambda part: tell("taking moments", MOMENTS * part))
    for job in jobs:
        _begin(job, splice, moments)
    store = Store(None, {}) if out is None else Store(Path(out), _plan(splice, jobs, loss))
    results = _fitted(splice, jobs, Sources(data, direct_data, test, loss), store, tell)
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


def _fitted(splice: Splice, jobs: Sequence[Job], sources: Sources, store: Store, tell: Progress) -> Results:
    """Fit all jobs; those that agree in the settings that concern a whole pass are fitted together."""
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault(tuple(getattr(job.settings, name) for name in SHARED), []).append(job)
    results, done = Results(), 0
    for number, group in enumerate(groups.values()):
        part = _part_of(tell, done / len(jobs), len(group) / len(jobs))
        found = fit_group(splice, group, sources, store, number, part)
        results.last |= found.last
        results.best |= found.best
        done += len(group)
    return results


def _part_of(tell: Progress, behind: float, size: float) -> Progress:
    """What hears of a group, as a part of all groups."""
    return lambda doing, part: tell(doing, MOMENTS + (1 - MOMENTS) * (behind + part * size))


def _jobs(
    splice: Splice,
    families: str | Family | Sequence[str | Family],
    fit: str | Sequence[str],
    recipe: str,
    seeds: Iterable[int],
    variants: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> list[Job]:
    chosen = [find_family(one) for one in ([families] if isinstance(families, (str, Family)) else families)]
    fits = [fit] if isinstance(fit, str) else list(fit)
    for one in fits:
        if one not in FITS:
            raise InputError(f"A stitch was to be fitted by {one!r}; it is fitted by {' or '.join(FITS)}.")
    found: list[Job] = []
    numbers = list(seeds)
    for cut, family, how in product(range(len(splice.cuts)), chosen, fits):
        family.check(splice.cuts[cut].inputs, splice.cuts[cut].outputs)
        if how == "direct":
            settings = of_recipe(recipe, family.name, dict(options))
            found.append(Job(len(found), cut, Fixed(family), 0, settings))
            continue
        for variant, seed in product(variants, numbers):
            settings = of_recipe(recipe, family.name, {**options, **variant})
            found.append(Job(len(found), cut, family, seed, settings))
    if not found:
        raise InputError("No stitch was asked for: give at least one place, one family, one fit and one seed.")
    return found


def _begin(job: Job, splice: Splice, moments: Sequence[Moments] | None) -> None:
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
    splice: Splice, job: Job, results: Results, about: Mapping[str, str], whole: tuple[float | None, float | None]
) -> Stitch:
    best: Fitted | None = results.best[job.number] if job.settings.score_every else None
    kept = best if best is not None and job.settings.select == "best" else results.last[job.number]
    settings = job.settings.to_dict() | {"seed": job.seed}
    if isinstance(job.family, Fixed):
        settings = {name: settings[name] for name in ("norm", "precision")}
    settings |= about
    settings |= asdict(job.family.family if isinstance(job.family, Fixed) else job.family)  # pyrefly: ignore
    return Stitch(
        model=StitchedNetwork(splice, job.cut, kept.map, kept.statistics),
        cut=splice.cuts[job.cut],
        family=job.family.name,
        fit="direct" if isinstance(job.family, Fixed) else "task",
        map=kept.map,
        scores=kept.scores,
        front_accuracy=whole[0],
        back_accuracy=whole[1],
        history=tuple(job.history),
        settings=settings,
        best=None if best is None else best.scores,
        diverged=job.diverged,
    )


def _plan(splice: Splice, jobs: Sequence[Job], loss: Loss | None) -> dict[str, Any]:
    """What must be the same for a run to be taken up again."""
    own = {} if loss is None else {"loss": _named(loss)}
    return own | {
        "front": digest(splice.front_model),
        "back": digest(splice.back_model),
        "cuts": [[cut.front, cut.back, cut.skip] for cut in splice.cuts],
        "jobs": [[job.cut, repr(job.family), job.seed] for job in jobs],
        "settings": [job.settings.to_dict() for job in jobs],
    }
