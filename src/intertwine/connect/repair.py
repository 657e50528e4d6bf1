"""Repair of a mixed network whose units have lost variance: REPAIR, which measures it on data, and scale correction,
which estimates it from the weights.
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
from intertwine.data.batches import Call, check_readable_again, labelled_batches
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
from intertwine.errors import InputError, unknown_name
from intertwine.graph.model import refuse_scripted
from intertwine.graph.program import Call as ProgramCall
from intertwine.graph.program import Program, Ref
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.symmetry import symmetry as find_symmetry

WeightLayer = nn.Linear | _ConvNd
Target = tuple[Tensor, Tensor]  # mean and standard deviation of every unit
Hook = Callable[[str, Tensor], Tensor | None]  # of a layer's name and its output; may return another output

#: Weights shorter than this have no direction.
SHORTEST = 1e-300
#: Ops that return their input unchanged.
PASS_THROUGH = ("aten.alias.default", "aten.contiguous.default", "aten.clone.default", "aten.detach.default")


def repair(a: nn.Module, b: nn.Module, t: float | int, data: Any, layers: Sequence[str] | None = None) -> nn.Module:
    """The network (1 − t)·a + t·b with the variance of its features restored (REPAIR, Jordan et al. 2023).

    With BatchNorm, its statistics are re-estimated on the data. Without, the mean and the standard deviation of every
    output unit of every linear and convolution layer become the mix of those of a and b, by a scale and a shift folded
    into weight and bias; a layer without a bias gets one. A constant unit is only shifted. While a layer is measured,
    the layers before it are corrected batch by batch, so one batch gives exact statistics and several give nearly exact
    ones.

    Args:
        a, b: two networks of one architecture, best aligned first; neither is changed. t: from 0 (a) to 1 (b).
        data: batches of (inputs, targets), read twice without BatchNorm. layers: paths of the layers to repair, for
            networks without BatchNorm; None for all linear and convolution layers that the forward calls.

    Returns:
        A new network.

    Example:
        >>> import torch
        >>> a, b = (torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU()) for _ in range(2))
        >>> x = torch.randn(64, 3)
        >>> repaired = repair(a, b, 0.5, [(x, torch.zeros(64))])
        >>> wanted = (a[0](x).std(0) + b[0](x).std(0)) / 2
        >>> torch.allclose(repaired[0](x).std(0), wanted, rtol=1e-4)
        True
    """
    if not 0 <= t <= 1:
        raise InputError(f"t must lie between 0 (the first network) and 1 (the second); found {t}.")
    refuse_scripted(a)
    if batch_norms(a):
        if layers is not None:
            raise InputError(
                "layers= is given, but this network has BatchNorm, and its repair is to reset the statistics. Leave "
                "layers out."
            )
        return reset_statistics(interpolate(a, b, t), data)
    check_readable_again(data)
    path = path_between(a, b, [0.0, 1.0, t])
    chosen = _chosen(path.scratch, layers)
    with evaluating(path.scratch):
        targets = _targets(path, data, chosen, layers is not None)
        found = _measured(path, data, {name: chosen[name] for name in targets}, targets)
    repaired = path.network(2)
    with torch.no_grad():
        for name, target in targets.items():
            _fold(chosen[name], found[name], target)
    return repaired


# -- Layers with weights of their own ----------------------------------------------------------------------------------


def _weight_layers(model: nn.Module) -> dict[str, tuple[WeightLayer, str]]:
    """Path → a linear or convolution layer, and why its units cannot be scaled alone; empty if they can."""
    shared = {name for group in names_by_tensor(model) if len(group) > 1 for name in group}
    found: dict[str, tuple[WeightLayer, str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, WeightLayer):
            own = {key: f"{path}.{key}" if path else key for key, _ in module.named_parameters(recurse=False)}
            reason = "tied to another layer" if shared & {*own.values()} else ""
            found[path] = module, reason if "weight" in own else "computed from other weights"
    return found


def _chosen(model: nn.Module, layers: Sequence[str] | None) -> dict[str, WeightLayer]:
    known = _weight_layers(model)
    if not known:
        raise InputError("The network has no linear or convolution layer, so there is nothing to repair.")
    for name in known if layers is None else layers:
        if name not in known:
            raise InputError(unknown_name("linear or convolution layer", name, known))
        if reason := known[name][1]:
            raise InputError(
                f"The weight of {name!r} is {reason}, so no scale can be folded into it alone. Name the layers to "
                "repair with layers=, without this one."
            )
    return {name: known[name][0] for name in (known if layers is None else layers)}


def _scale_weight(layer: WeightLayer, scale: Tensor) -> None:
    """Multiply the incoming weights of every output unit by a number."""
    weight = layer.weight
    if isinstance(layer, _ConvNd) and layer.transposed:  # its weight is (inputs, units of one group, ...)
        per_group = scale.view(layer.groups, 1, -1, *[1] * (weight.dim() - 2))
        weight.copy_((weight.double().unflatten(0, (layer.groups, -1)) * per_group).flatten(0, 1))
    else:
        weight.copy_(weight.double() * scale.view(-1, *[1] * (weight.dim() - 1)))


# -- REPAIR ------------------------------------------------------------------------------------------------------------


def _targets(path: LinearPath, data: Any, chosen: dict[str, WeightLayer], named: bool) -> dict[str, Target]:
    """The mean and standard deviation that every unit should have: the mix of those of both ends."""
    ends = [{name: ChannelMoments() for name in chosen} for _ in range(2)]
    for batch in labelled_batches(data, path.scratch):
        for end, moments in enumerate(ends):
            _run(path, end, batch.call, chosen, lambda name, x, own=moments: own[name].add(x, _channels(chosen[name])))
    unused = [name for name in chosen if not ends[0][name].count]
    if unused and named:
        raise InputError(f"The network never calls the layer {unused[0]!r}, so it cannot be repaired. Leave it out.")
    t = path.ts[2]
    return {
        name: (
            (1 - t) * ends[0][name].mean + t * ends[1][name].mean,
            (1 - t) * ends[0][name].variance().sqrt() + t * ends[1][name].variance().sqrt(),
        )
        for name in chosen
        if name not in unused
    }


def _measured(
    path: LinearPath, data: Any, chosen: dict[str, WeightLayer], targets: dict[str, Target]
) -> dict[str, ChannelMoments]:
    """The statistics of the mixed network, with the layers before each one corrected batch by batch."""
    found = {name: ChannelMoments() for name in targets}

    def correct(name: str, x: Tensor) -> Tensor:
        axis = _channels(chosen[name])
        check_varies(name, x, axis)
        found[name].add(x, axis)
        of_batch = ChannelMoments()
        of_batch.add(x, axis)
        scale, shift = (value.to(x.dtype) for value in _scale_and_shift(of_batch, targets[name]))
        return (x.movedim(axis, -1) * scale + shift).movedim(-1, axis)

    for batch in labelled_batches(data, path.scratch):
        _run(path, 2, batch.call, chosen, correct)
    return found


def _run(path: LinearPath, point: int, call: Call, chosen: dict[str, WeightLayer], hook: Hook) -> None:
    args, kwargs = call
    network = path.network(point)
    with _hooks(chosen, hook):
        network(*args, **kwargs)


@contextmanager
def _hooks(chosen: dict[str, WeightLayer], hook: Hook) -> Iterator[None]:
    called: set[str] = set()

    def call_once(name: str, x: Tensor) -> Tensor | None:
        if name in called:
            raise InputError(
                f"The layer {name!r} is called several times in one forward, and one scale and shift cannot serve all "
                "calls. Name the layers to repair with layers=, without this one."
            )
        called.add(name)
        return hook(name, x)

    with ExitStack() as stack:
        for name, layer in chosen.items():
            handle = layer.register_forward_hook(lambda _layer, _args, x, name=name: call_once(name, x))
            stack.callback(handle.remove)
        yield


def _channels(layer: WeightLayer) -> int:
    """The unit axis of an output, counted from the end: inputs need not have a batch axis."""
    return -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)


def _scale_and_shift(found: ChannelMoments, target: Target) -> tuple[Tensor, Tensor]:
    """What maps the found mean and deviation to the target; a constant unit keeps its scale."""
    mean, deviation = target
    own = found.variance().sqrt()
    scale = torch.where(own > 0, deviation / own, 1.0)
    return scale, mean - scale * found.mean


def _fold(layer: WeightLayer, found: ChannelMoments, target: Target) -> None:
    scale, shift = _scale_and_shift(found, target)
    _scale_weight(layer, scale)
    if layer.bias is None:
        layer.bias = nn.Parameter(shift.to(layer.weight.dtype), requires_grad=layer.weight.requires_grad)
    else:
        layer.bias.copy_(layer.bias.double() * scale + shift)


# -- Scale correction without data -------------------------------------------------------------------------------------


def correct_scales(
    models: Sequence[nn.Module],
    *example_args: Any,
    weights: Sequence[float | int] | None = None,
    symmetry: Symmetry | None = None,
    **example_kwargs: Any,
) -> nn.Module:
    """The weighted mean of networks with the scale of every unit restored, without data.

    The mean of different vectors is shorter than the vectors, so the units of a mixed network vary less than those of
    the networks in it. Networks k with weights wₖ are mixed. For every output unit of a linear or convolution layer:

    * If the output of the layer goes into a BatchNorm, the layer stays as mixed. The BatchNorm gets the expected
      running variance of the mixed unit, v + eps = Σₖₗ wₖ wₗ ρₖₗ σₖ σₗ. Here σₖ² = vₖ + eps is that of network k, and
      ρₖₗ is the cosine of the unit's incoming weights in k and l, an estimate of the correlation of their outputs. The
      running mean is the mixed one.
    * Otherwise weights and bias of the unit are multiplied by n̄ / n, where n is the length of both together in the
      mixed network and n̄ = Σₖ wₖ nₖ the mean length over the networks. A unit of length zero stays.

    Both are exact, up to eps, if the inputs of a layer are uncorrelated, of one variance and the same in all networks.
    Otherwise they are estimates, which lower the barrier of most aligned networks and may raise the loss of others,
    above all of those that are not aligned. Layers whose weights are tied or computed from others stay as mixed, and so
    does a BatchNorm that follows anything but a linear or convolution layer.

    Args:
        models: networks of one architecture, best aligned first; none is changed. weights: of the mean; equal if None.
        *example_args, **example_kwargs: inputs, as for `intertwine.symmetry`; or symmetry, if it is known. Only
            networks with BatchNorm need either, to find the layer that a BatchNorm follows.

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
                "Scale correction of a network with BatchNorm needs its graph, to find the layer that a BatchNorm "
                "follows. Pass example inputs after the models, or symmetry=."
            )
        found = symmetry if symmetry is not None else find_symmetry(models[0], *example_args, **example_kwargs)
        followed = norms_after_layers(found.geometry.graph.program)
    with torch.no_grad():
        for name, (_, reason) in _weight_layers(mixed).items():
            if reason:
                continue
            layers = [model.get_submodule(name) for model in (mixed, *models)]
            norm = followed.get(f"{name}.weight" if name else "weight")
            if norm is None:
                _lengthen(layers, shares)
            else:
                _set_variance([model.get_submodule(norm) for model in (mixed, *models)], layers, shares)
    return mixed


