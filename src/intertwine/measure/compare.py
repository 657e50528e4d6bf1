"""`compare`: the layers of two networks against each other, over any data, by any measures; memory is checked before
the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from intertwine.errors import InputError, did_you_mean
from intertwine.figures import new_figure
from intertwine.lazy import data_frame
from intertwine.measure.measure import FEATURES, PAIRS, Measure, Result, every, find
from intertwine.measure.streaming import CkaForm, StreamingCKA, StreamingMoments

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ----------------------------------------------------------------------------------------------------
# Comparison: every layer of one network against every layer of another, by one or several measures.


@dataclass(frozen=True, eq=False)
class Comparison:
    """What `compare` found.

    Attributes:
        first, second: the layers of both networks. measures: by name. policy: how positions and tokens were treated.
        results: (measure, layer of the first, layer of the second) → `Result`.
        fingerprint: of the data both networks saw.
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
                f"The layer {wrong!r} was not compared. {did_you_mean(wrong, known)}See .first and .second."
            )
        return self.results[key]

    def matrix(self, measure: str | None = None) -> Float[Tensor, "first second"]:
        """The values of one measure; not a number where a pair has none."""
        name = self._measure(measure)
        rows = [[self.results[name, a, b].value for b in self.second] for a in self.first]
        return torch.tensor(rows, dtype=torch.float64)

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per measure and pair of layers, as plain data."""
        return list(self._rows())

    def to_dict(self) -> dict[str, Any]:
        """As plain data, with None where a pair has no value: JSON knows no NaN."""
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
        figure = new_figure(2.4 + 0.32 * len(self.second), 1.8 + 0.28 * len(self.first))
        axes = figure.subplots()
        bounds = (low if low > -torch.inf else None, high if high < torch.inf else None)
        picture = axes.imshow(values.numpy(), vmin=max(0.0, bounds[0] or 0.0), vmax=bounds[1], cmap="viridis")
        axes.set_xticks(range(len(self.second)), self.second, rotation=90, fontsize=7)
        axes.set_yticks(range(len(self.first)), self.first, fontsize=7)
        axes.set_ylabel(f"layers of {names[0]}", fontsize=8)
        axes.set_xlabel(f"layers of {names[1]}", fontsize=8)
        axes.set_title(f"{name}, {self.fingerprint.samples:,} samples, {self.policy}{self._chance(name)}", fontsize=9)
        figure.colorbar(picture, ax=axes, shrink=0.8)
        return figure

    def words(self) -> str:
        """What was compared, in words."""
        size = f"{len(self.first)} × {len(self.second)} layers"
        return f"{size} by {', '.join(self.measures)}, {self.fingerprint.samples:,} samples, {self.policy}"

    def __repr__(self) -> str:
        return f"Comparison({self.words()})"

    def _chance(self, measure: str) -> str:
        """What unrelated features score, where the measure says so."""
        known = [r.baseline for (name, *_), r in self.results.items() if name == measure and r.baseline is not None]
        return f"\nunrelated features: {min(known):.2f} to {max(known):.2f}" if known else ""

    def _measure(self, name: str | None) -> str:
        chosen = name or self.measures[0]
        if chosen not in self.measures:
            raise InputError(f"The measure {chosen!r} was not taken; these were: {', '.join(self.measures)}.")
        return chosen

    def _rows(self) -> Iterator[dict[str, Any]]:
        for (measure, a, b), result in self.results.items():
            yield {
                "measure": measure, "first": a, "second": b, "value": result.value, "degenerate": result.degenerate,
                "baseline": result.baseline, "notes": "; ".join(result.notes), "policy": self.policy,
                "samples": self.fingerprint.samples, "data": self.fingerprint.digest,
            }  # fmt: skip


# ----------------------------------------------------------------------------------------------------
# Room: how much memory a comparison needs at once, asked before anything is collected.


FLOAT64_BYTES = 8  # bytes: measures work in float64
WORK_MATRICES = 3  # matrices of a pair of layers: its products, their eigenvectors, and rows that stand for the samples
FLOAT32_BYTES = 4  # bytes: Gram matrices of single precision


def memory_limit(model: nn.Module, given: int | float | None) -> float:
    """Bytes that may be used on the device of a model: those given, or else those that are free."""
    if given is not None:
        return float(given)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    free = available_memory(device)
    return inf if free is None else float(free)


def available_memory(device: torch.device) -> int | None:
    """Bytes that can still be had on a device; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def bytes_collected(first: Features, second: Features, policy: str, chosen: Sequence[Measure]) -> int | None:
    """Bytes at least that all samples need: as captured, one copy in float64, and what grows with pairs of samples.

    None where the data does not tell how many samples it holds.
    """
    samples = first.source.samples() if first.source is not None else None
    if samples is None:
        return None
    layers = [*first.layers, *second.layers]
    values = sum(samples * _width(layer, policy) * (layer.itemsize + FLOAT64_BYTES) for layer in layers)
    pairs = [
        sum(_rows(layer, samples, policy, m) ** 2 * FLOAT32_BYTES for layer in layers)
        for m in chosen
        if m.memory == PAIRS
    ]
    return values + max(pairs, default=0)


