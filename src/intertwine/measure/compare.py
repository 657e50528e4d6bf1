"""`compare`: the layers of two networks against each other, on any data, by any measures.

Measures that need products of features only are summed batch by batch, exactly, and nothing else is kept, unless the
features themselves are smaller. Other measures need all samples at once: the features are collected, every layer is
prepared once per resolution, and every pair is compared. What does not fit into memory is refused before the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from intertwine.argument_types import Float
from intertwine.data.batches import Fingerprint, check_batches
from intertwine.data.features import CapturedLayer, Features, features
from intertwine.data.layers import layer_paths
from intertwine.data.layouts import arrange, arrange_pair
from intertwine.errors import InputError, did_you_mean, unknown_name
from intertwine.figures import new_figure
from intertwine.lazy import data_frame
from intertwine.measure.measure import FEATURES, PAIRS, Measure, Result, every, find
from intertwine.measure.streaming import CkaForm, StreamingCKA, StreamingMoments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FLOAT64_BYTES, FLOAT32_BYTES = 8, 4  # measures work in float64, Gram matrices may be in float32
WORK_MATRICES = 3  # of a pair of layers: its products, their eigenvectors, and rows that replace the samples
#: Measures that `StreamingCKA` computes. Others that need products only go to `StreamingMoments`.
STREAMED = {
    "linear_cka": CkaForm(False, True), "linear_cka_biased": CkaForm(True, True), "rv": CkaForm(True, True),
    "kernel_alignment": CkaForm(True, False),
}  # fmt: skip
#: Policies under which positions are rows, so that two layers must have the same ones.
ROWS_AT_POSITIONS = ("channels", "tokens")
LayerTensors = Mapping[str, Tensor] | Features


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of `compare`.

    Attributes:
        first, second: the layers of both networks. measures: their names. policy: how positions and tokens are treated.
        results: (measure, layer of the first, layer of the second) → `Result`.
        fingerprint: of the data.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    measures: tuple[str, ...]
    policy: str
    results: Mapping[tuple[str, str, str], Result] = field(repr=False)
    fingerprint: Fingerprint

    def result(self, first: str, second: str, measure: str | None = None) -> Result:
        """The result of one pair of layers."""
        key = (self._measure(measure), first, second)
        if key not in self.results:
            known = [*self.first, *self.second]
            wrong = first if first not in self.first else second
            raise InputError(
                f"The layer {wrong!r} is not compared. {did_you_mean(wrong, known)}See .first and .second."
            )
        return self.results[key]

    def matrix(self, measure: str | None = None) -> Float[Tensor, "first second"]:
        """The values of one measure; NaN if a pair has none."""
        name = self._measure(measure)
        rows = [[self.results[name, a, b].value for b in self.second] for a in self.first]
        return torch.tensor(rows, dtype=torch.float64)

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per measure and pair of layers, as plain data."""
        return list(self._rows())

    def to_dict(self) -> dict[str, Any]:
        """As plain data, with None if a pair has no value, because JSON has no NaN."""
        rows = [row | {"value": None if math.isnan(row["value"]) else row["value"]} for row in self._rows()]
        return {"first": list(self.first), "second": list(self.second), "policy": self.policy, "results": rows}

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return data_frame(self.to_rows())

    def plot(
        self, measure: str | None = None, names: tuple[str, str] = ("the first network", "the second network")
    ) -> Figure:
        """A heat map of one measure, the first network's layers from top to bottom."""
        name, values = self._measure(measure), self.matrix(measure)
        low, high = find(name).range
        baselines = [r.baseline for (one, *_), r in self.results.items() if one == name and r.baseline is not None]
        chance = f"\nunrelated features: {min(baselines):.2f} to {max(baselines):.2f}" if baselines else ""
        figure = new_figure(2.4 + 0.32 * len(self.second), 1.8 + 0.28 * len(self.first))
        axes = figure.subplots()
        highest = high if high < inf else None
        picture = axes.imshow(values.numpy(), vmin=max(0.0, low), vmax=highest, cmap="viridis")
        axes.set_xticks(range(len(self.second)), self.second, rotation=90, fontsize=7)
        axes.set_yticks(range(len(self.first)), self.first, fontsize=7)
        axes.set_ylabel(f"layers of {names[0]}", fontsize=8)
        axes.set_xlabel(f"layers of {names[1]}", fontsize=8)
        axes.set_title(f"{name}, {self.fingerprint.samples:,} samples, {self.policy}{chance}", fontsize=9)
        figure.colorbar(picture, ax=axes, shrink=0.8)
        return figure

    def words(self) -> str:
        """What was compared, in words."""
        size = f"{len(self.first)} × {len(self.second)} layers"
        return f"{size} by {', '.join(self.measures)}, {self.fingerprint.samples:,} samples, {self.policy}"

    def __repr__(self) -> str:
        return f"Comparison({self.words()})"

    def _measure(self, name: str | None) -> str:
        chosen = name or self.measures[0]
        if chosen not in self.measures:
            raise InputError(unknown_name("measure", chosen, self.measures))
        return chosen

    def _rows(self) -> Iterator[dict[str, Any]]:
        for (measure, a, b), result in self.results.items():
            yield {
                "measure": measure, "first": a, "second": b, "value": result.value, "degenerate": result.degenerate,
                "baseline": result.baseline, "notes": "; ".join(result.notes), "policy": self.policy,
                "samples": self.fingerprint.samples, "data": self.fingerprint.digest,
            }  # fmt: skip


