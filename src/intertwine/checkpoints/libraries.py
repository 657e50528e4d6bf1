"""Optional model libraries: imported on demand, with torchvision's missing operators declared, and transformers models
built from a configuration.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.checkpoints.inputs import Example
from intertwine.errors import InputError, did_you_mean

#: Package → the extra of intertwine that installs it.
EXTRAS = {"timm": "timm", "torchvision": "vision", "transformers": "hf"}
TEXT_LENGTH = 16  # length of an example text
SOUND_LENGTH = 8000  # length of an example sound


def import_library(package: str) -> ModuleType:
    """Import timm, torchvision or transformers."""
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{package} is not installed. Install it: pip install 'intertwine[{EXTRAS[package]}]'.")
    declare_missing_ops()
    return importlib.import_module(package)


@functools.cache
def declare_missing_ops() -> torch.library.Library | None:
    """Declare the operators of torchvision without which it cannot be imported; None if that is not needed.

    The compiled library of a torchvision wheel for GPUs does not load beside a CPU build of torch, and the import of
    torchvision, or of timm, then stops at `operator torchvision::nms does not exist`. No network needs these operators;
    calling one still fails. The cache keeps the library alive: torch withdraws the declarations of a collected one.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return None
    folder = Path(spec.origin).parent
    for file in [*folder.glob("_C*.so"), *folder.glob("_C*.pyd")]:
        try:
            torch.ops.load_library(file)
        except (ImportError, OSError):
            continue
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def from_transformers(name: str) -> tuple[nn.Module, Example | None]:
    """A transformers model with random weights from a model type or a config.json, and example inputs for it."""
    transformers = import_library("transformers")
    config = _config(transformers, name)
    for part in (config, getattr(config, "text_config", config)):
        if hasattr(part, "use_cache"):
            part.use_cache = False  # a cache would be one more output
    kind = _model_class(transformers, config)
    build = getattr(kind, "from_config", kind)
    with torch.device("meta"):
        size = 4 * sum(p.numel() for p in build(config).parameters())
    memory = physical_memory()
    if memory is not None and size > memory:
        raise InputError(
            f"hf:{name} needs {size / 1e9:.0f} GB for its weights alone, and this machine has {memory / 1e9:.0f} GB. "
            "Copy its config.json, lower num_hidden_layers (the symmetry of a block does not depend on their number), "
            "and pass that file."
        )
    model = build(config).float()
    return model, _example(model)


def _config(transformers: ModuleType, name: str) -> Any:
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix != ".json":
        known = transformers.CONFIG_MAPPING
        if name not in known:
            raise InputError(
                f"Unknown transformers model type {name!r}. {did_you_mean(name, known.keys())}"
                "Or give the path of a config.json."
            )
        return known[name]()
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}. Give the path of a config.json.") from error
    kind = written.get("model_type") if isinstance(written, dict) else None
    if kind not in transformers.CONFIG_MAPPING:
        raise InputError(
            f"{path} names the model type {kind!r}, which the installed transformers does not know (remote code is "
            "never run). Install a transformers that has it, or wrap the model in a file: path/to/file.py:factory."
        )
    return transformers.CONFIG_MAPPING[kind].from_dict(written)


def _model_class(transformers: ModuleType, config: Any) -> Any:
    """The class that the configuration names, else the first automatic class for its type, preferably with a head."""
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    both = hasattr(config, "text_config") and hasattr(config, "vision_config")
    kinds = ["PreTraining", "SpeechSeq2Seq", "Seq2SeqLM", "CausalLM", "ImageClassification"]
    for auto in ([] if both else [f"AutoModelFor{kind}" for kind in kinds]) + ["AutoModel"]:
        chosen = getattr(transformers, auto)
        if type(config) in chosen._model_mapping:
            return chosen
    raise InputError(
        f"transformers has no model for the type {config.model_type!r}. Give a type that is a model of its own."
    )


def physical_memory() -> int | None:
    """The memory of the machine in bytes; None where the system does not say."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _example(model: Any) -> Example | None:
    config = model.config
    text, vision = getattr(config, "text_config", config), getattr(config, "vision_config", config)
    main = model.main_input_name
    makers = {
        "input_ids": lambda: _words(text),
        "pixel_values": lambda: _image(vision),
        "input_features": lambda: torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions),
        "input_values": lambda: torch.randn(1, SOUND_LENGTH),
    }
    if main not in makers:
        return None
    kwargs = {main: makers[main]()}
    if main == "input_ids" and text is not config and vision is not config and hasattr(config, "projection_dim"):
        kwargs["pixel_values"] = _image(vision)  # two towers, one for words and one for images
    if getattr(config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = _words(text)
    return (), kwargs


def _words(config: Any) -> Tensor:
    length = min(TEXT_LENGTH, getattr(config, "max_position_embeddings", None) or TEXT_LENGTH)
    return torch.randint(min(3, config.vocab_size - 1), config.vocab_size, (1, length))  # above the special tokens


def _image(config: Any) -> Tensor:
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(1, getattr(config, "num_channels", 3), height, width)
