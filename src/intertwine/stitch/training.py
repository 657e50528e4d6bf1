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
from intertwine.errors import InputError, did_you_mean
from intertwine.stitch.direct import LinearMap
from intertwine.stitch.families.base import MapFamily, Parameters
from intertwine.stitch.network import BatchNormStatistics, PairBatchNormStatistics
from intertwine.stitch.scores import TrainingTargets, differentiable_cka, logits_of, run_model
from intertwine.stitch.split import FrontFeatures, SplitPair

# ----------------------------------------------------------------------------------------------------
# Settings: how a stitch is fitted, and the recipes of the papers by name.
#
# The papers differ in nearly every option, so each is explicit here and recorded with the outcome.


#: Option → what it may be, where only a few words are allowed.
CHOICES = {
    "optimizer": ("adam", "sgd"),
    "targets": ("hard", "soft", "both"),
    "norm": ("frozen", "adapt"),
    "select": ("last", "best"),
    "precision": ("float32", "bfloat16"),
}
#: Stitches that are trained together must agree in these.
SHARED = ("epochs", "norm", "score_every", "trace_every", "precision")


@dataclass(frozen=True)
class StitchSettings:
    """How one stitch is trained.

    Attributes:
        epochs: passes over the data.
        optimizer, rate, momentum, decay: momentum is SGD's; decay applies where the family says so.
        drops: whether the rate falls to a tenth after a third and after two thirds of the training.
        targets: "hard" labels of the data, "soft" answers of the back network, or "both" in equal parts.
        start: from the "direct" fit, the "identity", at "random", or another way that the family has.
        norm: BatchNorm layers "frozen" as trained, or "adapt": batch statistics while training, and statistics of the
            stitched network itself, averaged over the data, when it is evaluated.
        select: keep the map of the "last" epoch or of the one that is "best" on the test data, by accuracy, or by
            the loss where there are no classes.
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
        for name, words in CHOICES.items():
            if getattr(self, name) not in words:
                raise InputError(
                    f"The option {name}={getattr(self, name)!r} was asked for; it is one of {', '.join(words)}."
                )
        if self.epochs < 0 or self.rate <= 0:
            raise InputError(
                f"epochs={self.epochs} and rate={self.rate} were asked for. Epochs are counted from 0, and a rate is "
                "greater than 0."
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


#: Name → settings. "godfrey" is paper 0 (rates per family: see `recipe_settings`), "csiszarik" paper 1, "intertwine" our own.
RECIPES: dict[str, StitchSettings] = {
    "intertwine": StitchSettings(),
    "godfrey": StitchSettings(
        epochs=20, optimizer="sgd", rate=1e-3, decay=1e-4, drops=False, start="random", norm="adapt", score_every=1
    ),
    "csiszarik": StitchSettings(epochs=30, targets="soft"),
}
#: Paper 0 trains its group families at ten times the rate of the others: the rate on the command line never arrived.
GODFREY_GROUP_RATE = 1e-2


def recipe_settings(recipe: str, family: str, options: Mapping[str, Any]) -> StitchSettings:
    """The settings of a recipe for a family, with some options changed.

    >>> recipe_settings("godfrey", "relu:birkhoff", {}).rate, recipe_settings("godfrey", "linear", {"epochs": 2}).epochs
    (0.01, 2)
    """
    if recipe not in RECIPES:
        raise InputError(
            f"The recipe {recipe!r} was asked for. {did_you_mean(recipe, RECIPES)}Recipes are {', '.join(RECIPES)}."
        )
    known = [field.name for field in fields(StitchSettings)]
    for name in options:
        if name not in known:
            raise InputError(
                f"The option {name!r} was given to stitching. {did_you_mean(name, known)}Options are "
                f"{', '.join(known)}."
            )
    found = RECIPES[recipe]
    if recipe == "godfrey" and family.partition(":")[0] in ("relu", "softsort", "permutation"):
        found = replace(found, rate=GODFREY_GROUP_RATE)
    return replace(found, **options)


# ----------------------------------------------------------------------------------------------------
# Jobs: the stitches that are fitted together, and those of one cut side by side.


@dataclass(eq=False)
class StitchJob:
    """One stitch while it is fitted.

    Attributes:
        cut: number of its cut in the splice. number: of the job, which names it in files.
        parameters: of the family. kept: copies of them from the last epoch with finite losses.
        diverged: what happened, where losses stopped being numbers; the job then rests at `kept`.
    """

    number: int
    cut: int
    family: MapFamily
    seed: int
    settings: StitchSettings
    parameters: Parameters = field(default_factory=dict)
    kept: Parameters = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    diverged: str | None = None

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters that are trained."""
        return {name: tensor for name, tensor in self.parameters.items() if tensor.requires_grad}

    def hold(self) -> None:
        """Remember the parameters as they are."""
        self.kept = {name: tensor.detach().clone() for name, tensor in self.parameters.items()}

    @torch.no_grad()
    def rest(self, why: str) -> None:
        """Go back to what was remembered, for good."""
        self.diverged = why
        for name, tensor in self.parameters.items():
            tensor.copy_(self.kept[name])
            tensor.requires_grad_(False)


