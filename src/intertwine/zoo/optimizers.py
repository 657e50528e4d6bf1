"""Optimizers for stacks: torch's own, which work entry by entry, so that no network feels the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from intertwine.zoo.recipe import Recipe


def make_optimizer(recipe: Recipe, parameters: Mapping[str, Tensor], rate: float | Tensor) -> torch.optim.Optimizer:
    """The recipe's optimizer on stacked parameters (networks, …); a rate in a tensor can change in a recorded step."""
    weights = [p for p in parameters.values() if p.dim() > 2 or recipe.decay == "all"]
    others = [p for p in parameters.values() if p.dim() <= 2 and recipe.decay != "all"]
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((weights, recipe.weight_decay), (others, 0.0))
        if group
    ]
    recorded: dict[str, Any] = {"capturable": True} if isinstance(rate, Tensor) else {}
    match recipe.optimizer:
        case "sgd":
            momentum: dict[str, Any] = {"momentum": recipe.momentum, "nesterov": recipe.nesterov}
            return torch.optim.SGD(groups, lr=rate, fused=True, **momentum)  # pyrefly: ignore
        case "adam":
            return torch.optim.Adam(groups, lr=rate, fused=True, **recorded)
        case _:
            return torch.optim.AdamW(groups, lr=rate, fused=True, **recorded)


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the optimizer remembers, by the name of the parameter and of the entry."""
    return {
        f"{name}:{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Give an optimizer back what it remembered, in the memory layout of its parameters."""
    for entry, value in state.items():
        name, _, key = entry.rpartition(":")
        parameter = parameters[name]
        own = torch.empty_like(parameter).copy_(value) if value.dim() else value.to(parameter.device, copy=True)
        optimizer.state[parameter][key] = own.detach()
