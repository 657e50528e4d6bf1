"""One tensor under several names: a symmetry must move it in one way, whichever name it is asked by."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from intertwine.errors import MismatchError
from intertwine.symmetry.layout import Layout


def check_ties(held: Iterable[tuple[Hashable, str]], layout_of: Callable[[str], Layout | None], whose: str) -> None:
    """Raise `MismatchError` for a tensor whose names are moved differently.

    Args:
        held: (which tensor, one of its names). layout_of: name → how a symmetry moves it. whose: what holds them.
    """
    first: dict[Hashable, str] = {}
    for tensor, name in held:
        other = first.setdefault(tensor, name)
        if not _alike(layout_of(other), layout_of(name)):
            raise MismatchError(
                f"This symmetry moves {other!r} and {name!r} differently, and {whose} holds one tensor under both "
                "names. Call intertwine.symmetry on a model that ties them, or give each of them a tensor of its own."
            )


def names_in_model(model: nn.Module) -> Iterator[tuple[Hashable, str]]:
    """(which tensor, name) of all parameters and buffers."""
    yield from ((id(p), name) for name, p in model.named_parameters(remove_duplicate=False))
    yield from ((id(b), name) for name, b in model.named_buffers(remove_duplicate=False))


def names_in_state(state: Mapping[str, Tensor]) -> Iterator[tuple[Hashable, str]]:
    """(which tensor, name) of the entries of a state dict, where tensors of one memory and shape are one."""
    for name, t in state.items():
        if isinstance(t, Tensor) and t.layout == torch.strided and not t.is_meta and t.numel():
            yield (t.data_ptr(), t.dtype, t.shape, t.stride()), name


def _alike(a: Layout | None, b: Layout | None) -> bool:
    """Whether two layouts move a tensor in one way; None moves nothing."""
    return a == b or not any(True for layout in (a, b) if layout is not None for _ in layout.leaves())
