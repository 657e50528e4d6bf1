"""Optional model libraries: imported on demand, with torchvision's missing operators declared, and transformers models
built from a configuration.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.checkpoints.inputs import Example
from intertwine.errors import InputError, did_you_mean

# ----------------------------------------------------------------------------------------------------
# Lets torchvision, and timm with it, be imported where torchvision's compiled operators cannot be loaded.
#
# A torchvision wheel built for a GPU installs beside a CPU build of torch, but its compiled library does not load there,
# and the import then stops at `operator torchvision::nms does not exist`. The networks themselves need none of these
# operators, so it is enough to declare the two whose absence stops the import. Calling one still fails, as it should.


SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@functools.cache
def declare_missing_ops() -> torch.library.Library | None:
    """Declare torchvision's operators unless they exist or the real ones load; None if nothing had to be declared.

    The cache keeps the returned library alive: torch withdraws the declarations of a library that is collected.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return None
    if _loads_compiled_ops(Path(spec.origin).parent):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(name + SIGNATURE)
    return library


def _loads_compiled_ops(folder: Path) -> bool:
    """Whether torchvision's compiled library is in `folder` and loads beside this torch."""
    for file in [*folder.glob("_C*.so"), *folder.glob("_C*.pyd")]:
        try:
            torch.ops.load_library(file)
        except (ImportError, OSError):
            continue
        return True
    return False


# ----------------------------------------------------------------------------------------------------
# The optional packages that models come from: imported when asked for, with a way out when one is not installed.


#: Package → the extra of intertwine that installs it.
EXTRAS = {"timm": "timm", "torchvision": "vision", "transformers": "hf"}


def import_library(package: str) -> ModuleType:
    """Import timm, torchvision or transformers."""
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"A model of {package} was asked for, but {package} is not installed. "
            f"Install it: pip install 'intertwine[{EXTRAS[package]}]'."
        )
    declare_missing_ops()
    return importlib.import_module(package)


def unknown_name_error(kind: str, name: str, known: Iterable[str], hint: str) -> InputError:
    """The error for a name that a library does not know, with the names nearest to it."""
    meant = did_you_mean(name, known)
    return InputError(f"{kind} {name!r} was asked for, but there is none of that name. {meant}{hint}")


# ----------------------------------------------------------------------------------------------------
# Models of transformers, built from a configuration alone: a model type, or a config.json. Nothing is downloaded.


TEXT_LENGTH = 16  # length of an example text
SOUND_LENGTH = 8000  # length of an example sound


def from_transformers(name: str) -> tuple[nn.Module, Example | None]:
    """A transformers model as its configuration says, and example inputs of every kind its forward asks for."""
    transformers = import_library("transformers")
    config = _config(transformers, name)
    for part in (config, getattr(config, "text_config", config)):
        if hasattr(part, "use_cache"):
            part.use_cache = False  # a cache is an output of no interest here
    kind = _model_class(transformers, config)
    _check_room(kind, config, name)
    model = _instance(kind, config).float()
    return model, _example(model)


def _config(transformers: ModuleType, name: str) -> Any:
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix != ".json":
        known = transformers.CONFIG_MAPPING
        if name not in known:
            raise unknown_name_error(
                "The transformers model type", name, known.keys(), "Or give the path of a config.json."
            )
        return known[name]()
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"The configuration {path} could not be read: {error}. Give the path of a config.json."
        ) from error
    kind = written.get("model_type") if isinstance(written, dict) else None
    if kind not in transformers.CONFIG_MAPPING:
        raise InputError(
            f"{path} names the model type {kind!r}, which this transformers does not know (code from elsewhere is "
            "never run). Install a transformers that has it, or wrap the model in a file: path/to/file.py:factory."
        )
    return transformers.CONFIG_MAPPING[kind].from_dict(written)


def _model_class(transformers: ModuleType, config: Any) -> Any:
    """The class the configuration names; else the first of the automatic classes that has this type, head included."""
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


def _instance(kind: Any, config: Any) -> nn.Module:
    return kind.from_config(config) if hasattr(kind, "from_config") else kind(config)


def _check_room(kind: Any, config: Any, name: str) -> None:
    """Refuse, before it is built, a model that does not fit into the machine's memory."""
    with torch.device("meta"):
        size = 4 * sum(p.numel() for p in _instance(kind, config).parameters())
    memory = physical_memory()
    if memory is not None and size > memory:
        raise InputError(
            f"hf:{name} needs {size / 1e9:.0f} GB for its weights alone, and this machine has {memory / 1e9:.0f} GB. "
            "Copy its config.json, lower num_hidden_layers (the symmetry of a block does not depend on how many there "
            "are), and pass that file."
        )


def physical_memory() -> int | None:
    """The memory of the machine in bytes, where the system tells."""
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
