"""Guided backpropagation: what in an image makes one feature, or a group of features, answer (row 003-F26)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import torch
from torch import Tensor, nn

from intertwine.errors import InputError
from intertwine.features.batches import kind_of, placed
from intertwine.features.capture import pick, record
from intertwine.features.layouts import Layouts
from intertwine.features.places import Site, modules_of, sites
from intertwine.features.policy import arrange
from intertwine.inspect.grids import draw_images, scaled_image, scaled_map
from intertwine.inspect.guiding import Guiding
from intertwine.shapes import Float
from intertwine.stitch.frozen import frozen, unwrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class GuidedMaps:
    """Guided gradients of some features with respect to images.

    Attributes:
        maps: one per image, of its shape. units, at: the features, and the place they were read at.
        activations: per image the sum of the features over the group and all positions, which the maps belong to.
        images: what was given. guided: "path: function" of the activations that passed positive gradients only.
        unguided: activations on the way that are no ReLU; gradients passed them as they were.
    """

    maps: Float[Tensor, "images ..."]
    units: tuple[int, ...]
    at: str
    activations: Float[Tensor, " images"]
    images: Float[Tensor, "images ..."]
    guided: tuple[str, ...]
    unguided: tuple[str, ...]

    @property
    def warning(self) -> str | None:
        """What keeps these maps from being guided backpropagation as it is published; None where nothing does."""
        if self.unguided:
            named = ", ".join(dict.fromkeys(self.unguided))
            return f"Guided backpropagation is made for ReLU, and gradients passed others as they were: {named}."
        if not self.guided:
            return f"No activation comes before {self.at!r}, so the maps are plain gradients."
        return None

    def to_dict(self) -> dict[str, Any]:
        """As plain data; of the maps only their largest sizes."""
        return {
            "at": self.at,
            "units": list(self.units),
            "images": len(self.maps),
            "activations": self.activations.tolist(),
            "largest": [float(one.abs().max()) if one.numel() else 0.0 for one in self.maps],
            "guided": list(self.guided),
            "unguided": list(self.unguided),
            "warning": self.warning,
        }

    def plot(self, count: int = 8) -> Figure:
        """The first images, and below each its map: grey is zero, and the largest entry of a map is full colour."""
        shown = [[scaled_image(one) for one in self.images[:count]], [scaled_map(one) for one in self.maps[:count]]]
        units = ", ".join(map(str, self.units[:6])) + (", …" if len(self.units) > 6 else "")
        return draw_images(shown, ["image", "guided"], title=f"{self.at}, features {units}")

    def __repr__(self) -> str:
        features = f"feature {self.units[0]}" if len(self.units) == 1 else f"{len(self.units)} features"
        counts = f"{_count(len(self.maps), 'image')}; {_count(len(self.guided), 'activation')} guided"
        text = f"{features} at {self.at}; {counts}"
        return f"GuidedMaps({text}{f'; {self.warning}' if self.warning else ''})"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def guided_backprop(
    model: nn.Module,
    at: str,
    units: SupportsIndex | Iterable[SupportsIndex],
    images: Tensor,
    *,
    layout: str | None = None,
    batch: int = 64,
) -> GuidedMaps:
    """Gradients of features with respect to images, where every ReLU on the way passes back positive gradients only.

    The features of a group are summed, over all positions; other features of the layer have no part in it. The model
    runs in evaluation mode and is left as it was.

    Args:
        model: any network of images. at: a place, see `intertwine.features.places`.
        units: the number of one feature (channel), or of all features of a group, such as one that folding merges.
        images: (images, channels, height, width), as the network takes them; other inputs of numbers do too.
        layout: of the features, where it is not what it seems; see `intertwine.features.policy`.
        batch: images that pass at once.

    Raises:
        InputError: a place or a feature that there is not, images that hold no numbers with fractions.

    Example:
        >>> import torch
        >>> from intertwine.inspect.guided import guided_backprop
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 6, 3))
        >>> found = guided_backprop(model, "2", [1, 4], torch.randn(5, 1, 8, 8))
        >>> found
        GuidedMaps(2 features at 2; 5 images; 1 activation guided)
        >>> tuple(found.maps.shape), found.guided
        ((5, 1, 8, 8), ('1: relu',))
    """
    check_images(images)
    check_batch(batch)
    site, shape = read_place(model, at, images, layout)  # paths are those of what was given, wrappers and all
    model = unwrapped(model)
    chosen = check_units(units, shape.features, at)
    parts: list[tuple[Tensor, Tensor]] = []
    guiding = Guiding()
    for some in images.split(batch):
        guiding = Guiding()  # every part passes the same activations
        parts.append(_maps(model, site, shape.layout, chosen, some, guiding))
    return GuidedMaps(
        maps=torch.cat([maps for maps, _ in parts]),
        units=chosen,
        at=at,
        activations=torch.cat([sums for _, sums in parts]),
        images=images.detach(),
        guided=tuple(guiding.guided),
        unguided=tuple(guiding.unguided),
    )


def _maps(
    model: nn.Module, site: Site, layout: str, units: Sequence[int], images: Tensor, guiding: Guiding
) -> tuple[Tensor, Tensor]:
    """The maps of some images, and the sums they belong to."""
    with torch.inference_mode(False), torch.enable_grad(), frozen([model]):
        ((given,), _) = placed(((images.detach().clone(),), {}), model)
        leaf = given.clone().requires_grad_()
        with guiding.watching(model), _taken(model, site) as taken, suppress(_Stop):
            model(leaf.clone())  # a leaf cannot be changed in place, as a first ReLU may want to
        if not taken:
            raise InputError(f"The forward did not pass {str(site)!r} for these images, although it did for the first.")
        sums = arrange(taken[0], "structured", layout)[:, list(units)].sum((1, 2))
        if not sums.requires_grad:
            return torch.zeros_like(leaf), sums.detach()
        return torch.autograd.grad(sums.sum(), leaf)[0], sums.detach()


class _Stop(Exception):
    """Behind the place: the rest of the forward is not needed."""


@contextmanager
def _taken(model: nn.Module, site: Site) -> Iterator[list[Tensor]]:
    """Holds what the forward has at a place, with its gradients, and ends the forward there."""
    found: list[Tensor] = []
    calls = 0

    def hear(value: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == (site.call or 1):
            found.append(pick(value, site.keys).clone())
            raise _Stop

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hear({**dict(enumerate(args)), **kwargs})

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        hear(output)

    module = modules_of(model)[site.path]
    with ExitStack() as stack:
        if site.side == "input":
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        else:
            stack.callback(module.register_forward_hook(after).remove)
        yield found


# -- what is asked for -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The layout of the features at a place, and how many there are."""

    layout: str
    features: int


