"""`features`: the activations of chosen layers on any data, streamed or collected in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.data.batches import Call, Fingerprint, Hasher, calls, samples_of
from intertwine.data.layers import LayerPath, exact_paths, layer_paths, record
from intertwine.data.layouts import LayoutFinder, arrange, check_layout, mask_of
from intertwine.errors import InputError, MismatchError, did_you_mean


@dataclass(frozen=True)
class CapturedLayer:
    """One captured layer: its name, the class of its module, the shape without samples, the layout of its axes."""

    name: str
    module: str
    shape: tuple[int, ...]
    layout: str
    dtype: str

    @property
    def axis(self) -> int:
        """The sample axis."""
        return self.layout.index("n")

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return getattr(torch, self.dtype).itemsize

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self) | {"shape": list(self.shape)}


def no_samples(x: Tensor, layout: str, samples: int) -> str:
    """Why a tensor does not hold one entry per sample; empty if it does."""
    if not x.dim():
        return "gives one number for all samples together. Name a layer with one entry per sample."
    axis = layout.index("n")
    if x.dim() == len(layout) and x.shape[axis] == samples:
        return ""
    return (
        f"gives a tensor {tuple(x.shape)} for {samples} samples, but its axis {axis} should hold the samples by the "
        f"layout {layout!r}. Give its layout, such as layouts={{path: 'tnc'}} for time first; a module that mixes "
        "samples with positions has none."
    )


def layer_table(layers: tuple[CapturedLayer, ...], most: int = 30) -> list[str]:
    """One line per layer, in columns."""
    rows = [
        (layer.name or "(model)", layer.module, "×".join(map(str, layer.shape)) or "1", layer.layout, layer.dtype)
        for layer in layers[:most]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines + [f"  … and {len(layers) - most} more"] * (len(layers) > most)


# -- One pass over the data --------------------------------------------------------------------------------------------

FeatureBatch = tuple[dict[str, Tensor], Tensor | None]  # layer → tensor, and which tokens are not padding


class FeatureStream:
    """One pass over the features: batches of layer → tensor, and the fingerprint of the data so far.

    `mask` belongs to the latest batch: samples × tokens, False for padding; None if the inputs have no mask.
    """

    def __init__(
        self, batches: Iterator[FeatureBatch], hasher: Hasher | None = None, known: Fingerprint | None = None
    ) -> None:
        self._batches, self._hasher, self._known = batches, hasher or Hasher(), known
        self.mask: Tensor | None = None

    def __iter__(self) -> FeatureStream:
        return self

    def __next__(self) -> dict[str, Tensor]:
        batch, self.mask = next(self._batches)
        return batch

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the samples so far."""
        return self._known or self._hasher.fingerprint


@dataclass(eq=False)
class FeatureSource:
    """A model, its data and the captured layers; reads the data as often as the data allows."""

    model: nn.Module
    data: Any
    layers: tuple[LayerPath, ...]
    device: str | torch.device | None
    axis: int = 0  # of the inputs, along which the samples lie
    count: int = 0  # samples of the first batch
    rest: Iterator[Call] | None = None  # what is left of data that can be read only once
    spent: bool = False

    def first(self) -> Call:
        """The first batch with samples in it."""
        batches = self._read()
        call = next(batches, None)
        if call is None:
            raise InputError(
                "The data holds no samples, so there are no features. Pass at least one batch; a generator can be used "
                "only once."
            )
        self.count = samples_of(call, self.axis)
        if isinstance(self.data, Iterator):
            self.rest = _resumed([call], batches)
        return call

    def samples(self) -> int | None:
        """About how many samples the data holds; None if its number of batches is unknown."""
        return len(self.data) * self.count if isinstance(self.data, Sized) else None

    def batches(self) -> Iterator[Call]:
        """All batches."""
        if self.rest is None:
            return self._read()
        if self.spent:
            raise InputError(
                "These features were streamed once, and their data is a generator that cannot be read again. Pass a "
                "list or a DataLoader, or call .collect() instead of iterating."
            )
        self.spent = True
        return self.rest

    def _read(self) -> Iterator[Call]:
        return (call for call in calls(self.data) if samples_of(call, self.axis))

    def walk(
        self, batches: Iterator[Call], layers: tuple[CapturedLayer, ...], hasher: Hasher
    ) -> Iterator[FeatureBatch]:
        """The features of every batch."""
        for call in batches:
            found, _ = record(self.model, call, self.layers, self.device)
            for layer, (path, x) in zip(layers, found.items(), strict=True):
                if problem := no_samples(x, layer.layout, samples_of(call, self.axis)):
                    raise MismatchError(f"The layer {str(path)!r} {problem}")
            hasher.add(call)
            yield {str(path): x for path, x in found.items()}, mask_of(call)


