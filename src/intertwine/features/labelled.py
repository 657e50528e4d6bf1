"""Labelled batches: what a pass over (inputs, targets) needs, on the device and in the precision of a network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from intertwine.errors import InputError
from intertwine.features.batches import Call, calls, check_batches, fresh, placed
from intertwine.features.fingerprint import Hasher, samples_of


@dataclass(frozen=True, eq=False)
class Labelled:
    """One batch: the arguments of the call, the targets, and the number of samples."""

    given: Call
    targets: Any
    samples: int

    @property
    def call(self) -> Call:
        """The arguments for one call: a forward may write over them, and other networks are to see the same ones."""
        return fresh(self.given)


def labelled(data: Any, model: nn.Module, hasher: Hasher | None = None, purpose: str = "data") -> Iterator[Labelled]:
    """The batches of some data, placed for a model; batches without samples are left out.

    >>> import torch
    >>> batches = labelled([(torch.zeros(4, 3), torch.zeros(4).long())], nn.Linear(3, 2))
    >>> [batch.samples for batch in batches]
    [4]
    """
    check_batches(data)
    found = False
    for batch in data:
        (call,) = calls([batch])
        if not (samples := samples_of(call)):
            continue
        found = True
        if hasher is not None:
            hasher.add(call)
        ((targets,), _) = placed(((batch[1],), {}), model)
        yield Labelled(placed(call, model), targets, samples)
    if not found:
        raise InputError(
            f"The {purpose} holds no samples. Pass at least one batch (inputs, targets); a generator can be read only "
            "once, so pass a list or a DataLoader where data is needed twice."
        )