def bytes_for_cka(first: Features, second: Features, policy: str) -> int:
    """Bytes of the products of features that are summed up batch by batch: each layer with itself, and all pairs."""
    a, b = ([_features(layer, policy) for layer in side.layers] for side in (first, second))
    return FLOAT64_BYTES * (sum(d * d for d in a + b) + sum(a) * sum(b))


def bytes_for_moments(first: Features, second: Features, policy: str, baseline: bool) -> int:
    """Bytes of the products that stand for all samples, and of the largest pair while it is compared.

    With a baseline there are products of pairs in another order of samples too.
    """
    a, b = ([_features(layer, policy) for layer in side.layers] for side in (first, second))
    pairs = (1 + int(baseline)) * sum(a) * sum(b)
    return FLOAT64_BYTES * (sum(d * d for d in a + b) + pairs + WORK_MATRICES * (max(a) + max(b)) ** 2)


def check_memory(needed: int, limit: float, what: str, advice: str) -> None:
    """Refuse what does not fit.

    Raises:
        InputError: more is needed than there is.
    """
    if needed > limit:
        raise InputError(
            f"A comparison {what} needs at least {needed / 1e9:.3g} GB at once, and {limit / 1e9:.3g} GB may be used. "
            f"{advice} memory=BYTES sets another limit."
        )


def streaming_names() -> str:
    """The names of the measures that need no samples in memory."""
    return ", ".join(m.name for m in every() if m.memory == FEATURES)


def _channels(layer: CapturedLayer) -> int:
    kinds = layer.layout.replace("n", "")
    return prod(size for size, kind in zip(layer.shape, kinds, strict=True) if kind == "c")


def _width(layer: CapturedLayer, policy: str) -> int:
    """Numbers that are kept of one sample."""
    return _channels(layer) if policy == "pool" else prod(layer.shape)


def _features(layer: CapturedLayer, policy: str) -> int:
    """Features of one row."""
    return prod(layer.shape) if policy == "flatten" else _channels(layer)


def _rows(layer: CapturedLayer, samples: int, policy: str, measure: Measure) -> int:
    """Rows that a measure compares with each other; those that tell channels from positions take samples."""
    if policy in ("flatten", "pool") or (measure.positions and not measure.meets):
        return samples
    return samples * prod(layer.shape) // max(1, _channels(layer))


# ----------------------------------------------------------------------------------------------------
# `compare`: the layers of two networks against each other, over any data, by any measures.
#
# Measures that need products of features only are summed up batch by batch, exactly, and nothing else is kept, unless
# the features themselves are smaller. Other measures need all samples at once: the features are collected, every layer is
# prepared once per resolution at which it is compared, and every pair is compared. What will not fit into memory is
# refused before anything is collected.


