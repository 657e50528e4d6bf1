"""Task training: its settings and the recipes of the papers, and many stitches trained side by side, with CUDA graphs
on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from intertwine.argument_types import Float
from intertwine.data.batches import Call, LabelledBatch, labelled_batches
from intertwine.data.evaluate import Loss
from intertwine.errors import InputError, unknown_name
from intertwine.stitch.direct import LinearMap
from intertwine.stitch.families.base import MapFamily, Parameters
from intertwine.stitch.network import BatchNormStatistics, PairBatchNormStatistics
from intertwine.stitch.scores import TrainingTargets, differentiable_cka, logits_of, run_model
from intertwine.stitch.split import FrontFeatures, SplitPair

#: Option → its values.
CHOICES = {
    "optimizer": ("adam", "sgd"),
    "targets": ("hard", "soft", "both"),
    "norm": ("frozen", "adapt"),
    "select": ("last", "best"),
    "precision": ("float32", "bfloat16"),
}
#: Stitches that are trained together must agree in these.
SHARED = ("epochs", "norm", "score_every", "trace_every", "precision")
#: Steps that run plainly before one is recorded: libraries choose their kernels in them.
WARMUP_STEPS = 3
#: A mean loss beyond this, in nats, cannot be the cross-entropy of a working network.
EXPLODED = 1e4

ProgressCallback = Callable[[str, float], None]  # called with the current activity and the completed share
PassProgress = Callable[[float], None]  # called with the completed share of a pass
TraceCallback = Callable[[int], None]  # called with the number of completed steps


@dataclass(frozen=True)
class StitchSettings:
    """How one stitch is trained. The papers differ in nearly every option, so each is recorded with the result.

    Attributes:
        epochs: passes over the data.
        optimizer, rate, momentum, decay: momentum is SGD's; decay applies to the parameters that the family names.
        drops: whether the rate falls to a tenth after a third and after two thirds of the training.
        targets: "hard" labels of the data, "soft" outputs of the back network, or "both" in equal parts.
        start: from the "direct" fit, the "identity", at "random", or another start of the family.
        norm: BatchNorm layers "frozen" as trained, or "adapt": batch statistics in training, and statistics of the
            stitched network itself, averaged over the data, in evaluation.
        select: keep the map of the "last" epoch or of the "best" one on the test data, by accuracy, or by the loss
            where there are no classes.
        cka: weight of the linear CKA between stitched and own features, added to the loss.
        score_every: epochs between two evaluations; 0 evaluates at the end only.
        trace_every: steps between two comparisons of features (CKA, R², CCA) on the first batch; 0 for none.
        precision: "bfloat16" runs both networks under autocast.
    """

    epochs: int = 10
    optimizer: str = "adam"
    rate: float | int = 1e-3
    momentum: float | int = 0.0
    decay: float | int = 0.0
    drops: bool = True
    targets: str = "hard"
    start: str = "direct"
    norm: str = "frozen"
    select: str = "last"
    cka: float | int = 0.0
    score_every: int = 0
    trace_every: int = 0
    precision: str = "float32"

    def __post_init__(self) -> None:
        for name, values in CHOICES.items():
            if getattr(self, name) not in values:
                raise InputError(unknown_name(name, getattr(self, name), values))
        if self.epochs < 0 or self.rate <= 0:
            raise InputError(
                f"epochs must be at least 0 and rate greater than 0, but epochs is {self.epochs} and rate is "
                f"{self.rate}."
            )
        if self.select == "best" and not self.score_every:
            object.__setattr__(self, "score_every", 1)

    def rate_at(self, epoch: int) -> float:
        """The rate in an epoch, counted from 0.

        >>> [StitchSettings(epochs=6, rate=1.0).rate_at(epoch) for epoch in (0, 2, 4)]
        [1.0, 0.1, 0.01]
        """
        drops = 3 * epoch // self.epochs if self.drops and self.epochs else 0
        return self.rate * (1.0, 0.1, 0.01)[min(drops, 2)]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


#: Name → settings: "godfrey" of Godfrey et al. 2022 (with other rates for some families, see `recipe_settings`),
#: "csiszarik" of Csiszárik et al. 2021, "intertwine" our own.
RECIPES: dict[str, StitchSettings] = {
    "intertwine": StitchSettings(),
    "godfrey": StitchSettings(
        epochs=20, optimizer="sgd", rate=1e-3, decay=1e-4, drops=False, start="random", norm="adapt", score_every=1
    ),
    "csiszarik": StitchSettings(epochs=30, targets="soft"),
}
#: Godfrey et al. train their group families at ten times the rate of the others: their code ignores the rate option.
GODFREY_GROUP_RATE = 1e-2


def recipe_settings(recipe: str, family: str, options: Mapping[str, Any]) -> StitchSettings:
    """The settings of a recipe for a family, with some options changed.

    >>> recipe_settings("godfrey", "relu:birkhoff", {}).rate, recipe_settings("godfrey", "linear", {"epochs": 2}).epochs
    (0.01, 2)
    """
    if recipe not in RECIPES:
        raise InputError(unknown_name("recipe", recipe, RECIPES))
    known = [field.name for field in fields(StitchSettings)]
    for name in options:
        if name not in known:
            raise InputError(unknown_name("option of stitching", name, known))
    found = RECIPES[recipe]
    if recipe == "godfrey" and family.partition(":")[0] in ("relu", "softsort", "permutation"):
        found = replace(found, rate=GODFREY_GROUP_RATE)
    return replace(found, **options)


@dataclass(eq=False)
class StitchJob:
    """One stitch while it is fitted.

    Attributes:
        number: of the job, which names it in files. point: index of its stitch point.
        parameters: of the family. saved: copies of them from the last epoch with finite losses.
        diverged: what happened if the loss diverged; the job then stays at `saved`.
    """

    number: int
    point: int
    family: MapFamily
    seed: int
    settings: StitchSettings
    parameters: Parameters = field(default_factory=dict)
    saved: Parameters = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    diverged: str | None = None

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters that are trained."""
        return {name: tensor for name, tensor in self.parameters.items() if tensor.requires_grad}

    def save(self) -> None:
        """Copy the current parameters."""
        self.saved = {name: tensor.detach().clone() for name, tensor in self.parameters.items()}

    @torch.no_grad()
    def stop(self, why: str) -> None:
        """Return to the saved parameters and stop training."""
        self.diverged = why
        for name, tensor in self.parameters.items():
            tensor.copy_(self.saved[name])
            tensor.requires_grad_(False)


