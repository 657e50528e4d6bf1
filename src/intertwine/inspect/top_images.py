"""Top images: those that single features answer to most, in the network's own basis or a rotated one (row 000-G74)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor, nn

from intertwine.errors import InputError, MismatchError
from intertwine.features.capture import record
from intertwine.features.policy import arrange
from intertwine.inspect.grids import draw_images, scaled_image
from intertwine.inspect.guided import check_batch, check_images, check_units, read_place
from intertwine.shapes import Float, Int
from intertwine.stitch.frozen import unwrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class TopImages:
    """For each of some features the images it answers to most, best first.

    Attributes:
        at, units: the place and the features. indices: which images. values: how much the feature answers to each, its
        largest value over positions. images: the images themselves.
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
    """The images that features answer to most: by the largest value of each over all positions.

    Args:
        model: any network of images, left as it was. at: a place, see `intertwine.features.places`.
        images: (images, channels, height, width). units: features to look at, each for itself.
        count: images per feature. rotation: a matrix that the features are multiplied by first, R·x at every position;
            units are then rows of it. layout: of the features, where it is not what it seems.
        batch: images that pass at once.

    Raises:
        InputError: a place or a feature that there is not, no images. MismatchError: a rotation of another size.

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
        raise InputError(f"The {count} best images were asked for. Ask for at least one.")
    site, shape = read_place(model, at, images, layout)  # paths are those of what was given, wrappers and all
    model = unwrapped(model)
    chosen = check_units(units, shape.features, at)
    if rotation is not None and tuple(rotation.shape) != (shape.features,) * 2:
        raise MismatchError(
            f"A rotation {tuple(rotation.shape)} was given for {at!r}, which has {shape.features} features. Give a "
            f"matrix {shape.features} × {shape.features}."
        )
    found = []
    for some in images.split(batch):
        tensor = record(model, ((some.clone(),), {}), [site])[0][site]
        features = arrange(tensor, "structured", shape.layout)
        rows = features[:, list(chosen)] if rotation is None else rotation.to(features)[list(chosen)] @ features
        found.append(rows.amax(2).cpu())
    values, indices = torch.cat(found).T.topk(min(count, len(images)))
    return TopImages(at, chosen, indices, values, images.detach().cpu()[indices])
