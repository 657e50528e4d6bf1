"""Example inputs written as text: `1x3x224x224`, `int:1x16`, `input_ids=int:1x16`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from intertwine.errors import InputError

Example: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]  # positional and keyword arguments of one call

_FORM = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?:(?P<kind>int|float):)?(?P<sizes>\d+(?:[x×]\d+)*)")


def make_inputs(texts: Sequence[str], model: nn.Module) -> Example:
    """Random tensors of the given shapes; those with a name are passed by keyword."""
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    ids = min((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=2)
    for text in texts:
        form = _FORM.fullmatch(text)
        if form is None:
            raise InputError(
                f"The input {text!r} is not understood. Give its sizes joined by x, such as 1x3x224x224; put int: in "
                "front for integer ids (int:1x16), and NAME= in front of that to pass it by keyword."
            )
        shape = [int(size) for size in re.split("[x×]", form["sizes"])]
        value = torch.randint(0, ids, shape) if form["kind"] == "int" else torch.randn(shape)
        if form["name"]:
            kwargs[form["name"]] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def as_example(value: Any) -> Example:
    """The result of a user's `example_inputs()`: a tensor, a tuple or list, a dict of keywords, or (tuple, dict)."""
    if isinstance(value, Mapping):
        return (), value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(value), {}
    return (value,), {}
