"""Training many stitches at once: one run of the front per batch, one of the back per cut for all stitches there.

No stitch feels the others: each has its own parameters and its own part of the loss, and the networks are frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.features.batches import Call
from intertwine.features.labelled import Labelled, labelled
from intertwine.features.scoring import Loss
from intertwine.stitch.jobs import Job, mapped
from intertwine.stitch.recording import Branches, Recording
from intertwine.stitch.splice import Arrived, Splice
from intertwine.stitch.statistics import PairStatistics, Statistics
from intertwine.stitch.targets import Targets, answer, logits_of
from intertwine.stitch.traces import cka

#: A mean loss beyond this, in nats, has left what cross-entropy of a working network can be.
EXPLODED = 1e4
Tick = Callable[[float], None]  # hears which part of an epoch is done
Trace = Callable[[int], None]


class Trainer:
    """Stitches of one splice that share epochs and the way BatchNorm is treated.

    Args:
        splice: both networks and their cuts. jobs: with parameters. norm, precision: as in `Settings`.
        loss: of (outputs, targets), in the place of cross-entropy with the labels; it may be of any size.
    """

    def __init__(
        self, splice: Splice, jobs: Sequence[Job], norm: str, precision: str, loss: Loss | None = None
    ) -> None:
        self.loss = loss
        self.splice, self.jobs, self.adapts, self.precision = splice, list(jobs), norm == "adapt", precision
        self.device = device_of(splice.back_model)
        self.front = Statistics(splice.front_model) if self.adapts else None
        self.groups = {cut: [job for job in self.jobs if job.cut == cut] for cut in sorted({j.cut for j in self.jobs})}
        self.backs = {
            cut: Statistics(splice.back_model, len(group)) if self.adapts else None
            for cut, group in self.groups.items()
        }
        self.targets = {
            cut: Targets([j.settings.targets for j in jobs], self.device, loss) for cut, jobs in self.groups.items()
        }
        self.optimizers = [found for kind in ("sgd", "adam") if (found := self._optimizer(kind)) is not None]
        self.totals = {cut: torch.zeros(len(group), device=self.device) for cut, group in self.groups.items()}
        self.steps = 0  # of the whole training
        self.recording = Recording(self._train, self.device, plain=loss is not None)
        self.branches = Branches(self.groups, self.device)

    # -- one epoch -----------------------------------------------------------------------------------------------------

    def epoch(self, number: int, data: Any, tick: Tick, trace: Trace | None = None, every: int = 0) -> None:
        """Train once over the data; what happened is added to the history of every job.

        Every so many steps `trace` is called with the number of steps that are behind.
        """
        self._begin(number)
        steps = 0
        size = len(data) if hasattr(data, "__len__") else None
        for batch in labelled(data, self.splice.back_model):
            if trace is not None and every and self.steps % every == 0:
                trace(self.steps)
            self.recording.run(batch.call, batch.targets)
            steps += 1
            self.steps += 1
            tick(steps / size if size else 0.0)
        for cut, group in self.groups.items():
            for job, total in zip(group, self.totals[cut].tolist(), strict=True):
                if job.trained:
                    self._end(job, number, total / max(steps, 1))

    def _begin(self, number: int) -> None:
        for total in self.totals.values():
            total.zero_()
        jobs, rates = {job.number: job for job in self.jobs}, set()
        for job in self.jobs:
            if job.trained:
                job.family.refresh_(job.parameters, number / max(job.settings.epochs, 1))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = jobs[group["job"]].settings.rate_at(number)
                rates.add(group["lr"])
        self.recording.renew(tuple(sorted(rates)))

    def _end(self, job: Job, number: int, mean: float) -> None:
        limit = EXPLODED if self.loss is None else inf
        if mean < limit and all(bool(tensor.isfinite().all()) for tensor in job.trained.values()):
            job.hold()
            job.history.append({"epoch": number + 1, "loss": mean})
            return
        how = f"grew to {mean:.0e}" if isfinite(mean) and mean >= limit else "was no number any more"
        job.rest(
            f"in epoch {number + 1} its loss {how} (rate {job.settings.rate_at(number)}); the map of epoch {number} "
            "was kept"
        )
        for optimizer in self.optimizers:
            optimizer.param_groups = [group for group in optimizer.param_groups if group["job"] != job.number]
        self.recording.renew(None)

    def _train(self, call: Call, targets: Any) -> None:
        """One step of every stitch."""
        with self._cast():
            arrived = self.arrive(call, "batch")
            own = None
            if any(wanted.soft for wanted in self.targets.values()):
                with torch.no_grad():
                    own = logits_of(answer(self.splice.back_model, call))
            wanted = self._wanted(call)
            for cut, group in self.groups.items():
                with self.branches.beside(cut):
                    self._descend(cut, group, arrived[cut], call, targets, own, wanted)
        self.branches.join()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for cut, group in self.groups.items():
            with self.branches.beside(cut):
                for job in group:
                    if job.trained:
                        job.family.project_(job.parameters)
        self.branches.join()

    def _descend(
        self,
        cut: int,
        group: Sequence[Job],
        arrived: Arrived,
        call: Call,
        targets: Any,
        own: Tensor | None,
        wanted: tuple[Tensor, ...] | None,
    ) -> None:
        """Gradients of the stitches of one cut. `own`: answers of the back network. `wanted`: its features."""
        rows = mapped(arrived.rows, [job.family.map(job.parameters) for job in group])
        outputs = self.leave(cut, rows, arrived, call, "batch")
        each = self.targets[cut](outputs, targets, own)
        self.totals[cut] += each.detach()
        if wanted is not None:
            each = each + self._similarity(group, rows, wanted[cut])
        penalties = [job.family.penalty(job.parameters) for job in group if job.trained]
        if each.requires_grad:
            torch.stack([each.sum(), *penalties]).sum().backward()

    def _wanted(self, call: Call) -> tuple[Tensor, ...] | None:
        if not any(job.settings.cka for job in self.jobs):
            return None
        with torch.no_grad():
            return self.splice.targets(call)

    def _similarity(self, group: Sequence[Job], rows: Tensor, wanted: Tensor) -> Tensor:
        parts = rows.chunk(len(group))
        found = [
            job.settings.cka * cka(part.flatten(0, 1).float(), wanted.flatten(0, 1).float())
            if job.settings.cka
            else part.new_zeros((), dtype=torch.float32)
            for job, part in zip(group, parts, strict=True)
        ]
        return torch.stack(found)

    # -- both halves ---------------------------------------------------------------------------------------------------

    def arrive(self, call: Call, how: str) -> tuple[Arrived, ...]:
        """The front up to every cut, with its BatchNorm layers as asked for."""
        with self.front.applied(how) if self.front is not None else nullcontext():
            return self.splice.front(call)

    def leave(self, cut: int, rows: Tensor, arrived: Arrived, call: Call, how: str) -> Any:
        """The back behind a cut, for all stitches there."""
        statistics = self.backs[cut]
        with statistics.applied(how) if statistics is not None else nullcontext():
            return self.splice.back(cut, rows, arrived, call, copies=len(self.groups[cut]))

    def _cast(self) -> AbstractContextManager[object]:
        if self.precision == "float32":
            return nullcontext()
        # a recorded step must cast the weights each time it is replayed
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    # -- what is kept of each stitch -----------------------------------------------------------------------------------

    @torch.no_grad()
    def passed(self, data: Any, how: str) -> Iterator[tuple[Labelled, dict[int, Any]]]:
        """Per batch, the batch and the outputs of the final maps at every cut, BatchNorm layers as asked for."""
        maps = {cut: [job.family.final(job.parameters) for job in group] for cut, group in self.groups.items()}
        for batch in labelled(data, self.splice.back_model):
            with self._cast():
                arrived = self.arrive(batch.call, how)
                outputs = {
                    cut: self.leave(cut, mapped(arrived[cut].rows, maps[cut]), arrived[cut], batch.call, how)
                    for cut in self.groups
                }
            yield batch, outputs

    def collect(self, data: Any) -> None:
        """Average the statistics of every stitched network over the data, where BatchNorm adapts."""
        if self.front is None:
            return
        for statistics in (self.front, *self.backs.values()):
            if statistics is not None:
                statistics.forget()
        for _ in self.passed(data, "collect"):
            pass

    def statistics(self, cut: int, place: int) -> PairStatistics | None:
        """A copy of the statistics of one stitch, where BatchNorm adapts."""
        back = self.backs[cut]
        if self.front is None or back is None:
            return None
        front = Statistics(self.splice.front_model).to(self.device).load(self.front.of(0))
        return PairStatistics(front, Statistics(self.splice.back_model).to(self.device).load(back.of(place)))

    # -- taking up again -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything the rest of the training depends on."""
        found = {f"{job.number}:{name}": t for job in self.jobs for name, t in job.parameters.items()}
        for kind, optimizer in enumerate(self.optimizers):
            for i, group in enumerate(optimizer.param_groups):
                for j, parameter in enumerate(group["params"]):
                    memory = optimizer.state.get(parameter, {})
                    found |= {
                        f"optimizer{kind}:{i}:{j}:{name}": torch.as_tensor(value)
                        for name, value in memory.items()
                        if value is not None
                    }
        return found

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
        for job in self.jobs:
            for name, tensor in job.parameters.items():
                tensor.copy_(state[f"{job.number}:{name}"])
            job.hold()
        for key, value in state.items():
            head, *rest = key.split(":")
            if head.startswith("optimizer"):
                optimizer = self.optimizers[int(head.removeprefix("optimizer"))]
                parameter = optimizer.param_groups[int(rest[0])]["params"][int(rest[1])]
                optimizer.state.setdefault(parameter, {})[rest[2]] = value.clone().to(
                    "cpu" if rest[2] == "step" and self.device.type == "cpu" else parameter.device
                )

    def _optimizer(self, kind: str) -> torch.optim.Optimizer | None:
        groups: list[dict[str, Any]] = []
        for job in self.jobs:
            if job.settings.optimizer != kind:
                continue
            decayed = job.family.decayed()
            for with_decay in (False, True):
                chosen = [t for name, t in job.trained.items() if (name in decayed) is with_decay]
                if chosen:
                    decay = job.settings.decay if with_decay else 0.0
                    extra = {"momentum": job.settings.momentum} if kind == "sgd" else {}
                    rate = job.settings.rate
                    groups.append({"params": chosen, "lr": rate, "weight_decay": decay, "job": job.number} | extra)
        if not groups:
            return None
        if kind == "sgd":
            return torch.optim.SGD(groups, lr=1e-3)
        return torch.optim.Adam(groups, lr=1e-3, capturable=self.device.type == "cuda")


def device_of(model: nn.Module) -> torch.device:
    """Where a network's tensors are."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
