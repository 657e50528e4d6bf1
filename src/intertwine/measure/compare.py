"""`compare`: the layers of two networks against each other, over any data, by any measures.

Measures that need products of features only are summed up batch by batch, exactly, and nothing else is kept, unless
the features themselves are smaller. Other measures need all samples at once: the features are collected, every layer is
prepared once per resolution at which it is compared, and every pair is compared. What will not fit into memory is
refused before anything is collected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor, nn

from intertwine.errors import InputError
from intertwine.features.batches import check_batches
from intertwine.features.features import Features, features
from intertwine.features.fingerprint import Fingerprint
from intertwine.features.layer import Layer
from intertwine.features.places import sites
from intertwine.features.policy import arrange, arrange_pair
from intertwine.measure.comparison import Comparison
from intertwine.measure.measure import FEATURES, PAIRS, Measure, find
from intertwine.measure.moments import StreamingMoments
from intertwine.measure.result import Result
from intertwine.measure.room import check_room, collected, room, streamed, streaming_names, summarised
from intertwine.measure.streaming import Form, StreamingCKA

#: Measures that `StreamingCKA` sums up: (biased, centred). Others that need products only go to `StreamingMoments`.
STREAMED = {
    "linear_cka": Form(False, True), "linear_cka_biased": Form(True, True), "rv": Form(True, True),
    "kernel_alignment": Form(True, False),
}  # fmt: skip
#: Policies under which positions are samples, so that two layers must have the same ones.
MATCHED = ("channels", "tokens")
#: What stands for them where a measure tells channels from positions and needs no common ones.
STRUCTURED = "structured"
Views = Mapping[str, Tensor] | Features


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
        sites(model, asked, f"the {which} network")  # a wrong path is told with the network that lacks it
    batches = list(data) if iter(data) is data else data  # what can be walked once only is walked by two networks
    first, second = features(a, batches, wanted[0]), features(b, batches, wanted[1])
    found: dict[tuple[str, str, str], Result] = {}
    if _by_batches(first, second, policy, chosen, room(a, memory)):
        mark = _stream(first, second, policy, chosen, found)
    else:  # the features are in memory anyway: no second pass for linear CKA
        kept = policy if policy not in MATCHED or (policy == "tokens" and not any(map(_structured, chosen))) else None
        mark = _collect(first.collect(kept), second.collect(kept), policy, chosen, found)
    order = [(m.name, x, y) for m in chosen for x, y in product(first.names, second.names)]
    names = tuple(m.name for m in chosen)
    return Comparison(first.names, second.names, names, policy, {key: found[key] for key in order}, mark)


def _named(layers: str | Iterable[str] | None) -> str | list[str] | None:
    """The layers that were asked for, in a form that can be read twice."""
    return layers if layers is None or isinstance(layers, str) else list(layers)


def _by_batches(first: Features, second: Features, policy: str, chosen: list[Measure], limit: float) -> bool:
    """Whether products of features are summed up instead of collecting them; refuses what does not fit either way."""
    together = collected(first, second, policy, chosen)
    if all(m.memory == FEATURES for m in chosen):
        alone = _products(first, second, policy, chosen)
        if together is None or alone <= together:
            check_room(alone, limit, "batch by batch", 'Its layers are wide: use the policy "pool", or fewer layers.')
            return True
        what = f"of layers wider than the samples, under {policy!r},"
    else:
        names = [m.name for m in chosen if m.memory != FEATURES]
        pairs = [m.name for m in chosen if m.memory == PAIRS]
        what = f"by {', '.join(names)} with all samples in memory"
        what += f" ({', '.join(pairs)}: every sample with every other)" if pairs else ""
    advice = f'Take fewer samples or layers, the policy "pool", or only what goes batch by batch: {streaming_names()}.'
    check_room(together or 0, limit, what, advice)
    return False


def _products(first: Features, second: Features, policy: str, chosen: list[Measure]) -> int:
    """Bytes of all sums that go batch by batch."""
    aligned, moments = _sorted(chosen)
    needed = streamed(first, second, policy) if aligned else 0
    return needed + (summarised(first, second, policy, any(m.baseline for m in moments)) if moments else 0)


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
        own = STRUCTURED if policy in MATCHED and _structured(measure) else policy
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
class Meeting:
    """Two layers that are compared under a policy."""

    first: Layer
    second: Layer
    policy: str

    @property
    def names(self) -> tuple[str, str]:
        return self.first.name, self.second.name

    @property
    def where(self) -> tuple[int, ...]:
        """The positions at which they meet, where these are samples; each policy without has one place for all."""
        if self.policy not in MATCHED:
            return ()
        sizes, others = _positions(self.first), _positions(self.second)
        rank = max(len(sizes), len(others))
        pairs = zip(sizes or (1,) * rank, others or (1,) * rank, strict=False)
        return tuple(min(pair) for pair in pairs)

    def arrange(self, x: Tensor, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both layers as rows and features."""
        if self.policy in MATCHED:
            return arrange_pair(x, y, self.policy, (self.first.layout, self.second.layout), mask)
        return arrange(x, self.policy, self.first.layout, mask), arrange(y, self.policy, self.second.layout, mask)


def _tables(first: Features, second: Features, policy: str) -> dict[tuple[int, ...], list[Meeting]]:
    """All pairs of layers, by where they meet."""
    tables: dict[tuple[int, ...], list[Meeting]] = {}
    for x, y in product(first.layers, second.layers):
        meeting = Meeting(x, y, policy)
        tables.setdefault(meeting.where, []).append(meeting)
    return tables


def _arranged(
    table: list[Meeting], left: Views, right: Views, mask: Tensor | None, done: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The layers of one table, each arranged once, unless that was `done` when they were collected."""
    xs: dict[str, Tensor] = {}
    ys: dict[str, Tensor] = {}
    for meeting in table:
        x, y = meeting.names
        if x not in xs or y not in ys:
            xs[x], ys[y] = (left[x], right[y]) if done else meeting.arrange(left[x], right[y], mask)
    return xs, ys


def _positions(layer: Layer) -> tuple[int, ...]:
    kinds = layer.layout.replace("n", "")
    return tuple(size for size, kind in zip(layer.shape, kinds, strict=True) if kind == "p")
