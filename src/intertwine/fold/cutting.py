"""Cutting: a network whose features have been merged at full width becomes a smaller module of the same classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from intertwine.errors import InputError
from intertwine.graph.capture import empty_caches, tied_names
from intertwine.graph.copies import copied
from intertwine.graph.program import Call
from intertwine.symmetry.layout import Leaf, Plus, Times, Tree
from intertwine.symmetry.symmetry import Symmetry

Kept = Mapping[int, Sequence[int]]  # strand → the features that stay


def widened(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A copy with some tensors replaced, by their first names; nothing changes its shape."""
    wide = copied(model)
    tied = tied_names(wide)
    with torch.no_grad():
        for name, tensor in [*wide.named_parameters(), *wide.named_buffers()]:
            if tied[name] in weights:
                tensor.copy_(weights[tied[name]])
    empty_caches(wide)
    return wide


def cut(model: nn.Module, symmetry: Symmetry, kept: Kept) -> nn.Module:
    """A copy of a model with the features that stay, and the sizes its modules state set to match."""
    small = copied(model)
    tied = tied_names(small)
    new: dict[str, Tensor] = {}
    for path, module in list(small.named_modules()):
        changed = False
        stores: list[dict[str, Any]] = [module._parameters, module._buffers]
        for store in stores:
            for key, tensor in list(store.items()):
                name = tied.get(f"{path}.{key}" if path else key)
                if tensor is None or name not in symmetry.layouts:
                    continue
                if name not in new:
                    new[name] = _like(tensor, _cut_tensor(tensor.detach(), symmetry.layouts[name].axes, kept))
                changed |= new[name].shape != tensor.shape
                store[key] = new[name]
        if changed:
            _state_sizes(module)
    _repad(small, symmetry, kept)
    empty_caches(small)
    return small


def _like(old: Tensor, new: Tensor) -> Tensor:
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def _cut_tensor(x: Tensor, axes: Sequence[Tree], kept: Kept) -> Tensor:
    for axis, tree in enumerate(axes):
        index = torch.tensor(positions(tree, kept), device=x.device)
        if len(index) < x.shape[axis]:
            x = x.index_select(axis, index)
    return x.clone()


def positions(tree: Tree, kept: Kept) -> list[int]:
    """The positions of an axis that stay.

    >>> from intertwine.symmetry.layout import Leaf, Plus, Still, Times
    >>> positions(Plus((Still(2), Times((Leaf(0, 3), Still(2))))), {0: [0, 2]})
    [0, 1, 2, 3, 6, 7]
    """
    match tree:
        case Leaf():
            return list(kept.get(tree.strand, range(tree.size)))
        case Times():
            found = [0]
            for part in tree.parts:
                found = [i * part.size + j for i in found for j in positions(part, kept)]
            return found
        case Plus():
            begins = [sum(p.size for p in tree.parts[:k]) for k in range(len(tree.parts))]
            return [b + i for b, part in zip(begins, tree.parts, strict=True) for i in positions(part, kept)]
    return list(range(tree.size))


def _state_sizes(module: Any) -> None:
    """The attributes in which modules of torch state the sizes of their tensors."""
    match module:
        case nn.Linear():
            module.out_features, module.in_features = module.weight.shape
        case _ConvNd():
            first, second = module.weight.shape[:2]
            if module.groups > 1:  # only depthwise ones are folded: one channel per group
                module.groups = first
                second *= module.groups
                module.in_channels = module.out_channels = first
            elif module.transposed:
                module.in_channels, module.out_channels = first, second
            else:
                module.out_channels, module.in_channels = first, second
        case _NormBase():
            tensor = module.weight if module.weight is not None else module.running_mean
            module.num_features = len(tensor)
        case nn.PReLU():
            module.num_parameters = len(module.weight)
        case nn.Embedding():
            module.embedding_dim = module.weight.shape[1]


# -- zeros around features ---------------------------------------------------------------------------------------------


def _repad(small: nn.Module, symmetry: Symmetry, kept: Kept) -> None:
    """Zeros that a shortcut lays around its features are as many as the features they meet; a module must own them."""
    graph = symmetry._discovery.graph
    for call in graph.program.calls:
        if call.op not in ("aten.pad.default", "aten.constant_pad_nd.default"):
            continue
        axes = symmetry._discovery.layout(graph.values[call.name]).axes
        old = [int(p) for p in call.args[1]]
        new = list(_new_pads(old, axes, kept))
        if new == old:
            continue
        module = small.get_submodule(call.path)
        owned = [k for k, v in vars(module).items() if isinstance(v, (tuple, list)) and list(v) == old]
        if not owned:
            raise InputError(_hard_coded(call, old, new))
        for key in owned:
            setattr(module, key, type(getattr(module, key))(new))


def _new_pads(old: Sequence[int], axes: Sequence[Tree], kept: Kept) -> Iterator[int]:
    """The zeros before and after, from the last axis to the first, that are left."""
    for i in range(0, len(old), 2):
        tree = axes[len(axes) - 1 - i // 2]
        stay = positions(tree, kept)
        yield sum(p < old[i] for p in stay) if old[i] > 0 else old[i]
        yield sum(p >= tree.size - old[i + 1] for p in stay) if old[i + 1] > 0 else old[i + 1]


def _hard_coded(call: Call, old: Sequence[int], new: Sequence[int]) -> str:
    return (
        f"The forward pads features with {tuple(old)} zeros at {call.place}, a number that no attribute of the module "
        f"{call.path or type(call).__name__!r} holds; the folded network needs {tuple(new)}. Keep the padding in an "
        "attribute (self.padding = …) and read it in the forward, or give no beta for the wires that meet there."
    )
