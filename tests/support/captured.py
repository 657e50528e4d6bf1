"""The tensors of some layers, one mapping per batch: what `features` builds on."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from intertwine.data.batches import calls
from intertwine.data.layers import exact_paths, layer_paths, record


def capture(
    model: nn.Module, data: Any, layers: str | Iterable[str] | None = None, device: str | None = None
) -> Iterator[dict[str, Tensor]]:
    selected = layer_paths(model, layers)
    for i, call in enumerate(calls(data)):
        found, _ = record(model, call, selected, device)
        selected = exact_paths(found) if i == 0 else selected
        yield {str(layer): tensor for layer, tensor in found.items()}
