"""`diagnose`: why a merge fails. The health of every layer of the merged network, and findings in words with advice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from intertwine.argument_types import Float
from intertwine.connect.layerwise import LayerOutputs, LayerwisePass, ObservedLayer, PairBatch
from intertwine.connect.llfc import LayerConnectivity, LayerMeters
from intertwine.data.batches import Fingerprint
from intertwine.data.batchnorm import ChannelMoments, batch_norms
from intertwine.data.evaluate import score
from intertwine.data.layers import modules_of
from intertwine.data.weights import mix, path_between, tensors_of
from intertwine.errors import InputError
from intertwine.lazy import data_frame
from intertwine.symmetry.geometry import wire_axes
from intertwine.symmetry.symmetry import symmetry as find_symmetry

# ----------------------------------------------------------------------------------------------------
# How healthy the layers of a mixed network are: what varies, and whether the units of both ends belong together.


WIDEST = 1024  # units; for wider layers only unit i is compared with unit i, not every unit with every other
HALF = 0.5  # a unit that keeps less of its variance than this has collapsed
CONSTANT = 1e-12  # of its own size: a unit that varies less does not vary

Units = Float[Tensor, "rows units"]


@dataclass(frozen=True)
class LayerHealth:
    """One layer of a mixed network, beside both ends.

    Attributes:
        variance: of all units of the mix, over the mean of both ends; None where the ends do not vary.
        collapsed: the fraction of units with less than half the variance of the ends.
        matched: the mean correlation of unit i of one end with unit i of the other. possible: the same in the best
            order of units; None for layers wider than `WIDEST`. Units that never vary are left out of both.
        dead: how many units never vary, in both ends together.
        statistics: what a BatchNorm layer of the mix finds in its input, over the variance it divides by, both relative
            to the same at the ends: 1 where its statistics fit.
    """

    variance: float | None
    collapsed: float | None
    matched: float | None
    possible: float | None
    dead: int
    statistics: float | None = None


@dataclass
class JointMoments:
    """Means, variances and the products of units of both ends, joined batch by batch in float64."""

    a: ChannelMoments = field(default_factory=ChannelMoments)
    b: ChannelMoments = field(default_factory=ChannelMoments)
    cross: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def add(self, a: Units, b: Units) -> None:
        """Take in the features of the same samples in both networks."""
        old, new = self.a.count, a.shape[0]
        means = a.mean(0), b.mean(0)
        shifts = means[0] - self.a.mean.to(a.device), means[1] - self.b.mean.to(a.device)
        share = old * new / (old + new)
        x, y = a - means[0], b - means[1]
        if a.shape[1] > WIDEST:
            cross = (x * y).sum(0) + share * shifts[0] * shifts[1]
        else:
            cross = x.T @ y + share * torch.outer(shifts[0].expand_as(means[0]), shifts[1].expand_as(means[1]))
        self.cross = self.cross.to(a.device) + cross
        self.a.join(new, means[0], x.square().sum(0))
        self.b.join(new, means[1], y.square().sum(0))

    def correlations(self) -> tuple[float | None, float | None]:
        """Of units of the same number; and in the best order, where the layer is not too wide for it."""
        alive = _alive(self.a), _alive(self.b)
        both = alive[0] & alive[1]
        lengths = self.a.squares.sqrt(), self.b.squares.sqrt()
        own = self.cross if self.cross.dim() == 1 else self.cross.diagonal()
        matched = float((own / lengths[0] / lengths[1])[both].mean()) if bool(both.any()) else None
        if self.cross.dim() == 1 or not (bool(alive[0].any()) and bool(alive[1].any())):
            return matched, None
        table = (self.cross / lengths[0][:, None] / lengths[1])[alive[0]][:, alive[1]].cpu().numpy()
        best = table[linear_sum_assignment(table, maximize=True)]
        return matched, float(np.mean(best))


def _alive(moments: ChannelMoments) -> Tensor:
    """Units that vary by more than rounding."""
    variance = moments.variance()
    return variance > CONSTANT**2 * (variance + moments.mean.square())


@dataclass
class NormVariance:
    """What a BatchNorm layer divides by in one network, beside the variance it finds."""

    running: Tensor
    found: ChannelMoments = field(default_factory=ChannelMoments)

    def ratio(self) -> float | None:
        """Found over divided by, the geometric mean over channels that have both."""
        found, running = self.found.variance(), self.running.double()
        known = (found > 0) & (running > 0)
        return float((found[known] / running[known]).log().mean().exp()) if bool(known.any()) else None


@dataclass
class HealthMeter:
    """Adds up what `LayerHealth` needs for one layer; `running` are the three running variances of a BatchNorm layer."""

    running: Sequence[Tensor] = ()
    ends: JointMoments = field(default_factory=JointMoments)
    mixed: ChannelMoments = field(default_factory=ChannelMoments)
    divided: tuple[NormVariance, ...] = ()

    def __post_init__(self) -> None:
        self.divided = tuple(map(NormVariance, self.running))

    def add(self, a: Units, b: Units, mixed: Units) -> None:
        """Take in what the layer gives out in both ends and the mix."""
        self.ends.add(a, b)
        self.mixed.add(mixed, channels=1)

    def hear(self, *inputs: Tensor) -> None:
        """Take in what goes into a BatchNorm layer in both ends and the mix."""
        for one, x in zip(self.divided, inputs, strict=True):
            one.found.add(x, channels=1)

    def result(self) -> LayerHealth:
        wanted = (self.ends.a.variance() + self.ends.b.variance()) / 2
        found, alive = self.mixed.variance(), (_alive(self.ends.a), _alive(self.ends.b))
        varies = alive[0] | alive[1]
        known = bool(varies.any())
        return LayerHealth(
            float(found[varies].sum() / wanted[varies].sum()) if known else None,
            float((found < HALF * wanted)[varies].double().mean()) if known else None,
            *self.ends.correlations(),
            int((~alive[0]).sum() + (~alive[1]).sum()),
            self._statistics(),
        )

    def _statistics(self) -> float | None:
        ratios = [one.ratio() for one in self.divided]
        if not ratios or any(ratio is None for ratio in ratios):
            return None
        a, b, mixed = (ratio or 0.0 for ratio in ratios)
        return mixed / (a * b) ** 0.5


# ----------------------------------------------------------------------------------------------------
# What the figures of a merge mean, in words: findings, and what to do about each.


# Where a figure counts as a finding. All figures are reported whatever these say.
WEAK_END = 0.1  # of accuracy, between the two ends
LOST = 0.02  # of accuracy, below the line between the ends
MISORDERED = 0.25  # of correlation, that a better order of units would win
UNLIKE = 0.5  # mean correlation of units in their best order
UNFIT = 1.5  # factor by which a BatchNorm layer divides wrongly
COLLAPSED = 0.5  # of the variance of the ends
BROKEN = 0.02  # 1 − cos between the feature of the mix and the mix of the features


@dataclass(frozen=True)
class MergeFinding:
    """One thing that is wrong. `figure` is the number behind it; `layers` are those concerned, in their order."""

    kind: str
    layers: tuple[str, ...]
    figure: float
    what: str
    advice: str


@dataclass(frozen=True)
class MergeFigures:
    """What findings are made from; see `Diagnosis` for the entries."""

    layers: tuple[LayerConnectivity, ...]
    health: Mapping[str, LayerHealth]
    wires: Mapping[str, tuple[str, ...]]
    error: tuple[float, float, float] | None
    t: float
    weights_apart: float | None
    normalised: bool
    mixed_statistics: bool

    def named(self, layers: list[str], most: int = 6) -> str:
        """Layers with their wires, in words."""
        words = [f"{x!r} (wire {', '.join(self.wires[x])})" if x in self.wires else repr(x) for x in layers[:most]]
        return ", ".join(words) + (f" and {len(layers) - most} more" if len(layers) > most else "")

    @property
    def lost(self) -> float | None:
        """How much the error of the merged network lies above the line between the ends."""
        if self.error is None:
            return None
        a, b, merged = self.error
        return merged - ((1 - self.t) * a + self.t * b)


def find_problems(measured: MergeFigures) -> tuple[MergeFinding, ...]:
    """What is wrong; what can be mended first."""
    tests = (_weak_end, _order, _statistics, _variance, _unlike, _broken)
    found = [one for test in tests if (one := test(measured)) is not None]
    lost = measured.lost
    if not found and lost is not None and lost > LOST:
        found.append(
            MergeFinding(
                "unexplained", (), lost,
                f"The merged network makes {lost:.1%} more mistakes than the ends, but no layer shows why.",
                "Look at single layers with layers=, and at functions in the forward that are no modules.",
            )
        )  # fmt: skip
    return tuple(found)


def _weak_end(m: MergeFigures) -> MergeFinding | None:
    if m.error is None or abs(m.error[0] - m.error[1]) < WEAK_END:
        return None
    apart = abs(m.error[0] - m.error[1])
    worse = "first" if m.error[0] > m.error[1] else "second"
    return MergeFinding(
        "weak end", (), apart,
        f"The {worse} network itself makes {apart:.1%} more mistakes than the other on this data.",
        "Check that network and the data alone, before merging: weights, normalisation, classes.",
    )  # fmt: skip


def _order(m: MergeFigures) -> MergeFinding | None:
    gains = {n: h.possible - h.matched for n, h in m.health.items() if h.matched is not None and h.possible is not None}
    bad = [name for name, gain in gains.items() if gain > MISORDERED]
    if not bad:
        return None
    worst = max(bad, key=gains.__getitem__)
    health = m.health[worst]
    extent = f"{len(bad)} of {len(m.health)} layers: {m.named(bad)}"
    apart = "" if m.weights_apart is None else f" Weights are {m.weights_apart:.2f} of their size apart."
    none = len(bad) > len(m.health) / 2
    wires = ", ".join(dict.fromkeys(repr(wire) for name in bad for wire in m.wires.get(name, ()))) or "…"
    return MergeFinding(
        "order", tuple(bad), gains[worst],
        f"Units of the two networks are in another order at {extent}. Worst at {worst!r}: unit i of one correlates "
        f"{health.matched:.2f} with unit i of the other, {health.possible:.2f} in the best order.{apart}",
        "Align first: no alignment seems to have been done. intertwine.align(a, b, *example_args)." if none else
        f"Align these layers again: intertwine.align(a, b, *example_args, wires=[{wires}]), from other starts or with "
        "method='activations' and data.",
    )  # fmt: skip


def _statistics(m: MergeFigures) -> MergeFinding | None:
    ratios = {n: h.statistics for n, h in m.health.items() if h.statistics is not None}
    off = {name: max(ratio, 1 / ratio) for name, ratio in ratios.items() if ratio > 0}
    bad = [name for name, factor in off.items() if factor > UNFIT]
    if not bad:
        return None
    worst = max(bad, key=off.__getitem__)
    origin = "They were estimated on other data or another network."
    if m.mixed_statistics:
        origin = "They are the mix of those of both networks, which is not the variance of the mixed network."
    return MergeFinding(
        "statistics", tuple(bad), ratios[worst],
        f"BatchNorm statistics do not fit the merged network at {m.named(bad)}: at {worst!r} the variance is "
        f"{ratios[worst]:.2f} times what the layer divides by. {origin}",
        "Reset them on data: intertwine.data.batchnorm.reset_statistics(merged, data).",
    )  # fmt: skip


def _variance(m: MergeFigures) -> MergeFinding | None:
    ratios = {n: h.variance for n, h in m.health.items() if h.variance is not None}
    bad = [name for name, ratio in ratios.items() if ratio < COLLAPSED]
    if not bad:
        return None
    worst = min(bad, key=ratios.__getitem__)
    share = m.health[worst].collapsed or 0.0
    return MergeFinding(
        "variance", tuple(bad), ratios[worst],
        f"Variance collapses from {bad[0]!r} on; least at {worst!r}, with {ratios[worst]:.2f} of the variance of the "
        f"ends and {share:.0%} of the units below half of it.",
        "Reset the BatchNorm statistics: intertwine.data.batchnorm.reset_statistics(merged, data)." if m.normalised
        else "Align better if layers are out of order, then mend the mix: intertwine.connect.repair.repair(a, b, t, "
        "data).",
    )  # fmt: skip


def _unlike(m: MergeFigures) -> MergeFinding | None:
    best = {n: h.possible for n, h in m.health.items() if h.possible is not None}
    bad = [name for name, value in best.items() if value < UNLIKE]
    if not bad:
        return None
    worst = min(bad, key=best.__getitem__)
    return MergeFinding(
        "unlike", tuple(bad), best[worst],
        f"The networks hold different features at {m.named(bad)}: at {worst!r} units correlate {best[worst]:.2f} even "
        "in their best order.",
        "No order of units will do. Try method='scale-aware', wider networks, longer training, or networks that share "
        "the first epochs.",
    )  # fmt: skip


def _broken(m: MergeFigures) -> MergeFinding | None:
    known = {one.layer: one for one in m.layers if one.llfc[0].distance is not None}
    bad = [name for name, one in known.items() if (one.llfc[0].distance or 0.0) > BROKEN]
    if not bad:
        return None
    first = known[bad[0]]
    why = ""
    if first.sign_agreement is not None:
        why = f" Its inputs have the same sign in both networks for {first.sign_agreement:.0%} of the entries."
    elif first.commutativity is not None and first.commutativity.residual is not None:
        both = first.commutativity
        why = (
            f" (W_A − W_B)(H_A − H_B) is {both.residual:.2f} of the layer's output, its weights differ by "
            f"{both.weights:.2f} and its inputs by {both.inputs:.2f}."
        )
    distance = first.llfc[0].distance or 0.0
    return MergeFinding(
        "llfc", tuple(bad), distance,
        f"The first layer whose features are not the mix of those of both networks is {m.named(bad[:1])}: 1 − cos is "
        f"{distance:.3f}.{why}",
        "Mend what stands above. Where nothing does, align with data (method='activations'), or mix fewer layers.",
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------
# `diagnose`: why did my merge fail? Which layer breaks first, where variance collapses, and what to do next.


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        findings: what is wrong, what can be mended first; empty where nothing was found.
        error: the fraction of wrong answers of the first network, the second and the merged one; None where the targets
            are no classes. t: where the merged network lies, 0 is the first network.
        weights_apart: the distance of the two networks' weights, relative to their size: 1.4 for unrelated ones.
        layers: name → figures of each layer in the order of the forward. connectivity: more of them.
        wires: layer → the wires its units lie on, where example inputs were given.
    """

    findings: tuple[MergeFinding, ...]
    error: tuple[float, float, float] | None
    t: float
    weights_apart: float | None
    layers: Mapping[str, LayerHealth] = field(repr=False)
    connectivity: tuple[LayerConnectivity, ...] = field(repr=False)
    wires: Mapping[str, tuple[str, ...]] = field(repr=False)
    data: Fingerprint

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per layer, as plain data."""
        return [
            {"layer": one.layer, "kind": one.kind, "wires": list(self.wires.get(one.layer, ()))}
            | {"llfc": one.llfc[0].distance, "c": one.llfc[0].c, "baseline": one.baseline}
            | asdict(self.layers[one.layer])
            for one in self.connectivity
        ]

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return data_frame(self.to_rows())

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "findings": [asdict(one) | {"layers": list(one.layers)} for one in self.findings],
            "error": None if self.error is None else list(self.error),
            "t": self.t,
            "weights_apart": self.weights_apart,
            "layers": self.to_rows(),
            "data": self.data.to_dict(),
        }

    def __str__(self) -> str:
        lines = [f"The network at t = {self.t:g} between two, on {self.data.samples:,} samples."]
        if self.error is not None:
            lines.append("Wrong answers: first {:.1%}, second {:.1%}, merged {:.1%}.".format(*self.error))
        if not self.findings:
            lines.append(
                "Nothing found: no layer is out of order, loses its variance or breaks away from both networks."
            )
        for number, one in enumerate(self.findings, 1):
            lines += [f"{number}. {one.what}", f"   Do: {one.advice}"]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Diagnosis({', '.join(one.kind for one in self.findings) or 'nothing found'})"


def diagnose(
    a: nn.Module,
    b: nn.Module,
    data: Any,
    *example_args: Any,
    merged: nn.Module | None = None,
    t: float | int = 0.5,
    layers: str | Sequence[str] | None = None,
) -> Diagnosis:
    """Why a merge of two networks fails, in words and numbers.

    It looks, in one pass, for: an end that is bad itself; units of the two networks that are in another order;
    BatchNorm statistics that do not fit the merged network; features that lose their variance; features that differ in
    any order; and the first layer whose features are not the mix of those of both networks.

    Args:
        a, b: the two networks as they were merged: b after its alignment, where there was one. Neither is changed.
        data: batches of (inputs, targets), read once.
        example_args: inputs of one forward. With them the symmetry is found, and findings name wires beside layers.
        merged: what came of the merge; (1 − t)·a + t·b where None. It may have been mended (`repair`).
        t: how much of b went into the merge. layers: as in `connectivity`.

    Returns:
        A `Diagnosis`: print it. `.findings`, what can be mended first; `.to_rows()` with all figures.

    Raises:
        MismatchError: networks of different architectures. InputError: no data, or t not between 0 and 1.

    Example:
        >>> import torch, intertwine
        >>> a = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.randn(64, 3)
        >>> intertwine.diagnose(a, a, [(x, a(x).argmax(1))])
        Diagnosis(nothing found)
    """
    if not 0 < t < 1:
        raise InputError(f"t must lie strictly between 0 (the first network) and 1 (the second); found {t}.")
    path = path_between(a, b, [0.0, 1.0, t])
    third: Callable[[], nn.Module] = (lambda: path.network(2)) if merged is None else (lambda: merged)
    walk = LayerwisePass([lambda: path.network(0), lambda: path.network(1), third], data, layers)
    meters, doctor = LayerMeters(a, b, (1 - float(t),)), _Doctor(a, b, third())
    for visit in walk:
        mixed = visit.between(0)
        meters.ends(visit)
        meters.between(0, visit, mixed)
        doctor.see(visit, mixed)
    connected, health = meters.results(), {place.name: one.result() for place, one in doctor.meters.items()}
    wires = _wires(path.network(0).eval(), list(doctor.meters), example_args) if example_args else {}
    apart = _weights_apart(a, b)
    stale = bool(doctor.running) and _statistics_are_mixed(a, b, third(), float(t))
    measured = MergeFigures(connected, health, wires, doctor.error, float(t), apart, bool(batch_norms(a)), stale)
    return Diagnosis(
        find_problems(measured), doctor.error, float(t), apart, health, connected, wires, walk.hasher.fingerprint
    )


class _Doctor:
    """Adds up the health of every layer and the wrong answers of the three networks."""

    def __init__(self, a: nn.Module, b: nn.Module, mixed: nn.Module) -> None:
        tables = [batch_norms(model) for model in (a, b, mixed)]
        shared = [name for name in tables[0] if all(name in table for table in tables)]
        # copied: the network between may be written anew for every batch
        self.running = {
            name: [table[name].get_buffer("running_var").detach().clone() for table in tables] for name in shared
        }
        self.meters: dict[ObservedLayer, HealthMeter] = {}
        self.wrong = torch.zeros(3, 2, dtype=torch.float64)

    def see(self, visit: PairBatch, mixed: LayerOutputs) -> None:
        three = (visit.a, visit.b, mixed)
        for place in visit.places:
            meter = self.meters.setdefault(place, HealthMeter(self.running.get(place.site.path, ())))
            meter.add(*(place.by_unit(seen.outputs[place]) for seen in three))
            if meter.divided and all(place in seen.inputs for seen in three):
                meter.hear(*(seen.inputs[place] for seen in three))
        for i, seen in enumerate(three):
            if seen.answer is not None:
                counts = score(seen.answer, visit.batch.targets, visit.batch.samples, _no_loss)[2:]
                self.wrong[i] += counts.cpu()

    @property
    def error(self) -> tuple[float, float, float] | None:
        if not bool((self.wrong[:, 1] > 0).all()):
            return None
        a, b, mixed = (self.wrong[:, 0] / self.wrong[:, 1]).tolist()
        return a, b, mixed


def _no_loss(_outputs: Any, _targets: Any) -> Tensor:
    return torch.zeros(())


def _weights_apart(a: nn.Module, b: nn.Module) -> float | None:
    first, second = dict(a.named_parameters()), dict(b.named_parameters())
    apart = sum(
        float((x.detach() - second[n].detach().to(x.device)).abs().double().square().sum()) for n, x in first.items()
    )
    size = sum(float(x.detach().abs().double().square().sum()) for x in [*first.values(), *second.values()])
    return (2 * apart / size) ** 0.5 if size > 0 else None


def _statistics_are_mixed(a: nn.Module, b: nn.Module, merged: nn.Module, t: float) -> bool:
    """Whether running statistics are the plain mix of both ends, as nobody has estimated them again."""
    first, second, third = (tensors_of(model) for model in (a, b, merged))
    names = [name for name in first if name.endswith("running_var") and name in third]
    return all(torch.allclose(third[n], mix(first[n], second[n].to(first[n].device), t)) for n in names)


def _wires(
    model: nn.Module, places: Sequence[ObservedLayer], example_args: Sequence[Any]
) -> dict[str, tuple[str, ...]]:
    """Layer → the wires that its units lie on, for layers with a bias or a weight of their own."""
    found = find_symmetry(model, *example_args)
    modules, named = modules_of(model), {}
    for place in places:
        path = place.site.path
        axes = {f"{path}.weight": 1 if isinstance(modules[path], _ConvTransposeNd) else 0, f"{path}.bias": 0}
        for name, axis in axes.items():
            layout = found.layouts.get(name.removeprefix("."))
            strands = dict.fromkeys(leaf.wire for leaf in wire_axes(layout.axes[axis])) if layout else {}
            if on := tuple(found.wires[strand].name for strand in strands if strand < len(found.wires)):
                named[place.name] = on
    return named
