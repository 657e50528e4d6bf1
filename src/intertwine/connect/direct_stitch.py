"""Direct stitching: what one network computes up to a layer, fed into the rest of another, with nothing between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from intertwine.connect.layerwise import LayerwisePass, ObservedLayer
from intertwine.data.batches import Fingerprint
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
    """What `direct_stitch` found: one `StitchScore` per layer, and both networks whole under `first` and `second`."""

    layers: tuple[StitchScore, ...]
    first: StitchScore
    second: StitchScore
    data: Fingerprint
    skipped: dict[str, str] = field(default_factory=dict, repr=False)

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per layer, both whole networks behind."""
        return [asdict(one) for one in (*self.layers, self.first, self.second)]


def direct_stitch(
    a: nn.Module,
    b: nn.Module,
    data: Any,
    layers: str | Iterable[str] | None = None,
    *,
    loss: Loss | None = None,
) -> DirectStitch:
    """The loss and the error of networks that are a up to a layer and b behind it.

    Where two networks are well aligned, every such network works; a layer at which it does not, holds other features,
    or the same ones in another order. What passes around a layer, as the shortcut of a residual block does, stays b's:
    name the blocks then (`layers=["layer1.*"]`).

    Args:
        a, b: two networks of one architecture; neither is changed. data: batches of (inputs, targets), read once.
        layers: as in `connectivity`, outputs only. loss: of (outputs, targets); cross-entropy where None.

    Raises:
        MismatchError: networks of different architectures. InputError: no data, a place that is no output.

    Example:
        >>> import torch
        >>> a = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> found = direct_stitch(a, a, [(torch.randn(16, 3), torch.zeros(16).long())])
        >>> all(one.error == found.first.error for one in found.layers)
        True
    """
    path = path_between(a, b, [0.0, 1.0])
    totals: dict[ObservedLayer | str, Tensor] = {}
    walk = LayerwisePass([lambda: path.network(0), lambda: path.network(1)], data, layers)
    for visit in walk:
        whole = {"first": visit.a.answer, "second": visit.b.answer}
        stitched = {
            place: _answer(path.network(1), place, visit.a.outputs[place], visit.batch.call) for place in visit.places
        }
        for key, answer in (whole | stitched).items():
            scores = score(answer, visit.batch.targets, visit.batch.samples, loss)
            totals[key] = totals[key] + scores if key in totals else scores
    names = {key: key if isinstance(key, str) else key.name for key in totals}
    found = {key: _made(names[key], total) for key, total in totals.items()}
    rows = tuple(one for key, one in found.items() if isinstance(key, ObservedLayer))
    return DirectStitch(rows, found["first"], found["second"], walk.hasher.fingerprint, walk.skipped)


def _made(name: str, total: Tensor) -> StitchScore:
    losses, weight, wrong, answers = total.tolist()
    if not weight:
        raise InputError("Every target of the data is marked as ignored (-100), so there is no loss to average.")
    return StitchScore(name, losses / weight, wrong / answers if answers else None)


def _answer(model: nn.Module, place: ObservedLayer, features: Tensor, call: Any) -> Any:
    """What a network answers when the features of another stand at a place."""
    args, kwargs = call
    with evaluating(model), _replaced(modules_of(model)[place.site.path], place, features):
        return model(*args, **kwargs)


@contextmanager
def _replaced(module: nn.Module, place: ObservedLayer, features: Tensor) -> Iterator[None]:
    calls = 0

    def replace(_module: nn.Module, _args: Any, output: Any) -> Tensor | None:
        nonlocal calls
        calls += 1
        if calls != (place.site.call or 1):
            return None
        if not isinstance(output, Tensor):
            raise InputError(
                f"The layer {place.name!r} gives a {type(output).__name__}, not one tensor, so nothing can stand in "
                "for it. Name the layers to stitch at with layers=, this one left out."
            )
        return features.to(output.dtype)

    if place.site.side == "input" or place.site.keys:
        raise InputError(f"Networks are stitched at the outputs of layers; found {place.name!r}.")
    handle = module.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()
