"""From the name of a model to the model itself, with its weights and an example of its inputs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from intertwine.checkpoints.inputs import Example, make_inputs
from intertwine.checkpoints.sources import SOURCES, from_file, from_zoo_folder
from intertwine.checkpoints.weights import fill, read_checkpoint
from intertwine.data.batches import on_device_of
from intertwine.errors import InputError
from intertwine.lab.zoo.manifest import MANIFEST_FILE as MANIFEST
from intertwine.lab.zoo.manifest import read_manifest


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode under the name it was asked for, and an example of what it is called with."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def parameters(self) -> int:
        """How many numbers the model learns; tied weights count once."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def bytes(self) -> int:
        """The memory its parameters and buffers take."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The example inputs in words: `float32 1×3×224×224`, `input_ids: int64 1×16`."""
        named = [("", value) for value in self.args] + [(f"{name}: ", value) for name, value in self.kwargs.items()]
        return tuple(lead + _describe(value) for lead, value in named)


#: What to do where a model cannot be called with its example inputs.
OTHER_INPUT = "Pass an input that it accepts, such as --input 1x3x224x224."


def load(name: str, weights: str | Path | None = None, inputs: Sequence[str] = (), advice: str = OTHER_INPUT) -> Loaded:
    """Find, build and fill a model.

    Args:
        name: `path/to/file.py:factory`, `timm:NAME`, `torchvision:NAME`, `hf:CONFIG` (a transformers model type, or
            the path of a config.json) or `zoo:NAME` (see `intertwine.zoo.architectures`). Nothing is downloaded:
            without a checkpoint the weights are random, and the same at every call.
        weights: a checkpoint, as safetensors or as a `torch.save` file that holds tensors and nothing else.
        inputs: example inputs such as `1x3x224x224`, `int:1x16` or `input_ids=int:1x16`. Left empty, they are found:
            from the library the model comes from, or from a function `example_inputs()` in the user's file.
        advice: what to do where the model cannot be called with them, told at the end of the error.

    Raises:
        InputError: no such model, file or input. MismatchError: the checkpoint is of another architecture.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, example = _build(name)
        if weights is not None:
            fill(model, read_checkpoint(weights), str(weights))
        if inputs:
            example = make_inputs(inputs, model)
        if example is None:
            raise InputError(
                f"No example input is known for {name}. Pass one, such as --input 1x3x224x224 (or --input int:1x16 for "
                "integer ids), or define a function example_inputs() beside the factory."
            )
        loaded = Loaded(name, model.eval(), *on_device_of((example[0], dict(example[1])), model))
        _check_runs(loaded, advice)
    return loaded


def _build(name: str) -> tuple[nn.Module, Example | None]:
    prefix, colon, rest = name.partition(":")
    if colon and prefix in SOURCES:
        return SOURCES[prefix](rest)
    if name.endswith(".py") or name.rpartition(":")[0].endswith(".py"):
        return from_file(name)
    folder, _, seed = name.rpartition(":")
    if folder and (Path(folder) / MANIFEST).is_file():
        return from_zoo_folder(folder, seed)
    if (Path(name) / MANIFEST).is_file():
        seeds = [record.seed for record in read_manifest(Path(name)).records]
        count = f"{len(seeds)} network{'s' * (len(seeds) != 1)}"
        which = f"Write {name.rstrip('/')}:{seeds[0]} for the one of seed {seeds[0]}" if seeds else "Train some first"
        raise InputError(
            f"The model {name!r} was asked for, which is a zoo of {count}. {which}; `intertwine zoo list {name}` shows "
            "what it holds."
        )
    raise InputError(
        f"The model {name!r} was asked for, but a model is named in one of these ways: path/to/file.py:factory, "
        f"{', '.join(f'{source}:NAME' for source in SOURCES)}, ZOO_FOLDER:SEED."
    )


def _check_runs(loaded: Loaded, advice: str) -> None:
    """Call the model once: an input that does not fit is best told now, in the words of its own forward."""
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            loaded.model(*loaded.args, **loaded.kwargs)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{loaded.name} was called with {', '.join(loaded.inputs)}, and its forward raised {type(error).__name__}: "
            f"{first.removesuffix('.')}. {advice}"
        ) from error


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} ".removeprefix("torch.") + ("×".join(map(str, value.shape)) or "scalar")
    tensors = [_describe(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return f"{type(value).__name__} of {', '.join(tensors)}" if tensors else repr(value)
