"""Fitting a group of stitches: passes over the data for moments and scores, training, and a state on disk from which a
killed run resumes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from intertwine.data.batches import calls, labelled_batches, on_device_of
from intertwine.data.evaluate import Loss
from intertwine.errors import InputError
from intertwine.files import write_tensors
from intertwine.stitch.direct import LinearMap, PairMoments
from intertwine.stitch.network import PairBatchNormStatistics
from intertwine.stitch.scores import Scorer, StitchScores, feature_similarities, run_model
from intertwine.stitch.split import SplitPair
from intertwine.stitch.training import (
    PassProgress,
    ProgressCallback,
    StitchJob,
    StitchTrainer,
    TraceCallback,
    apply_maps,
)


@dataclass(frozen=True)
class SavedTraining:
    """A saved training: its tensors, and everything else about it as plain data."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]


@dataclass(frozen=True)
class TrainingCheckpoints:
    """A folder with the state of one plan, one file per group of jobs, written atomically; None keeps nothing."""

    folder: Path | None
    plan: Mapping[str, Any]

    def write(self, group: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Save the state of a group."""
        if self.folder is not None:
            about = {"about": json.dumps({"plan": self.plan, "left": about})}
            write_tensors(self.folder / f"state{group}.safetensors", tensors, about)

    def read(self, group: int) -> SavedTraining | None:
        """The state of a group, if there is one.

        Raises:
            InputError: the folder holds the state of another plan.
        """
        file = None if self.folder is None else self.folder / f"state{group}.safetensors"
        if file is None or not file.exists():
            return None
        with safe_open(file, "pt") as opened:
            about = json.loads((opened.metadata() or {}).get("about", "{}"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        wanted, found = json.loads(json.dumps(dict(self.plan))), about.get("plan")
        if found != wanted:
            differ = [key for key in wanted if (found or {}).get(key) != wanted[key]] or ["its form"]
            raise InputError(
                f"{self.folder} holds stitches of another plan, which differs in {', '.join(differ)}. Give another "
                "folder, or remove this one."
            )
        return SavedTraining(tensors, about["left"])


def check_readable_again(data: Any) -> None:
    """Refuse data that can be read only once."""
    if isinstance(data, Iterable) and iter(data) is data:
        raise InputError(
            "The data can be read only once, as generators can, but it is read several times. Pass a DataLoader, or "
            "list(data)."
        )


@torch.no_grad()
def moments_of(split: SplitPair, data: Any, progress: PassProgress = lambda part: None) -> tuple[PairMoments, ...]:
    """The moments of the features at every stitch point: one run of each network per batch."""
    found = tuple(PairMoments() for _ in split.points)
    size = len(data) if hasattr(data, "__len__") else None
    with split.running():
        for i, batch in enumerate(labelled_batches(data, split.back_model), 1):
            for moments, front, rows in zip(found, split.front(batch.call), split.targets(batch.call), strict=True):
                moments.update(front.rows, rows)
            progress(i / size if size else 0.0)
    return found


@dataclass(frozen=True, eq=False)
class FitData:
    """Batches to train on, those for BatchNorm statistics, those to score on, and the user's loss."""

    train: Any
    statistics: Any
    test: Any
    loss: Loss | None = None


@dataclass(frozen=True, eq=False)
class FittedMap:
    """A map of a job, its scores, and its BatchNorm statistics."""

    map: LinearMap
    scores: StitchScores
    statistics: PairBatchNormStatistics | None


@dataclass(eq=False)
class FitResults:
    """The results of each job by its number: of the last epoch, and of the best one that was scored."""

    last: dict[int, FittedMap] = field(default_factory=dict)
    best: dict[int, FittedMap] = field(default_factory=dict)

    def update(self, found: dict[int, FittedMap]) -> None:
        """Add the newest results of all jobs."""
        self.last = found
        for number, fitted in found.items():
            if number not in self.best or fitted.scores.rank > self.best[number].scores.rank:
                self.best[number] = fitted

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The best of each job, as tensors and as plain data."""
        tensors: dict[str, Tensor] = {}
        for number, fitted in self.best.items():
            parts = {"matrix": fitted.map.matrix} | ({} if fitted.map.bias is None else {"bias": fitted.map.bias})
            parts |= {} if fitted.statistics is None else dict(fitted.statistics.named_buffers())
            tensors |= {f"best:{number}:{name}": tensor for name, tensor in parts.items()}
        return tensors, {str(number): fitted.scores.to_dict() for number, fitted in self.best.items()}

    def restore(self, trainer: StitchTrainer, tensors: Mapping[str, Tensor], scores: Mapping[str, Any]) -> None:
        """Continue from a state."""
        for point, group in trainer.groups.items():
            for place, job in enumerate(group):
                if str(job.number) not in scores:
                    continue
                start = f"best:{job.number}:"
                parts = {k.removeprefix(start): t.to(trainer.device) for k, t in tensors.items() if k.startswith(start)}
                statistics = trainer.statistics(point, place)
                if statistics is not None:
                    statistics.load_state_dict({name: parts[name] for name, _ in statistics.named_buffers()})
                found = LinearMap(parts["matrix"], parts.get("bias"))
                self.best[job.number] = FittedMap(found, StitchScores.from_dict(scores[str(job.number)]), statistics)


def fit_group(
    split: SplitPair,
    jobs: Sequence[StitchJob],
    data: FitData,
    store: TrainingCheckpoints,
    group: int,
    progress: ProgressCallback,
) -> FitResults:
    """Train the jobs, which agree in the shared settings, and score them."""
    shared = jobs[0].settings
    epochs = shared.epochs if any(job.trained for job in jobs) else 0
    trainer, results = StitchTrainer(split, jobs, shared.norm, shared.precision, data.loss), FitResults()
    begin = _resume(trainer, results, store, group)
    tracer = _tracer(split, jobs, data.statistics) if shared.trace_every else None
    work = epochs + 1  # scoring counts as one more epoch
    with split.running():
        for epoch in range(begin, epochs):
            if hasattr(data.train, "set_epoch"):
                data.train.set_epoch(epoch)

            def epoch_progress(part: float, epoch: int = epoch) -> None:
                progress(f"training {len(jobs)} stitches, epoch {epoch + 1} of {epochs}", (epoch + part) / work)

            trainer.epoch(epoch, data.train, epoch_progress, tracer, shared.trace_every)
            if shared.score_every and (epoch + 1) % shared.score_every == 0 and epoch + 1 < epochs:
                _score(trainer, results, data, epoch + 1)
            _save(trainer, results, store, group, epoch + 1)
        progress(f"scoring {len(jobs)} stitches", epochs / work)
        _score(trainer, results, data, epochs)
    progress(f"scoring {len(jobs)} stitches", 1.0)
    return results


def _save(trainer: StitchTrainer, results: FitResults, store: TrainingCheckpoints, group: int, epochs: int) -> None:
    """Save everything that the rest of the work depends on."""
    best, scores = results.state()
    about = {
        "epochs": epochs,
        "steps": trainer.steps,
        "histories": [job.history for job in trainer.jobs],
        "diverged": [job.diverged for job in trainer.jobs],
        "best": scores,
    }
    store.write(group, trainer.state() | best, about)


def _resume(trainer: StitchTrainer, results: FitResults, store: TrainingCheckpoints, group: int) -> int:
    """Continue from the state of a killed run, if there is one; returns the number of completed epochs."""
    for job in trainer.jobs:
        job.save()
    saved = store.read(group)
    if saved is None:
        return 0
    trainer.restore({name: t for name, t in saved.tensors.items() if not name.startswith("best:")})
    trainer.steps = saved.about["steps"]
    for job, history, diverged in zip(trainer.jobs, saved.about["histories"], saved.about["diverged"], strict=True):
        job.history[:] = history
        if diverged:
            job.stop(diverged)
    results.restore(trainer, saved.tensors, saved.about["best"])
    return saved.about["epochs"]


@torch.no_grad()
def _score(trainer: StitchTrainer, results: FitResults, data: FitData, epoch: int) -> None:
    """Score the current maps of all jobs; if BatchNorm adapts, its statistics are averaged over the data first."""
    trainer.collect(data.statistics)
    scorers = {point: Scorer(len(group), trainer.loss, must=False) for point, group in trainer.groups.items()}
    for batch, outputs in trainer.outputs(data.test, "own"):
        own = run_model(trainer.split.back_model, batch.call)
        for point, scorer in scorers.items():
            scorer.add(outputs[point], own, batch.targets, batch.samples)
    found: dict[int, FittedMap] = {}
    for point, group in trainer.groups.items():
        for place, (job, score) in enumerate(zip(group, scorers[point].scores(), strict=True)):
            final = job.family.final(job.parameters)
            bias = None if final.bias is None else final.bias.detach().clone()
            kept = LinearMap(final.matrix.detach().clone(), bias)
            found[job.number] = FittedMap(kept, score, trainer.statistics(point, place))
            last = job.history[-1] if job.history else {}
            if last.get("epoch") == epoch and "step" not in last:
                last["accuracy"] = score.accuracy
    results.update(found)


def _tracer(split: SplitPair, jobs: Sequence[StitchJob], data: Any) -> TraceCallback:
    """Compares, on the first batch, the back's own features with those that arrive through each stitch."""
    call = on_device_of(next(iter(calls(data))), split.back_model)
    rows, own = [features.rows for features in split.front(call)], split.targets(call)

    @torch.no_grad()
    def compare(step: int) -> None:
        for job in jobs:
            if job.trained:
                moved: Tensor = apply_maps(rows[job.point], [job.family.map(job.parameters)])
                found = feature_similarities(own[job.point].flatten(0, 1), moved.flatten(0, 1))
                job.history.append({"step": step} | found)

    return compare