def apply_maps(
    rows: Float[Tensor, "samples positions inputs"], maps: Sequence[LinearMap]
) -> Float[Tensor, "stacked positions outputs"]:
    """The rows under each map, those of the first one first: one product for all."""
    matrices = torch.stack([one.matrix for one in maps])
    cast = torch.is_autocast_enabled(rows.device.type)  # which chooses the numbers of products by itself
    flat = rows.flatten(0, 1)
    moved = torch.matmul(flat if cast else flat.to(matrices.dtype), matrices.mT)
    if any(one.bias is not None for one in maps):
        biases = [one.bias if one.bias is not None else one.matrix.new_zeros(len(one.matrix)) for one in maps]
        moved = moved + torch.stack(biases).to(moved)[:, None]
    if not cast:
        moved = moved.to(rows.dtype)  # the back's own numbers
    return moved.view(len(maps) * len(rows), rows.shape[1], -1)


# ----------------------------------------------------------------------------------------------------
# A training step on a GPU: recorded, so that its many small kernels are started at once, and parts of it side by side.
#
# On other devices a step just runs, one part after another.


WARMUP_STEPS = 3  # steps that run plainly before one is recorded: libraries choose their kernels in them


class CudaGraphStep:
    """Runs a step; on a GPU the step is recorded for batches of the usual shape and then replayed.

    Args:
        step: of (call, targets); it must read nothing from the host that changes between steps. plain: it may do so,
            and is never recorded.
    """

    def __init__(self, step: Callable[[Any, Any], None], device: torch.device, plain: bool = False) -> None:
        self.step, self.on = step, device.type == "cuda" and not plain
        self.graph: torch.cuda.CUDAGraph | None = None
        self.held: list[Any] = []
        self.plain = 0
        self.about: Any = None

    def renew(self, about: Any) -> None:
        """Forget the recording unless it was made for the same constants."""
        if about is None or about != self.about:
            self.graph, self.plain, self.about = None, 0, about

    def run(self, call: Any, targets: Any) -> None:
        """One step on one batch."""
        if not self.on:
            self.step(call, targets)
            return
        leaves, tree = tree_flatten((call, targets))
        if self.graph is not None and self._fits(leaves):
            self._fill(leaves)
            self.graph.replay()
        elif self.graph is None and self.plain >= WARMUP_STEPS:
            self._record(leaves, tree)
        else:
            self.plain += 1
            self._beside(call, targets)

    def _fits(self, leaves: list[Any]) -> bool:
        return len(leaves) == len(self.held) and all(
            a.shape == b.shape and a.dtype == b.dtype if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
            for a, b in zip(leaves, self.held, strict=True)
        )

    def _fill(self, leaves: list[Any]) -> None:
        for mine, given in zip(self.held, leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given, non_blocking=True)

    def _record(self, leaves: list[Any], tree: Any) -> None:
        self.held = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        call, targets = tree_unflatten(self.held, tree)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step(call, targets)
        self.graph.replay()  # recording runs nothing

    def _beside(self, call: Any, targets: Any) -> None:
        """On a stream of its own, as a recording will be: what autograd keeps must not be tied to the default one."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step(call, targets)
        torch.cuda.current_stream().wait_stream(stream)


class ParallelStreams:
    """Parts of a step that do not feel each other: on a GPU each on a stream of its own, so that they run side by side.

    Example:
        >>> branches = ParallelStreams(["a", "b"], torch.device("cpu"))
        >>> for key in ("a", "b"):
        ...     with branches.beside(key):
        ...         pass
        >>> branches.join()
    """

    def __init__(self, keys: Iterable[Hashable], device: torch.device) -> None:
        self.streams = {key: torch.cuda.Stream(device) for key in keys} if device.type == "cuda" else {}

    @contextmanager
    def beside(self, key: Hashable) -> Iterator[None]:
        """Work of this part; it sees everything that was done before, and `join` ends it."""
        stream = self.streams.get(key)
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Go on when every part is done."""
        for stream in self.streams.values():
            torch.cuda.current_stream().wait_stream(stream)


# ----------------------------------------------------------------------------------------------------
# Training many stitches at once: one run of the front per batch, one of the back per cut for all stitches there.
#
# No stitch feels the others: each has its own parameters and its own part of the loss, and the networks are frozen.