# -- The verb ----------------------------------------------------------------------------------------------------------


def compare(
    a: nn.Module,
    b: nn.Module,
    data: Any,
    layers: str | Iterable[str] | None = None,
    measures: str | Sequence[str] = ("linear_cka",),
    policy: str = "channels",
    layers_b: str | Iterable[str] | None = None,
    memory: int | float | None = None,
) -> Comparison:
    """Every chosen layer of one network against every chosen layer of another, on the same data.

    Args:
        a, b: two networks, which may differ in everything but their inputs.
        data: any iterable of (inputs, targets).
        layers: module paths or patterns, as for `intertwine.features`; None for all. layers_b: of the second network,
            if they are different.
        measures: one or several names out of `intertwine.measures()`.
        policy: "channels" (every position is a sample; the larger resolution is averaged onto the smaller), "flatten",
            "pool", "tokens", or "structured" (channels and positions are kept apart, for measures that tell them apart;
            others treat it as "flatten"). Under "channels", measures with a kernel over channels and positions
            (`relu_cka`, `channel_cka`) use each layer at its own resolution. Padding, if the inputs have an attention
            mask, is left out of rows and means.
        memory: bytes that may be used at once; None for the free memory of the system.

    Returns:
        A `Comparison`: `.matrix()`, `.to_rows()`, `.to_frame()`, `.plot()`.

    Example:
        >>> import torch, intertwine
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> g = torch.Generator().manual_seed(0)
        >>> batches = [(torch.randn(20, 4, generator=g), None) for _ in range(3)]
        >>> found = intertwine.compare(net, net, batches, measures=["linear_cka", "cca"])
        >>> found
        Comparison(3 × 3 layers by linear_cka, cca, 60 samples, channels)
        >>> found.matrix().diagonal().tolist()
        [1.0, 1.0, 1.0]
    """
    chosen = [find(name) for name in ([measures] if isinstance(measures, str) else measures)]
    if not chosen:
        raise InputError("measures is empty. Name at least one, such as linear_cka.")
    check_batches(data)
    # layers and data may be generators, which can be read only once
    layers = layers if layers is None or isinstance(layers, str) else list(layers)
    wanted = layers, layers if layers_b is None else layers_b if isinstance(layers_b, str) else list(layers_b)
    for model, names, which in zip((a, b), wanted, ("first", "second"), strict=True):
        layer_paths(model, names, f"the {which} network")  # so that an error names the network
    batches = list(data) if iter(data) is data else data
    first, second = features(a, batches, wanted[0]), features(b, batches, wanted[1])
    found: dict[tuple[str, str, str], Result] = {}
    if _by_batches(first, second, policy, chosen, _memory_limit(a) if memory is None else float(memory)):
        fingerprint = _stream(first, second, policy, chosen, found)
    else:  # all measures use the collected features, without a second pass
        one_view = policy not in ROWS_AT_POSITIONS or (policy == "tokens" and not any(map(_structured, chosen)))
        kept = policy if one_view else None
        fingerprint = _collect(first.collect(kept), second.collect(kept), policy, chosen, found)
    order = [(m.name, x, y) for m in chosen for x, y in product(first.names, second.names)]
    names = tuple(m.name for m in chosen)
    return Comparison(first.names, second.names, names, policy, {key: found[key] for key in order}, fingerprint)


