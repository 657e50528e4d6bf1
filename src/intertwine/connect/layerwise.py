"""One pass over data through two networks and the networks between them, layer by layer.

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
from intertwine.data.layers import LayerPath, distinct_modules, exact_paths, layer_paths, modules_of, record
from intertwine.data.layouts import LayoutFinder
from intertwine.errors import InputError, MismatchError
from intertwine.symmetry.elementwise import elementwise

#: The output of the whole network; absent if that is no tensor.
MODEL_OUTPUT = LayerPath("", asked="the output of the network", exact=False)


@dataclass(frozen=True)
class ObservedLayer:
    """A layer of both networks: its path, the class of its module, and the layout of its output."""

    at: LayerPath
    kind: str
    layout: str

    @property
    def name(self) -> str:
        return str(self.at)

    def by_sample(self, x: Tensor) -> Tensor:
        """Samples × everything else, in float64."""
        return _real(x).movedim(self.layout.index("n"), 0).flatten(1).double()

    def by_unit(self, x: Tensor) -> Tensor:
        """Samples and positions × units, in float64; a layer without a channel axis has one unit per entry."""
        axes = [i for i, letter in enumerate(self.layout) if letter == "c"]
        rows = _real(x).movedim(axes, list(range(-len(axes), 0))) if axes else _real(x)
        return rows.reshape(-1, rows[0].numel() if not axes else rows.shape[-len(axes) :].numel()).double()


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x).flatten(-2) if x.is_complex() else x


@dataclass(frozen=True)
class LayerOutputs:
    """One network on one batch: layer → output, layer → input, and the output of the whole network."""

    outputs: dict[ObservedLayer, Tensor]
    inputs: dict[ObservedLayer, Tensor]
    answer: Tensor | None


@dataclass(frozen=True)
class PairBatch:
    """One batch: the features of both ends; `between(i)` runs the i-th network between them."""

    batch: LabelledBatch
    layers: tuple[ObservedLayer, ...]
    a: LayerOutputs
    b: LayerOutputs
    between: Callable[[int], LayerOutputs]


@dataclass
class LayerwisePass:
    """A pass over the data. `skipped` names the layers without features, with the reason.

    Args:
        networks: functions that return the networks, both ends first; they are called again on every batch.
        layers: as in `intertwine.features`; None for every layer that holds weights and every elementwise activation.
    """

    networks: Sequence[Callable[[], nn.Module]]
    data: Any
    layers: str | Iterable[str] | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    hasher: Hasher = field(default_factory=Hasher)
    _observed: tuple[ObservedLayer, ...] = ()
    _paths: tuple[LayerPath, ...] = ()  # outputs of the observed layers, and inputs where there are any
    _device: torch.device | None = None  # of the first network, where all features are collected

    def __iter__(self) -> Iterator[PairBatch]:
        for batch in labelled_batches(self.data, self.networks[0](), self.hasher):
            if not self._observed:
                self._begin(batch)
            a, b = (self._run(i, batch) for i in range(2))
            yield PairBatch(batch, self._observed, a, b, lambda i, batch=batch: self._run(2 + i, batch))

    def _begin(self, batch: LabelledBatch) -> None:
        """Find on the first network which layers are called, how often, and the layouts of their outputs."""
        model, finder = self.networks[0](), LayoutFinder()
        outputs = _default_layers(model) if self.layers is None else layer_paths(model, self.layers)
        inputs = tuple(_input_of(path) for path in dict.fromkeys(at.path for at in outputs))
        with finder.watching(model):
            found, skipped = record(model, batch.call, (*outputs, *inputs), callback=finder.observe)
        self.skipped = {name: reason for name, reason in skipped.items() if name not in map(str, inputs)}
        observed = []
        for at, x in found.items():
            if _is_input(at):
                continue
            this = replace(at, call=at.call or 1)
            layout = finder.found[this]
            reason = no_samples(x, layout, batch.samples)
            if not reason and not (x.is_floating_point() or x.is_complex()):
                reason = f"gives {str(x.dtype).removeprefix('torch.')}, which has no angles."
            if reason and at.exact:
                raise InputError(f"The layer {str(at)!r} {reason}")
            if reason:
                self.skipped[str(at)] = reason
            else:
                observed.append(ObservedLayer(replace(at, exact=True), finder.kinds[this], layout))
        if not observed:
            words = "; ".join(f"{name}: {reason}" for name, reason in list(self.skipped.items())[:3])
            raise InputError(f"There is no layer to compare. {words or 'The network has no layer with weights.'}")
        self._observed, self._device = tuple(observed), next(iter(found.values())).device
        calls = {(layer.at.path, layer.at.call) for layer in observed}
        used_inputs = [at for at in found if _is_input(at) and (at.path, at.call) in calls]
        self._paths = exact_paths([*(layer.at for layer in observed), *used_inputs])

    def _run(self, which: int, batch: LabelledBatch) -> LayerOutputs:
        model = self.networks[which]()
        known = modules_of(model)
        if absent := [at.path for at in self._paths if at.path not in known]:
            raise MismatchError(
                f"The networks differ: one of them has no layer {absent[0]!r}. Only networks of one architecture can "
                "be compared layer by layer."
            )
        found, _ = record(model, batch.call, (*self._paths, MODEL_OUTPUT), self._device)
        for layer in self._observed:
            if problem := no_samples(found[layer.at], layer.layout, batch.samples):
                raise MismatchError(f"The layer {layer.name!r} {problem}")
        inputs = {(at.path, at.call): x for at, x in found.items() if _is_input(at)}
        return LayerOutputs(
            {layer: found[layer.at] for layer in self._observed},
            {layer: inputs[key] for layer in self._observed if (key := (layer.at.path, layer.at.call)) in inputs},
            found.get(MODEL_OUTPUT),
        )


def _input_of(path: str) -> LayerPath:
    """The input of a module; its name differs from that of an input that the user selects."""
    return LayerPath(path, "input", asked=f"the input of {path}", exact=False)


def _is_input(at: LayerPath) -> bool:
    return at.asked == _input_of(at.path).asked


def _default_layers(model: nn.Module) -> tuple[LayerPath, ...]:
    """Every module that holds weights or running statistics of its own, and every elementwise activation."""

    def holds_numbers(module: nn.Module) -> bool:
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        return any(tensor.is_floating_point() or tensor.is_complex() for tensor in own)

    modules = distinct_modules(model).items()
    return tuple(LayerPath(path, exact=False) for path, m in modules if holds_numbers(m) or is_activation(m))


def is_activation(module: nn.Module) -> bool:
    """Whether a module is a fixed nonlinear function of single entries, decided by calling it.

    >>> [is_activation(m) for m in (nn.GELU(), nn.Softmax(-1), nn.Dropout(), nn.PReLU(), nn.Flatten())]
    [True, False, False, False, False]
    """
    does_nothing = isinstance(module, (nn.Identity, _DropoutNd))
    if does_nothing or any(module.children()) or any(True for _ in module.parameters()):
        return False
    try:
        elementwise(module)
    except InputError:
        return False
    return True