def _resumed(first: list[Call], rest: Iterator[Call]) -> Iterator[Call]:
    yield first.pop()  # not kept alive
    yield from rest


# -- Features ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Features:
    """The activations of some layers on some data.

    Iterating gives one mapping of layer → tensor per batch and keeps nothing; `collect` keeps everything.

    Attributes:
        layers: what is captured, as found on the first batch. skipped: (name, reason) of modules that a pattern or
            `layers=None` selected and that have no features.
        values: layer → tensor of all samples; None before `collect`. policy: under which they were collected.
        fingerprint: of the data; known after `collect`. While streaming, the stream has it: `stream = iter(features)`.
        mask: samples × tokens, False for padding, if the inputs have an attention mask and no policy has been applied.
            While streaming, the stream has it.
    """

    layers: tuple[CapturedLayer, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    values: Mapping[str, Tensor] | None = field(default=None, repr=False)
    policy: str | None = None
    fingerprint: Fingerprint | None = None
    source: FeatureSource | None = field(default=None, repr=False)
    mask: Tensor | None = field(default=None, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers."""
        return tuple(layer.name for layer in self.layers)

    def layer(self, name: str) -> CapturedLayer:
        """A layer by its name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise InputError(
            f"These features do not hold the layer {name!r}. {did_you_mean(name, self.names)}Name it among the layers "
            "when the features are captured."
        )

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of a layer over all samples, once collected."""
        self.layer(name)
        if self.values is None:
            raise InputError(
                f"These features are streamed, so there is no tensor of {name!r} over all samples. Call .collect() "
                "first, which keeps them in memory, or iterate over the batches."
            )
        return self.values[name]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> FeatureStream:
        """One pass over the data."""
        if self.source is None:
            return FeatureStream(iter([(dict(self.values or {}), self.mask)]), known=self.fingerprint)
        hasher = Hasher(self.source.axis)
        return FeatureStream(self.source.walk(self.source.batches(), self.layers, hasher), hasher)

    def collect(self, policy: str | None = None) -> Features:
        """The same features in memory, as captured or under a policy ("channels", "flatten", "pool", "tokens")."""
        if self.values is not None:
            if policy in (None, self.policy):
                return self
            values = {name: self.view(name, policy or "") for name in self.names}
            return replace(self, values=values, policy=policy)
        parts: dict[str, list[Tensor]] = {name: [] for name in self.names}
        masks: list[Tensor] = []
        stream = iter(self)
        for batch in stream:
            masks += [] if stream.mask is None else [stream.mask]
            for layer in self.layers:
                x = batch[layer.name]
                parts[layer.name].append(arrange(x, policy, layer.layout, stream.mask) if policy else x)
        values = {layer.name: _joined(layer, parts.pop(layer.name), policy) for layer in self.layers}
        mask = torch.cat(masks) if masks and not policy else None
        return replace(self, values=values, policy=policy, fingerprint=stream.fingerprint, source=None, mask=mask)

    def view(self, name: str, policy: str = "channels", layout: str | None = None) -> Tensor:
        """A collected layer under a policy; `layout` overrides the layout that was found."""
        x = self[name]
        if self.policy == policy:
            return x
        if self.policy is not None:
            raise InputError(
                f"{name!r} was collected under the policy {self.policy!r}, so there is no view under {policy!r}. "
                "Collect without a policy to have every view."
            )
        return arrange(x, policy, layout or self.layer(name).layout, self.mask)

    def check(self, other: Features) -> None:
        """Refuse features of other samples, or of the same in another order."""
        if self.fingerprint is None or other.fingerprint is None:
            raise InputError("Whether two features have the same samples is known once both are collected.")
        self.fingerprint.check(other.fingerprint)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, without the tensors."""
        return {
            "layers": [layer.to_dict() for layer in self.layers],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped],
            "policy": self.policy,
            "fingerprint": self.fingerprint.to_dict() if self.fingerprint else None,
        }

    def __repr__(self) -> str:
        state = "streamed"
        if self.fingerprint is not None and self.values is not None:
            size = sum(x.numel() * x.element_size() for x in self.values.values())
            under = f" under {self.policy}" if self.policy else ""
            data = f"data {self.fingerprint.digest[:8]}"
            state = f"{self.fingerprint.samples} samples{under}, {size / 1e6:.1f} MB, {data}"
        count = f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)}"
        left = f", {len(self.skipped)} skipped" if self.skipped else ""
        return "\n".join([f"Features({count}, {state}{left})", *layer_table(self.layers)])


