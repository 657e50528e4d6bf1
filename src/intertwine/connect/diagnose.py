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

WIDEST = 1024  # units; for wider layers only unit i is compared with unit i, not every unit with every other
CONSTANT = 1e-12  # of its own size: a unit that varies less is constant

# Thresholds of findings. All figures are reported, whatever these are.
WEAK_END = 0.1  # difference in accuracy of the two ends
LOST = 0.02  # of accuracy, below the line between the ends
MISORDERED = 0.25  # of correlation that a better order of units would gain
UNLIKE = 0.5  # mean correlation of units in their best order
UNFIT = 1.5  # factor by which a BatchNorm layer divides wrongly
COLLAPSED = 0.5  # of the variance of the ends
BROKEN = 0.02  # 1 − cos between the feature of the mix and the mix of the features

Units = Float[Tensor, "rows units"]


# -- The health of a layer ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerHealth:
    """One layer of a mixed network, compared with both ends.

    Attributes:
        variance: of all units of the mix, over the mean of both ends; None if the ends do not vary.
        collapsed: the fraction of units with less than half the variance of the ends.
        matched: the mean correlation of unit i of one end with unit i of the other. possible: the same in the best
            order of units; None for layers wider than `WIDEST`. Constant units are left out of both.
        dead: how many units are constant, in both ends together.
        statistics: of a BatchNorm layer: the variance of its input over the variance it divides by, both relative to
            the ends: 1 if its statistics fit.
    """

    variance: float | None
    collapsed: float | None
    matched: float | None
    possible: float | None
    dead: int
    statistics: float | None = None


@dataclass
class JointMoments:
    """Means, variances and products of the units of both ends, updated batch by batch in float64."""

    a: ChannelMoments = field(default_factory=ChannelMoments)
    b: ChannelMoments = field(default_factory=ChannelMoments)
    cross: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def add(self, a: Units, b: Units) -> None:
        """Add the features of the same samples in both networks."""
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
        """Of units of the same number; and in the best order, unless the layer is too wide."""
        varies = _varies(self.a), _varies(self.b)
        both = varies[0] & varies[1]
        lengths = self.a.squares.sqrt(), self.b.squares.sqrt()
        own = self.cross if self.cross.dim() == 1 else self.cross.diagonal()
        matched = float((own / lengths[0] / lengths[1])[both].mean()) if bool(both.any()) else None
        if self.cross.dim() == 1 or not (bool(varies[0].any()) and bool(varies[1].any())):
            return matched, None
        table = (self.cross / lengths[0][:, None] / lengths[1])[varies[0]][:, varies[1]].cpu().numpy()
        return matched, float(np.mean(table[linear_sum_assignment(table, maximize=True)]))


def _varies(moments: ChannelMoments) -> Tensor:
    """Units that vary by more than rounding."""
    variance = moments.variance()
    return variance > CONSTANT**2 * (variance + moments.mean.square())


class HealthMeter:
    """Sums for `LayerHealth` of one layer.

    Args:
        running: the running variances of a BatchNorm layer in both ends and the mix; empty for other layers.
    """

    def __init__(self, running: Sequence[Tensor] = ()) -> None:
        self.ends, self.mixed = JointMoments(), ChannelMoments()
        self.running, self.inputs = running, [ChannelMoments() for _ in running]

    def add(self, a: Units, b: Units, mixed: Units) -> None:
        """Add the outputs of the layer in both ends and the mix."""
        self.ends.add(a, b)
        self.mixed.add(mixed, channels=1)

    def add_inputs(self, *inputs: Tensor) -> None:
        """Add the inputs of a BatchNorm layer in both ends and the mix."""
        for moments, x in zip(self.inputs, inputs, strict=True):
            moments.add(x, channels=1)

    def result(self) -> LayerHealth:
        wanted = (self.ends.a.variance() + self.ends.b.variance()) / 2
        found, alive = self.mixed.variance(), (_varies(self.ends.a), _varies(self.ends.b))
        varies = alive[0] | alive[1]
        known = bool(varies.any())
        return LayerHealth(
            float(found[varies].sum() / wanted[varies].sum()) if known else None,
            float((found < COLLAPSED * wanted)[varies].double().mean()) if known else None,
            *self.ends.correlations(),
            int((~alive[0]).sum() + (~alive[1]).sum()),
            self._statistics(),
        )

    def _statistics(self) -> float | None:
        """The ratio of found to running variance in the mix, over that of the ends: geometric means over channels."""
        ratios: list[float] = []
        for running, moments in zip(self.running, self.inputs, strict=True):
            found, expected = moments.variance(), running.double()
            known = (found > 0) & (expected > 0)
            if not bool(known.any()):
                return None
            ratios.append(float((found[known] / expected[known]).log().mean().exp()))
        return ratios[2] / (ratios[0] * ratios[1]) ** 0.5 if ratios else None


