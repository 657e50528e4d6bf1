"""Loads a model by name, with its weights and an example of its inputs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from intertwine.checkpoints.inputs import make_inputs
from intertwine.checkpoints.sources import build
from intertwine.checkpoints.weights import fill, read_checkpoint
from intertwine.data.batches import on_device_of
from intertwine.errors import InputError


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode, its name, and the arguments of one call."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def parameters(self) -> int:
        """The number of parameters; tied ones count once."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def bytes(self) -> int:
        """The memory of its parameters and buffers."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The example inputs in words: `float32 1×3×224×224`, `input_ids: int64 1×16`."""
        named = [("", value) for value in self.args] + [(f"{name}: ", value) for name, value in self.kwargs.items()]
        return tuple(lead + _describe(value) for lead, value in named)


#: The advice where a model cannot be called with its example inputs.
OTHER_INPUT = "Pass an input that it accepts, such as --input 1x3x224x224."


def load(name: str, weights: str | Path | None = None, inputs: Sequence[str] = (), advice: str = OTHER_INPUT) -> Loaded:
    """Find, build and fill a model.

    Args:
        name: `path/to/file.py:factory`, `timm:NAME`, `torchvision:NAME`, `hf:CONFIG` (a transformers model type, or
            the path of a config.json) or `zoo:NAME` (see `intertwine.zoo.architectures`). Nothing is downloaded:
            without a checkpoint the weights are random, and the same at every call.
        weights: a checkpoint, as safetensors or as a `torch.save` file that holds tensors and nothing else.
        inputs: example inputs such as `1x3x224x224`, `int:1x16` or `input_ids=int:1x16`. By default they come from the
            library of the model, or from a function `example_inputs()` in the user's file.
        advice: the end of the error where the model cannot be called with them.

    Raises:
        InputError: no such model, file or input. MismatchError: the checkpoint is of another architecture.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, example = build(name)
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
        try:
            with torch.no_grad(), warnings.catch_warnings(action="ignore"):
                loaded.model(*loaded.args, **loaded.kwargs)
        except Exception as error:
            first = str(error).strip().partition("\n")[0].removesuffix(".")
            raise InputError(
                f"The forward of {loaded.name} raises {type(error).__name__} when called with "
                f"{', '.join(loaded.inputs)}: {first}. {advice}"
            ) from error
    return loaded


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} ".removeprefix("torch.") + ("×".join(map(str, value.shape)) or "scalar")
    tensors = [_describe(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return f"{type(value).__name__} of {', '.join(tensors)}" if tensors else repr(value)
