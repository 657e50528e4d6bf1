"""One network of a splice, ready to be run in halves: traced and proved where that can be, else with hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from intertwine.errors import InputError
from intertwine.features.batches import Call, fresh, placed
from intertwine.features.capture import record
from intertwine.features.fingerprint import samples_of
from intertwine.features.layouts import Layouts
from intertwine.features.places import Site
from intertwine.features.policy import check_layout
from intertwine.stitch.batching import alike, few
from intertwine.stitch.hooked import Hooked
from intertwine.stitch.splitting import Traced
from intertwine.stitch.tracing import Untraceable


@dataclass(frozen=True, eq=False)
class Half:
    """A network and what is known of its places.

    Attributes:
        run: starts up to a place and finishes from one. layouts, dtypes: of the features at the places.
        by_few: whether it takes the first few samples of a batch alone. reason: why it could not be traced.
    """

    run: Traced | Hooked
    layouts: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    by_few: bool
    reason: str


def halved(
    model: nn.Module, places: Sequence[Site], example: Call, layouts: Mapping[str, str], *, complete: bool
) -> Half:
    """A network cut at some places. `complete`: it must also finish from each place, not only start.

    The steps of a traced network are proved on few samples of the example against the network itself: the features at
    every place, and, for a back, the outputs behind every place and the gradient at the first.
    """
    small, by_few, known, found = _recorded(model, example, places)
    sites = [site for site, _ in found]
    tensors = [tensor for _, tensor in found]
    chosen = tuple(
        _layout(site, x, layouts.get(str(site)), known, samples_of(small))
        for site, x in zip(sites, tensors, strict=True)
    )
    hooked, reason = Hooked(model, sites), ""
    run: Traced | Hooked = hooked
    try:
        run = Traced(model, sites, small, by_few)
        _prove(run, hooked, small, tensors, complete)
    except Untraceable as why:
        run, reason = hooked, str(why)
    return Half(run, chosen, tuple(x.dtype for x in tensors), tensors[0].device, by_few, reason)


def _recorded(
    model: nn.Module, example: Call, places: Sequence[Site]
) -> tuple[Call, bool, Layouts, list[tuple[Site, Tensor]]]:
    """The features at the places, of few samples where the network takes few, and what their layouts seem to be."""
    known = Layouts()
    with known.watching(model):
        whole, _ = record(model, example, tuple(dict.fromkeys(places)), note=known.note)
    if len(whole) != len(set(places)):
        raise InputError("A pattern fits modules that are called more than once. Name the calls one by one: path@2.")
    small = few(example)
    try:
        found, _ = record(model, small, tuple(dict.fromkeys(places)))
    except Exception:  # noqa: BLE001 - foreign code that wants its whole batch
        return example, False, known, [(site, whole[site]) for site in places]
    return small, True, known, [(site, found[site]) for site in places]


def _layout(site: Site, x: Tensor, given: str | None, known: Layouts, samples: int) -> str:
    """The layout of a place, checked against the number of samples."""
    if not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.")
        raise InputError(
            f"The place {str(site)!r} holds {kind} numbers, and only features of floating point can be mapped. Cut "
            "behind it."
        )
    seen = next((layout for one, layout in known.found.items() if _same_place(one, site)), None)
    layout = check_layout(x, given or seen)
    axis = layout.index("n")
    if not samples:
        raise InputError("The first batch of the data holds no samples, so the networks cannot be cut. Leave it out.")
    if x.shape[axis] % samples or not x.shape[axis]:
        raise InputError(
            f"The place {str(site)!r} has a tensor {tuple(x.shape)} for {samples} samples, but samples should lie "
            f"along its axis {axis}, as the layout {layout!r} says. Say what the axes are, such as "
            f"layouts={{{str(site)!r}: 'tnc'}} for time first."
        )
    return layout


def _same_place(one: Site, other: Site) -> bool:
    return (one.path, one.side, one.call or 1, one.keys) == (other.path, other.side, other.call or 1, other.keys)


# -- proof -------------------------------------------------------------------------------------------------------------


def _prove(traced: Traced, hooked: Hooked, call: Call, tensors: Sequence[Tensor], complete: bool) -> None:
    """Raise Untraceable where the steps do not do what the network does."""
    places = range(len(tensors))
    begun = traced.start(call, places, places)
    if not all(alike(begun[i].tensor, tensors[i]) for i in places):
        raise Untraceable("its steps give other features than the network itself")
    if not complete:
        return
    args, kwargs = placed(fresh(call), traced.model)
    with torch.no_grad():
        output = traced.model(*args, **kwargs)
        for i in places:
            copies = [_cloned(value) for value in begun[i].around]
            if not alike(traced.finish(i, begun[i].tensor.clone(), tuple(copies), call), output):
                raise Untraceable("its steps give another output than the network itself")
    first = min(places, key=lambda i: traced.program.order[traced.plans[i].cut])
    ways = [_gradient(run, first, tensors[first], begun[first].around, call) for run in (traced, hooked)]
    if not alike(*ways):
        raise Untraceable("its steps have other gradients than the network itself")


def _cloned(value: Any) -> Any:
    return tree_map(lambda x: x.clone(), value)


def _gradient(run: Traced | Hooked, place: int, x: Tensor, around: tuple[Any, ...], call: Call) -> Tensor:
    """The gradient at a place of a fixed sum of all outputs, and zeros where none arrives."""
    with torch.enable_grad():
        begin = x.clone().requires_grad_()
        output = run.finish(place, begin.clone(), tuple(_cloned(value) for value in around), call)
        leaves = [y for y in tree_leaves(output) if isinstance(y, Tensor) and y.requires_grad]
        if not leaves:
            return torch.zeros_like(x)
        ways = [torch.cos(torch.arange(y.numel(), device=y.device)).view(y.shape).to(y.dtype) for y in leaves]
        return torch.autograd.grad(leaves, begin, ways, allow_unused=True, materialize_grads=True)[0]
