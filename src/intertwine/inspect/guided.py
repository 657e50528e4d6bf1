"""Guided backpropagation: which parts of an image drive a feature or a group of features."""

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
from intertwine.stitch.halves import frozen, unwrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ----------------------------------------------------------------------------------------------------
# Guiding: while it is on, ReLU-like activations pass back positive gradients only, however a forward calls them.
#
# Calls are seen where torch hands them out, so `nn.ReLU`, `functional.relu`, `torch.relu` and `x.relu_()` are alike.


#: Activations that pass values from some point on and never turn their sign: gradients through them can be guided.
GUIDED = {"relu", "relu6", "leaky_relu", "prelu", "rrelu"}
#: Activations that guided backpropagation does not speak of; gradients pass them as they are.
UNGUIDED = {
    "gelu", "silu", "sigmoid", "tanh", "elu", "selu", "celu", "softplus", "mish", "hardswish", "hardsigmoid",
    "logsigmoid", "log_sigmoid", "softsign", "tanhshrink", "softshrink", "hardshrink", "threshold", "glu",
    "erf", "maximum", "rnn_relu", "rnn_tanh", "lstm", "gru",
}  # fmt: skip
#: Functions that are a ReLU where they cut at zero and nowhere else; `nn.ReLU6` calls the last.
CLAMPS = {"clamp", "clip", "clamp_min", "hardtanh"}


class GuidedMode(TorchFunctionMode):
    """Guides every activation called inside, and remembers which were guided and which could not be.

    Attributes:
        guided, unguided: "path: name of the function" of every call that gradients go through, in their order.
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
        if name in GUIDED or (name in CLAMPS and _cuts_at_zero(args, given)):
            tensor.register_hook(_positive)
            self.guided.append(self._called(name))
        else:
            self.unguided.append(self._called(name))
        return output

    def _called(self, name: str) -> str:
        path = self._inside[-1] if self._inside else ""
        return f"{path}: {name}" if path else name

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Guiding on, and the path of the module that runs known; every hook is taken off behind."""
        with ExitStack() as stack:
            for path, module in modules_of(model).items():
                stack.callback(module.register_forward_pre_hook(self._enter(path)).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            stack.enter_context(self)
            yield

    def _enter(self, path: str) -> Callable[..., None]:
        return lambda *_: self._inside.append(path)

    def _leave(self, *_: Any) -> None:
        self._inside.pop()


def _positive(gradient: Tensor) -> Tensor:
    return gradient.clamp(min=0)


def _cuts_at_zero(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    low = kwargs.get("min", kwargs.get("min_val", args[1] if len(args) > 1 else None))
    return isinstance(low, (int, float)) and low == 0


# ----------------------------------------------------------------------------------------------------
# Guided backpropagation: what in an image makes one feature, or a group of features, answer (row 003-F26).


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
        model: any network of images. at: a place, see `intertwine.data.layers`.
        units: the number of one feature (channel), or of all features of a group, such as one that folding merges.
        images: (images, channels, height, width), as the network takes them; other inputs of numbers do too.
        layout: of the features, where it is not what it seems; see `intertwine.data.layouts`.
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
    guiding = GuidedMode()
    for some in images.split(batch):
        guiding = GuidedMode()  # every part passes the same activations
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
    """The maps of some images, and the sums they belong to."""
    with torch.inference_mode(False), torch.enable_grad(), frozen([model]):
        ((given,), _) = on_device_of(((images.detach().clone(),), {}), model)
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
def _taken(model: nn.Module, site: LayerPath) -> Iterator[list[Tensor]]:
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
class FeatureLayout:
    """The layout of the features at a place, and how many there are."""

    layout: str
    features: int


def read_place(model: nn.Module, at: str, images: Tensor, layout: str | None) -> tuple[LayerPath, FeatureLayout]:
    """The one place that a path stands for, and what its features look like: a copy of one image is run."""
    known = LayoutFinder()
    with known.watching(model):
        found, _ = record(model, ((images[:1].clone(),), {}), layer_paths(model, at), note=known.note)
    if len(found) != 1:
        raise InputError(
            f"One place was asked for by {at!r}, which stands for {len(found)}: {', '.join(map(str, found))}. Name one."
        )
    ((site, tensor),) = found.items()
    layout = layout or known.found[replace(site, call=site.call or 1)]
    return site, FeatureLayout(layout, arrange(tensor, "structured", layout).shape[1])


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