# -- Findings ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MergeFinding:
    """One problem. `figure` is the number behind it; `layers` are those concerned, in the order of the forward."""

    kind: str
    layers: tuple[str, ...]
    figure: float
    what: str
    advice: str


@dataclass(frozen=True)
class MergeFigures:
    """The numbers that findings are derived from; see `Diagnosis` for the fields."""

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


def find_problems(figures: MergeFigures) -> tuple[MergeFinding, ...]:
    """All problems, what should be fixed first at the top."""
    tests = (_weak_end, _order, _statistics, _variance, _unlike, _broken)
    found = [one for test in tests if (one := test(figures)) is not None]
    if not found and figures.error is not None:
        a, b, merged = figures.error
        lost = merged - ((1 - figures.t) * a + figures.t * b)
        if lost > LOST:
            what = f"The merged network makes {lost:.1%} more mistakes than the ends, but no layer shows why."
            advice = "Look at single layers with layers=, and at functions in the forward that are not modules."
            found.append(MergeFinding("unexplained", (), lost, what, advice))
    return tuple(found)


def _weak_end(m: MergeFigures) -> MergeFinding | None:
    if m.error is None or abs(m.error[0] - m.error[1]) < WEAK_END:
        return None
    difference = abs(m.error[0] - m.error[1])
    worse = "first" if m.error[0] > m.error[1] else "second"
    return MergeFinding(
        "weak end", (), difference,
        f"The {worse} network itself makes {difference:.1%} more mistakes than the other on this data.",
        "Check that network and the data alone, before merging: weights, normalisation, classes.",
    )  # fmt: skip


def _order(m: MergeFigures) -> MergeFinding | None:
    gains = {n: h.possible - h.matched for n, h in m.health.items() if h.matched is not None and h.possible is not None}
    bad = [name for name, gain in gains.items() if gain > MISORDERED]
    if not bad:
        return None
    worst = max(bad, key=gains.__getitem__)
    health = m.health[worst]
    difference = "" if m.weights_apart is None else f" Weights differ by {m.weights_apart:.2f} of their size."
    wires = ", ".join(dict.fromkeys(repr(wire) for name in bad for wire in m.wires.get(name, ()))) or "…"
    advice = "Align first: the networks do not seem to be aligned. intertwine.align(a, b, *example_args)."
    if len(bad) <= len(m.health) / 2:
        advice = (
            f"Align these layers again: intertwine.align(a, b, *example_args, wires=[{wires}]), from other starts or "
            "with method='activations' and data."
        )
    return MergeFinding(
        "order", tuple(bad), gains[worst],
        f"Units of the two networks are in another order at {len(bad)} of {len(m.health)} layers: {m.named(bad)}. "
        f"Worst at {worst!r}: unit i of one correlates {health.matched:.2f} with unit i of the other, "
        f"{health.possible:.2f} in the best order.{difference}",
        advice,
    )  # fmt: skip


def _statistics(m: MergeFigures) -> MergeFinding | None:
    ratios = {n: h.statistics for n, h in m.health.items() if h.statistics is not None}
    factors = {name: max(ratio, 1 / ratio) for name, ratio in ratios.items() if ratio > 0}
    bad = [name for name, factor in factors.items() if factor > UNFIT]
    if not bad:
        return None
    worst = max(bad, key=factors.__getitem__)
    origin = "They were estimated on other data or another network."
    if m.mixed_statistics:
        origin = "They are the mix of those of both networks, which is not the variance of the mixed network."
    return MergeFinding(
        "statistics", tuple(bad), ratios[worst],
        f"BatchNorm statistics do not fit the merged network at {m.named(bad)}: at {worst!r} the variance is "
        f"{ratios[worst]:.2f} times the one the layer divides by. {origin}",
        "Reset them on data: intertwine.data.batchnorm.reset_statistics(merged, data).",
    )  # fmt: skip