def _by_batches(first: Features, second: Features, policy: str, chosen: list[Measure], limit: float) -> bool:
    """Whether to sum products batch by batch instead of collecting features; refuses what does not fit either way."""
    collected = _bytes_collected(first, second, policy, chosen)
    if all(m.memory == FEATURES for m in chosen):
        streamed = _bytes_streamed(first, second, policy, chosen)
        if collected is None or streamed <= collected:
            _check_memory(streamed, limit, "batch by batch", 'The layers are wide: use the policy "pool", or fewer.')
            return True
        what = f"of layers wider than the samples, under {policy!r},"
    else:
        names = [m.name for m in chosen if m.memory != FEATURES]
        pairs = [m.name for m in chosen if m.memory == PAIRS]
        what = f"by {', '.join(names)} with all samples in memory"
        what += f" ({', '.join(pairs)}: every sample with every other)" if pairs else ""
    streaming = ", ".join(m.name for m in every() if m.memory == FEATURES)
    advice = f'Use fewer samples or layers, the policy "pool", or only measures that go batch by batch: {streaming}.'
    _check_memory(collected or 0, limit, what, advice)
    return False


def _split(chosen: list[Measure]) -> tuple[list[Measure], list[Measure]]:
    """The measures of `StreamingCKA`, and those of `StreamingMoments`."""
    return [m for m in chosen if m.name in STREAMED], [m for m in chosen if m.name not in STREAMED]


def _stream(
    first: Features, second: Features, policy: str, chosen: list[Measure], found: dict[tuple[str, str, str], Result]
) -> Fingerprint:
    """All pairs in one pass, with separate sums for every resolution."""
    aligned, moments = _split(chosen)
    tables = _tables(first, second, policy)
    pairs = {sizes: [pair.names for pair in table] for sizes, table in tables.items()}
    baseline = any(m.baseline for m in moments)
    cka = {sizes: StreamingCKA(names) for sizes, names in pairs.items() if aligned}
    sums = {sizes: StreamingMoments(names, baseline) for sizes, names in pairs.items() if moments}
    streams = iter(first), iter(second)
    for left, right in zip(*streams, strict=True):
        for sizes, table in tables.items():
            sides = _arranged(table, left, right, streams[0].mask)
            for one in (s[sizes] for s in (cka, sums) if s):
                one.update(*sides)
    streams[0].fingerprint.check(streams[1].fingerprint)
    for sizes, names in pairs.items():
        for measure, pair in product(aligned, names):
            result = cka[sizes].result(*pair, **STREAMED[measure.name]._asdict())
            found[measure.name, *pair] = replace(result, measure=measure.name)
        for pair in names if moments else ():
            found.update({(r.measure, *pair): r for r in sums[sizes].results(moments, *pair)})
    return streams[0].fingerprint


def _collect(
    first: Features, second: Features, policy: str, chosen: list[Measure], found: dict[tuple[str, str, str], Result]
) -> Fingerprint:
    """All samples in memory; every layer is prepared once per measure and resolution."""
    first.check(second)
    for measure in chosen:
        own = "structured" if policy in ROWS_AT_POSITIONS and _structured(measure) else policy
        for table in _tables(first, second, own).values():
            sides = _arranged(table, first, second, first.mask, done=first.policy is not None)
            a, b = ({k: measure.prepare(x) for k, x in side.items()} for side in sides)
            for x, y in (pair.names for pair in table):
                found[measure.name, x, y] = measure.compare(a[x], b[y])
    assert first.fingerprint is not None
    return first.fingerprint


def _structured(measure: Measure) -> bool:
    """Whether a measure uses channels and positions of each layer at its own resolution."""
    return measure.positions and not measure.meets


