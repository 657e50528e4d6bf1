"""Where models come from: a name in, the model and an example of its inputs out. One function per library."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn

from intertwine.errors import InputError
from intertwine.models.huggingface import from_transformers
from intertwine.models.inputs import Example
from intertwine.models.library import import_library, unknown


def from_timm(name: str) -> tuple[nn.Module, Example | None]:
    """A timm model by its name, and one image of the size it was designed for."""
    timm = import_library("timm")
    if not timm.is_model(name):
        raise unknown("The timm model", name, timm.list_models(), "List them with timm.list_models().")
    with warnings.catch_warnings(action="ignore"):
        model = timm.create_model(name, pretrained=False)
    return model, ((torch.randn(1, *model.default_cfg["input_size"]),), {})


def from_torchvision(name: str) -> tuple[nn.Module, Example | None]:
    """A torchvision model by its name, and one image; a clip of 16 frames for the models of videos."""
    models = import_library("torchvision").models
    if name not in models.list_models():
        raise unknown(
            "The torchvision model", name, models.list_models(), "List them with torchvision.models.list_models()."
        )
    with warnings.catch_warnings(action="ignore"):
        model = models.get_model(name, weights=None)
    if name in models.list_models(module=models.video):
        side = 224 if name.startswith(("mvit", "swin")) else 112
        return model, ((torch.randn(1, 3, 16, side, side),), {})
    side = 299 if name == "inception_v3" else 224
    return model, ((torch.randn(1, 3, side, side),), {})


def from_zoo(name: str) -> tuple[nn.Module, Example | None]:
    """A network of intertwine's own zoo by its name, as it stands without options, and one input of its size."""
    from intertwine.zoo.networks.registry import architecture  # here, because a zoo takes its time to load

    entry = architecture(name)
    return entry.factory(), ((entry.example(),), {})


def from_zoo_folder(folder: str, seed: str) -> tuple[nn.Module, Example | None]:
    """A trained network out of a zoo's folder by its seed, and one image of the size it was trained on."""
    from intertwine.zoo.folder import load

    zoo = load(folder)
    if not seed.isdigit():
        raise InputError(
            f"The network {seed!r} of the zoo {folder} was asked for. Give its seed, such as {folder}:{zoo.seeds[0]}."
        )
    return zoo.seed(int(seed)), ((torch.randn(1, *zoo.manifest.plan.data["shape"]),), {})


#: Prefix of a model's name → the function that builds it.
SOURCES: dict[str, Callable[[str], tuple[nn.Module, Example | None]]] = {
    "timm": from_timm,
    "torchvision": from_torchvision,
    "hf": from_transformers,
    "zoo": from_zoo,
}