#: Measures that `StreamingCKA` sums up: (biased, centred). Others that need products only go to `StreamingMoments`.
STREAMED = {
    "linear_cka": CkaForm(False, True), "linear_cka_biased": CkaForm(True, True), "rv": CkaForm(True, True),
    "kernel_alignment": CkaForm(True, False),
}  # fmt: skip
#: Policies under which positions are samples, so that two layers must have the same ones.
ROWS_AT_POSITIONS = ("channels", "tokens")
#: What stands for them where a measure tells channels from positions and needs no common ones.
STRUCTURED = "structured"
LayerTensors = Mapping[str, Tensor] | Features


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
        a, b: two networks, which may differ in everything but what they read.
        data: any iterable of (inputs, targets).
        layers: module paths or patterns, as for `intertwine.features`; None for all. layers_b: of the second network,
            where they are not the same.
        measures: one or several names out of `intertwine.measures()`.
        policy: "channels" (every position is a sample; the larger resolution is averaged onto the smaller), "flatten",
            "pool", "tokens", or "structured" (channels and positions are kept apart; for measures that tell them apart,
            others take it for "flatten"). Under "channels", measures with a kernel over channels and positions
            (`relu_cka`, `channel_cka`) take each layer at its own resolution. Padding, where the inputs have an
            attention mask, is left out of rows and means.
        memory: bytes that may be used at once; None for what the system says is free.

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
        raise InputError("A comparison by no measures was asked for. Name at least one, such as linear_cka.")
    check_batches(data)
    wanted = _named(layers), _named(layers if layers_b is None else layers_b)
    for model, asked, which in zip((a, b), wanted, ("first", "second"), strict=True):
        layer_paths(model, asked, f"the {which} network")  # a wrong path is told with the network that lacks it
    batches = list(data) if iter(data) is data else data  # what can be walked once only is walked by two networks
    first, second = features(a, batches, wanted[0]), features(b, batches, wanted[1])
    found: dict[tuple[str, str, str], Result] = {}
    if _by_batches(first, second, policy, chosen, memory_limit(a, memory)):
        mark = _stream(first, second, policy, chosen, found)
    else:  # the features are in memory anyway: no second pass for linear CKA
        kept = (
            policy
            if policy not in ROWS_AT_POSITIONS or (policy == "tokens" and not any(map(_structured, chosen)))
            else None
        )
        mark = _collect(first.collect(kept), second.collect(kept), policy, chosen, found)
    order = [(m.name, x, y) for m in chosen for x, y in product(first.names, second.names)]
    names = tuple(m.name for m in chosen)
    return Comparison(first.names, second.names, names, policy, {key: found[key] for key in order}, mark)


def _named(layers: str | Iterable[str] | None) -> str | list[str] | None:
    """The layers that were asked for, in a form that can be read twice."""
    return layers if layers is None or isinstance(layers, str) else list(layers)


def _by_batches(first: Features, second: Features, policy: str, chosen: list[Measure], limit: float) -> bool:
    """Whether products of features are summed up instead of collecting them; refuses what does not fit either way."""
    together = bytes_collected(first, second, policy, chosen)
    if all(m.memory == FEATURES for m in chosen):
        alone = _products(first, second, policy, chosen)
        if together is None or alone <= together:
            check_memory(alone, limit, "batch by batch", 'Its layers are wide: use the policy "pool", or fewer layers.')
            return True
        what = f"of layers wider than the samples, under {policy!r},"
    else:
        names = [m.name for m in chosen if m.memory != FEATURES]
        pairs = [m.name for m in chosen if m.memory == PAIRS]
        what = f"by {', '.join(names)} with all samples in memory"
        what += f" ({', '.join(pairs)}: every sample with every other)" if pairs else ""
    advice = f'Take fewer samples or layers, the policy "pool", or only what goes batch by batch: {streaming_names()}.'
    check_memory(together or 0, limit, what, advice)
    return False


def _products(first: Features, second: Features, policy: str, chosen: list[Measure]) -> int:
    """Bytes of all sums that go batch by batch."""
    aligned, moments = _sorted(chosen)
    needed = bytes_for_cka(first, second, policy) if aligned else 0
    return needed + (bytes_for_moments(first, second, policy, any(m.baseline for m in moments)) if moments else 0)


def _sorted(chosen: list[Measure]) -> tuple[list[Measure], list[Measure]]:
    """Those that `StreamingCKA` gives, and those that `StreamingMoments` gives."""
    return [m for m in chosen if m.name in STREAMED], [m for m in chosen if m.name not in STREAMED]