@dataclass(frozen=True)
class LayerPair:
    """Two layers that are compared under a policy."""

    first: CapturedLayer
    second: CapturedLayer
    policy: str

    @property
    def names(self) -> tuple[str, str]:
        return self.first.name, self.second.name

    @property
    def positions(self) -> tuple[int, ...]:
        """The common positions, if these are rows; empty under other policies."""
        if self.policy not in ROWS_AT_POSITIONS:
            return ()
        sizes, others = (
            tuple(size for size, kind in zip(x.shape, x.layout.replace("n", ""), strict=True) if kind == "p")
            for x in (self.first, self.second)
        )
        rank = max(len(sizes), len(others))
        return tuple(min(pair) for pair in zip(sizes or (1,) * rank, others or (1,) * rank, strict=False))

    def arrange(self, x: Tensor, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both layers as rows and features."""
        if self.policy in ROWS_AT_POSITIONS:
            return arrange_pair(x, y, self.policy, (self.first.layout, self.second.layout), mask)
        return arrange(x, self.policy, self.first.layout, mask), arrange(y, self.policy, self.second.layout, mask)


def _tables(first: Features, second: Features, policy: str) -> dict[tuple[int, ...], list[LayerPair]]:
    """All pairs of layers, by their common positions."""
    tables: dict[tuple[int, ...], list[LayerPair]] = {}
    for x, y in product(first.layers, second.layers):
        pair = LayerPair(x, y, policy)
        tables.setdefault(pair.positions, []).append(pair)
    return tables


def _arranged(
    table: list[LayerPair], left: LayerTensors, right: LayerTensors, mask: Tensor | None, done: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The layers of one table, each arranged once, unless that is already `done`."""
    xs: dict[str, Tensor] = {}
    ys: dict[str, Tensor] = {}
    for pair in table:
        x, y = pair.names
        if x not in xs or y not in ys:
            xs[x], ys[y] = (left[x], right[y]) if done else pair.arrange(left[x], right[y], mask)
    return xs, ys


# -- Memory ------------------------------------------------------------------------------------------------------------


def _memory_limit(model: nn.Module) -> float:
    """Free bytes on the device of a model; infinite if the system does not report them."""
    free = available_memory(next((tensor.device for tensor in model.parameters()), torch.device("cpu")))
    return inf if free is None else float(free)


def available_memory(device: torch.device) -> int | None:
    """Free bytes on a device; None if the system does not report them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _check_memory(needed: int, limit: float, what: str, advice: str) -> None:
    if needed > limit:
        raise InputError(
            f"A comparison {what} needs at least {needed / 1e9:.3g} GB at once, but only {limit / 1e9:.3g} GB are "
            f"available. {advice} memory=BYTES sets another limit."
        )


def _bytes_collected(first: Features, second: Features, policy: str, chosen: Sequence[Measure]) -> int | None:
    """Bytes at least of all samples: as captured, one copy in float64, and what grows with pairs of samples.

    None if the number of samples is unknown.
    """
    samples = first.source.samples() if first.source is not None else None
    if samples is None:
        return None

    def rows(layer: CapturedLayer, measure: Measure) -> int:
        if policy in ("flatten", "pool") or _structured(measure):
            return samples
        return samples * prod(layer.shape) // max(1, _channels(layer))

    layers = [*first.layers, *second.layers]
    widths = [_channels(layer) if policy == "pool" else prod(layer.shape) for layer in layers]
    values = sum(samples * w * (layer.itemsize + FLOAT64_BYTES) for layer, w in zip(layers, widths, strict=True))
    pairs = [sum(rows(layer, m) ** 2 * FLOAT32_BYTES for layer in layers) for m in chosen if m.memory == PAIRS]
    return values + max(pairs, default=0)


def _bytes_streamed(first: Features, second: Features, policy: str, chosen: list[Measure]) -> int:
    """Bytes of all products that are summed batch by batch, and of the largest pair while it is compared."""
    aligned, moments = _split(chosen)
    a, b = ([prod(x.shape) if policy == "flatten" else _channels(x) for x in side.layers] for side in (first, second))
    own, pairs, needed = sum(d * d for d in a + b), sum(a) * sum(b), 0
    if aligned:
        needed += own + pairs
    if moments:  # with a baseline also products of pairs in another order of samples
        both = (1 + int(any(m.baseline for m in moments))) * pairs
        needed += own + both + WORK_MATRICES * (max(a) + max(b)) ** 2
    return FLOAT64_BYTES * needed


def _channels(layer: CapturedLayer) -> int:
    kinds = layer.layout.replace("n", "")
    return prod(size for size, kind in zip(layer.shape, kinds, strict=True) if kind == "c")
