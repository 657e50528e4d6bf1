"""REPAIR: a mixed network whose layers vary as much as those of the two networks it was mixed from.

Averaging two networks shrinks the variance of their features, layer after layer. The cure gives every unit the mean and
the standard deviation that a mix of its two origins would have (Jordan et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from intertwine.connect.agreement import names_by_tensor
from intertwine.connect.interpolation import Path, interpolate, path_between
from intertwine.connect.statistics import Moments, batch_norms, check_varies, reset_statistics
from intertwine.errors import InputError, did_you_mean
from intertwine.features.batches import check_readable_again
from intertwine.features.capture import evaluating
from intertwine.features.labelled import labelled
from intertwine.graph.capture import refuse_scripted

Layer = nn.Linear | _ConvNd
Target = tuple[Tensor, Tensor]  # mean and standard deviation of every unit
Hook = Callable[[str, Tensor], Tensor | None]  # told the layer and its output; may give another output


def repair(a: nn.Module, b: nn.Module, t: float | int, data: Any, layers: Sequence[str] | None = None) -> nn.Module:
    """The network (1 − t)·a + t·b, mended.

    With BatchNorm, its statistics are estimated again on the data. Without, the mean and the standard deviation of
    every output unit of every linear and convolution layer become the mix of those of a and b, by a scale and a shift
    folded into weight and bias; a layer without a bias gets one. A unit that never varies is only shifted. While a
    layer is measured the ones before it are corrected batch by batch, so one batch gives exact statistics and several
    give nearly exact ones.

    Args:
        a, b: two networks of one architecture, best aligned first; neither is changed. t: from 0 (a) to 1 (b).
        data: batches of (inputs, targets), read twice without BatchNorm. layers: paths of the layers to mend; all
            linear and convolution layers that the forward calls where None. For networks without BatchNorm.

    Returns:
        A new network.

    Example:
        >>> import torch
        >>> a, b = (torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU()) for _ in range(2))
        >>> x = torch.randn(64, 3)
        >>> mended = repair(a, b, 0.5, [(x, torch.zeros(64))])
        >>> wanted = (a[0](x).std(0) + b[0](x).std(0)) / 2
        >>> torch.allclose(mended[0](x).std(0), wanted, rtol=1e-4)
        True
    """
    if not 0 <= t <= 1:
        raise InputError(f"t must lie between 0 (the first network) and 1 (the second); found {t}.")
    refuse_scripted(a)
    if batch_norms(a):
        if layers is not None:
            raise InputError(
                "layers= was given, but this network has BatchNorm and is mended by resetting its statistics. Leave "
                "layers out."
            )
        return reset_statistics(interpolate(a, b, t), data)
    check_readable_again(data)
    path = path_between(a, b, [0.0, 1.0, t])
    chosen = _chosen(path.scratch, layers)
    with evaluating(path.scratch):
        targets = _targets(path, data, chosen, layers is not None)
        found = _measured(path, data, chosen, targets)
    mended = path.network(2)
    with torch.no_grad():
        for name, target in targets.items():
            _fold(chosen[name], found[name], target)
    return mended


# -- which layers ------------------------------------------------------------------------------------------------------


def _chosen(model: nn.Module, layers: Sequence[str] | None) -> dict[str, Layer]:
    known = {name: module for name, module in model.named_modules() if isinstance(module, Layer)}
    if not known:
        raise InputError("The network has no linear or convolution layer, so there is nothing to mend.")
    for name in layers or ():
        if name not in known:
            near = did_you_mean(name, known)
            raise InputError(f"There is no linear or convolution layer {name!r}. {near}Layers: {', '.join(known)}.")
    chosen = {name: known[name] for name in (known if layers is None else layers)}
    shared = {name for group in names_by_tensor(model) if len(group) > 1 for name in group}
    for name, layer in chosen.items():
        prefix = f"{name}." if name else ""
        plain = {key for key, value in layer.named_parameters(recurse=False) if value is not None}
        if "weight" not in plain or {prefix + key for key in plain} & shared:
            what = "tied to another layer" if "weight" in plain else "computed from other weights"
            raise InputError(
                f"The weight of {name!r} is {what}, so no scale can be folded into it alone. Name the layers to mend "
                "with layers=, this one left out."
            )
    return chosen


# -- two passes --------------------------------------------------------------------------------------------------------


def _targets(path: Path, data: Any, chosen: dict[str, Layer], named: bool) -> dict[str, Target]:
    """What every unit should have: the mix of the statistics of both ends."""
    ends = [{name: Moments() for name in chosen} for _ in range(2)]
    for batch in labelled(data, path.scratch):
        for end, moments in enumerate(ends):
            _run(path, end, batch.call, chosen, lambda name, x, own=moments: own[name].add(x, _channels(chosen[name])))
    silent = [name for name in chosen if not ends[0][name].count]
    if silent and named:
        raise InputError(f"The layer {silent[0]!r} was to be mended, but the network never calls it. Leave it out.")
    t = path.ts[2]
    return {
        name: (
            (1 - t) * ends[0][name].mean + t * ends[1][name].mean,
            (1 - t) * ends[0][name].variance().sqrt() + t * ends[1][name].variance().sqrt(),
        )
        for name in chosen
        if name not in silent
    }


def _measured(path: Path, data: Any, chosen: dict[str, Layer], targets: dict[str, Target]) -> dict[str, Moments]:
    """The statistics of the mixed network, the layers before each one corrected batch by batch."""
    found = {name: Moments() for name in targets}

    def correct(name: str, x: Tensor) -> Tensor:
        axis = _channels(chosen[name])
        check_varies(name, x, axis)
        found[name].add(x, axis)
        here = Moments()
        here.add(x, axis)
        scale, shift = (value.to(x.dtype) for value in _scale_and_shift(here, targets[name]))
        return (x.movedim(axis, -1) * scale + shift).movedim(-1, axis)

    for batch in labelled(data, path.scratch):
        _run(path, 2, batch.call, {name: chosen[name] for name in targets}, correct)
    return found


def _run(path: Path, point: int, call: Any, chosen: dict[str, Layer], hook: Hook) -> None:
    args, kwargs = call
    network = path.network(point)
    with _hooked(chosen, hook):
        network(*args, **kwargs)


@contextmanager
def _hooked(chosen: dict[str, Layer], hook: Hook) -> Iterator[None]:
    seen: set[str] = set()

    def hear(name: str, x: Tensor) -> Tensor | None:
        if name in seen:
            raise InputError(
                f"The layer {name!r} is called several times in one forward, and one scale and shift cannot serve all "
                "calls. Name the layers to mend with layers=, this one left out."
            )
        seen.add(name)
        return hook(name, x)

    with ExitStack() as stack:
        for name, layer in chosen.items():
            handle = layer.register_forward_hook(lambda _layer, _args, x, name=name: hear(name, x))
            stack.callback(handle.remove)
        yield


# -- one layer ---------------------------------------------------------------------------------------------------------


def _channels(layer: Layer) -> int:
    """The axis of an output that holds the units, counted from the end: inputs need not be in batches."""
    return -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)


def _scale_and_shift(found: Moments, target: Target) -> tuple[Tensor, Tensor]:
    """What takes the found mean and deviation to the wanted ones; a unit that never varies keeps its scale."""
    mean, deviation = target
    own = found.variance().sqrt()
    scale = torch.where(own > 0, deviation / own, 1.0)
    return scale, mean - scale * found.mean


def _fold(layer: Layer, found: Moments, target: Target) -> None:
    scale, shift = _scale_and_shift(found, target)
    weight = layer.weight
    if isinstance(layer, _ConvNd) and layer.transposed:  # its weight is (inputs, units of one group, ...)
        groups = layer.groups
        by_group = weight.double().unflatten(0, (groups, -1)).movedim(2, -1) * _spread(scale.view(groups, -1), weight)
        weight.copy_(by_group.movedim(-1, 2).flatten(0, 1))
    else:
        weight.copy_(weight.double() * scale.view(-1, *[1] * (weight.dim() - 1)))
    bias = shift if layer.bias is None else layer.bias.double() * scale + shift
    if layer.bias is None:
        layer.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=weight.requires_grad)
    else:
        layer.bias.copy_(bias)


def _spread(scale: Tensor, weight: Tensor) -> Tensor:
    """Scales of (groups, units) beside a weight of (groups, inputs, ..., units)."""
    return scale.view(scale.shape[0], *[1] * (weight.dim() - 1), scale.shape[1])
