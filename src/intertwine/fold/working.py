"""Working tensors: the weights of a network in double precision, in the form in which features are merged.

With norm="fold" a BatchNorm in evaluation mode is a scale s = γ/√(v+eps) and a shift per feature. Right behind a layer
the scale goes into the rows of the layer, and |γ|, |γ|·√(v+eps), β, s·mean and s·bias are kept beside. All of these
are merged by the same sums as the rows, and give back a BatchNorm and a layer at the end. Nothing is lost on the way,
and statistics and γ keep their meaning, so that the smaller network can be trained as the larger one.
Elsewhere scale and shift stay as two numbers per feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from intertwine.fold.roles import Layer, Norm, Roles
from intertwine.symmetry.layout import Layout, Leaf, Plus, Times, Tree


@dataclass(frozen=True)
class Working:
    """One tensor that merging changes. `counted`: whether distances look at it: "in", "bias" or None."""

    name: str
    data: Tensor
    axes: tuple[Tree, ...]
    roles: tuple[str | None, ...]
    counted: str | None


Finish = Callable[[], dict[str, Tensor]]  # the tensors of the network, once everything is merged


@dataclass(frozen=True)
class Workbench:
    """All working tensors, and how the network's own tensors are read off them."""

    tensors: tuple[Working, ...]
    finishes: tuple[Finish, ...]

    def weights(self) -> dict[str, Tensor]:
        """The network's tensors as they stand, at full width; features merged into others are zero."""
        return {name: tensor for finish in self.finishes for name, tensor in finish().items()}


def workbench(layouts: Mapping[str, Layout], roles: Roles, weights: Mapping[str, Tensor], norm: str) -> Workbench:
    """Working tensors of a network. The given weights are not changed."""
    own = {name: t.detach().to("cpu", torch.float64, copy=True).contiguous() for name, t in weights.items()}
    maker = _Maker(layouts, roles, own)
    for found in roles.norms:
        maker.take_norm(found, norm)
    for name in weights:
        if name not in maker.taken:
            maker.plain(name)
    return Workbench(tuple(maker.tensors), tuple(maker.finishes))


