"""`direct_stitch`: one network up to a layer, fed into the rest of another without a stitching layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from intertwine.connect.layerwise import LayerwisePass, ObservedLayer
from intertwine.data.batches import Call, Fingerprint
from intertwine.data.evaluate import Loss, score
from intertwine.data.layers import evaluating, modules_of
from intertwine.data.weights import path_between
from intertwine.errors import InputError


@dataclass(frozen=True)
class StitchScore:
    """Mean loss and error of the first network up to `layer`, the second from there on."""

    layer: str
    loss: float
    error: float | None


@dataclass(frozen=True, eq=False)
class DirectStitch:
    """The result of `direct_stitch`: one `StitchScore` per layer, and those of both whole networks."""

    layers: tuple[StitchScore, ...]
    first: StitchScore
    second: StitchScore
    data: Fingerprint
    skipped: dict[str, str] = field(default_factory=dict, repr=False)

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per layer, then both whole networks."""
        return [asdict(one) for one in (*self.layers, self.first, self.second)]


def direct_stitch(
    a: nn.Module,
    b: nn.Module,
    data: Any,
    layers: str | Iterable[str] | None = None,
    *,
    loss: Loss | None = None,
) -> DirectStitch:
    """The loss and the error of networks that are a up to a layer and b after it.

    If two networks are well aligned, every such network works; a layer at which it fails has other features, or the
    same ones in another order. What bypasses a layer, such as the shortcut of a residual block, stays b's: name the
    blocks then (`layers=["layer1.*"]`).

    Args:
        a, b: two networks of one architecture; neither is changed. data: batches of (inputs, targets), read once.
        layers: as in `connectivity`, outputs only. loss: of (outputs, targets); cross-entropy if None.

    Raises:
        MismatchError: networks of different architectures. InputError: no data, a layer that is not an output.

    Example:
        >>> import torch
        >>> a = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> found = direct_stitch(a, a, [(torch.randn(16, 3), torch.zeros(16).long())])
        >>> all(one.error == found.first.error for one in found.layers)
        True
    """
    path = path_between(a, b, [0.0, 1.0])
    totals: dict[ObservedLayer | str, Tensor] = {}
    passes = LayerwisePass([lambda: path.network(0), lambda: path.network(1)], data, layers)
    for pair in passes:
        outputs: dict[ObservedLayer | str, Any] = {"first": pair.a.answer, "second": pair.b.answer}
        for layer in pair.layers:
            outputs[layer] = _run_from(path.network(1), layer, pair.a.outputs[layer], pair.batch.call)
        for key, output in outputs.items():
            scores = score(output, pair.batch.targets, pair.batch.samples, loss)
            totals[key] = totals[key] + scores if key in totals else scores
    found: dict[ObservedLayer | str, StitchScore] = {}
    for key, total in totals.items():
        losses, weight, wrong, answers = total.tolist()
        if not weight:
            raise InputError("Every target of the data is marked as ignored (-100), so there is no loss to average.")
        name = key if isinstance(key, str) else key.name
        found[key] = StitchScore(name, losses / weight, wrong / answers if answers else None)
    rows = tuple(one for key, one in found.items() if isinstance(key, ObservedLayer))
    return DirectStitch(rows, found["first"], found["second"], passes.hasher.fingerprint, passes.skipped)


def _run_from(model: nn.Module, layer: ObservedLayer, features: Tensor, call: Call) -> Any:
    """The output of a network with the output of one layer replaced by the features of another network."""
    if layer.at.side == "input" or layer.at.keys:
        raise InputError(f"Networks are stitched at the outputs of layers; found {layer.name!r}.")
    calls = 0

    def replace(_module: nn.Module, _args: Any, output: Any) -> Tensor | None:
        nonlocal calls
        calls += 1
        if calls != (layer.at.call or 1):
            return None
        if not isinstance(output, Tensor):
            raise InputError(
                f"The layer {layer.name!r} gives a {type(output).__name__}, not one tensor, so features cannot replace "
                "it. Name the layers to stitch at with layers=, without this one."
            )
        return features.to(output.dtype)

    handle = modules_of(model)[layer.at.path].register_forward_hook(replace)
    args, kwargs = call
    try:
        with evaluating(model):
            return model(*args, **kwargs)
    finally:
        handle.remove()
