"""A network cut with hooks: for one whose steps cannot be had, the front stops at its cut and the back runs whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.errors import InputError
from intertwine.features.batches import Call, fresh, placed
from intertwine.features.capture import Recorder, pick
from intertwine.features.places import Site, modules_of
from intertwine.stitch.batching import repeated


@dataclass(frozen=True, eq=False)
class Taken:
    """What a network has at a place, and its values that go around it."""

    tensor: Tensor
    around: tuple[Any, ...] = ()


class _Stop(Exception):
    """Behind the last place: the rest of the forward is not needed."""


class Hooked:
    """One network and the places where it is cut; every run puts hooks on it and takes them off again."""

    def __init__(self, model: nn.Module, places: Sequence[Site]) -> None:
        self.model, self.places = model, tuple(places)
        self.crossing: tuple[tuple[str, ...], ...] = ((),) * len(places)

    def start(self, call: Call, wanted: Collection[int], around: Collection[int] = ()) -> dict[int, Taken]:
        """What the network has at the wanted places, in one run that stops behind the last of them."""
        sites = {number: self.places[number] for number in wanted}
        missing = set(sites.values())
        recorder = Recorder(note=lambda site, *_: heard(site))

        def heard(site: Site) -> None:
            missing.difference_update({site, replace(site, call=None)})
            if not missing:
                raise _Stop

        args, kwargs = placed(fresh(call), self.model)
        with torch.no_grad(), recorder.listening(self.model, tuple(missing)), suppress(_Stop):
            self.model(*args, **kwargs)
        if missing:
            names = ", ".join(sorted(str(site) for site in missing))
            raise InputError(
                f"The forward did not pass {names} for this batch, although it did for the example. A network can be "
                "cut only where every batch passes."
            )
        return {number: Taken(_kept(recorder, site)) for number, site in sites.items()}

    def finish(self, number: int, tensor: Tensor, around: tuple[Any, ...], call: Call, copies: int = 1) -> Any:
        """The whole network, on all copies, with a tensor put in where it has its own."""
        args, kwargs = placed(fresh(repeated(call, copies)), self.model)
        with self._replacing(self.places[number], tensor) as done:
            output = self.model(*args, **kwargs)
        if not done:
            raise InputError(
                f"The forward did not pass {str(self.places[number])!r} for this batch, although it did for the "
                "example. A network can be cut only where every batch passes."
            )
        return output

    @contextmanager
    def _replacing(self, site: Site, tensor: Tensor) -> Iterator[list[bool]]:
        calls, done = 0, []

        def exchanged(value: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != (site.call or 1):
                return None
            done.append(True)
            return replaced(value, pick(value, site.keys), tensor)

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


def _kept(recorder: Recorder, site: Site) -> Tensor:
    return recorder.kept[replace(site, call=site.call or 1)]


def replaced(value: Any, old: Tensor, new: Tensor) -> Any:
    """A structure of tensors with one of them exchanged; the structure itself is left alone.

    >>> x, y = torch.zeros(1), torch.ones(1)
    >>> replaced((x, {"state": y}), y, x)
    (tensor([0.]), {'state': tensor([0.])})
    """
    if value is old:
        return new
    if isinstance(value, Mapping):
        changed: Any = copy(value)
        for key in value:
            changed[key] = replaced(value[key], old, new)
        return changed
    if isinstance(value, (tuple, list)):
        parts = [replaced(part, old, new) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{part.name: replaced(getattr(value, part.name), old, new) for part in fields(value)})
    return value
