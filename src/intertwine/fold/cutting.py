"""Removes features from the tensors and modules of a network, and checks the smaller module against the full width."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from intertwine.data.layers import evaluating
from intertwine.errors import InputError
from intertwine.graph.model import copy_module, empty_caches, tied_names
from intertwine.graph.runner import float64_forward, to_float64
from intertwine.symmetry.certify import relative_error
from intertwine.symmetry.geometry import LayoutAxis, ProductAxis, SumAxis, WireAxis
from intertwine.symmetry.symmetry import Symmetry

Example = tuple[tuple[Any, ...], dict[str, Any]]
KeptFeatures = Mapping[int, Sequence[int]]  # index of a wire → the features that stay
#: The largest relative difference that counts as rounding.
TOLERANCE = 1e-9
_TORCH = Path(torch.__file__).parent


def with_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A copy with some tensors replaced, given by their first names; shapes stay as they are."""
    wide = copy_module(model)
    tied = tied_names(wide)
    with torch.no_grad():
        for name, tensor in [*wide.named_parameters(), *wide.named_buffers()]:
            if tied[name] in weights:
                tensor.copy_(weights[tied[name]])
    empty_caches(wide)
    return wide


def cut_model(model: nn.Module, symmetry: Symmetry, kept: KeptFeatures) -> nn.Module:
    """A copy of a model with the kept features alone; the sizes in the attributes of its modules match."""
    small = copy_module(model)
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
                    cut = _cut_tensor(tensor.detach(), symmetry.layouts[name].axes, kept)
                    trained = isinstance(tensor, nn.Parameter)
                    new[name] = nn.Parameter(cut, requires_grad=tensor.requires_grad) if trained else cut
                changed |= new[name].shape != tensor.shape
                store[key] = new[name]
        if changed:
            _set_sizes(module)
    _set_paddings(small, symmetry, kept)
    empty_caches(small)
    return small


def _cut_tensor(x: Tensor, axes: Sequence[LayoutAxis], kept: KeptFeatures) -> Tensor:
    for dim, axis in enumerate(axes):
        index = torch.tensor(kept_positions(axis, kept), device=x.device)
        if len(index) < x.shape[dim]:
            x = x.index_select(dim, index)
    return x.clone()


def kept_positions(axis: LayoutAxis, kept: KeptFeatures) -> list[int]:
    """The positions of an axis that stay.

    >>> from intertwine.symmetry.geometry import WireAxis, SumAxis, FixedAxis, ProductAxis
    >>> kept_positions(SumAxis((FixedAxis(2), ProductAxis((WireAxis(0, 3), FixedAxis(2))))), {0: [0, 2]})
    [0, 1, 2, 3, 6, 7]
    """
    match axis:
        case WireAxis():
            return list(kept.get(axis.wire, range(axis.size)))
        case ProductAxis():
            found = [0]
            for part in axis.parts:
                found = [i * part.size + j for i in found for j in kept_positions(part, kept)]
            return found
        case SumAxis():
            begins = [sum(p.size for p in axis.parts[:k]) for k in range(len(axis.parts))]
            return [b + i for b, part in zip(begins, axis.parts, strict=True) for i in kept_positions(part, kept)]
    return list(range(axis.size))


def _set_sizes(module: Any) -> None:
    """Set the attributes in which a module of torch keeps the sizes of its tensors."""
    match module:
        case nn.Linear():
            module.out_features, module.in_features = module.weight.shape
        case _ConvNd():
            first, second = module.weight.shape[:2]
            if module.groups > 1:  # depthwise, with one channel per group: others are not folded
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


def _set_paddings(small: nn.Module, symmetry: Symmetry, kept: KeptFeatures) -> None:
    """Set the attributes in which a module keeps how many zeros a shortcut pads its features with."""
    graph = symmetry.geometry.graph
    for call in graph.program.calls:
        if call.op not in ("aten.pad.default", "aten.constant_pad_nd.default"):
            continue
        axes = symmetry.geometry.layout(graph.values[call.name]).axes
        old = [int(p) for p in call.args[1]]
        new = list(_new_pads(old, axes, kept))
        if new == old:
            continue
        module = small.get_submodule(call.path)
        owned = [k for k, v in vars(module).items() if isinstance(v, (tuple, list)) and list(v) == old]
        if not owned:
            raise InputError(
                f"The forward pads features with {tuple(old)} zeros at {call.place}, a number that no attribute of the "
                f"module {call.path or type(call).__name__!r} holds; the folded network needs {tuple(new)}. Keep the "
                "padding in an attribute (self.padding = …) and read it in the forward, or give no beta for them."
            )
        for key in owned:
            setattr(module, key, type(getattr(module, key))(new))


def _new_pads(old: Sequence[int], axes: Sequence[LayoutAxis], kept: KeptFeatures) -> Iterator[int]:
    """The remaining zeros before and after, from the last axis to the first."""
    for i in range(0, len(old), 2):
        axis = axes[len(axes) - 1 - i // 2]
        stay = kept_positions(axis, kept)
        yield sum(p < old[i] for p in stay) if old[i] > 0 else old[i]
        yield sum(p >= axis.size - old[i + 1] for p in stay) if old[i + 1] > 0 else old[i + 1]


def outputs_in_float64(model: nn.Module, example: Example) -> list[Tensor]:
    """Every tensor a model in double precision returns, in evaluation mode."""
    args, kwargs = to_float64(example)
    with evaluating(model), float64_forward():
        return [v for v in tree_leaves(model(*args, **kwargs)) if isinstance(v, Tensor)]


def check_outputs(wide: nn.Module, small: nn.Module, example: Example) -> float:
    """The largest difference of two networks on the example in double precision, relative to the outputs.

    Raises:
        InputError: the small one does not run, or computes something else; it names the line or the module.
    """
    expected = outputs_in_float64(copy_module(wide).double(), example)
    double = copy_module(small).double()
    inside: list[str] = []  # paths of the modules that are running

    def leave(*_: object) -> None:
        inside.pop()

    for path, module in double.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: inside.append(path))
        module.register_forward_hook(leave)
    try:
        found = outputs_in_float64(double, example)
    except Exception as error:
        raise InputError(
            f"The forward of the network with fewer features fails {_place(error, inside)}: {error}. A width is "
            "written into the forward there; read it off a tensor or a module (x.shape[1], self.fc.in_features, "
            "nn.Flatten) instead, or give no beta for these wires."
        ) from error
    pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a.is_floating_point()]
    for a, b in pairs:
        if a.shape != b.shape:
            raise InputError(
                f"The output of the network with fewer features changes shape from {tuple(a.shape)} to "
                f"{tuple(b.shape)}. Its forward returns hidden features; they cannot be folded."
            )
    worst = max((relative_error(a, b) for a, b in pairs), default=0.0)
    if not worst <= TOLERANCE:
        raise InputError(
            f"The outputs of the network with fewer features differ by {worst:.1e} from those of the same network at "
            "full width. Its forward uses a width without failing: a slice such as x[:, :64], a division by a number "
            "of features. Read the width off a tensor or a module instead."
        )
    return worst


def _place(error: Exception, inside: list[str]) -> str:
    """Where a forward failed: its innermost line that is not torch's own, else the module."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.name == "forward" and _TORCH not in Path(f.filename).parents]
    near = f"in the module {inside[-1]!r}" if inside and inside[-1] else "in the model's own forward"
    return f"at {Path(own[-1].filename).name}:{own[-1].lineno} ({own[-1].line}), {near}" if own else near
