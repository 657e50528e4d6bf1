"""Whether two networks can be mixed weight by weight: the same layers, names, shapes, types and ties."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from intertwine.errors import InputError, MismatchError

ADVICE = "Only networks of one architecture can be mixed weight by weight."


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under every name it has; buffers that checkpoints leave out are included.

    >>> sorted(tensors_of(nn.Linear(2, 2)))
    ['bias', 'weight']
    """
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    if lazy := [name for name, tensor in named if is_lazy(tensor)]:
        raise InputError(f"{lazy[0]!r} belongs to a lazy layer without weights. Call the network on a batch first.")
    return {name: tensor.detach() if tensor.requires_grad else tensor for name, tensor in named}


def names_by_tensor(model: nn.Module) -> list[list[str]]:
    """The names of every tensor, those of tied weights together."""
    groups: dict[int, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def check_same(a: nn.Module, b: nn.Module) -> None:
    """Refuse two networks that cannot be mixed, and say where they part."""
    for model in (a, b):
        if not isinstance(model, nn.Module):
            raise InputError(f"A torch.nn.Module was expected, a {type(model).__name__} was given.")
    _check_tensors(tensors_of(a), tensors_of(b))
    _check_layers(a, b)
    _check_ties(names_by_tensor(a), tensors_of(b))


def _check_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in [*a, *b]:
        words = [_words(tensors.get(name)) for tensors in (a, b)]
        if words[0] != words[1]:
            raise MismatchError(
                f"The two networks differ: {name!r} {words[0]} in the first and {words[1]} in the second. {ADVICE}"
            )


def _words(tensor: Tensor | None) -> str:
    if tensor is None:
        return "does not exist"
    return f"is {str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _check_layers(a: nn.Module, b: nn.Module) -> None:
    first, second = (dict(model.named_modules()) for model in (a, b))
    for name in _both(first, second):
        words = [_layer(modules.get(name)) for modules in (first, second)]
        if words[0] != words[1]:
            raise MismatchError(
                f"The two networks hold the same weights but differ in what they do with them: {name or 'the network'} "
                f"is {words[0]} in the first and {words[1]} in the second. {ADVICE}"
            )


def _both(first: Iterable[str], second: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*first, *second]))


def _layer(module: nn.Module | None) -> str:
    """The kind of a layer with the settings that change what it computes in evaluation mode."""
    if module is None:
        return "missing"
    kind = type(module).__name__
    if isinstance(module, _DropoutNd) or not type(module).__module__.startswith("torch.nn"):
        return kind
    if isinstance(module, _BatchNorm):
        return f"{kind}(eps={module.eps})"
    return f"{kind}({module.extra_repr()})"


def _check_ties(tied: list[list[str]], other: dict[str, Tensor]) -> None:
    """Weights that are one tensor in the first network get one value, so they must have one value in the second."""
    for first, *rest in tied:
        for name in rest:
            if not torch.equal(other[first], other[name]):
                raise MismatchError(
                    f"{first!r} and {name!r} are one tied weight in the first network and two different ones in the "
                    "second, so a mix could not be tied. Tie them in both networks, or in neither."
                )
