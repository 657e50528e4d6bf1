"""Where features meet: any tensor as rows at the positions of another network, and rows as that network's tensor.

Rows are (samples, positions, channels). Positions of an image are read line by line. Where two networks differ:

    grid → grid       of another resolution: resized
    grid → tokens     one token per position; leading tokens beyond these, such as a class token, get the mean
    tokens → grid     leading extra tokens are left out
    tokens → tokens   images of another number of patches: resized, the class token kept apart
    grid, tokens → a vector   the mean over positions
    a vector → grid, tokens   refused: a vector does not say what stands where
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod

import torch
from torch import Tensor
from torch.nn import functional

from intertwine.argument_types import Float
from intertwine.errors import InputError, MismatchError, did_you_mean

RESIZES = ("bilinear", "nearest", "area")
EXTRA = 8  # leading tokens that may belong to no position: class token, distillation token, registers
_SMOOTH = {1: "linear", 2: "bilinear", 3: "trilinear"}  # what "bilinear" is called by the number of axes


@dataclass(frozen=True)
class FeatureForm:
    """The form of a tensor at a cut: its layout (see `intertwine.data.layouts`) and its sizes."""

    layout: str
    shape: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the axes of positions and tokens."""
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


def check_resize(resize: str) -> None:
    """Refuse a way of resizing that there is not."""
    if resize not in RESIZES:
        raise InputError(
            f"resize={resize!r} was asked for. {did_you_mean(resize, RESIZES)}The ways are {', '.join(RESIZES)}."
        )


# -- one tensor --------------------------------------------------------------------------------------------------------


def to_rows(x: Tensor, layout: str) -> Float[Tensor, "samples positions channels"]:
    """A tensor as rows.

    >>> tuple(to_rows(torch.zeros(2, 3, 4, 5), "ncpp").shape), tuple(to_rows(torch.zeros(2, 3), "nc").shape)
    ((2, 20, 3), (2, 1, 3))
    """
    order = _order(layout)
    sizes = [x.shape[i] for i in order]
    places = sum(letter in "pt" for letter in layout)
    return x.permute(order).reshape(sizes[0], prod(sizes[1 : 1 + places]), prod(sizes[1 + places :]))


def from_rows(rows: Float[Tensor, "samples positions channels"], spot: FeatureForm) -> Tensor:
    """Rows as a tensor of a given form; a new tensor, whose memory is its own.

    >>> x = torch.randn(2, 3, 4, 5)
    >>> torch.equal(from_rows(to_rows(x, "ncpp"), FeatureForm("ncpp", (2, 3, 4, 5))), x)
    True
    """
    order = _order(spot.layout)
    shaped = rows.reshape(len(rows), *(spot.shape[i] for i in order[1:]))
    back = [order.index(i) for i in range(len(order))]
    return shaped.permute(back).clone(memory_format=torch.contiguous_format)


def _order(layout: str) -> list[int]:
    """Samples, then positions and tokens, then channels."""
    kinds = ("n", "pt", "c")
    return [i for kind in kinds for i, letter in enumerate(layout) if letter in kind]


# -- two tensors -------------------------------------------------------------------------------------------------------


def resize_rows(
    rows: Float[Tensor, "samples positions channels"], front: FeatureForm, back: FeatureForm, resize: str = "bilinear"
) -> Float[Tensor, "samples places channels"]:
    """The rows of one network at the positions of another; see the head of this module.

    >>> rows = to_rows(torch.arange(16.0).reshape(1, 1, 4, 4), "ncpp")
    >>> resize_rows(rows, FeatureForm("ncpp", (1, 1, 4, 4)), FeatureForm("ncpp", (1, 7, 2, 2)), "area").flatten()
    tensor([ 2.5000,  4.5000, 10.5000, 12.5000])
    """
    if back.kind == "vector":
        return rows if front.kind == "vector" else rows.mean(1, keepdim=True)
    if front.kind == "vector":
        raise MismatchError(
            f"The front has {front} at its cut and the back {back}: a vector does not say what stands where. Cut the "
            "front before it pools or flattens its positions, or the back behind."
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
    return _between_tokens(rows, front, back, resize)


def _between_tokens(rows: Tensor, front: FeatureForm, back: FeatureForm, resize: str) -> Tensor:
    (given, sizes), (wanted, others) = (_patches(spot, (1, 1), front, back, most=1) for spot in (front, back))
    grid = _resized(rows[:, given:], sizes, others, resize, front, back)
    if not wanted:
        return grid
    return torch.cat([rows[:, :1] if given else rows.mean(1, keepdim=True), grid], 1)


def _patches(
    tokens: FeatureForm, like: Sequence[int], front: FeatureForm, back: FeatureForm, most: int = EXTRA
) -> tuple[int, tuple[int, ...]]:
    """How many leading tokens belong to no position, and the grid of the others; its sides are to each other as given.

    The fewest leading tokens are taken that leave such a grid. Signals, which have one axis, fit any number of tokens:
    there only one token more than positions is taken for a class token.
    """
    count = prod(tokens.sizes)
    if len(like) == 1:
        extra = int(count == like[0] + 1)
        return extra, (count - extra,)
    for extra in range(min(most, count - 1) + 1):
        if len(like) == 2 and (found := _sides(count - extra, like)):
            return extra, found
    raise _unlike(front, back, f"{count} tokens are no such grid with up to {most} tokens before it")


def _sides(count: int, like: Sequence[int]) -> tuple[int, int] | None:
    """The sides of a grid of so many positions, whose ratio is that of another grid."""
    height = isqrt(count * like[0] // like[1])
    fits = height > 0 and count % height == 0 and height * like[1] == (count // height) * like[0]
    return (height, count // height) if fits else None


def _resized(
    rows: Tensor, sizes: Sequence[int], wanted: Sequence[int], resize: str, front: FeatureForm, back: FeatureForm
) -> Tensor:
    if tuple(sizes) == tuple(wanted):
        return rows
    if len(sizes) != len(wanted) or len(sizes) not in _SMOOTH:
        raise _unlike(front, back, "positions along different numbers of axes cannot be resized onto each other")
    grid = rows.transpose(1, 2).reshape(len(rows), rows.shape[2], *sizes)
    if resize == "bilinear":
        grid = functional.interpolate(grid, tuple(wanted), mode=_SMOOTH[len(sizes)], align_corners=False)
    else:
        grid = functional.interpolate(grid, tuple(wanted), mode=resize)
    return grid.flatten(2).transpose(1, 2)


def _unlike(front: FeatureForm, back: FeatureForm, why: str) -> MismatchError:
    return MismatchError(
        f"The front has {front} at its cut and the back {back}, and {why}. Cut at places whose positions fit, behind a "
        "pooling of the back for example, or say with layouts={path: 'ncpp'} what the axes are."
    )
