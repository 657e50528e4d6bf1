"""Time of folding: against the printed algorithm, on a torchvision ResNet-50, and against a lower bound.

The printed algorithm recomputes the distances of a layer before every merge. Where that takes too long, it does so
before every k-th merge only, with our merges in between, and its time is extrapolated to all of them. The networks are
untrained. Their BatchNorm scales are random, so that features have lengths as different as those of trained networks;
equal ones would never be merged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from intertwine.fold.fold import build_fold
from intertwine.fold.merging import MergeState, feature_slices, run_schedule
from intertwine.fold.options import PRINTED, Options
from intertwine.fold.prepare import PreparedModel, prepare
from intertwine.lab.zoo.networks.registry import build

SIZE = 32  # of CIFAR images
BARS = {"ratio": 50.0, "resnet50": 60.0}
Pairs = dict[int, list[tuple[int, int]]]  # layer → the features merged, in order


def spread(model: nn.Module, seed: int = 0) -> nn.Module:
    """The same network, every BatchNorm scale drawn from exp(N(0, 1))."""
    chance = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data = torch.randn(module.num_features, generator=chance).exp()
    return model.eval()


# -- ours --------------------------------------------------------------------------------------------------------------


class Recorded(MergeState):
    """Merging that records every pair."""

    def __init__(self, prepared: PreparedModel, options: Options) -> None:
        super().__init__(prepared.wires, options)
        self.pairs: Pairs = {w: [] for w in range(len(prepared.wires))}

    def merge(self, w: int, m: int, n: int) -> None:
        self.pairs[w].append((m, n))
        super().merge(w, m, n)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of a call."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def floor(prepared: PreparedModel, options: Options) -> float:
    """Seconds for one Gram matrix per wire, a lower bound for computing all distances."""
    measured = MergeState(prepared.wires, options).measured
    rows = [[feature_slices(s.block.data, s.dim).numpy() for s in wire.slots if measured(s)] for wire in prepared.wires]

    def grams() -> None:
        for wire in rows:
            for own in wire:
                own @ own.T

    return timed(grams)[0]


def measure_ours(model: nn.Module, x: Tensor, beta: float, **chosen: Any) -> tuple[dict[str, Any], Recorded]:
    """The parts of one folding, timed."""
    options = Options(beta=beta, **chosen)
    reading, prepared = timed(lambda: prepare(model, ((x,), {}), options.norm))
    least = floor(prepared, options)
    start = time.perf_counter()
    merging = Recorded(prepared, options)
    run_schedule(merging)
    seconds = time.perf_counter() - start
    building, _ = timed(lambda: build_fold(prepared, merging))
    return {
        "merges": sum(map(len, merging.pairs.values())), "features": sum(w.size for w in prepared.wires),
        "reading": reading, "merging": seconds, "building": building, "whole": reading + seconds + building,
        "floor": least, "over_floor": seconds / least,
    }, merging  # fmt: skip


# -- the printed way ---------------------------------------------------------------------------------------------------


@dataclass
class Printed:
    """Algorithm 1 on a chain of layers, with counts, in double precision; merged features are removed at once.

    weights[l] has shape (features, features before, entries).
    """

    weights: list[Tensor]
    beta: float
    every: int = 1
    pairs: Pairs = field(default_factory=dict)
    asked: int = 0  # number of distance tables
    made: int = 0
    making: float = 0.0

    def distances(self, layer: int) -> Tensor:
        """All distances of Eq. 6, from the current weights."""
        table = torch.zeros(())
        for rows in (self.weights[layer].flatten(1), self.weights[layer + 1].transpose(0, 1).flatten(1)):
            squares = rows.square().sum(1)
            table = table + squares[:, None] + squares[None, :] - 2 * rows @ rows.T
        return table

    def run(self, ours: Mapping[int, Sequence[tuple[int, int]]]) -> float:
        """Merge every layer completely; returns the seconds, extrapolated to a table before every merge."""
        start = time.perf_counter()
        for layer in range(len(self.weights) - 1):
            self._fold(layer, list(ours[layer]))
        apart = time.perf_counter() - start - self.making
        return apart + self.making * self.asked / self.made

    def _fold(self, layer: int, ours: list[tuple[int, int]]) -> None:
        left = list(range(len(self.weights[layer])))  # the first of the original features in each
        counts = torch.ones(len(left), dtype=torch.float64)
        done = self.pairs.setdefault(layer, [])
        while len(left) > 1:
            self.asked += 1
            if self.asked % self.every == 0 or len(done) == len(ours):
                start = time.perf_counter()
                pair = self._next(layer)
                self.making, self.made = self.making + time.perf_counter() - start, self.made + 1
                if pair is None:
                    return
                m, n = pair
            else:
                m, n = map(left.index, ours[len(done)])
            done.append((left[m], left[n]))
            self._merge(layer, m, n, counts)
            counts[m] += counts[n]
            counts = _without(counts, n, 0)
            left.pop(n)

    def _next(self, layer: int) -> tuple[int, int] | None:
        table = self.distances(layer)
        largest = table.max()
        table.fill_diagonal_(torch.inf)
        least = int(table.argmin())
        if table.view(-1)[least] > self.beta * largest:
            return None
        return cast("tuple[int, int]", tuple(sorted(divmod(least, len(table)))))

    def _merge(self, layer: int, m: int, n: int, counts: Tensor) -> None:
        rows, columns = self.weights[layer], self.weights[layer + 1]
        rows[m] += rows[n]
        columns[:, m] = (counts[m] * columns[:, m] + counts[n] * columns[:, n]) / (counts[m] + counts[n])
        self.weights[layer], self.weights[layer + 1] = _without(rows, n, 0), _without(columns, n, 1)


def _without(x: Tensor, n: int, axis: int) -> Tensor:
    """A tensor without one slice."""
    return torch.cat([x.narrow(axis, 0, n), x.narrow(axis, n + 1, x.shape[axis] - n - 1)], axis)


def chain_of(model: nn.Module) -> list[Tensor]:
    """The weights of a VGG as a chain, with every BatchNorm folded into the layer before it."""
    found: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            weight = module.weight.detach().double()
            found.append(weight.reshape(len(weight), len(found[-1]) if found else weight.shape[1], -1).clone())
        elif isinstance(module, nn.BatchNorm2d):
            deviation = (cast("Tensor", module.running_var).double() + module.eps).sqrt()
            found[-1] *= (module.weight.detach().double() / deviation)[:, None, None]
    return found


# -- rows --------------------------------------------------------------------------------------------------------------


def measure_printed(beta: float, every: int, model: nn.Module | None = None, name: str = "vgg16_bn") -> dict[str, Any]:
    """Our folding of a VGG and the printed algorithm on the same weights, with a comparison of the merges."""
    if model is None:
        torch.manual_seed(0)
        model = spread(build(name))
    row, merging = measure_ours(model, torch.zeros(1, 3, SIZE, SIZE), beta, **PRINTED)
    printed = Printed(chain_of(model), beta, every)
    seconds = printed.run(merging.pairs)
    return row | {
        "what": name, "schedule": "layerwise", "beta": beta, "options": "PRINTED",
        "printed": seconds, "measured_tables": printed.made, "tables": printed.asked,
        "extrapolated": printed.made < printed.asked, "ratio": seconds / row["merging"],
        "ratio_whole": seconds / row["whole"], "same_merges": printed.pairs == merging.pairs, "bar": BARS["ratio"],
    }  # fmt: skip


def measure_large(name: str, beta: float, side: int = 224) -> Iterator[dict[str, Any]]:
    """A network of torchvision: by the default of `fold`, where few features merge, and by the largest distance."""
    from intertwine.checkpoints.libraries import declare_missing_ops

    declare_missing_ops()
    import torchvision

    torch.manual_seed(0)
    model, x = spread(torchvision.models.get_model(name)), torch.zeros(1, 3, side, side)
    for options, chosen in {"as called": {}, 'maximum="fixed"': {"maximum": "fixed"}}.items():
        row, _ = measure_ours(model, x, beta, **chosen)
        said = {"what": f"torchvision {name}", "schedule": "layerwise", "beta": beta, "options": options}
        yield row | said | {"bar": BARS.get(name)}