def read_place(model: nn.Module, at: str, images: Tensor, layout: str | None) -> tuple[Site, Shape]:
    """The one place that a path stands for, and what its features look like: a copy of one image is run."""
    known = Layouts()
    with known.watching(model):
        found, _ = record(model, ((images[:1].clone(),), {}), sites(model, at), note=known.note)
    if len(found) != 1:
        raise InputError(
            f"One place was asked for by {at!r}, which stands for {len(found)}: {', '.join(map(str, found))}. Name one."
        )
    ((site, tensor),) = found.items()
    layout = layout or known.found[replace(site, call=site.call or 1)]
    return site, Shape(layout, arrange(tensor, "structured", layout).shape[1])


def check_images(images: Any) -> None:
    """Refuse what is no batch of images."""
    if isinstance(images, Tensor) and images.dim() > 1 and len(images) and images.is_floating_point():
        return
    kind = f" of {str(images.dtype).removeprefix('torch.')}" if isinstance(images, Tensor) else ""
    raise InputError(
        f"Images were expected as one tensor (images, channels, height, width) of floating point; found "
        f"{kind_of(images)}{kind}. Give at least one image, normalised as the network takes them."
    )


def check_batch(batch: int) -> None:
    """Refuse a number of images that cannot pass at once."""
    if batch < 1:
        raise InputError(f"batch={batch} images were to pass at once. Give 1 or more, or leave it out for the default.")


def check_units(units: SupportsIndex | Iterable[SupportsIndex], features: int, at: str) -> tuple[int, ...]:
    """The numbers of the features asked for, each once."""
    several = isinstance(units, Iterable) and getattr(units, "ndim", 1) > 0
    try:
        chosen = tuple(index(unit) for unit in cast("Iterable[SupportsIndex]", units if several else (units,)))
    except TypeError as error:
        raise InputError(
            f"units={units!r} was asked for at {at!r}. Give the number of one feature, or a list of numbers."
        ) from error
    wrong = [unit for unit in chosen if not 0 <= unit < features]
    if not chosen or wrong or len(set(chosen)) < len(chosen):
        what = f"the features {wrong} were" if wrong else f"units={list(chosen)} was"
        raise InputError(
            f"At {at!r}, which has {features} features, {what} asked for. Give numbers from 0 to {features - 1}, each "
            "once."
        )
    return chosen
