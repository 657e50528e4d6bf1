"""Guided backpropagation: the parts of an image that drive a feature or a group of features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from intertwine.argument_types import Float
from intertwine.data.batches import kind_of, on_device_of
from intertwine.data.layers import LayerPath, layer_paths, modules_of, pick, record
from intertwine.data.layouts import LayoutFinder, arrange
from intertwine.errors import InputError
from intertwine.inspect.images import draw_images, scaled_image, scaled_map
from intertwine.stitch.split_network import frozen, unwrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Activations that pass values above a point and never change their sign: gradients through them can be guided.
GUIDED = {"relu", "relu6", "leaky_relu", "prelu", "rrelu"}
#: Activations for which guided backpropagation is undefined; gradients pass them unchanged.
UNGUIDED = {
    "gelu", "silu", "sigmoid", "tanh", "elu", "selu", "celu", "softplus", "mish", "hardswish", "hardsigmoid",
    "logsigmoid", "log_sigmoid", "softsign", "tanhshrink", "softshrink", "hardshrink", "threshold", "glu",
    "erf", "maximum", "rnn_relu", "rnn_tanh", "lstm", "gru",
}  # fmt: skip
#: Functions that act like a ReLU if their lower bound is zero; `nn.ReLU6` calls the last.
CLAMPS = {"clamp", "clip", "clamp_min", "hardtanh"}


class GuidedMode(TorchFunctionMode):
    """Makes ReLU-like activations called inside pass back positive gradients only, and records the activations.

    Calls are intercepted in torch, so `nn.ReLU`, `functional.relu`, `torch.relu` and `x.relu_()` are treated alike.

    Attributes:
        guided, unguided: "path: name of the function" of every call with a gradient, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.guided: list[str] = []
        self.unguided: list[str] = []
        self._inside: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        output = func(*args, **given)
        name = getattr(func, "__name__", "").rstrip("_")
        if name not in GUIDED | UNGUIDED | CLAMPS:
            return output
        tensor = output[0] if isinstance(output, tuple) else output
        if not tensor.requires_grad:
            return output
        if name in GUIDED or (name in CLAMPS and _bounded_at_zero(args, given)):
            tensor.register_hook(lambda gradient: gradient.clamp(min=0))
            self.guided.append(self._label(name))
        else:
            self.unguided.append(self._label(name))
        return output

    def _label(self, name: str) -> str:
        path = self._inside[-1] if self._inside else ""
        return f"{path}: {name}" if path else name

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Guiding is on, and the path of the running module known; every hook is removed afterwards."""
        with ExitStack() as stack:
            for path, module in modules_of(model).items():
                enter = module.register_forward_pre_hook(lambda *_, path=path: self._inside.append(path))
                stack.callback(enter.remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            stack.enter_context(self)
            yield

    def _leave(self, *_: Any) -> None:
        self._inside.pop()


def _bounded_at_zero(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    low = kwargs.get("min", kwargs.get("min_val", args[1] if len(args) > 1 else None))
    return isinstance(low, (int, float)) and low == 0


@dataclass(frozen=True, eq=False)
class GuidedMaps:
    """Guided gradients of some features with respect to images.

    Attributes:
        maps: one per image, of its shape. units, at: the features and their layer.
        activations: per image the sum of the features over the group and all positions, whose gradient the maps are.
        images: the given images. guided: "path: function" of the activations that pass positive gradients only.
        unguided: activations on the way that are no ReLU; gradients pass them unchanged.
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
        """Why these maps are not guided backpropagation as published, or None."""
        if self.unguided:
            named = ", ".join(dict.fromkeys(self.unguided))
            return f"Guided backpropagation is defined for ReLU; gradients pass other activations unchanged: {named}."
        if not self.guided:
            return f"No activation comes before {self.at!r}, so the maps are plain gradients."
        return None

    def to_dict(self) -> dict[str, Any]:
        """As plain data; of each map only its largest absolute value."""
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
        """The first images, each above its map: grey is zero, and the largest entry of a map has full colour."""
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
    """Gradients of features with respect to images, where every ReLU passes back positive gradients only.

    The features of a group are summed over all positions; other features of the layer do not count. The model runs in
    evaluation mode and is not changed.

    Args:
        model: any network of images. at: a layer, see `intertwine.data.layers`.
        units: the number of one feature (channel), or of all features of a group, such as one that folding merges.
        images: (images, channels, height, width), as the network takes them; other floating-point inputs work too.
        layout: of the features, if it cannot be inferred; see `intertwine.data.layouts`. batch: images at once.

    Raises:
        InputError: an unknown layer or feature, images that are not floating point.

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
    site, shape = read_place(model, at, images, layout)  # in the given network, wrappers included
    model = unwrapped(model)
    chosen = check_units(units, shape.features, at)
    parts: list[tuple[Tensor, Tensor]] = []
    guiding = GuidedMode()
    for some in images.split(batch):
        guiding = GuidedMode()  # every batch runs the same activations
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
    model: nn.Module, site: LayerPath, layout: str, units: Sequence[int], images: Tensor, guiding: GuidedMode
) -> tuple[Tensor, Tensor]:
    """The maps of some images, and the sums whose gradient they are."""
    with torch.inference_mode(False), torch.enable_grad(), frozen([model]):
        ((given,), _) = on_device_of(((images.detach().clone(),), {}), model)
        leaf = given.clone().requires_grad_()
        with guiding.watching(model), _features_at(model, site) as found, suppress(_Stop):
            model(leaf.clone())  # a leaf cannot be changed in place, as a first ReLU may do
        if not found:
            raise InputError(
                f"The forward does not reach {str(site)!r} for these images, although it does for the first."
            )
        sums = arrange(found[0], "structured", layout)[:, list(units)].sum((1, 2))
        if not sums.requires_grad:
            return torch.zeros_like(leaf), sums.detach()
        return torch.autograd.grad(sums.sum(), leaf)[0], sums.detach()


class _Stop(Exception):
    """The layer has run: the rest of the forward is not needed."""


@contextmanager
def _features_at(model: nn.Module, site: LayerPath) -> Iterator[list[Tensor]]:
    """Holds the features at a layer, with their gradients, and stops the forward there."""
    found: list[Tensor] = []
    calls = 0

    def keep(value: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == (site.call or 1):
            found.append(pick(value, site.keys).clone())
            raise _Stop

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep({**dict(enumerate(args)), **kwargs})

    module = modules_of(model)[site.path]
    if site.side == "input":
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = module.register_forward_hook(lambda _module, _args, output: keep(output))
    try:
        yield found
    finally:
        handle.remove()


# -- arguments ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FeatureLayout:
    """The layout of the features at a layer, and their number."""

    layout: str
    features: int


def read_place(model: nn.Module, at: str, images: Tensor, layout: str | None) -> tuple[LayerPath, FeatureLayout]:
    """The one layer of a path, and the layout of its features, from a run on a copy of one image."""
    known = LayoutFinder()
    with known.watching(model):
        found, _ = record(model, ((images[:1].clone(),), {}), layer_paths(model, at), callback=known.observe)
    if len(found) != 1:
        raise InputError(f"{at!r} stands for {len(found)} layers: {', '.join(map(str, found))}. Name one.")
    ((site, tensor),) = found.items()
    layout = layout or known.found[replace(site, call=site.call or 1)]
    return site, FeatureLayout(layout, arrange(tensor, "structured", layout).shape[1])


def check_images(images: Any) -> None:
    """Refuse anything but a batch of images."""
    if isinstance(images, Tensor) and images.dim() > 1 and len(images) and images.is_floating_point():
        return
    kind = f" of {str(images.dtype).removeprefix('torch.')}" if isinstance(images, Tensor) else ""
    raise InputError(
        "Images must be one floating-point tensor (images, channels, height, width), but are "
        f"{kind_of(images)}{kind}. Give at least one image, normalised as the network takes them."
    )


def check_batch(batch: int) -> None:
    """Refuse batches without images."""
    if batch < 1:
        raise InputError(f"batch must be at least 1, but is {batch}.")


def check_units(units: SupportsIndex | Iterable[SupportsIndex], features: int, at: str) -> tuple[int, ...]:
    """The numbers of the features, each once."""
    several = isinstance(units, Iterable) and getattr(units, "ndim", 1) > 0
    try:
        chosen = tuple(index(unit) for unit in cast("Iterable[SupportsIndex]", units if several else (units,)))
    except TypeError as error:
        raise InputError(
            f"units={units!r} names no features at {at!r}. Give the number of one feature, or a list of numbers."
        ) from error
    wrong = [unit for unit in chosen if not 0 <= unit < features]
    if not chosen or wrong or len(set(chosen)) < len(chosen):
        raise InputError(
            f"units={wrong or list(chosen)} is invalid at {at!r}, which has {features} features. Give numbers from 0 "
            f"to {features - 1}, each once."
        )
    return chosen
