"""Repair of a mixed network whose units have lost variance: REPAIR, which measures it on data, and scale correction,
which reads it off the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from intertwine.argument_types import Float
from intertwine.connect.arithmetic import interpolate
from intertwine.data.batches import check_readable_again, labelled_batches
from intertwine.data.batchnorm import ChannelMoments, batch_norms, check_varies, reset_statistics
from intertwine.data.layers import evaluating
from intertwine.data.weights import (
    LinearPath,
    check_same_architecture,
    mean_network,
    names_by_tensor,
    path_between,
    tensors_of,
)
from intertwine.errors import InputError, did_you_mean
from intertwine.graph.model import refuse_scripted
from intertwine.graph.program import Call, Program, Ref
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.symmetry import symmetry as find_symmetry

# ----------------------------------------------------------------------------------------------------
# REPAIR: a mixed network whose layers vary as much as those of the two networks it was mixed from.
#
# Averaging two networks shrinks the variance of their features, layer after layer. The cure gives every unit the mean and
# the standard deviation that a mix of its two origins would have (Jordan et al., 2023).


WeightLayer = nn.Linear | _ConvNd
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


def _chosen(model: nn.Module, layers: Sequence[str] | None) -> dict[str, WeightLayer]:
    known = {name: module for name, module in model.named_modules() if isinstance(module, WeightLayer)}
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


def _targets(path: LinearPath, data: Any, chosen: dict[str, WeightLayer], named: bool) -> dict[str, Target]:
    """What every unit should have: the mix of the statistics of both ends."""
    ends = [{name: ChannelMoments() for name in chosen} for _ in range(2)]
    for batch in labelled_batches(data, path.scratch):
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


def _measured(
    path: LinearPath, data: Any, chosen: dict[str, WeightLayer], targets: dict[str, Target]
) -> dict[str, ChannelMoments]:
    """The statistics of the mixed network, the layers before each one corrected batch by batch."""
    found = {name: ChannelMoments() for name in targets}

    def correct(name: str, x: Tensor) -> Tensor:
        axis = _channels(chosen[name])
        check_varies(name, x, axis)
        found[name].add(x, axis)
        here = ChannelMoments()
        here.add(x, axis)
        scale, shift = (value.to(x.dtype) for value in _scale_and_shift(here, targets[name]))
        return (x.movedim(axis, -1) * scale + shift).movedim(-1, axis)

    for batch in labelled_batches(data, path.scratch):
        _run(path, 2, batch.call, {name: chosen[name] for name in targets}, correct)
    return found


def _run(path: LinearPath, point: int, call: Any, chosen: dict[str, WeightLayer], hook: Hook) -> None:
    args, kwargs = call
    network = path.network(point)
    with _hooked(chosen, hook):
        network(*args, **kwargs)


@contextmanager
def _hooked(chosen: dict[str, WeightLayer], hook: Hook) -> Iterator[None]:
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


def _channels(layer: WeightLayer) -> int:
    """The axis of an output that holds the units, counted from the end: inputs need not be in batches."""
    return -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)


def _scale_and_shift(found: ChannelMoments, target: Target) -> tuple[Tensor, Tensor]:
    """What takes the found mean and deviation to the wanted ones; a unit that never varies keeps its scale."""
    mean, deviation = target
    own = found.variance().sqrt()
    scale = torch.where(own > 0, deviation / own, 1.0)
    return scale, mean - scale * found.mean


def _fold(layer: WeightLayer, found: ChannelMoments, target: Target) -> None:
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


# ----------------------------------------------------------------------------------------------------
# Scale correction without data: units of a mixed network get back the size that mixing takes from them.
#
# The mean of unlike vectors is shorter than the vectors, so the units of a mixed network vary less than those of the
# networks it was mixed from, layer after layer. REPAIR measures that loss on data; here it is read off the weights.
#
# Networks k with weights wₖ are mixed. For every output unit of a linear or convolution layer:
#
# * Where the output of the layer goes into a BatchNorm, the layer stays as mixed. The BatchNorm gets the running variance
#   that the mixed unit is expected to have, v + eps = Σₖₗ wₖ wₗ ρₖₗ σₖ σₗ. Here σₖ² = vₖ + eps is what network k has, and
#   ρₖₗ is the cosine of the unit's incoming weights in k and l, in the place of the correlation of what they compute. The
#   running mean is the mixed one.
# * Elsewhere weights and bias of the unit are multiplied by n̄ / n, where n is the length of both together in the mixed
#   network and n̄ = Σₖ wₖ nₖ the mixed length of its origins. A unit of length zero stays.
#
# Both are exact, up to eps, where the inputs of a layer are uncorrelated, of one variance and the same in all networks;
# elsewhere they are estimates, which lower the barrier of most aligned networks (docs/alignment.md) and may raise the
# loss of others, above all of those that are not aligned. REPAIR measures instead of estimating, and needs data.


#: Weights shorter than this have no direction.
SHORTEST = 1e-300
#: Calls that hand a tensor on as it is.
SAME = ("aten.alias.default", "aten.contiguous.default", "aten.clone.default", "aten.detach.default")


def correct_scales(
    models: Sequence[nn.Module],
    *example_args: Any,
    weights: Sequence[float | int] | None = None,
    symmetry: Symmetry | None = None,
    **example_kwargs: Any,
) -> nn.Module:
    """The weighted mean of networks, every unit with the size of its origins; no data is needed.

    The head of this module says exactly what is done. Layers whose weights are tied or computed from others are left
    as mixed, and so is a BatchNorm that follows anything but a linear or convolution layer.

    Args:
        models: networks of one architecture, best aligned first; none is changed. weights: of the mean; equal if None.
        *example_args, **example_kwargs: inputs, as for `intertwine.symmetry`; or symmetry, where it is known. Only
            networks with BatchNorm need either: what follows what is read off the graph.

    Raises:
        MismatchError: the networks differ in more than their weights. InputError: BatchNorm, and no example inputs.

    Example:
        >>> import torch
        >>> a, b = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        >>> size = lambda m: torch.cat([m.weight, m.bias[:, None]], 1).norm(dim=1)
        >>> torch.allclose(size(correct_scales([a, b])), (size(a) + size(b)) / 2)
        True
    """
    refuse_scripted(models[0])
    for other in models[1:]:
        check_same_architecture(models[0], other)
    shares = list(weights) if weights is not None else [1 / len(models)] * len(models)
    mixed = mean_network(models, shares)
    followed: dict[str, str] = {}
    if batch_norms(mixed):
        if symmetry is None and not (example_args or example_kwargs):
            raise InputError(
                "The scales of a network with BatchNorm were to be corrected, and which layer a BatchNorm follows is "
                "read off the graph. Pass example inputs behind the models, or symmetry=."
            )
        found = symmetry if symmetry is not None else find_symmetry(models[0], *example_args, **example_kwargs)
        followed = norms_after_layers(found.geometry.graph.program)
    with torch.no_grad():
        for name in _layers(mixed):
            layers = [model.get_submodule(name) for model in (mixed, *models)]
            norm = followed.get(f"{name}.weight" if name else "weight")
            if norm is None:
                _lengthen(layers, shares)
            else:
                _set_variance([model.get_submodule(norm) for model in (mixed, *models)], layers, shares)
    return mixed


def corrected_along(
    path: LinearPath, a: nn.Module, b: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]]
) -> LinearPath:
    """The same path from a to b, the scales of every point corrected."""
    args, kwargs = example
    with evaluating(path.scratch):
        found = find_symmetry(path.scratch, *args, **kwargs) if batch_norms(a) else None
    points = [tensors_of(correct_scales([a, b], weights=(1 - t, t), symmetry=found)) for t in path.ts]
    real = [name for name, tensor in path.first.items() if tensor.is_floating_point()]
    return path.with_own({name: torch.stack([point[name] for point in points]) for name in real})


def _layers(model: nn.Module) -> list[str]:
    """Paths of linear and convolution layers with weights of their own."""
    shared = {name for group in names_by_tensor(model) if len(group) > 1 for name in group}
    found = []
    for path, module in model.named_modules():
        own = {f"{path}.{key}" if path else key for key, _ in module.named_parameters(recurse=False)}
        if isinstance(module, WeightLayer) and "weight" in module._parameters and not own & shared:
            found.append(path)
    return found


def norms_after_layers(program: Program) -> dict[str, str]:
    """Weight of a linear or convolution layer → path of the BatchNorm that its output goes into."""
    made = {call.name: call for call in program.calls}
    targets = {source.name: source.target for source in program.inputs}
    found: dict[str, str] = {}
    for call in program.calls:
        if "batch_norm" not in call.op or not isinstance(call.args[4], Ref):
            continue
        before = _origin(made, call)
        variance = targets.get(call.args[4].name)
        weight = targets.get(before.args[1].name) if before is not None and isinstance(before.args[1], Ref) else None
        if variance is not None and weight is not None:
            found[weight] = variance.rpartition(".")[0]
    return found


def _origin(made: dict[str, Call], call: Call) -> Call | None:
    """The linear or convolution call whose output a call reads."""
    while isinstance(call.args[0], Ref) and call.args[0].name in made:
        call = made[call.args[0].name]
        if call.op not in SAME:
            return call if "conv" in call.op or call.op == "aten.linear.default" else None
    return None


# -- one layer ---------------------------------------------------------------------------------------------------------


def _rows(layer: nn.Module) -> Float[Tensor, "units entries"]:
    """The incoming weights of every output unit, in double precision."""
    weight = layer.get_parameter("weight").double()
    if isinstance(layer, _ConvNd) and layer.transposed:  # its weight is (inputs, units of one group, ...)
        return weight.unflatten(0, (layer.groups, -1)).movedim(2, 1).flatten(0, 1).flatten(1)
    return weight.flatten(1)


def _lengths(layer: nn.Module) -> Float[Tensor, "*units"]:
    """The length of the incoming weights and the bias of every unit."""
    rows = _rows(layer)
    bias = getattr(layer, "bias", None)
    return (rows if bias is None else torch.cat([rows, bias.double()[:, None].to(rows.device)], 1)).norm(dim=1)


def _growth(layers: Sequence[nn.Module], shares: Sequence[float | int]) -> Float[Tensor, "*units"]:
    """n̄ / n of every unit of a mixed layer; layers: the mixed one, then its origins. 1 where there is no length."""
    mixed, *own = (_lengths(layer) for layer in layers)
    wanted = torch.stack([share * n.to(mixed.device) for share, n in zip(shares, own, strict=True)]).sum(0)
    return torch.where(mixed > 0, wanted / torch.where(mixed > 0, mixed, 1.0), 1.0)


def _lengthen(layers: Sequence[nn.Module], shares: Sequence[float | int]) -> None:
    layer, scale = layers[0], _growth(layers, shares)
    weight = layer.get_parameter("weight")
    if isinstance(layer, _ConvNd) and layer.transposed:
        per_group = scale.view(layer.groups, 1, -1, *[1] * (weight.dim() - 2))
        weight.copy_((weight.double().unflatten(0, (layer.groups, -1)) * per_group).flatten(0, 1))
    else:
        weight.copy_(weight.double() * scale.view(-1, *[1] * (weight.dim() - 1)))
    if getattr(layer, "bias", None) is not None:
        bias = layer.get_parameter("bias")
        bias.copy_(bias.double() * scale)


def _set_variance(norms: Sequence[nn.Module], layers: Sequence[nn.Module], shares: Sequence[float | int]) -> None:
    buffer = norms[0].get_buffer("running_var")
    eps = float(getattr(norms[0], "eps", 0.0))
    total = torch.zeros_like(_rows(layers[0]))
    for norm, layer, share in zip(norms[1:], layers[1:], shares, strict=True):
        deviation = (norm.get_buffer("running_var").double().to(total.device) + eps).sqrt()
        total += share * deviation[:, None] * functional.normalize(_rows(layer).to(total.device), dim=1, eps=SHORTEST)
    buffer.copy_((total.square().sum(1) - eps).clamp(min=0.0))  # a variance is not negative, however small it became
