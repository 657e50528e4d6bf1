"""A network frozen up to a layer, and a copy of it whose layers behind can be trained on transformed features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from intertwine.errors import InputError
from intertwine.features.batches import fresh
from intertwine.features.labelled import Labelled, labelled
from intertwine.features.places import sites
from intertwine.features.scoring import classes_second, score
from intertwine.graph.capture import refuse_scripted
from intertwine.graph.copies import copied
from intertwine.shapes import Float
from intertwine.stitch.frozen import frozen, unwrapped
from intertwine.stitch.half import halved
from intertwine.stitch.meeting import Spot, from_rows, to_rows


@dataclass(frozen=True, eq=False)
class Passed:
    """One batch at the layer: its features, and the values that go around the layer."""

    batch: Labelled
    features: Tensor
    around: tuple[Any, ...]

    @property
    def bytes(self) -> int:
        """What it takes to keep."""
        tensors = [x for x in tree_leaves((self.features, self.around, self.batch.call)) if isinstance(x, Tensor)]
        return sum(x.numel() * x.element_size() for x in tensors)


class Halves:
    """A network up to a layer, which is only read, and a copy for the layers behind.

    Attributes:
        model: the network that was given. rest: the copy; `start` puts its weights back to where they were.
        layout, channels: of the features at the layer. weights: parameters of the copy that are behind the layer.
        example: one batch at the layer.

    Raises:
        InputError: a path that stands for no layer or for several, a network that cannot be cut into steps.
    """

    def __init__(self, model: nn.Module, at: str, example: Labelled) -> None:
        refuse_scripted(model)
        self.model = unwrapped(model)
        self.rest = copied(self.model)
        self._begun = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        places = sites(model, at)  # paths are those of what was given, wrappers and all
        if len(places) != 1 or not places[0].path:
            raise InputError(
                f"A layer to transform was asked for by {at!r}, which stands for {len(places)} places or for the whole "
                "network. Name one module inside."
            )
        self.at = str(replace(places[0], asked=None))
        with frozen([self.model, self.rest]):
            self._front = halved(self.model, places, fresh(example.call), {}, complete=False)
            self._back = halved(self.rest, places, fresh(example.call), {}, complete=True)
        if reason := self._front.reason or self._back.reason:
            raise InputError(
                f"The layers behind {at!r} were to be trained alone, but the network cannot be cut there: {reason}. "
                "Use a network whose forward can be traced (torch.fx)."
            )
        self.layout = self._front.layouts[0]
        self.example = self._pass(example)
        self.channels = Spot(self.layout, tuple(self.example.features.shape)).channels
        self.rest.requires_grad_(True)
        self.rest.eval()
        self.weights = self._behind(self.example)

    def _behind(self, first: Passed) -> list[nn.Parameter]:
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

    def passed(self, data: Any) -> Iterator[Passed]:
        """Every batch at the layer; the front runs without gradients."""
        for batch in labelled(data, self.model):
            yield self._pass(batch)

    def _pass(self, batch: Labelled) -> Passed:
        with frozen([self.model]):
            taken = self._front.run.start(fresh(batch.call), [0], [0])[0]
        return Passed(batch, taken.tensor, taken.around)

    def outputs(self, passed: Passed, matrix: Float[Tensor, "channels channels"]) -> Any:
        """What the copy makes of a batch whose features are transformed."""
        rows = to_rows(passed.features, self.layout)
        shape = tuple(passed.features.shape)
        tensor = from_rows(rows @ matrix.to(rows).T, Spot(self.layout, shape))
        return self._back.run.finish(0, tensor, fresh(passed.around), fresh(passed.batch.call))

    def loss(self, passed: Passed, matrix: Float[Tensor, "channels channels"]) -> tuple[Tensor, Tensor]:
        """Cross-entropy of a batch, and the sums that `features.scoring.score` gives."""
        outputs, batch = self.outputs(passed, matrix), passed.batch
        if classes_second(getattr(outputs, "logits", outputs), batch.targets) is None:
            raise InputError(
                "A rotation penalty is a difference of accuracies, so the outputs must be one number per class and the "
                "targets the numbers of classes. Pass batches of (inputs, classes)."
            )
        sums = score(outputs, batch.targets, batch.samples, None)
        return sums[0] / sums[1], sums.detach()


class Features:
    """The features of some data, for many passes.

    A list of batches is the same in every pass, so its features are kept where they fit; batches come in another order
    in every pass that asks for one. Other data, such as a DataLoader, may augment, and is run again every time.
    """

    def __init__(self, halves: Halves, data: Any, memory: float | int) -> None:
        self.halves, self.data = halves, data
        self._kept: list[Passed] | None = None
        if isinstance(data, (list, tuple)) and data:
            first = next(halves.passed(data[:1]), None)
            if first is not None and first.bytes * len(data) <= memory:
                self._kept = [*halves.passed(data)]

    def read(self, epoch: int = 0, generator: torch.Generator | None = None) -> Iterator[Passed]:
        """One pass."""
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)
        held: Any = self.data if self._kept is None else self._kept
        if generator is not None and isinstance(held, (list, tuple)):
            held = [held[i] for i in torch.randperm(len(held), generator=generator).tolist()]
        yield from self.halves.passed(held) if self._kept is None else held


@torch.no_grad()
def accuracy(halves: Halves, test: Features, matrix: Float[Tensor, "channels channels"]) -> float:
    """Share of right answers with the features transformed."""
    halves.rest.eval()
    sums = sum(halves.loss(passed, matrix)[1] for passed in test.read())
    assert isinstance(sums, Tensor)
    return float(1 - sums[2] / sums[3])