class _Maker:
    def __init__(self, layouts: Mapping[str, Layout], roles: Roles, own: dict[str, Tensor]) -> None:
        self.layouts, self.roles, self.own = layouts, roles, own
        self.tensors: list[Working] = []
        self.finishes: list[Finish] = []
        self.taken: set[str] = set()

    def plain(self, name: str) -> None:
        """A tensor that is merged as it is."""
        axes = self.layouts[name].axes
        roles = tuple(self.roles.axes.get((name, axis)) for axis in range(len(axes)))
        counted = "bias" if roles == ("write",) else "in"
        self.tensors.append(Working(name, self.own[name], axes, roles, counted))
        self.finishes.append(lambda: {name: self.own[name]})

    def take_norm(self, norm: Norm, how: str) -> None:
        layer = (norm.layer.weight, norm.layer.bias) if norm.layer else ()
        names = {name for name in (*norm.names, *layer) if name is not None}
        if not names <= self.own.keys():  # no wire moves it
            return
        self.taken |= names
        tree = self.layouts[norm.weight or norm.mean].axes[0]
        if how == "sum":
            self._raw(norm, tree)
        elif norm.layer is None:
            self._affine(norm, tree)
        else:
            self._folded(norm, norm.layer, tree)

    def _layer(self, layer: Layer, tree: Tree) -> None:
        """The weight of a layer before a BatchNorm; scales pass it as they pass the norm."""
        axes = list(self.layouts[layer.weight].axes)
        axes[layer.axis] = tree
        roles = tuple(self.roles.axes.get((layer.weight, axis)) for axis in range(len(axes)))
        self.tensors.append(Working(layer.weight, self.own[layer.weight], tuple(axes), roles, "in"))

    def _vector(self, name: str, data: Tensor, tree: Tree, role: str, counted: str | None = None) -> Tensor:
        self.tensors.append(Working(name, data, (tree,), (role,), counted))
        return data

    def _raw(self, norm: Norm, tree: Tree) -> None:
        """The rule of the paper's code: every vector of the norm is merged as rows are, statistics too."""
        role = norm.layer.role if norm.layer else "each"
        names = list(norm.names)
        if norm.layer:
            self._layer(norm.layer, tree)
            self.finishes.append(lambda n=norm.layer.weight: {n: self.own[n]})
        for name in names:
            self._vector(name, self.own[name], tree, role)
        if norm.layer and norm.layer.bias:
            names.append(norm.layer.bias)
            self._vector(norm.layer.bias, self.own[norm.layer.bias], tree, role, "bias")
        self.finishes.append(
            lambda: {n: self.own[n] for n in names} | {norm.var: _divisible(self.own[norm.var], norm.eps)}
        )

    def _parts(self, norm: Norm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """γ, β, running mean and √(v+eps) of a norm."""
        mean, deviation = self.own[norm.mean], (self.own[norm.var] + norm.eps).sqrt()
        gamma = self.own[norm.weight] if norm.weight else torch.ones_like(mean)
        return gamma, self.own[norm.bias] if norm.bias else torch.zeros_like(mean), mean, deviation

    def _affine(self, norm: Norm, tree: Tree) -> None:
        """A norm that no layer can take up: a scale and a shift per feature."""
        gamma, beta, mean, deviation = self._parts(norm)
        ratio = _ratio(tree if norm.weight else None, self.layouts[norm.mean].axes[0])
        scale = self._vector(f"{norm.mean} scale", gamma / deviation, ratio, "each", "in")
        shift = self._vector(f"{norm.mean} shift", beta - gamma / deviation * mean, tree, "each", "bias")
        center = self._vector(norm.mean, mean.clone(), tree, "each")
        spread = self._vector(norm.var, self.own[norm.var].clone(), tree, "each")

        def finish() -> dict[str, Tensor]:
            found = {norm.mean: center, norm.var: _divisible(spread, norm.eps)}
            if norm.weight:
                found[norm.weight] = scale * (spread + norm.eps).sqrt()
            if norm.bias:
                found[norm.bias] = shift + scale * center
            return found

        self.finishes.append(finish)

    def _folded(self, norm: Norm, layer: Layer, tree: Tree) -> None:
        gamma, beta, mean, deviation = self._parts(norm)
        scale = gamma / deviation
        rows = [1] * self.own[layer.weight].ndim
        rows[layer.axis] = -1
        old_var, old_mean = self.own[norm.var].clone(), mean.clone()
        old_bias = self.own[layer.bias].clone() if layer.bias else None
        weight = self.own[layer.weight].mul_(scale.view(rows))
        self._layer(layer, tree)

        def vector(what: str, data: Tensor, counted: str | None = None) -> Tensor:
            return self._vector(f"{norm.mean} {what}", data, tree, layer.role, counted)

        size, spread = vector("size", gamma.abs()), vector("spread", gamma.abs() * deviation)
        start, center = vector("start", beta.clone()), vector("center", scale * mean)
        offset = vector("offset", scale * old_bias) if old_bias is not None else None
        vector("shift", beta + (0 if old_bias is None else scale * old_bias) - scale * mean, "bias")

        def finish() -> dict[str, Tensor]:
            alive = size > 0
            signed = torch.where(gamma < 0, -size, size)
            new = torch.where(alive, spread / torch.where(alive, size, 1.0), (old_var + norm.eps).sqrt())
            unscale = torch.where(alive, new / torch.where(alive, signed, 1.0), 0.0)
            found = {
                layer.weight: weight * unscale.view(rows),
                norm.mean: torch.where(alive, center * unscale, old_mean),
                norm.var: torch.where(alive, (new.square() - norm.eps).clamp(min=0), old_var),  # rounding below zero
            }
            if layer.bias and offset is not None and old_bias is not None:
                found[layer.bias] = torch.where(alive, offset * unscale, old_bias)
            return found | dict(_optional(norm, signed, start))

        self.finishes.append(finish)


def _ratio(gamma: Tree | None, mean: Tree) -> Tree:
    """The axis of γ/√(v+eps): what scales the features before the norm is divided out. Without γ, that alone."""
    match mean:
        case Leaf():
            own = gamma.powers if isinstance(gamma, Leaf) else (Fraction(0),) * len(mean.powers)
            return replace(mean, powers=tuple(a - b for a, b in zip(own, mean.powers, strict=True)))
        case Times() | Plus():
            parts = gamma.parts if isinstance(gamma, (Times, Plus)) else [None] * len(mean.parts)
            return replace(mean, parts=tuple(_ratio(a, b) for a, b in zip(parts, mean.parts, strict=True)))
    return mean


def _divisible(var: Tensor, eps: float) -> Tensor:
    """Variances; those of features that are gone are 0, and without eps the network at full width divides by them."""
    return var if eps > 0 else torch.where(var > 0, var, 1.0)


def _optional(norm: Norm, weight: Tensor, bias: Tensor) -> Iterator[tuple[str, Tensor]]:
    if norm.weight:
        yield norm.weight, weight
    if norm.bias:
        yield norm.bias, bias
