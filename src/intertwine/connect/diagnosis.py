"""`diagnose`: why did my merge fail? Which layer breaks first, where variance collapses, and what to do next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from intertwine.connect.agreement import tensors_of
from intertwine.connect.findings import Finding, Measured, findings
from intertwine.connect.health import Health, HealthMeter
from intertwine.connect.interpolation import mix, path_between
from intertwine.connect.layerwise import Place, Seen, Visit, Walk
from intertwine.connect.meters import LayerConnectivity, Meters
from intertwine.connect.statistics import batch_norms
from intertwine.errors import InputError
from intertwine.features.fingerprint import Fingerprint
from intertwine.features.places import modules_of
from intertwine.features.scoring import score
from intertwine.frames import frame
from intertwine.symmetry.layout import leaves
from intertwine.symmetry.symmetry import symmetry as find_symmetry


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

    findings: tuple[Finding, ...]
    error: tuple[float, float, float] | None
    t: float
    weights_apart: float | None
    layers: Mapping[str, Health] = field(repr=False)
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
        return frame(self.to_rows())

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
    walk = Walk([lambda: path.network(0), lambda: path.network(1), third], data, layers)
    meters, doctor = Meters(a, b, (1 - float(t),)), _Doctor(a, b, third())
    for visit in walk:
        mixed = visit.between(0)
        meters.ends(visit)
        meters.between(0, visit, mixed)
        doctor.see(visit, mixed)
    connected, health = meters.results(), {place.name: one.result() for place, one in doctor.meters.items()}
    wires = _wires(path.network(0).eval(), list(doctor.meters), example_args) if example_args else {}
    apart = _weights_apart(a, b)
    stale = bool(doctor.running) and _statistics_are_mixed(a, b, third(), float(t))
    measured = Measured(connected, health, wires, doctor.error, float(t), apart, bool(batch_norms(a)), stale)
    return Diagnosis(
        findings(measured), doctor.error, float(t), apart, health, connected, wires, walk.hasher.fingerprint
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
        self.meters: dict[Place, HealthMeter] = {}
        self.wrong = torch.zeros(3, 2, dtype=torch.float64)

    def see(self, visit: Visit, mixed: Seen) -> None:
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


def _wires(model: nn.Module, places: Sequence[Place], example_args: Sequence[Any]) -> dict[str, tuple[str, ...]]:
    """Layer → the wires that its units lie on, for layers with a bias or a weight of their own."""
    found = find_symmetry(model, *example_args)
    modules, named = modules_of(model), {}
    for place in places:
        path = place.site.path
        axes = {f"{path}.weight": 1 if isinstance(modules[path], _ConvTransposeNd) else 0, f"{path}.bias": 0}
        for name, axis in axes.items():
            layout = found.layouts.get(name.removeprefix("."))
            strands = dict.fromkeys(leaf.strand for leaf in leaves(layout.axes[axis])) if layout else {}
            if on := tuple(found.wires[strand].name for strand in strands if strand < len(found.wires)):
                named[place.name] = on
    return named
