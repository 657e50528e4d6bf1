"""Ordered partitions: which indices of a strand come before which, refined by comparing rows of numbers.

Ranks are whole numbers per index; equal ranks are indices not yet told apart. Rows are compared as a dictionary orders
words, first by the signs of their entries and then by the values: a positive scale never changes a sign, so rounding
cannot change the order of two units unless all of their signs agree. Values that scales have passed through are
compared up to rounding, so that units with equal weights are told apart by other weights and not by their last digits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from intertwine.shapes import Float, Int


def unresolved(rank: Int[Tensor, "*copies n"]) -> bool:
    """Whether some indices are not told apart."""
    return bool(tied(rank).any())


def tied(rank: Int[Tensor, "*copies n"]) -> Tensor:
    """Which indices share their rank with another index of the same copy."""
    ordered, order = rank.sort(-1)
    same = ordered[..., 1:] == ordered[..., :-1]
    edge = torch.zeros(*rank.shape[:-1], 1, dtype=torch.bool)
    both = torch.cat([same, edge], -1) | torch.cat([edge, same], -1)
    return torch.zeros_like(both).scatter(-1, order, both)


def refine(rank: Int[Tensor, "*copies n"], rows: Tensor) -> Int[Tensor, "*copies n"]:
    """Ranks refined by rows: tied indices are ordered by their rows, byte by byte; others keep their places.

    `rows`: (*copies, n, bytes), unsigned bytes, as `sign_bytes` and `value_bytes` make them.
    """
    where = tied(rank)
    if rows.shape[-1] == 0 or not bool(where.any()):
        return rank
    n = rank.shape[-1]
    copy_of = torch.arange(rank.numel() // n).reshape(*rank.shape[:-1], 1).expand(rank.shape)[where].numpy()
    old = rank[where].numpy()
    # one comparison of bytes decides: the copy, the old rank, then the row
    head = np.stack([copy_of, old], -1).astype(">i8").view(np.uint8)
    words = np.ascontiguousarray(np.concatenate([head, rows[where].numpy()], -1))
    order = np.argsort(words.view(f"V{words.shape[-1]}")[:, 0], kind="stable")
    ordered = words[order]
    fresh = np.empty(len(order), bool)
    fresh[0] = True
    fresh[1:] = (ordered[1:] != ordered[:-1]).any(-1)
    began = (ordered[1:, :16] != ordered[:-1, :16]).any(-1)  # where a new tied group begins
    group_start = np.concatenate([[0], np.where(began, np.arange(1, len(order)), 0)])
    start = np.maximum.accumulate(group_start)
    place = np.maximum.accumulate(np.where(fresh, np.arange(len(order)), 0)) - start
    result = rank.clone()
    updated = np.empty(len(order), np.int64)
    updated[order] = old[order] + place
    result[where] = torch.from_numpy(updated)
    return result


def sign_bytes(x: Tensor) -> Tensor:
    """−, 0, + as the bytes 0, 1, 2."""
    return (x.sign() + 1).to(torch.uint8)


def value_bytes(x: Tensor) -> Tensor:
    """Numbers as bytes that compare as the numbers do; the two zeros are one."""
    values = (x + 0.0).contiguous().cpu().numpy()
    width = values.dtype.itemsize
    bits = values.view(f"i{width}")
    top = np.array(1, f"u{width}") << np.array(8 * width - 1, f"u{width}")
    keys = np.where(bits < 0, ~bits.view(f"u{width}"), bits.view(f"u{width}") | top).astype(f">u{width}")
    return torch.from_numpy(keys.view(np.uint8).reshape(*values.shape[:-1], -1))


def value_codes(
    x: Float[Tensor, "*copies n entries"], noise: float, size: Float[Tensor, "*copies n entries"] | None = None
) -> Tensor:
    """Numbers of units as bytes that compare as the numbers do; what differs by rounding only is one.

    Args:
        x: entry by entry, the numbers of all units are compared with each other.
        noise: the relative size of rounding; with 0 every bit counts. size: what it is relative to; `x` by default.
    """
    if noise == 0.0:
        return value_bytes(x)
    values, order = x.double().cpu().sort(dim=-2)
    large = values.abs() if size is None else size.double().cpu().gather(-2, order)
    apart = values.diff(dim=-2) > noise * torch.maximum(large[..., 1:, :], large[..., :-1, :])
    first = torch.zeros_like(values[..., :1, :])
    number = torch.cat([first, apart.cumsum(-2).to(values.dtype)], -2)  # how many gaps lie below
    return value_bytes(torch.zeros_like(number).scatter(-2, order, number).float())


def order_of(rank: Int[Tensor, "*copies n"]) -> Int[Tensor, "*copies n"]:
    """The permutation that puts indices in the order of their ranks: new[i] = old[order[i]]."""
    return rank.argsort(dim=-1, stable=True)
