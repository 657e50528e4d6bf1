"""Fitting one group of stitches: train them together, score them, choose what is kept of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from intertwine.features.batches import calls, placed
from intertwine.features.scoring import Loss
from intertwine.stitch.jobs import Job, mapped
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.passes import scores_of
from intertwine.stitch.scores import Scores
from intertwine.stitch.splice import Splice
from intertwine.stitch.statistics import PairStatistics
from intertwine.stitch.store import Store
from intertwine.stitch.traces import trace
from intertwine.stitch.training import Trace, Trainer

Told = Callable[[str, float], None]  # hears what is being done, and how much of the group's work is behind


@dataclass(frozen=True, eq=False)
class Sources:
    """Batches to train on, those for BatchNorm statistics, and those to score on; the user's own loss."""

    train: Any
    still: Any
    test: Any
    loss: Loss | None = None


@dataclass(frozen=True, eq=False)
class Fitted:
    """One map of a job with what belongs to it."""

    map: LinearMap
    scores: Scores
    statistics: PairStatistics | None


@dataclass(eq=False)
class Results:
    """What is kept of each job, by its number: of the last epoch, and of the best one that was scored."""

    last: dict[int, Fitted] = field(default_factory=dict)
    best: dict[int, Fitted] = field(default_factory=dict)

    def take(self, found: dict[int, Fitted]) -> None:
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

    def restore(self, trainer: Trainer, tensors: Mapping[str, Tensor], scores: Mapping[str, Any]) -> None:
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
                self.best[job.number] = Fitted(found, Scores.from_dict(scores[str(job.number)]), statistics)


def fit_group(splice: Splice, jobs: Sequence[Job], sources: Sources, store: Store, group: int, tell: Told) -> Results:
    """Train the jobs, which agree in the settings that are shared, and score them."""
    shared = jobs[0].settings
    epochs = shared.epochs if any(job.trained for job in jobs) else 0
    trainer, results = Trainer(splice, jobs, shared.norm, shared.precision, sources.loss), Results()
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


def _leave(trainer: Trainer, results: Results, store: Store, group: int, epochs: int) -> None:
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


def _taken_up(trainer: Trainer, results: Results, store: Store, group: int) -> int:
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


def _score(trainer: Trainer, results: Results, sources: Sources, epoch: int) -> None:
    """Score all jobs as they are; where BatchNorm adapts, statistics are averaged over the data first."""
    trainer.collect(sources.still)
    scores = scores_of(trainer, sources.test)
    found: dict[int, Fitted] = {}
    for cut, group in trainer.groups.items():
        for place, (job, score) in enumerate(zip(group, scores[cut], strict=True)):
            kept = _plain(job.family.final(job.parameters))
            found[job.number] = Fitted(kept, score, trainer.statistics(cut, place))
            last = job.history[-1] if job.history else {}
            if last.get("epoch") == epoch and "step" not in last:
                last["accuracy"] = score.accuracy
    results.take(found)


def _plain(found: LinearMap) -> LinearMap:
    bias = None if found.bias is None else found.bias.detach().clone()
    return LinearMap(found.matrix.detach().clone(), bias)


def _tracer(splice: Splice, jobs: Sequence[Job], data: Any) -> Trace:
    """Compares, on the first batch, the back's own features with those that arrive through each stitch."""
    call = placed(next(iter(calls(data))), splice.back_model)
    with splice.running(), torch.no_grad():
        rows = [arrived.rows for arrived in splice.front(call)]
        own = splice.targets(call)

    @torch.no_grad()
    def compare(step: int) -> None:
        for job in jobs:
            if job.trained:
                moved: Tensor = mapped(rows[job.cut], [job.family.map(job.parameters)])
                found = trace(own[job.cut].flatten(0, 1), moved.flatten(0, 1))
                job.history.append({"step": step} | found)

    return compare
