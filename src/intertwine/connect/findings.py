"""What the figures of a merge mean, in words: findings, and what to do about each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from intertwine.connect.health import Health
from intertwine.connect.meters import LayerConnectivity

# Where a figure counts as a finding. All figures are reported whatever these say.
WEAK_END = 0.1  # of accuracy, between the two ends
LOST = 0.02  # of accuracy, below the line between the ends
MISORDERED = 0.25  # of correlation, that a better order of units would win
UNLIKE = 0.5  # mean correlation of units in their best order
UNFIT = 1.5  # factor by which a BatchNorm layer divides wrongly
COLLAPSED = 0.5  # of the variance of the ends
BROKEN = 0.02  # 1 − cos between the feature of the mix and the mix of the features


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `figure` is the number behind it; `layers` are those concerned, in their order."""

    kind: str
    layers: tuple[str, ...]
    figure: float
    what: str
    advice: str


@dataclass(frozen=True)
class Measured:
    """What findings are made from; see `Diagnosis` for the entries."""

    layers: tuple[LayerConnectivity, ...]
    health: Mapping[str, Health]
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


def findings(measured: Measured) -> tuple[Finding, ...]:
    """What is wrong; what can be mended first."""
    tests = (_weak_end, _order, _statistics, _variance, _unlike, _broken)
    found = [one for test in tests if (one := test(measured)) is not None]
    lost = measured.lost
    if not found and lost is not None and lost > LOST:
        found.append(
            Finding(
                "unexplained", (), lost,
                f"The merged network makes {lost:.1%} more mistakes than the ends, but no layer shows why.",
                "Look at single layers with layers=, and at functions in the forward that are no modules.",
            )
        )  # fmt: skip
    return tuple(found)


def _weak_end(m: Measured) -> Finding | None:
    if m.error is None or abs(m.error[0] - m.error[1]) < WEAK_END:
        return None
    apart = abs(m.error[0] - m.error[1])
    worse = "first" if m.error[0] > m.error[1] else "second"
    return Finding(
        "weak end", (), apart,
        f"The {worse} network itself makes {apart:.1%} more mistakes than the other on this data.",
        "Check that network and the data alone, before merging: weights, normalisation, classes.",
    )  # fmt: skip


def _order(m: Measured) -> Finding | None:
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
    return Finding(
        "order", tuple(bad), gains[worst],
        f"Units of the two networks are in another order at {extent}. Worst at {worst!r}: unit i of one correlates "
        f"{health.matched:.2f} with unit i of the other, {health.possible:.2f} in the best order.{apart}",
        "Align first: no alignment seems to have been done. intertwine.align(a, b, *example_args)." if none else
        f"Align these layers again: intertwine.align(a, b, *example_args, wires=[{wires}]), from other starts or with "
        "method='activations' and data.",
    )  # fmt: skip


def _statistics(m: Measured) -> Finding | None:
    ratios = {n: h.statistics for n, h in m.health.items() if h.statistics is not None}
    off = {name: max(ratio, 1 / ratio) for name, ratio in ratios.items() if ratio > 0}
    bad = [name for name, factor in off.items() if factor > UNFIT]
    if not bad:
        return None
    worst = max(bad, key=off.__getitem__)
    origin = "They were estimated on other data or another network."
    if m.mixed_statistics:
        origin = "They are the mix of those of both networks, which is not the variance of the mixed network."
    return Finding(
        "statistics", tuple(bad), ratios[worst],
        f"BatchNorm statistics do not fit the merged network at {m.named(bad)}: at {worst!r} the variance is "
        f"{ratios[worst]:.2f} times what the layer divides by. {origin}",
        "Reset them on data: intertwine.connect.statistics.reset_statistics(merged, data).",
    )  # fmt: skip


def _variance(m: Measured) -> Finding | None:
    ratios = {n: h.variance for n, h in m.health.items() if h.variance is not None}
    bad = [name for name, ratio in ratios.items() if ratio < COLLAPSED]
    if not bad:
        return None
    worst = min(bad, key=ratios.__getitem__)
    share = m.health[worst].collapsed or 0.0
    return Finding(
        "variance", tuple(bad), ratios[worst],
        f"Variance collapses from {bad[0]!r} on; least at {worst!r}, with {ratios[worst]:.2f} of the variance of the "
        f"ends and {share:.0%} of the units below half of it.",
        "Reset the BatchNorm statistics: intertwine.connect.statistics.reset_statistics(merged, data)." if m.normalised
        else "Align better if layers are out of order, then mend the mix: intertwine.connect.repair.repair(a, b, t, "
        "data).",
    )  # fmt: skip


def _unlike(m: Measured) -> Finding | None:
    best = {n: h.possible for n, h in m.health.items() if h.possible is not None}
    bad = [name for name, value in best.items() if value < UNLIKE]
    if not bad:
        return None
    worst = min(bad, key=best.__getitem__)
    return Finding(
        "unlike", tuple(bad), best[worst],
        f"The networks hold different features at {m.named(bad)}: at {worst!r} units correlate {best[worst]:.2f} even "
        "in their best order.",
        "No order of units will do. Try method='scale-aware', wider networks, longer training, or networks that share "
        "the first epochs.",
    )  # fmt: skip


def _broken(m: Measured) -> Finding | None:
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
    return Finding(
        "llfc", tuple(bad), distance,
        f"The first layer whose features are not the mix of those of both networks is {m.named(bad[:1])}: 1 − cos is "
        f"{distance:.3f}.{why}",
        "Mend what stands above. Where nothing does, align with data (method='activations'), or mix fewer layers.",
    )  # fmt: skip
