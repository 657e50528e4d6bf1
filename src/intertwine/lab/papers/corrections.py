"""Kind "corrections": errors in the papers, each as one number computed as printed and as corrected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from intertwine.canonical.form import canonicalize
from intertwine.connect.arithmetic import interpolate
from intertwine.errors import InputError, unknown_name
from intertwine.figures import panels_in_rows
from intertwine.fold.fold import fold_groups
from intertwine.lab.papers.experiments import summary
from intertwine.lab.papers.linear_equivalence import linear_equivalence, silent_feature
from intertwine.lab.papers.plan import ExperimentKind, Numbers, Row, gathered
from intertwine.lab.papers.work import Work
from intertwine.measure.measure import measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Check:
    """`what`: the number in words. `values`: seed → the number as printed and as corrected."""

    what: str
    values: Callable[[int], tuple[float, float]]


def _features(seed: int, columns: int = 64, rows: int = 2000) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _procrustes(x: Tensor, y: Tensor, **options: bool | str) -> float:
    return measure(x, y, "relu_procrustes", **options).value


def translated(seed: int) -> tuple[float, float]:
    """G_ReLU-Procrustes of features and the same features moved by a constant: 1 if it is invariant to translations."""
    x = _features(seed).relu()
    y = x + _features(seed + 1, rows=1).abs()
    return _procrustes(x, y, center=False), _procrustes(x, y, center=True)


def dead_channels(seed: int) -> tuple[float, float]:
    """G_ReLU-Procrustes of unrelated features of which a quarter is dead; the correct value is that of live ones."""
    x, y = _features(2 * seed).relu(), _features(2 * seed + 1).relu()
    x[:, :16] = y[:, 16:32] = 0
    return _procrustes(x, y, center=False, dead="paper"), _procrustes(x, y, center=False, dead="drop")


def rotated(seed: int) -> tuple[float, float]:
    """CKA of features and the same features in a rotated basis; an orthogonal measure must be 1."""
    x = _features(seed) * torch.linspace(0.2, 3, 64, dtype=torch.float64)
    turn = torch.linalg.qr(_features(seed + 7, rows=64))[0]
    return measure(x, x @ turn, "channel_cka").value, measure(x, x @ turn, "linear_cka").value


def softsort(seed: int) -> tuple[float, float]:
    """The number of different columns chosen by the rows of SoftSort; a permutation of 16 has 16."""
    score = _features(seed, columns=16, rows=1)[0]
    gaps = score.sort(descending=True).values[:, None] - score[None]
    return float(len(set((-gaps).argmax(1).tolist()))), float(len(set((-gaps.abs()).argmax(1).tolist())))


def _mlp(seed: int, *widths: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in pairwise(widths)]
    return nn.Sequential(*[part for layer in layers for part in layer][:-1]).double()


def nodesort(seed: int) -> tuple[float, float]:
    """The share of 10 networks with two hidden layers whose permuted copies are sorted into the same network."""
    found = []
    for order in ("nodesort-printed", "nodesort"):
        same = 0
        for trial in range(10):
            model, x = _mlp(100 * seed + trial, 5, 12, 12, 3), torch.zeros(1, 5, dtype=torch.float64)
            copy = _permuted(model, trial)
            a, b = (canonicalize(one, x, order=order, base=1.1).model.state_dict() for one in (model, copy))
            same += all(torch.allclose(a[name], b[name]) for name in a)
        found.append(same / 10)
    return found[0], found[1]


def _permuted(model: nn.Module, seed: int) -> nn.Module:
    """The same function with permuted hidden units."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    chance = torch.Generator().manual_seed(seed)
    copied = _mlp(0, layers[0].in_features, *[layer.out_features for layer in layers])
    state, before = {}, torch.arange(layers[0].in_features)
    for i, layer in enumerate(layers):
        last = i == len(layers) - 1
        order = torch.arange(layer.out_features) if last else torch.randperm(layer.out_features, generator=chance)
        state |= {f"{2 * i}.weight": layer.weight[order][:, before], f"{2 * i}.bias": layer.bias[order]}
        before = order
    copied.load_state_dict(state)
    return copied


def merged_counts(seed: int) -> tuple[float, float]:
    """Relative error of a ReLU layer whose 8 equal features are merged one after another; counts reset or kept."""
    row, columns = _features(seed, columns=6, rows=1)[0], _features(seed + 1, columns=8, rows=3)
    hidden = (_features(seed + 2, columns=6, rows=50) @ row).relu()
    truth = torch.outer(hidden, columns.sum(1))
    errors = []
    for keep in (False, True):
        merged, count = columns[:, 0], 1
        for i in range(1, 8):
            merged, count = (count * merged + columns[:, i]) / (count + 1), count + 1 if keep else 1
        errors.append(float((torch.outer(8 * hidden, merged) - truth).norm() / truth.norm()))
    return errors[0], errors[1]


