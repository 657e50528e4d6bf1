"""Features as rows at the positions of another network, and rows back as that network's tensor.

Rows are (samples, positions, channels). Positions of an image are read line by line. Where two networks differ:

    grid → grid       of another resolution: resized
    grid → tokens     one token per position; extra leading tokens, such as a class token, get the mean
    tokens → grid     extra leading tokens are dropped
    tokens → tokens   images of another number of patches: resized, except for the class token
    grid, tokens → a vector   the mean over positions
    a vector → grid, tokens   refused: a vector has no positions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from intertwine.argument_types import Float
from intertwine.errors import MismatchError

RESIZES = ("bilinear", "nearest", "area")
EXTRA = 8  # leading tokens without a position at most: class token, distillation token, registers
_SMOOTH = {1: "linear", 2: "bilinear", 3: "trilinear"}  # number of axes → the name of "bilinear" in torch


@dataclass(frozen=True)
class FeatureForm:
    """The form of a tensor at a stitch point: its layout (see `intertwine.data.layouts`) and its sizes."""

    layout: str
    shape: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes of positions and tokens."""
        return tuple(size for letter, size in zip(self.layout, self.shape, strict=True) if letter in "pt")

    @property
    def channels(self) -> int:
        return prod(size for letter, size in zip(self.layout, self.shape, strict=True) if letter == "c")

    @property
    def kind(self) -> str:
        """ "vector", "grid" or "tokens"."""
        return "tokens" if "t" in self.layout else "grid" if "p" in self.layout else "vector"

    def __str__(self) -> str:
        sizes = "×".join(map(str, self.sizes))
        names = {"vector": "a vector", "grid": f"a grid of {sizes}", "tokens": f"{sizes} tokens"}
        return f"{names[self.kind]} with {self.channels} channels"


def to_rows(x: Tensor, layout: str) -> Float[Tensor, "samples positions channels"]:
    """A tensor as rows.

    >>> tuple(to_rows(torch.zeros(2, 3, 4, 5), "ncpp").shape), tuple(to_rows(torch.zeros(2, 3), "nc").shape)
    ((2, 20, 3), (2, 1, 3))
    """
    order = _order(layout)
    sizes = [x.shape[i] for i in order]
    places = sum(letter in "pt" for letter in layout)
    return x.permute(order).reshape(sizes[0], prod(sizes[1 : 1 + places]), prod(sizes[1 + places :]))


def from_rows(rows: Float[Tensor, "samples positions channels"], form: FeatureForm) -> Tensor:
    """Rows as a new tensor of a given form.

    >>> x = torch.randn(2, 3, 4, 5)
    >>> torch.equal(from_rows(to_rows(x, "ncpp"), FeatureForm("ncpp", (2, 3, 4, 5))), x)
    True
    """
    order = _order(form.layout)
    shaped = rows.reshape(len(rows), *(form.shape[i] for i in order[1:]))
    back = [order.index(i) for i in range(len(order))]
    return shaped.permute(back).clone(memory_format=torch.contiguous_format)


def _order(layout: str) -> list[int]:
    """Samples, then positions and tokens, then channels."""
    return [i for kind in ("n", "pt", "c") for i, letter in enumerate(layout) if letter in kind]


# -- two tensors -------------------------------------------------------------------------------------------------------


def resize_rows(
    rows: Float[Tensor, "samples positions channels"], front: FeatureForm, back: FeatureForm, resize: str = "bilinear"
) -> Float[Tensor, "samples places channels"]:
    """The rows of one network at the positions of another; see the table of this module.

    >>> rows = to_rows(torch.arange(16.0).reshape(1, 1, 4, 4), "ncpp")
    >>> resize_rows(rows, FeatureForm("ncpp", (1, 1, 4, 4)), FeatureForm("ncpp", (1, 7, 2, 2)), "area").flatten()
    tensor([ 2.5000,  4.5000, 10.5000, 12.5000])
    """
    if back.kind == "vector":
        return rows if front.kind == "vector" else rows.mean(1, keepdim=True)
    if front.kind == "vector":
        raise MismatchError(
            f"The front has {front}, and the back {back}: a vector has no positions. Choose a layer of the front "
            "before it pools or flattens its positions, or a layer of the back after that."
        )
    if front.sizes == back.sizes or (front.kind != back.kind and prod(front.sizes) == prod(back.sizes)):
        return rows
    if front.kind == back.kind == "grid":
        return _resized(rows, front.sizes, back.sizes, resize, front, back)
    if front.kind == "grid":
        extra, sizes = _patches(back, front.sizes, front, back)
        grid = _resized(rows, front.sizes, sizes, resize, front, back)
        return torch.cat([rows.mean(1, keepdim=True).expand(-1, extra, -1), grid], 1)
    if back.kind == "grid":
        extra, sizes = _patches(front, back.sizes, front, back)
        return _resized(rows[:, extra:], sizes, back.sizes, resize, front, back)
    (given, sizes), (wanted, others) = (_patches(form, (1, 1), front, back, most=1) for form in (front, back))
    grid = _resized(rows[:, given:], sizes, others, resize, front, back)
    if not wanted:
        return grid
    return torch.cat([rows[:, :1] if given else rows.mean(1, keepdim=True), grid], 1)


def _patches(
    tokens: FeatureForm, like: Sequence[int], front: FeatureForm, back: FeatureForm, most: int = EXTRA
) -> tuple[int, tuple[int, ...]]:
    """How many leading tokens have no position, and the grid of the others, whose sides have the ratio of `like`.

    As few tokens as possible are leading. Signals, which have one axis, match any number of tokens: there, one token
    more than positions counts as a class token.
    """
    count = prod(tokens.sizes)
    if len(like) == 1:
        extra = int(count == like[0] + 1)
        return extra, (count - extra,)
    for extra in range(min(most, count - 1) + 1):
        if len(like) == 2:
            size = count - extra
            height = isqrt(size * like[0] // like[1])
            if height > 0 and size % height == 0 and height * like[1] == (size // height) * like[0]:
                return extra, (height, size // height)
    raise _unlike(front, back, f"{count} tokens are no such grid with up to {most} leading tokens")


def _resized(
    rows: Tensor, sizes: Sequence[int], wanted: Sequence[int], resize: str, front: FeatureForm, back: FeatureForm
) -> Tensor:
    if tuple(sizes) == tuple(wanted):
        return rows
    if len(sizes) != len(wanted) or len(sizes) not in _SMOOTH:
        raise _unlike(front, back, "positions with different numbers of axes cannot be resized")
    grid = rows.transpose(1, 2).reshape(len(rows), rows.shape[2], *sizes)
    options: dict[str, Any] = {"mode": resize}
    if resize == "bilinear":
        options = {"mode": _SMOOTH[len(sizes)], "align_corners": False}
    grid = functional.interpolate(grid, tuple(wanted), **options)
    return grid.flatten(2).transpose(1, 2)


def _unlike(front: FeatureForm, back: FeatureForm, why: str) -> MismatchError:
    return MismatchError(
        f"The front has {front}, and the back {back}: {why}. Choose layers with matching positions, for example after "
        "a pooling of the back, or name the axes with layouts={path: 'ncpp'}."
    )
