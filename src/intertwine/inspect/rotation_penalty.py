"""Rotation penalty: the accuracy lost when the features of a layer are transformed and the layers behind are
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
from intertwine.stitch.halves import frozen, split_network, unwrapped
from intertwine.stitch.resize import FeatureForm, from_rows, to_rows
from intertwine.stitch.result import summary
from intertwine.stitch.stitch import ProgressCallback
from intertwine.stitch.tracing import alike, first_samples
from intertwine.symmetry.symmetry import Symmetry, symmetry

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ----------------------------------------------------------------------------------------------------
# Rotation penalties as results: one trial, all trials of a run, and their picture (Figure 4 of paper 0).


@dataclass(frozen=True)
class PenaltyTrial:
    """One transform of one layer. All accuracies are shares of the test answers.

    Attributes:
        at, kind, seed: the layer, the kind of transform, and what it was drawn with.
        before: accuracy of the network as it was given. inserted: with the transform, before any training.
        history: after every epoch of fine-tuning. loss: mean over the last epoch; None where it was not finite.
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
        """Accuracy of the best epoch on the test data. Paper 0 reports it; it is chosen by what it reports."""
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
    """What transforms of layers cost, one trial each.

    Attributes:
        trials: in the order layers, kinds, seeds. settings: what all trials share.
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
            parts = [f"{what} {_spread(self.values(what)[at, kind])}" for what in ("inserted", "after", "penalty")]
            count = len(self.values()[at, kind])
            lines.append(f"{at}, {kind}: {', '.join(parts)} ({count} trial{'s' * (count > 1)})")
        before = f"before {self.trials[0].before:.4f}; " if self.trials else ""
        bad = sum(trial.loss is None and bool(trial.history) for trial in self.trials)
        diverged = f"; {bad} trials diverged" if bad else ""
        return f"RotationPenalty({before}{'; '.join(lines)}{diverged})"


def _spread(values: Sequence[float]) -> str:
    mean, std = summary(values)
    return f"{mean:.4f} ± {std:.4f}" if len(values) > 1 else f"{mean:.4f}"


def draw_bars(
    table: Mapping[tuple[str, str], Sequence[float]], what: str, factor: float | int = 1, *,
    crosses: Mapping[tuple[str, str], float] | None = None, told: str = "told by others",
) -> Figure:  # fmt: skip
    """Groups of bars: one group per first key, one bar per second, with whiskers where there are several values.

    `crosses`: numbers to set beside the bars, and what they are called.

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
        axes.plot(*zip(*beside, strict=True), "kx", label=told) if beside else None
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.set_ylabel(what, fontsize=9)
    axes.axhline(0, color="0.6", linewidth=0.8)
    legend_below(figure)
    return figure


# ----------------------------------------------------------------------------------------------------
# A network frozen up to a layer, and a copy of it whose layers behind can be trained on transformed features.


@dataclass(frozen=True, eq=False)
class LayerBatch:
    """One batch at the layer: its features, and the values that go around the layer."""

    batch: LabelledBatch
    features: Tensor
    around: tuple[Any, ...]

    @property
    def bytes(self) -> int:
        """What it takes to keep."""
        tensors = [x for x in tree_leaves((self.features, self.around, self.batch.call)) if isinstance(x, Tensor)]
        return sum(x.numel() * x.element_size() for x in tensors)


