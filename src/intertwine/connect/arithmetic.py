"""Arithmetic of weights: interpolation of two networks, the average of checkpoints of one run, and task vectors that
are added or carried into the basis of another network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, SupportsFloat, overload

import torch
from torch import Tensor, nn

from intertwine.align.align import Alignment
from intertwine.argument_types import finite_float
from intertwine.data.batchnorm import reset_statistics
from intertwine.data.weights import entrywise_mean, first_difference, mean_network, path_between
from intertwine.errors import InputError, MismatchError
from intertwine.graph.model import copy_module, empty_caches
from intertwine.symmetry.element import Element
from intertwine.symmetry.geometry import act
from intertwine.symmetry.symmetry import Symmetry


@overload
def average(models: Iterable[nn.Module], data: Any = None) -> nn.Module: ...


@overload
def average(models: Iterable[Mapping[str, Tensor]], data: None = None) -> dict[str, Tensor]: ...


def average(
    models: Iterable[nn.Module] | Iterable[Mapping[str, Tensor]], data: Any = None
) -> nn.Module | dict[str, Tensor]:
    """The entrywise mean (1/n) Σᵢ θᵢ of checkpoints of one run, as in stochastic weight averaging.

    Nothing is aligned: checkpoints of one run share their basis. They are read one after the other, so a generator that
    loads one at a time works.

    Args:
        models: networks, or state dicts. data: batches of (inputs, targets) on which BatchNorm statistics are
            re-estimated, for networks; without, the statistics are averaged like everything else and do not fit.

    Returns:
        A new network, or a state dict for state dicts.

    Example:
        >>> import torch
        >>> from intertwine.connect.arithmetic import average
        >>> steps = [{"w": torch.tensor([0.0, 2.0])}, {"w": torch.tensor([4.0, 6.0])}]
        >>> average(steps)
        {'w': tensor([2., 4.])}
    """
    given = iter(models)
    first = next(given, None)
    if first is None:
        raise InputError("There is nothing to average: no network is given. Pass at least one.")
    everything: Iterator[Any] = chain([first], given)
    if not isinstance(first, nn.Module):
        if data is not None:
            raise InputError("State dicts cannot run on data to re-estimate statistics. Pass networks instead.")
        return entrywise_mean(everything)
    mean = mean_network(everything)
    return mean if data is None else reset_statistics(mean, data)


def task_vector(tuned: nn.Module, base: nn.Module) -> dict[str, Tensor]:
    """What fine-tuning changed: tuned − base, for every float tensor of the state; counters are left out.

    Example:
        >>> import torch
        >>> base = torch.nn.Linear(2, 2)
        >>> delta = task_vector(base, base)
        >>> float(delta["weight"].abs().max())
        0.0
    """
    first, second = tuned.state_dict(), base.state_dict()
    if found := first_difference(first, second, lambda x: f"has shape {tuple(x.shape)}"):
        name, one, other = found
        raise MismatchError(
            f"The two networks differ: {name!r} {one} in the tuned one and {other} in its base. A task vector is the "
            "difference of two states of one network."
        )
    return {n: x - second[n].to(x.device) for n, x in first.items() if x.is_floating_point() or x.is_complex()}


def transport(
    delta: Mapping[str, Tensor], moved_by: Element | Alignment, symmetry: Symmetry | None = None
) -> dict[str, Tensor]:
    """A change of the weights of b, carried into the basis of a.

    A change of the weights of b has no meaning in a until the element g that takes b to a has moved it. The result is
    g·(b + delta) − g·b. Every element acts linearly on weights, so b itself is not needed; on a running variance v,
    which moves as (v + eps), only the eps drops out.

    Args:
        delta: names and changes, as `task_vector` gives them; any subset of the state. moved_by: the element that takes
            b to a, or the alignment `intertwine.align(a, b, …)`. symmetry: of the element; an alignment has its own.

    Raises:
        InputError: an element without its symmetry, or a symmetry that first folds norm weights into later layers.
        MismatchError: an element of another symmetry, or tensors of other shapes.

    Example:
        >>> import torch, intertwine
        >>> a = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> sym = intertwine.symmetry(a, torch.zeros(1, 3))
        >>> g = sym.random(seed=0)
        >>> delta = {"0.weight": torch.ones(8, 3)}
        >>> there = transport(delta, g, sym)
        >>> back = transport(there, g.inverse(), sym)
        >>> torch.allclose(back["0.weight"], delta["0.weight"])
        True
    """
    element = moved_by.element if isinstance(moved_by, Alignment) else moved_by
    found = moved_by.symmetry if isinstance(moved_by, Alignment) else symmetry
    if found is None:
        raise InputError(
            "An element needs its symmetry, which knows where it acts. Pass it too: transport(delta, g, sym)."
        )
    found.check_element(element)
    if found.geometry.diagonals:
        raise InputError(
            f"This symmetry first folds {found.geometry.diagonals[0]!r} into the layers that read it, so a change of "
            "the weights cannot be moved. Use the symmetry without continuous=True, or fold both networks before "
            "tuning."
        )
    tied = found.geometry.graph.program.tied
    carried = {}
    for name, change in delta.items():
        layout = found.layouts.get(tied.get(name, name))
        if layout is not None and tuple(change.shape) != layout.shape:
            raise MismatchError(
                f"The change of {name!r} has shape {tuple(change.shape)}, but in the symmetry it has shape "
                f"{layout.shape}. Pass the task vector of a network of this architecture."
            )
        carried[name] = change if layout is None else act(replace(layout, shift=0.0), change, element)
    return carried


def add(model: nn.Module, delta: Mapping[str, Tensor], scale: float | int = 1.0) -> nn.Module:
    """A new network with scale · delta added to its weights.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 2)
        >>> more = add(model, {"bias": torch.ones(2)}, scale=2)
        >>> torch.allclose(more.bias, model.bias + 2)
        True
    """
    changed = copy_module(model)
    tensors = changed.state_dict(keep_vars=True)
    if unknown := [name for name in delta if name not in tensors]:
        raise MismatchError(
            f"The task vector changes {unknown[0]!r}, which the network does not have. Pass one of its own."
        )
    written: set[int] = set()
    with torch.no_grad():
        for name, change in delta.items():
            tensor = tensors[name]
            if tensor.data_ptr() not in written:  # a tied weight has several names and is changed once
                tensor.add_(change.to(tensor.device), alpha=scale)
                written.add(tensor.data_ptr())
    empty_caches(changed)
    return changed


def interpolate(a: nn.Module, b: nn.Module, t: SupportsFloat) -> nn.Module:
    """A new network with the weights (1 − t)·a + t·b.

    Parameters and buffers of real or complex numbers are mixed, running statistics of BatchNorm included: the mixed
    running variance is not the variance of the mixed network, see `intertwine.data.batchnorm`. Integers and masks come
    from a. Weights that are tied in a stay tied.

    Args:
        a, b: two networks of one architecture; neither is changed. t: the position on the line; 0 is a, 1 is b.

    Raises:
        MismatchError: the networks differ in more than the values of their weights. InputError: t is not a number.

    Example:
        >>> import torch, intertwine
        >>> a, b = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        >>> middle = intertwine.interpolate(a, b, 0.5)
        >>> torch.allclose(middle.weight, (a.weight + b.weight) / 2)
        True
    """
    point = finite_float(t)
    if point is None:
        raise InputError(f"t must be a finite number: 0 is the first network, 1 the second; found {t!r}.")
    return path_between(a, b, [point]).network(0)