def apply_maps(
    rows: Float[Tensor, "samples positions inputs"], maps: Sequence[LinearMap]
) -> Float[Tensor, "stacked positions outputs"]:
    """The rows under each map, those of the first one first: one product for all."""
    matrices = torch.stack([one.matrix for one in maps])
    cast = torch.is_autocast_enabled(rows.device.type)  # autocast chooses the dtype of products itself
    flat = rows.flatten(0, 1)
    moved = torch.matmul(flat if cast else flat.to(matrices.dtype), matrices.mT)
    if any(one.bias is not None for one in maps):
        biases = [one.bias if one.bias is not None else one.matrix.new_zeros(len(one.matrix)) for one in maps]
        moved = moved + torch.stack(biases).to(moved)[:, None]
    if not cast:
        moved = moved.to(rows.dtype)
    return moved.view(len(maps) * len(rows), rows.shape[1], -1)


# -- CUDA graphs -------------------------------------------------------------------------------------------------------


class CudaGraphStep:
    """Runs a training step; on a GPU the step is recorded for batches of the usual shape and then replayed.

    Args:
        step: of (call, targets); it must read nothing from the host that changes between steps. plain: it may do so,
            and is never recorded.
    """

    def __init__(self, step: Callable[[Any, Any], None], device: torch.device, plain: bool = False) -> None:
        self.step, self.enabled = step, device.type == "cuda" and not plain
        self.graph: torch.cuda.CUDAGraph | None = None
        self.buffers: list[Any] = []
        self.plain_steps = 0
        self.constants: Any = None

    def invalidate(self, constants: Any) -> None:
        """Discard the recording unless it was made for the same constants; None always discards it."""
        if constants is None or constants != self.constants:
            self.graph, self.plain_steps, self.constants = None, 0, constants

    def run(self, call: Any, targets: Any) -> None:
        """One step on one batch."""
        if not self.enabled:
            self.step(call, targets)
            return
        leaves, tree = tree_flatten((call, targets))
        if self.graph is not None and self._fits(leaves):
            for buffer, given in zip(self.buffers, leaves, strict=True):
                if isinstance(buffer, Tensor):
                    buffer.copy_(given, non_blocking=True)
            self.graph.replay()
        elif self.graph is None and self.plain_steps >= WARMUP_STEPS:
            self._record(leaves, tree)
        else:
            self.plain_steps += 1
            stream = torch.cuda.Stream()  # as in a recording: state of autograd must not depend on the default stream
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step(call, targets)
            torch.cuda.current_stream().wait_stream(stream)

    def _fits(self, leaves: list[Any]) -> bool:
        return len(leaves) == len(self.buffers) and all(
            a.shape == b.shape and a.dtype == b.dtype if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
            for a, b in zip(leaves, self.buffers, strict=True)
        )

    def _record(self, leaves: list[Any], tree: Any) -> None:
        self.buffers = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        call, targets = tree_unflatten(self.buffers, tree)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step(call, targets)
        self.graph.replay()  # recording runs nothing