def corrected_along(path: LinearPath, a: nn.Module, b: nn.Module, example: Call) -> LinearPath:
    """The same path from a to b with the scales of every point corrected."""
    args, kwargs = example
    with evaluating(path.scratch):
        found = find_symmetry(path.scratch, *args, **kwargs) if batch_norms(a) else None
    points = [tensors_of(correct_scales([a, b], weights=(1 - t, t), symmetry=found)) for t in path.ts]
    real = [name for name, tensor in path.first.items() if tensor.is_floating_point()]
    return path.with_own({name: torch.stack([point[name] for point in points]) for name in real})


def norms_after_layers(program: Program) -> dict[str, str]:
    """Weight of a linear or convolution layer → path of the BatchNorm that its output goes into."""
    made = {call.name: call for call in program.calls}
    targets = {source.name: source.target for source in program.inputs}
    found: dict[str, str] = {}
    for call in program.calls:
        if "batch_norm" not in call.op or not isinstance(call.args[4], Ref):
            continue
        before = _producer(made, call)
        variance = targets.get(call.args[4].name)
        weight = targets.get(before.args[1].name) if before is not None and isinstance(before.args[1], Ref) else None
        if variance is not None and weight is not None:
            found[weight] = variance.rpartition(".")[0]
    return found


def _producer(made: dict[str, ProgramCall], call: ProgramCall) -> ProgramCall | None:
    """The linear or convolution call whose output a call reads."""
    while isinstance(call.args[0], Ref) and call.args[0].name in made:
        call = made[call.args[0].name]
        if call.op not in PASS_THROUGH:
            return call if "conv" in call.op or call.op == "aten.linear.default" else None
    return None


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


