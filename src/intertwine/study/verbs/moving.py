"""The verb `canonical`: a network is moved along its symmetry, and found again from its weights alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from intertwine.canonical.equivalence import equivalent
from intertwine.canonical.fingerprint import fingerprint
from intertwine.connect.interpolation import interpolate
from intertwine.features.batches import calls, placed
from intertwine.stitch.passes import accuracy_of
from intertwine.stitch.targets import answer
from intertwine.study.rows import Row
from intertwine.study.verbs.verb import Ask
from intertwine.symmetry.symmetry import symmetry as find_symmetry

LETTERS = 12  # of a fingerprint that are shown


def canonical(ask: Ask) -> Iterator[Row]:
    """A random element moves the weights and keeps the function; the canonical form does not see it.

    The average of a network and its moved copy is that of one function with itself, and yet another function.
    """
    found, data = find_symmetry(ask.a, ask.x), ask.test()
    moved = found.act(found.random(seed=ask.seed), ask.a)
    yield Row("moved", distance(ask.a, moved))
    yield Row("changed_predictions", _changed(ask.a, moved, data))
    mark, twin = (fingerprint(model, symmetry=found) for model in (ask.a, moved))
    yield Row("fingerprint_equal", float(mark == twin), note=mark[:LETTERS])
    yield Row("average_accuracy", accuracy_of(interpolate(ask.a, moved, 0.5), data))
    back = equivalent(ask.a, moved, symmetry=found)
    if back is None:
        for quantity in ("way_back_error", "average_accuracy_back"):
            yield Row(quantity, None, note="no element was found that takes the moved network back")
        return
    returned = found.act(back, moved)
    yield Row("way_back_error", distance(ask.a, returned))
    yield Row("average_accuracy_back", accuracy_of(interpolate(ask.a, returned, 0.5), data))


def distance(a: nn.Module, b: nn.Module) -> float:
    """How far the parameters of two networks lie apart, relative to those of the first.

    >>> a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> b.load_state_dict({name: 1.5 * weights for name, weights in a.state_dict().items()})
    <All keys matched successfully>
    >>> distance(a, b)
    0.5
    """

    def flat(model: nn.Module) -> Tensor:
        return torch.cat([p.detach().double().flatten() for p in model.parameters()])

    return float((flat(a) - flat(b)).norm() / flat(a).norm())


@torch.no_grad()
def _changed(a: nn.Module, b: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    """How many inputs get another answer."""
    there = (placed(call, a) for call in calls(data))
    return float(sum(int((answer(a, call).argmax(1) != answer(b, call).argmax(1)).sum()) for call in there))
