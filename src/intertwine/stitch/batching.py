"""Samples of a call: how many, the first few, several copies, and how other values depend on their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from intertwine.errors import InputError
from intertwine.features.batches import Call
from intertwine.features.fingerprint import samples_of

FEW = 3  # samples of a probe; an odd number, as other sizes seldom are
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}  # share of the largest entry, on a CPU
ROUGH = 0.05  # in half precision, and in single precision on a GPU, whose convolutions may round to ten bits


def few(call: Call) -> Call:
    """The first samples of a call: tensors whose first size is the number of samples are cut."""
    return _each(call, lambda x: x[:FEW])


def repeated(call: Call, copies: int) -> Call:
    """All samples of a call, then all of them again, so many times.

    >>> repeated(((torch.tensor([1, 2]),), {"scale": 3}), 2)
    ((tensor([1, 2, 1, 2]),), {'scale': 3})
    """
    return call if copies == 1 else _each(call, lambda x: x.repeat(copies, *[1] * (x.dim() - 1)))


def _each(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """The call with its tensors of samples changed."""
    count = samples_of(call)
    return tree_map(lambda x: change(x) if isinstance(x, Tensor) and x.dim() and x.shape[0] == count else x, call)


def signature(call: Call) -> tuple[Any, ...]:
    """The sizes of a call apart from the number of samples: calls of one signature have features of one shape."""
    count = samples_of(call)
    shapes = (leaf.shape for leaf in tree_leaves(call) if isinstance(leaf, Tensor))
    return tuple((shape[:1] == (count,), tuple(shape[1:] if shape[:1] == (count,) else shape)) for shape in shapes)


class NotBySample(Exception):
    """A value that cannot be told for several copies of the samples."""


def sample_axis(first: Tensor, second: Tensor, both: Tensor) -> int | None:
    """The axis of the samples, from a tensor of some samples, of others, and of all of them; None where it has none.

    >>> x = torch.arange(6.0).reshape(2, 3)
    >>> sample_axis(x, -x, torch.cat([x, -x], 1)), sample_axis(x, x, x)
    (1, None)
    """
    if first.shape == both.shape:
        if not (alike(first, both) and alike(second, both)):
            raise NotBySample("it depends on the other samples of its batch")
        return None
    doubled = [i for i, sizes in enumerate(zip(first.shape, both.shape, strict=False)) if sizes[1] == 2 * sizes[0]]
    if first.dim() != both.dim() or len(doubled) != 1:
        raise NotBySample(f"it is {tuple(first.shape)} for some samples and {tuple(both.shape)} for twice as many")
    if not alike(torch.cat([first, second], doubled[0]), both):
        raise NotBySample("it depends on the other samples of its batch")
    return doubled[0]


def alike(one: Any, two: Any) -> bool:
    """Whether two values, of tensors or of structures of them, are the same up to rounding."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        if one.shape != two.shape or one.dtype != two.dtype:
            return False
        if not one.is_floating_point() or not one.numel():
            return torch.equal(one, two)
        largest = two.detach().nan_to_num(0, 0, 0).abs().max().item()
        rounded = one.device.type != "cpu" and one.dtype == torch.float32
        limit = ROUGH if rounded else CLOSE.get(one.dtype, ROUGH)
        return torch.allclose(one, two, rtol=0, atol=limit * largest, equal_nan=True)
    ones, twos = tree_leaves(one), tree_leaves(two)
    if len(ones) != len(twos):
        return False
    if len(ones) == 1 and ones[0] is one:
        return type(one) is type(two) and (isinstance(one, Tensor) or _same(one, two))
    return all(alike(*pair) for pair in zip(ones, twos, strict=True))


def _same(one: Any, two: Any) -> bool:
    found = one == two
    return bool(found) if isinstance(found, bool) else one is two


Number = Callable[[int], Any]  # of how many samples


def by_samples(one: Any, two: Any, samples: int) -> Number:
    """A plain value as a function of the number of samples, from its values for so many and for twice as many.

    >>> by_samples((6, 4), (12, 4), 3)(5)
    (10, 4)
    """
    if isinstance(one, (tuple, list)) and isinstance(two, type(one)) and len(one) == len(two):
        parts = [by_samples(a, b, samples) for a, b in zip(one, two, strict=True)]
        kind = torch.Size if isinstance(one, torch.Size) else tuple if isinstance(one, tuple) else list
        return lambda count: kind(part(count) for part in parts)
    plain = type(one) is type(two) and type(one) in (int, float)
    if not plain or one == two:
        if not _same(one, two):
            raise NotBySample(f"it is {one!r} for {samples} samples and {two!r} for {2 * samples}")
        return lambda count: one
    if isinstance(one, float):
        return lambda count: one + (two - one) * (count - samples) / samples
    step, rest = divmod(two - one, samples)
    if rest:
        raise NotBySample(f"it is {one} for {samples} samples and {two} for {2 * samples}")
    return lambda count: one + step * (count - samples)


def only_once(value: Any, samples: int) -> Number:
    """A plain value that is known for one number of samples alone."""

    def number(count: int) -> Any:
        if count != samples:
            raise InputError(
                f"A number inside the back is known for {samples} samples alone, but {count} were given. The network "
                "could not be run on its example twice over; give an example whose batch size no other size equals."
            )
        return value

    return number
