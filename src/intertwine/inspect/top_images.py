"""The images with the largest activations of single features, and plots with the active region highlighted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn import functional

from intertwine.argument_types import Float, Int
from intertwine.data.batches import calls
from intertwine.data.layers import record
from intertwine.data.layouts import arrange
from intertwine.errors import InputError, MismatchError
from intertwine.inspect.dissect import MEMORY, Maps
from intertwine.inspect.dissection import Dissection, Unit
from intertwine.inspect.guided import check_batch, check_images, check_units, read_place
from intertwine.inspect.images import draw_images, scaled_image
from intertwine.stitch.split_network import unwrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class TopImages:
    """For each of some features the images with its largest activations, largest first.

    Attributes:
        at, units: the layer and the features. indices: of the images. values: the largest activation over positions in
            each. images: the images themselves.
    """

    at: str
    units: tuple[int, ...]
    indices: Int[Tensor, "units count"]
    values: Float[Tensor, "units count"]
    images: Float[Tensor, "units count *shape"]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, without the images."""
        found = zip(self.units, self.indices.tolist(), self.values.tolist(), strict=True)
        return {"at": self.at, "units": [{"unit": u, "images": i, "values": v} for u, i, v in found]}

    def plot(self) -> Figure:
        """One row of images per feature, with its value below each."""
        rows = [[scaled_image(image) for image in row] for row in self.images]
        captions = [[f"{value:.3g}" for value in row] for row in self.values.tolist()]
        return draw_images(rows, [f"feature {unit}" for unit in self.units], captions, self.at)

    def __repr__(self) -> str:
        best = ", ".join(f"{unit}: image {row[0]}" for unit, row in zip(self.units, self.indices.tolist(), strict=True))
        return f"TopImages(at {self.at}; {len(self.units)} features, {self.indices.shape[1]} images each; {best})"


@torch.no_grad()
def top_images(
    model: nn.Module,
    at: str,
    images: Tensor,
    units: SupportsIndex | Iterable[SupportsIndex],
    count: int = 8,
    *,
    rotation: Tensor | None = None,
    layout: str | None = None,
    batch: int = 256,
) -> TopImages:
    """The images with the largest activations of single features, over all positions.

    Args:
        model: any network of images; it is not changed. at: a layer, see `intertwine.data.layers`.
        images: (images, channels, height, width). units: the features, each by itself.
        count: images per feature. rotation: a matrix that multiplies the features, R·x at every position; units are
            then rows of it. layout: of the features, if it cannot be inferred. batch: images at once.

    Raises:
        InputError: an unknown layer or feature, no images. MismatchError: a rotation of another size.

    Example:
        >>> import torch
        >>> from intertwine.inspect.top_images import top_images
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU())
        >>> top_images(model, "1", torch.randn(20, 1, 8, 8), [0, 3], count=5).indices.shape
        torch.Size([2, 5])
    """
    check_images(images)
    check_batch(batch)
    if count < 1:
        raise InputError(f"count must be at least 1, but is {count}.")
    site, shape = read_place(model, at, images, layout)  # in the given network, wrappers included
    model = unwrapped(model)
    chosen = check_units(units, shape.features, at)
    if rotation is not None and tuple(rotation.shape) != (shape.features,) * 2:
        raise MismatchError(
            f"The rotation is {tuple(rotation.shape)}, but {at!r} has {shape.features} features. Give a matrix "
            f"{shape.features} × {shape.features}."
        )
    found = []
    for some in images.split(batch):
        tensor = record(model, ((some.clone(),), {}), [site])[0][site]
        features = arrange(tensor, "structured", shape.layout)
        rows = features[:, list(chosen)] if rotation is None else rotation.to(features)[list(chosen)] @ features
        found.append(rows.amax(2).cpu())
    values, indices = torch.cat(found).T.topk(min(count, len(images)))
    return TopImages(at, chosen, indices, values, images.detach().cpu()[indices])