class ParallelStreams:
    """Independent parts of a step, on a GPU each on a stream of its own, so that they run in parallel.

    Example:
        >>> streams = ParallelStreams(["a", "b"], torch.device("cpu"))
        >>> for key in ("a", "b"):
        ...     with streams.on(key):
        ...         pass
        >>> streams.join()
    """

    def __init__(self, keys: Iterable[Hashable], device: torch.device) -> None:
        self.streams = {key: torch.cuda.Stream(device) for key in keys} if device.type == "cuda" else {}

    @contextmanager
    def on(self, key: Hashable) -> Iterator[None]:
        """Work of this part, which sees all work before it; `join` ends it."""
        stream = self.streams.get(key)
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Continue when every part is done."""
        for stream in self.streams.values():
            torch.cuda.current_stream().wait_stream(stream)


# -- training ----------------------------------------------------------------------------------------------------------


class StitchTrainer:
    """Stitches of one pair that share epochs and the treatment of BatchNorm.

    Per batch, the front runs once, and the back once per stitch point for all stitches there. The stitches are
    independent: each has its own parameters and its own part of the loss, and the networks are frozen.

    Args:
        split: both networks and their stitch points. jobs: with parameters. norm, precision: as in `StitchSettings`.
        loss: of (outputs, targets), instead of cross-entropy with the labels; it may have any size.
    """

    def __init__(
        self, split: SplitPair, jobs: Sequence[StitchJob], norm: str, precision: str, loss: Loss | None = None
    ) -> None:
        self.split, self.jobs, self.precision, self.loss = split, list(jobs), precision, loss
        self.device, adapts = device_of(split.back_model), norm == "adapt"
        points = sorted({job.point for job in jobs})
        self.groups = {point: [job for job in jobs if job.point == point] for point in points}
        self.front = BatchNormStatistics(split.front_model) if adapts else None
        self.backs = {
            point: BatchNormStatistics(split.back_model, len(group)) if adapts else None
            for point, group in self.groups.items()
        }
        self.targets = {
            point: TrainingTargets([job.settings.targets for job in group], self.device, loss)
            for point, group in self.groups.items()
        }
        self.optimizers = [found for kind in ("sgd", "adam") if (found := self._optimizer(kind)) is not None]
        self.totals = {point: torch.zeros(len(group), device=self.device) for point, group in self.groups.items()}
        self.steps = 0  # of the whole training
        self.graph_step = CudaGraphStep(self._train, self.device, plain=loss is not None)
        self.streams = ParallelStreams(self.groups, self.device)

    def epoch(
        self, number: int, data: Any, progress: PassProgress, trace: TraceCallback | None = None, every: int = 0
    ) -> None:
        """Train once over the data, and add to the history of every job; `trace` is called every so many steps."""
        self._begin(number)
        steps = 0
        size = len(data) if hasattr(data, "__len__") else None
        for batch in labelled_batches(data, self.split.back_model):
            if trace is not None and every and self.steps % every == 0:
                trace(self.steps)
            self.graph_step.run(batch.call, batch.targets)
            steps += 1
            self.steps += 1
            progress(steps / size if size else 0.0)
        for point, group in self.groups.items():
            for job, total in zip(group, self.totals[point].tolist(), strict=True):
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
        self.graph_step.invalidate(tuple(sorted(rates)))

    def _end(self, job: StitchJob, number: int, mean: float) -> None:
        limit = EXPLODED if self.loss is None else inf
        if mean < limit and all(bool(tensor.isfinite().all()) for tensor in job.trained.values()):
            job.save()
            job.history.append({"epoch": number + 1, "loss": mean})
            return
        how = f"grew to {mean:.0e}" if isfinite(mean) and mean >= limit else "became NaN or infinite"
        job.stop(
            f"in epoch {number + 1} its loss {how} (rate {job.settings.rate_at(number)}); the map of epoch {number} "
            "is kept"
        )
        for optimizer in self.optimizers:
            optimizer.param_groups = [group for group in optimizer.param_groups if group["job"] != job.number]
        self.graph_step.invalidate(None)

    def _train(self, call: Call, targets: Any) -> None:
        """One step of every stitch."""
        with self._cast():
            features = self.run_front(call, "batch")
            outputs, own = None, None
            if any(wanted.soft for wanted in self.targets.values()):
                with torch.no_grad():
                    outputs = logits_of(run_model(self.split.back_model, call))
            if any(job.settings.cka for job in self.jobs):
                own = self.split.targets(call)
            for point in self.groups:
                with self.streams.on(point):
                    self._descend(point, features[point], call, targets, outputs, None if own is None else own[point])
        self.streams.join()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for point, group in self.groups.items():
            with self.streams.on(point):
                for job in group:
                    if job.trained:
                        job.family.project_(job.parameters)
        self.streams.join()

    def _descend(
        self, point: int, features: FrontFeatures, call: Call, targets: Any, soft: Tensor | None, own: Tensor | None
    ) -> None:
        """Gradients of the stitches at one point. `soft`: outputs of the back network. `own`: its features."""
        group = self.groups[point]
        rows = apply_maps(features.rows, [job.family.map(job.parameters) for job in group])
        each = self.targets[point](self.run_back(point, rows, features, call, "batch"), targets, soft)
        self.totals[point] += each.detach()
        if own is not None:
            cka = [
                job.settings.cka * differentiable_cka(part.flatten(0, 1).float(), own.flatten(0, 1).float())
                if job.settings.cka
                else part.new_zeros((), dtype=torch.float32)
                for job, part in zip(group, rows.chunk(len(group)), strict=True)
            ]
            each = each + torch.stack(cka)
        penalties = [job.family.penalty(job.parameters) for job in group if job.trained]
        if each.requires_grad:
            torch.stack([each.sum(), *penalties]).sum().backward()

    def run_front(self, call: Call, how: str) -> tuple[FrontFeatures, ...]:
        """The front up to every point; `how`: the statistics of its BatchNorm layers."""
        with self.front.applied(how) if self.front is not None else nullcontext():
            return self.split.front(call)

    def run_back(self, point: int, rows: Tensor, features: FrontFeatures, call: Call, how: str) -> Any:
        """The back from a point on, for all stitches there."""
        statistics = self.backs[point]
        with statistics.applied(how) if statistics is not None else nullcontext():
            return self.split.back(point, rows, features, call, copies=len(self.groups[point]))

    def _cast(self) -> AbstractContextManager[object]:
        if self.precision == "float32":
            return nullcontext()
        # a recorded step must cast the weights each time it is replayed
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    @torch.no_grad()
    def outputs(self, data: Any, how: str) -> Iterator[tuple[LabelledBatch, dict[int, Any]]]:
        """Per batch, the batch and the outputs of the final maps at every point."""
        maps = {point: [job.family.final(job.parameters) for job in group] for point, group in self.groups.items()}
        for batch in labelled_batches(data, self.split.back_model):
            with self._cast():
                features = self.run_front(batch.call, how)
                outputs = {
                    point: self.run_back(
                        point, apply_maps(features[point].rows, some), features[point], batch.call, how
                    )
                    for point, some in maps.items()
                }
            yield batch, outputs

    def collect(self, data: Any) -> None:
        """Average the statistics of every stitched network over the data, if BatchNorm adapts."""
        if self.front is None:
            return
        for statistics in (self.front, *self.backs.values()):
            if statistics is not None:
                statistics.forget()
        for _ in self.outputs(data, "collect"):
            pass

    def statistics(self, point: int, place: int) -> PairBatchNormStatistics | None:
        """A copy of the statistics of one stitch, if BatchNorm adapts."""
        back = self.backs[point]
        if self.front is None or back is None:
            return None
        pairs = ((self.split.front_model, self.front.of(0)), (self.split.back_model, back.of(place)))
        return PairBatchNormStatistics(*(BatchNormStatistics(model).to(self.device).load(of) for model, of in pairs))

    def state(self) -> dict[str, Tensor]:
        """Everything that the rest of the training depends on."""
        found = {f"{job.number}:{name}": t for job in self.jobs for name, t in job.parameters.items()}
        for kind, optimizer in enumerate(self.optimizers):
            for i, group in enumerate(optimizer.param_groups):
                for j, parameter in enumerate(group["params"]):
                    for name, value in optimizer.state.get(parameter, {}).items():
                        if value is not None:
                            found[f"optimizer{kind}:{i}:{j}:{name}"] = torch.as_tensor(value)
        return found

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state."""
        for job in self.jobs:
            for name, tensor in job.parameters.items():
                tensor.copy_(state[f"{job.number}:{name}"])
            job.save()
        for key, value in state.items():
            head, *rest = key.split(":")
            if head.startswith("optimizer"):
                optimizer = self.optimizers[int(head.removeprefix("optimizer"))]
                parameter = optimizer.param_groups[int(rest[0])]["params"][int(rest[1])]
                on_cpu = rest[2] == "step" and self.device.type == "cpu"
                state_of = optimizer.state.setdefault(parameter, {})
                state_of[rest[2]] = value.clone().to("cpu" if on_cpu else parameter.device)

    def _optimizer(self, kind: str) -> torch.optim.Optimizer | None:
        groups: list[dict[str, Any]] = []
        for job in self.jobs:
            if job.settings.optimizer != kind:
                continue
            decayed, extra = job.family.decayed(), {"momentum": job.settings.momentum} if kind == "sgd" else {}
            for decay in (False, True):
                chosen = [t for name, t in job.trained.items() if (name in decayed) is decay]
                if chosen:
                    options = {"lr": job.settings.rate, "weight_decay": job.settings.decay if decay else 0.0}
                    groups.append({"params": chosen, "job": job.number} | options | extra)
        if not groups:
            return None
        if kind == "sgd":
            return torch.optim.SGD(groups, lr=1e-3)
        return torch.optim.Adam(groups, lr=1e-3, capturable=self.device.type == "cuda")


def device_of(model: nn.Module) -> torch.device:
    """The device of a network's tensors."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