def _stream(
    first: Features, second: Features, policy: str, chosen: list[Measure], found: dict[tuple[str, str, str], Result]
) -> Fingerprint:
    """All pairs in one pass, with their own sums for every resolution at which layers meet."""
    aligned, moments = _sorted(chosen)
    tables = _tables(first, second, policy)
    pairs = {where: [m.names for m in table] for where, table in tables.items()}
    baseline = any(m.baseline for m in moments)
    cka = {where: StreamingCKA(names) for where, names in pairs.items() if aligned}
    sums = {where: StreamingMoments(names, baseline) for where, names in pairs.items() if moments}
    walks = iter(first), iter(second)
    for left, right in zip(*walks, strict=True):
        for where, table in tables.items():
            sides = _arranged(table, left, right, walks[0].mask)
            for stream in (s[where] for s in (cka, sums) if s):
                stream.update(*sides)
    walks[0].fingerprint.check(walks[1].fingerprint)
    for where, names in pairs.items():
        for measure, pair in product(aligned, names):
            result = cka[where].result(*pair, **STREAMED[measure.name]._asdict())
            found[measure.name, *pair] = Result(measure.name, result.value, result.degenerate, notes=result.notes)
        for pair in names if moments else ():
            found.update({(r.measure, *pair): r for r in sums[where].results(moments, *pair)})
    return walks[0].fingerprint


def _collect(
    first: Features, second: Features, policy: str, chosen: list[Measure], found: dict[tuple[str, str, str], Result]
) -> Fingerprint:
    """All samples in memory; every layer is prepared once per measure and resolution."""
    first.check(second)
    for measure in chosen:
        own = STRUCTURED if policy in ROWS_AT_POSITIONS and _structured(measure) else policy
        for table in _tables(first, second, own).values():
            sides = _arranged(table, first, second, first.mask, done=first.policy is not None)
            a, b = ({k: measure.prepare(x) for k, x in side.items()} for side in sides)
            for meeting in table:
                x, y = meeting.names
                found[measure.name, x, y] = measure.compare(a[x], b[y])
    assert first.fingerprint is not None
    return first.fingerprint


def _structured(measure: Measure) -> bool:
    """Whether a measure takes channels and positions of each layer as they are."""
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
    def where(self) -> tuple[int, ...]:
        """The positions at which they meet, where these are samples; each policy without has one place for all."""
        if self.policy not in ROWS_AT_POSITIONS:
            return ()
        sizes, others = _positions(self.first), _positions(self.second)
        rank = max(len(sizes), len(others))
        pairs = zip(sizes or (1,) * rank, others or (1,) * rank, strict=False)
        return tuple(min(pair) for pair in pairs)

    def arrange(self, x: Tensor, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both layers as rows and features."""
        if self.policy in ROWS_AT_POSITIONS:
            return arrange_pair(x, y, self.policy, (self.first.layout, self.second.layout), mask)
        return arrange(x, self.policy, self.first.layout, mask), arrange(y, self.policy, self.second.layout, mask)


def _tables(first: Features, second: Features, policy: str) -> dict[tuple[int, ...], list[LayerPair]]:
    """All pairs of layers, by where they meet."""
    tables: dict[tuple[int, ...], list[LayerPair]] = {}
    for x, y in product(first.layers, second.layers):
        meeting = LayerPair(x, y, policy)
        tables.setdefault(meeting.where, []).append(meeting)
    return tables


def _arranged(
    table: list[LayerPair], left: LayerTensors, right: LayerTensors, mask: Tensor | None, done: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The layers of one table, each arranged once, unless that was `done` when they were collected."""
    xs: dict[str, Tensor] = {}
    ys: dict[str, Tensor] = {}
    for meeting in table:
        x, y = meeting.names
        if x not in xs or y not in ys:
            xs[x], ys[y] = (left[x], right[y]) if done else meeting.arrange(left[x], right[y], mask)
    return xs, ys


def _positions(layer: CapturedLayer) -> tuple[int, ...]:
    kinds = layer.layout.replace("n", "")
    return tuple(size for size, kind in zip(layer.shape, kinds, strict=True) if kind == "p")
