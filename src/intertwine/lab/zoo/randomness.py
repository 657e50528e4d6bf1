"""Stateless random numbers: each one is a hash of a seed and its purpose.

The order of samples, the augmentation and the dropout of a network depend only on its seed and the step of training:
not on the other networks of the stack, the device, or where a run was stopped and resumed.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from intertwine.argument_types import Float, Int


class Purpose(IntEnum):
    """What a number is used for; different purposes have different numbers."""

    ORDER = 1
    SHIFT_DOWN = 2
    SHIFT_RIGHT = 3
    FLIP = 4
    MIX = 5
    MIX_KIND = 6
    MIX_SHARE = 7
    BOX_DOWN = 8
    BOX_RIGHT = 9
    DROPOUT = 10


# The finaliser of SplitMix64 (Steele, Lea and Flood 2014); int64 arithmetic in torch is modulo 2^64.
GOLDEN, FIRST, SECOND = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
BITS = 53  # of the mantissa of a float64


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits as an unsigned shift."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed(x: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """Every bit of the result depends on every bit of x."""
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


def keyed(keys: Int[Tensor, "*n"], *words: int | Tensor) -> Int[Tensor, "*m"]:
    """New keys from keys and words, which broadcast against them."""
    for word in words:
        keys = mixed((keys ^ mixed(torch.as_tensor(word, device=keys.device) + GOLDEN)) + GOLDEN)
    return keys


def uniform(keys: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """A number in [0, 1) for each key, in double precision.

    Example:
        >>> bool((uniform(keyed(torch.arange(1000), Purpose.FLIP)).mean() - 0.5).abs() < 0.05)
        True
    """
    return _shifted(keys, 64 - BITS).double() / 2**BITS


def drawn(seeds: Int[Tensor, " networks"], epoch: int, purpose: Purpose, count: int) -> Int[Tensor, "networks count"]:
    """`count` keys for every network in one epoch."""
    places = torch.arange(count, device=seeds.device)
    return keyed(keyed(seeds, epoch, int(purpose))[:, None], places)


def orders(seeds: Int[Tensor, " networks"], epoch: int, count: int) -> Int[Tensor, "networks count"]:
    """The order of the samples of an epoch for each network."""
    return drawn(seeds, epoch, Purpose.ORDER, count).argsort(dim=1, stable=True)