def _variance(m: MergeFigures) -> MergeFinding | None:
    ratios = {n: h.variance for n, h in m.health.items() if h.variance is not None}
    bad = [name for name, ratio in ratios.items() if ratio < COLLAPSED]
    if not bad:
        return None
    worst = min(bad, key=ratios.__getitem__)
    advice = (
        "Align better if layers are out of order, then repair the mix: intertwine.connect.repair.repair(a, b, t, data)."
    )
    if m.normalised:
        advice = "Reset the BatchNorm statistics: intertwine.data.batchnorm.reset_statistics(merged, data)."
    return MergeFinding(
        "variance", tuple(bad), ratios[worst],
        f"Variance collapses from {bad[0]!r} on; most at {worst!r}, with {ratios[worst]:.2f} of the variance of the "
        f"ends and {m.health[worst].collapsed or 0.0:.0%} of the units below half of it.",
        advice,
    )  # fmt: skip


def _unlike(m: MergeFigures) -> MergeFinding | None:
    best = {n: h.possible for n, h in m.health.items() if h.possible is not None}
    bad = [name for name, value in best.items() if value < UNLIKE]
    if not bad:
        return None
    worst = min(bad, key=best.__getitem__)
    return MergeFinding(
        "unlike", tuple(bad), best[worst],
        f"The networks have different features at {m.named(bad)}: at {worst!r} units correlate {best[worst]:.2f} even "
        "in their best order.",
        "No order of units fixes this. Try method='scale-aware', wider networks, longer training, or networks that "
        "share the first epochs.",
    )  # fmt: skip


def _broken(m: MergeFigures) -> MergeFinding | None:
    distances = {one.layer: one.llfc[0].distance or 0.0 for one in m.layers}
    bad = [name for name, distance in distances.items() if distance > BROKEN]
    if not bad:
        return None
    first = next(one for one in m.layers if one.layer == bad[0])
    why = ""
    if first.sign_agreement is not None:
        why = f" Its inputs have the same sign in both networks for {first.sign_agreement:.0%} of the entries."
    elif first.commutativity is not None and first.commutativity.residual is not None:
        both = first.commutativity
        why = (
            f" (W_A − W_B)(H_A − H_B) is {both.residual:.2f} of the layer's output, its weights differ by "
            f"{both.weights:.2f} and its inputs by {both.inputs:.2f}."
        )
    return MergeFinding(
        "llfc", tuple(bad), distances[bad[0]],
        f"The first layer whose features are not the mix of those of both networks is {m.named(bad[:1])}: 1 − cos is "
        f"{distances[bad[0]]:.3f}.{why}",
        "Fix the findings above first. If there are none, align with data (method='activations'), or mix fewer layers.",
    )  # fmt: skip


# -- The verb ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The result of `diagnose`.

    Attributes:
        findings: the problems, what should be fixed first at the top; empty if there are none.
        error: the fraction of wrong answers of the first network, the second and the merged one; None if the targets
            are not classes. t: the position of the merged network; 0 is the first network.
        weights_apart: the distance of the two networks' weights, relative to their size: 1.4 for unrelated ones.
        layers: name → health of each layer, in the order of the forward. connectivity: more figures of them.
        wires: layer → the wires of its units, if example inputs are given.
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
            lines.append("Nothing found: no layer is out of order, loses its variance or differs from both networks.")
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

    It looks, in one pass, for: an end that is bad itself; units of the two networks in another order; BatchNorm
    statistics that do not fit the merged network; features that lose their variance; features that differ in any order;
    and the first layer whose features are not the mix of those of both networks.

    Args:
        a, b: the two networks as they were merged: b after its alignment, if there was one. Neither is changed.
        data: batches of (inputs, targets), read once.
        example_args: inputs of one forward. With them the symmetry is found, and findings name wires beside layers.
        merged: the result of the merge, which may have been repaired (`repair`); (1 − t)·a + t·b if None.
        t: the share of b in the merge. layers: as in `connectivity`.

    Returns:
        A `Diagnosis`: print it. `.findings`, what should be fixed first at the top; `.to_rows()` with all figures.

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
    passes = LayerwisePass([lambda: path.network(0), lambda: path.network(1), third], data, layers)
    connections, meters = LayerMeters(a, b, (1 - float(t),)), _HealthMeters(a, b, third())
    for pair in passes:
        mixed = pair.between(0)
        connections.add_ends(pair)
        connections.add_between(0, pair, mixed)
        meters.add(pair, mixed)
    found, health = connections.results(), {layer.name: one.result() for layer, one in meters.layers.items()}
    wires = _wires(path.network(0).eval(), list(meters.layers), example_args) if example_args else {}
    difference, error = _weights_apart(a, b), meters.error
    mixed_statistics = bool(meters.running) and _statistics_are_mixed(a, b, third(), float(t))
    figures = MergeFigures(found, health, wires, error, float(t), difference, bool(batch_norms(a)), mixed_statistics)
    problems, fingerprint = find_problems(figures), passes.hasher.fingerprint
    return Diagnosis(problems, error, float(t), difference, health, found, wires, fingerprint)


