"""Scale correction without data: units of a mixed network get back the size that mixing takes from them.

The mean of unlike vectors is shorter than the vectors, so the units of a mixed network vary less than those of the
networks it was mixed from, layer after layer. REPAIR measures that loss on data; here it is read off the weights.

Networks k with weights wₖ are mixed. For every output unit of a linear or convolution layer:

* Where the output of the layer goes into a BatchNorm, the layer stays as mixed. The BatchNorm gets the running variance
  that the mixed unit is expected to have, v + eps = Σₖₗ wₖ wₗ ρₖₗ σₖ σₗ. Here σₖ² = vₖ + eps is what network k has, and
  ρₖₗ is the cosine of the unit's incoming weights in k and l, in the place of the correlation of what they compute. The
  running mean is the mixed one.
* Elsewhere weights and bias of the unit are multiplied by n̄ / n, where n is the length of both together in the mixed
  network and n̄ = Σₖ wₖ nₖ the mixed length of its origins. A unit of length zero stays.

Both are exact, up to eps, where the inputs of a layer are uncorrelated, of one variance and the same in all networks;
elsewhere they are estimates, which lower the barrier of most aligned networks (docs/alignment.md) and may raise the
loss of others, above all of those that are not aligned. REPAIR measures instead of estimating, and needs data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from intertwine.align.mean import mean_network
from intertwine.connect.agreement import check_same, names_by_tensor, tensors_of
from intertwine.connect.interpolation import Path
from intertwine.connect.statistics import batch_norms
from intertwine.errors import InputError
from intertwine.features.capture import evaluating
from intertwine.graph.capture import refuse_scripted
from intertwine.graph.program import Call, Program, Ref
from intertwine.shapes import Float
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.symmetry import symmetry as find_symmetry

Layer = nn.Linear | _ConvNd
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
        check_same(models[0], other)
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
        followed = norms_after_layers(found._discovery.graph.program)
    with torch.no_grad():
        for name in _layers(mixed):
            layers = [model.get_submodule(name) for model in (mixed, *models)]
            norm = followed.get(f"{name}.weight" if name else "weight")
            if norm is None:
                _lengthen(layers, shares)
            else:
                _set_variance([model.get_submodule(norm) for model in (mixed, *models)], layers, shares)
    return mixed


def corrected_along(path: Path, a: nn.Module, b: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]]) -> Path:
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
        if isinstance(module, Layer) and "weight" in module._parameters and not own & shared:
            found.append(path)
    return found


def norms_after_layers(program: Program) -> dict[str, str]:
    """Weight of a linear or convolution layer → path of the BatchNorm that its output goes into."""
    made = {call.name: call for call in program.calls}
    targets = {source.name: source.target for source in program.sources}
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
