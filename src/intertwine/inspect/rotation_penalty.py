"""Rotation penalty: the accuracy lost when the features of a layer are transformed and the later layers are
fine-tuned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import product
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from intertwine.argument_types import Float
from intertwine.checkpoints.weights import digest
from intertwine.data.batches import LabelledBatch, copied_arguments, labelled_batches
from intertwine.data.evaluate import classes_second, score
from intertwine.data.layers import layer_paths
from intertwine.errors import InputError
from intertwine.figures import legend_below, new_figure
from intertwine.files import folder_lock, write_json
from intertwine.graph.model import copy_module, refuse_scripted
from intertwine.inspect.transforms import KINDS, check_kind, random_element, random_transform
from intertwine.stitch.fitting import check_readable_again
from intertwine.stitch.resize import FeatureForm, from_rows, to_rows
from intertwine.stitch.result import summary
from intertwine.stitch.split_network import frozen, split_network, unwrapped
from intertwine.stitch.tracing import alike, first_samples
from intertwine.stitch.training import PassProgress, ProgressCallback
from intertwine.symmetry.symmetry import Symmetry, symmetry

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class PenaltyTrial:
    """One transform of one layer. All accuracies are on the test data.

    Attributes:
        at, kind, seed: the layer, the kind of transform, and its seed.
        before: accuracy of the given network. inserted: with the transform, before any training.
        history: after every epoch of fine-tuning. loss: mean over the last epoch; None if it is not finite.
    """

    at: str
    kind: str
    seed: int
    before: float
    inserted: float
    history: tuple[float, ...]
    loss: float | None

    @property
    def after(self) -> float:
        """Accuracy after the last epoch."""
        return self.history[-1] if self.history else self.inserted

    @property
    def best(self) -> float:
        """Accuracy of the best epoch, which is selected on the test data, as in Godfrey et al."""
        return max(self.history, default=self.inserted)

    @property
    def penalty(self) -> float:
        """Accuracy before minus accuracy after fine-tuning."""
        return self.before - self.after

    @property
    def best_penalty(self) -> float:
        """The penalty of the best epoch."""
        return self.before - self.best

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        derived = {name: getattr(self, name) for name in ("after", "best", "penalty", "best_penalty")}
        return asdict(self) | {"history": list(self.history)} | derived


@dataclass(frozen=True)
class RotationPenalty:
    """The accuracy that transforms of layers cost, one trial each.

    Attributes:
        trials: in the order layers, kinds, seeds. settings: of all trials.
    """

    trials: tuple[PenaltyTrial, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def values(self, what: str = "penalty") -> dict[tuple[str, str], list[float]]:
        """(layer, kind) → one number per trial: "penalty", "best_penalty", "before", "inserted", "after", "best"."""
        found: dict[tuple[str, str], list[float]] = {}
        for trial in self.trials:
            found.setdefault((trial.at, trial.kind), []).append(getattr(trial, what))
        return found

    def mean(self, at: str, kind: str, what: str = "penalty") -> float:
        """The mean over the trials of one layer and kind."""
        return summary(self.values(what)[at, kind])[0]

    def to_dict(self) -> dict[str, Any]:
        """As plain data: the settings, every trial, and mean and standard deviation per layer and kind."""
        means = []
        for (at, kind), values in self.values().items():
            mean, std = summary(values)
            means.append({"at": at, "kind": kind, "trials": len(values), "penalty": mean, "std": std})
        return {"settings": dict(self.settings), "means": means, "trials": [trial.to_dict() for trial in self.trials]}

    def plot(self, what: str = "penalty") -> Figure:
        """Bars per layer, one per kind; whiskers are one standard deviation to each side."""
        figure = draw_bars(self.values(what), f"{what.replace('_', ' ')}, percentage points", 100)
        figure.axes[0].set_xlabel("layer; whiskers: one standard deviation over trials", fontsize=9)
        return figure

    def __repr__(self) -> str:
        lines = []
        for at, kind in self.values():
            parts = [f"{what} {_mean_text(self.values(what)[at, kind])}" for what in ("inserted", "after", "penalty")]
            count = len(self.values()[at, kind])
            lines.append(f"{at}, {kind}: {', '.join(parts)} ({count} trial{'s' * (count > 1)})")
        before = f"before {self.trials[0].before:.4f}; " if self.trials else ""
        bad = sum(trial.loss is None and bool(trial.history) for trial in self.trials)
        diverged = f"; {bad} trials diverged" if bad else ""
        return f"RotationPenalty({before}{'; '.join(lines)}{diverged})"


def _mean_text(values: Sequence[float]) -> str:
    mean, std = summary(values)
    return f"{mean:.4f} ± {std:.4f}" if len(values) > 1 else f"{mean:.4f}"


def draw_bars(
    table: Mapping[tuple[str, str], Sequence[float]], what: str, factor: float | int = 1, *,
    crosses: Mapping[tuple[str, str], float] | None = None, cross_label: str = "reference",
) -> Figure:  # fmt: skip
    """Groups of bars: one group per first key, one bar per second, with whiskers if there are several values.

    Args:
        table: (group, kind) → values. what: the label of the vertical axis. factor: multiplies all values.
        crosses: numbers to mark at the bars. cross_label: their name in the legend.

    >>> figure = draw_bars({("conv1", "relu"): [0.0, 0.1], ("conv1", "orthogonal"): [0.3]}, "penalty")
    >>> len(figure.axes[0].patches), figure.axes[0].get_ylabel()
    (2, 'penalty')
    """
    groups, kinds = (list(dict.fromkeys(key[i] for key in table)) for i in (0, 1))
    figure = new_figure(2.4 + 0.9 * max(2, len(groups)), 3.4)
    axes = figure.subplots()
    width = 0.8 / max(1, len(kinds))
    for i, kind in enumerate(kinds):
        held = [(x, summary(table[group, kind])) for x, group in enumerate(groups) if table.get((group, kind))]
        places = [x + width * (i - (len(kinds) - 1) / 2) for x, _ in held]
        whiskers = [factor * spread for _, (_, spread) in held]
        axes.bar(places, [factor * mean for _, (mean, _) in held], width, yerr=whiskers, label=kind, capsize=3)
        known = [(place, (crosses or {}).get((groups[x], kind))) for place, (x, _) in zip(places, held, strict=True)]
        beside = [(place, factor * value) for place, value in known if value is not None]
        if beside:
            axes.plot(*zip(*beside, strict=True), "kx", label=cross_label)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.set_ylabel(what, fontsize=9)
    axes.axhline(0, color="0.6", linewidth=0.8)
    legend_below(figure)
    return figure


@dataclass(frozen=True, eq=False)
class LayerBatch:
    """One batch at the layer: its features, and the values of skip connections around it."""

    batch: LabelledBatch
    features: Tensor
    skip_values: tuple[Any, ...]

    @property
    def bytes(self) -> int:
        """The memory of its tensors."""
        tensors = [x for x in tree_leaves((self.features, self.skip_values, self.batch.call)) if isinstance(x, Tensor)]
        return sum(x.numel() * x.element_size() for x in tensors)


class LayerSplit:
    """A frozen network up to a layer, and a copy of it whose later layers can be trained on transformed features.

    Attributes:
        model: the given network. rest: the copy; `start` resets its weights.
        layout, channels: of the features at the layer. weights: parameters of the copy after the layer.
        example: one batch at the layer.

    Raises:
        InputError: a path of no layer or of several, a network that cannot be traced.
    """

    def __init__(self, model: nn.Module, at: str, example: LabelledBatch) -> None:
        refuse_scripted(model)
        self.model = unwrapped(model)
        self.rest = copy_module(self.model)
        self._initial = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        places = layer_paths(model, at)  # in the given network, wrappers included
        if len(places) != 1 or not places[0].path:
            raise InputError(
                f"{at!r} stands for {len(places)} layers or for the whole network. Name one module inside."
            )
        self.at = str(replace(places[0], asked=None))
        with frozen([self.model, self.rest]):
            self._front = split_network(self.model, places, copied_arguments(example.call), {}, complete=False)
            self._back = split_network(self.rest, places, copied_arguments(example.call), {}, complete=True)
        if reason := self._front.reason or self._back.reason:
            raise InputError(
                f"The network cannot be split at {at!r}, so the later layers cannot be trained alone: {reason}. Use a "
                "network that torch.fx can trace."
            )
        self.layout = self._front.layouts[0]
        self.example = self._pass(example)
        self.channels = FeatureForm(self.layout, tuple(self.example.features.shape)).channels
        self.rest.requires_grad_(True)
        self.rest.eval()
        self.weights = self._later_weights()

    def _later_weights(self) -> list[nn.Parameter]:
        """Parameters that the outputs depend on, given the features at the layer."""
        with torch.enable_grad():
            loss = self.loss(self.example, torch.eye(self.channels, dtype=torch.float64))[0]
            found = list(self.rest.parameters())
            slopes = torch.autograd.grad(loss, found, allow_unused=True) if loss.requires_grad else ()
        weights = [weight for weight, slope in zip(found, slopes, strict=False) if slope is not None]
        if not weights:
            raise InputError(f"There is nothing to train after {self.at!r}. Name an earlier layer.")
        return weights

    def start(self, moved: nn.Module | None = None) -> None:
        """Reset the copy, in evaluation mode, to the given weights or to those of a moved network."""
        self.rest.load_state_dict(self._initial if moved is None else moved.state_dict())
        self.rest.eval()

    def batches(self, data: Any) -> Iterator[LayerBatch]:
        """Every batch at the layer; the front runs without gradients."""
        for batch in labelled_batches(data, self.model):
            yield self._pass(batch)

    def _pass(self, batch: LabelledBatch) -> LayerBatch:
        with frozen([self.model]):
            found = self._front.run.start(copied_arguments(batch.call), [0], [0])[0]
        return LayerBatch(batch, found.tensor, found.skip_values)

    def outputs(self, passed: LayerBatch, matrix: Float[Tensor, "channels channels"]) -> Any:
        """The outputs of the copy for a batch with transformed features."""
        rows = to_rows(passed.features, self.layout)
        tensor = from_rows(rows @ matrix.to(rows).T, FeatureForm(self.layout, tuple(passed.features.shape)))
        return self._back.run.finish(
            0, tensor, copied_arguments(passed.skip_values), copied_arguments(passed.batch.call)
        )

    def loss(self, passed: LayerBatch, matrix: Float[Tensor, "channels channels"]) -> tuple[Tensor, Tensor]:
        """Cross-entropy of a batch, and the sums of `intertwine.data.evaluate.score`."""
        outputs, batch = self.outputs(passed, matrix), passed.batch
        if classes_second(getattr(outputs, "logits", outputs), batch.targets) is None:
            raise InputError(
                "A rotation penalty is a difference of accuracies, so the outputs must be one number per class, and "
                "the targets classes. Pass batches of (inputs, classes)."
            )
        sums = score(outputs, batch.targets, batch.samples, None)
        return sums[0] / sums[1], sums.detach()


class LayerFeatures:
    """The features of some data, for many passes.

    A list of batches is the same in every pass, so its features are cached if they fit in memory; a pass may shuffle
    the batches. Other data, such as a DataLoader, may augment, and runs through the front in every pass.
    """

    def __init__(self, split: LayerSplit, data: Any, memory: float | int) -> None:
        self.split, self.data = split, data
        self._cached: list[LayerBatch] | None = None
        if isinstance(data, (list, tuple)) and data:
            first = next(split.batches(data[:1]), None)
            if first is not None and first.bytes * len(data) <= memory:
                self._cached = [*split.batches(data)]

    def read(self, epoch: int = 0, generator: torch.Generator | None = None) -> Iterator[LayerBatch]:
        """One pass."""
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)
        held: Any = self.data if self._cached is None else self._cached
        if generator is not None and isinstance(held, (list, tuple)):
            held = [held[i] for i in torch.randperm(len(held), generator=generator).tolist()]
        yield from self.split.batches(held) if self._cached is None else held


@torch.no_grad()
def transformed_accuracy(split: LayerSplit, test: LayerFeatures, matrix: Float[Tensor, "channels channels"]) -> float:
    """Accuracy with transformed features."""
    split.rest.eval()
    sums = sum(split.loss(passed, matrix)[1] for passed in test.read())
    assert isinstance(sums, Tensor)
    return float(1 - sums[2] / sums[3])


DROPS, FACTOR = 4, 0.5  # of the learning rate, evenly spaced over the epochs, as in Godfrey et al. 2022
GIGABYTE = 2**30


def rotation_penalty(
    model: nn.Module,
    at: str | Sequence[str],
    data: Any,
    test: Any,
    *,
    kind: str | Sequence[str] = ("identity", "relu", "orthogonal"),
    seeds: Iterable[int] = (0,),
    epochs: int = 50,
    rate: float | int = 1e-3,
    memory: float | int = 4 * GIGABYTE,
    out: str | Path | None = None,
    progress: ProgressCallback | None = None,
) -> RotationPenalty:
    """Transform the features of a layer at random, fine-tune the later layers, and measure the lost accuracy.

    This is the sanity check of intertwiners in Godfrey et al. 2022, section 3.3: later layers can undo a member of
    G_ReLU, but not a rotation. A fixed matrix acts on the channels of the layer. The network up to it is frozen; the
    layers after it are trained with Adam in a copy, with dropout and BatchNorm as in training. The model is not
    changed.

    Args:
        model: any network that torch.fx can trace. at: a layer before its activation, or several; see
            `intertwine.data.layers`.
        data: batches of (inputs, classes) to train on, read once per epoch. The features of a list of batches are
            computed once if they take no more than `memory` bytes, and the batches are shuffled. Anything else runs
            through the front in every epoch.
        test: batches to score on.
        kind: of transform, one or several of `intertwine.inspect.transforms.KINDS`. "identity" is the control, the
            effect of fine-tuning alone. "element" is undone exactly in the later layers before they are trained.
        seeds: one trial each. epochs, rate: of the fine-tuning; the rate is halved four times, evenly spaced.
        memory: bytes of cached features. out: a folder from which a killed run resumes, trial by trial.
        progress: called with the current activity and the completed share of all work.

    Raises:
        InputError: layers, kinds or data that cannot be used.

    Example:
        >>> import torch
        >>> from intertwine.inspect.rotation_penalty import rotation_penalty
        >>> _ = torch.manual_seed(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        >>> batches = [(x, net(x).argmax(1))]
        >>> found = rotation_penalty(net, "0", batches, batches, kind=["element", "orthogonal"], epochs=1)
        >>> [(trial.kind, trial.before, trial.inserted == 1) for trial in found.trials]
        [('element', 1.0, True), ('orthogonal', 1.0, False)]
    """
    places, kinds = ([one] if isinstance(one, str) else list(dict.fromkeys(one)) for one in (at, kind))
    numbers = list(dict.fromkeys(seeds))
    for one in kinds:
        check_kind(one)
    if not (places and kinds and numbers) or epochs < 0:
        raise InputError(
            f"There are {len(places)} layers, {len(kinds)} kinds, {len(numbers)} seeds and {epochs} epochs. Give at "
            f"least one layer, one kind ({', '.join(KINDS)}) and one seed, and epochs of at least 0."
        )
    check_readable_again(data)
    check_readable_again(test)
    given, model, progress = model, unwrapped(model), progress or (lambda doing, part: None)
    example = next(iter(labelled_batches(data, model)))
    folder = None if out is None else Path(out)

    @cache
    def own_symmetry() -> Symmetry:  # found only if a kind needs it
        args, kwargs = copied_arguments(first_samples(example.call))
        with frozen([model]):
            return symmetry(model, *args, **kwargs)

    shared = {"epochs": epochs, "rate": rate, "weights": digest(model)}
    total, trials = len(places) * len(kinds) * len(numbers), []
    with nullcontext() if folder is None else folder_lock(folder):
        for i, place in enumerate(places):
            split = LayerSplit(given, place, example)
            train, judge = LayerFeatures(split, data, memory), LayerFeatures(split, test, memory)
            before = transformed_accuracy(split, judge, torch.eye(split.channels, dtype=torch.float64))
            for one, seed in product(kinds, numbers):
                plan = {"at": place, "kind": one, "seed": seed, "before": before, **shared}
                file = None if folder is None else folder / f"layer{i}-{one}-{seed}.json"
                found, doing = _read_trial(file, plan), f"{one} at {place}"
                if found is None:

                    def trial_progress(part: float, doing: str = doing, done: int = len(trials)) -> None:
                        progress(doing, (done + part) / total)

                    matrix, moved = _transform(split, one, seed, own_symmetry)
                    found = _fine_tune(split, moved, matrix, train, judge, epochs, rate, seed, trial_progress)
                    if file is not None:
                        write_json(file, {"plan": plan, "found": found})
                history = tuple(found["history"])
                trials.append(PenaltyTrial(place, one, seed, before, found["inserted"], history, found["loss"]))
                progress(doing, len(trials) / total)
    return RotationPenalty(tuple(trials), shared)


def _transform(
    split: LayerSplit, kind: str, seed: int, own_symmetry: Callable[[], Symmetry]
) -> tuple[Tensor, nn.Module | None]:
    """The matrix of a trial, and for "element" the network that undoes it."""
    if kind != "element":
        return random_transform(kind, split.channels, seed), None
    matrix, moved = random_element(
        own_symmetry(), split.model, split.at.removesuffix(":output"), split.layout, split.channels, seed
    )
    split.start(moved)
    first = split.example
    with torch.no_grad(), frozen([split.model]):
        args, kwargs = copied_arguments(first.batch.call)
        if not alike(split.outputs(first, matrix), split.model(*args, **kwargs)):
            raise InputError(
                f"The later layers do not undo an element of the network's group at {split.at!r}: it also moves "
                "values that go around the layer, as in a residual block. Use a layer inside the block, or one after "
                "its sum."
            )
    return matrix, moved


def _fine_tune(
    split: LayerSplit,
    moved: nn.Module | None,
    matrix: Tensor,
    train: LayerFeatures,
    judge: LayerFeatures,
    epochs: int,
    rate: float | int,
    seed: int,
    progress: PassProgress,
) -> dict[str, Any]:
    """Train the later layers on transformed features: accuracy before and after every epoch, and the last mean loss."""
    split.start(moved)
    inserted = transformed_accuracy(split, judge, matrix)
    optimizer = torch.optim.Adam(split.weights, rate)
    generator = torch.Generator().manual_seed(seed)
    history, loss = [], None
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(seed)  # of dropout
        for epoch in range(epochs):
            optimizer.param_groups[0]["lr"] = rate * FACTOR ** ((DROPS + 1) * epoch // epochs)
            split.rest.train()
            total = torch.zeros(4, dtype=torch.float64, device=split.weights[0].device)
            for passed in train.read(epoch, generator):
                optimizer.zero_grad()
                one, sums = split.loss(passed, matrix)
                one.backward()
                optimizer.step()
                total += sums
            history.append(transformed_accuracy(split, judge, matrix))
            mean = float(total[0] / total[1])
            loss = mean if isfinite(mean) else None
            progress((epoch + 1) / epochs)
    optimizer.zero_grad()
    return {"history": history, "loss": loss, "inserted": inserted}


def _read_trial(file: Path | None, plan: dict[str, Any]) -> dict[str, Any] | None:
    """The saved result of a trial; a trial of another plan is refused."""
    if file is None or not file.exists():
        return None
    held = json.loads(file.read_text(encoding="utf-8"))
    differ = [key for key in plan if held["plan"].get(key) != plan[key]]
    if differ:
        raise InputError(
            f"{file} holds a trial of another plan, which differs in {', '.join(differ)}. Give another folder, or "
            "remove this one."
        )
    return held["found"]