class _HealthMeters:
    """The health of every layer and the wrong answers of the three networks, summed up over batches."""

    def __init__(self, a: nn.Module, b: nn.Module, mixed: nn.Module) -> None:
        tables = [batch_norms(model) for model in (a, b, mixed)]
        shared = [name for name in tables[0] if all(name in table for table in tables)]
        # copied: the network between may be overwritten for every batch
        self.running = {
            name: [table[name].get_buffer("running_var").detach().clone() for table in tables] for name in shared
        }
        self.layers: dict[ObservedLayer, HealthMeter] = {}
        self.wrong = torch.zeros(3, 2, dtype=torch.float64)

    def add(self, pair: PairBatch, mixed: LayerOutputs) -> None:
        three = (pair.a, pair.b, mixed)
        for layer in pair.layers:
            meter = self.layers.setdefault(layer, HealthMeter(self.running.get(layer.at.path, ())))
            meter.add(*(layer.by_unit(one.outputs[layer]) for one in three))
            if meter.running and all(layer in one.inputs for one in three):
                meter.add_inputs(*(one.inputs[layer] for one in three))
        for i, one in enumerate(three):
            if one.answer is not None:
                scores = score(one.answer, pair.batch.targets, pair.batch.samples, lambda *_: torch.zeros(()))
                self.wrong[i] += scores[2:].cpu()

    @property
    def error(self) -> tuple[float, float, float] | None:
        if not bool((self.wrong[:, 1] > 0).all()):
            return None
        a, b, mixed = (self.wrong[:, 0] / self.wrong[:, 1]).tolist()
        return a, b, mixed


def _weights_apart(a: nn.Module, b: nn.Module) -> float | None:
    first, second = dict(a.named_parameters()), dict(b.named_parameters())
    difference = sum(
        float((x.detach() - second[n].detach().to(x.device)).abs().double().square().sum()) for n, x in first.items()
    )
    size = sum(float(x.detach().abs().double().square().sum()) for x in [*first.values(), *second.values()])
    return (2 * difference / size) ** 0.5 if size > 0 else None


def _statistics_are_mixed(a: nn.Module, b: nn.Module, merged: nn.Module, t: float) -> bool:
    """Whether running statistics are the plain mix of both ends, so not re-estimated."""
    first, second, third = (tensors_of(model) for model in (a, b, merged))
    names = [name for name in first if name.endswith("running_var") and name in third]
    return all(torch.allclose(third[n], mix(first[n], second[n].to(first[n].device), t)) for n in names)


def _wires(
    model: nn.Module, layers: Sequence[ObservedLayer], example_args: Sequence[Any]
) -> dict[str, tuple[str, ...]]:
    """Layer → the wires of its units, for layers with a bias or a weight of their own."""
    found = find_symmetry(model, *example_args)
    modules, named = modules_of(model), {}
    for layer in layers:
        path = layer.at.path
        axes = {f"{path}.weight": 1 if isinstance(modules[path], _ConvTransposeNd) else 0, f"{path}.bias": 0}
        for name, axis in axes.items():
            layout = found.layouts.get(name.removeprefix("."))
            strands = dict.fromkeys(leaf.wire for leaf in wire_axes(layout.axes[axis])) if layout else {}
            if on := tuple(found.wires[strand].name for strand in strands if strand < len(found.wires)):
                named[layer.name] = on
    return named
