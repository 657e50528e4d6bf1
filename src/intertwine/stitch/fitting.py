"""Fitting a group of stitches: passes over the data for moments and scores, training, and a state on disk from which a
killed run resumes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from intertwine.stitch.training import StitchJob, StitchTrainer, TraceCallback, apply_maps

# ----------------------------------------------------------------------------------------------------
# What a killed run leaves: the state of the stitches in training, one file per group, written whole or not at all.


@dataclass(frozen=True)
class SavedTraining:
    """A training as it was left: its tensors, and everything about it that is no tensor."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]


@dataclass(frozen=True)
class TrainingCheckpoints:
    """A folder for one plan. A folder that holds another plan's state is refused."""

    folder: Path | None
    plan: Mapping[str, Any]

    def _file(self, group: int) -> Path | None:
        return None if self.folder is None else self.folder / f"state{group}.safetensors"

    def write(self, group: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Keep the state of a group."""
        file = self._file(group)
        if file is not None:
            write_tensors(file, tensors, {"about": json.dumps({"plan": self.plan, "left": about})})

    def read(self, group: int) -> SavedTraining | None:
        """The state of a group, if there is one."""
        file = self._file(group)
        if file is None or not file.exists():
            return None
        with safe_open(file, "pt") as opened:
            about = json.loads((opened.metadata() or {}).get("about", "{}"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        wanted = json.loads(json.dumps(dict(self.plan)))
        if about.get("plan") != wanted:
            found = about.get("plan", {})
            differ = [key for key in wanted if found.get(key) != wanted[key]] or ["its form"]
            raise InputError(
                f"Stitches were to be taken up again in {self.folder}, but it holds those of another plan, which "
                f"differs in {', '.join(differ)}. Give another folder, or remove this one."
            )
        return SavedTraining(tensors, about["left"])


# ----------------------------------------------------------------------------------------------------
# Passes over data that a fit needs: the moments of every cut, and the scores of stitches and of both networks.


PassProgress = Callable[[float], None]  # hears which part of a pass is done


def check_readable_again(data: Any) -> None:
    """Refuse data that is gone after one pass."""
    if isinstance(data, Iterable) and iter(data) is data:
        raise InputError(
            "Stitching reads its data more than once, but what was given can be read only once, as generators can. "
            "Pass a DataLoader, or list(data)."
        )


def batches_of(data: Any) -> int | None:
    """How many batches there are, where the data tells."""
    return len(data) if hasattr(data, "__len__") else None


@torch.no_grad()
def moments_of(splice: SplitPair, data: Any, tick: PassProgress = lambda part: None) -> tuple[PairMoments, ...]:
    """The moments of the features that meet at every cut: one run of each network per batch."""
    found = tuple(PairMoments() for _ in splice.cuts)
    size = batches_of(data)
    with splice.running():
        for i, batch in enumerate(labelled_batches(data, splice.back_model), 1):
            arrived, own = splice.front(batch.call), splice.targets(batch.call)
            for moments, here, there in zip(found, arrived, own, strict=True):
                moments.update(here.rows, there)
            tick(i / size if size else 0.0)
    return found


@torch.no_grad()
def scores_of(trainer: StitchTrainer, data: Any) -> dict[int, list[StitchScores]]:
    """Cut → scores of its stitches, in the order of the trainer's jobs there."""
    scorers = {cut: Scorer(len(group), trainer.loss, must=False) for cut, group in trainer.groups.items()}
    for batch, outputs in trainer.passed(data, "own"):
        own = run_model(trainer.splice.back_model, batch.call)
        for cut, scorer in scorers.items():
            scorer.add(outputs[cut], own, batch.targets, batch.samples)
    return {cut: scorer.scores() for cut, scorer in scorers.items()}


# ----------------------------------------------------------------------------------------------------
# Fitting one group of stitches: train them together, score them, choose what is kept of each.


GroupProgress = Callable[[str, float], None]  # hears what is being done, and how much of the group's work is behind


@dataclass(frozen=True, eq=False)
class FitData:
    """Batches to train on, those for BatchNorm statistics, and those to score on; the user's own loss."""

    train: Any
    still: Any
    test: Any
    loss: Loss | None = None


@dataclass(frozen=True, eq=False)
class FittedMap:
    """One map of a job with what belongs to it."""

    map: LinearMap
    scores: StitchScores
    statistics: PairBatchNormStatistics | None


@dataclass(eq=False)
class FitResults:
    """What is kept of each job, by its number: of the last epoch, and of the best one that was scored."""

    last: dict[int, FittedMap] = field(default_factory=dict)
    best: dict[int, FittedMap] = field(default_factory=dict)

    def take(self, found: dict[int, FittedMap]) -> None:
        """The newest scores of all jobs."""
        self.last = found
        for number, fitted in found.items():
            held = self.best.get(number)
            if held is None or fitted.scores.rank > held.scores.rank:
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
        """Take over what `state` gave."""
        for cut, group in trainer.groups.items():
            for place, job in enumerate(group):
                if str(job.number) not in scores:
                    continue
                start = f"best:{job.number}:"
                parts = {k.removeprefix(start): t.to(trainer.device) for k, t in tensors.items() if k.startswith(start)}
                statistics = trainer.statistics(cut, place)
                if statistics is not None:
                    statistics.load_state_dict({name: parts[name] for name, _ in statistics.named_buffers()})
                found = LinearMap(parts["matrix"], parts.get("bias"))
                self.best[job.number] = FittedMap(found, StitchScores.from_dict(scores[str(job.number)]), statistics)


def fit_group(
    splice: SplitPair,
    jobs: Sequence[StitchJob],
    sources: FitData,
    store: TrainingCheckpoints,
    group: int,
    tell: GroupProgress,
) -> FitResults:
    """Train the jobs, which agree in the settings that are shared, and score them."""
    shared = jobs[0].settings
    epochs = shared.epochs if any(job.trained for job in jobs) else 0
    trainer, results = StitchTrainer(splice, jobs, shared.norm, shared.precision, sources.loss), FitResults()
    begin = _taken_up(trainer, results, store, group)
    tracer = _tracer(splice, jobs, sources.still) if shared.trace_every else None
    work = epochs + 1  # scoring counts as one more epoch
    with splice.running():
        for epoch in range(begin, epochs):
            doing = f"training {len(jobs)} stitches, epoch {epoch + 1} of {epochs}"
            if hasattr(sources.train, "set_epoch"):
                sources.train.set_epoch(epoch)
            trainer.epoch(
                epoch,
                sources.train,
                lambda part, e=epoch, d=doing: tell(d, (e + part) / work),
                tracer,
                shared.trace_every,
            )
            if shared.score_every and (epoch + 1) % shared.score_every == 0 and epoch + 1 < epochs:
                _score(trainer, results, sources, epoch + 1)
            _leave(trainer, results, store, group, epoch + 1)
        tell(f"scoring {len(jobs)} stitches", epochs / work)
        _score(trainer, results, sources, epochs)
    tell(f"scoring {len(jobs)} stitches", 1.0)
    return results


def _leave(trainer: StitchTrainer, results: FitResults, store: TrainingCheckpoints, group: int, epochs: int) -> None:
    """Keep everything that the rest of the work depends on."""
    best, scores = results.state()
    about = {
        "epochs": epochs,
        "steps": trainer.steps,
        "histories": [job.history for job in trainer.jobs],
        "diverged": [job.diverged for job in trainer.jobs],
        "best": scores,
    }
    store.write(group, trainer.state() | best, about)


def _taken_up(trainer: StitchTrainer, results: FitResults, store: TrainingCheckpoints, group: int) -> int:
    """Go on from what a killed run left, if one did; gives the number of epochs that are behind."""
    left = store.read(group)
    for job in trainer.jobs:
        job.hold()
    if left is None:
        return 0
    trainer.restore({name: t for name, t in left.tensors.items() if not name.startswith("best:")})
    trainer.steps = left.about["steps"]
    for job, history, diverged in zip(trainer.jobs, left.about["histories"], left.about["diverged"], strict=True):
        job.history[:] = history
        if diverged:
            job.rest(diverged)
    results.restore(trainer, left.tensors, left.about["best"])
    return left.about["epochs"]


def _score(trainer: StitchTrainer, results: FitResults, sources: FitData, epoch: int) -> None:
    """Score all jobs as they are; where BatchNorm adapts, statistics are averaged over the data first."""
    trainer.collect(sources.still)
    scores = scores_of(trainer, sources.test)
    found: dict[int, FittedMap] = {}
    for cut, group in trainer.groups.items():
        for place, (job, score) in enumerate(zip(group, scores[cut], strict=True)):
            kept = _plain(job.family.final(job.parameters))
            found[job.number] = FittedMap(kept, score, trainer.statistics(cut, place))
            last = job.history[-1] if job.history else {}
            if last.get("epoch") == epoch and "step" not in last:
                last["accuracy"] = score.accuracy
    results.take(found)


def _plain(found: LinearMap) -> LinearMap:
    bias = None if found.bias is None else found.bias.detach().clone()
    return LinearMap(found.matrix.detach().clone(), bias)


def _tracer(splice: SplitPair, jobs: Sequence[StitchJob], data: Any) -> TraceCallback:
    """Compares, on the first batch, the back's own features with those that arrive through each stitch."""
    call = on_device_of(next(iter(calls(data))), splice.back_model)
    with splice.running(), torch.no_grad():
        rows = [arrived.rows for arrived in splice.front(call)]
        own = splice.targets(call)

    @torch.no_grad()
    def compare(step: int) -> None:
        for job in jobs:
            if job.trained:
                moved: Tensor = apply_maps(rows[job.cut], [job.family.map(job.parameters)])
                found = feature_similarities(own[job.cut].flatten(0, 1), moved.flatten(0, 1))
                job.history.append({"step": step} | found)

    return compare