def batch_norm(seed: int) -> tuple[float, float]:
    """Relative error after two equal features with BatchNorm are merged: vectors summed, or folded first."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double().eval()
        x = torch.randn(50, 4, dtype=torch.float64)
    state = model.state_dict()  # the weights themselves
    with torch.no_grad():
        state["1.running_mean"].copy_(_features(seed, columns=6, rows=1)[0] - 1)  # most features are alive
        state["1.running_var"].copy_(_features(seed, columns=6, rows=1)[0].exp())
        for name in ("0.weight", "0.bias", "1.running_mean", "1.running_var"):
            state[name][1] = state[name][0]
        truth = model(x)
        small = [fold_groups(model, x, groups={"0": [(0, 1)]}, norm=way).model(x) for way in ("sum", "fold")]
    errors = [float((one - truth).norm() / truth.norm()) for one in small]
    return errors[0], errors[1]


def connected(seed: int) -> tuple[float, float]:
    """Two networks joined by a line of constant loss: the largest loss on it, and the distance of their features from
    equivalence."""
    a, b, x = silent_feature()
    with torch.no_grad():
        loss = max(float((interpolate(a, b, t)(x) - x).square().mean()) for t in torch.linspace(0, 1, 11).tolist())
        features = [model[1](model[0](x)) for model in (a, b)]
    return loss, float(linear_equivalence(*features).residual)


def group_of_the_printed_activation(seed: int) -> tuple[float, float]:
    """Error of a network with σ = LeakyReLU of slope −1 after a hidden unit is multiplied by −2: with φ as printed for
    all slopes but 1, and with φ(a) = |a|."""
    before, columns = _features(seed, columns=6, rows=20), _features(seed + 1, columns=6, rows=3)
    truth = leaky_relu(before, -1.0) @ columns.T
    moved = leaky_relu(-2 * before, -1.0)
    errors = [float((moved / phi @ columns.T - truth).norm() / truth.norm()) for phi in (-2.0, 2.0)]
    return errors[0], errors[1]


#: Statements of the papers that can be settled in seconds, by the number of the correction.
CHECKS: Mapping[str, Check] = {
    "D4": Check("G_ReLU-Procrustes of features and their translation", translated),
    "D6": Check("G_ReLU-Procrustes of unrelated features, a quarter of them dead", dead_channels),
    "D7": Check("CKA of features and their rotation", rotated),
    "D9": Check("different columns chosen by 16 rows of SoftSort", softsort),
    "D10": Check("permuted copies that NodeSort brings to one form, two hidden layers", nodesort),
    "D11": Check("error after merging 8 equal features, counts set back to 1 or kept", merged_counts),
    "D13": Check("error after merging 2 equal features with BatchNorm", batch_norm),
    "D15": Check("loss between two networks, and distance of their features from equivalence", connected),
    "D22": Check("error of LeakyReLU of slope −1 under a factor of −2", group_of_the_printed_activation),
}


WAYS = ("as printed", "corrected")


@dataclass(frozen=True)
class CorrectionsSettings:
    """The table [corrections]. `checks`: names in `CHECKS`, by default all. `seeds`: draws of each."""

    checks: list[str] = field(default_factory=lambda: list(CHECKS))
    seeds: int = 5

    def check(self, plan: Any, where: str) -> None:
        for name in self.checks:
            if name not in CHECKS:
                raise InputError(f"{where}: {unknown_name('check', name, CHECKS)}")


def run(work: Work) -> list[Row]:
    """One row per check, seed and way."""
    settings, rows = work.plan.settings, []
    for name in settings.checks:
        work.progress(f"checking {name}: {CHECKS[name].what}")
        for seed in range(settings.seeds):
            for way, value in zip(WAYS, CHECKS[name].values(seed), strict=True):
                rows.append({"check": name, "what": CHECKS[name].what, "seed": seed, "way": way, "value": value})
    return rows


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Way → check → one value per seed."""
    return gathered((row["way"], row["check"], [row["value"]]) for row in rows)


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """One panel with two bars per check, since checks measure different things."""
    found = numbers(plan, rows)
    checks = list(found[WAYS[0]])
    what = {row["check"]: row["what"] for row in rows}
    figure, grid = panels_in_rows(len(checks), 2.4, 2.6)
    for axes, name in zip(grid, checks, strict=True):
        for i, way in enumerate(WAYS):
            mean, spread = summary(found[way][name])
            axes.bar(i, mean or 0.0, yerr=spread or 0.0, color=f"C{i}", capsize=3)
        axes.set_xticks(range(len(WAYS)), WAYS, fontsize=7, rotation=20)
        axes.set_title("\n".join(wrap(f"{name}: {what[name]}", 36)), fontsize=7)
        axes.tick_params(axis="y", labelsize=7)
    return figure


CORRECTIONS = ExperimentKind(CorrectionsSettings, run, numbers, draw)