#: A mean loss beyond this, in nats, has left what cross-entropy of a working network can be.
EXPLODED = 1e4
EpochProgress = Callable[[float], None]  # hears which part of an epoch is done
TraceCallback = Callable[[int], None]


class StitchTrainer:
    """Stitches of one splice that share epochs and the way BatchNorm is treated.

    Args:
        splice: both networks and their cuts. jobs: with parameters. norm, precision: as in `Settings`.
        loss: of (outputs, targets), in the place of cross-entropy with the labels; it may be of any size.
    """

    def __init__(
        self, splice: SplitPair, jobs: Sequence[StitchJob], norm: str, precision: str, loss: Loss | None = None
    ) -> None:
        self.loss = loss
        self.splice, self.jobs, self.adapts, self.precision = splice, list(jobs), norm == "adapt", precision
        self.device = device_of(splice.back_model)
        self.front = BatchNormStatistics(splice.front_model) if self.adapts else None
        self.groups = {cut: [job for job in self.jobs if job.cut == cut] for cut in sorted({j.cut for j in self.jobs})}
        self.backs = {
            cut: BatchNormStatistics(splice.back_model, len(group)) if self.adapts else None
            for cut, group in self.groups.items()
        }
        self.targets = {
            cut: TrainingTargets([j.settings.targets for j in jobs], self.device, loss)
            for cut, jobs in self.groups.items()
        }
        self.optimizers = [found for kind in ("sgd", "adam") if (found := self._optimizer(kind)) is not None]
        self.totals = {cut: torch.zeros(len(group), device=self.device) for cut, group in self.groups.items()}
        self.steps = 0  # of the whole training
        self.recording = CudaGraphStep(self._train, self.device, plain=loss is not None)
        self.branches = ParallelStreams(self.groups, self.device)

    # -- one epoch -----------------------------------------------------------------------------------------------------

    def epoch(
        self, number: int, data: Any, tick: EpochProgress, trace: TraceCallback | None = None, every: int = 0
    ) -> None:
        """Train once over the data; what happened is added to the history of every job.

        Every so many steps `trace` is called with the number of steps that are behind.
        """
        self._begin(number)
        steps = 0
        size = len(data) if hasattr(data, "__len__") else None
        for batch in labelled_batches(data, self.splice.back_model):
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

    def _end(self, job: StitchJob, number: int, mean: float) -> None:
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
                    own = logits_of(run_model(self.splice.back_model, call))
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
        group: Sequence[StitchJob],
        arrived: FrontFeatures,
        call: Call,
        targets: Any,
        own: Tensor | None,
        wanted: tuple[Tensor, ...] | None,
    ) -> None:
        """Gradients of the stitches of one cut. `own`: answers of the back network. `wanted`: its features."""
        rows = apply_maps(arrived.rows, [job.family.map(job.parameters) for job in group])
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

    def _similarity(self, group: Sequence[StitchJob], rows: Tensor, wanted: Tensor) -> Tensor:
        parts = rows.chunk(len(group))
        found = [
            job.settings.cka * differentiable_cka(part.flatten(0, 1).float(), wanted.flatten(0, 1).float())
            if job.settings.cka
            else part.new_zeros((), dtype=torch.float32)
            for job, part in zip(group, parts, strict=True)
        ]
        return torch.stack(found)

    # -- both halves ---------------------------------------------------------------------------------------------------

    def arrive(self, call: Call, how: str) -> tuple[FrontFeatures, ...]:
        """The front up to every cut, with its BatchNorm layers as asked for."""
        with self.front.applied(how) if self.front is not None else nullcontext():
            return self.splice.front(call)

    def leave(self, cut: int, rows: Tensor, arrived: FrontFeatures, call: Call, how: str) -> Any:
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
    def passed(self, data: Any, how: str) -> Iterator[tuple[LabelledBatch, dict[int, Any]]]:
        """Per batch, the batch and the outputs of the final maps at every cut, BatchNorm layers as asked for."""
        maps = {cut: [job.family.final(job.parameters) for job in group] for cut, group in self.groups.items()}
        for batch in labelled_batches(data, self.splice.back_model):
            with self._cast():
                arrived = self.arrive(batch.call, how)
                outputs = {
                    cut: self.leave(cut, apply_maps(arrived[cut].rows, maps[cut]), arrived[cut], batch.call, how)
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

    def statistics(self, cut: int, place: int) -> PairBatchNormStatistics | None:
        """A copy of the statistics of one stitch, where BatchNorm adapts."""
        back = self.backs[cut]
        if self.front is None or back is None:
            return None
        front = BatchNormStatistics(self.splice.front_model).to(self.device).load(self.front.of(0))
        return PairBatchNormStatistics(
            front, BatchNormStatistics(self.splice.back_model).to(self.device).load(back.of(place))
        )

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
