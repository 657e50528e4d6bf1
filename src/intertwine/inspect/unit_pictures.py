"""Pictures of units: the images each answers to most, bright where its map is above its threshold (row 000-G74)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from intertwine.errors import InputError
from intertwine.features.batches import calls
from intertwine.inspect.dissection import Dissection, Unit
from intertwine.inspect.grids import draw_images, scaled_image
from intertwine.inspect.maps import MEMORY, Maps
from intertwine.shapes import Float

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: How bright an image is where the unit is silent.
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
    """One row per unit: the images it answers to most, dimmed where it is silent, with its concept and overlap.

    Args:
        model, images, rotation: as they were given to `dissect`, which gave `found`.
        units: the numbers of some units; or how many, those with the largest overlaps.
        count: images per unit. memory: bytes of activations to keep.

    >>> import torch
    >>> from intertwine.inspect.dissect import dissect
    >>> from intertwine.inspect.unit_pictures import draw_units
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
    shown = dict(zip(needed, _kept(maps, needed, wanted, rotation), strict=True))
    rows = [
        [_lit(shown[i][0], shown[i][1][at], unit.threshold) for i in row]
        for at, (row, unit) in enumerate(zip(order, chosen, strict=True))
    ]
    names = [f"{unit.unit}: {unit.concept or 'nothing'}\n{unit.iou:.3f}" for unit in chosen]
    basis = ", rotated basis" * found.rotated
    return draw_images(rows, names, title=f"{found.at}{basis}: images that units answer to most")


def _chosen(found: Dissection, units: int | Sequence[int]) -> list[Unit]:
    ranked = sorted(found.units, key=lambda unit: (-unit.iou, unit.unit))
    if isinstance(units, int):
        chosen = ranked[: max(0, units)]
    else:
        known = {unit.unit: unit for unit in found.units}
        if missing := [unit for unit in units if unit not in known]:
            raise InputError(
                f"Pictures of the units {missing} were asked for. The dissection of {found.at!r} has units 0 to "
                f"{len(found.units) - 1}."
            )
        chosen = [known[unit] for unit in units]
    if not chosen:
        raise InputError("Pictures of no unit were asked for. Ask for at least one.")
    return chosen


def _rows(maps: Tensor, units: list[int], rotation: Tensor | None) -> Float[Tensor, "images units height width"]:
    """The maps of some units, in their basis."""
    return maps[:, units] if rotation is None else torch.einsum("uc,nchw->nuhw", rotation.to(maps)[units], maps)


def _kept(maps: Maps, needed: list[int], units: list[int], rotation: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """(image, maps of the units) for some images, in their order; everything is read once more."""
    found, start = [], 0
    for batch, call in zip(maps, calls(maps.data), strict=True):
        args, kwargs = call
        inputs = (*args, *kwargs.values())[0]
        here = [i - start for i in needed if start <= i < start + len(batch)]
        rows = _rows(batch[here], units, rotation).cpu()
        found += [(inputs[i].detach().cpu(), row) for i, row in zip(here, rows, strict=True)]
        start += len(batch)
    return found


def _lit(image: Tensor, one: Tensor, threshold: float) -> Float[Tensor, "height width colours"]:
    """The image, dimmed where the unit's map, enlarged to its size, is not above the threshold."""
    pixels = scaled_image(image)
    large = functional.interpolate(one[None, None], pixels.shape[:2], mode="bilinear", align_corners=False)[0, 0]
    return torch.where((large > threshold)[..., None], pixels, DIM * pixels)