def _lengthen(layers: Sequence[nn.Module], shares: Sequence[float | int]) -> None:
    """Multiply the units of a mixed layer by n̄ / n; layers: the mixed one, then those of the networks."""
    mixed, *own = map(_lengths, layers)
    wanted = torch.stack([share * n.to(mixed.device) for share, n in zip(shares, own, strict=True)]).sum(0)
    scale = torch.where(mixed > 0, wanted / torch.where(mixed > 0, mixed, 1.0), 1.0)
    layer = layers[0]
    assert isinstance(layer, WeightLayer)
    _scale_weight(layer, scale)
    if layer.bias is not None:
        layer.bias.copy_(layer.bias.double() * scale)


def _set_variance(norms: Sequence[nn.Module], layers: Sequence[nn.Module], shares: Sequence[float | int]) -> None:
    buffer = norms[0].get_buffer("running_var")
    eps = float(getattr(norms[0], "eps", 0.0))
    total = torch.zeros_like(_rows(layers[0]))
    for norm, layer, share in zip(norms[1:], layers[1:], shares, strict=True):
        deviation = (norm.get_buffer("running_var").double().to(total.device) + eps).sqrt()
        total += share * deviation[:, None] * functional.normalize(_rows(layer).to(total.device), dim=1, eps=SHORTEST)
    buffer.copy_((total.square().sum(1) - eps).clamp(min=0.0))  # a variance is never negative
