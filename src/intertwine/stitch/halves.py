"""One network split at some of its layers: as a traced program where that reproduces the network, otherwise with
forward hooks; evaluation mode and frozen weights while it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from intertwine.data.batches import Call, copied_arguments, on_device_of, samples_of
from intertwine.data.layers import UNWRAPPED, WRAPPERS, LayerPath, Recorder, evaluating, modules_of, pick, record
from intertwine.data.layouts import LayoutFinder, check_layout
from intertwine.errors import InputError
from intertwine.stitch.tracing import PointValues, TracedNetwork, Untraceable, alike, first_samples, repeat_samples

# ----------------------------------------------------------------------------------------------------
# Both networks of a stitch as they are run: in evaluation mode and without gradients for their weights.


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside the wrappers of DataParallel and compile, which hooks and traces cannot pass.

    >>> type(unwrapped(nn.DataParallel(nn.ReLU()))).__name__
    'ReLU'
    """
    while type(model).__name__ in UNWRAPPED:
        model = getattr(model, WRAPPERS[type(model).__name__])
    return model


@contextmanager
def frozen(models: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode, and weights that take no gradient; gradients still flow through. All flags are put back behind.

    >>> layer = nn.Linear(2, 1)
    >>> with frozen([layer]):
    ...     print(layer.training, layer.weight.requires_grad, torch.is_grad_enabled())
    False False True
    >>> layer.training, layer.weight.requires_grad
    (True, True)
    """
    gradients = torch.is_grad_enabled()
    weights = [weight for model in models for weight in model.parameters() if weight.requires_grad]
    with ExitStack() as stack:
        for model in {id(model): model for model in models}.values():
            stack.enter_context(evaluating(model))
        for weight in weights:
            stack.callback(weight.requires_grad_, True)
            weight.requires_grad_(False)
        with torch.set_grad_enabled(gradients):
            yield


class ReentrantFreeze:
    """Networks that can be frozen again and again; only the outermost of nested holds does anything."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        self._depth = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Frozen inside."""
        with ExitStack() as stack:
            if self._depth == 0:
                stack.enter_context(frozen(self.models))
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1


# ----------------------------------------------------------------------------------------------------
# A network cut with hooks: for one whose steps cannot be had, the front stops at its cut and the back runs whole.


class _Stop(Exception):
    """Behind the last place: the rest of the forward is not needed."""


class HookedNetwork:
    """One network and the places where it is cut; every run puts hooks on it and takes them off again."""

    def __init__(self, model: nn.Module, places: Sequence[LayerPath]) -> None:
        self.model, self.places = model, tuple(places)
        self.crossing: tuple[tuple[str, ...], ...] = ((),) * len(places)

    def start(self, call: Call, wanted: Collection[int], around: Collection[int] = ()) -> dict[int, PointValues]:
        """What the network has at the wanted places, in one run that stops behind the last of them."""
        sites = {number: self.places[number] for number in wanted}
        missing = set(sites.values())
        recorder = Recorder(note=lambda site, *_: heard(site))

        def heard(site: LayerPath) -> None:
            missing.difference_update({site, replace(site, call=None)})
            if not missing:
                raise _Stop

        args, kwargs = on_device_of(copied_arguments(call), self.model)
        with torch.no_grad(), recorder.listening(self.model, tuple(missing)), suppress(_Stop):
            self.model(*args, **kwargs)
        if missing:
            names = ", ".join(sorted(str(site) for site in missing))
            raise InputError(
                f"The forward did not pass {names} for this batch, although it did for the example. A network can be "
                "cut only where every batch passes."
            )
        return {number: PointValues(_kept(recorder, site)) for number, site in sites.items()}

    def finish(self, number: int, tensor: Tensor, around: tuple[Any, ...], call: Call, copies: int = 1) -> Any:
        """The whole network, on all copies, with a tensor put in where it has its own."""
        args, kwargs = on_device_of(copied_arguments(repeat_samples(call, copies)), self.model)
        with self._replacing(self.places[number], tensor) as done:
            output = self.model(*args, **kwargs)
        if not done:
            raise InputError(
                f"The forward did not pass {str(self.places[number])!r} for this batch, although it did for the "
                "example. A network can be cut only where every batch passes."
            )
        return output

    @contextmanager
    def _replacing(self, site: LayerPath, tensor: Tensor) -> Iterator[list[bool]]:
        calls, done = 0, []

        def exchanged(value: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != (site.call or 1):
                return None
            done.append(True)
            return replace_tensor(value, pick(value, site.keys), tensor)

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = exchanged({**dict(enumerate(args)), **kwargs})
            if given is None:
                return None
            return tuple(given[i] for i in range(len(args))), {key: given[key] for key in kwargs}

        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            return exchanged(output)

        module = modules_of(self.model)[site.path]
        if site.side == "input":
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
        else:
            handle = module.register_forward_hook(after)
        try:
            yield done
        finally:
            handle.remove()


def _kept(recorder: Recorder, site: LayerPath) -> Tensor:
    return recorder.kept[replace(site, call=site.call or 1)]


def replace_tensor(value: Any, old: Tensor, new: Tensor) -> Any:
    """A structure of tensors with one of them exchanged; the structure itself is left alone.

    >>> x, y = torch.zeros(1), torch.ones(1)
    >>> replace_tensor((x, {"state": y}), y, x)
    (tensor([0.]), {'state': tensor([0.])})
    """
    if value is old:
        return new
    if isinstance(value, Mapping):
        changed: Any = copy(value)
        for key in value:
            changed[key] = replace_tensor(value[key], old, new)
        return changed
    if isinstance(value, (tuple, list)):
        parts = [replace_tensor(part, old, new) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{part.name: replace_tensor(getattr(value, part.name), old, new) for part in fields(value)}
        )
    return value


# ----------------------------------------------------------------------------------------------------
# One network of a splice, ready to be run in halves: traced and proved where that can be, else with hooks.


@dataclass(frozen=True, eq=False)
class SplitNetwork:
    """A network and what is known of its places.

    Attributes:
        run: starts up to a place and finishes from one. layouts, dtypes: of the features at the places.
        by_few: whether it takes the first few samples of a batch alone. reason: why it could not be traced.
    """

    run: TracedNetwork | HookedNetwork
    layouts: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    by_few: bool
    reason: str


def split_network(
    model: nn.Module, places: Sequence[LayerPath], example: Call, layouts: Mapping[str, str], *, complete: bool
) -> SplitNetwork:
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
    hooked, reason = HookedNetwork(model, sites), ""
    run: TracedNetwork | HookedNetwork = hooked
    try:
        run = TracedNetwork(model, sites, small, by_few)
        _prove(run, hooked, small, tensors, complete)
    except Untraceable as why:
        run, reason = hooked, str(why)
    return SplitNetwork(run, chosen, tuple(x.dtype for x in tensors), tensors[0].device, by_few, reason)


def _recorded(
    model: nn.Module, example: Call, places: Sequence[LayerPath]
) -> tuple[Call, bool, LayoutFinder, list[tuple[LayerPath, Tensor]]]:
    """The features at the places, of few samples where the network takes few, and what their layouts seem to be."""
    known = LayoutFinder()
    with known.watching(model):
        whole, _ = record(model, example, tuple(dict.fromkeys(places)), note=known.note)
    if len(whole) != len(set(places)):
        raise InputError("A pattern fits modules that are called more than once. Name the calls one by one: path@2.")
    small = first_samples(example)
    try:
        found, _ = record(model, small, tuple(dict.fromkeys(places)))
    except Exception:  # noqa: BLE001 - foreign code that wants its whole batch
        return example, False, known, [(site, whole[site]) for site in places]
    return small, True, known, [(site, found[site]) for site in places]


def _layout(site: LayerPath, x: Tensor, given: str | None, known: LayoutFinder, samples: int) -> str:
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


def _same_place(one: LayerPath, other: LayerPath) -> bool:
    return (one.path, one.side, one.call or 1, one.keys) == (other.path, other.side, other.call or 1, other.keys)


# -- proof -------------------------------------------------------------------------------------------------------------


def _prove(traced: TracedNetwork, hooked: HookedNetwork, call: Call, tensors: Sequence[Tensor], complete: bool) -> None:
    """Raise Untraceable where the steps do not do what the network does."""
    places = range(len(tensors))
    begun = traced.start(call, places, places)
    if not all(alike(begun[i].tensor, tensors[i]) for i in places):
        raise Untraceable("its steps give other features than the network itself")
    if not complete:
        return
    args, kwargs = on_device_of(copied_arguments(call), traced.model)
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


def _gradient(run: TracedNetwork | HookedNetwork, place: int, x: Tensor, around: tuple[Any, ...], call: Call) -> Tensor:
    """The gradient at a place of a fixed sum of all outputs, and zeros where none arrives."""
    with torch.enable_grad():
        begin = x.clone().requires_grad_()
        output = run.finish(place, begin.clone(), tuple(_cloned(value) for value in around), call)
        leaves = [y for y in tree_leaves(output) if isinstance(y, Tensor) and y.requires_grad]
        if not leaves:
            return torch.zeros_like(x)
        ways = [torch.cos(torch.arange(y.numel(), device=y.device)).view(y.shape).to(y.dtype) for y in leaves]
        return torch.autograd.grad(leaves, begin, ways, allow_unused=True, materialize_grads=True)[0]
