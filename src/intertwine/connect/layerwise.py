"""One pass over data that looks at two networks and the networks between them, layer by layer.

Only the features of one batch are kept: those of both ends, and those of one network between them at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from intertwine.data.batches import Hasher, LabelledBatch, labelled_batches
from intertwine.data.features import no_samples
from intertwine.data.layers import LayerPath, exact_paths, layer_paths, modules_of, record
from intertwine.data.layouts import LayoutFinder
from intertwine.errors import InputError, MismatchError
from intertwine.symmetry.elementwise import elementwise

Networks = Sequence[Callable[[], nn.Module]]  # both ends first; each is asked for again on every batch


@dataclass(frozen=True)
class ObservedLayer:
    """A layer that is looked at: its place, the class of its module, and the layout of what it gives out."""

    site: LayerPath
    kind: str
    layout: str

    @property
    def name(self) -> str:
        return str(self.site)

    def by_sample(self, x: Tensor) -> Tensor:
        """Samples × everything else, in float64."""
        return _real(x).movedim(self.layout.index("n"), 0).flatten(1).double()

    def by_unit(self, x: Tensor) -> Tensor:
        """Samples and positions × units, in float64; a layer without an axis of units has one."""
        axes = [i for i, letter in enumerate(self.layout) if letter == "c"]
        rows = _real(x).movedim(axes, list(range(-len(axes), 0))) if axes else _real(x)
        return rows.reshape(-1, rows[0].numel() if not axes else rows.shape[-len(axes) :].numel()).double()


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x).flatten(-2) if x.is_complex() else x


@dataclass(frozen=True)
class LayerOutputs:
    """What one network did on a batch: place → what came out and what went in; and what the network answered."""

    outputs: dict[ObservedLayer, Tensor]
    inputs: dict[ObservedLayer, Tensor]
    answer: Tensor | None


@dataclass(frozen=True)
class PairBatch:
    """One batch: the features of both ends; `between(i)` runs the i-th network between them."""

    batch: LabelledBatch
    places: tuple[ObservedLayer, ...]
    a: LayerOutputs
    b: LayerOutputs
    between: Callable[[int], LayerOutputs]


@dataclass
class LayerwisePass:
    """A pass over the data. `skipped` names the layers that gave no features, with the reason.

    Args:
        networks: functions that give the networks, both ends first. layers: as `intertwine.features` reads them; None
            for every layer that holds weights and every elementwise activation.
    """

    networks: Networks
    data: Any
    layers: str | Iterable[str] | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    hasher: Hasher = field(default_factory=Hasher)
    _places: tuple[ObservedLayer, ...] = ()
    _wanted: tuple[LayerPath, ...] = ()
    _device: torch.device | None = None  # of the first network: there all features are brought together

    def __iter__(self) -> Iterator[PairBatch]:
        for batch in labelled_batches(self.data, self.networks[0](), self.hasher):
            if not self._places:
                self._begin(batch)
            a, b = (self._run(i, batch) for i in range(2))
            yield PairBatch(batch, self._places, a, b, lambda i, batch=batch: self._run(2 + i, batch))

    def _begin(self, batch: LabelledBatch) -> None:
        """Find out on the first network which layers are called, how often, and what they give out."""
        model, known = self.networks[0](), LayoutFinder()
        asked = _default(model) if self.layers is None else layer_paths(model, self.layers)
        inputs = tuple(_input_of(path) for path in dict.fromkeys(site.path for site in asked))
        with known.watching(model):
            found, skipped = record(model, batch.call, (*asked, *inputs), note=known.note)
        self.skipped = {name: reason for name, reason in skipped.items() if name not in map(str, inputs)}
        places = []
        for site in (site for site in found if not _is_input(site)):
            this = replace(site, call=site.call or 1)
            layout = known.found[this]
            reason = no_samples(found[site], layout, batch.samples) or _no_numbers(found[site])
            if reason and site.exact:
                raise InputError(f"The layer {str(site)!r} {reason}")
            if reason:
                self.skipped[str(site)] = reason
            else:
                places.append(ObservedLayer(replace(site, exact=True), known.kinds[this], layout))
        if not places:
            words = "; ".join(f"{name}: {reason}" for name, reason in list(self.skipped.items())[:3])
            raise InputError(f"There is no layer to look at. {words or 'The network has no layer with weights.'}")
        self._places, self._device = tuple(places), next(iter(found.values())).device
        heard = {(place.site.path, place.site.call) for place in places}
        heard_inputs = [site for site in found if _is_input(site) and (site.path, site.call) in heard]
        self._wanted = exact_paths([*(place.site for place in places), *heard_inputs])

    def _run(self, which: int, batch: LabelledBatch) -> LayerOutputs:
        model = self.networks[which]()
        known = modules_of(model)
        absent = [site.path for site in self._wanted if site.path not in known]
        if absent:
            raise MismatchError(
                f"The networks differ: one of them has no layer {absent[0]!r}. Only networks of one architecture can "
                "be compared layer by layer."
            )
        found, _ = record(model, batch.call, (*self._wanted, MODEL_OUTPUT), self._device)
        for place in self._places:
            if problem := no_samples(found[place.site], place.layout, batch.samples):
                raise MismatchError(f"The layer {place.name!r} {problem}")
        inputs = {(site.path, site.call): x for site, x in found.items() if _is_input(site)}
        return LayerOutputs(
            {p: found[p.site] for p in self._places},
            {p: inputs[key] for p in self._places if (key := (p.site.path, p.site.call)) in inputs},
            found.get(MODEL_OUTPUT),
        )


#: What the whole network gives out; absent where that is no tensor.
MODEL_OUTPUT = LayerPath("", asked="the answer of the network", exact=False)


def _input_of(path: str) -> LayerPath:
    """What goes into a module, beside what was asked for; the words keep it apart from a place the user asks for."""
    return LayerPath(path, "input", asked=f"the input of {path}", exact=False)


def _is_input(site: LayerPath) -> bool:
    return site.asked == _input_of(site.path).asked


def _no_numbers(x: Tensor) -> str:
    if x.is_floating_point() or x.is_complex():
        return ""
    return f"gives {str(x.dtype).removeprefix('torch.')}, which has no angles."


def _default(model: nn.Module) -> tuple[LayerPath, ...]:
    """Every module that holds weights or running statistics of its own, and every elementwise activation."""
    table = modules_of(model)
    first = {id(module): path for path, module in reversed(table.items())}  # a shared module by its first path
    found = [p for p, module in table.items() if first[id(module)] == p and (_holds(module) or is_activation(module))]
    return tuple(LayerPath(path, exact=False) for path in found)


def _holds(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in own)


def is_activation(module: nn.Module) -> bool:
    """Whether a module is a fixed function of single entries, found out by calling it; one that does nothing is not.

    >>> [is_activation(m) for m in (nn.GELU(), nn.Softmax(-1), nn.Dropout(), nn.PReLU(), nn.Flatten())]
    [True, False, False, False, False]
    """
    idle = isinstance(module, (nn.Identity, _DropoutNd))
    if idle or any(module.children()) or any(True for _ in module.parameters()):
        return False
    try:
        elementwise(module)
    except InputError:
        return False
    return True