class LayerSplit:
    """A network up to a layer, which is only read, and a copy for the layers behind.

    Attributes:
        model: the network that was given. rest: the copy; `start` puts its weights back to where they were.
        layout, channels: of the features at the layer. weights: parameters of the copy that are behind the layer.
        example: one batch at the layer.

    Raises:
        InputError: a path that stands for no layer or for several, a network that cannot be cut into steps.
    """

    def __init__(self, model: nn.Module, at: str, example: LabelledBatch) -> None:
        refuse_scripted(model)
        self.model = unwrapped(model)
        self.rest = copy_module(self.model)
        self._begun = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        places = layer_paths(model, at)  # paths are those of what was given, wrappers and all
        if len(places) != 1 or not places[0].path:
            raise InputError(
                f"A layer to transform was asked for by {at!r}, which stands for {len(places)} places or for the whole "
                "network. Name one module inside."
            )
        self.at = str(replace(places[0], asked=None))
        with frozen([self.model, self.rest]):
            self._front = split_network(self.model, places, copied_arguments(example.call), {}, complete=False)
            self._back = split_network(self.rest, places, copied_arguments(example.call), {}, complete=True)
        if reason := self._front.reason or self._back.reason:
            raise InputError(
                f"The layers behind {at!r} were to be trained alone, but the network cannot be cut there: {reason}. "
                "Use a network whose forward can be traced (torch.fx)."
            )
        self.layout = self._front.layouts[0]
        self.example = self._pass(example)
        self.channels = FeatureForm(self.layout, tuple(self.example.features.shape)).channels
        self.rest.requires_grad_(True)
        self.rest.eval()
        self.weights = self._behind(self.example)

    def _behind(self, first: LayerBatch) -> list[nn.Parameter]:
        """Parameters that the outputs depend on where the features at the layer are given."""
        with torch.enable_grad():
            loss = self.loss(first, torch.eye(self.channels, dtype=torch.float64))[0]
            found = list(self.rest.parameters())
            slopes = torch.autograd.grad(loss, found, allow_unused=True) if loss.requires_grad else ()
        weights = [weight for weight, slope in zip(found, slopes, strict=False) if slope is not None]
        if not weights:
            raise InputError(f"There is nothing to train behind {self.at!r}. Name a layer further in front.")
        return weights

    def start(self, moved: nn.Module | None = None) -> None:
        """The weights of the copy as they were, or those of a moved network, in evaluation mode."""
        self.rest.load_state_dict(self._begun if moved is None else moved.state_dict())
        self.rest.eval()

    def passed(self, data: Any) -> Iterator[LayerBatch]:
        """Every batch at the layer; the front runs without gradients."""
        for batch in labelled_batches(data, self.model):
            yield self._pass(batch)

    def _pass(self, batch: LabelledBatch) -> LayerBatch:
        with frozen([self.model]):
            taken = self._front.run.start(copied_arguments(batch.call), [0], [0])[0]
        return LayerBatch(batch, taken.tensor, taken.around)

    def outputs(self, passed: LayerBatch, matrix: Float[Tensor, "channels channels"]) -> Any:
        """What the copy makes of a batch whose features are transformed."""
        rows = to_rows(passed.features, self.layout)
        shape = tuple(passed.features.shape)
        tensor = from_rows(rows @ matrix.to(rows).T, FeatureForm(self.layout, shape))
        return self._back.run.finish(0, tensor, copied_arguments(passed.around), copied_arguments(passed.batch.call))

    def loss(self, passed: LayerBatch, matrix: Float[Tensor, "channels channels"]) -> tuple[Tensor, Tensor]:
        """Cross-entropy of a batch, and the sums that `features.scoring.score` gives."""
        outputs, batch = self.outputs(passed, matrix), passed.batch
        if classes_second(getattr(outputs, "logits", outputs), batch.targets) is None:
            raise InputError(
                "A rotation penalty is a difference of accuracies, so the outputs must be one number per class and the "
                "targets the numbers of classes. Pass batches of (inputs, classes)."
            )
        sums = score(outputs, batch.targets, batch.samples, None)
        return sums[0] / sums[1], sums.detach()


class LayerFeatures:
    """The features of some data, for many passes.

    A list of batches is the same in every pass, so its features are kept where they fit; batches come in another order
    in every pass that asks for one. Other data, such as a DataLoader, may augment, and is run again every time.
    """

    def __init__(self, halves: LayerSplit, data: Any, memory: float | int) -> None:
        self.halves, self.data = halves, data
        self._kept: list[LayerBatch] | None = None
        if isinstance(data, (list, tuple)) and data:
            first = next(halves.passed(data[:1]), None)
            if first is not None and first.bytes * len(data) <= memory:
                self._kept = [*halves.passed(data)]

    def read(self, epoch: int = 0, generator: torch.Generator | None = None) -> Iterator[LayerBatch]:
        """One pass."""
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)
        held: Any = self.data if self._kept is None else self._kept
        if generator is not None and isinstance(held, (list, tuple)):
            held = [held[i] for i in torch.randperm(len(held), generator=generator).tolist()]
        yield from self.halves.passed(held) if self._kept is None else held