def _joined(layer: CapturedLayer, parts: list[Tensor], policy: str | None) -> Tensor:
    try:
        return torch.cat(parts, 0 if policy else layer.axis)
    except RuntimeError as error:
        shapes = ", ".join(sorted({str(tuple(part.shape)) for part in parts}))
        raise MismatchError(
            f"The shape of the layer {layer.name!r} changes from batch to batch: {shapes}. Pad or crop the inputs to "
            'one size, or collect under a policy that has one width, such as "pool", or "tokens" for padded text.'
        ) from error


def features(
    model: nn.Module,
    data: Any,
    layers: str | Iterable[str] | None = None,
    layouts: Mapping[str, str] | None = None,
    device: str | torch.device | None = None,
    sample_axis: int = 0,
) -> Features:
    """The activations of some layers of a model on any data; the model is never changed.

    The first batch runs at once, so that a wrong path is refused here; the rest runs when the features are iterated or
    collected. The model runs in evaluation mode without gradients; inputs are moved to its device and precision.

    Args:
        model: the network.
        data: any iterable of (inputs, targets); inputs are a tensor, a tuple of tensors or a mapping of keywords.
        layers: module paths such as "layer1.0.relu", its input "layer1.0.relu:input", one of several calls
            "layer1.0.relu@2", one item of a tuple "lstm[1]", patterns "layer1.*.relu"; None for every module without
            children that gives a tensor. `intertwine.data.layers` explains the notation.
        layouts: layer → layout, one letter per axis (n samples, c channels, p positions, t tokens), for layers whose
            automatic layout is wrong. It is printed with the features.
        device: where the features are kept; None leaves them on the model's device.
        sample_axis: the sample axis of the inputs; 1 for a recurrent net that is fed time first.

    Raises:
        InputError: an unknown path, a module that is not reached or gives no tensor, data that is not batches.

    >>> import torch, intertwine
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten())
    >>> batches = [(torch.ones(2, 3, 6, 6), None), (torch.ones(1, 3, 6, 6), None)]
    >>> found = intertwine.features(model, batches, ["0", "1:input", "1"])
    >>> found
    Features(3 layers, streamed)
      0        Conv2d  8×4×4  ncpp  float32
      1:input  ReLU    8×4×4  ncpp  float32
      1        ReLU    8×4×4  ncpp  float32
    >>> [tuple(batch["1"].shape) for batch in found]
    [(2, 8, 4, 4), (1, 8, 4, 4)]
    >>> kept = found.collect()
    >>> tuple(kept["1"].shape), tuple(kept.view("1", "channels").shape), kept.fingerprint.samples
    ((3, 8, 4, 4), (48, 8), 3)
    """
    source = FeatureSource(model, data, layer_paths(model, layers), device, sample_axis)
    call, finder = source.first(), LayoutFinder()
    with finder.watching(model):
        found, skipped = record(model, call, source.layers, device, finder.observe)
    given = dict(layouts or {})
    described: list[CapturedLayer] = []
    for path, x in list(found.items()):
        this = replace(path, call=path.call or 1)
        layout = check_layout(x, given.pop(str(path), None) or finder.found[this]) if x.dim() else ""
        if problem := no_samples(x, layout, samples_of(call, sample_axis)):
            if path.exact:
                raise InputError(f"The layer {str(path)!r} {problem}")
            skipped[str(path)] = problem
            del found[path]
            continue
        shape = tuple(size for axis, size in enumerate(x.shape) if layout[axis] != "n")
        dtype = str(x.dtype).removeprefix("torch.")
        described.append(CapturedLayer(str(path), finder.kinds[this], shape, layout, dtype))
    if given:
        name, names = next(iter(given)), [layer.name for layer in described]
        raise InputError(f"A layout is given for {name!r}, which is not captured. {did_you_mean(name, names)}")
    if not described:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:3])
        raise InputError(f"None of the layers has features. {reasons}")
    source.layers = exact_paths(found)
    return Features(tuple(described), tuple(skipped.items()), source=source)