#: The brightness of an image where the unit is below its threshold.
DIM = 0.25


@torch.no_grad()
def draw_units(
    model: nn.Module,
    images: Any,
    found: Dissection,
    rotation: Tensor | None = None,
    *,
    units: int | Sequence[int] = 6,
    count: int = 8,
    memory: int = MEMORY,
) -> Figure:
    """One row per unit: the images with its largest activations, dimmed where it is inactive, its concept and overlap.

    Args:
        model, images, rotation: the arguments of `dissect`, whose result is `found`.
        units: the numbers of some units; or how many, those with the largest overlaps.
        count: images per unit. memory: bytes of activations to cache.

    >>> import torch
    >>> from intertwine.inspect.dissect import dissect
    >>> from intertwine.inspect.top_images import draw_units
    >>> images = torch.rand(50, 2, 8, 8)
    >>> model = torch.nn.Sequential(torch.nn.Identity())
    >>> figure = draw_units(model, images, dissect(model, "0", images, images > 0.995), units=2, count=3)
    >>> len(figure.axes)
    6
    """
    chosen = _chosen(found, units)
    maps = Maps(model, found.at, images, memory)
    wanted = [unit.unit for unit in chosen]
    best = torch.cat([_rows(batch, wanted, rotation).flatten(2).amax(2).cpu() for batch in maps])
    order = best.T.topk(min(count, len(best))).indices.tolist()
    needed = sorted({i for row in order for i in row})
    shown = dict(zip(needed, _images_and_maps(maps, needed, wanted, rotation), strict=True))
    rows = [
        [_dimmed(shown[i][0], shown[i][1][at], unit.threshold) for i in row]
        for at, (row, unit) in enumerate(zip(order, chosen, strict=True))
    ]
    names = [f"{unit.unit}: {unit.concept or 'nothing'}\n{unit.iou:.3f}" for unit in chosen]
    basis = ", rotated basis" * found.rotated
    return draw_images(rows, names, title=f"{found.at}{basis}: images with the largest activations")


def _chosen(found: Dissection, units: int | Sequence[int]) -> list[Unit]:
    ranked = sorted(found.units, key=lambda unit: (-unit.iou, unit.unit))
    if isinstance(units, int):
        chosen = ranked[: max(0, units)]
    else:
        known = {unit.unit: unit for unit in found.units}
        if missing := [unit for unit in units if unit not in known]:
            raise InputError(
                f"Unknown units {missing}. The dissection of {found.at!r} has units 0 to {len(found.units) - 1}."
            )
        chosen = [known[unit] for unit in units]
    if not chosen:
        raise InputError("There are no units to draw. Give at least one.")
    return chosen


def _rows(maps: Tensor, units: list[int], rotation: Tensor | None) -> Float[Tensor, "images units height width"]:
    """The maps of some units, in their basis."""
    return maps[:, units] if rotation is None else torch.einsum("uc,nchw->nuhw", rotation.to(maps)[units], maps)


def _images_and_maps(
    maps: Maps, needed: list[int], units: list[int], rotation: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """(image, maps of the units) for some images, in their order; all images are read again."""
    found, start = [], 0
    for batch, call in zip(maps, calls(maps.data), strict=True):
        args, kwargs = call
        inputs = (*args, *kwargs.values())[0]
        here = [i - start for i in needed if start <= i < start + len(batch)]
        rows = _rows(batch[here], units, rotation).cpu()
        found += [(inputs[i].detach().cpu(), row) for i, row in zip(here, rows, strict=True)]
        start += len(batch)
    return found


def _dimmed(image: Tensor, one: Tensor, threshold: float) -> Float[Tensor, "height width colours"]:
    """The image, dimmed where the unit's map, enlarged to its size, is not above the threshold."""
    pixels = scaled_image(image)
    large = functional.interpolate(one[None, None], pixels.shape[:2], mode="bilinear", align_corners=False)[0, 0]
    return torch.where((large > threshold)[..., None], pixels, DIM * pixels)
