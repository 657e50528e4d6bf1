"""What is measured at every layer of a pair of networks, added up batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from intertwine.connect.additivity import Additivity, AdditivityMeter
from intertwine.connect.commutativity import Commutativity, CommutativityMeter, why_not
from intertwine.connect.layerwise import Place, Seen, Visit, is_activation
from intertwine.connect.llfc import Angles, Llfc, LlfcMeter
from intertwine.features.places import modules_of


@dataclass(frozen=True)
class LayerConnectivity:
    """One layer.

    Attributes:
        layer, kind: the place and the class of its module. llfc: one `Llfc` per α.
        baseline: the mean over samples of 1 − cos between the features of the two networks themselves.
        additivity, sign_agreement: of an elementwise activation; empty and None for other layers.
        commutativity: of a linear layer. notes: what could not be measured, and why.
    """

    layer: str
    kind: str
    llfc: tuple[Llfc, ...]
    baseline: float | None
    additivity: tuple[Additivity, ...] = ()
    sign_agreement: float | None = None
    commutativity: Commutativity | None = None
    notes: tuple[str, ...] = ()

    @property
    def distance(self) -> float | None:
        """The largest LLFC distance over the α that have one."""
        return max((one.distance for one in self.llfc if one.distance is not None), default=None)


class Meters:
    """Everything that is added up for the layers of a pair, batch by batch."""

    def __init__(self, a: nn.Module, b: nn.Module, alphas: Sequence[float]) -> None:
        self.modules = modules_of(a), modules_of(b)
        self.alphas = alphas
        self.llfc: dict[Place, list[LlfcMeter]] = {}
        self.baseline: dict[Place, Angles] = {}
        self.additivity: dict[Place, AdditivityMeter] = {}
        self.commutativity: dict[Place, CommutativityMeter] = {}
        self.unlike: dict[Place, str] = {}

    def start(self, place: Place) -> None:
        """What there is to measure at a layer."""
        self.llfc[place] = [LlfcMeter(alpha) for alpha in self.alphas]
        self.baseline[place] = Angles()
        module, other = (table[place.site.path] for table in self.modules)
        if place.site.side == "input" or place.site.keys:
            return
        if is_activation(module):
            self.additivity[place] = AdditivityMeter(module.forward, self.alphas)
        elif reason := why_not(module):
            self.unlike[place] = f"no commutativity: {reason}"
        else:
            self.commutativity[place] = CommutativityMeter(module, other)

    def ends(self, visit: Visit) -> None:
        """Take in a batch at both ends."""
        for place in visit.places:
            if place not in self.llfc:
                self.start(place)
            self.baseline[place].add(*(place.by_sample(seen.outputs[place]) for seen in (visit.a, visit.b)))
            if place not in visit.a.inputs:
                continue
            inputs = [seen.inputs[place] for seen in (visit.a, visit.b)]
            if place in self.additivity:
                self.additivity[place].add(*(place.by_sample(x) for x in inputs))
            elif place in self.commutativity:
                self.commutativity[place].add(*inputs)

    def between(self, i: int, visit: Visit, mixed: Seen) -> None:
        """Take in the same batch at the i-th network between."""
        for place in visit.places:
            three = (visit.a.outputs[place], visit.b.outputs[place], mixed.outputs[place])
            self.llfc[place][i].add(*map(place.by_sample, three))

    def results(self) -> tuple[LayerConnectivity, ...]:
        return tuple(self._result(place) for place in self.llfc)

    def _result(self, place: Place) -> LayerConnectivity:
        additivity, commutativity = self.additivity.get(place), self.commutativity.get(place)
        shared = commutativity.result() if commutativity else None
        notes = [self.baseline[place].words("the networks"), self.unlike.get(place, "")]
        notes += [meter.angles.words(f"α = {meter.alpha:g}") for meter in self.llfc[place]]
        if additivity:
            notes += [one.angles.words(f"weak additivity at α = {one.alpha:g}") for one in additivity.sums]
        if shared and shared.residual is None:
            notes.append("no commutativity: the layer gives nothing but its bias in both networks")
        return LayerConnectivity(
            place.name,
            place.kind,
            tuple(meter.result() for meter in self.llfc[place]),
            self.baseline[place].mean,
            additivity.results() if additivity else (),
            additivity.agreement if additivity else None,
            shared,
            tuple(filter(None, notes)),
        )
