"""Fitting an architecture to a data set: the options that its images decide, and a check that it takes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import nn

from intertwine.errors import InputError
from intertwine.zoo.datasets import Dataset
from intertwine.zoo.networks import build
from intertwine.zoo.networks.registry import architecture

HIDDEN = 512  # units of a perceptron whose widths nobody chose


def fitted_options(name: str, options: Mapping[str, Any], data: Dataset) -> dict[str, Any]:
    """The options of a network for these images: channels, classes and size, unless they were given.

    >>> import numpy as np
    >>> pair = np.zeros((5, 8, 8, 1), np.uint8), np.zeros(5, np.int64)
    >>> blank = Dataset.of("blank", pair, pair, [0], [255], ["nothing", "something"])
    >>> fitted_options("mlp", {}, blank)
    {'widths': [64, 512, 2]}
    """
    entry = architecture(name)
    decided: dict[str, Any] = {}
    if "widths" in entry.options and "in_channels" not in entry.options:
        decided["widths"] = [prod(data.shape), HIDDEN, len(data.classes)]
    if data.shape[0] != entry.input_shape[0]:
        decided["in_channels"] = data.shape[0]
    if len(data.classes) != 10:
        decided["classes"] = len(data.classes)
    if data.shape[1:] != entry.input_shape[1:] and data.shape[1] == data.shape[2]:
        decided["side"] = data.shape[1]
    return {k: v for k, v in decided.items() if k in entry.options} | plain_options(options)


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as they are written into a manifest; an activation is given by its name there."""
    plain: dict[str, Any] = {}
    for key, value in options.items():
        try:
            plain[key] = json.loads(json.dumps(value))  # as it will be read again: tuples are lists
        except (TypeError, ValueError) as error:
            raise InputError(
                f"The option {key} was given as {value!r}, which cannot be written into a manifest. Give a name, "
                "numbers or lists of them, or pass a function that builds the whole network instead of an "
                "architecture's name."
            ) from error
    return plain


def checked_factory(name: str, options: Mapping[str, Any], data: Dataset) -> Callable[[], nn.Module]:
    """A function that builds the network, once it was seen to take the images of the data set."""
    factory = lambda: build(name, **options)  # noqa: E731
    check_fits(factory, name, data)
    return factory


def check_fits(factory: Callable[[], nn.Module], name: str, data: Dataset) -> None:
    """Run two images through a network: it must answer with one number per class."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = factory().eval()
        inputs = data.inputs(data.images[:2].cpu())
        size = "×".join(map(str, data.shape))
        try:
            logits = model(inputs)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise InputError(
                f"{name} cannot take the images of {data.name} ({size}): its forward raised {type(error).__name__}: "
                f"{first}. Give it options that fit, or choose another architecture or data set."
            ) from error
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, len(data.classes)):
        found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise InputError(
            f"{name} was asked to tell the {len(data.classes)} classes of {data.name} apart, but answers two images "
            f"with {found} instead of (2, {len(data.classes)}). Give it the number of classes, or another data set."
        )