@torch.no_grad()
def transformed_accuracy(halves: LayerSplit, test: LayerFeatures, matrix: Float[Tensor, "channels channels"]) -> float:
    """Share of right answers with the features transformed."""
    halves.rest.eval()
    sums = sum(halves.loss(passed, matrix)[1] for passed in test.read())
    assert isinstance(sums, Tensor)
    return float(1 - sums[2] / sums[3])


# ----------------------------------------------------------------------------------------------------
# Rotation penalty: what a network loses when a layer's features are transformed and the layers behind trained again.
#
# The sanity test of intertwiners of paper 0, section 3.3: the layers behind can undo a member of G_ReLU, but no rotation.
# Rows 000-G41 and 000-G63.


DROPS, FACTOR = 4, 0.5  # of the learning rate, evenly spaced over the epochs, as in paper 0
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
    """Transform the features of a layer at random, train the layers behind, and see what accuracy is lost.

    A fixed matrix is put behind the layer, over its channels. Everything up to it is frozen, everything behind is
    trained with Adam in a copy; dropout and BatchNorm modules there work as in training. The model stays as it was.

    Args:
        model: any network that torch.fx can trace. at: a layer before its activation, or several; see
            `intertwine.data.layers`.
        data: batches of (inputs, classes) to train on, read once per epoch. A list of batches is the same in every
            epoch: its features at the layer are computed once where they take no more than `memory` bytes, and its
            batches come in a random order. Anything else is run through the front in every epoch.
        test: batches to score on.
        kind: of transform, one or several of `intertwine.inspect.transforms.KINDS`. "identity" is the control: what
            fine-tuning alone does. "element" is undone exactly in the layers behind before they are trained.
        seeds: one trial each. epochs, rate: of the fine-tuning; the rate is halved four times, evenly spaced.
        out: a folder from which a killed run goes on, trial by trial.
        progress: called with what is being done and which part of all work is behind.

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
    places, kinds, numbers = _asked(at, kind, seeds, epochs)
    check_readable_again(data)
    check_readable_again(test)
    given, model, tell = model, unwrapped(model), progress or (lambda doing, part: None)
    example = next(iter(labelled_batches(data, model)))
    folder = None if out is None else Path(out)

    @cache
    def own_symmetry() -> Symmetry:  # found only where a kind needs it
        args, kwargs = copied_arguments(first_samples(example.call))
        with frozen([model]):
            return symmetry(model, *args, **kwargs)

    shared = {"epochs": epochs, "rate": rate, "weights": digest(model)}
    total, trials = len(places) * len(kinds) * len(numbers), []
    with nullcontext() if folder is None else folder_lock(folder):
        for i, place in enumerate(places):
            halves = LayerSplit(given, place, example)
            learn, judge = LayerFeatures(halves, data, memory), LayerFeatures(halves, test, memory)
            before = transformed_accuracy(halves, judge, torch.eye(halves.channels, dtype=torch.float64))
            for one, seed in product(kinds, numbers):
                plan = {"at": place, "kind": one, "seed": seed, "before": before, **shared}
                file = None if folder is None else folder / f"layer{i}-{one}-{seed}.json"
                found, doing = _left(file, plan), f"{one} at {place}"
                if found is None:
                    matrix, moved = _transform(halves, one, seed, own_symmetry)
                    heard = _part_of(tell, doing, len(trials), total)
                    found = _fine_tune(halves, moved, matrix, learn, judge, epochs, rate, seed, heard)
                    if file is not None:
                        write_json(file, {"plan": plan, "found": found})
                history = tuple(found["history"])
                trials.append(PenaltyTrial(place, one, seed, before, found["inserted"], history, found["loss"]))
                tell(doing, len(trials) / total)
    return RotationPenalty(tuple(trials), shared)


def _part_of(tell: ProgressCallback, doing: str, behind: int, total: int) -> Callable[[float], None]:
    """What hears of one trial, as a part of all."""
    return lambda part: tell(doing, (behind + part) / total)


def _asked(
    at: str | Sequence[str], kind: str | Sequence[str], seeds: Iterable[int], epochs: int
) -> tuple[list[str], list[str], list[int]]:
    """Layers, kinds and seeds, each once."""
    places = [at] if isinstance(at, str) else list(dict.fromkeys(at))
    kinds = [kind] if isinstance(kind, str) else list(dict.fromkeys(kind))
    numbers = list(dict.fromkeys(seeds))
    for one in kinds:
        check_kind(one)
    if not (places and kinds and numbers) or epochs < 0:
        raise InputError(
            f"Rotation penalties were asked for at {len(places)} layers, of {len(kinds)} kinds, with {len(numbers)} "
            f"seeds and {epochs} epochs. Give at least one layer, one kind ({', '.join(KINDS)}) and one seed, and no "
            "negative number of epochs."
        )
    return places, kinds, numbers


def _transform(
    halves: LayerSplit, kind: str, seed: int, own_symmetry: Callable[[], Symmetry]
) -> tuple[Tensor, nn.Module | None]:
    """The matrix of a trial, and the network that undoes it where there is one."""
    if kind != "element":
        return random_transform(kind, halves.channels, seed), None
    matrix, moved = random_element(
        own_symmetry(), halves.model, halves.at.removesuffix(":output"), halves.layout, halves.channels, seed
    )
    halves.start(moved)
    first = halves.example
    with torch.no_grad(), frozen([halves.model]):
        args, kwargs = copied_arguments(first.batch.call)
        if not alike(halves.outputs(first, matrix), halves.model(*args, **kwargs)):
            raise InputError(
                f"An element of the network's group was asked for at {halves.at!r}, but the layers behind do not undo "
                "it there: values that it moves too go around the layer, as in a residual block. Use a layer inside "
                "the block, or one behind its sum."
            )
    return matrix, moved


def _fine_tune(
    halves: LayerSplit,
    moved: nn.Module | None,
    matrix: Tensor,
    learn: LayerFeatures,
    judge: LayerFeatures,
    epochs: int,
    rate: float | int,
    seed: int,
    heard: Callable[[float], None],
) -> dict[str, Any]:
    """Train the layers behind on transformed features: accuracy before, after every epoch, and the last mean loss."""
    halves.start(moved)
    inserted = transformed_accuracy(halves, judge, matrix)
    optimizer = torch.optim.Adam(halves.weights, rate)
    generator = torch.Generator().manual_seed(seed)
    history, loss = [], None
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(seed)  # of dropout
        for epoch in range(epochs):
            optimizer.param_groups[0]["lr"] = rate * FACTOR ** ((DROPS + 1) * epoch // epochs)
            halves.rest.train()
            total = torch.zeros(4, dtype=torch.float64, device=halves.weights[0].device)
            for passed in learn.read(epoch, generator):
                optimizer.zero_grad()
                one, sums = halves.loss(passed, matrix)
                one.backward()
                optimizer.step()
                total += sums
            history.append(transformed_accuracy(halves, judge, matrix))
            mean = float(total[0] / total[1])
            loss = mean if isfinite(mean) else None
            heard((epoch + 1) / epochs)
    optimizer.zero_grad()
    return {"history": history, "loss": loss, "inserted": inserted}


def _left(file: Path | None, plan: dict[str, Any]) -> dict[str, Any] | None:
    """What a run before left of a trial; a trial of another plan is refused."""
    if file is None or not file.exists():
        return None
    held = json.loads(file.read_text(encoding="utf-8"))
    differ = [key for key in plan if held["plan"].get(key) != plan[key]]
    if differ:
        raise InputError(
            f"A trial was to be taken up again from {file}, but it holds one of another plan, which differs in "
            f"{', '.join(differ)}. Give another folder, or remove this one."
        )
    return held["found"]
