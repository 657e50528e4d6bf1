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
    """Evaluation mode, and weights without gradients; gradients still flow through. All flags are restored afterwards.

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
    """Networks that can be frozen repeatedly; only the outermost of nested contexts has an effect."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        self._depth = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """The networks are frozen inside."""
        with ExitStack() as stack:
            if self._depth == 0:
                stack.enter_context(frozen(self.models))
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1


# -- hooks -------------------------------------------------------------------------------------------------------------


class _Stop(Exception):
    """The last layer has run: the rest of the forward is not needed."""


class HookedNetwork:
    """A network split by hooks, for one that cannot be traced: the front stops at its point, the back runs whole.

    Every run installs hooks and removes them.
    """

    def __init__(self, model: nn.Module, places: Sequence[LayerPath]) -> None:
        self.model, self.places = model, tuple(places)
        self.crossing: tuple[tuple[str, ...], ...] = ((),) * len(places)

    def start(self, call: Call, wanted: Collection[int], with_skip: Collection[int] = ()) -> dict[int, PointValues]:
        """The network's features at the wanted points, in one run that stops after the last of them."""
        sites = {number: self.places[number] for number in wanted}
        missing = set(sites.values())

        def passed(site: LayerPath, *_: Any) -> None:
            missing.difference_update({site, replace(site, call=None)})
            if not missing:
                raise _Stop

        recorder = Recorder(callback=passed)
        args, kwargs = on_device_of(copied_arguments(call), self.model)
        with torch.no_grad(), recorder.listening(self.model, tuple(missing)), suppress(_Stop):
            self.model(*args, **kwargs)
        if missing:
            raise _not_reached(*missing)
        return {i: PointValues(recorder.kept[replace(site, call=site.call or 1)]) for i, site in sites.items()}

    def finish(self, number: int, tensor: Tensor, skip_values: tuple[Any, ...], call: Call, copies: int = 1) -> Any:
        """The whole network, on all copies, with its features at a point replaced by a tensor."""
        args, kwargs = on_device_of(copied_arguments(repeat_samples(call, copies)), self.model)
        with self._replacing(self.places[number], tensor) as done:
            output = self.model(*args, **kwargs)
        if not done:
            raise _not_reached(self.places[number])
        return output

    @contextmanager
    def _replacing(self, site: LayerPath, tensor: Tensor) -> Iterator[list[bool]]:
        calls, done = 0, []

        def replaced(value: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != (site.call or 1):
                return None
            done.append(True)
            return replace_tensor(value, pick(value, site.keys), tensor)

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = replaced({**dict(enumerate(args)), **kwargs})
            if given is None:
                return None
            return tuple(given[i] for i in range(len(args))), {key: given[key] for key in kwargs}

        module = modules_of(self.model)[site.path]
        if site.side == "input":
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
        else:
            handle = module.register_forward_hook(lambda _module, _args, output: replaced(output))
        try:
            yield done
        finally:
            handle.remove()


def _not_reached(*sites: LayerPath) -> InputError:
    return InputError(
        f"The forward does not reach {', '.join(sorted(str(site) for site in sites))} for this batch, although it "
        "does for the example. A stitch point must be reached by every batch."
    )


def replace_tensor(value: Any, old: Tensor, new: Tensor) -> Any:
    """A copy of a structure of tensors with one of them replaced.

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
        parts = {part.name: replace_tensor(getattr(value, part.name), old, new) for part in fields(value)}
        return replace(value, **parts)
    return value


# -- traced, or with hooks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SplitNetwork:
    """A network and its stitch points.

    Attributes:
        run: starts up to a point and finishes from one. layouts, dtypes: of the features at the points.
        by_few: whether it runs on the first few samples of a batch alone. reason: why it cannot be traced.
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
    """A network split at some layers. `complete`: it must also finish from each of them, not only start.

    A traced network is proved on few samples of the example against the network itself: the features at every point,
    and, for a back, the outputs from every point on and the gradient at the first.
    """
    small, by_few, finder, tensors = _recorded(model, example, places)
    chosen = tuple(
        _layout(site, x, layouts.get(str(site)), finder, samples_of(small))
        for site, x in zip(places, tensors, strict=True)
    )
    hooked, reason = HookedNetwork(model, places), ""
    run: TracedNetwork | HookedNetwork = hooked
    try:
        run = TracedNetwork(model, places, small, by_few)
        _prove(run, hooked, small, tensors, complete)
    except Untraceable as why:
        run, reason = hooked, str(why)
    return SplitNetwork(run, chosen, tuple(x.dtype for x in tensors), tensors[0].device, by_few, reason)


def _recorded(
    model: nn.Module, example: Call, places: Sequence[LayerPath]
) -> tuple[Call, bool, LayoutFinder, list[Tensor]]:
    """The features at the points, on few samples if the network runs on few, and their apparent layouts."""
    finder, wanted = LayoutFinder(), tuple(dict.fromkeys(places))
    with finder.watching(model):
        whole, _ = record(model, example, wanted, callback=finder.observe)
    if len(whole) != len(wanted):
        raise InputError("A pattern matches modules that are called more than once. Name the calls one by one: path@2.")
    small = first_samples(example)
    try:
        found, _ = record(model, small, wanted)
    except Exception:  # noqa: BLE001 - foreign code that needs its whole batch
        return example, False, finder, [whole[site] for site in places]
    return small, True, finder, [found[site] for site in places]


def _layout(site: LayerPath, x: Tensor, given: str | None, finder: LayoutFinder, samples: int) -> str:
    """The layout at a point, checked against the number of samples."""
    if not x.is_floating_point():
        raise InputError(
            f"The features at {str(site)!r} are {str(x.dtype).removeprefix('torch.')}, but only floating-point "
            "features can be mapped. Use a later layer."
        )
    path = replace(site, call=site.call or 1, asked=None, exact=True)
    seen = (
        layout
        for one, layout in finder.found.items()
        if replace(one, call=one.call or 1, asked=None, exact=True) == path
    )
    layout = check_layout(x, given or next(seen, None))
    axis = layout.index("n")
    if not samples:
        raise InputError("The first batch of the data is empty, so the networks cannot be split. Leave it out.")
    if x.shape[axis] % samples or not x.shape[axis]:
        raise InputError(
            f"The tensor at {str(site)!r} is {tuple(x.shape)} for {samples} samples, but its layout {layout!r} has "
            f"samples on axis {axis}. Name the axes, such as layouts={{{str(site)!r}: 'tnc'}} for time first."
        )
    return layout


def _prove(traced: TracedNetwork, hooked: HookedNetwork, call: Call, tensors: Sequence[Tensor], complete: bool) -> None:
    """Raise Untraceable if the traced program does not compute what the network does."""
    points = range(len(tensors))
    values = traced.start(call, points, points)
    if not all(alike(values[i].tensor, tensors[i]) for i in points):
        raise Untraceable("its traced program gives other features than the network itself")
    if not complete:
        return
    args, kwargs = on_device_of(copied_arguments(call), traced.model)
    with torch.no_grad():
        output = traced.model(*args, **kwargs)
        for i in points:
            if not alike(traced.finish(i, values[i].tensor.clone(), _cloned(values[i].skip_values), call), output):
                raise Untraceable("its traced program gives another output than the network itself")
    first = min(points, key=lambda i: traced.program.order[traced.plans[i].step])
    gradients = [_gradient(run, first, tensors[first], values[first].skip_values, call) for run in (traced, hooked)]
    if not alike(*gradients):
        raise Untraceable("its traced program has other gradients than the network itself")


def _cloned(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tree_map(lambda x: x.clone(), value) for value in values)


def _gradient(
    run: TracedNetwork | HookedNetwork, point: int, x: Tensor, skip_values: tuple[Any, ...], call: Call
) -> Tensor:
    """The gradient at a point of a fixed sum of all outputs; zeros if none arrives."""
    with torch.enable_grad():
        begin = x.clone().requires_grad_()
        output = run.finish(point, begin.clone(), _cloned(skip_values), call)
        leaves = [y for y in tree_leaves(output) if isinstance(y, Tensor) and y.requires_grad]
        if not leaves:
            return torch.zeros_like(x)
        weights = [torch.cos(torch.arange(y.numel(), device=y.device)).view(y.shape).to(y.dtype) for y in leaves]
        return torch.autograd.grad(leaves, begin, weights, allow_unused=True, materialize_grads=True)[0]
